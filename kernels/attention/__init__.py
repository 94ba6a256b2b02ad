"""Sparse attention over the paged latent records."""

"""Sparse attention on WGMMA (sm_90a): NVFP4 records gathered into bf16 tiles."""

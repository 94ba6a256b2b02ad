"""Fused store of the window KV on a GPU."""

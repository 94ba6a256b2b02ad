"""NVFP4 linear layers on sm_90."""

"""Linear and expert layers that hold NVFP4 weights."""

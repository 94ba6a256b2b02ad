"""Routed experts for few tokens: NVFP4 weights, bfloat16 activations."""

"""NVFP4 linear layers, W4A16 (W4A8 for large batches if asked), in two orders of the weight.

- Triton, sm_90: `packing` (the order), `codes` (to registers), `linear` (few tokens, and which form
  is taken), `dense` (to a matrix for a library's product), `fp8_rows` and `fp8` (that in e4m3).
- CuTeDSL, sm_90 and Blackwell: `records` (the order), `decode` (to registers), `stream` (the main
  loop of a warp), `skinny` and `skinny_plan` (few tokens, and which form is taken), `widen` (to a
  matrix).
"""

"""NVFP4 linear layers on weights in records (CuTeDSL, sm_90 and Blackwell): W4A16, W4A8 if asked.

`records` is the order of the weight, `decode` brings it to registers, `stream` is the main loop of
a warp, `skinny` and `skinny_plan` multiply few tokens and choose the form, `widen` makes a dense
matrix for many. `fp8_rows` and `fp8` multiply that in e4m3 (Triton and cuBLASLt, sm_90).
"""

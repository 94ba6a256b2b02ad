"""y = x W^T of many tokens in FP8 (sm_90): activations and the widened weight in e4m3.

Rows of x carry a scale each, the weight one in all; ``torch._scaled_mm`` multiplies (cuBLASLt with
CUDA 12.9 and later, else CUTLASS) and applies both to the float32 sums. SGLang's
``sgl_kernel.fp8_scaled_mm`` has one form, with the fast accumulation that adds with about 14 bits;
here the sums are promoted to float32 on the way.

Operands are rounded to 4 significant bits. For normal random values activations are off by 2.6% and
weights by 2.1% of their size in the root mean square, the product by 3.4% (computed on a CPU).
"""

import torch
from torch import Tensor

from sglang_dsv4.kernels.linear.fp8_rows import shared_rows

FP8_TOKENS = 512
"""Above it a layer multiplies in FP8 where that is chosen: larger than any decode batch of
SGLang's defaults. No other was timed."""
_ROW_MULTIPLE = 16


def takes(tokens: int, rows: int) -> bool:
    """Whether a product of ``tokens`` tokens and a weight of ``rows`` rows has an FP8 form.

    The library needs [out, in] in multiples of 16; ``in`` of an NVFP4 weight always is.
    """
    return tokens > FP8_TOKENS and rows % _ROW_MULTIPLE == 0


def fp8_product(x: Tensor, weight: Tensor, outer: Tensor) -> Tensor:
    """x W^T with a dense e4m3 weight.

    Args:
        x: bfloat16 [T, in], the last axis contiguous.
        weight: float8_e4m3fn [out, in], both multiples of 16.
        outer: float32 [out], the factor of each output's float32 sums.

    Returns:
        bfloat16 [T, out]; a row of x with a NaN or an infinity gives NaN.
    """
    rows, scale = shared_rows(x)
    return torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=scale[:, None],
        scale_b=outer[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )

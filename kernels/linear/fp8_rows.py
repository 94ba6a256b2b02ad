"""Rows of activations to e4m3 with a scale each (Triton): the left operand of an FP8 product.

2 bytes read and 1 written a value, a pass: the copy rate. SGLang's ``per_token_quant_fp8`` and the
others at hand clamp a NaN to 448, so that a broken row would look sound; here its scale is NaN, and
with it every output of the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(2.0**-100)
_NOT_FINITE = tl.constexpr(0x7F80)
_WARPS = 8
_KEPT = "_fp8_rows"


@triton.jit
def _larger(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right)


@triton.jit
def _quantize(
    x: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    bits = tl.load(x + row * stride + column, mask=column < width, other=0.0)
    bits = bits.to(tl.int16, bitcast=True).to(tl.int32)
    # Magnitudes of bfloat16 are ordered as integers: finite, infinite, NaN.
    largest = tl.reduce(bits & 0x7FFF, 0, _larger)
    finite = largest < _NOT_FINITE
    amax = tl.maximum((largest << 16).to(tl.float32, bitcast=True), _SMALLEST)
    factor = tl.where(finite, tl.div_rn(_LARGEST, amax), 0.0)
    tl.store(scale + row, tl.where(finite, tl.div_rn(amax, _LARGEST), float("nan")))
    value = (bits << 16).to(tl.float32, bitcast=True)
    value = tl.where(finite, value * factor, 0.0)
    # The factor was rounded: the largest value may come out above 448.
    value = tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=column < width)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``reference.fp8.quantize_rows`` of bfloat16 rows.

    Args:
        x: bfloat16 [T, n], the last axis contiguous.

    Returns:
        (float8_e4m3fn [T, n], float32 [T]).
    """
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _quantize[(rows,)](
            x,
            out,
            scale,
            width,
            x.stride(0),
            BLOCK=triton.next_power_of_2(width),
            num_warps=_WARPS,
        )
    return out, scale


def shared_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` of x, made once and kept with it for the other layers that take it.

    Nothing may write to x in between: an inference tensor does not count its changes. Nothing is
    kept while a CUDA graph is captured, whose branches do not wait for each other.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return quantize_rows(x)
    kept: tuple[Tensor, Tensor] | None = getattr(x, _KEPT, None)
    if kept is None:
        kept = quantize_rows(x)
        setattr(x, _KEPT, kept)
    return kept

"""A packed NVFP4 weight to a dense matrix (Triton, sm_90), for a library's product.

bfloat16: rounded once, ``scale_2`` included; 2.5625 bytes a value. e4m3: e2m1 * block scale / 8,
rounded as ``reference.fp8.widen_weight`` says; 1.5625 bytes a value.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dsv4.kernels.linear.codes import UNDO, values
from sglang_dsv4.kernels.linear.packing import BLOCK

FP8_OUTER = 8.0
"""What an e4m3 weight is to be multiplied by, beside ``scale_2``."""

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ROWS = 16
_FP8_FACTOR = tl.constexpr(2.0**4)


@triton.jit
def _widen(
    weight: tl.tensor,
    scale: tl.tensor,
    scale_2: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    block = tl.program_id(1)
    mask = (row < rows)[:, None]
    half = tl.arange(0, 64)[None, :]
    group = tl.arange(0, 4)[None, :]
    codes = tl.load(weight + row[:, None] * (blocks * 64) + block * 64 + half, mask=mask, other=0)
    place = scale + row[:, None] * (blocks * 8) + block * 8 + group
    scale_low = tl.load(place, mask=mask, other=0.0)
    scale_high = tl.load(place + 4, mask=mask, other=0.0)
    low, high = values(codes, scale_low, scale_high, ROWS, INTERPRETED)
    factor = _FP8_FACTOR if FP8 else tl.load(scale_2) * UNDO
    low, high = low.to(tl.float32) * factor, high.to(tl.float32) * factor
    target = out + row[:, None] * (blocks * 128) + block * 128 + half
    tl.store(target, low.to(out.dtype.element_ty), mask=mask)
    tl.store(target + 64, high.to(out.dtype.element_ty), mask=mask)


def widen(weight: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """The weight in bfloat16.

    Args:
        weight: uint8 [out, blocks * 64], scale: float8_e4m3fn [out, blocks * 8] by
            ``packing.pack_weight``.
        scale_2: float32 [1].

    Returns:
        bfloat16 [out, blocks * 128].
    """
    return _launch(weight, scale, scale_2, torch.bfloat16)


def widen_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """The weight over ``scale_2 * FP8_OUTER`` in e4m3.

    Args:
        weight, scale: as ``widen``.

    Returns:
        float8_e4m3fn [out, blocks * 128].
    """
    return _launch(weight, scale, None, torch.float8_e4m3fn)


def _launch(weight: Tensor, scale: Tensor, scale_2: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, blocks = weight.shape[0], weight.shape[1] // (BLOCK // 2)
    out = torch.empty((rows, blocks * BLOCK), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(rows, _ROWS), blocks)
    _widen[grid](
        weight,
        scale,
        scale_2,
        out,
        rows,
        blocks,
        ROWS=_ROWS,
        FP8=scale_2 is None,
        INTERPRETED=_INTERPRETED,
    )
    return out

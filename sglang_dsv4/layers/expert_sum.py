"""Routed experts and the shared one added up, in one launch.

bfloat16 in and out; 2 (k + 2) T D bytes, so at decode a launch's latency, at prefill the copy rate.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _sum(
    parts: tl.tensor,
    shared: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        row = (token * PARTS + part) * width
        total += tl.load(parts + row + column, mask=there, other=0.0).to(tl.float32)
    # Rounded as the experts' own sum, which other kernels write before the shared one is added.
    total = total.to(out.dtype.element_ty).to(tl.float32)
    total += tl.load(shared + token * width + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=there)


def expert_sum(parts: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Sum of a token's weighted experts in float32, rounded; plus the shared expert, rounded.

    Args:
        parts: [T, k, D], contiguous.
        shared: [T, D], contiguous, of the same dtype.

    Returns:
        [T, D].
    """
    tokens, count, width = parts.shape
    out = torch.empty_like(shared)
    if tokens:
        grid = (tokens, triton.cdiv(width, _BLOCK))
        _sum[grid](parts, shared, out, width, PARTS=count, BLOCK=_BLOCK)
    return out

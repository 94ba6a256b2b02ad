"""Routed experts of a large prefill on sm_90: widened in parts, then a dense product.

A kernel for few rows widens a weight anew for every block of them; with hundreds of rows an expert
the product is faster on dense weights. The 4-bit weights stay the only copy that lasts:
``EXPERTS_SCRATCH`` bytes of experts at a time are widened into scratch and multiplied by
``expert_products``. Widening within the product's loop took more than twice as long.

In FP8 (``prefill_precision``) activations and SwiGLU's results are rounded to e4m3 with a scale for
each row, and ``grouped_fp8`` multiplies.
"""

from collections.abc import Iterator

import torch

from sglang_dsv4.kernels.linear.fp8_rows import quantize_rows, shared_rows
from sglang_dsv4.layers.expert_products import Source, clear, multiply, row_blocks
from sglang_dsv4.layers.expert_rows import (
    gathered_rows,
    sort_slots,
    sum_rows,
    weighted_factors,
)
from sglang_dsv4.layers.weight_kernels import EXPERTS_SCRATCH

ROWS_WORTH = {False: 288, True: 144}
"""Rows an expert, on average, from which on this is taken instead of ``kernels.experts``; by
whether it is in FP8. On an H200 with V4-Flash's shapes it was slower at 96 rows and faster at 192
in FP8, slower at 192 and faster at 384 in bfloat16; straight lines cross at 130 and 262."""


def worthwhile(ids: torch.Tensor, experts: int, fp8: bool) -> bool:
    """Whether a batch [T, k] is large enough, and the GPU the one this is made for."""
    if ids.numel() < ROWS_WORTH[fp8] * experts or not ids.is_cuda:
        return False
    return torch.cuda.get_device_capability(ids.device) == (9, 0)


def _scratch(w13: Source, w2: Source, dtype: torch.dtype) -> torch.Tensor:
    """Room for a part of the experts of either matrix, one at least."""
    largest = max(w13.outputs * w13.inputs, w2.outputs * w2.inputs)
    part = max(EXPERTS_SCRATCH // (dtype.itemsize * largest), 1)
    size = min(part, w13.experts) * largest
    return torch.empty(size, dtype=dtype, device=w13.outer.device)


def _widened(matrix: Source, scratch: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of about one size: each part's first expert, and its weights [parts, out, in]."""
    size = matrix.outputs * matrix.inputs
    parts = -(-matrix.experts * size // scratch.numel())
    held = -(-matrix.experts // parts)
    for first in range(0, matrix.experts, held):
        count = min(held, matrix.experts - first)
        weight = scratch[: count * size].view(count, matrix.outputs, matrix.inputs)
        matrix.widen(weight, first)
        yield first, weight


def products(
    x: torch.Tensor,
    w13: Source,
    w2: Source,
    routed: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Each token's chosen experts, weighted after the down projection: [T, k, D].

    Args:
        x: bfloat16 [T, D], contiguous.
        w13: gate and up, gate rows first; w2: the down projection. Both widen to bfloat16.
        routed: float32 [T, k], the router's weights.
        ids: int32 [T, k], in [0, E) or -1.
        limit: ``swiglu_limit``; None clamps nothing.
    """
    blocks = row_blocks(ids, w13.experts)
    hidden = x.new_empty(routed.numel(), w2.inputs)
    out = x.new_empty(routed.numel(), w2.outputs)
    scratch = _scratch(w13, w2, x.dtype)
    for gated, matrix, rows, target in ((True, w13, x, hidden), (False, w2, hidden, out)):
        factor = (matrix.outer, matrix.undo)
        for first, weight in _widened(matrix, scratch):
            multiply(rows, weight, *factor, routed, blocks, target, first, limit, gated)
    clear(blocks, out)
    return out.view(*routed.shape, -1)


def products_fp8(
    x: torch.Tensor,
    w13: Source,
    w2: Source,
    routed: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """As ``products`` of matrices that widen to e4m3, in FP8 and added up: [T, D].

    The width of the experts is a multiple of 16.
    """
    from sglang_dsv4.layers.grouped_fp8 import down, gate_up

    order, top_k = sort_slots(ids, w13.experts), ids.shape[1]
    scratch = _scratch(w13, w2, torch.float8_e4m3fn)
    rows, scale = shared_rows(x)
    tokens, factor, places = gathered_rows(order, scale, w13.outer, w13.undo, top_k)
    hidden = x.new_empty(routed.numel(), w2.inputs)
    for first, weight in _widened(w13, scratch):
        starts = order.starts[first : first + len(weight) + 1]
        gate_up(rows, weight, starts, tokens, factor, limit, hidden)
    rows, scale = quantize_rows(hidden)
    factor = weighted_factors(order, scale, w2.outer, w2.undo, routed)
    out = x.new_empty(routed.numel(), w2.outputs)
    for first, weight in _widened(w2, scratch):
        down(rows, weight, order.starts[first : first + len(weight) + 1], factor, out)
    return sum_rows(out, places, top_k)

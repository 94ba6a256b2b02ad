"""Rows of chosen experts, sorted by expert (Triton): where they are, their factors, their sum.

A slot is token * k + choice. Slots without an expert (-1) come first: their rows are no expert's,
nothing computes them, and what stands in them is never read into a result.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_ROWS, _BLOCK = 256, 1024


class Order(NamedTuple):
    """Slots by expert, an expert's in any order: a row's result does not depend on its place.

    ``slots`` int32 [T k]: each row's slot. ``experts`` int32 [T k]: its expert, -1 for none.
    ``starts`` int32 [E + 1]: each expert's first row, and the end of the last's.
    """

    slots: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor


def sort_slots(ids: torch.Tensor, experts: int) -> Order:
    """The order of ``ids`` int32 [T, k], in [0, experts) or -1. Nothing is copied to the host."""
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size

    bucket = ids.flatten().long() + 1
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, bucket, torch.ones_like(bucket, dtype=torch.int32))
    starts = torch.cumsum(counts, 0, dtype=torch.int32)
    slots, owners, _ = moe_align_block_size(ids, 1, experts, return_inactive_prefix_count=True)
    return Order(slots[: ids.numel()], owners[: ids.numel()], starts)


@triton.jit(do_not_specialize=["rows"])
def _gathered(
    slots: tl.tensor,
    experts: tl.tensor,
    scale: tl.tensor,
    outer: tl.tensor,
    tokens: tl.tensor,
    factor: tl.tensor,
    places: tl.tensor,
    rows: tl.tensor,
    UNDO: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    slot = tl.load(slots + row, mask=there, other=0)
    expert = tl.load(experts + row, mask=there, other=0)
    owned = expert >= 0
    token = slot // TOP_K
    value = tl.load(outer + tl.where(owned, expert, 0)).to(tl.float32) * UNDO
    value *= tl.load(scale + token, mask=there)
    tl.store(tokens + row, token, mask=there)
    tl.store(factor + row, value, mask=there)
    tl.store(places + slot, tl.where(owned, row, -1), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _weighted(
    slots: tl.tensor,
    experts: tl.tensor,
    scale: tl.tensor,
    outer: tl.tensor,
    routed: tl.tensor,
    factor: tl.tensor,
    rows: tl.tensor,
    UNDO: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    slot = tl.load(slots + row, mask=there, other=0)
    expert = tl.load(experts + row, mask=there, other=0)
    value = tl.load(outer + tl.where(expert < 0, 0, expert)).to(tl.float32) * UNDO
    value *= tl.load(scale + row, mask=there)
    value *= tl.load(routed + slot, mask=there).to(tl.float32)
    tl.store(factor + row, value, mask=there)


@triton.jit
def _sum(
    parts: tl.tensor,
    places: tl.tensor,
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
        row = tl.load(places + token * PARTS + part).to(tl.int64)
        mask = there & (row >= 0)
        total += tl.load(parts + row * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=there)


def gathered_rows(
    order: Order, scale: torch.Tensor, outer: torch.Tensor, undo: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the rows of gate and up are made of.

    Args:
        scale: float32 [T], of each token's activations.
        outer: float [E]; with ``undo``, a power of two, the factor of an expert's float32 sums.

    Returns:
        tokens int32 [T k] and factor float32 [T k] of each row, also of those without an expert;
        places int32 [T k], each slot's row, -1 for no expert.
    """
    tokens, places = torch.empty_like(order.slots), torch.empty_like(order.slots)
    rows = len(order.slots)
    factor = torch.empty(rows, dtype=torch.float32, device=scale.device)
    _gathered[(triton.cdiv(rows, _ROWS),)](
        order.slots,
        order.experts,
        scale,
        outer,
        tokens,
        factor,
        places,
        rows,
        UNDO=undo,
        TOP_K=top_k,
        ROWS=_ROWS,
    )
    return tokens, factor, places


def weighted_factors(
    order: Order, scale: torch.Tensor, outer: torch.Tensor, undo: float, routed: torch.Tensor
) -> torch.Tensor:
    """Factors float32 [T k] of the down projection's rows; of a row without an expert any number.

    Args: scale: float32 [T k], of each row; routed: float [T, k], contiguous, the router's weights;
    the rest as for ``gathered_rows``.
    """
    rows = len(order.slots)
    factor = torch.empty_like(scale)
    _weighted[(triton.cdiv(rows, _ROWS),)](
        order.slots,
        order.experts,
        scale,
        outer,
        routed,
        factor,
        rows,
        UNDO=undo,
        ROWS=_ROWS,
    )
    return factor


def sum_rows(parts: torch.Tensor, places: torch.Tensor, top_k: int) -> torch.Tensor:
    """Each token's rows of ``parts`` [T k, D] at ``places`` [T k], added up in float32: [T, D].

    In the order of its choices; rounded once, to the dtype of ``parts``.
    """
    width = parts.shape[1]
    out = parts.new_empty(len(places) // top_k, width)
    grid = (len(out), triton.cdiv(width, _BLOCK))
    _sum[grid](parts, places, out, width, PARTS=top_k, BLOCK=_BLOCK)
    return out

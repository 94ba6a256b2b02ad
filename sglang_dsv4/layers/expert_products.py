"""Grouped products of routed experts on sm_90: slots sorted by expert, then a kernel with TMA.

Operands are bfloat16 (``grouped_fp8`` multiplies in FP8). A weight is right but for a power of two
and its expert's outer scale, which are applied to the float32 sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang_dsv4.kernels.hardware import num_sms

BLOCK_ROWS = 128
_DEPTH, _GROUP = 64, 8


class Blocks(NamedTuple):
    """Slots (token * k + choice) by expert, each expert's rounded up to ``BLOCK_ROWS``.

    ``rows`` int32 [blocks * BLOCK_ROWS], the number of slots or more where there is none;
    ``experts`` int32 [blocks], ascending; ``starts`` int32 [E + 1], each expert's first block,
    after the blocks of the slots without an expert.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class Source:
    """One matrix of each expert, held in four bits in an order of its own.

    Attributes:
        outer: float [E], any float dtype; with ``undo`` the factor of the float32 sums.
        undo: what the widened weights and ``outer`` have been divided by.
        widen: called with (out, first), fills ``out`` [parts, outputs, inputs] with the experts
            from ``first`` on. Its dtype is the one that ``undo`` goes with.
    """

    experts: int
    outputs: int
    inputs: int
    outer: torch.Tensor
    undo: float
    widen: Callable[[torch.Tensor, int], None]


@triton.jit(do_not_specialize=["first", "last", "slots"])
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    outer: tl.tensor,
    routed: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    slots: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    limit: tl.tensor,
    UNDO: tl.constexpr,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Row blocks of experts [first, last), whose weights are ``weight`` [(last - first) N, inputs].

    GATED: N is gate and up of ``outputs`` each, ``out`` their SwiGLU, x has a row for each token.
    Otherwise N = outputs, x has a row for each slot, and ``out`` is weighted by ``routed``.
    """
    begin = tl.load(starts + first)
    blocks = tl.load(starts + last) - begin
    columns = (outputs + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), blocks * columns, PROGRAMS):
        # Neighbours in time share rows and weights in the L2 cache.
        group = tile // (GROUP * columns)
        height = tl.minimum(blocks - group * GROUP, GROUP)
        inner = tile % (GROUP * columns)
        block = begin + group * GROUP + inner % height
        column = inner // height * COLUMNS
        expert = tl.load(experts + block)
        slot = tl.load(rows + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = slot < slots
        row = tl.where(there, slot // TOP_K if GATED else slot, 0)
        source = x + row[:, None] * inputs + tl.arange(0, DEPTH)[None, :]
        base = (expert - first) * (outputs * 2 if GATED else outputs) + column
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        up = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for depth in range(0, inputs, DEPTH):
            left = tl.load(source)
            right = weight.load([base, depth]).T
            total = tl.dot(left, right, total)
            if GATED:
                right = weight.load([base + outputs, depth]).T
                up = tl.dot(left, right, up)
            source += DEPTH
        factor = tl.load(outer + expert).to(tl.float32) * UNDO
        if GATED:
            total = total * factor
            up = up * factor
            # A NaN stays one: minimum and maximum would return the limit.
            total = tl.where(total > limit, limit, total)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            total = total / (1.0 + tl.exp(-total)) * up
        else:
            weighted = tl.load(routed + slot, mask=there, other=0.0).to(tl.float32)
            total *= (weighted * factor)[:, None]
        place = column + tl.arange(0, COLUMNS)
        target = out + slot[:, None] * outputs + place[None, :]
        mask = there[:, None] & (place < outputs)[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots"])
def _clear(
    rows: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    for row in range(tl.program_id(0), tl.load(starts) * ROWS, PROGRAMS):
        slot = tl.load(rows + row).to(tl.int64)
        if slot < slots:
            for begin in range(0, width, BLOCK):
                place = begin + tl.arange(0, BLOCK)
                zeros = tl.full((BLOCK,), 0.0, out.dtype.element_ty)
                tl.store(out + slot * width + place, zeros, mask=place < width)


def row_blocks(ids: torch.Tensor, experts: int) -> Blocks:
    """The blocks of ``ids`` int32 [T, k], in [0, experts) or -1. Nothing is copied to the host."""
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size

    bucket = ids.flatten().long() + 1
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, bucket, torch.ones_like(bucket, dtype=torch.int32))
    starts = torch.cumsum((counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0, dtype=torch.int32)
    rows, owners, _ = moe_align_block_size(
        ids, BLOCK_ROWS, experts, return_inactive_prefix_count=True
    )
    return Blocks(rows, owners, starts)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    outer: torch.Tensor,
    undo: float,
    routed: torch.Tensor,
    blocks: Blocks,
    out: torch.Tensor,
    first: int,
    limit: float | None = None,
    gated: bool = False,
) -> None:
    """Products of experts first .. first + parts; each writes the slots of its experts.

    Args:
        x: bfloat16 [T, in] if gated, else [T * k, in], contiguous.
        weight: bfloat16 [parts, N, in]; N = 2 I of gate and up if gated, else the width of out.
            in is a multiple of 64.
        outer: float [E], of all experts; with ``undo`` the factor of the float32 sums.
        routed: float [T, k], the weights of the result unless gated.
        out: [T * k, I] the clamped SwiGLU if gated, else [T * k, N].
        limit: ``swiglu_limit``; None clamps nothing.
    """
    experts, outputs, inputs = weight.shape
    columns = 128 if gated else 256
    programs = num_sms(x.device.index)
    _multiply[(programs,)](
        x,
        TensorDescriptor.from_tensor(weight.view(-1, inputs), [columns, _DEPTH]),
        outer,
        routed,
        blocks.rows,
        blocks.experts,
        blocks.starts,
        out,
        first,
        first + experts,
        routed.numel(),
        outputs // 2 if gated else outputs,
        inputs,
        float("inf") if limit is None else limit,
        UNDO=undo,
        GATED=gated,
        TOP_K=routed.shape[1],
        PROGRAMS=programs,
        ROWS=BLOCK_ROWS,
        COLUMNS=columns,
        DEPTH=_DEPTH,
        GROUP=_GROUP,
        num_warps=8,
        num_stages=4,
    )


def clear(blocks: Blocks, out: torch.Tensor) -> None:
    """Zeros in ``out`` [T * k, D] for the slots without an expert."""
    slots, width = out.shape
    programs = num_sms(out.device.index)
    _clear[(programs,)](
        blocks.rows,
        blocks.starts,
        out,
        slots,
        width,
        PROGRAMS=programs,
        ROWS=BLOCK_ROWS,
        BLOCK=1024,
    )

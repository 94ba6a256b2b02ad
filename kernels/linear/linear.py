"""y = x W^T with an NVFP4 weight, W4A16, for sm_90 (Triton).

Few tokens (decode): one launch streams the packed weight once. A block of weight rows is the
left operand of the matrix instruction, decoded in registers; the tokens are the right one, so that
1 token costs what 16 cost. Where the output has too few rows to fill the GPU, blocks share the
columns and the last of them to arrive adds the parts in a fixed order: the same bits every time.
Bytes: 0.5625 out * in + 2 T (in + out); at 64 tokens the weight is all that counts. On an H200,
L2-cold, [32768, 1024] takes 16 us at 1 and at 16 tokens (bytes: 4.5), [1536, 4096] 7.6 and 8.4 us
(0.8). A tile is decoded between its load and its product, and Triton overlaps loads only: not seen
in a profile, but three tiles in flight are no slower than five, so it is not the loads that are
waited for.

Many tokens (prefill): the weight is widened to a bfloat16 scratch matrix, 2.5 bytes a value, and
multiplied by cuBLAS; 2 T out in flops at the bfloat16 rate. [4096, 4096] takes 13 us to widen, 355
us in all at 8192 tokens; the layers of V4-Flash are faster so from 128 tokens on (161 us, 190 by
the kernel for few tokens).

e2m1 * e4m3 has six significant bits and is exact in bfloat16. With few tokens ``scale_2``
multiplies the float32 sum; with many it is part of the widened weight, which is rounded to
bfloat16 once.
"""

import functools
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sglang_dsv4.kernels.hardware import num_sms
from sglang_dsv4.kernels.linear.codes import UNDO, values
from sglang_dsv4.kernels.linear.dense import widen
from sglang_dsv4.kernels.linear.packing import BLOCK

MANY_TOKENS = 64
"""Above it the weight is widened first."""

MOST_SPLITS = 16
"""Blocks that share the columns of one tile at most."""
BLOCKS_PER_SM = 2.0
"""Blocks wanted for each multiprocessor before no more share a tile."""
TALL_TILES = 0.25
"""Tiles of 128 rows for each multiprocessor from which on tiles are that tall, else 64."""
TALL_WARPS = 4
"""Warps of a block of 128 rows; one of 64 has 4."""
STAGES = 3
"""Tiles in flight."""

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit(do_not_specialize=["tokens"])
def _few(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    scale_2: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    blocks: tl.tensor,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    tile, split = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row = tile * ROWS + tl.arange(0, ROWS)
    # Rows beyond the last read the last one; they are not stored.
    source = tl.minimum(row, rows - 1).to(tl.int64)[:, None]
    half = tl.arange(0, 64)[None, :]
    weights = weight + source * (blocks * 64) + half
    scales = scale + source * (blocks * 8) + tl.arange(0, 4)[None, :]
    inputs = x + token[:, None].to(tl.int64) * x_stride + half
    known = token[:, None] < tokens
    total = tl.full((ROWS, TOKENS), 0.0, tl.float32)
    first, last = blocks * split // SPLITS, blocks * (split + 1) // SPLITS
    for block in tl.range(first, last, num_stages=STAGES):
        codes = tl.load(weights + block * 64)
        scale_low = tl.load(scales + block * 8)
        scale_high = tl.load(scales + block * 8 + 4)
        column = block * 128 + half
        x_low = tl.load(inputs + block * 128, mask=known & (column < width), other=0.0)
        x_high = tl.load(inputs + block * 128 + 64, mask=known & (column + 64 < width), other=0.0)
        low, high = values(codes, scale_low, scale_high, ROWS, INTERPRETED)
        if INTERPRETED:
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        total = tl.dot(low, tl.trans(x_low), total)
        total = tl.dot(high, tl.trans(x_high), total)
    factor = tl.load(scale_2) * UNDO
    offset = token[None, :].to(tl.int64) * rows + row[:, None]
    mask = (row < rows)[:, None] & (token[None, :] < tokens)
    if SPLITS == 1:
        tl.store(out + offset, (total * factor).to(out.dtype.element_ty), mask=mask)
    else:
        share = tokens.to(tl.int64) * rows
        tl.store(parts + split * share + offset, total, mask=mask, cache_modifier=".cg")
        tl.debug_barrier()
        place = arrived + tl.program_id(2) * tl.num_programs(0) + tile
        before = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            tl.debug_barrier()
            total = tl.full((ROWS, TOKENS), 0.0, tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(
                    parts + other * share + offset, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + offset, (total * factor).to(out.dtype.element_ty), mask=mask)
            tl.store(place, 0)


@dataclass(frozen=True)
class Plan:
    """How the kernel for few tokens is launched.

    Attributes:
        rows: weight rows of a block.
        tokens: tokens of a block.
        splits: blocks that share the columns.
        warps: warps of a block.
        stages: tiles in flight.
    """

    rows: int
    tokens: int
    splits: int
    warps: int
    stages: int


@functools.cache
def few_plan(tokens: int, rows: int, blocks: int, sms: int) -> Plan:
    """The launch for ``tokens`` tokens and a weight of ``rows`` rows and ``blocks`` column blocks.

    Columns are shared until each of ``sms`` multiprocessors has its blocks; a share has at least
    two column blocks.
    """
    tile = min(64, max(16, triton.next_power_of_2(tokens)))
    groups = triton.cdiv(tokens, tile)
    tall = triton.cdiv(rows, 128) * groups >= TALL_TILES * sms
    size = 128 if tall else 64
    tiles = triton.cdiv(rows, size) * groups
    splits = 1
    while splits < MOST_SPLITS and splits * tiles < BLOCKS_PER_SM * sms and splits * 4 <= blocks:
        splits *= 2
    return Plan(size, tile, splits, TALL_WARPS if tall else 4, STAGES)


def counters(rows: int, device: torch.device) -> Tensor:
    """Zeroed int32 counters of a layer of ``rows`` rows; the kernel leaves them at zero."""
    return torch.zeros(
        triton.cdiv(rows, 64) * triton.cdiv(MANY_TOKENS, 16), dtype=torch.int32, device=device
    )


def nvfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, scale_2: Tensor, arrived: Tensor
) -> Tensor:
    """x W^T.

    Args:
        x: bfloat16 [T, in], the last axis contiguous.
        weight: uint8 [out, blocks * 64], scale: float8_e4m3fn [out, blocks * 8] by
            ``packing.pack_weight``; blocks = ceil(in / 128).
        scale_2: float32 [1].
        arrived: ``counters`` of this layer; calls that share them may not overlap.

    Returns:
        bfloat16 [T, out].
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, rows, blocks = x.shape[0], weight.shape[0], weight.shape[1] // (BLOCK // 2)
    if tokens > MANY_TOKENS:
        return F.linear(x, widen(weight, scale, scale_2)[:, : x.shape[1]])
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    plan = few_plan(tokens, rows, blocks, num_sms(x.device.index or 0))
    launch_few(plan, x, weight, scale, scale_2, arrived, out)
    return out


def launch_few(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    arrived: Tensor,
    out: Tensor,
) -> None:
    """The kernel for up to ``MANY_TOKENS`` tokens, by ``plan``; the rest as ``nvfp4_linear``."""
    tokens, rows, blocks = x.shape[0], weight.shape[0], weight.shape[1] // (BLOCK // 2)
    parts = out
    if plan.splits > 1:
        parts = torch.empty((plan.splits, tokens, rows), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, plan.rows), plan.splits, triton.cdiv(tokens, plan.tokens))
    _few[grid](
        x,
        weight,
        scale,
        scale_2,
        out,
        parts,
        arrived,
        tokens,
        rows,
        x.shape[1],
        x.stride(0),
        blocks,
        SPLITS=plan.splits,
        ROWS=plan.rows,
        TOKENS=plan.tokens,
        STAGES=plan.stages,
        INTERPRETED=_INTERPRETED,
        num_warps=plan.warps,
    )

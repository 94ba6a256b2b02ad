"""How the kernel for few tokens is laid out over the GPU: static shapes, and which to take when.

The rules follow counts of bytes and of instructions. Constants of the staged launches were set by
timings on an H200, after which no launch was timed on its own again; the plans that they make
passed the kernel's tests and served there.
"""

import functools
import itertools
from dataclasses import dataclass

from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.linear.records import COLUMNS, ROWS
from sglang_dsv4.kernels.linear.stream import BATCH, StreamShape

WARPS = 8
THREADS = 32 * WARPS
RESERVED_BYTES = 1024
"""Shared memory of each block that the driver keeps for itself."""
# Shared memory of a block: a flag, mbarriers of the staged chunks, the warps' own, staged tokens.
READY_OFFSET = 64
WARPS_OFFSET = 128

STAGED_FROM = 17
"""Tokens from which on a block keeps its tokens in shared memory.

For each record of 16 rows a warp reads 576 bytes of weight and 1 KB a tile of 8 tokens. Straight
from L1 the latter moves 16 of each 32 bytes at a time; from shared memory all of them.
"""
STAGED_COLUMNS = (1024, 512, 256)
STAGED_STAGES = 2
"""Places of a warp's ring where tokens are staged."""
ROUND_BYTES = 65536
"""What a round of blocks costs beside its bytes, in bytes."""
PARTS_AT_ONCE = 1.5
"""Parts of a tile that are added at the cost of one."""
SPLIT_BELOW = 0.5
"""Blocks for each multiprocessor below which blocks share columns."""
FULL = 0.9
"""Part of the places for blocks that has to be taken for a round to count as full."""
BLOCKS = {(1, 1): 4, (1, 2): 2, (2, 1): 2, (2, 2): 2}
"""Row and token tiles of a warp -> blocks of a multiprocessor, where tokens are not staged."""


@dataclass(frozen=True)
class SkinnyShape:
    """Static shape.

    Attributes:
        stream: what a warp multiplies.
        row_warps: 1, 2, 4 or 8: warps of a block with rows of their own; the others share columns.
        shared: whether blocks share columns.
        blocks: blocks of an SM, for which registers are limited.
    """

    stream: StreamShape
    row_warps: int
    shared: bool
    blocks: int

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return ROWS * self.stream.row_tiles * self.row_warps

    @property
    def tile_offset(self) -> int:
        """Where the staged tokens begin in shared memory."""
        return WARPS_OFFSET + WARPS * self.stream.warp_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        staged = 8 * self.stream.token_tiles * self.stream.token_bytes
        return self.tile_offset + (staged if self.stream.staged else 0)


@dataclass(frozen=True)
class SkinnyPlan:
    """A launch.

    Attributes:
        shape: static shape.
        splits: blocks that share columns; more than 1 only where shape.shared.
    """

    shape: SkinnyShape
    splits: int

    def part_floats(self, down: int) -> int:
        """Float32 of scratch for ``down`` rows of records."""
        if not self.shape.shared:
            return 1
        groups = -(-down * ROWS // self.shape.rows)
        return groups * self.splits * self.shape.rows * 8 * self.shape.stream.token_tiles


@functools.cache
def skinny_plan(tokens: int, down: int, across: int, width: int, sms: int, arch: str) -> SkinnyPlan:
    """The launch for ``tokens`` tokens of ``width`` columns and records [down, across].

    Few tokens: the warps of a block share the columns of few rows of records. More tokens are
    staged: the warps of a block have rows of their own, so that tokens are read from memory less
    often, and blocks share columns until each multiprocessor has one.
    """
    tiles = -(-tokens // 8)
    ragged = width % (COLUMNS * BATCH) != 0
    batches = -(-across // BATCH)
    if tokens < STAGED_FROM:
        return _direct_plan(tokens, tiles, down, batches, ragged, sms, arch)
    # One row tile a warp reads tokens twice as often; it is for GPUs with little shared memory.
    plans = _staged_plans(2, tiles, down, batches, ragged, sms, arch)
    plans = plans or _staged_plans(1, tiles, down, batches, ragged, sms, arch)
    return min(plans, key=lambda plan: _cost(plan, tokens, down, batches, sms))


def _direct_plan(
    tokens: int, tiles: int, down: int, batches: int, ragged: bool, sms: int, arch: str
) -> SkinnyPlan:
    """Tokens straight from global memory."""
    row_tiles = 2 if tokens > 4 and down >= 1.8 * sms else 1
    groups = -(-down // row_tiles)
    splits = row_warps = 1
    while splits * groups < SPLIT_BELOW * sms and 2 * splits * WARPS <= batches:
        splits *= 2
    stream = StreamShape(row_tiles, tiles, ragged)
    block = SkinnyShape(stream, 1, splits > 1, 1).shared_bytes + RESERVED_BYTES
    blocks = min(BLOCKS[row_tiles, tiles], (SHARED_BYTES[arch] + RESERVED_BYTES) // block)
    # Rather one round of blocks whose warps fill their rings than several of blocks that do not.
    while (
        row_warps < WARPS
        and batches * row_warps < stream.stages * WARPS
        and groups >= 2 * FULL * blocks * sms
    ):
        groups, row_warps = -(-groups // 2), 2 * row_warps
    return SkinnyPlan(SkinnyShape(stream, row_warps, splits > 1, blocks), splits)


def _staged_plans(
    row_tiles: int, tiles: int, down: int, batches: int, ragged: bool, sms: int, arch: str
) -> list[SkinnyPlan]:
    """The launches that fit into shared memory."""
    plans = []
    for row_warps, columns in itertools.product((8, 4, 2), STAGED_COLUMNS):
        capacity = columns // (COLUMNS * BATCH)
        groups = -(-down // (row_tiles * row_warps))
        splits = max(-(-batches // capacity), min(max(1, sms // groups), batches))
        share = -(-batches // splits)
        if columns > STAGED_COLUMNS[-1] and share <= capacity // 2:
            continue  # less staged memory does the same
        stream = StreamShape(row_tiles, tiles, ragged, columns, STAGED_STAGES)
        shape = SkinnyShape(stream, row_warps, splits > 1, 1)
        if shape.shared_bytes <= SHARED_BYTES[arch]:
            plans.append(SkinnyPlan(shape, splits))
    return plans


def _cost(plan: SkinnyPlan, tokens: int, down: int, batches: int, sms: int) -> float:
    """What the busiest multiprocessor does, in bytes: its blocks, then the parts of one tile."""
    shape = plan.shape
    blocks = -(-down * ROWS // shape.rows) * plan.splits
    columns = -(-batches // plan.splits) * COLUMNS * BATCH
    part = shape.rows * tokens * 4 if shape.shared else 0
    block = shape.rows * columns * 9 / 16 + tokens * columns * 2 + part
    rounds = -(-blocks // sms)
    return rounds * (block + ROUND_BYTES) + plan.splits * part / PARTS_AT_ONCE

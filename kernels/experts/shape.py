"""Static shape of a launch of the experts' kernel, and what it takes of a multiprocessor."""

from dataclasses import dataclass, replace

from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.linear.records import COLUMNS, RECORD_BYTES, ROWS

WARPS = 8
THREADS = 32 * WARPS
RESIDENT = 2
"""Thread blocks that a multiprocessor holds, at most."""
RECORDS = 2
"""Records of a row tile in a stage of the ring."""
STAGES = 3
TOKENS = 8
"""Slots of a token tile."""
CHUNK = 256
"""Columns of staged activations that one mbarrier stands for."""
STAGES_OF_CHUNK = CHUNK // (COLUMNS * RECORDS)
PLACES = 4
"""Chunks of the ring of staged activations, a power of two."""
# Float32 sums of a token: 16 rows, and a gap that spreads tokens over the banks.
SUM_ROW = 20
# Shared memory of each block that the driver keeps for itself.
RESERVED_BYTES = 1024
TILE_BYTES = RECORDS * RECORD_BYTES
STAGE_BYTES = 2 * TILE_BYTES
RING_BYTES = STAGES * STAGE_BYTES


@dataclass(frozen=True)
class Shape:
    """Static shape of a launch.

    Attributes:
        gated: gate and up with their SwiGLU; else the down projection, weighted.
        outputs: columns of the result, I or D; inputs: of x, D or I. Both multiples of 64.
        chosen: experts of a token.
        tiles: token tiles of a block of slots, 1, 2 or 4.
        split: warps that share the columns, a divisor of `WARPS`, at most inputs / 64.
        staged: columns of a block of slots in shared memory. 0: none. `inputs`: all of them. Else
            `PLACES` chunks that go round, where `can_go_round`.
    """

    gated: bool
    outputs: int
    inputs: int
    chosen: int
    tiles: int
    split: int
    staged: int = 0

    @property
    def pairs(self) -> int:
        """Pairs of row tiles of an expert."""
        return self.outputs // (ROWS if self.gated else 2 * ROWS)

    @property
    def groups(self) -> int:
        """Items of a block of slots."""
        return -(-self.pairs // (WARPS // self.split))

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return TOKENS * self.tiles

    @property
    def chunks(self) -> int:
        """Chunks of a row of activations."""
        return -(-self.inputs // CHUNK)

    @property
    def goes_round(self) -> bool:
        """Whether staged activations are copied anew for each item, chunk by chunk."""
        return 0 < self.staged < self.inputs

    @property
    def can_go_round(self) -> bool:
        """Whole chunks, no fewer than places; all warps at the same columns."""
        return self.split == 1 and self.inputs % CHUNK == 0 and self.chunks >= PLACES

    @property
    def ready_barriers(self) -> int:
        """Mbarriers of chunks that have arrived."""
        return PLACES if self.goes_round else self.chunks

    @property
    def slot_bytes(self) -> int:
        """From one staged slot to the next; an odd multiple of 16, which spreads over banks."""
        return 2 * self.staged + 16


def staged_bytes(shape: Shape) -> int:
    """Shared memory of staged activations: mbarriers, then rows."""
    if not shape.staged:
        return 0
    barriers = shape.ready_barriers + (PLACES if shape.goes_round else 0)
    return -(-8 * barriers // 16) * 16 + shape.slots * shape.slot_bytes


def shared_bytes(shape: Shape) -> int:
    """Shared memory of a thread block."""
    warp = RING_BYTES + (2 * SUM_ROW * 4 + 8) * shape.slots + 8 * STAGES
    return WARPS * warp + staged_bytes(shape)


def resident_blocks(shape: Shape, arch: str) -> int:
    """Thread blocks that a multiprocessor holds; 0 where not even one fits.

    Four token tiles take more registers than two thread blocks leave for each other.
    """
    block, sm = shared_bytes(shape) + RESERVED_BYTES, SHARED_BYTES[arch] + RESERVED_BYTES
    return min(RESIDENT if shape.tiles < 4 else 1, sm // block)


def with_staging(shape: Shape, arch: str) -> Shape:
    """The shape with its activations staged as far as shared memory allows: all, a ring or none."""
    whole = replace(shape, staged=shape.inputs)
    if resident_blocks(whole, arch):
        return whole
    ring = replace(shape, staged=PLACES * CHUNK)
    if shape.can_go_round and resident_blocks(ring, arch):
        return ring
    return replace(shape, staged=0)

"""The activations of a block of slots in shared memory, for all warps of a thread block.

Warp w copies the rows of slots w, w + 8 ... in chunks of columns, one bulk copy each; a chunk's
mbarrier completes when the rows of all slots have arrived. Places of slots without a token are
left as they are: nothing of them reaches the sums of others. Lane (g, t) = (lane / 4, lane % 4)
reads columns 16 t .. 16 t + 15 of a record of slots g, g + 8 ...

- All columns: they stay for the items of a block of slots, which are in turn. For the next block
  they are replaced after a barrier of all warps; `fill` counts blocks.
- A ring of `PLACES` chunks: it goes round for every item; `fill` counts chunks. A warp arrives on a
  chunk's second mbarrier when it has read it. At the end of chunk q each warp asks for its part of
  chunk q + PLACES - 1, once all warps have read chunk q - 1, whose place that takes: so warps are
  up to a chunk apart without waiting.

Run on an H200; `grouped` has the times.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.experts.shape import CHUNK, PLACES, RECORDS, TOKENS, WARPS, Shape
from sglang_dsv4.kernels.linear import decode
from sglang_dsv4.kernels.linear.records import COLUMNS

_CHUNK_RECORDS = CHUNK // COLUMNS


class Staging:
    """The staged activations of a thread block, as a warp sees them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def start(self, base: Int32, warp: Int32, lane: Int32, first_record: Any) -> None:
        """Make the barriers; a barrier of all warps has to follow.

        Args: base: shared address of `staged_bytes`, 16-byte aligned; first_record: the first that
        this warp multiplies.
        """
        number = self.shape.ready_barriers
        self.warp, self.first_record = warp, first_record
        self.ready, self.free = base, base + 8 * number
        decode.barriers_init(warp == 0, self.ready, number, self.shape.slots)
        barriers = number
        if self.shape.goes_round:
            decode.barriers_init(warp == 0, self.free, PLACES, WARPS)
            barriers = number + PLACES
        self.rows = base + -(-8 * barriers // 16) * 16
        self.read_at = self.rows + (lane >> 2) * self.shape.slot_bytes + (lane & 3) * 32

    def find_rows(self, x: Any, slots: Any, total: Int32, sources: Any) -> None:
        """Global addresses of this warp's rows, 0 without a slot, from the lanes' slots."""
        for n in range(self.shape.tiles):
            slot = cute.arch.make_warp_uniform(ptx.shuffle_index(slots[n], 4 * self.warp))
            row = slot // self.shape.chosen if self.shape.gated else slot
            at = address(x) + Int64(row) * (2 * self.shape.inputs)
            sources[n] = choose(slot < total, at, Int64(0))

    def copy(self, chunk: Int32, place: Int32, sources: Any) -> None:
        """Ask for a chunk of this warp's rows."""
        size = cutlass.min(Int32(self.shape.inputs) - chunk * CHUNK, Int32(CHUNK)) * 2
        for n in range(self.shape.tiles):
            row = self.rows + (TOKENS * n + self.warp) * self.shape.slot_bytes
            decode.arrive_with_bytes(
                sources[n] != 0,
                self.ready + 8 * place,
                row + place * (2 * CHUNK),
                sources[n] + Int64(chunk) * (2 * CHUNK),
                size,
            )

    @cute.jit
    def copy_first(self, sources: Any) -> None:
        """Ask for all columns, or for what is to be there when the first item begins."""
        chunks = PLACES - 1 if self.shape.goes_round else self.shape.chunks
        for chunk in cutlass.range(0, ptx.opaque(Int32(chunks)), 1):
            self.copy(Int32(chunk), Int32(chunk), sources)

    @cute.jit
    def begin(self, fill: Any, at: Any) -> None:
        """Point to an item's first record, when it is there."""
        if cutlass.const_expr(self.shape.goes_round):
            self._wait(fill[0])
            at[0] = self.read_at + (fill[0] & (PLACES - 1)) * (2 * CHUNK)
        else:
            first = Int32(self.first_record)
            ptx.barrier_wait(self.ready + 8 * (first // _CHUNK_RECORDS), fill[0] & 1)
            at[0] = self.read_at + first * (2 * COLUMNS)

    @cute.jit
    def advance(self, k: Int32, r: int, count: Any, even: bool, fill: Any, at: Any) -> None:
        """From record k of an item to the next, when that is there; the last one stays.

        Args: r: the record's number in its stage; count: records of an item; even: whether stages
        are whole.
        """
        following = cutlass.min(k + 1, Int32(count) - 1)
        if cutlass.const_expr(self.shape.goes_round):
            within = following & (_CHUNK_RECORDS - 1)
            # Whether the next record is the first one of the next chunk.
            chunk = choose((within == 0) & (following > k), fill[0] + 1, fill[0])
            if cutlass.const_expr(r == RECORDS - 1):
                self._wait(chunk)
            place = chunk & (PLACES - 1)
            at[0] = self.read_at + place * (2 * CHUNK) + within * (2 * COLUMNS)
        else:
            record = self.first_record + following
            # Chunks begin with stages where those are whole.
            if cutlass.const_expr(r == RECORDS - 1 or not even):
                ptx.barrier_wait(self.ready + 8 * (record // _CHUNK_RECORDS), fill[0] & 1)
            at[0] = self.read_at + record * (2 * COLUMNS)

    def load(self, half: int, at: Any, fragments: Any) -> None:
        """Half of a record's columns of every token tile."""
        for n in range(self.shape.tiles):
            row = at[0] + (n * TOKENS * self.shape.slot_bytes + 16 * half)
            found = ptx.shared_load_u32x4(row)
            for i in range(4):
                fragments[8 * n + 4 * half + i] = found[i]

    def _wait(self, chunk: Int32) -> None:
        """Until a chunk of the ring is there."""
        place, phase = chunk & (PLACES - 1), (chunk >> PLACES.bit_length() - 1) & 1
        ptx.barrier_wait(self.ready + 8 * place, phase)

    def give_back(self, fill: Any) -> None:
        """This warp has read the ring's chunk, every lane of it."""
        barrier = self.free + 8 * (fill[0] & (PLACES - 1))
        decode.arrive_with_bytes(False, barrier, Int32(0), Int64(0), Int32(0))

    def refill(self, fill: Any, column: Int32, sources: Any) -> None:
        """Ask for chunk fill + PLACES - 1, of columns from chunk `column` on, when it has room."""
        before = fill[0] - 1
        place, phase = before & (PLACES - 1), (before >> PLACES.bit_length() - 1) & 1
        # At the first chunk its place is fresh: the phase before the first passes.
        ptx.barrier_wait(self.free + 8 * place, phase)
        self.copy(column, place, sources)

"""Producer of the Hopper attention kernels: listed NVFP4 records to bf16 tiles in shared memory.

A buffer holds 64 keys as eight atoms of [64 keys, 64 dims] bf16, 8192 bytes each, in the 128-byte
swizzle that wgmma reads: the 16 bytes of unit u (8 dims) of key r stand at u ^ (r & 7) of row r.
The same bytes serve as K (K-major operand) and as V (MN-major operand). Atom a holds dims
[64 a, 64 a + 64). Atoms 0 to 6 are NoPE: a unit holds its values in the order 3 7 2 6 1 5 0 4 that
`unpack8` makes, each times 2^-8. Atom 7 is RoPE as stored. A key without slot is zeros, and its bit
in the buffer's validity mask (two 32-bit words, key k at bit k) is 0. A NaN scale makes its group
NaN.

Half 0 of a buffer is atoms 0 to 3 with the mask, half 1 atoms 4 to 7; each has its own pair of
mbarriers, so that a consumer can give back or await half a tile. One warpgroup fills both in turn.
Warp w fills keys [16 w, 16 w + 16), a pair of lanes one key: NoPE by 32 bytes (one atom) a load, a
lane 32 dims of it. Eight lanes copy the RoPE dims of a key. Both ways each eight lanes of a store
touch every bank once. Words of the next tile are loaded into registers as soon as those of this one
are decoded, slots one tile earlier still.

Roofline, per tile: 24 KB read, 64 KB written to shared memory (512 cycles), 3584 words to decode
of 19 instructions each.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.dequant import ROPE_OFFSET, scale_pairs, unpack8
from sglang_dsv4.kernels.attention.hopper import ptx as hopper
from sglang_dsv4.kernels.attention.instructions import choose
from sglang_dsv4.kernels.attention.lists import TILE, ListShape, TokenLists

HALVES = 2
ATOMS = 8
ATOM_BYTES = TILE * 128
HALF_BYTES = ATOMS // HALVES * ATOM_BYTES
BUFFER_BYTES = ATOMS * ATOM_BYTES
MASK_BYTES = TILE // 8
BARRIER_BYTES = 8
ROPE_UNIT = ROPE_OFFSET // 16
# Atoms of each half that are NoPE; a lane has four words of each.
NOPE_ATOMS = (4, 3)


@dataclass(frozen=True)
class GatherConfig:
    """Static shape: buffers, and what the lists are."""

    buffers: int
    lists: ListShape


class Gather:
    """The producer for one static shape; see the module docstring for what a buffer holds.

    The caller gives shared-memory addresses: `keys` (1024-byte aligned, buffers x BUFFER_BYTES),
    `masks` (8-byte aligned, buffers x MASK_BYTES), `barriers` (8-byte aligned, `barrier_bytes`).
    Buffer of the tile number n of a block (from 0) is n % buffers; its `full` barriers complete
    with parity (n // buffers) & 1.
    """

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.barrier_bytes = config.buffers * HALVES * 2 * BARRIER_BYTES

    def full(self, barriers: Int32, buffer: Any, half: int) -> Int32:
        """The barrier that completes when a half is filled."""
        return barriers + (buffer * HALVES + half) * BARRIER_BYTES

    def empty(self, barriers: Int32, buffer: Any, half: int) -> Int32:
        """The barrier at which consumers arrive when they have read a half."""
        return barriers + ((self.config.buffers + buffer) * HALVES + half) * BARRIER_BYTES

    def init_barriers(self, barriers: Int32, releases: tuple[int, int]) -> None:
        """For one thread, before a fence and a block barrier.

        releases: arrivals that give back half 0 and half 1.
        """
        for buffer in range(self.config.buffers):
            for half in range(HALVES):
                # One arrival of each of the four warps that fill a half.
                hopper.barrier_init(self.full(barriers, buffer, half), 4)
                hopper.barrier_init(self.empty(barriers, buffer, half), releases[half])

    def place(self, n: Any) -> tuple[Any, Any]:
        """(buffer, parity of its full barriers) of the block's tile number n."""
        buffers = self.config.buffers
        turn = n // buffers if buffers & (buffers - 1) else n >> (buffers.bit_length() - 1)
        return n - turn * buffers, turn & 1

    @cute.jit
    def produce(
        self,
        tid: Int32,
        lists: TokenLists,
        first: Int32,
        last: Int32,
        keys: Int32,
        masks: Int32,
        barriers: Int32,
    ) -> None:
        """Fill the buffers with tiles [first, last) in turn; tid counts the warpgroup's threads."""
        warp, lane = cute.arch.make_warp_uniform(tid >> 5), tid & 31
        upcoming = cute.make_rmem_tensor(1, Int64 if self.config.lists.slot_bytes == 8 else Int32)
        key = warp * 16 + (lane >> 1)
        where = cute.make_rmem_tensor(3, Int32)
        # For each half: 16 NoPE words, 4 of scales, 16 of RoPE, the ballot of its keys.
        data = [cute.make_rmem_tensor(37, Uint32) for _ in range(HALVES)]
        row = key * 128
        turned = (key & 7) ^ (4 * (lane & 1))
        units = [row + (turned ^ i) * 16 for i in range(4)]
        count = last - first
        if count > 0:
            self._load_slot(lists, first, key, upcoming)
            self._locate(lists, warp, lane, first, upcoming, where)
            for half in cutlass.range_constexpr(HALVES):
                self._fetch(half, lists, lane, first, where, data[half])
        if count > 1:
            self._load_slot(lists, first + 1, key, upcoming)
        for n in cutlass.range(count):
            buffer, parity = self.place(n)
            start = keys + buffer * BUFFER_BYTES
            for half in cutlass.range_constexpr(HALVES):
                hopper.barrier_wait(self.empty(barriers, buffer, half), parity ^ 1)
                self._store(half, warp, lane, units, start, data[half])
                if cutlass.const_expr(half == 0):  # noqa: SIM102 (static, then dynamic)
                    if lane == 0:
                        mask = masks + buffer * MASK_BYTES + warp * 2
                        hopper.shared_store_u16(mask, data[0][36])
                hopper.fence_async()
                cute.arch.sync_warp()
                if lane == 0:
                    hopper.barrier_arrive(self.full(barriers, buffer, half))
                if n + 1 < count:
                    if cutlass.const_expr(half == 0):
                        self._locate(lists, warp, lane, first + n + 1, upcoming, where)
                    self._fetch(half, lists, lane, first + n + 1, where, data[half])
            if n + 2 < count:
                self._load_slot(lists, first + n + 2, key, upcoming)

    def _load_slot(self, lists: TokenLists, tile: Any, key: Int32, upcoming: Any) -> None:
        """Start the load of the slot of a key of a tile."""
        upcoming[0] = lists.load_slot(tile, key)

    def _locate(
        self, lists: TokenLists, warp: Int32, lane: Int32, tile: Any, upcoming: Any, where: Any
    ) -> None:
        """Offsets (in 16 bytes) of this lane's record and scales, and the ballot of the 16 keys."""
        present, where[0], where[1] = lists.locate(tile, warp * 16 + (lane >> 1), upcoming[0])
        where[2] = Int32(ptx.ballot(ptx.shuffle_index(Int32(present), 2 * (lane & 15)) != 0))

    def _fetch(
        self, half: int, lists: TokenLists, lane: Int32, tile: Any, where: Any, data: Any
    ) -> None:
        """Start the loads of one half of this warp's 16 records."""
        pool = lists.pool(tile)
        record = pool + (Int64(where[0]) + Int64(lane & 1)) * 16
        for atom in range(NOPE_ATOMS[half]):
            words = ptx.global_load_x4(record + (half * NOPE_ATOMS[0] + atom) * 32)
            for i in range(4):
                data[4 * atom + i] = words[i]
        scales = ptx.global_load_x4(pool + (Int64(where[1]) + half) * 16)
        for i in range(4):
            data[16 + i] = scales[i]
        if half == 1:
            for i in range(4):
                source = ptx.shuffle_index(where[0], 8 * i + 2 * (lane >> 3))
                unit = Int64(source) + Int64((lane & 7) + ROPE_UNIT)
                words = ptx.global_load_x4(pool + unit * 16)
                for j in range(4):
                    data[20 + 4 * i + j] = words[j]
        data[36] = Uint32(where[2]) & Uint32(0xFFFF)

    def _store(
        self, half: int, warp: Int32, lane: Int32, units: Any, start: Int32, data: Any
    ) -> None:
        """Decode one half of 16 keys and put it in its place."""
        bits = data[36]
        listed = ((bits >> Uint32(lane >> 1)) & Uint32(1)) != Uint32(0)
        shift = Uint32(16 * (lane & 1))
        for atom in range(NOPE_ATOMS[half]):
            pair = choose(listed, data[16 + atom] >> shift, Uint32(0))
            scales = scale_pairs(pair)
            base = start + (half * NOPE_ATOMS[0] + atom) * ATOM_BYTES
            for i in range(4):
                values = unpack8(data[4 * atom + i], scales[i // 2])
                ptx.shared_store_x4(base + units[i], *values)
        if half == 1:
            for i in range(4):
                key = 4 * i + (lane >> 3)
                present = ((bits >> Uint32(key)) & Uint32(1)) != Uint32(0)
                mask = choose(present, Uint32(0xFFFFFFFF), Uint32(0))
                line = start + (ATOMS - 1) * ATOM_BYTES + (warp * 16 + key) * 128
                words = [data[20 + 4 * i + j] & mask for j in range(4)]
                ptx.shared_store_x4(line + ((lane & 7) ^ (key & 7)) * 16, *words)

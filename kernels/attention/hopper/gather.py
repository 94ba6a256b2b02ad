"""Producer of the Hopper attention kernels: listed NVFP4 records to bf16 tiles in shared memory.

A buffer holds 64 keys as eight atoms of [64 keys, 64 dims] bf16, 8192 bytes each, in the 128-byte
swizzle that wgmma reads: the 16 bytes of unit u (8 dims) of key r stand at u ^ (r & 7) of row r.
The same bytes serve as K (K-major operand) and as V (MN-major operand). Atom a holds dims
[64 a, 64 a + 64). Atoms 0 to 6 are NoPE: a unit holds its values in the order 3 7 2 6 1 5 0 4 that
`unpack8` makes, each times 2^-8. Atom 7 is RoPE as stored. A key without slot is zeros, and its bit
in the buffer's validity mask (two 32-bit words, key k at bit k) is 0. A NaN scale makes its group
NaN.

Half 0 of a buffer is atoms 0 to 3 with the mask, half 1 atoms 4 to 7; each has its own pair of
mbarriers, so that a consumer can give back or await half a tile. Two warpgroups fill a part of each
half: group 0 atoms 0, 1, 4 and 5, group 1 atoms 2, 3, 6 and RoPE. Warp w of a group fills keys
[16 w, 16 w + 16), a pair of lanes one key: NoPE by 32 bytes (one atom) a load, a lane 32 dims of
it. Eight lanes copy the RoPE dims of a key. Both ways each eight lanes of a store touch every bank
once. Values are decoded while their place is still being read, except where registers do not hold
them. Words of the next tile are loaded into registers as soon as those of this one are stored.

ptxas gives all loads of a warp one scoreboard, so the wait for half 0's words is one for everything
asked before, half 1's words included. The slots of an item are brought into L2 one item earlier
(`announce`); its records are not.

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
GROUPS = 2
# Bytes that a prefetch brings into L2 at least.
SECTOR = 32
WARPS = 4 * GROUPS
# Bytes of the 16 keys of a warp in an atom.
WARP_BYTES = 16 * 128
# NoPE atoms of each half for each group; a lane has four words of each. RoPE is the last group's.
GROUP_ATOMS = (((0, 1), (4, 5)), ((2, 3), (6,)))
# Atoms of each half that a group decodes only when their place is free, for want of registers.
LATE_ATOMS = (0, 1)


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
                # One arrival of each warp.
                hopper.barrier_init(self.full(barriers, buffer, half), WARPS)
                hopper.barrier_init(self.empty(barriers, buffer, half), releases[half])

    def place(self, n: Any) -> tuple[Any, Any]:
        """(buffer, parity of its full barriers) of the block's tile number n."""
        buffers = self.config.buffers
        turn = n // buffers if buffers & (buffers - 1) else n >> (buffers.bit_length() - 1)
        return n - turn * buffers, turn & 1

    @cute.jit
    def produce(
        self,
        group: cutlass.Constexpr,
        tid: Int32,
        lists: TokenLists,
        first: Int32,
        last: Int32,
        done: Int32,
        keys: Int32,
        masks: Int32,
        barriers: Int32,
    ) -> None:
        """Fill a group's part of the buffers with tiles [first, last) in turn.

        128 threads take part, counted by tid; done: tiles that the block filled before, so that
        the buffers are taken in turn from one call to the next.
        """
        warp, lane = cute.arch.make_warp_uniform(tid >> 5), tid & 31
        kind = Int64 if self.config.lists.slot_bytes == 8 else Int32
        upcoming = cute.make_rmem_tensor(1, kind)
        key = warp * 16 + (lane >> 1)
        where = cute.make_rmem_tensor(3, Int32)
        # For each half: 8 NoPE words, 2 of scales, 16 of RoPE, the ballot of its keys.
        data = [cute.make_rmem_tensor(27, Uint32) for _ in range(HALVES)]
        count = last - first
        if count > 0:
            self._load_slot(lists, first, key, upcoming)
            self._locate(lists, warp, lane, first, upcoming, where)
            for half in cutlass.range_constexpr(HALVES):
                self._fetch(half, group, lists, lane, first, where, data[half])
        if count > 1:
            self._load_slot(lists, first + 1, key, upcoming)
        for n in cutlass.range(count):
            buffer, parity = self.place(done + n)
            start = keys + buffer * BUFFER_BYTES
            lane = ptx.opaque(tid) & 31
            key = warp * 16 + (lane >> 1)
            tile = ptx.opaque(first + n)
            for half in cutlass.range_constexpr(HALVES):
                place, bits = start + warp * WARP_BYTES, data[half][26]
                ask = (lists, warp, lane, key, tile, count - n, upcoming, where, data[half])
                early = self._decode(half, group, lane, data[half], False)
                ptx.barrier_wait(self.empty(barriers, buffer, half), parity ^ 1)
                self._store(half, group, place, lane, early, False)
                late = self._decode(half, group, lane, data[half], True)
                self._store(half, group, place, lane, late, True)
                if cutlass.const_expr(half == 0 and group == 0):  # noqa: SIM102 (static first)
                    if lane == 0:
                        hopper.shared_store_u16(masks + buffer * MASK_BYTES + warp * 2, bits)
                hopper.fence_async()
                cute.arch.sync_warp()
                if lane == 0:
                    hopper.barrier_arrive(self.full(barriers, buffer, half))
                self._ask(half, group, *ask)

    @cute.jit
    def _ask(
        self,
        half: cutlass.Constexpr,
        group: cutlass.Constexpr,
        lists: TokenLists,
        warp: Int32,
        lane: Int32,
        key: Int32,
        tile: Int32,
        left: Int32,
        upcoming: Any,
        where: Any,
        data: Any,
    ) -> None:
        """Start loads behind one half of a tile; left: tiles from this one to the last."""
        if left > 1:
            if cutlass.const_expr(half == 0):
                self._locate(lists, warp, lane, tile + 1, upcoming, where)
            self._fetch(half, group, lists, lane, tile + 1, where, data)
        if cutlass.const_expr(half == 0):  # noqa: SIM102 (static first)
            if left > 2:
                self._load_slot(lists, tile + 2, key, upcoming)

    @cute.jit
    def announce(
        self, group: cutlass.Constexpr, tid: Int32, lists: TokenLists, first: Int32, last: Int32
    ) -> None:
        """Bring the slots of tiles [first, last) into L2; tid counts the group's 128 threads."""
        sectors = TILE * self.config.lists.slot_bytes // SECTOR
        for i in cutlass.range(first * sectors, last * sectors, 128 * GROUPS):
            place = cutlass.min(i + 128 * group + tid, last * sectors - 1)
            tile = place // sectors
            self._prefetch_slot(lists, tile, (place - tile * sectors) * (TILE // sectors))

    def _prefetch_slot(self, lists: TokenLists, tile: Any, key: Any) -> None:
        """Bring the slot of a key of a tile into L2."""
        hopper.prefetch_l2(lists.slot_address(tile, key))

    def _load_slot(self, lists: TokenLists, tile: Any, key: Int32, slots: Any) -> None:
        """Start the load of the slot of a key of a tile."""
        slots[0] = lists.load_slot(tile, key)

    def _locate(
        self, lists: TokenLists, warp: Int32, lane: Int32, tile: Any, upcoming: Any, where: Any
    ) -> None:
        """Offsets (in 16 bytes) of this lane's record and scales, and the ballot of the 16 keys."""
        present, where[0], where[1] = lists.locate(tile, warp * 16 + (lane >> 1), upcoming[0])
        where[2] = Int32(ptx.ballot(ptx.shuffle_index(Int32(present), 2 * (lane & 15)) != 0))

    def _fetch(
        self,
        half: int,
        group: int,
        lists: TokenLists,
        lane: Int32,
        tile: Any,
        where: Any,
        data: Any,
    ) -> None:
        """Start the loads of a group's part of one half of this warp's 16 records."""
        pool = lists.pool(tile)
        record = pool + (Int64(where[0]) + Int64(lane & 1)) * 16
        atoms = GROUP_ATOMS[group][half]
        for a, atom in enumerate(atoms):
            words = ptx.global_load_x4(record + atom * 32)
            for i in range(4):
                data[4 * a + i] = words[i]
        scales = pool + Int64(where[1]) * 16 + 4 * atoms[0]
        words = (
            (Uint32(ptx.global_load_i32(scales)),)
            if len(atoms) == 1
            else ptx.global_load_x2(scales)
        )
        for a in range(len(atoms)):
            data[8 + a] = words[a]
        if half == 1 and group == GROUPS - 1:
            for i in range(4):
                source = ptx.shuffle_index(where[0], 8 * i + 2 * (lane >> 3))
                unit = Int64(source) + Int64((lane & 7) + ROPE_UNIT)
                words = ptx.global_load_x4(pool + unit * 16)
                for j in range(4):
                    data[10 + 4 * i + j] = words[j]
        data[26] = Uint32(where[2]) & Uint32(0xFFFF)

    def _pieces(self, half: int, group: int, late: bool) -> tuple[list, bool]:
        """What a group decodes early or late of a half: (places and NoPE atoms, whether RoPE)."""
        atoms = list(enumerate(GROUP_ATOMS[group][half]))
        roped = half == 1 and group == GROUPS - 1
        early = len(atoms) - LATE_ATOMS[group]
        return (atoms[early:] if late else atoms[:early]), roped and not late

    def _decode(self, half: int, group: int, lane: Int32, data: Any, late: bool) -> list:
        """A group's part of one half of 16 keys in bf16, 16 bytes an entry, as they are stored."""
        atoms, roped = self._pieces(half, group, late)
        keep = (lambda w: Uint32(ptx.opaque(w))) if late else (lambda w: w)
        bits = data[26]
        listed = ((bits >> Uint32(lane >> 1)) & Uint32(1)) != Uint32(0)
        shift = Uint32(16 * (lane & 1))
        values = []
        for a, _ in atoms:
            pair = choose(listed, keep(data[8 + a]) >> shift, Uint32(0))
            scales = scale_pairs(pair)
            values += [unpack8(keep(data[4 * a + i]), scales[i // 2]) for i in range(4)]
        if roped:
            for i in range(4):
                present = ((bits >> Uint32(4 * i + (lane >> 3))) & Uint32(1)) != Uint32(0)
                mask = choose(present, Uint32(0xFFFFFFFF), Uint32(0))
                values.append([data[10 + 4 * i + j] & mask for j in range(4)])
        return values

    def _store(
        self, half: int, group: int, start: Int32, lane: Int32, values: list, late: bool
    ) -> None:
        """Put decoded values in their place; start: row 0 of this warp's keys in atom 0.

        A lane's unit i of an atom stands where bits 4 and 5 of the address are turned by i, its
        RoPE unit of the key 4 further on where bit 6 is turned.
        """
        atoms, _ = self._pieces(half, group, late)
        key = lane >> 1
        unit = start + key * 128 + ((key & 7) ^ (4 * (lane & 1))) * 16
        for at, (_, atom) in enumerate(atoms):
            for i in range(4):
                place = (unit ^ (16 * i)) + atom * ATOM_BYTES
                ptx.shared_store_x4(place, *values[4 * at + i])
        key = lane >> 3
        unit = start + (ATOMS - 1) * ATOM_BYTES + key * 128 + ((lane & 7) ^ key) * 16
        for i, words in enumerate(values[4 * len(atoms) :]):
            ptx.shared_store_x4((unit ^ (64 * (i & 1))) + 512 * i, *words)

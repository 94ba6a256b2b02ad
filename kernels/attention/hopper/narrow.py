"""Sparse attention for tiles of 16 heads on WGMMA (sm_90a): the heads are the products' N.

One warpgroup, one block, serves one token, one tile of 16 heads and one share of the token's
keys, 64 keys at a time; two blocks share an SM. Nothing is padded to 64 heads,
nothing is decoded twice:

- S^T = K Q^T. Records go from global memory to registers, one tile ahead; a quad holds two keys.
  Decoded registers are the A operand of m64nNk16 as they are (the order of dims inside the
  contraction is free, Q in shared memory follows it) and are stored once, as V.
- Softmax down the keys: weights are taken relative to the maximum of the block's first tile.
  A head whose scores grow by more than 2^GROWTH moves the origin; one barrier with a vote tells
  all threads. So most tiles need no exchange between lanes or warps. Sums of weights stay with
  their threads until the end.
- O^T = V^T P^T: A is the tile in shared memory read across its rows, B the weights of the heads.

Tile in shared memory: 8 atoms of [64 keys, 64 places] bf16 in the 128-byte swizzle. Places
8 (4 u + j) + 2 q + (0, 1) of an atom hold pair j of the eight dims that lane q of a quad decodes as
word u (`_first_dim`), NoPE in the order of `unpack8` and times 2^-8; Q's NoPE dims carry the 2^8
for the scores, the output's gain carries it for the values.

Roofline, per token: bytes = 384 (window + K) + 2 x 1024 H; flops = 2 x 2 H (window + K) 512. At
4.2 TB/s an SM has 1350 cycles for 64 keys. Shared memory, per 64 keys: 64 KB written and 64 KB
read for V, 2 KB x heads read for Q and P: 1280 cycles at 16 heads. Decoding: 3584 words of 19
instructions, 530 cycles of the SM's issue.

Measured on an H200, 2026-12-02, window 128, microseconds with the best of the timed splits, over
FlashMLA's FP8 kernel with 64 heads in the same run:

    H  top-k  batch 1      16           64           128          256
    16  512   10.9 1.24x   12.7 1.45x   21.6 2.10x   29.0 1.66x   41.9 2.19x
    16  1024  11.9 1.29x   17.0 1.35x   28.2 2.24x   42.4 1.82x   68.1 2.16x

From 10 to 18 tiles at batch 256, two blocks on an SM take 1.6 us for each further 64 keys at 16
heads, 2820 cycles at 1.755 GHz and twice the bound; 11 us of a call do not depend on the keys. A
block alone on its SM takes 2.15 us (3770 cycles), so two blocks overlap by a third
only: something that they share is taken up, and it is not known what. Left out one at a time, 16
heads, 264 tokens, top-k 1024, of 69.3 us: decoding 53.0, products with V 61.3, proxy fences 64.4,
softmax 69.3. Changed: loads after the softmax 68.8; decoding by way of e4m3 in f16, 15 instructions
a word, 69.1; products with V under way across tiles 69.4.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.combine import LN2, LOG2_E, combine_splits
from sglang_dsv4.kernels.attention.dequant import ROPE_OFFSET, query_pairs, scale_pairs, unpack8
from sglang_dsv4.kernels.attention.hopper import narrow_ptx as narrow
from sglang_dsv4.kernels.attention.hopper import ptx as hopper
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.attention.lists import TILE, ListShape, TokenLists
from sglang_dsv4.kernels.attention.operands import (
    HEAD_DIM,
    Numbers,
    Operands,
    fake_numbers,
    fake_operands,
)
from sglang_dsv4.kernels.attention.rotation import (
    load_position,
    load_written_angles,
    turn_back,
)
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel

THREADS = 128
HEAD_TILES = (16,)
# Blocks that share an SM, by head tile: what shared memory and registers allow.
BLOCKS_PER_SM = {16: 2}
ATOMS = 8
ATOM_BYTES = TILE * 128
KEYS_BYTES = ATOMS * ATOM_BYTES
# Weights up to 2^GROWTH are as exact in bf16 and float32 as those up to 1.
GROWTH = 64.0
# Registers of one key in a thread: 12 + 2 NoPE words, 8 of RoPE; 8 of scales.
KEY_WORDS, KEY_SCALES = 22, 8
# Accumulators that one assembly statement names.
MAX_SUMS = 64


@dataclass(frozen=True)
class NarrowShape:
    """Static shape: heads of a block (8, 16, 32) and what the lists are."""

    head_tile: int
    lists: ListShape


def shared_bytes(head_tile: int) -> int:
    """Shared memory of a block: keys, Q, weights, four warps' maxima or totals."""
    return KEYS_BYTES + head_tile * (2 * HEAD_DIM + 2 * TILE + 16)


class NarrowAttention:
    """The kernel for one static shape."""

    def __init__(self, shape: NarrowShape) -> None:
        self.shape = shape
        self.heads = shape.head_tile
        self.blocks = shape.head_tile // 8
        self.sums = shape.head_tile // 2

    @cute.jit
    def __call__(self, operands: Operands, numbers: Numbers, stream: Any) -> None:
        """Launch the attention and, with more than one split, the combination."""
        tokens, heads = operands.out.shape[0], operands.out.shape[1]
        head_tiles = (heads + self.heads - 1) // self.heads
        self.kernel(operands, numbers, head_tiles).launch(
            grid=[tokens * head_tiles, numbers.splits, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM[self.heads],
            preferred_smem_carveout=100,
        )
        combine_splits(operands, numbers, self.shape.lists.rotated, stream)

    @cute.kernel
    def kernel(self, operands: Operands, numbers: Numbers, head_tiles: Int32) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, split, _ = cute.arch.block_idx()
        self.tid, self.lane = tid, tid & 31
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.group, self.quad = self.lane >> 2, self.lane & 3
        token = block // head_tiles
        first_head = (block - token * head_tiles) * self.heads
        lists = TokenLists(self.shape.lists, operands, numbers, token)
        first, last = lists.share(split, numbers.splits)

        memory = cutlass.memory.SmemAllocator()
        self.keys = memory.allocate(shared_bytes(self.heads), 1024).toint()
        self.query = self.keys + KEYS_BYTES
        self.weights = self.query + self.heads * 2 * HEAD_DIM
        self.exchange = self.weights + self.heads * 2 * TILE

        if (first < last) | (numbers.splits == 1):
            self.attend(lists, first, last, operands, numbers, token, first_head, split)
        else:
            head = first_head + tid
            present = (tid < self.heads) & (head < operands.out.shape[1])
            row = split * Int32(operands.out.shape[0]) + token
            at = (Int64(row) * operands.out.shape[1] + head) * 4
            ptx.global_store_f32_if(present, address(operands.part_lse) + at, Float32(-Float32.inf))

    @cute.jit
    def attend(
        self,
        lists: Any,
        first: Int32,
        last: Int32,
        operands: Operands,
        numbers: Numbers,
        token: Int32,
        first_head: Int32,
        split: Int32,
    ) -> None:
        """The block's tiles and what it writes; without tiles, that is no weight at all."""
        num_heads = operands.out.shape[1]
        words = cute.make_rmem_tensor(2 * KEY_WORDS, Uint32)
        scales = cute.make_rmem_tensor(2 * KEY_SCALES, Uint32)
        # A key's mask: all ones where it has a record.
        listed = cute.make_rmem_tensor(2, Uint32)
        upcoming = cute.make_rmem_tensor(2, Int64 if self.shape.lists.slot_bytes == 8 else Int32)
        query = cute.make_rmem_tensor(16 * self.blocks, Uint32)
        values = cute.make_rmem_tensor(ATOMS * self.sums, Float32)
        # For each of this thread's heads: minus the origin of its weights, and their sum.
        shifts = cute.make_rmem_tensor(2 * self.blocks, Float32)
        totals = cute.make_rmem_tensor(2 * self.blocks, Float32)
        started = cute.make_rmem_tensor(1, Int32)
        started[0] = Int32(0)
        for i in cutlass.range_constexpr(ATOMS * self.sums):
            values[i] = Float32(0.0)
        for i in cutlass.range_constexpr(2 * self.blocks):
            shifts[i] = Float32(0.0)
            totals[i] = Float32(0.0)

        if first < last:
            self.fetch_slots(lists, first, upcoming)
        self.load_query(query, operands.q, token, first_head, num_heads)
        if first < last:
            self.fetch_records(lists, first, upcoming, listed, words, scales)
        if first + 1 < last:
            self.fetch_slots(lists, first + 1, upcoming)
        self.store_query(query, first_head, num_heads)
        hopper.fence_async()
        cute.arch.sync_threads()

        for tile in cutlass.range(first, last, 1):
            present = [listed[h] != Uint32(0) for h in range(2)]
            scores = self.score(words, scales, listed)
            if tile + 1 < last:
                self.fetch_records(lists, tile + 1, upcoming, listed, words, scales)
                if tile + 2 < last:
                    self.fetch_slots(lists, tile + 2, upcoming)
            scores = hopper.wgmma_wait(scores, 0)
            self.softmax(scores, present, shifts, totals, started, values, numbers.scale_log2)
            self.accumulate(values)
            self.settle(values)

        cute.arch.sync_threads()
        angles = cute.make_rmem_tensor(8, Float32)
        rotated = self.shape.lists.rotated
        position = load_position(operands, token, rotated)
        self.write_gain(shifts, totals, first_head, token, split, operands, numbers)
        load_written_angles(angles, operands, numbers, position, self.written_dim, rotated)
        self.stage_output(values, totals)
        cute.arch.sync_threads()
        if numbers.splits == 1:
            self.write_output(operands.out, first_head, num_heads, token, True, angles)
        else:
            row = split * Int32(operands.out.shape[0]) + token
            self.write_output(operands.part_out, first_head, num_heads, row, False, angles)

    def fetch_slots(self, lists: Any, tile: Any, upcoming: Any) -> None:
        """Start the loads of the slots of this thread's two keys."""
        for h in range(2):
            upcoming[h] = lists.load_slot(tile, self.warp * 16 + 8 * h + self.group)

    def fetch_records(
        self, lists: Any, tile: Any, upcoming: Any, listed: Any, words: Any, scales: Any
    ) -> None:
        """Start the loads of two keys; a key without slot reads row 0 in its place.

        A quad reads 64 bytes of a key at once, at last 32: lane q has words 4 q of each 128 dims,
        words 2 q of the last 64, and 16 bytes of each half of the RoPE dims.
        """
        pool = lists.pool(tile)
        for h in range(2):
            key = self.warp * 16 + 8 * h + self.group
            present, data, scale = lists.locate(tile, key, upcoming[h])
            listed[h] = choose(present, Uint32(0xFFFFFFFF), Uint32(0))
            record = pool + Int64(data) * 16
            turned = record + Int64(16 * self.quad)
            for half in range(2):
                loaded = narrow.load_record_x4(pool + Int64(scale) * 16 + 16 * half)
                for i in range(4):
                    scales[KEY_SCALES * h + 4 * half + i] = loaded[i]
            at = KEY_WORDS * h
            for p in range(3):
                loaded = narrow.load_record_x4(turned + 64 * p)
                for i in range(4):
                    words[at + 4 * p + i] = loaded[i]
            loaded = narrow.load_record_x2(record + Int64(192 + 8 * self.quad))
            for i in range(2):
                words[at + 12 + i] = loaded[i]
            for u in range(2):
                loaded = narrow.load_record_x4(turned + (ROPE_OFFSET + 64 * u))
                for i in range(4):
                    words[at + 14 + 4 * u + i] = loaded[i]

    def load_query(
        self, query: Any, q: Any, token: Int32, first_head: Int32, num_heads: Any
    ) -> None:
        """Start the loads of Q: of eight heads, lane group g takes one and warp w two atoms."""
        row = address(q) + Int64(token) * q.stride[0] * 2
        for n in range(self.blocks):
            head = first_head + n * 8 + self.group
            safe = choose(head < num_heads, head, first_head)
            start = row + Int64(safe) * q.stride[1] * 2
            for a in range(2):
                for u in range(2):
                    nope = self.warp * 128 + self.quad * 32 + 16 * a + 8 * u
                    last = 384 + 16 * self.quad + 8 * u if a == 0 else 448 + 32 * u + 8 * self.quad
                    dim = choose(self.warp == 3, last, nope)
                    loaded = ptx.global_load_x4(start + Int64(dim) * 2)
                    for i in range(4):
                        query[16 * n + 8 * a + 4 * u + i] = loaded[i]

    def store_query(self, query: Any, first_head: Int32, num_heads: Any) -> None:
        """Q to shared memory, K-major, in the order in which decoded registers hold the dims."""
        for n in range(self.blocks):
            mask = choose(
                first_head + n * 8 + self.group < num_heads, Uint32(0xFFFFFFFF), Uint32(0)
            )
            for a in range(2):
                atom = self.query + (2 * self.warp + a) * (self.heads * 128)
                row = atom + n * 1024 + self.group * 128 + 4 * self.quad
                for u in range(2):
                    words = [query[16 * n + 8 * a + 4 * u + i] for i in range(4)]
                    pairs = query_pairs(words, mask)
                    for i in range(4):
                        pair = pairs[i]
                        if a == 1:
                            pair = choose(self.warp == 3, words[i] & mask, pair)
                        ptx.shared_store_u32(row + ((4 * u + i) ^ self.group) * 16, pair)

    def score(self, words: Any, scales: Any, listed: Any) -> list:
        """Decode 64 keys, store them as V, start S^T = K Q^T; the sums are under way on return."""
        scores = [Float32(0.0)] * self.sums
        query = narrow.descriptor_low(self.query)
        row, matrix = self.lane & 7, self.lane >> 3
        line = self.keys + (self.warp * 16 + 8 * (matrix & 1) + row) * 128
        places = [line + ((2 * c + (matrix >> 1)) ^ row) * 16 for c in range(4)]
        pairs: list = []
        for atom in range(ATOMS):
            if atom % 2 == 0:
                pairs = [self.key_scales(atom // 2, h, scales, listed) for h in range(2)]
            fragments = []
            for u in range(2):
                low, high = (
                    self.unit(atom, u, h, words, listed, pairs[h][atom % 2]) for h in range(2)
                )
                for k in (0, 2):
                    fragments += [low[k], high[k], low[k + 1], high[k + 1]]
            b = query + atom * self.heads * 8
            scores = narrow.wgmma_registers(scores, fragments, b, (0, 32, 64, 96))
            if atom > 0:
                narrow.wgmma_wait_only(1)
            for c in range(4):
                place = places[c] + atom * ATOM_BYTES
                hopper.stmatrix_x4(place, *fragments[4 * c : 4 * c + 4])
        return scores

    def settle(self, values: Any) -> None:
        """Wait for the tile's products, of all warps, before V and P are written anew."""
        sums = hopper.wgmma_wait([values[i] for i in range(ATOMS * self.sums)], 0)
        for i, value in enumerate(sums):
            values[i] = value
        cute.arch.sync_threads()

    def key_scales(self, pair: int, h: int, scales: Any, listed: Any) -> list[Uint32]:
        """Scale pairs of a key for this lane's words of two atoms; 0 for a key without record."""
        at = KEY_SCALES * h + 2 * pair
        selector = Uint32(self.quad * 0x22 + 0x10 if pair < 3 else self.quad)
        both = ptx.prmt(scales[at], scales[at + 1], selector) & listed[h]
        return scale_pairs(both)

    def unit(
        self, atom: int, u: int, h: int, words: Any, listed: Any, scale: Uint32
    ) -> list[Uint32]:
        """Eight dims of a key as four bf16 pairs."""
        at = KEY_WORDS * h
        if atom == 7:
            return [words[at + 14 + 4 * u + i] & listed[h] for i in range(4)]
        index = 12 + u if atom == 6 else 2 * atom + u
        return unpack8(words[at + index], scale)

    @cute.jit
    def softmax(
        self,
        scores: Any,
        present: Any,
        shifts: Any,
        totals: Any,
        started: Any,
        values: Any,
        scale_log2: Float32,
    ) -> None:
        """Weights of the tile to shared memory, visible to all when this returns."""
        weights = cute.make_rmem_tensor(self.sums, Float32)
        grown = self.weigh(scores, present, shifts, weights, scale_log2)
        for h in cutlass.range_constexpr(2):
            grown = grown | (present[h] & (started[0] == 0))
        self.store_weights(weights)
        hopper.fence_async()
        if narrow.barrier_any(1, THREADS, grown) != 0:
            self.move_origin(scores, present, shifts, totals, started, values, scale_log2)
            self.weigh(scores, present, shifts, weights, scale_log2)
            self.store_weights(weights)
            hopper.fence_async()
            cute.arch.sync_threads()
        for c in cutlass.range_constexpr(2 * self.blocks):
            at = 4 * (c // 2) + c % 2
            totals[c] = totals[c] + (weights[at] + weights[at + 2])

    def weigh(
        self, scores: Any, present: Any, shifts: Any, weights: Any, scale_log2: Float32
    ) -> Any:
        """exp2(score - origin) of this thread's keys and heads; whether any exceeds 2^GROWTH."""
        grown = None
        for i in range(self.sums):
            n, h, e = i // 4, i // 2 % 2, i % 2
            power = narrow.fma(scores[i], scale_log2, shifts[2 * n + e])
            power = choose(present[h], power, Float32(-Float32.inf))
            above = power > Float32(GROWTH)
            grown = above if grown is None else grown | above
            weights[i] = ptx.exp2(power)
        return grown

    def store_weights(self, weights: Any) -> None:
        """P to shared memory as [heads, 64 keys] bf16, 128 bytes a head, swizzled."""
        row, matrix = self.lane & 7, self.lane >> 3
        chunk = 2 * self.warp + (matrix & 1)
        place = self.weights + row * 128 + (chunk ^ row) * 16
        if self.blocks > 1:
            place = place + (matrix >> 1) * 1024
        for n in range(0, self.blocks, 2):
            pairs = [
                ptx.pack_bf16x2(weights[i], weights[i + 1])
                for i in range(4 * n, min(4 * n + 8, self.sums), 2)
            ]
            narrow.stmatrix_trans(place + n * 1024, pairs)

    @cute.jit
    def move_origin(
        self,
        scores: Any,
        present: Any,
        shifts: Any,
        totals: Any,
        started: Any,
        values: Any,
        scale_log2: Float32,
    ) -> None:
        """Take the tile's maxima into the origins; scale what was summed before."""
        fresh = started[0] == 0
        place = self.exchange + 8 * self.quad
        for n in cutlass.range_constexpr(self.blocks):
            tops = []
            for e in cutlass.range_constexpr(2):
                top = Float32(-Float32.inf)
                for h in cutlass.range_constexpr(2):
                    score = scores[4 * n + 2 * h + e] * scale_log2
                    top = ptx.maximum(top, choose(present[h], score, Float32(-Float32.inf)))
                for mask in (4, 8, 16):
                    top = ptx.maximum(top, ptx.shuffle_xor(top, mask))
                tops.append(top)
            ptx.shared_store_f32x2(place + (self.warp * self.heads + 8 * n) * 4, *tops)
        cute.arch.sync_threads()
        for n in cutlass.range_constexpr(self.blocks):
            for e in cutlass.range_constexpr(2):
                c = 2 * n + e
                old = Float32(0.0) - shifts[c]
                peak = choose(fresh, Float32(-Float32.inf), old)
                for w in cutlass.range_constexpr(4):
                    line = self.exchange + (w * self.heads + 8 * n) * 4 + 8 * self.quad
                    peak = ptx.maximum(peak, ptx.shared_load_f32(line + 4 * e))
                origin = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
                gain = choose(fresh, Float32(0.0), ptx.exp2(old - origin))
                shifts[c] = Float32(0.0) - origin
                totals[c] = totals[c] * gain
                for atom in cutlass.range_constexpr(ATOMS):
                    for h in cutlass.range_constexpr(2):
                        at = atom * self.sums + 4 * n + 2 * h + e
                        values[at] = values[at] * gain
        started[0] = Int32(1)

    def accumulate(self, values: Any) -> None:
        """Start O^T += V^T P^T."""
        a, b = narrow.descriptor_low(self.keys), narrow.descriptor_low(self.weights)
        steps = tuple((k * 2048, k * 32) for k in range(4))
        atoms = min(ATOMS, MAX_SUMS // self.sums)
        for start in range(0, ATOMS, atoms):
            at = range(start * self.sums, (start + atoms) * self.sums)
            rows = tuple(i * ATOM_BYTES for i in range(start, start + atoms))
            sums = narrow.wgmma_transposed([values[i] for i in at], a, b, rows, steps)
            for i, value in zip(at, sums, strict=True):
                values[i] = value

    @cute.jit
    def write_gain(
        self,
        shifts: Any,
        totals: Any,
        first_head: Int32,
        token: Int32,
        split: Int32,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Each head's log-sum-exp to global memory; its sums' last factor takes its total's place.

        The totals of the four warps meet in shared memory.
        """
        num_heads = operands.lse.shape[1]
        place = self.exchange + 8 * self.quad
        for n in cutlass.range_constexpr(self.blocks):
            for e in cutlass.range_constexpr(2):
                for mask in (4, 8, 16):
                    c = 2 * n + e
                    totals[c] = totals[c] + ptx.shuffle_xor(totals[c], mask)
            line = place + (self.warp * self.heads + 8 * n) * 4
            ptx.shared_store_f32x2(line, totals[2 * n], totals[2 * n + 1])
        cute.arch.sync_threads()
        for c in cutlass.range_constexpr(2 * self.blocks):
            local = 8 * (c // 2) + 2 * self.quad + c % 2
            parts = [
                ptx.shared_load_f32(self.exchange + (w * self.heads + local) * 4) for w in range(4)
            ]
            total = (parts[0] + parts[1]) + (parts[2] + parts[3])
            head = first_head + local
            present = head < num_heads
            mine = present & (self.tid < 4)
            log_sum = ptx.log2(total) - shifts[c]
            gain = Float32(1.0) / total
            if numbers.splits == 1:
                at = (Int64(token) * num_heads + head) * 4
                ptx.global_store_f32_if(mine, address(operands.lse) + at, log_sum * Float32(LN2))
                sink_at = Int64(choose(present, head, first_head)) * 4
                sink = ptx.global_load_f32(address(operands.sinks) + sink_at)
                weight = ptx.exp2(sink * Float32(LOG2_E) + shifts[c])
                gain = numbers.out_scale / (total + weight)
            else:
                row = split * Int32(operands.lse.shape[0]) + token
                at = (Int64(row) * num_heads + head) * 4
                ptx.global_store_f32_if(mine, address(operands.part_lse) + at, log_sum)
            totals[c] = choose(total == Float32(0.0), Float32(0.0), gain)

    def staged(self, head: Any, dim: Any) -> Int32:
        """Where a float32 of the output waits: rows of 512, turned so that banks differ."""
        return self.keys + (head * HEAD_DIM + ((dim + 8 * (head // 2)) & (HEAD_DIM - 1))) * 4

    def stage_output(self, values: Any, gains: Any) -> None:
        """Scaled O^T to shared memory as [heads, 512] in the natural order of dims.

        A thread's rows are place `group` of units 2 w and 2 w + 1 of each atom.
        """
        lane, second = self.group >> 1, self.group & 1
        later = 2 * (self.warp & 1)
        for atom in range(ATOMS):
            dim = self._first_dim(atom, lane, self.warp >> 1)
            for n in range(self.blocks):
                for e in range(2):
                    head = 8 * n + 2 * self.quad + e
                    gain = gains[2 * n + e] * Float32(1.0 if atom == 7 else 256.0)
                    at = atom * self.sums + 4 * n + e
                    low, high = values[at] * gain, values[at + 2] * gain
                    if atom == 7:
                        place = dim + 2 * later + second
                        ptx.shared_store_f32(self.staged(head, place), low)
                        ptx.shared_store_f32(self.staged(head, place + 2), high)
                    else:
                        place = dim + 4 * second + 2 - later
                        ptx.shared_store_f32x2(self.staged(head, place), high, low)

    def _first_dim(self, atom: int, lane: Int32, u: Int32) -> Int32:
        """First of the eight dims that lane `lane` of a quad decodes as word u of an atom."""
        if atom == 7:
            return 448 + 32 * u + 8 * lane
        if atom == 6:
            return 384 + 16 * lane + 8 * u
        return 128 * (atom // 2) + 32 * lane + 16 * (atom % 2) + 8 * u

    def written_dim(self) -> Int32:
        """The first of the eight dims of each head that this thread writes."""
        return (self.tid & 63) * 8

    @cute.jit
    def write_output(
        self,
        target: Any,
        first_head: Int32,
        num_heads: Int32,
        row: Int32,
        final: cutlass.Constexpr,
        angles: Any,
    ) -> None:
        """The staged tile to global memory: bf16 of the output, or float32 of one split."""
        for i in cutlass.range_constexpr(self.heads // 2):
            local, dim = 2 * i + (self.warp >> 1), self.written_dim()
            head = first_head + local
            if head < num_heads:
                place = self.staged(local, dim)
                low = ptx.shared_load_f32x4(place)
                high = ptx.shared_load_f32x4(place + 16)
                at = (Int64(row) * num_heads + head) * HEAD_DIM + Int64(dim)
                if cutlass.const_expr(final):
                    if cutlass.const_expr(self.shape.lists.rotated):
                        both = turn_back([*low, *high], dim, angles)
                        low, high = both[:4], both[4:]
                    packed = [ptx.pack_bf16x2(v[j], v[j + 1]) for v in (low, high) for j in (0, 2)]
                    ptx.global_store_u32x4(address(target) + at * 2, *packed)
                else:
                    ptx.global_store_f32x4(address(target) + at * 4, *low)
                    ptx.global_store_f32x4(address(target) + at * 4 + 16, *high)


@compiled_kernel
def compile_narrow(arch: str, shape: NarrowShape) -> Any:
    """Compile for sm_90a and a static shape, from fake tensors; needs no GPU."""
    operands = fake_operands(shape.lists.slot_bytes)
    return compile_for(arch, NarrowAttention(shape), operands, fake_numbers())

"""Sparse attention for tiles of 8 heads: each warp attends to its own keys and waits for no other.

A block of four warps serves one token, eight heads and one share of the token's keys, 64 keys at a
time, 16 of them a warp's; two blocks share an SM. A warp holds the sums of all 512 dims of its
keys; the four meet once, at the end, when each head's sums are brought to one origin and added.

- S^T = K Q^T by mma.sync (m16n8k16). Records go from global memory to registers; a quad holds two
  keys, and what is decoded is the A operand as it is (the order of dims inside the contraction is
  free, Q in shared memory follows it). Words of the next tile are asked for as soon as those of
  this one are used. Nothing is read for a place without record: its scales count as 0, hence its
  values, and its score as -inf.
- The same registers are stored, as V. O^T = V^T P^T: V^T is read transposed (ldmatrix.trans).
- Softmax down the keys: weights are taken relative to the maximum of the warp's first keys. A head
  whose scores grow by more than 2^GROWTH moves the origin, so most tiles need no exchange between
  lanes. Sums of weights stay with their lanes until the end.

Tile in shared memory: 8 atoms of [64 keys, 64 places] bf16, 128 bytes a key, units of 16 bytes
turned by the key. Places 8 (4 u + j) + 2 q + (0, 1) of an atom hold pair j of the eight dims that
lane q of a quad decodes as word u (`_first_dim`), NoPE in the order of `unpack8` and times 2^-8;
Q's NoPE dims carry the 2^8 for the scores, the output's gain carries it for the values.

Roofline, per token: bytes = 384 (window + K) + 2 x 1024 H; flops = 2 x 2 H (window + K) 512. At
4.2 TB/s an SM has 1350 cycles for 64 keys. Shared memory, per 64 keys: 64 KB written and 64 KB read
for V, 32 KB read for Q, 1280 cycles. Decoding: 3584 words of 19 instructions, 530 cycles of the
SM's issue, 840 of its integer pipes.

Measured on an H200, 2026-12-02, 8 heads, window 128, microseconds with the best of the timed
splits, over FlashMLA's FP8 kernel with 64 heads in the same run:

    top-k  batch 1      16           64           128          256
    512    10.2 1.32x   12.6 1.46x   19.2 2.36x   25.0 1.92x   35.5 2.59x
    1024   11.2 1.37x   16.2 1.41x   24.7 2.56x   35.7 2.16x   55.7 2.64x

Two blocks on an SM take 2170 cycles for 64 keys of each, one alone 3360; 11 us of a call do not
depend on the keys. Left out one at a time, 264 tokens, top-k 1024, of 56.1 us: stores of V 51.3,
products with V 51.8, products with Q 52.4, decoding 53.3, loads or softmax nothing. With the loads
of the next tile after the last product 62.6. The same with two warps that share 32 keys of 16
heads, each half of the dims, took 82.1 us, more than `hopper/narrow`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention import solo_ptx as solo
from sglang_dsv4.kernels.attention.combine import LN2, LOG2_E, combine_splits
from sglang_dsv4.kernels.attention.dequant import ROPE_OFFSET, query_pairs, scale_pairs, unpack8
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

HEADS = 8
WARPS = 4
THREADS = 32 * WARPS
BLOCKS_PER_SM = 2
ATOMS = 8
ATOM_BYTES = TILE * 128
QUERY_ATOM = HEADS * 128
KEYS_BYTES = ATOMS * ATOM_BYTES
# Weights up to 2^GROWTH are as exact in bf16 and float32 as those up to 1.
GROWTH = 64.0
# Registers of one key in a thread: 12 + 2 NoPE words, 8 of RoPE; 4 of scales.
KEY_WORDS, KEY_SCALES = 22, 4
# Accumulators of a thread: 32 tiles of 16 dims x 8 heads.
SUMS = 128


@dataclass(frozen=True)
class SoloShape:
    """Static shape: what the lists are."""

    lists: ListShape


def shared_bytes() -> int:
    """Shared memory of a block: keys, Q, weights, each warp's origins and totals."""
    return KEYS_BYTES + HEADS * (2 * HEAD_DIM + 2 * TILE + 8 * WARPS)


class SoloAttention:
    """The kernel for one static shape."""

    def __init__(self, shape: SoloShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(self, operands: Operands, numbers: Numbers, stream: Any) -> None:
        """Launch the attention and, with more than one split, the combination."""
        tokens, heads = operands.out.shape[0], operands.out.shape[1]
        head_tiles = (heads + (HEADS - 1)) // HEADS
        self.kernel(operands, numbers, head_tiles).launch(
            grid=[tokens * head_tiles, numbers.splits, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=100,
        )
        combine_splits(operands, numbers, self.shape.lists.rotated, stream)

    @cute.kernel
    def kernel(self, operands: Operands, numbers: Numbers, head_tiles: Int32) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, split, _ = cute.arch.block_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.locate(tid)
        token = block // head_tiles
        first_head = (block - token * head_tiles) * HEADS
        lists = TokenLists(self.shape.lists, operands, numbers, token)
        first, last = lists.share(split, numbers.splits)

        memory = cutlass.memory.SmemAllocator()
        self.keys = memory.allocate(shared_bytes(), 1024).toint()
        self.query = self.keys + KEYS_BYTES
        self.weights = self.query + HEADS * 2 * HEAD_DIM
        self.results = self.weights + HEADS * 2 * TILE

        if (first < last) | (numbers.splits == 1):
            self.attend(lists, first, last, operands, numbers, token, first_head, split)
        else:
            head = first_head + tid
            present = (tid < HEADS) & (head < operands.out.shape[1])
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
        num_heads, tid = operands.out.shape[1], self.tid
        words = cute.make_rmem_tensor(2 * KEY_WORDS, Uint32)
        scales = cute.make_rmem_tensor(2 * KEY_SCALES, Uint32)
        # A key's mask: all ones where it has a record.
        listed = cute.make_rmem_tensor(2, Uint32)
        upcoming = cute.make_rmem_tensor(2, Int64 if self.shape.lists.slot_bytes == 8 else Int32)
        query = cute.make_rmem_tensor(16, Uint32)
        values = cute.make_rmem_tensor(SUMS, Float32)
        # For each of this thread's heads: minus the origin of its weights, and their sum.
        shifts = cute.make_rmem_tensor(2, Float32)
        totals = cute.make_rmem_tensor(2, Float32)
        started = cute.make_rmem_tensor(1, Int32)
        started[0] = Int32(0)
        for i in cutlass.range_constexpr(2 * KEY_WORDS):
            words[i] = Uint32(0)
        for i in cutlass.range_constexpr(2 * KEY_SCALES):
            scales[i] = Uint32(0)
        for i in cutlass.range_constexpr(2):
            shifts[i] = Float32(0.0)
            totals[i] = Float32(0.0)

        if first < last:
            self.fetch_slots(lists, first, upcoming)
        self.load_query(query, operands.q, token, first_head, num_heads)
        if first < last:
            places = self.find(lists, first, first < last, upcoming, listed)
            self.fetch_scales(places, scales)
            for piece in cutlass.range_constexpr(4):
                self.fetch_words(piece, places, words)
            self.fetch_slots(lists, cutlass.min(first + 1, last - 1), upcoming)
        self.store_query(query, first_head, num_heads)
        for i in cutlass.range_constexpr(SUMS):
            values[i] = Float32(0.0)
        cute.arch.sync_threads()

        for tile in cutlass.range(first, last, 1):
            self.locate(ptx.opaque(tid))
            present = [listed[h] != Uint32(0) for h in range(2)]
            scores = self.score(lists, tile, last, upcoming, words, scales, listed)
            self.softmax(scores, present, shifts, totals, started, values, numbers.scale_log2)
            self.locate(ptx.opaque(tid))
            self.accumulate(values)
            cute.arch.sync_warp()

        self.locate(ptx.opaque(tid))
        cute.arch.sync_threads()
        self.publish(shifts, totals)
        cute.arch.sync_threads()
        gains = cute.make_rmem_tensor(2, Float32)
        angles = cute.make_rmem_tensor(8, Float32)
        rotated = self.shape.lists.rotated
        position = load_position(operands, token, rotated)
        self.write_gain(shifts, gains, first_head, token, split, operands, numbers)
        load_written_angles(angles, operands, numbers, position, self.written_dim, rotated)
        self.stage_output(values, gains)
        cute.arch.sync_threads()
        if numbers.splits == 1:
            self.write_output(operands.out, first_head, num_heads, token, True, angles)
        else:
            row = split * Int32(operands.out.shape[0]) + token
            self.write_output(operands.part_out, first_head, num_heads, row, False, angles)

    def locate(self, tid: Int32) -> None:
        """What follows from the thread's index; computed anew for each tile, not kept."""
        self.tid, self.lane = tid, tid & 31
        self.group, self.quad = self.lane >> 2, self.lane & 3

    def fetch_slots(self, lists: Any, tile: Any, upcoming: Any) -> None:
        """Start the loads of the slots of this thread's two keys."""
        for h in range(2):
            upcoming[h] = lists.load_slot(tile, self.warp * 16 + 8 * h + self.group)

    def find(self, lists: Any, tile: Any, exists: Any, upcoming: Any, listed: Any) -> list:
        """For each of two keys: whether it has a record, its address and that of its scales."""
        pool = lists.pool(tile)
        places = []
        for h in range(2):
            key = self.warp * 16 + 8 * h + self.group
            present, data, scale = lists.locate(tile, key, upcoming[h])
            present = present & exists
            listed[h] = choose(present, Uint32(0xFFFFFFFF), Uint32(0))
            places.append((present, pool + Int64(data) * 16, pool + Int64(scale) * 16))
        return places

    def fetch_scales(self, places: list, scales: Any) -> None:
        """Start the loads of two keys' scales of this lane's words, two of each 128 dims."""
        for h in range(2):
            present, _, scale = places[h]
            at = KEY_SCALES * h
            for p in range(3):
                start = scale + Int64(2 * self.quad) + 8 * p
                scales[at + p] = solo.load_record_u16_if(present, start, scales[at + p])
            start = scale + Int64(self.quad) + 24
            scales[at + 3] = solo.load_record_u8_if(present, start, scales[at + 3])

    def fetch_words(self, piece: int, places: list, words: Any) -> None:
        """Start the loads of 128 dims of two keys.

        A quad reads 64 bytes of a key at once, at last 32: lane q has words 4 q of each 128 dims,
        words 2 q of the last 64, and 16 bytes of each half of the RoPE dims.
        """
        for h in range(2):
            present, record, _ = places[h]
            turned = record + Int64(16 * self.quad)
            at = KEY_WORDS * h
            if piece < 3:
                self.load_four(present, turned + 64 * piece, words, at + 4 * piece)
            else:
                last = record + Int64(192 + 8 * self.quad)
                old = words[at + 12], words[at + 13]
                words[at + 12], words[at + 13] = ptx.global_load_x2_if(present, last, *old)
                for u in range(2):
                    start = turned + (ROPE_OFFSET + 64 * u)
                    self.load_four(present, start, words, at + 14 + 4 * u)

    def load_four(self, present: Any, start: Any, words: Any, at: int) -> None:
        """Four words; without a record they stay what they are."""
        loaded = solo.load_record_x4_if(present, start, [words[at + i] for i in range(4)])
        for i in range(4):
            words[at + i] = loaded[i]

    def load_query(
        self, query: Any, q: Any, token: Int32, first_head: Int32, num_heads: Any
    ) -> None:
        """Start the loads of Q: lane group g takes one head and warp w two atoms."""
        row = address(q) + Int64(token) * q.stride[0] * 2
        head = first_head + self.group
        safe = choose(head < num_heads, head, first_head)
        start = row + Int64(safe) * q.stride[1] * 2
        for a in range(2):
            for u in range(2):
                nope = self.warp * 128 + self.quad * 32 + 16 * a + 8 * u
                last = 384 + 16 * self.quad + 8 * u if a == 0 else 448 + 32 * u + 8 * self.quad
                dim = choose(self.warp == 3, last, nope)
                loaded = ptx.global_load_x4(start + Int64(dim) * 2)
                for i in range(4):
                    query[8 * a + 4 * u + i] = loaded[i]

    def store_query(self, query: Any, first_head: Int32, num_heads: Any) -> None:
        """Q to shared memory, K-major, in the order in which decoded registers hold the dims."""
        mask = choose(first_head + self.group < num_heads, Uint32(0xFFFFFFFF), Uint32(0))
        for a in range(2):
            atom = self.query + (2 * self.warp + a) * QUERY_ATOM
            row = atom + self.group * 128 + 4 * self.quad
            for u in range(2):
                words = [query[8 * a + 4 * u + i] for i in range(4)]
                pairs = query_pairs(words, mask)
                for i in range(4):
                    pair = pairs[i]
                    if a == 1:
                        pair = choose(self.warp == 3, words[i] & mask, pair)
                    ptx.shared_store_u32(row + ((4 * u + i) ^ self.group) * 16, pair)

    def score(
        self,
        lists: Any,
        tile: Any,
        last: Any,
        upcoming: Any,
        words: Any,
        scales: Any,
        listed: Any,
    ) -> list:
        """Decode 16 keys, store them as V, S^T = K Q^T; start the loads of the next tile."""
        masks = [listed[h] for h in range(2)]
        row, matrix = self.lane & 7, self.lane >> 3
        line = self.keys + (self.warp * 16 + 8 * (matrix & 1) + row) * 128
        stores = [line + ((2 * c + (matrix >> 1)) ^ row) * 16 for c in range(4)]
        places = self.find(lists, tile + 1, tile + 1 < last, upcoming, listed)
        self.fetch_slots(lists, cutlass.min(tile + 2, last - 1), upcoming)
        asked = [self.query + row * 128 + ((4 * u + matrix) ^ row) * 16 for u in range(2)]
        # Two chains of products, so that one need not wait for the other.
        chains = [[Float32(0.0)] * 4 for _ in range(2)]
        pairs: list = []
        for atom in range(ATOMS):
            if atom % 2 == 0:
                pairs = [self.key_scales(atom // 2, h, scales, masks) for h in range(2)]
                if atom == 6:
                    self.fetch_scales(places, scales)
            for u in range(2):
                low, high = (
                    self.unit(atom, u, h, words, masks, pairs[h][atom % 2]) for h in range(2)
                )
                fragments = [[low[k], high[k], low[k + 1], high[k + 1]] for k in (0, 2)]
                b = ptx.ldmatrix_x4(asked[u] + atom * QUERY_ATOM)
                for k in range(2):
                    solo.stmatrix_x4(stores[2 * u + k] + atom * ATOM_BYTES, *fragments[k])
                for k in range(2):
                    chains[k] = list(ptx.mma_bf16(fragments[k], b[2 * k : 2 * k + 2], chains[k]))
            if atom % 2 == 1:
                self.fetch_words(atom // 2, places, words)
        return [a + b for a, b in zip(*chains, strict=True)]

    def key_scales(self, pair: int, h: int, scales: Any, masks: list) -> list[Uint32]:
        """Scale pairs of a key for this lane's words of two atoms; 0 for a key without record."""
        return scale_pairs(scales[KEY_SCALES * h + pair] & masks[h])

    def unit(
        self, atom: int, u: int, h: int, words: Any, masks: list, scale: Uint32
    ) -> list[Uint32]:
        """Eight dims of a key as four bf16 pairs."""
        at = KEY_WORDS * h
        if atom == 7:
            return [words[at + 14 + 4 * u + i] & masks[h] for i in range(4)]
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
        """Weights of the warp's keys to shared memory, visible to the warp when this returns."""
        weights = cute.make_rmem_tensor(4, Float32)
        grown = self.weigh(scores, present, shifts, weights, scale_log2)
        for h in cutlass.range_constexpr(2):
            grown = grown | (present[h] & (started[0] == 0))
        self.store_weights(weights)
        moved = ptx.any_lane(grown)
        cute.arch.sync_warp()
        if moved:
            self.move_origin(scores, present, shifts, totals, started, values, scale_log2)
            self.weigh(scores, present, shifts, weights, scale_log2)
            self.store_weights(weights)
            cute.arch.sync_warp()
        for e in cutlass.range_constexpr(2):
            totals[e] = totals[e] + (weights[e] + weights[e + 2])

    def weigh(
        self, scores: Any, present: Any, shifts: Any, weights: Any, scale_log2: Float32
    ) -> Any:
        """exp2(score - origin) of this thread's keys and heads; whether any exceeds 2^GROWTH."""
        grown = None
        for i in range(4):
            power = solo.fma(scores[i], scale_log2, shifts[i % 2])
            power = choose(present[i // 2], power, Float32(-Float32.inf))
            above = power > Float32(GROWTH)
            grown = above if grown is None else grown | above
            weights[i] = ptx.exp2(power)
        return grown

    def store_weights(self, weights: Any) -> None:
        """P to shared memory as [heads, 64 keys] bf16, 128 bytes a head, units turned."""
        row, matrix = self.lane & 7, self.lane >> 3
        chunk = 2 * self.warp + (matrix & 1)
        place = self.weights + row * 128 + (chunk ^ row) * 16
        pairs = [ptx.pack_bf16x2(weights[i], weights[i + 1]) for i in (0, 2)]
        solo.stmatrix_x2_trans(place, *pairs)

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
        """Take the keys' maxima into the origins; scale what was summed before."""
        fresh = started[0] == 0
        for e in cutlass.range_constexpr(2):
            top = Float32(-Float32.inf)
            for h in cutlass.range_constexpr(2):
                score = scores[2 * h + e] * scale_log2
                top = ptx.maximum(top, choose(present[h], score, Float32(-Float32.inf)))
            for mask in (4, 8, 16):
                top = ptx.maximum(top, ptx.shuffle_xor(top, mask))
            old = Float32(0.0) - shifts[e]
            peak = ptx.maximum(choose(fresh, Float32(-Float32.inf), old), top)
            origin = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
            gain = choose(fresh, Float32(0.0), ptx.exp2(old - origin))
            shifts[e] = Float32(0.0) - origin
            totals[e] = totals[e] * gain
            for m in cutlass.range_constexpr(SUMS // 4):
                for h in cutlass.range_constexpr(2):
                    at = 4 * m + 2 * h + e
                    values[at] = values[at] * gain
        started[0] = Int32(1)

    def accumulate(self, values: Any) -> None:
        """O^T += V^T P^T over the warp's keys."""
        row, matrix = self.lane & 7, self.lane >> 3
        line = self.keys + (self.warp * 16 + 8 * (matrix >> 1) + row) * 128
        places = [line + ((2 * m + (matrix & 1)) ^ row) * 16 for m in range(4)]
        chunk = (2 * self.warp + (matrix & 1)) ^ row
        weights = ptx.ldmatrix_x4(self.weights + row * 128 + chunk * 16)[:2]
        for m in range(SUMS // 4):
            a = ptx.ldmatrix_x4_trans(places[m % 4] + m // 4 * ATOM_BYTES)
            sums = [values[4 * m + c] for c in range(4)]
            for c, value in enumerate(ptx.mma_bf16(a, weights, sums)):
                values[4 * m + c] = value

    def publish(self, shifts: Any, totals: Any) -> None:
        """Each warp's origin and total of each head to shared memory."""
        for e in range(2):
            for mask in (4, 8, 16):
                totals[e] = totals[e] + ptx.shuffle_xor(totals[e], mask)
            empty = totals[e] == Float32(0.0)
            origin = choose(empty, Float32(-Float32.inf), Float32(0.0) - shifts[e])
            place = self.results + (self.warp * HEADS + 2 * self.quad + e) * 8
            ptx.shared_store_f32x2(place, origin, totals[e])

    @cute.jit
    def write_gain(
        self,
        shifts: Any,
        gains: Any,
        first_head: Int32,
        token: Int32,
        split: Int32,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Each head's log-sum-exp to global memory; the last factor of this warp's sums."""
        num_heads = operands.lse.shape[1]
        for e in cutlass.range_constexpr(2):
            local = 2 * self.quad + e
            parts = [
                ptx.shared_load_f32x2(self.results + (w * HEADS + local) * 8) for w in range(WARPS)
            ]
            peak = Float32(-Float32.inf)
            for origin, _ in parts:
                peak = ptx.maximum(peak, origin)
            base = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
            total = Float32(0.0)
            for origin, part in parts:
                total = total + ptx.exp2(origin - base) * part
            head = first_head + local
            present = head < num_heads
            mine = present & (self.tid < 4)
            log_sum = ptx.log2(total) + base
            gain = Float32(1.0) / total
            if numbers.splits == 1:
                at = (Int64(token) * num_heads + head) * 4
                ptx.global_store_f32_if(mine, address(operands.lse) + at, log_sum * Float32(LN2))
                sink_at = Int64(choose(present, head, first_head)) * 4
                sink = ptx.global_load_f32(address(operands.sinks) + sink_at)
                weight = ptx.exp2(sink * Float32(LOG2_E) - base)
                gain = numbers.out_scale / (total + weight)
            else:
                row = split * Int32(operands.lse.shape[0]) + token
                at = (Int64(row) * num_heads + head) * 4
                ptx.global_store_f32_if(mine, address(operands.part_lse) + at, log_sum)
            # The sums of a warp without weight are 0; its origin may be above the others'.
            own = ptx.exp2(Float32(0.0) - ptx.maximum(base + shifts[e], Float32(0.0)))
            gains[e] = choose(total == Float32(0.0), Float32(0.0), own * gain)

    def staged(self, warp: Any, head: Any, dim: Any) -> Int32:
        """Where a float32 of the output waits: rows of 512, turned so that banks differ."""
        turned = (dim + 8 * (head // 2)) & (HEAD_DIM - 1)
        return self.keys + ((warp * HEADS + head) * HEAD_DIM + turned) * 4

    def stage_output(self, values: Any, gains: Any) -> None:
        """Scaled O^T to shared memory as [warps, heads, 512] in the natural order of dims.

        A thread's rows are place `group` of each unit: of NoPE units 2 k and 2 k + 1 four
        neighbours, of RoPE units every second dim.
        """
        lane, second = self.group >> 1, self.group & 1
        for atom in range(ATOMS):
            for u in range(2):
                dim = self._first_dim(atom, lane, u)
                for e in range(2):
                    head = 2 * self.quad + e
                    gain = gains[e] * Float32(1.0 if atom == 7 else 256.0)
                    at = 4 * (4 * atom + 2 * u) + e
                    v = [values[i] * gain for i in (at, at + 2, at + 4, at + 6)]
                    if atom == 7:
                        for i in range(4):
                            place = self.staged(self.warp, head, dim + second + 2 * i)
                            ptx.shared_store_f32(place, v[i])
                    else:
                        place = self.staged(self.warp, head, dim + 4 * second)
                        solo.shared_store_f32x4(place, v[3], v[2], v[1], v[0])

    def _first_dim(self, atom: int, lane: Int32, u: int) -> Int32:
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
        """The staged tiles' sum to global memory: bf16 of the output, or float32 of one split."""
        for i in cutlass.range_constexpr(HEADS // 2):
            local, dim = 2 * i + (self.warp >> 1), self.written_dim()
            head = first_head + local
            if head < num_heads:
                low, high = self.total(local, dim), self.total(local, dim + 4)
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

    def total(self, head: Any, dim: Any) -> list:
        """Four dims summed over the warps, in their order."""
        total = list(ptx.shared_load_f32x4(self.staged(0, head, dim)))
        for warp in range(1, WARPS):
            part = ptx.shared_load_f32x4(self.staged(warp, head, dim))
            total = [a + b for a, b in zip(total, part, strict=True)]
        return total


@compiled_kernel
def compile_solo(arch: str, shape: SoloShape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    operands = fake_operands(shape.lists.slot_bytes)
    return compile_for(arch, SoloAttention(shape), operands, fake_numbers())

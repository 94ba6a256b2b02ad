"""Sparse attention on mma.sync (m16n8k16, bf16): one source for sm_90a, sm_100a and sm_120a.

One block serves one token, one tile of heads and one share of the token's list of keys, 64 keys at
a time. Warp w dequantises dims [128 (w % 4), +128) of keys [32 (w / 4), +32) from registers:

- S = Q K^T. A quad holds 32 bytes of a key, a thread the two words of one scale group, so
  dequantised pairs are B fragments as they are: the order of dims inside the contraction is free,
  and Q's fragments follow it. Lane l finds the record of key l and loads its scales; the others get
  both by shuffles. As soon as eight keys are multiplied, the loads of eight keys of the next tile
  take their registers; slots are loaded a tile earlier still and looked at only then.
- The same registers are stored as the bf16 tile [64 keys, 448] of the values. RoPE values need no
  conversion: cp.async copies them beside it, one tile ahead.
- The four dim quarters of the scores meet in shared memory; threads of one head do the softmax.
  Weights are relative to an origin that moves only when a score outgrows it by 2^GROWTH, so most
  tiles need no maximum over the lanes.
- O^T = V^T P^T. Warp w owns dims [64 w, +64), reading V^T from the tile by ldmatrix.trans.

Nothing is read for a place without record; it has scales 0, hence values 0, and score -inf. Q's
NoPE dims carry the 2^8 of `dequant` for the scores, the output's gain carries it for the values.

Roofline, per token: bytes = 384 (window + K) + 2 x 1024 H; flops = 2 x 2 H (window + K) 512.
Shared memory, per 64 keys and block: 56 KB written and 64 KB read for V, 8 KB written and read for
RoPE, 2 KB x heads for the scores' exchange, so about 160 KB at 16 heads against 33.5 KB x heads of
flops.

Measured on an H200, 2026-12-02, us: (264 tokens, top-k 1024, two blocks an SM) and (one token, 18
tiles in one block), no splits. 8 heads 69.1 and 40.7, 16 heads 78.7 and 49.7; with all loads of a
tile after its products, 77.4 and 49.5, 98.0 and 64.2. In that form the parts overlapped and none
dominated; the limit of 128 registers cost a lone block a fifth. One row for all keys takes twice as
long: one address that all SMs read is slower than memory, hence no read for absent keys.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.combine import LN2, LOG2_E, combine_splits
from sglang_dsv4.kernels.attention.dequant import (
    NOPE_ROW,
    ROPE_OFFSET,
    ROPE_ROW,
    query_pairs,
    scale_pairs,
    unpack8,
)
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
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel

THREADS = 256
HEAD_TILES = (8, 16, 32)
# Row lengths that spread rows over the banks: float32 scores of a head, bf16 weights of a head.
SCORE_ROW = 4 * (TILE + 8)
WEIGHT_ROW = 2 * (TILE + 8)
# Shared memory of each block that the driver keeps for itself.
RESERVED_BYTES = 1024
# Weights up to 2^GROWTH are as exact in bf16 and float32 as those up to 1.
GROWTH = 64.0
NOPE_TILE = TILE * NOPE_ROW
ROPE_TILE = TILE * ROPE_ROW


@dataclass(frozen=True)
class Shape:
    """Static shape: heads of a block (8, 16, 32) and what the lists are."""

    head_tile: int
    lists: ListShape


def shared_bytes(head_tile: int) -> int:
    """Shared memory of a block."""
    exchange = head_tile * (4 * SCORE_ROW + WEIGHT_ROW + 4)
    return NOPE_TILE + 2 * ROPE_TILE + exchange


class SparseAttention:
    """The kernel for one static shape on one architecture."""

    def __init__(self, shape: Shape, arch: str) -> None:
        self.shape = shape
        self.heads = shape.head_tile
        self.blocks = shape.head_tile // 8
        self.rows = (shape.head_tile + 15) // 16
        self.lanes_per_head = THREADS // shape.head_tile
        self.keys_per_lane = TILE // self.lanes_per_head
        # Two blocks share an SM where shared memory and, up to 16 heads, the registers allow it.
        # What they leave of it (in percent) is L1.
        block, sm = (
            shared_bytes(shape.head_tile) + RESERVED_BYTES,
            SHARED_BYTES[arch] + RESERVED_BYTES,
        )
        self.blocks_per_sm = min(sm // block, 2 if shape.head_tile <= 16 else 1)
        self.carveout = math.ceil(100 * self.blocks_per_sm * block / sm)

    @cute.jit
    def __call__(self, operands: Operands, numbers: Numbers, stream: Any) -> None:
        """Launch the attention and, with more than one split, the combination."""
        tokens, heads = operands.out.shape[0], operands.out.shape[1]
        head_tiles = (heads + self.heads - 1) // self.heads
        self.kernel(operands, numbers, head_tiles).launch(
            grid=[tokens * head_tiles, numbers.splits, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=self.carveout,
        )
        combine_splits(operands, numbers, self.shape.lists.rotated, stream)

    @cute.kernel
    def kernel(self, operands: Operands, numbers: Numbers, head_tiles: Int32) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, split, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.warp, self.quarter, self.half = warp, warp % 4, warp // 4
        token = block // head_tiles
        first_head = (block - token * head_tiles) * self.heads
        lists = TokenLists(self.shape.lists, operands, numbers, token)
        first, last = lists.share(split, numbers.splits)

        memory = cutlass.memory.SmemAllocator()
        base = memory.allocate(shared_bytes(self.heads), 128).toint()
        self.nope = base
        self.rope = base + NOPE_TILE
        self.scores = self.rope + 2 * ROPE_TILE
        self.weights = self.scores + 4 * self.heads * SCORE_ROW
        self.gains = self.weights + self.heads * WEIGHT_ROW

        if (first < last) | (numbers.splits == 1):
            self.attend(tid, lists, first, last, operands, numbers, token, first_head, split)
        else:
            head = first_head + tid
            present = (tid < self.heads) & (head < operands.out.shape[1])
            row = split * Int32(operands.out.shape[0]) + token
            at = (Int64(row) * operands.out.shape[1] + head) * 4
            ptx.global_store_f32_if(present, address(operands.part_lse) + at, Float32(-Float32.inf))

    @cute.jit
    def attend(
        self,
        tid: Int32,
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
        self.locate(tid)
        num_heads = operands.out.shape[1]
        query = cute.make_rmem_tensor(32 * self.rows, Uint32)
        for i in cutlass.range_constexpr(32 * self.rows):
            query[i] = Uint32(0)
        self.load_query(query, operands.q, token, first_head, num_heads)

        words = cute.make_rmem_tensor(16, Uint32)
        scales = cute.make_rmem_tensor(2, Uint32)
        listed = cute.make_rmem_tensor(1, Uint32)
        records = cute.make_rmem_tensor(1, Int32)
        wide = Int64 if self.shape.lists.slot_bytes == 8 else Int32
        upcoming = cute.make_rmem_tensor(1, wide)
        summed = cute.make_rmem_tensor(16 * self.blocks, Float32)
        for i in cutlass.range_constexpr(16 * self.blocks):
            summed[i] = Float32(0.0)
        peak = Float32(-Float32.inf)
        total = Float32(0.0)

        for i in cutlass.range_constexpr(16):
            words[i] = Uint32(0)
        self.fetch_slot(lists, first, upcoming)
        self.fetch_scales(lists, first, last, upcoming, listed, records, scales)
        for r in cutlass.range_constexpr(4):
            self.fetch_words(r, lists, first, first & 1, records, words)
        self.fetch_slot(lists, cutlass.max(cutlass.min(first + 1, last - 1), Int32(0)), upcoming)
        for tile in cutlass.range(first, last, 1):
            self.locate(ptx.opaque(tid))
            buffer = Int32(tile) & 1
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            present = listed[0]
            scale_bytes = self.share_scales(scales)
            self.fetch_scales(lists, tile + 1, last, upcoming, listed, records, scales)
            self.fetch_slot(lists, cutlass.min(tile + 2, last - 1), upcoming)
            for r in cutlass.range_constexpr(4):
                self.score_keys(r, words, scale_bytes[r], present, query, buffer)
                self.fetch_words(r, lists, tile + 1, 1 - buffer, records, words)
            cute.arch.sync_threads()
            peak, total = self.softmax(peak, total, numbers.scale_log2)
            cute.arch.sync_threads()
            self.accumulate(summed, buffer)
            cute.arch.sync_threads()

        self.locate(tid)
        for step in cutlass.range_constexpr(self.lanes_per_head.bit_length() - 1):
            total = total + ptx.shuffle_xor(total, 1 << step)
        angles = cute.make_rmem_tensor(8, Float32)
        rotated = self.shape.lists.rotated
        position = load_position(operands, token, rotated)
        self.write_gain(peak, total, first_head, token, split, operands, numbers)
        load_written_angles(angles, operands, numbers, position, self.written_dim, rotated)
        cute.arch.sync_threads()
        self.stage_output(summed)
        cute.arch.sync_threads()
        if numbers.splits == 1:
            self.write_output(operands.out, first_head, num_heads, token, True, angles)
        else:
            row = split * Int32(operands.out.shape[0]) + token
            self.write_output(operands.part_out, first_head, num_heads, row, False, angles)

    def locate(self, tid: Int32) -> None:
        """What follows from the thread's index; computed anew for each tile, not kept in registers.

        A thread stores its dequantised words in units of 16 bytes, turned by the key so that these
        stores and the transposed loads each touch every bank once.
        """
        self.tid, self.lane = tid, tid & 31
        self.group, self.quad = self.lane >> 2, self.lane & 3
        self.row = self.nope + (self.half * 32 + self.group) * NOPE_ROW + self.quarter * 256
        self.flip = self.group ^ (2 * self.quad)

    @cute.jit
    def load_query(
        self, query: Any, q: Any, token: Int32, first_head: Int32, num_heads: Any
    ) -> None:
        """A fragments of this quarter's dims for every block of eight heads; 0 for absent heads."""
        row = address(q) + Int64(token) * q.stride[0] * 2
        for n in cutlass.range_constexpr(self.blocks):
            head = first_head + n * 8 + self.group
            mask = choose(head < num_heads, Uint32(0xFFFFFFFF), Uint32(0))
            start = row + Int64(choose(head < num_heads, head, first_head)) * q.stride[1] * 2
            self.load_query_nope(query, n, start, mask, 0)
            if self.quarter < 3:
                self.load_query_nope(query, n, start, mask, 1)
            else:
                self.load_query_rope(query, n, start, mask)

    def load_query_nope(self, query: Any, n: int, start: Int64, mask: Uint32, part: int) -> None:
        """A fragments of the two words of a 64-dim part for eight heads; two products each."""
        for i in range(2):
            dim = self.quarter * 128 + part * 64 + self.quad * 16 + 8 * i
            pairs = query_pairs(ptx.global_load_x4(start + Int64(dim) * 2), mask)
            for u in range(2):
                at = ((4 * part + 2 * i + u) * self.rows + n // 2) * 4 + n % 2
                query[at] = pairs[2 * u]
                query[at + 2] = pairs[2 * u + 1]

    def load_query_rope(self, query: Any, n: int, start: Int64, mask: Uint32) -> None:
        """A fragments of the four products over the RoPE dims, in natural order."""
        for s in range(4):
            at = ((4 + s) * self.rows + n // 2) * 4 + n % 2
            for u in range(2):
                dim = 448 + 16 * s + 8 * u + 2 * self.quad
                word = Uint32(ptx.global_load_i32(start + Int64(dim) * 2)) & mask
                query[at + 2 * u] = word

    def fetch_slot(self, lists: Any, tile: Any, upcoming: Any) -> None:
        """Start the load of the slot of key `lane` of this warp's half of a tile."""
        upcoming[0] = lists.load_slot(tile, self.half * 32 + self.lane)

    def fetch_scales(
        self,
        lists: Any,
        tile: Any,
        last: Any,
        upcoming: Any,
        listed: Any,
        records: Any,
        scales: Any,
    ) -> None:
        """Find 32 keys' records and start the loads of their scales, lane l those of key l.

        Nothing is read for a key without record, or of tile `last`: its scales are 0, so that its
        values are 0, and its place is -1.
        """
        present, data, scale = lists.locate(tile, self.half * 32 + self.lane, upcoming[0])
        present = present & (tile < last)
        listed[0] = ptx.ballot(present)
        records[0] = choose(present, data, Int32(-1))
        at = lists.pool(tile) + Int64(scale) * 16 + Int64(self.quarter * 8)
        zero = Uint32(0)
        scales[0], scales[1] = ptx.global_load_x2_if(present, at, zero, zero)

    @cute.jit
    def fetch_words(
        self,
        r: cutlass.Constexpr,
        lists: Any,
        tile: Any,
        buffer: Int32,
        records: Any,
        words: Any,
    ) -> None:
        """Start the loads of eight keys: NoPE words to registers, in quarter 3 RoPE
        to shared memory instead of the other 64 dims."""
        pool = lists.pool(tile) + Int64(self.quarter * 64 + self.quad * 8)
        key = r * 8 + self.group
        place = ptx.shuffle_index(records[0], key)
        record = pool + Int64(place) * 16
        self.load_words(place >= 0, record, words, 4 * r)
        if self.quarter < 3:
            self.load_words(place >= 0, record + 32, words, 4 * r + 2)
        else:
            self.copy_rope(key, place, record, buffer)
        if cutlass.const_expr(r == 3):
            cute.arch.cp_async_commit_group()

    def load_words(self, condition: Any, at: Int64, words: Any, i: int) -> None:
        """Two words; without the condition they stay what they are."""
        words[i], words[i + 1] = ptx.global_load_x2_if(condition, at, words[i], words[i + 1])

    def copy_rope(self, key: Int32, place: Int32, record: Int64, buffer: Int32) -> None:
        """32 bytes a lane of a key's RoPE dims, or zeros for a key without record."""
        size = choose(place >= 0, Int32(16), Int32(0))
        line = self.rope + buffer * ROPE_TILE + (self.half * 32 + key) * ROPE_ROW
        first = record + Int64(ROPE_OFFSET - 192 + 8 * self.quad)
        for c in range(2):
            chunk = line + ((self.quad + 4 * c) ^ self.group) * 16
            ptx.copy_async_16(chunk, first + 64 * c, size)

    def share_scales(self, scales: Any) -> list[Uint32]:
        """For each of four groups of eight keys, the e4m3 bytes of this lane's two scale groups."""
        shared = []
        for r in range(4):
            key = r * 8 + self.group
            pair = ptx.shuffle_index(scales[0], key), ptx.shuffle_index(scales[1], key)
            shared.append(ptx.prmt(*pair, Uint32(self.quad * 17 + 64)))
        return shared

    @cute.jit
    def score_keys(
        self,
        r: cutlass.Constexpr,
        words: Any,
        scale_bytes: Uint32,
        listed: Uint32,
        query: Any,
        buffer: Int32,
    ) -> None:
        """Eight keys: dequantise this quarter's dims, store them, multiply them with Q."""
        sums = cute.make_rmem_tensor(4 * self.rows, Float32)
        for i in cutlass.range_constexpr(4 * self.rows):
            sums[i] = Float32(0.0)
        scaled = scale_pairs(scale_bytes)
        self.score_part(r, 0, words, scaled[0], query, sums)
        if self.quarter < 3:
            self.score_part(r, 1, words, scaled[1], query, sums)
        else:
            self.score_rope(r, query, sums, buffer)
            self.mask_scores(r, sums, listed)
        self.store_scores(r, sums)

    def score_part(
        self, r: int, part: int, words: Any, pair: Uint32, query: Any, sums: Any
    ) -> None:
        """64 dims (two words a thread) of eight keys: to the value tile, and products with Q."""
        for i in range(2):
            values = unpack8(words[4 * r + 2 * part + i], pair)
            line = self.row + r * 8 * NOPE_ROW + part * 128
            ptx.shared_store_x4(line + (self.flip ^ i) * 16, *values)
            for u in range(2):
                self.multiply(values[2 * u : 2 * u + 2], 4 * part + 2 * i + u, query, sums)

    def score_rope(self, r: int, query: Any, sums: Any, buffer: Int32) -> None:
        """Four products over the RoPE dims of eight keys, from shared memory."""
        row, matrix = self.lane & 7, self.lane >> 3
        line = self.rope + buffer * ROPE_TILE + (self.half * 32 + r * 8 + row) * ROPE_ROW
        for s in range(2):
            b = ptx.ldmatrix_x4(line + ((4 * s + matrix) ^ row) * 16)
            for u in range(2):
                self.multiply(b[2 * u : 2 * u + 2], 4 + 2 * s + u, query, sums)

    def multiply(self, b: Any, step: int, query: Any, sums: Any) -> None:
        """One product of eight keys and 16 dims with every block of 16 heads."""
        for m in range(self.rows):
            at = (step * self.rows + m) * 4
            a = [query[at + i] for i in range(4)]
            old = [sums[4 * m + c] for c in range(4)]
            for c, value in enumerate(ptx.mma_bf16(a, b, old)):
                sums[4 * m + c] = value

    def mask_scores(self, r: int, sums: Any, listed: Uint32) -> None:
        """-inf for a key without slot; one quarter's part is enough."""
        mine = listed >> Uint32(2 * self.quad)
        for y in range(2):
            present = (mine & Uint32(1 << (r * 8 + y))) != Uint32(0)
            for n in range(self.blocks):
                at = 4 * (n // 2) + 2 * (n % 2) + y
                sums[at] = choose(present, sums[at], Float32(-Float32.inf))

    def store_scores(self, r: int, sums: Any) -> None:
        """This quarter's part of S for eight keys."""
        row = self.quarter * self.heads + self.group
        place = self.scores + row * SCORE_ROW + (self.half * 32 + r * 8 + 2 * self.quad) * 4
        for n in range(self.blocks):
            at = 4 * (n // 2) + 2 * (n % 2)
            ptx.shared_store_f32x2(place + n * 8 * SCORE_ROW, sums[at], sums[at + 1])

    @cute.jit
    def softmax(self, peak: Float32, total: Float32, scale_log2: Float32) -> Any:
        """Weights exp2(score - peak) of one head's keys in bf16, and the gain of older sums."""
        head, part = (
            self.tid >> (self.lanes_per_head.bit_length() - 1),
            self.tid & (self.lanes_per_head - 1),
        )
        place = self.scores + head * SCORE_ROW + part * (4 * self.keys_per_lane)
        score = [Float32(0.0)] * self.keys_per_lane
        for quarter in cutlass.range_constexpr(4):
            line = place + quarter * self.heads * SCORE_ROW
            if cutlass.const_expr(self.keys_per_lane == 2):
                loaded = list(ptx.shared_load_f32x2(line))
            else:
                loaded = []
                for i in cutlass.range_constexpr(self.keys_per_lane // 4):
                    loaded += list(ptx.shared_load_f32x4(line + 16 * i))
            score = [a + b for a, b in zip(score, loaded, strict=True)]
        score = [s * scale_log2 for s in score]
        top = peak
        for s in score:
            top = ptx.maximum(top, s)
        gain = Float32(1.0)
        if ptx.any_lane(top > peak + Float32(GROWTH)):
            for step in cutlass.range_constexpr(self.lanes_per_head.bit_length() - 1):
                top = ptx.maximum(top, ptx.shuffle_xor(top, 1 << step))
            gain = ptx.exp2(peak - choose(top == Float32(-Float32.inf), Float32(0.0), top))
            peak = top
        origin = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
        weight = [ptx.exp2(s - origin) for s in score]
        total = total * gain
        for w in weight:
            total = total + w
        place = self.weights + head * WEIGHT_ROW + part * (2 * self.keys_per_lane)
        for i in cutlass.range_constexpr(self.keys_per_lane // 2):
            ptx.shared_store_u32(place + 4 * i, ptx.pack_bf16x2(weight[2 * i], weight[2 * i + 1]))
        ptx.shared_store_f32(self.gains + head * 4, gain)
        return peak, total

    def accumulate(self, summed: Any, buffer: Int32) -> None:
        """O^T = gain O^T + V^T P^T for this warp's 64 dims."""
        row, matrix = self.lane & 7, self.lane >> 3
        weights = []
        for n in range(self.blocks):
            place = self.weights + (n * 8 + row) * WEIGHT_ROW + matrix * 16
            weights.append((*ptx.ldmatrix_x4(place), *ptx.ldmatrix_x4(place + 64)))
            gains = ptx.shared_load_f32x2(self.gains + (n * 8 + 2 * self.quad) * 4)
            for m in range(4):
                for c in range(4):
                    at = (m * self.blocks + n) * 4 + c
                    summed[at] = summed[at] * gains[c % 2]
        roped = self.warp == 7
        pitch = choose(roped, Int32(ROPE_ROW), Int32(NOPE_ROW))
        start = choose(roped, self.rope + buffer * ROPE_TILE, self.nope + self.warp * 128)
        start = start + (row + 8 * (matrix >> 1)) * pitch
        for m in range(4):
            place = start + ((2 * m + (matrix & 1)) ^ row) * 16
            for k in range(4):
                a = ptx.ldmatrix_x4_trans(place + k * (16 * pitch))
                for n in range(self.blocks):
                    at = (m * self.blocks + n) * 4
                    sums = [summed[at + c] for c in range(4)]
                    b = (weights[n][2 * k], weights[n][2 * k + 1])
                    for c, value in enumerate(ptx.mma_bf16(a, b, sums)):
                        summed[at + c] = value

    @cute.jit
    def write_gain(
        self,
        peak: Float32,
        total: Float32,
        first_head: Int32,
        token: Int32,
        split: Int32,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Last factor of each head's sums to shared memory, its log-sum-exp to global memory."""
        local = self.tid >> (self.lanes_per_head.bit_length() - 1)
        head = first_head + local
        num_heads = operands.lse.shape[1]
        present = head < num_heads
        origin = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
        log_sum = origin + ptx.log2(total)
        gain = Float32(1.0) / total
        if numbers.splits == 1:
            at = (Int64(token) * num_heads + head) * 4
            ptx.global_store_f32_if(present, address(operands.lse) + at, log_sum * Float32(LN2))
            sink_at = Int64(choose(present, head, first_head)) * 4
            sink = ptx.global_load_f32(address(operands.sinks) + sink_at)
            gain = numbers.out_scale / (total + ptx.exp2(sink * Float32(LOG2_E) - origin))
        else:
            row = split * Int32(operands.lse.shape[0]) + token
            at = (Int64(row) * num_heads + head) * 4
            ptx.global_store_f32_if(present, address(operands.part_lse) + at, log_sum)
        gain = choose(total == Float32(0.0), Float32(0.0), gain)
        ptx.shared_store_f32(self.gains + local * 4, gain)

    def staged(self, head: Int32, dim: Int32) -> Int32:
        """Where a float32 of the output waits: rows of 512, turned so that banks differ."""
        return self.nope + (head * HEAD_DIM + ((dim + 8 * (head // 2)) & (HEAD_DIM - 1))) * 4

    def stage_output(self, summed: Any) -> None:
        """Scaled O^T to shared memory as [heads, 512] in the natural order of dims."""
        roped = self.warp == 7
        turned = (3 - self.group // 2) + 4 * (self.group % 2)
        dim = self.warp * 64 + choose(roped, self.group, turned)
        unit = choose(roped, Float32(1.0), Float32(256.0))
        for n in range(self.blocks):
            gains = ptx.shared_load_f32x2(self.gains + (n * 8 + 2 * self.quad) * 4)
            for m in range(4):
                for c in range(4):
                    head = n * 8 + 2 * self.quad + c % 2
                    value = summed[(m * self.blocks + n) * 4 + c] * (gains[c % 2] * unit)
                    ptx.shared_store_f32(self.staged(head, dim + m * 16 + 8 * (c // 2)), value)

    def written_dim(self) -> Int32:
        """The first of the eight dims of each head that this thread writes."""
        return ((self.warp % 2) * 32 + self.lane) * 8

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
        for i in cutlass.range_constexpr(self.heads // 4):
            local = i * 4 + self.warp // 2
            dim = self.written_dim()
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
def compile_sparse_attention(arch: str, shape: Shape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    operands = fake_operands(shape.lists.slot_bytes)
    return compile_for(arch, SparseAttention(shape, arch), operands, fake_numbers())

"""Sparse attention on mma.sync (m16n8k16, bf16): one source for sm_90a, sm_100a and sm_120a.

One block serves one token, one tile of heads and one share of the token's list of keys, 64 keys at
a time. Warp w dequantises dims [128 (w % 4), +128) of keys [32 (w / 4), +32) from registers:

- S = Q K^T. The records' words go from global memory to registers, one tile ahead. A quad holds
  32 bytes of a key, a thread the two words of one scale group, so dequantised pairs are B fragments
  as they are: the order of dims inside the contraction is free, and Q's fragments follow it. Lane
  l finds the record of key l and loads its scales; the others get both by shuffles.
- The same registers are stored as the bf16 tile [64 keys, 448] of the values. RoPE values need no
  conversion: cp.async copies them beside it, one tile ahead.
- The four dim quarters of the scores meet in shared memory; threads of one head do the softmax.
- O^T = V^T P^T. Warp w owns dims [64 w, +64), reading V^T from the tile by ldmatrix.trans.

e2m1 x e4m3 is decoded exactly: shifts and masks place sign, exponent and mantissa in a bf16 of
value x 2^-126, one mul.bf16x2 by scale x 2^118 gives value x scale x 2^-8. Q's NoPE dims carry the
2^8 for the scores, the output's gain carries it for the values.

Roofline, per token: bytes = 384 (window + K) + 2 x 1024 H; flops = 2 x 2 H (window + K) 512.
Shared memory, per 64 keys and block: 56 KB written and 64 KB read for V, 8 KB written and read for
RoPE, 2 KB x heads for the scores' exchange, so about 160 KB at 16 heads against 33.5 KB x heads of
flops.

Measured on an H200, 2026-12-02 (BENCHMARKS.md): 64 and 128 heads at batch 64 to 256 take 17-20% of
the bound of bytes and flops, so neither bandwidth nor the tensor cores limit. A block alone on its
SM takes 2.7, 3.1 and 3.6 us for 64 keys with 8, 16 and 32 heads: work per key, not the products.
Top-k 1024, batch 64: 29.1, 36.8, 76.2 and 144.0 us at 8, 16, 64 and 128 heads; FlashMLA's FP8
kernel 61.6, 61.8, 61.9 and 53.6 us.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.combine import HEAD_DIM, LN2, LOG2_E, combine
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel

TILE = 64
THREADS = 256
HEAD_TILES = (8, 16, 32)
_LAYOUT = RecordLayout(KVFormat.NVFP4, TILE)
DATA_BYTES = _LAYOUT.data_bytes
SCALE_BYTES = _LAYOUT.scale_bytes
ROPE_OFFSET = _LAYOUT.nope_bytes
NOPE_ROW = 2 * _LAYOUT.nope_dim
ROPE_ROW = 2 * _LAYOUT.rope_dim
# Row lengths that spread rows over the banks: float32 scores of a head, bf16 weights of a head.
SCORE_ROW = 4 * (TILE + 8)
WEIGHT_ROW = 2 * (TILE + 8)
NOPE_TILE = TILE * NOPE_ROW
ROPE_TILE = TILE * ROPE_ROW

SIGN, MAGNITUDE = 0x80008000, 0x01C001C0
BF16X2_256 = 0x43804380


@dataclass(frozen=True)
class Shape:
    """Static shape: heads of a block (8, 16, 32), tokens a page of each pool, bytes of a slot."""

    head_tile: int
    window_page: int
    comp_page: int
    slot_bytes: int


def shared_bytes(head_tile: int) -> int:
    """Shared memory of a block."""
    exchange = head_tile * (4 * SCORE_ROW + WEIGHT_ROW + 4)
    return NOPE_TILE + 2 * ROPE_TILE + exchange


def unpack8(word: Uint32, scale: Uint32) -> list[Uint32]:
    """Eight e2m1 values of a word times the scale pair: element j holds values (3 - j, 7 - j)."""
    out = []
    for j, magnitude in enumerate((word >> 6, word >> 2, word << 2, word << 6)):
        bits = ((word << (4 * j)) & Uint32(SIGN)) | (magnitude & Uint32(MAGNITUDE))
        out.append(ptx.mul_bf16x2(bits, scale))
    return out


def scale_pairs(pair: Uint32) -> list[Uint32]:
    """Two e4m3 bytes as bf16x2 of (scale x 2^118) twice, one register for each byte."""
    return [
        ptx.pack_bf16x2(wide, wide)
        for wide in (value * Float32(2.0**118) for value in ptx.e4m3x2_to_f32x2(pair))
    ]


def query_pairs(words: Any, mask: Uint32) -> list[Uint32]:
    """Q of eight dims (four bf16x2) in the order of `unpack8`, times 2^8, or 0 under mask 0."""
    r0, r1, r2, r3 = words
    high, low = Uint32(0x7632), Uint32(0x5410)
    pairs = (
        ptx.prmt(r1, r3, high),
        ptx.prmt(r1, r3, low),
        ptx.prmt(r0, r2, high),
        ptx.prmt(r0, r2, low),
    )
    return [ptx.mul_bf16x2(pair, Uint32(BF16X2_256)) & mask for pair in pairs]


class SparseAttention:
    """The kernel for one static shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.heads = shape.head_tile
        self.blocks = shape.head_tile // 8
        self.rows = (shape.head_tile + 15) // 16
        self.lanes_per_head = THREADS // shape.head_tile
        self.keys_per_lane = TILE // self.lanes_per_head
        self.blocks_per_sm = 2 if shape.head_tile <= 16 else 1

    @cute.jit
    def __call__(
        self,
        q: Any,
        window_slots: Any,
        comp_slots: Any,
        window_pool: Any,
        comp_pool: Any,
        sinks: Any,
        out: Any,
        lse: Any,
        part_out: Any,
        part_lse: Any,
        num_window: Int32,
        num_comp: Int32,
        splits: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        stream: Any,
    ) -> None:
        """Launch the attention and, with more than one split, the combination."""
        tokens, heads = out.shape[0], out.shape[1]
        head_tiles = (heads + self.heads - 1) // self.heads
        self.kernel(
            q,
            window_slots,
            comp_slots,
            window_pool,
            comp_pool,
            sinks,
            out,
            lse,
            part_out,
            part_lse,
            num_window,
            num_comp,
            scale_log2,
            out_scale,
            head_tiles,
        ).launch(
            grid=[tokens * head_tiles, splits, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
        )
        if splits > 1:
            combine(part_out, part_lse, sinks, out, lse, splits, out_scale).launch(
                grid=[tokens * heads, 1, 1], block=[HEAD_DIM // 4, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        q: Any,
        window_slots: Any,
        comp_slots: Any,
        window_pool: Any,
        comp_pool: Any,
        sinks: Any,
        out: Any,
        lse: Any,
        part_out: Any,
        part_lse: Any,
        num_window: Int32,
        num_comp: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        head_tiles: Int32,
    ) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.warp, self.quarter, self.half = warp, warp % 4, warp // 4
        token = block // head_tiles
        first_head = (block - token * head_tiles) * self.heads
        num_heads = out.shape[1]

        memory = cutlass.memory.SmemAllocator()
        base = memory.allocate(shared_bytes(self.heads), 128).toint()
        self.nope = base
        self.rope = base + NOPE_TILE
        self.scores = self.rope + 2 * ROPE_TILE
        self.weights = self.scores + 4 * self.heads * SCORE_ROW
        self.gains = self.weights + self.heads * WEIGHT_ROW

        self.locate(tid)

        window_tiles = (num_window + TILE - 1) // TILE
        num_tiles = window_tiles + (num_comp + TILE - 1) // TILE
        share = (num_tiles + splits - 1) // splits
        first = split * share
        last = cutlass.min(first + share, num_tiles)

        query = cute.make_rmem_tensor(32 * self.rows, Uint32)
        for i in cutlass.range_constexpr(32 * self.rows):
            query[i] = Uint32(0)
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

        words = cute.make_rmem_tensor(16, Uint32)
        scales = cute.make_rmem_tensor(2, Uint32)
        listed = cute.make_rmem_tensor(1, Uint32)
        sums = cute.make_rmem_tensor(4 * self.rows, Float32)
        upcoming = cute.make_rmem_tensor(1, Int32)
        summed = cute.make_rmem_tensor(16 * self.blocks, Float32)
        for i in cutlass.range_constexpr(16 * self.blocks):
            summed[i] = Float32(0.0)
        peak = Float32(-Float32.inf)
        total = Float32(0.0)
        lists = (window_slots, comp_slots, window_pool, comp_pool)
        limits = (token, num_window, num_comp, window_tiles)

        self.fetch_slot(lists, limits, first, upcoming)
        self.fetch_records(lists, limits, first, Int32(0), upcoming, listed, words, scales)
        if first + 1 < last:
            self.fetch_slot(lists, limits, first + 1, upcoming)

        for tile in cutlass.range(first, last):
            self.locate(ptx.opaque(tid))
            buffer = (tile - first) & 1
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(4):
                self.score_keys(r, words, scales, listed[0], query, sums, buffer)
            if tile + 1 < last:
                self.fetch_records(
                    lists, limits, tile + 1, 1 - buffer, upcoming, listed, words, scales
                )
                if tile + 2 < last:
                    self.fetch_slot(lists, limits, tile + 2, upcoming)
            cute.arch.sync_threads()
            peak, total = self.softmax(peak, total, scale_log2)
            cute.arch.sync_threads()
            self.accumulate(summed, buffer)
            cute.arch.sync_threads()

        self.locate(tid)
        for step in cutlass.range_constexpr(self.lanes_per_head.bit_length() - 1):
            total = total + ptx.shuffle_xor(total, 1 << step)
        self.write_gain(
            peak, total, first_head, token, split, splits, sinks, lse, part_lse, out_scale
        )
        cute.arch.sync_threads()
        self.stage_output(summed)
        cute.arch.sync_threads()
        if splits == 1:
            self.write_output(out, first_head, num_heads, token, True)
        else:
            tokens = Int32(out.shape[0])
            self.write_output(part_out, first_head, num_heads, split * tokens + token, False)

    def locate(self, tid: Int32) -> None:
        """What follows from the thread's index; computed anew for each tile, not kept in registers.

        A thread stores its dequantised words in units of 16 bytes, turned by the key so that these
        stores and the transposed loads each touch every bank once.
        """
        self.tid, self.lane = tid, tid & 31
        self.group, self.quad = self.lane >> 2, self.lane & 3
        self.row = self.nope + (self.half * 32 + self.group) * NOPE_ROW + self.quarter * 256
        self.flip = self.group ^ (2 * self.quad)

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

    def fetch_slot(self, lists: Any, limits: Any, tile: Any, upcoming: Any) -> None:
        """Slot of key `lane` of this warp's half of a tile; -1 where list or pool has none."""
        window_slots, comp_slots, window_pool, comp_pool = lists
        token, num_window, num_comp, window_tiles = limits
        windowed = tile < window_tiles
        count = choose(windowed, num_window, num_comp)
        size = self.shape.slot_bytes
        window_row = address(window_slots) + Int64(token) * window_slots.stride[0] * size
        comp_row = address(comp_slots) + Int64(token) * comp_slots.stride[0] * size
        row = choose(windowed, window_row, comp_row)
        rows = choose(
            windowed,
            Int32(window_pool.shape[0]) * self.shape.window_page,
            Int32(comp_pool.shape[0]) * self.shape.comp_page,
        )
        tile_in_list = tile - choose(windowed, Int32(0), window_tiles)
        place = tile_in_list * TILE + self.half * 32 + self.lane
        load = ptx.global_load_i64 if size == 8 else ptx.global_load_i32
        wide = Int64 if size == 8 else Int32
        slot = load(row + Int64(choose(place < count, place, Int32(0))) * size)
        inside = (slot >= wide(0)) & (slot < wide(rows))
        upcoming[0] = choose((place < count) & inside, Int32(slot), Int32(-1))

    def fetch_records(
        self,
        lists: Any,
        limits: Any,
        tile: Any,
        buffer: Int32,
        upcoming: Any,
        listed: Any,
        words: Any,
        scales: Any,
    ) -> None:
        """Start the loads of 32 keys' records; a key without slot reads row 0 in its place.

        Offsets inside the pool are counted in 16 bytes.
        """
        _, _, window_pool, comp_pool = lists
        windowed = tile < limits[3]
        pool = choose(windowed, address(window_pool), address(comp_pool))
        pitch = Int32(choose(windowed, window_pool.stride[0], comp_pool.stride[0])) // 16
        window_shift = self.shape.window_page.bit_length() - 1
        comp_shift = self.shape.comp_page.bit_length() - 1
        shift = choose(windowed, Int32(window_shift), Int32(comp_shift))
        slot = upcoming[0]
        bits = ptx.ballot(slot >= 0)
        listed[0] = bits
        safe = choose(slot >= 0, slot, Int32(0))
        page = safe >> shift
        in_page = safe - (page << shift)
        start = page * pitch
        data = start + in_page * (DATA_BYTES // 16)
        scale = start + (Int32(DATA_BYTES // 16) << shift) + in_page * (SCALE_BYTES // 16)
        loaded = ptx.global_load_x2(pool + Int64(scale) * 16 + Int64(self.quarter * 8))
        scales[0] = loaded[0]
        scales[1] = loaded[1]
        pool = pool + Int64(self.quarter * 64 + self.quad * 8)
        for r in range(4):
            key = r * 8 + self.group
            record = pool + Int64(ptx.shuffle_index(data, key)) * 16
            loaded = ptx.global_load_x2(record)
            words[4 * r] = loaded[0]
            words[4 * r + 1] = loaded[1]
            self.fetch_second(r, key, bits, buffer, record, words)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch_second(
        self,
        r: cutlass.Constexpr,
        key: Int32,
        bits: Uint32,
        buffer: Int32,
        record: Int64,
        words: Any,
    ) -> None:
        """The other 64 dims: NoPE words to registers, in quarter 3 RoPE to shared memory."""
        if self.quarter < 3:
            loaded = ptx.global_load_x2(record + 32)
            words[4 * r + 2] = loaded[0]
            words[4 * r + 3] = loaded[1]
        else:
            size = choose(((bits >> Uint32(key)) & Uint32(1)) != Uint32(0), Int32(16), Int32(0))
            line = self.rope + buffer * ROPE_TILE + (self.half * 32 + key) * ROPE_ROW
            first = record + Int64(ROPE_OFFSET - 192 + 8 * self.quad)
            for c in cutlass.range_constexpr(2):
                place = line + ((self.quad + 4 * c) ^ self.group) * 16
                ptx.copy_async_16(place, first + 64 * c, size)

    @cute.jit
    def score_keys(
        self,
        r: cutlass.Constexpr,
        words: Any,
        scales: Any,
        listed: Uint32,
        query: Any,
        sums: Any,
        buffer: Int32,
    ) -> None:
        """Eight keys: dequantise this quarter's dims, store them, multiply them with Q.

        The scale of a key without slot is taken as 0, so that its values are 0.
        """
        key = r * 8 + self.group
        low, high = ptx.shuffle_index(scales[0], key), ptx.shuffle_index(scales[1], key)
        pair = ptx.prmt(low, high, Uint32(self.quad * 17 + 64))
        present = ((listed >> Uint32(self.group)) & Uint32(1 << (r * 8))) != Uint32(0)
        pairs = scale_pairs(choose(present, pair, Uint32(0)))
        for i in cutlass.range_constexpr(4 * self.rows):
            sums[i] = Float32(0.0)
        self.score_part(r, 0, words, pairs[0], query, sums)
        if self.quarter < 3:
            self.score_part(r, 1, words, pairs[1], query, sums)
        else:
            self.score_rope(r, query, sums, buffer)
        self.store_scores(r, sums, listed)

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

    def store_scores(self, r: int, sums: Any, listed: Uint32) -> None:
        """This quarter's part of S for eight keys; -inf for a key without slot."""
        row = self.quarter * self.heads + self.group
        place = self.scores + row * SCORE_ROW + (self.half * 32 + r * 8 + 2 * self.quad) * 4
        mine = listed >> Uint32(2 * self.quad)
        for n in range(self.blocks):
            pair = []
            for y in range(2):
                present = (mine & Uint32(1 << (r * 8 + y))) != Uint32(0)
                value = sums[4 * (n // 2) + 2 * (n % 2) + y]
                pair.append(choose(present, value, Float32(-Float32.inf)))
            ptx.shared_store_f32x2(place + n * 8 * SCORE_ROW, *pair)

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
        for step in cutlass.range_constexpr(self.lanes_per_head.bit_length() - 1):
            top = ptx.maximum(top, ptx.shuffle_xor(top, 1 << step))
        origin = choose(top == Float32(-Float32.inf), Float32(0.0), top)
        gain = ptx.exp2(peak - origin)
        weight = [ptx.exp2(s - origin) for s in score]
        total = total * gain
        for w in weight:
            total = total + w
        place = self.weights + head * WEIGHT_ROW + part * (2 * self.keys_per_lane)
        for i in cutlass.range_constexpr(self.keys_per_lane // 2):
            ptx.shared_store_u32(place + 4 * i, ptx.pack_bf16x2(weight[2 * i], weight[2 * i + 1]))
        ptx.shared_store_f32(self.gains + head * 4, gain)
        return top, total

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
        splits: Int32,
        sinks: Any,
        lse: Any,
        part_lse: Any,
        out_scale: Float32,
    ) -> None:
        """Last factor of each head's sums to shared memory, its log-sum-exp to global memory."""
        local = self.tid >> (self.lanes_per_head.bit_length() - 1)
        head = first_head + local
        num_heads = lse.shape[1]
        present = head < num_heads
        origin = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
        log_sum = origin + ptx.log2(total)
        gain = Float32(1.0) / total
        if splits == 1:
            at = (Int64(token) * num_heads + head) * 4
            ptx.global_store_f32_if(present, address(lse) + at, log_sum * Float32(LN2))
            sink_at = Int64(choose(present, head, first_head)) * 4
            sink = ptx.global_load_f32(address(sinks) + sink_at)
            gain = out_scale / (total + ptx.exp2(sink * Float32(LOG2_E) - origin))
        else:
            row = split * Int32(lse.shape[0]) + token
            at = (Int64(row) * num_heads + head) * 4
            ptx.global_store_f32_if(present, address(part_lse) + at, log_sum)
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

    @cute.jit
    def write_output(
        self,
        target: Any,
        first_head: Int32,
        num_heads: Int32,
        row: Int32,
        final: cutlass.Constexpr,
    ) -> None:
        """The staged tile to global memory: bf16 of the output, or float32 of one split."""
        for i in cutlass.range_constexpr(self.heads // 4):
            local = i * 4 + self.warp // 2
            dim = ((self.warp % 2) * 32 + self.lane) * 8
            head = first_head + local
            if head < num_heads:
                place = self.staged(local, dim)
                low = ptx.shared_load_f32x4(place)
                high = ptx.shared_load_f32x4(place + 16)
                at = (Int64(row) * num_heads + head) * HEAD_DIM + Int64(dim)
                if cutlass.const_expr(final):
                    packed = [ptx.pack_bf16x2(v[j], v[j + 1]) for v in (low, high) for j in (0, 2)]
                    ptx.global_store_u32x4(address(target) + at * 2, *packed)
                else:
                    ptx.global_store_f32x4(address(target) + at * 4, *low)
                    ptx.global_store_f32x4(address(target) + at * 4 + 16, *high)


@compiled_kernel
def compile_sparse_attention(arch: str, shape: Shape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    tokens, heads = cute.sym_int64(), cute.sym_int64()
    slot = Int64 if shape.slot_bytes == 8 else Int32

    def tensor(dtype: Any, rank: int, align: int, unit: int = 1) -> Any:
        """[..., last contiguous], every other stride a multiple of `unit`."""
        sizes = tuple(cute.sym_int64() for _ in range(rank))
        strides: Any = (*(cute.sym_int64(divisibility=unit) for _ in range(rank - 1)), 1)
        return make_fake_tensor(dtype, sizes, strides, assumed_align=align)

    def compact(dtype: Any, sizes: tuple, align: int) -> Any:
        order = tuple(reversed(range(len(sizes))))
        return make_fake_compact_tensor(dtype, sizes, stride_order=order, assumed_align=align)

    return compile_for(
        arch,
        SparseAttention(shape),
        tensor(BFloat16, 3, 16, 8),
        tensor(slot, 2, shape.slot_bytes),
        tensor(slot, 2, shape.slot_bytes),
        tensor(cutlass.Uint8, 2, 16, 16),
        tensor(cutlass.Uint8, 2, 16, 16),
        compact(Float32, (cute.sym_int64(),), 4),
        compact(BFloat16, (tokens, heads, HEAD_DIM), 16),
        compact(Float32, (tokens, heads), 4),
        compact(Float32, (cute.sym_int64(), HEAD_DIM), 16),
        compact(Float32, (cute.sym_int64(),), 4),
        Int32(0),
        Int32(0),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
    )

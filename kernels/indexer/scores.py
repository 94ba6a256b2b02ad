"""Indexer scores: sum over heads of weight * ReLU(q . k), FP4 keys from pages, CuTeDSL.

Keys are the rows of the products and heads their columns, so that dequantised keys are A fragments
in registers as they are, and a thread sums the heads of its keys without shared memory:

- A warp owns 16 keys of a page of 64, a warpgroup the page. Lane l holds the 16 bytes of scale
  group l % 4 of keys l / 4 and l / 4 + 8: 32 values, eight products of 16. The order of dims inside
  the contraction is free, and Q follows it in shared memory. The bytes arrive by cp.async, DEPTH
  pages ahead; a warp reads only what it copied.
- e2m1 is decoded exactly: a mask, one multiplication and a mask place sign, exponent and mantissa
  in a bf16 of value x 2^-126, one mul.bf16x2 by 2^(127 + group's scale - key's largest scale + 1)
  restores it relative to the key's largest scale, which is multiplied to the finished float32
  score. A group 2^125 times below the largest one of its key loses bits; every stored scale is in
  range.
- Q of one block of consecutive tokens of a request, in bf16, is in shared memory as 8x8 matrices.
  sm_90: wgmma m64nNk16 reads them; elsewhere ldmatrix and mma.sync m16n8k16.
- ReLU and head weights: x + |x| and one fused multiply-add a score; the 2 goes into the key's
  factor. The four lanes of a key add theirs in a fixed order, so a score has the same bits whatever
  else is in the batch.

Blocks share the work evenly: a unit is one page of one block of tokens, each block of threads takes
a contiguous range of units, found by a sum over the tokens' page counts. So a grid of one block an
SM serves any lengths, tokens that see at most topk entries cost nothing, and nothing is read on the
host (CUDA graphs).

Roofline, per token and key with 64 heads: 16384 flops; 68 bytes a key and block of tokens; 4 bytes
written. bf16 at 750 TFLOP/s takes 21.8 ps, 68 bytes at 4.2 TB/s 16.2 ps, so decode is bound by the
tensor cores already. Issue slots, per 64 keys and warp, against 256 cycles of the tensor cores:
about 170 to copy and dequantise and 90 for ReLU, weights and the store.

Measured on an H200, 2026-12-02, 64 heads, keys not in L2, 4.24 TB/s. Prefill of 4096 tokens over
8192 entries, with the decoding before this one: 758 us, 96% of the bound. Decode of 1, 16, 64 and
128 tokens over 8192 entries: 5.0, 11.3, 26.7 and 46.4 us; over 32768: 6.9, 26.3, 83.9 and 161.4
us, 60% of the bound at 128. DeepGEMM's FP8 scores, which read 132 bytes a key at 91% of that
bandwidth, take 4.1, 8.7, 23.7, 41.9 and 5.2, 23.4, 76.9, 148.0 us, and 5 to 7 us for a plan made
once a forward: it is 1.1 to 1.3 times faster. 1.5 times its speed would be 0.19 us a page and SM;
the bf16 products of a page take 0.196 us at 707 TFLOP/s, the rate of a large matmul on that GPU.
Ablations before the present decoding (169.5 us): 137.8 without it, 152.2 without ReLU and weights,
109.8 without the products. Overlapping the products of a page with the sums of the one before
alone gave nothing (169.8); fewer instructions did (161.4).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.indexer import instructions as extra
from sglang_dsv4.kernels.indexer.scan import block_scan
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel

PAGE = 64
HEAD_DIM = 128
LAYOUT = IndexerLayout(KVFormat.NVFP4, PAGE, HEAD_DIM)
GROUPS = 4
DEPTH = 4
# Pages whose products overlap; between groups of that many none runs.
UNROLL = 4
# One warp's keys of one page: 16 x 64 bytes of values, then 16 x 4 of scales.
WARP_VALUES = 16 * LAYOUT.data_bytes
WARP_BYTES = WARP_VALUES + 16 * LAYOUT.scale_bytes
MAX_HEADS = 64
BLOCK_TOKENS = (1, 2, 4, 8)

# A byte times this stands in the exponent fields of both halves of a bf16x2.
EXPONENTS = 0x00800080
NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class ScoreShape:
    """Static shape: heads (a multiple of 8), tokens that share keys, bytes of an index, wgmma."""

    heads: int
    tokens: int
    index_bytes: int
    wgmma: bool

    @property
    def overlapped(self) -> bool:
        """A page's products run while the next is dequantised and the one before is summed."""
        return self.wgmma and self.tokens == 1

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block: two pages, or sums of mma.sync, leave registers for three."""
        return 4 if self.wgmma and not self.overlapped else 3

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.warpgroups


class ScoreOperands(NamedTuple):
    """The tensors; `indexer` describes them. scores float32 [T, 64 P] is written."""

    q: Any
    weights: Any
    pool: Any
    key_pages: Any
    row_of_token: Any
    visible: Any
    scores: Any


def ring_bytes(shape: ScoreShape) -> int:
    """Shared memory for the pages of all warps that are on their way."""
    return shape.threads // 32 * DEPTH * WARP_BYTES


def shared_bytes(shape: ScoreShape) -> int:
    """Shared memory of a block."""
    token_bytes = shape.heads * HEAD_DIM * 2 + GROUPS * weight_pitch(shape.heads)
    return shape.tokens * token_bytes + ring_bytes(shape) + 256 + 8 * shape.threads


def weight_pitch(heads: int) -> int:
    """Bytes from one lane's head weights to the next lane's; spread over the banks."""
    return (heads + 15) // 16 * 16 + 16


def unpack8(word: Uint32, scale: Uint32) -> list[Uint32]:
    """Eight e2m1 values of a word times the scale pair: element j holds values (3 - j, 7 - j).

    One multiplication puts copies of a nibble in both halves where the sign and where exponent and
    mantissa belong; a mask leaves one of each.
    """
    out = []
    for bits in (word >> 8, word):
        for nibbles, copies in ((0x00F000F0, 0x104), (0x000F000F, 0x1040)):
            placed = (bits & Uint32(nibbles)) * Uint32(copies)
            out.append(ptx.mul_bf16x2(placed & Uint32(0x81C081C0), scale))
    return out


def query_pairs(words: Any) -> list[Uint32]:
    """Eight dims of a query (four bf16x2) in the order of `unpack8`."""
    r0, r1, r2, r3 = words
    high, low = Uint32(0x7632), Uint32(0x5410)
    return [
        ptx.prmt(r1, r3, high),
        ptx.prmt(r1, r3, low),
        ptx.prmt(r0, r2, high),
        ptx.prmt(r0, r2, low),
    ]


class IndexerScores:
    """The kernel for one static shape."""

    def __init__(self, shape: ScoreShape) -> None:
        self.shape = shape
        self.heads = shape.heads
        self.columns = shape.heads // 8
        self.query_bytes = shape.heads * HEAD_DIM * 2
        self.pitch = weight_pitch(shape.heads)
        self.threads, self.warpgroups = shape.threads, shape.warpgroups

    @cute.jit
    def __call__(self, operands: ScoreOperands, topk: Int32, blocks: Int32, stream: Any) -> None:
        """Launch on `blocks` blocks of threads."""
        self.kernel(operands, topk).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: ScoreOperands, topk: Int32) -> None:
        """See the module docstring."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.lane, self.tid, self.warp = tid & 31, tid, warp
        self.group, self.quad = self.lane >> 2, self.lane & 3
        self.num_tokens = Int32(operands.q.shape[0])
        self.page_limit = Int32(operands.key_pages.shape[1])

        memory = cutlass.memory.SmemAllocator()
        base = memory.allocate(shared_bytes(self.shape), 128).toint()
        self.queries = base
        self.weights = base + self.shape.tokens * self.query_bytes
        self.ring = self.weights + self.shape.tokens * GROUPS * self.pitch
        self.sums = self.ring + ring_bytes(self.shape)
        self.mine = self.ring + warp * (DEPTH * WARP_BYTES)
        # This lane's first 16 bytes of page 0; from there to its 16 scales, below lane 4.
        quarter = warp % 4
        values = address(operands.pool) + Int64(quarter * WARP_VALUES + self.lane * 16)
        self.source = extra.pin(values)
        self.to_scales = Int64(LAYOUT.scale_offset(0) - quarter * (WARP_VALUES - 64))

        self.own = self.sums + 256 + tid * 8
        total = self.count_pages(operands, tid, topk)
        units = total
        for at in cutlass.range(self.threads, self.num_tokens, self.threads):
            units = units + self.count_pages(operands, at + tid, topk)
        if self.num_tokens > self.threads:
            total = self.count_pages(operands, tid, topk)
        unit = Int32(Int64(units) * block // blocks)
        end = Int32(Int64(units) * (block + 1) // blocks)
        chunk = Int32(0)
        before = Int32(0)
        while unit < end:
            while unit >= before + total:
                chunk = chunk + self.threads
                before = before + total
                total = self.count_pages(operands, chunk + tid, topk)
            start = before + Int32(ptx.shared_load_u32(self.own))
            pages = Int32(ptx.shared_load_u32(self.own + 4))
            hit = (start <= unit) & (unit < start + pages)
            extra.shared_store_u32_if(hit, self.sums + 128, chunk + tid)
            extra.shared_store_u32_if(hit, self.sums + 132, start)
            cute.arch.sync_threads()
            token = cute.arch.make_warp_uniform(Int32(ptx.shared_load_u32(self.sums + 128)))
            start = cute.arch.make_warp_uniform(Int32(ptx.shared_load_u32(self.sums + 132)))
            needed, row, count = self.segment(operands, token, topk)
            count = cute.arch.make_warp_uniform(count)
            last = cutlass.min(cute.arch.make_warp_uniform(needed), end - start)
            first = unit - start
            table = address(operands.key_pages) + row * operands.key_pages.stride[0] * 4
            self.score_pages(operands, table, token, count, first, last)
            unit = start + last

    @cute.jit
    def count_pages(self, operands: ScoreOperands, token: Int32, topk: Int32) -> Int32:
        """Pages of all threads' segments; keeps (pages before its own, its own) for each thread."""
        pages, _, _ = self.segment(operands, token, topk)
        exclusive, total = block_scan(Uint32(pages), self.sums, self.threads)
        ptx.shared_store_u32(self.own, exclusive)
        ptx.shared_store_u32(self.own + 4, Uint32(pages))
        return cute.arch.make_warp_uniform(Int32(total))

    def load_index(self, vector: Any, at: Int32) -> Int64:
        """Element of an int32 or int64 vector."""
        size = self.shape.index_bytes
        place = address(vector) + Int64(at) * size
        return Int64(ptx.global_load_i64(place) if size == 8 else ptx.global_load_i32(place))

    def pages_needed(self, operands: ScoreOperands, token: Int32, topk: Int32) -> Int32:
        """Pages to score for a token; none where all visible entries are selected anyway."""
        limit = Int64(self.page_limit) * PAGE
        wide = self.load_index(operands.visible, token)
        seen = Int32(choose(wide < limit, wide, limit))
        return choose(seen > topk, (seen + (PAGE - 1)) >> 6, Int32(0))

    def segment(self, operands: ScoreOperands, token: Int32, topk: Int32) -> Any:
        """(pages, row, tokens) of the segment that starts at a token; no pages where none starts.

        A segment is a run of tokens of one request inside an aligned block of tokens.
        """
        inside = token < self.num_tokens
        token = choose(inside, token, Int32(0))
        row = self.load_index(operands.row_of_token, token)
        pages = self.pages_needed(operands, token, topk)
        count = Int32(1)
        starts = inside
        if self.shape.tokens > 1:
            place = token & (self.shape.tokens - 1)
            previous = choose(token > 0, token - 1, Int32(0))
            other = self.load_index(operands.row_of_token, previous) != row
            starts = inside & ((place == 0) | other)
            joined = inside
            for d in range(1, self.shape.tokens):
                present = (place + d < self.shape.tokens) & (token + d < self.num_tokens)
                follower = choose(present, token + d, token)
                joined = joined & present
                joined = joined & (self.load_index(operands.row_of_token, follower) == row)
                more = self.pages_needed(operands, follower, topk)
                pages = choose(joined & (more > pages), more, pages)
                count = count + choose(joined, Int32(1), Int32(0))
        return choose(starts, pages, Int32(0)), row, count

    @cute.jit
    def score_pages(
        self,
        operands: ScoreOperands,
        table: Int64,
        token: Int32,
        count: Int32,
        first: Int32,
        last: Int32,
    ) -> None:
        """Scores of `count` tokens for pages first..last-1 of one request, a page a warpgroup."""
        start = first + self.warp // 4
        step = self.warpgroups
        listed = extra.pin(table + Int64(start) * 4)
        numbers = [
            extra.global_load_i32_if(start + d * step < last, listed + d * step * 4)
            for d in range(DEPTH)
        ]
        for d in cutlass.range_constexpr(DEPTH - 1):
            self.copy_page(
                operands.pool, numbers[d], Int32(d * WARP_BYTES), start + d * step < last
            )
            cute.arch.cp_async_commit_group()
        ring = cute.make_rmem_tensor(3, Int32)
        ring[0], ring[1], ring[2] = Int32(0), Int32((DEPTH - 1) * WARP_BYTES), numbers[DEPTH - 1]
        items = count * self.heads * GROUPS
        for turn in cutlass.range((items + self.threads - 1) // self.threads):
            self.load_query(operands, token, count, turn * self.threads + self.tid)
        if cutlass.const_expr(self.shape.wgmma):
            extra.fence_async()
        cute.arch.sync_threads()

        entry = start * PAGE + (self.warp % 4) * 16 + self.group + 8 * (self.quad & 1)
        target = address(operands.scores) + Int64(token) * operands.scores.stride[0] * 4
        target = extra.pin(target + Int64(entry) * 4)
        listed = listed + DEPTH * step * 4
        if cutlass.const_expr(self.shape.overlapped):
            keys = tuple(cute.make_rmem_tensor(32, Uint32) for _ in range(2))
            peaks = cute.make_rmem_tensor(2, Uint32)
            flow = (operands.pool, ring, last, keys, peaks)
            self.next_page(flow, listed, start, 0)
            full = start + (last - start) // (UNROLL * step) * (UNROLL * step)
            full = choose(start < last, full, start)
            for page in cutlass.range(start, full, UNROLL * step):
                sums = self.start_wgmma(keys[0], self.queries)
                for k in cutlass.range_constexpr(1, UNROLL):
                    self.next_page(flow, listed + k * step * 4, page + k * step, k % 2)
                    more = self.start_wgmma(keys[k % 2], self.queries)
                    place = target + (k - 1) * step * PAGE * 4
                    self.finish_page(flow, sums, 1, place, 1 - k % 2)
                    sums = more
                listed = listed + UNROLL * step * 4
                self.next_page(flow, listed, page + UNROLL * step, 0)
                self.finish_page(flow, sums, 0, target + (UNROLL - 1) * step * PAGE * 4, 1)
                target = target + UNROLL * step * PAGE * 4
            for page in cutlass.range(full, last, step):
                sums = self.start_wgmma(keys[0], self.queries)
                listed = listed + step * 4
                self.next_page(flow, listed, page + step, 1)
                self.finish_page(flow, sums, 0, target, 0)
                target = target + step * PAGE * 4
                for i in cutlass.range_constexpr(32):
                    keys[0][i] = keys[1][i]
                peaks[0] = peaks[1]
        else:
            stride = operands.scores.stride[0] * 4
            keys = (cute.make_rmem_tensor(32, Uint32),)
            peaks = cute.make_rmem_tensor(1, Uint32)
            flow = (operands.pool, ring, last, keys, peaks)
            for page in cutlass.range(start, last, step):
                self.next_page(flow, listed, page, 0)
                factor = self.factor(peaks[0])
                place = target
                queries = self.queries
                weights = self.weights + self.quad * self.pitch
                for _ in cutlass.range(count):
                    value = self.score_token(keys[0], queries, weights)
                    ptx.global_store_f32_if(self.quad < 2, place, value * factor)
                    place = place + stride
                    queries = queries + self.query_bytes
                    weights = weights + GROUPS * self.pitch
                listed = listed + step * 4
                target = target + step * PAGE * 4
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def finish_page(self, flow: Any, sums: Any, pending: int, target: Any, turn: int) -> None:
        """Store the scores of a page whose products end with all but `pending` groups."""
        _, _, _, keys, peaks = flow
        of = extra.wgmma_wait(sums, [keys[turn][i] for i in range(32)], pending)
        loaded = self.load_weights(self.weights + self.quad * self.pitch)
        value = self.weighted(loaded, lambda n: of[4 * n : 4 * n + 4])
        ptx.global_store_f32_if(self.quad < 2, target, value * self.factor(peaks[turn]))

    def next_page(self, flow: Any, listed: Any, page: Any, turn: int) -> None:
        """Fragments of the oldest page on its way, and the start of the copy of another.

        ring: places of that page and of the free one, number of the page to copy; listed: place of
        the number of the page after it. Beyond the last page the fragments are of no page.
        """
        pool, ring, last, keys, peaks = flow
        step = self.warpgroups
        cute.arch.cp_async_wait_group(DEPTH - 2)
        cute.arch.sync_warp()
        words, relative, peaks[turn] = self.load_keys(self.mine + ring[0])
        self.copy_page(pool, ring[2], ring[1], page + (DEPTH - 1) * step < last)
        cute.arch.cp_async_commit_group()
        ring[2] = extra.global_load_i32_if(page + DEPTH * step < last, listed)
        ring[1] = ring[0]
        later = ring[0] + WARP_BYTES
        ring[0] = choose(later < DEPTH * WARP_BYTES, later, Int32(0))
        for i in range(4):
            for at, pair in enumerate(self.fragments(words, relative, i)):
                keys[turn][8 * i + at] = pair

    def copy_page(self, pool: Any, number: Int32, stage: Int32, present: Any) -> None:
        """Start the copy of this warp's keys of a page to a place in its ring."""
        values = extra.multiply_add_wide(Uint32(number), Uint32(pool.stride[0]), self.source)
        place = self.mine + stage + self.lane * 16
        for at in (0, WARP_VALUES // 2):
            extra.copy_async_16_if(present, place + at, values + at)
        one = present & (self.lane < 4)
        extra.copy_async_16_if(one, place + WARP_VALUES, values + self.to_scales)

    def load_query(self, operands: ScoreOperands, token: Int32, count: Int32, item: Int32) -> None:
        """32 values of a head, eight of each scale group, to their matrices; and its weight.

        Item (j, word, head): matrix p = 4 word + i of eight heads holds their i-th pairs.
        """
        num_heads = Int32(operands.q.shape[1])
        head, rest = item % self.heads, item // self.heads
        word, j = rest % 4, rest // 4
        wanted = j < count
        present = wanted & (head < num_heads)
        row = token + choose(present, j, Int32(0))
        safe = choose(present, head, Int32(0))
        mask = choose(present, Uint32(0xFFFFFFFF), Uint32(0))
        q = operands.q
        source = address(q) + (Int64(row) * q.stride[0] + Int64(safe) * q.stride[1]) * 2
        source = source + Int64(word) * 16
        groups = [query_pairs(ptx.global_load_x4(source + 64 * g)) for g in range(GROUPS)]
        slot = choose(wanted, j, Int32(0))
        place = self.queries + slot * self.query_bytes
        place = place + (word * 4 * self.columns + head // 8) * 128 + (head % 8) * 16
        for i in range(4):
            line = [groups[g][i] & mask for g in range(GROUPS)]
            extra.shared_store_x4_if(wanted, place + i * (self.columns * 128), *line)
        at = (Int64(row) * operands.weights.stride[0] + Int64(safe)) * 4
        weight = ptx.global_load_f32(address(operands.weights) + at)
        weight = choose(present, weight, Float32(0.0))
        lane_row = self.weights + (slot * GROUPS + (head % 8) // 2) * self.pitch
        column = (head // 8) * 8 + (head % 2) * 4
        extra.shared_store_f32_if(wanted & (word == 0), lane_row + column, weight)

    def load_keys(self, place: Int32) -> Any:
        """(words of two keys, their group's scales as bf16x2, the keys' largest scale bytes).

        The scales are relative to the key's largest one, which is one half of a register each.
        """
        scales = place + WARP_VALUES + self.lane
        both = extra.shared_load_u8(scales) | (extra.shared_load_u8(scales + 32) << 16)
        low = ptx.shared_load_u32x4(place + self.lane * 16)
        high = ptx.shared_load_u32x4(place + WARP_VALUES // 2 + self.lane * 16)
        peak = extra.max_u16x2(both, extra.shuffle_xor_u32(both, 1))
        peak = extra.max_u16x2(peak, extra.shuffle_xor_u32(peak, 2))
        fields = both + Uint32(0x00FE00FE) - peak
        relative = ((fields & Uint32(0xFFFF)) * Uint32(EXPONENTS), (fields >> 16) * EXPONENTS)
        return (low, high), relative, peak

    def fragments(self, words: Any, relative: Any, i: int) -> list[Uint32]:
        """A fragments of the i-th words of this thread's two keys: two products of 16 dims."""
        low, high = (unpack8(words[key][i], relative[key]) for key in range(2))
        return [pairs[at] for half in (0, 2) for at in (half, half + 1) for pairs in (low, high)]

    def factor(self, peak: Uint32) -> Float32:
        """Factor 2^(largest scale - 2) of the key whose score this lane finishes.

        Scale bytes are biased by 127; 255 is NaN.
        """
        top = (peak >> Uint32((self.quad & 1) * 16)) & Uint32(0xFF)
        bits = choose(top > 2, top - Uint32(2), Uint32(0)) << 23
        return extra.float_of(choose(top == 255, Uint32(NAN_BITS), bits))

    def score_token(self, keys: Any, queries: Any, weights: Any) -> Float32:
        """A token's score of this lane's key, before the key's factor."""
        fragments = [keys[i] for i in range(32)]
        if not self.shape.wgmma:
            loaded = self.load_weights(weights)
            return self.weighted(loaded, lambda n: self.products_mma(fragments, queries, n))
        sums = self.start_wgmma(keys, queries)
        loaded = self.load_weights(weights)
        sums = extra.wgmma_wait(sums, fragments, 0)
        return self.weighted(loaded, lambda n: sums[4 * n : 4 * n + 4])

    def load_weights(self, weights: Any) -> list[Float32]:
        """Weights of this lane's heads: two of each block of eight."""
        loaded: list[Float32] = []
        for n in range(0, self.columns - 1, 2):
            loaded += list(ptx.shared_load_f32x4(weights + n * 8))
        if self.columns % 2:
            loaded += list(ptx.shared_load_f32x2(weights + (self.columns - 1) * 8))
        return loaded

    def weighted(self, weights: Any, products: Any) -> Float32:
        """Sum over heads of weight x ReLU for key l / 4, or l / 4 + 8 on odd lanes."""
        totals = [Float32(0.0)] * 4
        for n in range(self.columns):
            of = products(n)
            for c in range(4):
                totals[c] = extra.twice_relu(of[c]) * weights[2 * n + c % 2] + totals[c]
        first, second = totals[0] + totals[1], totals[2] + totals[3]
        odd = (self.quad & 1) == 1
        total = choose(odd, second, first)
        total = total + ptx.shuffle_xor(choose(odd, first, second), 1)
        return total + ptx.shuffle_xor(total, 2)

    def start_wgmma(self, keys: Any, queries: Any) -> Any:
        """64 keys of the warpgroup times all heads of a token, under way."""
        pitch = self.columns * 128
        start = Int64((queries >> 4) & 0x3FFF)
        descriptor = start | Int64(((pitch >> 4) << 16) | ((128 >> 4) << 32))
        fragments = [keys[i] for i in range(32)]
        return extra.wgmma_start(fragments, descriptor, self.heads, 2 * pitch)

    def products_mma(self, keys: Any, queries: Any, n: int) -> Any:
        """16 keys of the warp times eight heads of a token."""
        pitch = self.columns * 128
        row, matrix = self.lane & 7, self.lane >> 3
        place = queries + matrix * pitch + n * 128 + row * 16
        sums: Any = [Float32(0.0)] * 4
        for p in range(0, 16, 4):
            b = ptx.ldmatrix_x4(place + p * pitch)
            for s in range(2):
                at = 2 * p + 4 * s
                sums = ptx.mma_bf16(keys[at : at + 4], b[2 * s : 2 * s + 2], sums)
        return sums


@compiled_kernel
def compile_scores(arch: str, shape: ScoreShape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    index = Int64 if shape.index_bytes == 8 else Int32

    def strided(dtype: Any, rank: int, align: int, unit: int) -> Any:
        """[..., last contiguous], every other stride a multiple of `unit`."""
        sizes = tuple(cute.sym_int64() for _ in range(rank))
        strides: Any = (*(cute.sym_int64(divisibility=unit) for _ in range(rank - 1)), 1)
        return make_fake_tensor(dtype, sizes, strides, assumed_align=align)

    def vector(dtype: Any) -> Any:
        return make_fake_compact_tensor(dtype, (cute.sym_int64(),), assumed_align=dtype.width // 8)

    operands = ScoreOperands(
        q=strided(BFloat16, 3, 16, 8),
        weights=strided(Float32, 2, 4, 1),
        pool=strided(cutlass.Uint8, 2, 16, 16),
        key_pages=strided(Int32, 2, 4, 1),
        row_of_token=vector(index),
        visible=vector(index),
        scores=strided(Float32, 2, 16, 4),
    )
    return compile_for(arch, IndexerScores(shape), operands, Int32(0), Int32(1))

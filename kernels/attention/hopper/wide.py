"""Sparse attention of 64 heads on WGMMA (sm_90a): one block for a token, 64 heads and one split.

A producer warpgroup decodes tiles of 64 keys into shared memory (`gather`). Warpgroup 0 multiplies
S = Q K^T, does the online softmax in registers and accumulates the left half of the output,
O[:, :256] += P V[:, :256] with P in registers; warpgroup 1 accumulates the right half with P from
shared memory. It starts on a tile when the scores of the next one are ready, so that its products
fill the tensor cores during that tile's softmax. Its part of a buffer (half 1) is given back apart
from the left part, as soon as it is read.

The softmax keeps a reference for each head that follows the running maximum only when that
outgrows it by RAISE binary orders, so older sums are seldom rescaled: weights reach 2^RAISE, which
float32 sums and bf16 weights hold with the same relative precision.

Q stands in shared memory like a key tile, its NoPE dims in the order of the decoded records and
times 2^8 (exact), the output's NoPE dims are put back in order and multiplied by 2^8 at the end.

Roofline, per token: bytes = 384 (window + K) + 2 x 1024 H; flops = 2 x 2 H (window + K) 512. Per
tile of 64 keys and 64 heads the products take 2048 cycles of the tensor cores, and shared memory
moves 1024 (QK) + 576 (PV) + 512 (decoded keys) cycles of 128 bytes.

Measured on an H200, 2026-12-02 (BENCHMARKS.md): a block alone on its SM takes 2.26 us (3970 cycles)
a tile and about 17 us besides; with the words stored undecoded 3070 cycles, neither decoded nor
stored 2740, decoded but without softmax 3420. So decoding by one warp a scheduler costs most, about
900 cycles, and 700 of the rest are not products. 4096 queries with 640 keys each: 918 us at 64
heads, 1800 us at 128.
"""

from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.combine import HEAD_DIM, LN2, LOG2_E, combine
from sglang_dsv4.kernels.attention.dequant import query_pairs
from sglang_dsv4.kernels.attention.hopper import gather as tiles
from sglang_dsv4.kernels.attention.hopper import ptx as hopper
from sglang_dsv4.kernels.attention.hopper.gather import Gather, GatherConfig
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.attention.lists import TILE, ListShape, TokenLists
from sglang_dsv4.kernels.attention.operands import (
    Numbers,
    Operands,
    fake_numbers,
    fake_operands,
)
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel

HEADS = 64
WARPGROUP = 128
CONSUMERS = 2 * WARPGROUP
THREADS = CONSUMERS + WARPGROUP
BUFFERS = 2
# Registers a thread of the score, the value and the producer warpgroup; 504 in all.
REGISTERS = (216, 168, 120)
RAISE = 8.0
WEIGHTS_BYTES = HEADS * 128
FACTOR_BYTES = HEADS * 4
KEYS_BYTES = BUFFERS * tiles.BUFFER_BYTES
# Byte offsets in shared memory.
QUERY_AT = KEYS_BYTES
WEIGHTS_AT = QUERY_AT + tiles.BUFFER_BYTES
FACTORS_AT = WEIGHTS_AT + 2 * WEIGHTS_BYTES
GAINS_AT = FACTORS_AT + 2 * FACTOR_BYTES
MASKS_AT = GAINS_AT + FACTOR_BYTES
BARRIERS_AT = MASKS_AT + BUFFERS * tiles.MASK_BYTES
# Steps of 16 dims along half a tile for QK, of 16 keys for PV.
QK_STEPS = [(a * tiles.ATOM_BYTES + 32 * k,) * 2 for a in range(4) for k in range(4)]
V_STEPS = [16 * 128 * k for k in range(TILE // 16)]


class WideAttention:
    """The kernel for one static shape."""

    def __init__(self, lists: ListShape) -> None:
        self.gather = Gather(GatherConfig(BUFFERS, lists))
        self.shared_bytes = BARRIERS_AT + self.gather.barrier_bytes + 4 * tiles.BARRIER_BYTES

    @cute.jit
    def __call__(self, operands: Operands, numbers: Numbers, stream: Any) -> None:
        """Launch the attention and, with more than one split, the combination."""
        tokens, heads = operands.out.shape[0], operands.out.shape[1]
        head_tiles = (heads + (HEADS - 1)) // HEADS
        self.kernel(operands, numbers, head_tiles).launch(
            grid=[tokens * head_tiles, numbers.splits, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        if numbers.splits > 1:
            combine(
                operands.part_out,
                operands.part_lse,
                operands.sinks,
                operands.out,
                operands.lse,
                numbers.splits,
                numbers.out_scale,
            ).launch(grid=[tokens * heads, 1, 1], block=[HEAD_DIM // 4, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, operands: Operands, numbers: Numbers, head_tiles: Int32) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, split, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        token = block // head_tiles
        first_head = (block - token * head_tiles) * HEADS
        memory = cutlass.memory.SmemAllocator()
        base = memory.allocate(self.shared_bytes, 1024).toint()
        self.locate(base, tid)
        lists = TokenLists(self.gather.config.lists, operands, numbers, token)
        first, last = lists.share(split, numbers.splits)
        row = split * Int32(operands.out.shape[0]) + token
        if (first < last) | (numbers.splits == 1):
            if tid == 0:
                self.init_barriers()
            cute.arch.sync_threads()
            if warp >= 8:
                cute.arch.setmaxregister_decrease(REGISTERS[2])
                self.gather.produce(
                    tid - CONSUMERS, lists, first, last, self.keys, self.masks, self.barriers
                )
            elif warp < 4:
                cute.arch.setmaxregister_increase(REGISTERS[0])
                self.left_half(last - first, token, first_head, row, operands, numbers)
            else:
                cute.arch.setmaxregister_increase(REGISTERS[1])
                self.right_half(last - first, token, first_head, row, operands, numbers)
        else:
            head = first_head + tid
            present = (tid < HEADS) & (head < operands.out.shape[1])
            at = (Int64(row) * operands.out.shape[1] + head) * 4
            ptx.global_store_f32_if(present, address(operands.part_lse) + at, Float32(-Float32.inf))

    def init_barriers(self) -> None:
        """For one thread: each of four warps arrives once where warpgroups wait for each other."""
        self.gather.init_barriers(self.barriers, (4, 4))
        for i in range(4):
            hopper.barrier_init(self.handover + i * tiles.BARRIER_BYTES, 4)
        hopper.barrier_init_fence()

    def left_half(
        self,
        count: Int32,
        token: Int32,
        first_head: Int32,
        row: Int32,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Warpgroup 0: scores, softmax and dims 0 to 255 of the output."""
        self.load_query(operands.q, token, first_head, Int32(operands.out.shape[1]))
        sums = self.zeros()
        gains = cute.make_rmem_tensor(2, Float32)
        peak = cute.make_rmem_tensor(2, Float32)
        total = cute.make_rmem_tensor(2, Float32)
        self.score_tiles(count, sums, peak, total, numbers.scale_log2)
        self.finish_softmax(peak, total, gains, first_head, row, operands, numbers)
        hopper.named_barrier(1, CONSUMERS)
        self.write_half(0, sums, gains, first_head, row, operands, numbers)

    def right_half(
        self,
        count: Int32,
        token: Int32,
        first_head: Int32,
        row: Int32,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Warpgroup 1: dims 256 to 511 of the output."""
        self.load_query(operands.q, token, first_head, Int32(operands.out.shape[1]))
        sums = self.zeros()
        gains = cute.make_rmem_tensor(2, Float32)
        self.value_tiles(count, sums)
        hopper.named_barrier(1, CONSUMERS)
        for h in range(2):
            gains[h] = ptx.shared_load_f32(self.gains + (self.row + 8 * h) * 4)
        self.write_half(1, sums, gains, first_head, row, operands, numbers)

    def zeros(self) -> Any:
        """Accumulators of 64 heads and 256 dims."""
        sums = cute.make_rmem_tensor(128, Float32)
        for i in range(128):
            sums[i] = Float32(0.0)
        return sums

    def locate(self, base: Any, tid: Any) -> None:
        """Places in shared memory, and what a consumer thread is: rows `row` and `row + 8`."""
        self.keys, self.query = base, base + QUERY_AT
        self.weights, self.factors = base + WEIGHTS_AT, base + FACTORS_AT
        self.gains, self.masks = base + GAINS_AT, base + MASKS_AT
        self.barriers = base + BARRIERS_AT
        self.handover = self.barriers + self.gather.barrier_bytes
        self.tid, self.lane = tid, tid & 31
        self.warp_in_group = cute.arch.make_warp_uniform((tid >> 5) & 3)
        self.quad = tid & 3
        self.row = self.warp_in_group * 16 + (self.lane >> 2)

    def filled(self, n: Any) -> Int32:
        """The barrier that the score warps complete when the weights of tile n are stored."""
        return self.handover + (n & 1) * tiles.BARRIER_BYTES

    def taken(self, n: Any) -> Int32:
        """The barrier that the value warps complete when the weights of tile n are read."""
        return self.handover + (2 + (n & 1)) * tiles.BARRIER_BYTES

    def load_query(self, q: Any, token: Int32, first_head: Int32, num_heads: Int32) -> None:
        """Q of 64 heads to shared memory by both consumer warpgroups; zeros beyond the heads."""
        start = address(q) + Int64(token) * q.stride[0] * 2
        for i in range(HEADS * HEAD_DIM // 8 // CONSUMERS):
            index = i * CONSUMERS + self.tid
            row, unit = index >> 6, index & 63
            head = first_head + row
            present = head < num_heads
            mask = choose(present, Uint32(0xFFFFFFFF), Uint32(0))
            at = Int64(choose(present, head, first_head)) * q.stride[1] + Int64(unit * 8)
            words = ptx.global_load_x4(start + at * 2)
            pairs = query_pairs(words, mask)
            roped = unit >= 56
            pairs = [choose(roped, w & mask, p) for w, p in zip(words, pairs, strict=True)]
            place = self.query + (unit >> 3) * tiles.ATOM_BYTES + row * 128
            ptx.shared_store_x4(place + ((unit & 7) ^ (row & 7)) * 16, *pairs)
        hopper.fence_async()
        hopper.named_barrier(1, CONSUMERS)

    @cute.jit
    def score_tiles(
        self, count: Int32, sums: Any, peak: Any, total: Any, scale_log2: Float32
    ) -> None:
        """Warpgroup 0: scores, softmax and the left half of the output over the block's tiles."""
        scores = cute.make_rmem_tensor(32, Float32)
        weights = cute.make_rmem_tensor(16, Uint32)
        factors = cute.make_rmem_tensor(2, Float32)
        for h in cutlass.range_constexpr(2):
            peak[h] = Float32(-Float32.inf)
            total[h] = Float32(0.0)
        query = hopper.descriptor_k_major(self.query)
        for n in cutlass.range(count):
            buffer, parity = self.gather.place(n)
            start = self.keys + buffer * tiles.BUFFER_BYTES
            self.multiply_scores(scores, query, start, buffer, parity)
            if n > 0:
                self.hand_over(n - 1)
            low, high = hopper.shared_load_u32x2(self.masks + buffer * tiles.MASK_BYTES)
            if (low & high) != Uint32(0xFFFFFFFF):
                self.mask_scores(scores, low, high)
            self.softmax(scores, weights, factors, peak, total, scale_log2)
            hopper.barrier_wait(self.taken(n), ((n >> 1) & 1) ^ 1)
            self.store_weights(n, weights, factors)
            if n == count - 1:
                self.hand_over(n)
            self.rescale(sums, factors)
            values = hopper.descriptor_mn_major(start, tiles.ATOM_BYTES)
            self.add_left(sums, weights, values)
            if self.lane == 0:
                hopper.barrier_arrive(self.gather.empty(self.barriers, buffer, 0))

    def multiply_scores(
        self, scores: Any, query: Int64, start: Int32, buffer: Int32, parity: Int32
    ) -> None:
        """S of one tile, half of the dims as soon as that half is there."""
        keys = hopper.descriptor_k_major(start)
        step = tiles.HALF_BYTES >> 4
        hopper.barrier_wait(self.gather.full(self.barriers, buffer, 0), parity)
        s = hopper.wgmma_ss(32, query, keys, QK_STEPS, 0)
        hopper.barrier_wait(self.gather.full(self.barriers, buffer, 1), parity)
        s = hopper.wgmma_ss(s, query + step, keys + step, QK_STEPS, 0)
        s = hopper.wgmma_wait(s, 0)
        for i in range(32):
            scores[i] = s[i]

    def mask_scores(self, scores: Any, low: Uint32, high: Uint32) -> None:
        """-inf for keys without slot; scores 4 i + 2 h + y are of key 8 i + 2 quad + y."""
        words = [w >> Uint32(2 * self.quad) for w in (low, high)]
        for i in range(8):
            for y in range(2):
                listed = (words[i // 4] & Uint32(1 << (8 * (i % 4) + y))) != Uint32(0)
                for h in range(2):
                    at = 4 * i + 2 * h + y
                    scores[at] = choose(listed, scores[at], Float32(-Float32.inf))

    def softmax(
        self,
        scores: Any,
        weights: Any,
        factors: Any,
        peak: Any,
        total: Any,
        scale_log2: Float32,
    ) -> None:
        """Weights in bf16 as A fragments, and the factor of older sums, for rows h = 0, 1."""
        for h in range(2):
            mine = [scores[4 * i + 2 * h + y] for i in range(8) for y in range(2)]
            top = mine[0]
            for s in mine[1:]:
                top = ptx.maximum(top, s)
            for step in (1, 2):
                top = ptx.maximum(top, ptx.shuffle_xor(top, step))
            top = top * scale_log2
            new = choose(top > peak[h] + Float32(RAISE), top, peak[h])
            origin = choose(new == Float32(-Float32.inf), Float32(0.0), new)
            factors[h] = ptx.exp2(peak[h] - origin)
            peak[h] = new
            weight = [ptx.exp2(s * scale_log2 - origin) for s in mine]
            sum_of = list(weight)
            while len(sum_of) > 1:
                sum_of = [a + b for a, b in zip(sum_of[::2], sum_of[1::2], strict=True)]
            total[h] = total[h] * factors[h] + sum_of[0]
            for i in range(8):
                weights[2 * i + h] = ptx.pack_bf16x2(weight[2 * i], weight[2 * i + 1])

    @cute.jit
    def store_weights(self, n: Int32, weights: Any, factors: Any) -> None:
        """P and the factors of tile n to shared memory, for warpgroup 1."""
        place = self.weights + (n & 1) * WEIGHTS_BYTES
        row, matrix = self.lane & 7, self.lane >> 3
        line = place + (self.warp_in_group * 16 + row + 8 * (matrix & 1)) * 128
        for i in cutlass.range_constexpr(4):
            unit = 2 * i + (matrix >> 1)
            four = [weights[4 * i + j] for j in range(4)]
            hopper.stmatrix_x4(line + (unit ^ row) * 16, *four)
        if self.quad == 0:
            for h in cutlass.range_constexpr(2):
                at = self.factors + (n & 1) * FACTOR_BYTES + (self.row + 8 * h) * 4
                ptx.shared_store_f32(at, factors[h])
        hopper.fence_async()
        cute.arch.sync_warp()

    @cute.jit
    def hand_over(self, n: Int32) -> None:
        """Tell warpgroup 1 that the weights of tile n are there."""
        if self.lane == 0:
            hopper.barrier_arrive(self.filled(n))

    @cute.jit
    def rescale(self, sums: Any, factors: Any) -> None:
        """Bring older sums to a new reference, if a row of this warp has one."""
        one = Float32(1.0)
        if ptx.ballot((factors[0] != one) | (factors[1] != one)) != Uint32(0):
            self.scale_sums(sums, factors)

    def scale_sums(self, sums: Any, factors: Any) -> None:
        """Multiply each row's sums by its factor; sums 4 i + 2 h + y are of row h."""
        for i in range(128):
            sums[i] = sums[i] * factors[(i // 2) % 2]

    def add_left(self, sums: Any, weights: Any, values: Int64) -> None:
        """O += P V with P in registers."""
        old = [sums[i] for i in range(128)]
        new = hopper.wgmma_rs(old, [weights[i] for i in range(16)], values, V_STEPS, 1)
        for i, value in enumerate(hopper.wgmma_wait(new, 0)):
            sums[i] = value

    def add_right(self, sums: Any, weights: Int64, values: Int64) -> None:
        """O += P V with P in shared memory."""
        steps = [(32 * k, step) for k, step in enumerate(V_STEPS)]
        new = hopper.wgmma_ss([sums[i] for i in range(128)], weights, values, steps, 1)
        for i, value in enumerate(hopper.wgmma_wait(new, 0)):
            sums[i] = value

    @cute.jit
    def value_tiles(self, count: Int32, sums: Any) -> None:
        """Warpgroup 1: the right half of the output over the block's tiles."""
        factors = cute.make_rmem_tensor(2, Float32)
        for n in cutlass.range(count):
            buffer, parity = self.gather.place(n)
            hopper.barrier_wait(self.filled(n), (n >> 1) & 1)
            hopper.barrier_wait(self.gather.full(self.barriers, buffer, 1), parity)
            for h in cutlass.range_constexpr(2):
                at = self.factors + (n & 1) * FACTOR_BYTES + (self.row + 8 * h) * 4
                factors[h] = ptx.shared_load_f32(at)
            self.rescale(sums, factors)
            weights = hopper.descriptor_k_major(self.weights + (n & 1) * WEIGHTS_BYTES)
            start = self.keys + buffer * tiles.BUFFER_BYTES + tiles.HALF_BYTES
            values = hopper.descriptor_mn_major(start, tiles.ATOM_BYTES)
            self.add_right(sums, weights, values)
            if self.lane == 0:
                hopper.barrier_arrive(self.gather.empty(self.barriers, buffer, 1))
                hopper.barrier_arrive(self.taken(n))

    @cute.jit
    def finish_softmax(
        self,
        peak: Any,
        total: Any,
        gains: Any,
        first_head: Int32,
        row: Int32,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Log-sum-exp to global memory; the last factor of each row's sums to shared memory."""
        num_heads = operands.out.shape[1]
        for h in cutlass.range_constexpr(2):
            for step in cutlass.range_constexpr(2):
                total[h] = total[h] + ptx.shuffle_xor(total[h], step + 1)
            local = self.row + 8 * h
            head = first_head + local
            present = head < num_heads
            mine = present & (self.quad == 0)
            origin = choose(peak[h] == Float32(-Float32.inf), Float32(0.0), peak[h])
            log_sum = origin + ptx.log2(total[h])
            at = (Int64(row) * num_heads + head) * 4
            gains[h] = Float32(1.0) / total[h]
            if numbers.splits == 1:
                ptx.global_store_f32_if(mine, address(operands.lse) + at, log_sum * Float32(LN2))
                sink_at = Int64(choose(present, head, first_head)) * 4
                sink = ptx.global_load_f32(address(operands.sinks) + sink_at)
                gains[h] = numbers.out_scale / (
                    total[h] + ptx.exp2(sink * Float32(LOG2_E) - origin)
                )
            else:
                ptx.global_store_f32_if(mine, address(operands.part_lse) + at, log_sum)
            gains[h] = choose(total[h] == Float32(0.0), Float32(0.0), gains[h])
            ptx.shared_store_f32(self.gains + local * 4, gains[h])

    def staged(self, half: int, row: Any, dim: Any) -> Int32:
        """Where a float32 of the output waits, in the half buffers that its warpgroup has read."""
        place = self.keys + (row >> 5) * tiles.BUFFER_BYTES + half * tiles.HALF_BYTES
        return place + (row & 31) * 1024 + ((dim >> 2) ^ (row & 7)) * 16 + (dim & 3) * 4

    @cute.jit
    def write_half(
        self,
        half: cutlass.Constexpr,
        sums: Any,
        gains: Any,
        first_head: Int32,
        row: Int32,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """256 dims of the output in their natural order, through this warp's shared memory."""
        num_heads = operands.out.shape[1]
        for i in cutlass.range_constexpr(32):
            roped = half == 1 and i >= 24
            for h in cutlass.range_constexpr(2):
                unit = gains[h] if roped else gains[h] * Float32(256.0)
                for y in cutlass.range_constexpr(2):
                    dim = 8 * i + (2 * self.quad + y if roped else 3 - self.quad + 4 * y)
                    place = self.staged(half, self.row + 8 * h, dim)
                    ptx.shared_store_f32(place, sums[4 * i + 2 * h + y] * unit)
        cute.arch.sync_warp()
        for r in cutlass.range_constexpr(16):
            local = self.warp_in_group * 16 + r
            head = first_head + local
            if head < num_heads:
                low = ptx.shared_load_f32x4(self.staged(half, local, self.lane * 8))
                high = ptx.shared_load_f32x4(self.staged(half, local, self.lane * 8 + 4))
                dim = half * 256 + self.lane * 8
                at = (Int64(row) * num_heads + head) * HEAD_DIM + Int64(dim)
                if numbers.splits == 1:
                    packed = [ptx.pack_bf16x2(v[j], v[j + 1]) for v in (low, high) for j in (0, 2)]
                    ptx.global_store_u32x4(address(operands.out) + at * 2, *packed)
                else:
                    ptx.global_store_f32x4(address(operands.part_out) + at * 4, *low)
                    ptx.global_store_f32x4(address(operands.part_out) + at * 4 + 16, *high)


@compiled_kernel
def compile_wide(arch: str, lists: ListShape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    return compile_for(arch, WideAttention(lists), fake_operands(lists.slot_bytes), fake_numbers())

"""Sparse attention of 64 heads on WGMMA (sm_90a), by one block of four warpgroups on each SM.

A block takes items in turn (64 heads of a token and one split of its keys), so that the keys of the
next item are gathered while this one ends; its slots and Q are brought into L2 still earlier. Two
producer warpgroups decode tiles of 64 keys into shared memory (`gather`). Warpgroup 0 multiplies
S = Q K^T, does the online softmax in registers and accumulates the left half of the output,
O[:, :256] += P V[:, :256] with P in registers; warpgroup 1 accumulates the right half with P from
shared memory.

To leave the tensor cores few gaps, the scores of tile n + 1 are asked for behind the left half of
tile n, and warpgroup 1 starts on the right half of tile n when the scores of n + 1 are all but done
(LEAD products), so that it fills the time of that tile's softmax. Each half of a buffer is given
back as soon as its products are done.

The softmax keeps a reference for each head that follows the running maximum only when that
outgrows it by RAISE binary orders, so older sums are seldom rescaled: weights reach 2^RAISE, which
float32 sums and bf16 weights hold with the same relative precision.

Q stands in shared memory like a key tile, its NoPE dims in the order of the decoded records and
times 2^8 (exact); `output` puts the output's NoPE dims back in order and multiplies by 2^8.

Roofline, per token: bytes = 384 (window + K) + 2 x 1024 H; flops = 2 x 2 H (window + K) 512. Per
tile of 64 keys and 64 heads the products take 2048 cycles of the tensor cores, and shared memory
moves 1024 (QK) + 640 (PV) + 512 (decoded keys) cycles of 128 bytes.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.combine import LN2, LOG2_E, combine_splits
from sglang_dsv4.kernels.attention.dequant import query_pairs
from sglang_dsv4.kernels.attention.hopper import gather as tiles
from sglang_dsv4.kernels.attention.hopper import output
from sglang_dsv4.kernels.attention.hopper import ptx as hopper
from sglang_dsv4.kernels.attention.hopper.gather import Gather, GatherConfig
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.attention.lists import TILE, ListShape, TokenLists
from sglang_dsv4.kernels.attention.operands import (
    HEAD_DIM,
    Numbers,
    Operands,
    fake_numbers,
    fake_operands,
)
from sglang_dsv4.kernels.attention.rotation import load_position
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel

HEADS = 64
WARPGROUP = 128
CONSUMERS = 2 * WARPGROUP
THREADS = CONSUMERS + tiles.GROUPS * WARPGROUP
BUFFERS = 2
# Blocks that share the work: the SMs of an H100 or H200. The result is right with any number.
BLOCKS = 132
# Registers a thread of the score, the value and both producer warpgroups; 512 in all.
REGISTERS = (208, 160, 72, 72)
RAISE = 8.0
# Products of a tile's scores, of 32 cycles each, that are left when warpgroup 1 is called.
LEAD = 4
WEIGHTS_BYTES = HEADS * 128
FACTOR_BYTES = HEADS * 4
KEYS_BYTES = BUFFERS * tiles.BUFFER_BYTES
# Byte offsets in shared memory.
QUERY_AT = KEYS_BYTES
WEIGHTS_AT = QUERY_AT + tiles.BUFFER_BYTES
FACTORS_AT = WEIGHTS_AT + 2 * WEIGHTS_BYTES
GAINS_AT = FACTORS_AT + 2 * FACTOR_BYTES
SINKS_AT = GAINS_AT + FACTOR_BYTES
MASKS_AT = SINKS_AT + FACTOR_BYTES
BARRIERS_AT = MASKS_AT + BUFFERS * tiles.MASK_BYTES
# Steps of 16 dims along half a tile for QK, of 16 keys for PV.
QK_STEPS = [(a * tiles.ATOM_BYTES + 32 * k,) * 2 for a in range(4) for k in range(4)]
V_STEPS = [16 * 128 * k for k in range(TILE // 16)]
# Half the output is two products of 128 dims: the registers at launch do not hold one of 256.
V_PARTS = [(64, 0), (64, 2 * tiles.ATOM_BYTES)]


@dataclass
class Item:
    """One piece of work: 64 heads of a token and one split of its keys; run-time values."""

    token: Int32
    first_head: Int32
    row: Int32
    lists: TokenLists
    first: Int32
    last: Int32


class WideAttention:
    """The kernel for one static shape."""

    def __init__(self, lists: ListShape, blocks: int = BLOCKS) -> None:
        self.blocks = blocks
        self.rotated = lists.rotated
        self.gather = Gather(GatherConfig(BUFFERS, lists))
        self.shared_bytes = BARRIERS_AT + self.gather.barrier_bytes + 4 * tiles.BARRIER_BYTES

    @cute.jit
    def __call__(self, operands: Operands, numbers: Numbers, stream: Any) -> None:
        """Launch the attention and, with more than one split, the combination.

        The combination is launched in plain stream order: it does not wait for what it reads.
        """
        tokens, heads = operands.out.shape[0], operands.out.shape[1]
        head_tiles = (heads + (HEADS - 1)) // HEADS
        items = Int32(tokens * head_tiles) * numbers.splits
        self.kernel(operands, numbers, Int32(head_tiles), items).launch(
            grid=[cutlass.min(items, Int32(self.blocks)), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
        combine_splits(operands, numbers, self.rotated, stream)

    @cute.kernel
    def kernel(self, operands: Operands, numbers: Numbers, head_tiles: Int32, items: Int32) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        base = memory.allocate(self.shared_bytes, 1024).toint()
        self.locate(base, tid)
        if tid == 0:
            self.init_barriers()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        # What follows finds room only where a block has ended, so it may as well be launched now.
        cute.arch.griddepcontrol_launch_dependents()
        if warp >= 12:
            cute.arch.setmaxregister_decrease(REGISTERS[3])
            self.produce(1, operands, numbers, head_tiles, items)
        elif warp >= 8:
            cute.arch.setmaxregister_decrease(REGISTERS[2])
            self.produce(0, operands, numbers, head_tiles, items)
        elif warp < 4:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.left_half(operands, numbers, head_tiles, items)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.right_half(operands, numbers, head_tiles, items)

    def init_barriers(self) -> None:
        """For one thread: each of four warps arrives once where warpgroups wait for each other."""
        self.gather.init_barriers(self.barriers, (4, 4))
        for i in range(4):
            hopper.barrier_init(self.handover + i * tiles.BARRIER_BYTES, 4)
        hopper.barrier_init_fence()

    def item(self, index: Any, operands: Operands, numbers: Numbers, head_tiles: Int32) -> Item:
        """What an item is: head tiles of a token and split are neighbours."""
        split_index = index // head_tiles
        token = split_index // numbers.splits
        split = split_index - token * numbers.splits
        lists = TokenLists(self.gather.config.lists, operands, numbers, token)
        first, last = lists.share(split, numbers.splits)
        row = split * Int32(operands.out.shape[0]) + token
        return Item(token, (index - split_index * head_tiles) * HEADS, row, lists, first, last)

    @cute.jit
    def produce(
        self,
        group: cutlass.Constexpr,
        operands: Operands,
        numbers: Numbers,
        head_tiles: Int32,
        items: Int32,
    ) -> None:
        """A producer warpgroup: its part of the tiles of item after item."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        tid = self.tid & (WARPGROUP - 1)
        self.announce(group, tid, self.item(block, operands, numbers, head_tiles), operands)
        done = Int32(0)
        for index in cutlass.range(block, items, blocks):
            item = self.item(index, operands, numbers, head_tiles)
            if index + blocks < items:
                later = self.item(index + blocks, operands, numbers, head_tiles)
                self.announce(group, tid, later, operands)
            self.gather.produce(
                group,
                tid,
                item.lists,
                item.first,
                item.last,
                done,
                self.keys,
                self.masks,
                self.barriers,
            )
            done = done + (item.last - item.first)

    @cute.jit
    def announce(
        self, group: cutlass.Constexpr, tid: Int32, item: Item, operands: Operands
    ) -> None:
        """Bring an item's slots and Q into L2; tid counts a producer warpgroup's threads."""
        self.gather.announce(group, tid, item.lists, item.first, item.last)
        q, last_head = operands.q, Int32(operands.out.shape[1]) - 1
        start = address(q) + Int64(item.token) * q.stride[0] * 2
        sectors = HEAD_DIM * 2 // tiles.SECTOR
        threads = tiles.GROUPS * WARPGROUP
        for i in cutlass.range_constexpr(HEADS * sectors // threads):
            index = i * threads + tid + group * WARPGROUP
            head = cutlass.min(item.first_head + index // sectors, last_head)
            at = Int64(head) * q.stride[1] * 2 + Int64(index % sectors * tiles.SECTOR)
            hopper.prefetch_l2(start + at)

    @cute.jit
    def left_half(
        self, operands: Operands, numbers: Numbers, head_tiles: Int32, items: Int32
    ) -> None:
        """Warpgroup 0: scores, softmax and dims 0 to 255 of the output."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        sums = cute.make_rmem_tensor(128, Float32)
        gains = cute.make_rmem_tensor(2, Float32)
        peak = cute.make_rmem_tensor(2, Float32)
        total = cute.make_rmem_tensor(2, Float32)
        done = Int32(0)
        for index in cutlass.range(block, items, blocks):
            item = self.item(index, operands, numbers, head_tiles)
            self.load_query(operands, item)
            self.clear(sums)
            self.score_tiles(item.last - item.first, done, sums, peak, total, numbers.scale_log2)
            self.finish_softmax(peak, total, gains, item, operands, numbers)
            hopper.named_barrier_arrive(2, CONSUMERS)
            self.write_half(0, sums, gains, item, Int64(0), operands, numbers)
            # Every warp has read its scores' Q before a faster one overwrites it.
            hopper.named_barrier(3, WARPGROUP)
            done = done + (item.last - item.first)

    @cute.jit
    def right_half(
        self, operands: Operands, numbers: Numbers, head_tiles: Int32, items: Int32
    ) -> None:
        """Warpgroup 1: dims 256 to 511 of the output."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        sums = cute.make_rmem_tensor(128, Float32)
        gains = cute.make_rmem_tensor(2, Float32)
        done = Int32(0)
        for index in cutlass.range(block, items, blocks):
            item = self.item(index, operands, numbers, head_tiles)
            self.load_sinks(operands, item)
            self.load_query(operands, item)
            self.clear(sums)
            self.value_tiles(item.last - item.first, done, sums)
            position = load_position(operands, item.token, self.rotated)
            hopper.named_barrier(2, CONSUMERS)
            for h in cutlass.range_constexpr(2):
                gains[h] = ptx.shared_load_f32(self.gains + (self.row + 8 * h) * 4)
            self.write_half(1, sums, gains, item, position, operands, numbers)
            done = done + (item.last - item.first)

    def write_half(
        self,
        half: int,
        sums: Any,
        gains: Any,
        item: Item,
        position: Int64,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Half of an item's output; position: of its query, for the half that has RoPE dims."""
        head = item.first_head + self.row
        where = (self.quad, head, item.row, operands, numbers)
        output.write_half(half, sums, gains, *where, self.rotated, position)

    def clear(self, sums: Any) -> None:
        """Set the accumulators of a part of the output to zero."""
        for i in range(128):
            sums[i] = Float32(0.0)

    def locate(self, base: Any, tid: Any) -> None:
        """Places in shared memory, and what a consumer thread is: rows `row` and `row + 8`."""
        self.keys, self.query = base, base + QUERY_AT
        self.weights, self.factors = base + WEIGHTS_AT, base + FACTORS_AT
        self.gains, self.masks = base + GAINS_AT, base + MASKS_AT
        self.barriers, self.sinks = base + BARRIERS_AT, base + SINKS_AT
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

    @cute.jit
    def load_sinks(self, operands: Operands, item: Item) -> None:
        """Sinks of 64 heads to shared memory by warpgroup 1; the last head's beyond the heads."""
        local = self.tid & (WARPGROUP - 1)
        if local < HEADS:
            head = cutlass.min(item.first_head + local, Int32(operands.out.shape[1]) - 1)
            sink = ptx.global_load_f32(address(operands.sinks) + Int64(head) * 4)
            ptx.shared_store_f32(self.sinks + local * 4, sink)

    def load_query(self, operands: Operands, item: Item) -> None:
        """Q of 64 heads to shared memory by both consumer warpgroups; zeros beyond the heads."""
        q, first_head, num_heads = operands.q, item.first_head, Int32(operands.out.shape[1])
        start = address(q) + Int64(item.token) * q.stride[0] * 2
        tid = ptx.opaque(self.tid)
        for i in range(HEADS * HEAD_DIM // 8 // CONSUMERS):
            index = i * CONSUMERS + tid
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
        self,
        count: Int32,
        done: Int32,
        sums: Any,
        peak: Any,
        total: Any,
        scale_log2: Float32,
    ) -> None:
        """Warpgroup 0: scores, softmax and the left half of the output over an item's tiles."""
        scores = cute.make_rmem_tensor(32, Float32)
        weights = cute.make_rmem_tensor(16, Uint32)
        factors = cute.make_rmem_tensor(2, Float32)
        for h in cutlass.range_constexpr(2):
            peak[h] = Float32(-Float32.inf)
            total[h] = Float32(0.0)
        if count > 0:
            self.start_first(scores, done)
            self.start_second(scores, done)
            last = done + count - 1
            for n in cutlass.range(done, last):
                self.weigh(n, scores, weights, factors, peak, total, scale_log2, n > done, sums)
                self.store_weights(n, weights, factors)
                self.start_first(scores, n + 1)
                self.settle(sums, 1)
                self.release(n)
                self.start_second(scores, n + 1)
            self.weigh(last, scores, weights, factors, peak, total, scale_log2, count > 1, sums)
            self.store_weights(last, weights, factors)
            self.hand_over(last)
            self.settle(sums, 0)
            self.release(last)

    @cute.jit
    def weigh(
        self,
        n: Int32,
        scores: Any,
        weights: Any,
        factors: Any,
        peak: Any,
        total: Any,
        scale_log2: Float32,
        pending: Any,
        sums: Any,
    ) -> None:
        """Wait for the scores of tile n, turn them into weights, start the left half's products."""
        buffer, _ = self.gather.place(n)
        low, high = hopper.shared_load_u32x2(self.masks + buffer * tiles.MASK_BYTES)
        self.finish_scores(scores, 1)
        if pending:
            self.hand_over(n - 1)
        self.finish_scores(scores, 0)
        if (low & high) != Uint32(0xFFFFFFFF):
            self.mask_scores(scores, low, high)
        self.softmax(scores, weights, factors, peak, total, scale_log2)
        self.rescale(sums, factors)
        start = self.keys + buffer * tiles.BUFFER_BYTES
        self.add_left(sums, weights, hopper.descriptor_mn_major(start, tiles.ATOM_BYTES))
        ptx.barrier_wait(self.taken(n), ((n >> 1) & 1) ^ 1)

    @cute.jit
    def release(self, n: Int32) -> None:
        """Give back the left half of the buffer of tile n."""
        buffer, _ = self.gather.place(n)
        if self.lane == 0:
            hopper.barrier_arrive(self.gather.empty(self.barriers, buffer, 0))

    def start_first(self, scores: Any, n: Any) -> None:
        """Start the products of the scores of tile n over the left half of the dims."""
        buffer, parity = self.gather.place(n)
        query = hopper.descriptor_k_major(self.query)
        keys = hopper.descriptor_k_major(self.keys + buffer * tiles.BUFFER_BYTES)
        ptx.barrier_wait(self.gather.full(self.barriers, buffer, 0), parity)
        s = hopper.wgmma_ss(32, query, keys, QK_STEPS, 0)
        for i in range(32):
            scores[i] = s[i]

    def start_second(self, scores: Any, n: Any) -> None:
        """As `start_first` over the right half."""
        buffer, parity = self.gather.place(n)
        step = tiles.HALF_BYTES
        query = hopper.descriptor_k_major(self.query + step)
        keys = hopper.descriptor_k_major(self.keys + buffer * tiles.BUFFER_BYTES + step)
        ptx.barrier_wait(self.gather.full(self.barriers, buffer, 1), parity)
        s = [scores[i] for i in range(32)]
        s = hopper.wgmma_ss(s, query, keys, QK_STEPS[:-LEAD], 0)
        s = hopper.wgmma_ss(s, query, keys, QK_STEPS[-LEAD:], 0)
        for i in range(32):
            scores[i] = s[i]

    def finish_scores(self, scores: Any, pending: int) -> None:
        """Wait for the products under way, but the youngest `pending` groups."""
        s = hopper.wgmma_wait([scores[i] for i in range(32)], pending)
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
            tops = list(mine)
            while len(tops) > 1:
                pairs = zip(tops[::2], tops[1::2], strict=True)
                tops = [ptx.maximum(a, b) for a, b in pairs]
            top = tops[0]
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
        """Start O += P V with P in registers."""
        old = [sums[i] for i in range(128)]
        four = [weights[i] for i in range(16)]
        new = hopper.wgmma_rs(old, four, values, V_STEPS, 1, V_PARTS)
        for i, value in enumerate(new):
            sums[i] = value

    def settle(self, sums: Any, pending: int) -> None:
        """Wait for the products of the output; `pending` younger groups may be under way."""
        old = [sums[i] for i in range(128)]
        for i, value in enumerate(hopper.wgmma_wait(old, pending)):
            sums[i] = value

    def add_right(self, sums: Any, weights: Int64, values: Int64) -> None:
        """O += P V with P in shared memory."""
        steps = [(32 * k, step) for k, step in enumerate(V_STEPS)]
        old = [sums[i] for i in range(128)]
        new = hopper.wgmma_ss(old, weights, values, steps, 1, V_PARTS)
        for i, value in enumerate(hopper.wgmma_wait(new, 0)):
            sums[i] = value

    @cute.jit
    def value_tiles(self, count: Int32, done: Int32, sums: Any) -> None:
        """Warpgroup 1: the right half of the output over an item's tiles."""
        factors = cute.make_rmem_tensor(2, Float32)
        for n in cutlass.range(done, done + count):
            buffer, parity = self.gather.place(n)
            ptx.barrier_wait(self.filled(n), (n >> 1) & 1)
            ptx.barrier_wait(self.gather.full(self.barriers, buffer, 1), parity)
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
        item: Item,
        operands: Operands,
        numbers: Numbers,
    ) -> None:
        """Log-sum-exp to global memory; the last factor of each row's sums to shared memory."""
        num_heads = operands.out.shape[1]
        for h in cutlass.range_constexpr(2):
            for step in cutlass.range_constexpr(2):
                total[h] = total[h] + ptx.shuffle_xor(total[h], step + 1)
            local = self.row + 8 * h
            head = item.first_head + local
            present = head < num_heads
            mine = present & (self.quad == 0)
            origin = choose(peak[h] == Float32(-Float32.inf), Float32(0.0), peak[h])
            log_sum = origin + ptx.log2(total[h])
            at = (Int64(item.row) * num_heads + head) * 4
            gains[h] = Float32(1.0) / total[h]
            if numbers.splits == 1:
                ptx.global_store_f32_if(mine, address(operands.lse) + at, log_sum * Float32(LN2))
                sink = ptx.shared_load_f32(self.sinks + local * 4)
                weight = ptx.exp2(sink * Float32(LOG2_E) - origin)
                gains[h] = numbers.out_scale / (total[h] + weight)
            else:
                ptx.global_store_f32_if(mine, address(operands.part_lse) + at, log_sum)
            gains[h] = choose(total[h] == Float32(0.0), Float32(0.0), gains[h])
            ptx.shared_store_f32(self.gains + local * 4, gains[h])


@compiled_kernel
def compile_wide(arch: str, lists: ListShape, blocks: int = BLOCKS) -> Any:
    """Compile for an architecture, a static shape and SMs, from fake tensors; needs no GPU."""
    kernel = WideAttention(lists, blocks)
    return compile_for(arch, kernel, fake_operands(lists.slot_bytes), fake_numbers())

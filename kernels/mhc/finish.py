"""From the groups' sums to the mixing weights, the collapse of the streams, and the norm after it.

A block takes one token, or a slice of its columns. It adds the groups' sums (`project`) in one
order, whatever the batch: a token's results have the same bits in every batch. What older kernels
wrote, the streams among it, is loaded before the groups' sums are waited for. Where tokens are few,
one thread of a token's first block makes the doubly stochastic matrix; where there are many, blocks
would wait for that thread, and a launch of its own has one thread a token.

With a norm weight a block takes a whole token: the collapse is rounded to bf16, as a kernel of its
own would find it, and leaves normalised.

Roofline, hc_pre at hidden 4096: the streams once more, 32 KB a token in and 8 KB out; few tokens
find them in L2, many go from the last token to the first, so that L2 serves as much as it holds.
"""

from typing import Any

import torch
from cutlass import Float32, Int32, Int64, const_expr, cute, memory, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import global_store_f32_if, global_store_u32x4
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.mhc.gates import STREAMS, sigmoid, sinkhorn
from sglang_dsv4.kernels.mhc.operands import (
    PRE_ROWS,
    fake_compact,
    fake_streams,
    groups_of,
    square_column,
    sums_pitch,
)
from sglang_dsv4.kernels.operands import CUTE_TYPES, VECTOR_BYTES, fake_vector

LANE = 8
# Groups that one thread adds.
MEMBERS = 4
# Of a block of the launch that makes comb, a token each.
COMB_THREADS = 64


class Finish:
    """For `rows` 24 (hc_pre) or 4 (hc_head) of fn.

    threads: of a block, at least those that add the groups; columns: pieces of LANE columns of a
    thread; norm: the collapse leaves with its RMSNorm, which needs threads * columns pieces to
    cover the width; fresh: the kernel right before this one makes the streams; apart: comb in a
    launch of its own.
    """

    def __init__(
        self,
        hidden: int,
        rows: int,
        threads: int,
        columns: int,
        norm: bool,
        fresh: bool,
        apart: bool,
    ) -> None:
        self.hidden, self.rows, self.columns = hidden, rows, columns
        self.norm, self.fresh, self.apart = norm, fresh, apart
        self.lanes, self.groups = hidden // LANE, groups_of(hidden)
        self.sets = -(-self.groups // MEMBERS)
        self.square, self.pitch = square_column(rows), sums_pitch(rows)
        self.quads = self.pitch // 4
        self.threads = max(threads, -(-self.sets * self.quads // 32) * 32)
        self.slices = -(-self.lanes // (self.threads * columns))
        self.warps = self.threads // 32

    @cute.jit
    def __call__(
        self,
        streams: cute.Tensor,
        partial: cute.Tensor,
        base: cute.Tensor,
        scale: cute.Tensor,
        norm_weight: cute.Tensor,
        out: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        iters: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
        stream: Any,
    ) -> None:
        """Launch over tokens and slices of columns."""
        count = Int32(cm.rows_in(streams))
        self.kernel(
            streams, partial, base, scale, norm_weight, out, post, comb, iters, hc_eps, rms_eps
        ).launch(
            grid=[count * self.slices, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        if const_expr(self.apart):
            blocks = (count + COMB_THREADS - 1) // COMB_THREADS
            normalise_rows(comb, iters, hc_eps).launch(
                grid=[blocks, 1, 1], block=[COMB_THREADS, 1, 1], stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(
        self,
        streams: cute.Tensor,
        partial: cute.Tensor,
        base: cute.Tensor,
        scale: cute.Tensor,
        norm_weight: cute.Tensor,
        out: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        iters: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
    ) -> None:
        """One token, or a slice of its columns."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        part, count = block % self.slices, Int32(cm.rows_in(streams))
        # The tokens that were read last may still be in L2.
        token = count - 1 - block // self.slices
        allocator = memory.SmemAllocator()
        sums = allocator.allocate_tensor(Float32, cute.make_layout(self.sets * self.pitch), 16)
        gates = allocator.allocate_tensor(Float32, cute.make_layout(self.square), 16)
        squares = allocator.allocate_tensor(Float32, cute.make_layout(self.warps), 16)
        lanes = [(part * self.columns + k) * self.threads + thread for k in range(self.columns)]
        places = [cm.select(lane < self.lanes, lane, Int32(0)) * LANE for lane in lanes]
        words = []
        if const_expr(not self.fresh):
            words = [self.load(streams, token, place) for place in places]
        scales = []
        if const_expr(self.norm):
            scales = [cm.load_values(norm_weight, place, LANE) for place in places]
        n = cm.select(thread < self.rows, thread, Int32(0))
        which = cm.select(n < 2 * STREAMS, n // STREAMS, Int32(2))
        factor = cm.float_of(cm.load_words(cm.address_of(scale, which), 1)[0])
        offset = cm.float_of(cm.load_words(cm.address_of(base, n), 1)[0])
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.fresh):
            words = [self.load(streams, token, place) for place in places]
        if thread < self.sets * self.quads:
            self.add_groups(partial, sums, token, count, thread)
        cute.arch.sync_threads()
        if thread < self.rows:
            value = self.gate(sums, thread, factor, offset, hc_eps, rms_eps)
            gates[thread] = value
            if const_expr(self.rows == PRE_ROWS):
                at = Int64(token) * STREAMS + thread % STREAMS
                is_post = (part == 0) & (thread // STREAMS == 1)
                global_store_f32_if(is_post, cm.address_of(post, at), value)
            if const_expr(self.apart):
                at = Int64(token) * STREAMS * STREAMS + thread - 2 * STREAMS
                is_comb = (part == 0) & (thread >= 2 * STREAMS)
                global_store_f32_if(is_comb, cm.address_of(comb, at), value)
        cute.arch.sync_threads()
        pre = cm.load_vector(cm.element_pointer(gates, 0, VECTOR_BYTES), STREAMS)
        pieces = [self.collapse(found, pre) for found in words]
        if const_expr(self.norm):
            pieces = self.normalise(pieces, scales, lanes, squares, thread, rms_eps)
        for k in range_constexpr(self.columns):
            if lanes[k] < self.lanes:
                at = Int64(token) * self.hidden + places[k]
                global_store_u32x4(cm.address_of(out, at), *pieces[k])
        if const_expr(self.rows == PRE_ROWS and not self.apart):
            self.finish_comb(gates, comb, token, part, thread, iters, hc_eps)

    def load(self, streams: cute.Tensor, token: Int32, place: Int32) -> list[list[Any]]:
        """The words of LANE columns of the four streams."""
        start = Int64(token) * cm.stride_of(streams) + place
        return [
            cm.load_words(cm.address_of(streams, start + i * self.hidden), LANE // 2)
            for i in range(STREAMS)
        ]

    @cute.jit
    def add_groups(
        self, partial: cute.Tensor, sums: cute.Tensor, token: Int32, count: Int32, thread: Int32
    ) -> None:
        """Four columns of MEMBERS consecutive groups."""
        member, quad = thread // self.quads, thread % self.quads
        found = []
        for k in range_constexpr(MEMBERS):
            group = member * MEMBERS + k
            row = Int64(cm.select(group < self.groups, group, Int32(0))) * count + token
            at = cm.address_of(partial, row * self.pitch + quad * 4)
            found.append([cm.float_of(word) for word in cm.load_words(at, 4)])
        total = found[0]
        for k in range_constexpr(1, MEMBERS):
            exists = member * MEMBERS + k < self.groups
            total = [
                a + cm.select(exists, b, Float32(0.0)) for a, b in zip(total, found[k], strict=True)
            ]
        cm.store_vector(cm.element_pointer(sums, thread * 4, VECTOR_BYTES), total)

    def gate(
        self,
        sums: cute.Tensor,
        n: Int32,
        factor: Float32,
        offset: Float32,
        hc_eps: Float32,
        rms_eps: Float32,
    ) -> Float32:
        """Weight n: pre and post are final, comb is a logit."""
        product, square = cm.float_at(sums, n), cm.float_at(sums, self.square)
        for k in range(1, self.sets):
            product = product + cm.float_at(sums, n + k * self.pitch)
            square = square + cm.float_at(sums, self.square + k * self.pitch)
        mean = square * Float32(1.0 / (STREAMS * self.hidden))
        value = product * cm.rsqrt(mean + rms_eps) * factor + offset
        weight = sigmoid(value)
        chosen = cm.select(n < STREAMS, weight + hc_eps, weight * Float32(2.0))
        return cm.select(n < 2 * STREAMS, chosen, value)

    def collapse(self, words: list[list[Any]], pre: list[Any]) -> list[Any]:
        """Four words of the weighted sum of the streams."""
        pairs = []
        for k in range(LANE // 2):
            low, high = Float32(0.0), Float32(0.0)
            for i in range(STREAMS):
                first, second = cm.bf16_values(words[i][k])
                low, high = low + pre[i] * first, high + pre[i] * second
            pairs.append(cm.bf16_pair(low, high))
        return pairs

    @cute.jit
    def normalise(
        self,
        pieces: list[list[Any]],
        scales: list[list[Any]],
        lanes: list[Int32],
        squares: cute.Tensor,
        thread: Int32,
        rms_eps: Float32,
    ) -> list[list[Any]]:
        """RMSNorm over the block's token: weight * bf16(value / RMS), as torch's modules do."""
        total = Float32(0.0)
        values = []
        for k in range_constexpr(self.columns):
            found = [value for word in pieces[k] for value in cm.bf16_values(word)]
            part = cm.sum_of_squares(found)
            total = total + cm.select(lanes[k] < self.lanes, part, Float32(0.0))
            values.append(found)
        total = cm.lane_sum(total, 32)
        if thread % 32 == 0:
            squares[thread // 32] = total
        cute.arch.sync_threads()
        total = cm.float_at(squares, 0)
        for warp in range_constexpr(1, self.warps):
            total = total + cm.float_at(squares, warp)
        factor = cm.rsqrt(total * Float32(1.0 / self.hidden) + rms_eps)
        kind = CUTE_TYPES[torch.bfloat16]
        normed = []
        for k in range_constexpr(self.columns):
            weights = cm.floats_in(scales[k], kind)
            scaled = [a * factor * b for a, b in zip(values[k], weights, strict=True)]
            normed.append([cm.bf16_pair(*scaled[i : i + 2]) for i in range(0, LANE, 2)])
        return normed

    @cute.jit
    def finish_comb(
        self,
        gates: cute.Tensor,
        comb: cute.Tensor,
        token: Int32,
        part: Int32,
        thread: Int32,
        iters: Int32,
        hc_eps: Float32,
    ) -> None:
        """One token's comb from its logits, by one thread of the last warp."""
        if (part == 0) & (thread == self.threads - 32):
            matrix = cute.make_rmem_tensor(cute.make_layout(STREAMS * STREAMS), Float32)
            for i in range_constexpr(STREAMS * STREAMS):
                matrix[i] = cm.float_at(gates, 2 * STREAMS + i)
            sinkhorn(matrix, iters, hc_eps)
            target = cm.element_pointer(comb, Int64(token) * STREAMS * STREAMS, VECTOR_BYTES)
            cm.store_vector(target, cm.floats_of(matrix, 0, STREAMS * STREAMS))


@cute.kernel
def normalise_rows(comb: cute.Tensor, iters: Int32, hc_eps: Float32) -> None:
    """Logits to doubly stochastic matrices in place, one token a thread."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = block * COMB_THREADS + thread
    if token < Int32(cm.rows_in(comb)):
        matrix = cute.make_rmem_tensor(cute.make_layout(STREAMS * STREAMS), Float32)
        pointer = cm.element_pointer(comb, Int64(token) * STREAMS * STREAMS, VECTOR_BYTES)
        found = cm.load_vector(pointer, STREAMS * STREAMS)
        for i in range_constexpr(STREAMS * STREAMS):
            matrix[i] = found[i]
        sinkhorn(matrix, iters, hc_eps)
        cm.store_vector(pointer, cm.floats_of(matrix, 0, STREAMS * STREAMS))


@compiled_kernel
def compile_finish(
    arch: str,
    hidden: int,
    rows: int,
    threads: int,
    columns: int,
    norm: bool,
    fresh: bool,
    apart: bool,
) -> Any:
    """Compile for one width, number of rows of fn, and shape of blocks; needs no GPU."""
    f32 = torch.float32
    return compile_for(
        arch,
        Finish(hidden, rows, threads, columns, norm, fresh, apart),
        fake_streams(hidden),
        fake_compact(f32, sums_pitch(rows)),
        fake_vector(f32, rows),
        fake_vector(f32, 3 if rows == PRE_ROWS else 1),
        fake_vector(torch.bfloat16, hidden),
        fake_compact(torch.bfloat16, hidden),
        fake_compact(f32, STREAMS),
        fake_compact(f32, STREAMS, STREAMS),
        Int32(0),
        Float32(0.0),
        Float32(0.0),
    )

"""Kernels that form, finish and insert the windows that a batch closes.

OverlapWindows (CSA, ratio 4): 8 candidates a channel, all in one lane, so no exchange before the
norm. A record takes 64 lanes (two warps), an indexer key 16.

Roofline, bf16 projections, records: each token's kv and gate are read once, 4096 B a token, and a
window writes 384 B; with sources, positions and table rows 4.3 KB a token, so 4096 tokens are
17.4 MB. The 16 KB of bias are read by every window from L1. Indexer keys: 1.1 KB a token. About 10
flops a value: bandwidth only.

FullWindows (HCA, ratio 128): a window is 128 KB of kv and gate of which 4096 tokens close only 32,
so a cluster of eight blocks shares one: each block owns 64 channels, 8 lanes wide, and 32 groups of
four candidates, whose sums meet by shuffles and then through shared memory. Only the sum of squares
crosses blocks, through distributed shared memory. 2 KB of kv and gate a token: 4096 tokens are
8.6 MB; as many bytes of bias again come from L2, since it is float32 and as tall as a window.

Measured on an H200, 2026-12-02 (BENCHMARKS.md), with the state's write: prefill of 4096 tokens
takes 12.4 us (C4), 17.1 us (C128) and 8.6 us (indexer keys), 52%, 31% and 41% of a copy of as many
bytes; decode of 256 requests 10.5, 11.1 and 9.7 us, 36%, 26% and 23%. Decode moves 1.3 to 5.2 MB in
nearly the same time, so there latency and the two launches limit it, not bandwidth.

Padding windows (slot -1) read nothing but their slot.
"""

from typing import Any

import torch
from cutlass import Float32, Int32, Int64, const_expr, cute, memory, range_constexpr

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.candidates import (
    CHUNK,
    LANE,
    SUMS,
    Candidates,
    empty_sums,
    merge_lanes,
    merge_sums,
    weighted_means,
)
from sglang_dsv4.kernels.compress.finish import Finish

OVERLAP_CANDIDATES = 8
FULL_RATIO = 128
# At most 128 registers a thread: 4096 tokens are 1024 blocks, which fit one wave of 132 SMs.
BLOCKS_PER_SM = 8
# Of the SM's shared memory: enough for those blocks, the rest is L1 for the bias.
SHARED_PERCENT = 25
CLUSTER = 8
FULL_WARPS = 8


def is_stored(slot: Any, pool: cute.Tensor, page_size: int) -> Any:
    """Whether a slot names a row of the pool."""
    return (slot >= Int64(0)) & (slot < cm.rows_in(pool) * page_size)


def load_sources(source: cute.Tensor, offset: Int64) -> cute.Tensor:
    """CHUNK consecutive candidate rows."""
    rows = cute.make_rmem_tensor(cute.make_layout(CHUNK), Int64)
    found = cm.load_vector(cm.element_pointer(source, offset, 16), CHUNK)
    for i in range(CHUNK):
        rows[i] = found[i]
    return rows


class OverlapWindows:
    """Ratio 4: one block of 64 threads forms one record or four indexer keys."""

    THREADS = 64

    def __init__(self, dtype: torch.dtype, layout: RecordLayout | IndexerLayout) -> None:
        self.finish = Finish(layout)
        self.width = layout.head_dim
        self.page_size = layout.page_size
        self.lanes = self.width // LANE
        self.windows = self.THREADS // self.lanes
        self.candidates = Candidates(dtype, 2 * self.width)

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        bias: cute.Tensor,
        state: cute.Tensor,
        source: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        norm_weight: cute.Tensor,
        table: cute.Tensor,
        pool: cute.Tensor,
        eps: Float32,
        stream: Any,
    ) -> None:
        """Launch over windows."""
        blocks = (cute.size(slots) + self.windows - 1) // self.windows
        self.kernel(
            kv, gate, bias, state, source, positions, slots, norm_weight, table, pool, eps
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=SHARED_PERCENT,
        )

    @cute.kernel
    def kernel(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        bias: cute.Tensor,
        state: cute.Tensor,
        source: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        norm_weight: cute.Tensor,
        table: cute.Tensor,
        pool: cute.Tensor,
        eps: Float32,
    ) -> None:
        """`lanes` threads a window; a half-warp without a window works on the last one, mute."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        partial = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(2), 16)
        channel_lane = thread % self.lanes
        wanted = block * self.windows + thread // self.lanes
        last = Int32(cute.size(slots)) - 1
        window = cm.select(wanted < last, wanted, last)
        slot = slots[window]
        writes = (wanted <= last) & is_stored(slot, pool, self.page_size)
        works = writes
        if const_expr(self.windows > 1):
            works = cute.arch.vote_any_sync(writes)
        if works:
            sums = empty_sums()
            for part in range_constexpr(2):
                rows = load_sources(source, Int64(window) * OVERLAP_CANDIDATES + part * CHUNK)
                channel = channel_lane * LANE + part * self.width
                self.candidates.add_chunk(sums, kv, gate, bias, state, rows, channel, Int32(0))
            means = weighted_means(sums)
            square_sum = cm.lane_sum(cm.sum_of_squares(means), min(self.lanes, 32))
            if const_expr(self.windows == 1):
                if thread % 32 == 0:
                    partial[thread // 32] = square_sum
                cute.arch.sync_threads()
                square_sum = partial[0] + partial[1]
            self.finish.apply(
                means,
                square_sum,
                norm_weight,
                eps,
                table,
                positions[window],
                pool,
                slot,
                channel_lane,
                writes,
            )


class FullWindows:
    """Ratio 128: a cluster of eight blocks forms one record."""

    THREADS = 32 * FULL_WARPS

    def __init__(self, dtype: torch.dtype, layout: RecordLayout) -> None:
        self.finish = Finish(layout)
        self.width = layout.head_dim
        self.page_size = layout.page_size
        self.lanes = self.width // CLUSTER // LANE
        self.candidates = Candidates(dtype, self.width)

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        bias: cute.Tensor,
        state: cute.Tensor,
        source: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        norm_weight: cute.Tensor,
        table: cute.Tensor,
        pool: cute.Tensor,
        eps: Float32,
        stream: Any,
    ) -> None:
        """Launch one cluster a window."""
        self.kernel(
            kv, gate, bias, state, source, positions, slots, norm_weight, table, pool, eps
        ).launch(
            grid=[cute.size(slots) * CLUSTER, 1, 1],
            block=[self.THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        bias: cute.Tensor,
        state: cute.Tensor,
        source: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        norm_weight: cute.Tensor,
        table: cute.Tensor,
        pool: cute.Tensor,
        eps: Float32,
    ) -> None:
        """The blocks of a cluster see the same slot, so they leave or stay together."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        window, rank = block // CLUSTER, block % CLUSTER
        allocator = memory.SmemAllocator()
        shared_sums = allocator.allocate_tensor(
            Float32, cute.make_layout((FULL_WARPS, SUMS, LANE, self.lanes)), 16
        )
        squares = allocator.allocate_tensor(Float32, cute.make_layout(CLUSTER), 16)
        slot = slots[window]
        if is_stored(slot, pool, self.page_size):
            # All blocks of the cluster have begun before one writes to another's shared memory.
            cute.arch.cluster_arrive_relaxed()
            lane, warp = thread % 32, thread // 32
            column = lane % self.lanes
            channel_lane = rank * self.lanes + column
            group = thread // self.lanes
            rows = load_sources(source, Int64(window) * FULL_RATIO + group * CHUNK)
            sums = empty_sums()
            self.candidates.add_chunk(
                sums, kv, gate, bias, state, rows, channel_lane * LANE, group * CHUNK
            )
            merge_lanes(sums, 8)
            merge_lanes(sums, 16)
            if lane < self.lanes:
                for k in range_constexpr(SUMS):
                    for i in range_constexpr(LANE):
                        shared_sums[warp, k, i, column] = sums[k, i]
            cute.arch.sync_threads()
            means = cute.make_rmem_tensor(cute.make_layout(LANE), Float32)
            if warp == 0:
                pair = lane // self.lanes * 2
                others = cute.make_rmem_tensor(cute.make_layout((SUMS, LANE)), Float32)
                for k in range_constexpr(SUMS):
                    for i in range_constexpr(LANE):
                        sums[k, i] = shared_sums[pair, k, i, column]
                        others[k, i] = shared_sums[pair + 1, k, i, column]
                merge_sums(sums, others)
                merge_lanes(sums, 8)
                merge_lanes(sums, 16)
                entry = weighted_means(sums)
                for i in range_constexpr(LANE):
                    means[i] = entry[i]
            cute.arch.cluster_wait()
            if warp == 0:
                square_sum = cm.lane_sum(cm.sum_of_squares([means[i] for i in range(LANE)]), 8)
                if lane < CLUSTER:
                    cm.store_to_block(squares.iterator + rank, lane, square_sum)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            if warp == 0:
                total = squares[0]
                for i in range_constexpr(1, CLUSTER):
                    total = total + squares[i]
                self.finish.apply(
                    [means[i] for i in range(LANE)],
                    total,
                    norm_weight,
                    eps,
                    table,
                    positions[window],
                    pool,
                    slot,
                    channel_lane,
                    lane < self.lanes,
                )

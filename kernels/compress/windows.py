"""Kernels that form the windows that a batch closes: softmax sums over the candidate rows.

OverlapWindows (CSA, ratio 4) also finishes and inserts them. 8 candidates a channel, all in one
thread, so nothing is exchanged before the norm. A record takes a block of 128 threads, an indexer
key one warp.

Roofline, bf16 projections, records: each token's kv and gate are read once, 4096 B a token, and a
window writes 384 B; with sources, positions and table rows 4.3 KB a token, so 4096 tokens are
17.6 MB. As many bytes of bias as of kv and gate are read from L1. Indexer keys: 1.1 KB a token.
About 10 flops a value: bandwidth only. A thread's registers hold all that it reads, so the kernel
exists twice: with 128 registers, and with 64 for launches that 512 threads an SM would not hold.

FullWindows (HCA, ratio 128) leaves float32 means to the second launch (`tail`): a window is 128 KB
of kv and as much of gate, of which 4096 tokens close only 32, so eight blocks share one. A block
owns 64 channels, 16 threads wide, in 16 groups of eight candidates, whose sums meet in shared
memory. 4096 tokens are 9.5 MB; as many bytes of bias again come from L2, since it is float32 and as
tall as a window. With many windows, most of them padding in a decode graph, a block looks for the
next one that is not, 32 slots a load.

Measured on an H200, 2026-12-02 (BENCHMARKS.md), both launches: prefill of 4096 tokens takes 9.3 us
(C4), 9.5 us (C128) and 5.1 us (indexer keys), 69%, 55% and 67% of a copy of as many bytes; decode
of 256 requests 6.2, 5.6 and 4.4 us, 59%, 50% and 49%. Before loads were issued together and the
second launch was programmatic: 11.9, 17.2 and 8.6 us, and 10.5, 11.1 and 9.7 us. The plans had no
padding. No variants were timed that would tell what limits it now; decode moves 1.3 to 5.2 MB in
nearly the same time, so there it is latency, not bandwidth.

Padding windows (slot -1) read indices and norm weights, and nothing else.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, cute, memory, range_constexpr

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.candidates import (
    COUNT,
    LANE,
    SUMS,
    Candidates,
    finite_peak,
    mean_of,
    scaled_exp,
)
from sglang_dsv4.kernels.compress.finish import KeyWriter
from sglang_dsv4.kernels.compress.operands import FULL_RATIO, Operands
from sglang_dsv4.kernels.kv_store.record import (
    RecordWriter,
    is_stored,
    load_rotation,
    normalised,
    rotate_tail,
)

THREADS = 128
# Threads of an SM that hold 128 or 64 registers each.
FEW, MANY = 512, 1024
SHARED_PERCENT = 25
FULL_THREADS = 256
FULL_LANES = 16
FULL_GROUPS = FULL_THREADS // FULL_LANES
# Windows that the blocks of a launch begin with; each block goes on to others at this distance.
MOST_WINDOWS = 32


def load_rows(operands: Operands, window: Int32, first: Any) -> list[Int64]:
    """COUNT consecutive candidates of a window."""
    offset = Int64(window) * cm.stride_of(operands.source) + first
    return cm.load_integers(cm.address_of(operands.source, offset), COUNT)


class OverlapWindows:
    """Ratio 4: one block forms one record or four indexer keys."""

    def __init__(self, is_bf16: bool, layout: RecordLayout | IndexerLayout, resident: int) -> None:
        self.layout = layout
        self.width = layout.head_dim
        self.lanes = self.width // LANE
        self.windows = THREADS // self.lanes
        self.blocks = resident // THREADS
        series = [j // 4 * self.width for j in range(COUNT)]
        step = 2 if resident == FEW else 1
        self.candidates = Candidates(
            is_bf16, 2 * self.width, series, [j % 4 for j in range(COUNT)], step
        )
        self.writer: Any
        if isinstance(layout, IndexerLayout):
            self.writer = KeyWriter(layout)
        else:
            self.writer = RecordWriter(layout, LANE)

    @cute.jit
    def __call__(self, operands: Operands, eps: Float32, stream: Any) -> None:
        """Launch over windows."""
        blocks = (cute.size(operands.slots) + self.windows - 1) // self.windows
        self.kernel(operands, eps).launch(
            grid=[blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=SHARED_PERCENT,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, eps: Float32) -> None:
        """`lanes` threads a window."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        squares = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(4), 16)
        index = thread % self.lanes
        window = block * self.windows + thread // self.lanes
        if window < cute.size(operands.slots):
            zero = cm.hidden_zero(eps)
            slot = cm.load_integers(cm.address_of(operands.slots, window), 1)[0]
            rows = load_rows(operands, window, 0)
            position = cm.load_integers(cm.address_of(operands.positions, window), 1)[0]
            scales = cm.load_values(operands.norm_weight, index * LANE, LANE)
            slot = cm.after_loads(slot, [*rows[::2], position], zero)
            if is_stored(slot, operands.pool, self.layout.page_size):
                rope_lane = index - self.writer.first_rope_lane
                cos, sin = load_rotation(operands.table, position, rope_lane, LANE, True)
                sums = cute.make_rmem_tensor(cute.make_layout((SUMS, LANE)), Float32)
                waits = [cos[0], sin[0], scales[0]]
                numbers = [Int32(row) for row in rows]
                channel = index * LANE
                self.candidates.add(sums, operands, numbers, channel, Int32(0), waits, zero)
                means = [
                    mean_of(cm.float_at(sums, (1, i)), cm.float_at(sums, (2, i)))
                    for i in range(LANE)
                ]
                total = cm.lane_sum(cm.sum_of_squares(means), 32)
                if self.windows == 1:
                    if thread % 32 == 0:
                        squares[thread // 32] = total
                    cute.arch.sync_threads()
                    total = squares[0] + squares[1] + squares[2] + squares[3]
                weight = cm.floats_in(scales, operands.norm_weight.element_type)
                entry = normalised(means, weight, total * Float32(1.0 / self.width), eps)
                rotate_tail(entry, LANE, cos, sin, rope_lane)
                self.writer.insert(entry, operands.pool, slot, index, True)


class FullWindows:
    """Ratio 128: eight blocks form one record's means."""

    def __init__(self, is_bf16: bool, layout: RecordLayout, resident: int) -> None:
        self.layout = layout
        self.width = layout.head_dim
        self.slices = self.width // (FULL_LANES * LANE)
        self.blocks = resident // FULL_THREADS
        step = 2 if resident == FEW else 1
        self.candidates = Candidates(is_bf16, self.width, [0] * COUNT, list(range(COUNT)), step)

    @cute.jit
    def __call__(self, operands: Operands, eps: Float32, stream: Any) -> None:
        """Launch `slices` blocks a window, for MOST_WINDOWS windows at most."""
        windows = cute.size(operands.slots)
        windows = cm.select(windows < MOST_WINDOWS, windows, Int32(MOST_WINDOWS))
        self.kernel(operands, eps, windows).launch(
            grid=[self.slices, windows, 1],
            block=[FULL_THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=SHARED_PERCENT,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, eps: Float32, step: Int32) -> None:
        """64 channels of every `step`-th window that is not padding."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        part, first, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        partial = memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((FULL_LANES * LANE, FULL_GROUPS, SUMS)), 16
        )
        count = cute.size(operands.slots)
        start = first
        while start < count:
            window = start + thread % 32 * step
            formed = window < count
            if formed:
                slot = cm.load_integers(cm.address_of(operands.slots, window), 1)[0]
                formed = is_stored(slot, operands.pool, self.layout.page_size)
            waiting = cute.arch.vote_ballot_sync(formed)
            while waiting != 0:
                number = cm.lowest_bit(waiting)
                waiting = waiting & (waiting - 1)
                self.form(operands, partial, start + number * step, part, thread, eps)
            start = start + 32 * step

    @cute.jit
    def form(
        self,
        operands: Operands,
        partial: cute.Tensor,
        window: Int32,
        part: Int32,
        thread: Int32,
        eps: Float32,
    ) -> None:
        """Means of one window's 64 channels."""
        lane, group = thread % FULL_LANES, thread // FULL_LANES
        rows = [Int32(row) for row in load_rows(operands, window, group * COUNT)]
        channel = (part * FULL_LANES + lane) * LANE
        sums = cute.make_rmem_tensor(cute.make_layout((SUMS, LANE)), Float32)
        zero = cm.hidden_zero(eps)
        self.candidates.add(sums, operands, rows, channel, group * COUNT, [], zero)
        for k in range_constexpr(SUMS):
            place = ((k * FULL_GROUPS + group) * FULL_LANES + lane) * LANE
            target = (partial.iterator + place).align(16)
            cm.store_vector(target, [cm.float_at(sums, (k, i)) for i in range(LANE)])
        cute.arch.sync_threads()
        if thread < FULL_LANES * LANE:
            peaks: list[Any] = [partial[thread, j, 0] for j in range(FULL_GROUPS)]
            peak = peaks[0]
            for j in range_constexpr(1, FULL_GROUPS):
                peak = cute.arch.fmax(peak, peaks[j])
            base = finite_peak(peak)
            total, weighted = Float32(0.0), Float32(0.0)
            for j in range_constexpr(FULL_GROUPS):
                share = scaled_exp(peaks[j], base)
                total = total + partial[thread, j, 1] * share
                weighted = weighted + partial[thread, j, 2] * share
            operands.means[window, part * (FULL_LANES * LANE) + thread] = mean_of(total, weighted)
        cute.arch.sync_threads()


assert FULL_GROUPS * COUNT == FULL_RATIO

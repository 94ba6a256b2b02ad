"""Kernels that form the windows that a batch closes: softmax sums over the candidate rows.

OverlapWindows (CSA, ratio 4): 8 candidates a channel, all in one thread, so nothing is exchanged
before the norm. A record takes a block of 128 threads, an indexer key one warp.

Roofline, bf16 projections, records: each token's kv and gate are read once, 4096 B a token, and a
window writes 384 B; with sources, positions and table rows 4.3 KB a token, so 4096 tokens are
17.6 MB. As many bytes of bias as of kv and gate are read from L1. Indexer keys: 1.1 KB a token.
About 10 flops a value: bandwidth only. A thread's registers hold all that it reads.

FullWindows (HCA, ratio 128): a window is 128 KB of kv and as much of gate, of which 4096 tokens
close only 32, so a cluster of eight blocks shares one. A block owns 64 channels, 16 threads wide,
in 16 groups of eight candidates, whose sums meet in shared memory; the blocks exchange their sums
of squares. 4096 tokens are 9.5 MB; as many bytes of bias again come from L2, since it is float32
and as tall as a window: into shared memory, before the kernel ahead has ended. With many windows,
most of them padding in a decode graph, a cluster looks for the next one that is not, 32 slots a
load.

writes: blocks ahead of the windows' write the state's rows (`state`), where no window reads them.
The plan is read before the kernel ahead has ended; it must not be what that kernel writes.

Measured on an H200, 2026-12-02, us, one launch, in brackets two launches of the form before and a
copy of as many bytes, in the same run; the plan has only the rows that are kept:

    4096 new tokens: C4 8.0 (9.7, 6.6), C128 8.7 (10.2, 6.0), indexer keys 3.7 (5.3, 3.7)
    decode of 256:   C4 4.4 (6.5, 4.0), C128 4.3 (5.8, 2.9), indexer keys 2.9 (4.5, 2.3)

C4 prefill by blocks an SM: four or five 8.5 to 9.2, six 8.0, seven 8.6. With all 4096 rows in the
plan, 128 of them kept, rows fell to few units at a distance of 256 and C4 took 17 us (the form
before 14.7); the distance is 264 since, not yet timed. C128 would need 7.5 us for 80% of the copy:
its blocks are all on the GPU at once, so that its time is one chain of dependent steps (sources,
rows, sums of the block, squares of the cluster, the record) rather than bandwidth; parts of the
chain were not timed on their own.

Padding windows (slot -1) read indices and norm weights, and nothing else.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, memory, range_constexpr

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import copy_async_16, shuffle_index
from sglang_dsv4.kernels.compress.candidates import (
    COUNT,
    LANE,
    SUMS,
    Candidates,
    mean_of,
    scaled_exp,
    shift_of,
)
from sglang_dsv4.kernels.compress.finish import KeyWriter
from sglang_dsv4.kernels.compress.operands import FULL_RATIO, Operands
from sglang_dsv4.kernels.compress.state import StateRows
from sglang_dsv4.kernels.kv_store.record import (
    RecordWriter,
    is_stored,
    load_rotation,
    normalised,
    rotate_tail,
)
from sglang_dsv4.kernels.reference.compress import OVERLAP_RATIO

THREADS = 128
# Threads that an SM is to hold at least: of at most 80, 102, 128 and 255 registers each.
ROLLED_RESIDENT, PACKED_RESIDENT, RESIDENT, FLOATS_RESIDENT = 768, 640, 512, 256
SHARED_PERCENT = 25
FULL_SHARED_PERCENT = 50
FULL_THREADS = 256
FULL_LANES = 16
FULL_GROUPS = FULL_THREADS // FULL_LANES
# Windows that the blocks of a launch begin with; each block goes on to others at this distance.
MOST_WINDOWS = 32


def store_to_block(pointer: cute.Pointer, rank: Int32, value: Float32) -> None:
    """Store to the same shared-memory address in block `rank` of the cluster."""
    cute.arch.inline_ptx(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1};"
        " st.shared::cluster.f32 [there], {$r2};}",
        read_only_args=[Int32(pointer.toint()), rank, value],
    )


def prefetch_l2(address: Int64, size: int) -> None:
    """Begin to bring `size` bytes, a multiple of 16, into L2."""
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[address, Int32(size)]
    )


def load_rows(operands: Operands, window: Int32, first: Any) -> list[Int64]:
    """COUNT consecutive candidates of a window."""
    offset = Int64(window) * cm.stride_of(operands.source) + first
    return cm.load_integers(cm.address_of(operands.source, offset), COUNT)


class OverlapWindows:
    """Ratio 4: one block forms one record or four indexer keys."""

    def __init__(self, is_bf16: bool, layout: RecordLayout | IndexerLayout, writes: bool) -> None:
        self.layout, self.writes = layout, writes
        self.state = StateRows(OVERLAP_RATIO, layout, THREADS)
        self.width = layout.head_dim
        self.lanes = self.width // LANE
        self.windows = THREADS // self.lanes
        self.bias_bytes = OVERLAP_RATIO * 2 * self.width * 4
        packed = is_bf16 and isinstance(layout, RecordLayout) and layout.format is KVFormat.NVFP4
        rolled = packed and writes
        self.resident = RESIDENT
        if packed:
            self.resident = ROLLED_RESIDENT if rolled else PACKED_RESIDENT
        series = [j // 4 * self.width for j in range(COUNT)]
        places = [j % 4 for j in range(COUNT)]
        self.candidates = Candidates(is_bf16, 2 * self.width, series, places, rolled)
        self.writer: Any
        if isinstance(layout, IndexerLayout):
            self.writer = KeyWriter(layout)
        else:
            self.writer = RecordWriter(layout, LANE)

    @cute.jit
    def __call__(self, operands: Operands, eps: Float32, stream: Any) -> None:
        """Launch over rows, if this writes them, and windows."""
        blocks = (cute.size(operands.slots) + self.windows - 1) // self.windows
        row_blocks = self.state.blocks(operands) if self.writes else Int32(0)
        self.kernel(operands, eps, row_blocks).launch(
            grid=[row_blocks + blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.resident // THREADS,
            preferred_smem_carveout=SHARED_PERCENT,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, eps: Float32, row_blocks: Int32) -> None:
        """`lanes` threads a window."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.writes):
            if block < row_blocks:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
                self.state.write(operands, block, row_blocks, thread, False)
            else:
                self.form(operands, eps, block - row_blocks, thread)
        else:
            self.form(operands, eps, block, thread)

    @cute.jit
    def form(self, operands: Operands, eps: Float32, block: Int32, thread: Int32) -> None:
        """One record or four keys."""
        squares = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(4), 16)
        index = thread % self.lanes
        window, count = block * self.windows + thread // self.lanes, cute.size(operands.slots)
        place = cm.select(window < count, window, Int32(0))
        zero = cm.hidden_zero(eps)
        slot = cm.load_integers(cm.address_of(operands.slots, place), 1)[0]
        rows = load_rows(operands, place, 0)
        position = cm.load_integers(cm.address_of(operands.positions, place), 1)[0]
        scales = cm.load_values(operands.norm_weight, index * LANE, LANE)
        slot = cm.after_loads(slot, [*rows[::2], position], zero)
        if (block == 0) & (thread == 0):
            # A parameter, which no kernel ahead writes.
            prefetch_l2(cm.address_of(operands.bias, 0), self.bias_bytes)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if (window < count) & is_stored(slot, operands.pool, self.layout.page_size):
            rope_lane = index - self.writer.first_rope_lane
            cos, sin = load_rotation(operands.table, position, rope_lane, LANE, True)
            sums = cute.make_rmem_tensor(cute.make_layout((SUMS, LANE)), Float32)
            waits = [cos[0], sin[0], scales[0]]
            numbers = [Int32(row) for row in rows]
            channel = index * LANE
            self.candidates.add(sums, operands, numbers, channel, Int32(0), waits, zero)
            means = [
                mean_of(cm.float_at(sums, (1, i)), cm.float_at(sums, (2, i))) for i in range(LANE)
            ]
            total = cm.lane_sum(cm.sum_of_squares(means), 32)
            if const_expr(self.windows == 1):
                if thread % 32 == 0:
                    squares[thread // 32] = total
                cute.arch.sync_threads()
                total = squares[0] + squares[1] + squares[2] + squares[3]
            weight = cm.floats_in(scales, operands.norm_weight.element_type)
            entry = normalised(means, weight, total * Float32(1.0 / self.width), eps)
            rotate_tail(entry, LANE, cos, sin, rope_lane)
            self.writer.insert(entry, operands.pool, slot, index, True)


class FullWindows:
    """Ratio 128: a cluster of eight blocks forms one record."""

    def __init__(self, is_bf16: bool, layout: RecordLayout, writes: bool) -> None:
        self.layout, self.writes = layout, writes
        self.width = layout.head_dim
        self.slices = self.width // (FULL_LANES * LANE)
        self.resident = RESIDENT if is_bf16 else FLOATS_RESIDENT
        self.candidates = Candidates(is_bf16, self.width, [0] * COUNT, list(range(COUNT)), True)
        self.state = StateRows(FULL_RATIO, layout, FULL_THREADS)
        self.writer = RecordWriter(layout, LANE)

    @cute.jit
    def __call__(self, operands: Operands, eps: Float32, stream: Any) -> None:
        """Launch `slices` blocks a window, for MOST_WINDOWS windows at most, and rows."""
        windows = cute.size(operands.slots)
        windows = cm.select(windows < MOST_WINDOWS, windows, Int32(MOST_WINDOWS))
        rows = self.state.blocks(operands) if self.writes else Int32(0)
        rows = (rows + self.slices - 1) // self.slices
        self.kernel(operands, eps, windows, rows).launch(
            grid=[self.slices * (rows + windows), 1, 1],
            block=[FULL_THREADS, 1, 1],
            cluster=[self.slices, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.resident // FULL_THREADS,
            preferred_smem_carveout=FULL_SHARED_PERCENT,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, eps: Float32, step: Int32, rows: Int32) -> None:
        """64 channels of every `step`-th window that is not padding, or rows."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        part, first = block % self.slices, block // self.slices - rows
        if const_expr(self.writes):
            if first < 0:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
                self.state.write(operands, block, rows * self.slices, thread, False)
            else:
                self.search(operands, eps, step, first, part, thread)
        else:
            self.search(operands, eps, step, first, part, thread)

    @cute.jit
    def search(
        self,
        operands: Operands,
        eps: Float32,
        step: Int32,
        first: Int32,
        part: Int32,
        thread: Int32,
    ) -> None:
        """Form the windows among every `step`-th."""
        allocator = memory.SmemAllocator()
        partial = allocator.allocate_tensor(
            Float32, cute.make_layout((FULL_LANES * LANE, FULL_GROUPS, SUMS)), 16
        )
        means = allocator.allocate_tensor(Float32, cute.make_layout(FULL_LANES * LANE), 16)
        squares = allocator.allocate_tensor(Float32, cute.make_layout(2 * 2 * self.slices), 16)
        staged = self.stage_bias(operands, allocator, part, thread)
        cute.arch.cluster_arrive_relaxed()
        zero, count = cm.hidden_zero(eps), cute.size(operands.slots)
        # Its sources are there when the first slot is.
        guess = load_rows(operands, first, thread // FULL_LANES * COUNT)
        start, parity = first, Int32(0)
        while start < count:
            window = start + thread % 32 * step
            formed, place = window < count, Int32(-1)
            if formed:
                slot = cm.load_integers(cm.address_of(operands.slots, window), 1)[0]
                slot = cm.after_loads(slot, guess[::2], zero)
                formed, place = is_stored(slot, operands.pool, self.layout.page_size), Int32(slot)
            waiting = cute.arch.vote_ballot_sync(formed)
            if start == first:
                # All blocks of the cluster have begun before one stores to another's memory.
                cute.arch.cp_async_wait_group(0)
                cute.arch.cluster_wait()
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            while waiting != 0:
                number = cm.lowest_bit(waiting)
                waiting = waiting & (waiting - 1)
                found = Int32(shuffle_index(Uint32(place), number))
                self.form(
                    operands,
                    staged,
                    partial,
                    means,
                    squares,
                    start + number * step,
                    found,
                    part,
                    thread,
                    parity,
                    eps,
                )
                parity = 1 - parity
            start = start + 32 * step

    @cute.jit
    def form(
        self,
        operands: Operands,
        staged: cute.Tensor,
        partial: cute.Tensor,
        shared_means: cute.Tensor,
        squares: cute.Tensor,
        window: Int32,
        slot: Int32,
        part: Int32,
        thread: Int32,
        parity: Int32,
        eps: Float32,
    ) -> None:
        """64 channels of one window, from its rows to the pool."""
        lane, group = thread % FULL_LANES, thread // FULL_LANES
        rows = [Int32(row) for row in load_rows(operands, window, group * COUNT)]
        position = cm.load_integers(cm.address_of(operands.positions, window), 1)[0]
        channel = (part * FULL_LANES + lane) * LANE
        sums = cute.make_rmem_tensor(cute.make_layout((SUMS, LANE)), Float32)
        zero = cm.hidden_zero(eps)
        self.candidates.add(sums, operands, rows, channel, group * COUNT, [], zero, staged)
        for k in range_constexpr(SUMS):
            place = ((k * FULL_GROUPS + group) * FULL_LANES + lane) * LANE
            target = (partial.iterator + place).align(16)
            cm.store_vector(target, [cm.float_at(sums, (k, i)) for i in range(LANE)])
        index = part * FULL_LANES + lane
        rope_lane = index - self.writer.first_rope_lane
        cos, sin = load_rotation(operands.table, position, rope_lane, LANE, thread < 32)
        scales = cm.load_values(operands.norm_weight, index * LANE, LANE)
        cute.arch.sync_threads()
        if thread < FULL_LANES * LANE:
            mean = self.merge(partial, thread)
            shared_means[thread] = mean
            total = cm.lane_sum(mean * mean, 32)
            if thread % 32 < self.slices:
                at = (parity * self.slices + part) * 2 + thread // 32
                store_to_block(squares.iterator + at, thread % 32, total)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if thread < 32:
            total = Float32(0.0)
            for k in range_constexpr(2 * self.slices):
                total = total + cm.float_at(squares, parity * (2 * self.slices) + k)
            found = cm.load_vector(cm.element_pointer(shared_means, lane * LANE, 16), LANE)
            weight = cm.floats_in(scales, operands.norm_weight.element_type)
            entry = normalised(found, weight, total * Float32(1.0 / self.width), eps)
            rotate_tail(entry, LANE, cos, sin, rope_lane)
            self.writer.insert(entry, operands.pool, Int64(slot), index, thread < FULL_LANES)

    def stage_bias(
        self, operands: Operands, allocator: Any, part: Int32, thread: Int32
    ) -> cute.Tensor:
        """Begin to copy this thread's bias to shared memory: [COUNT, LANE], for all its windows.

        The bias is a parameter, which no kernel ahead writes.
        """
        places = cute.make_layout(FULL_THREADS * COUNT * LANE)
        base = allocator.allocate_tensor(Float32, places, 16).iterator + thread * LANE
        row = thread // FULL_LANES * COUNT
        channel = (part * FULL_LANES + thread % FULL_LANES) * LANE
        source = cm.address_of(operands.bias, row * self.width + channel)
        target = Int32(base.toint())
        for j in range(COUNT):
            shift = j * FULL_THREADS * LANE * 4
            copy_async_16(target + shift, source + j * self.width * 4, Int32(16))
        cute.arch.cp_async_commit_group()
        layout = cute.make_layout((COUNT, LANE), stride=(FULL_THREADS * LANE, 1))
        return cute.make_tensor(base, layout)

    def merge(self, partial: cute.Tensor, channel: Int32) -> Float32:
        """Mean of one channel from its groups' sums."""
        peaks: list[Any] = [partial[channel, j, 0] for j in range(FULL_GROUPS)]
        peak = peaks[0]
        for other in peaks[1:]:
            peak = cute.arch.fmax(peak, other)
        shift = shift_of(peak)
        total, weighted = Float32(0.0), Float32(0.0)
        for j in range(FULL_GROUPS):
            share = scaled_exp(peaks[j], shift)
            total = total + partial[channel, j, 1] * share
            weighted = weighted + partial[channel, j, 2] * share
        return mean_of(total, weighted)


assert FULL_GROUPS * COUNT == FULL_RATIO

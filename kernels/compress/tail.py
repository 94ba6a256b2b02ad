"""The second launch of the compressor: what must follow every window's reads.

It leaves the rows of the batch that later windows need in the state, (kv, gate + bias) in float32:
a row that it overwrites may be one that a window of this batch reads. With ratio 128 it also
finishes the windows, whose channels were formed by different blocks: norm, RoPE, encode, insert.

The launch is programmatic: its blocks start while the windows are still being formed, load what
no window kernel writes, and wait for the first launch only before they read its means or write the
state. If no window kernel came before, `after_windows` is 0 and they wait first.

A row takes width / 8 threads, 8 channels each; a window takes a block, LANE channels a thread.

Roofline, bf16 projections: a row reads 4 B and writes 8 B a channel (12 KB for width 1024); a
window reads 2 KB of means and 256 B of table and writes 384 B. It was measured only together with
the first launch (`windows` has the times).
"""

from typing import Any

from cutlass import Float32, Int32, Int64, const_expr, cute, memory

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.candidates import LANE
from sglang_dsv4.kernels.compress.operands import FULL_RATIO, Operands, width_of
from sglang_dsv4.kernels.kv_store.record import (
    RecordWriter,
    is_stored,
    load_rotation,
    normalised,
    rotate_tail,
)

THREADS = 128
ROW_LANE = 8


class Tail:
    """The state write of one ratio and layout, and the end of ratio-128 windows."""

    def __init__(self, ratio: int, layout: RecordLayout | IndexerLayout) -> None:
        self.ratio, self.layout = ratio, layout
        self.width = width_of(ratio, layout)
        self.row_threads = self.width // ROW_LANE
        self.rows = THREADS // self.row_threads
        self.finishes = ratio == FULL_RATIO
        if isinstance(layout, RecordLayout):
            self.writer = RecordWriter(layout, LANE)

    @cute.jit
    def __call__(self, operands: Operands, eps: Float32, after_windows: Int32, stream: Any) -> None:
        """Launch over windows, if this finishes them, and then over rows."""
        windows = cute.size(operands.slots) if self.finishes else Int32(0)
        blocks = windows + (cute.size(operands.write_locs) + self.rows - 1) // self.rows
        self.kernel(operands, eps, after_windows, windows).launch(
            grid=[blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, operands: Operands, eps: Float32, after_windows: Int32, windows: Int32
    ) -> None:
        """One window or `rows` rows a block."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if after_windows == 0:
            cute.arch.griddepcontrol_wait()
        if const_expr(self.finishes):
            if block < windows:
                self.finish(operands, eps, block, thread)
            else:
                self.write(operands, eps, block - windows, thread)
        else:
            self.write(operands, eps, block, thread)

    @cute.jit
    def finish(self, operands: Operands, eps: Float32, window: Int32, thread: Int32) -> None:
        """Norm to insert of one window."""
        squares = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(4), 16)
        zero = cm.hidden_zero(eps)
        slot = cm.load_integers(cm.address_of(operands.slots, window), 1)[0]
        position = cm.load_integers(cm.address_of(operands.positions, window), 1)[0]
        scales = cm.load_values(operands.norm_weight, thread * LANE, LANE)
        stored = is_stored(slot, operands.pool, self.layout.page_size)
        rope_lane = thread - self.writer.first_rope_lane
        cos, sin = load_rotation(operands.table, position, rope_lane, LANE, stored)
        slot = cm.after_loads(slot, [cos[0], sin[0], scales[0]], zero)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if is_stored(slot, operands.pool, self.layout.page_size):
            words = cm.load_values(operands.means, Int64(window) * self.width + thread * LANE, LANE)
            means = [cm.float_of(word) for word in words]
            total = cm.lane_sum(cm.sum_of_squares(means), 32)
            if thread % 32 == 0:
                squares[thread // 32] = total
            cute.arch.sync_threads()
            total = squares[0] + squares[1] + squares[2] + squares[3]
            weight = cm.floats_in(scales, operands.norm_weight.element_type)
            entry = normalised(means, weight, total * Float32(1.0 / self.width), eps)
            rotate_tail(entry, LANE, cos, sin, rope_lane)
            self.writer.insert(entry, operands.pool, slot, thread, True)

    @cute.jit
    def write(self, operands: Operands, eps: Float32, block: Int32, thread: Int32) -> None:
        """Copy one row; one that is not in the batch or goes outside the state is padding."""
        number = block * self.rows + thread // self.row_threads
        channel = thread % self.row_threads * ROW_LANE
        tokens, places = cm.rows_in(operands.kv), cm.rows_in(operands.state)
        size, zero = cute.size(operands.write_locs), cm.hidden_zero(eps)
        safe = cm.select(number < size, number, Int32(size) - 1)
        location = cm.load_integers(cm.address_of(operands.write_locs, safe), 1)[0]
        row = cm.load_integers(cm.address_of(operands.write_rows, safe), 1)[0]
        kept = (location >= Int64(0)) & (location < places) & (row >= Int64(0)) & (row < tokens)
        kept = kept & (number < size)
        row = cm.select(kept, row, Int64(0))
        position = cm.load_integers(cm.address_of(operands.token_positions, row), 1)[0]
        kind = operands.kv.element_type
        value_words = cm.load_values(
            operands.kv, row * cm.stride_of(operands.kv) + channel, ROW_LANE
        )
        gate_words = cm.load_values(
            operands.gate, row * cm.stride_of(operands.gate) + channel, ROW_LANE
        )
        place = position % self.ratio * self.width + channel
        bias_words = cm.load_values(operands.bias, place, ROW_LANE)
        values, gates = cm.floats_in(value_words, kind), cm.floats_in(gate_words, kind)
        total = [
            cm.add_rn(gate, cm.float_of(word)) for gate, word in zip(gates, bias_words, strict=True)
        ]
        ready = cm.after_loads(location, [value_words[0], *value_words[4:5], *total[::4]], zero)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if kept:
            target = ready * cm.stride_of(operands.state) + channel
            cm.store_vector(cm.element_pointer(operands.state, target, 16), values)
            gate_target = target + self.width
            cm.store_vector(cm.element_pointer(operands.state, gate_target, 16), total)

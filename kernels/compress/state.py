"""The rows of a batch that later windows need, written to the state: (kv, gate + bias) in float32.

A unit of width / 8 threads, 8 channels each, writes rows that lie `units` apart, so that rows which
stand together in the plan are written side by side. It looks at 32 places of the plan a load: in a
prefill nearly all are padding.

Roofline, bf16 projections: a row reads 4 B and writes 8 B a channel (12 KB for width 1024).
"""

from cutlass import Int32, Int64, Uint32, const_expr, cute

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import shuffle_index
from sglang_dsv4.kernels.compress.operands import Operands, width_of

ROW_LANE = 8
# As it ran on an H200. A plan keeps the last eight rows of each page of 256, which so fall on the
# same eight units: a prefill of 4096 tokens takes 15.7 us with them (14.7 in two launches).
MOST_UNITS = 256


class StateRows:
    """The state write of one ratio and layout, by blocks of `threads` threads."""

    def __init__(self, ratio: int, layout: RecordLayout | IndexerLayout, threads: int) -> None:
        self.ratio = ratio
        self.width = width_of(ratio, layout)
        self.row_threads = self.width // ROW_LANE
        self.rows = threads // self.row_threads

    def blocks(self, operands: Operands) -> Int32:
        """Blocks that write a batch's rows."""
        count = Int32(cute.size(operands.write_locs))
        units = cm.select(count < MOST_UNITS, count, Int32(MOST_UNITS))
        return (units + self.rows - 1) // self.rows

    @cute.jit
    def write(
        self, operands: Operands, block: Int32, blocks: Int32, thread: Int32, waits: bool
    ) -> None:
        """This block's rows. waits: for the kernel before, whose reads must come first."""
        unit, units = block * self.rows + thread // self.row_threads, blocks * self.rows
        tokens, places = cm.rows_in(operands.kv), cm.rows_in(operands.state)
        count = Int32(cute.size(operands.write_locs))
        start = unit
        while start < count:
            number = start + thread % 32 * units
            safe = cm.select(number < count, number, Int32(0))
            location = cm.load_integers(cm.address_of(operands.write_locs, safe), 1)[0]
            row = cm.load_integers(cm.address_of(operands.write_rows, safe), 1)[0]
            kept = (location >= Int64(0)) & (location < places) & (row >= Int64(0))
            kept = kept & (row < tokens) & (number < count)
            waiting = cute.arch.vote_ballot_sync(kept)
            if const_expr(waits):
                cute.arch.griddepcontrol_wait()
            while waiting != 0:
                lane = cm.lowest_bit(waiting)
                waiting = waiting & (waiting - 1)
                self.copy(
                    operands,
                    Int32(shuffle_index(Uint32(row), lane)),
                    Int32(shuffle_index(Uint32(location), lane)),
                    thread % self.row_threads * ROW_LANE,
                )
            start = start + 32 * units

    @cute.jit
    def copy(self, operands: Operands, row: Int32, location: Int32, channel: Int32) -> None:
        """Eight channels of one row."""
        kind = operands.kv.element_type
        at = Int64(row) * cm.stride_of(operands.kv) + channel
        position = cm.load_integers(cm.address_of(operands.token_positions, row), 1)[0]
        value_words = cm.load_values(operands.kv, at, ROW_LANE)
        gate_words = cm.load_values(operands.gate, at, ROW_LANE)
        place = position % self.ratio * self.width + channel
        bias_words = cm.load_values(operands.bias, place, ROW_LANE)
        values, gates = cm.floats_in(value_words, kind), cm.floats_in(gate_words, kind)
        total = [
            cm.add_rn(gate, cm.float_of(word)) for gate, word in zip(gates, bias_words, strict=True)
        ]
        target = Int64(location) * cm.stride_of(operands.state) + channel
        cm.store_vector(cm.element_pointer(operands.state, target, 16), values)
        cm.store_vector(cm.element_pointer(operands.state, target + self.width, 16), total)

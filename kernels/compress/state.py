"""Kernel that leaves the rows of a batch in the compressor state: (kv, gate + bias) in float32.

It runs after the window kernel on the same stream: a row it overwrites may be one that a window of
this batch reads. One thread takes 8 channels of a row.

Roofline, bf16 projections: a row of `width` channels reads 4 B and writes 8 B a channel (12 KB for
width 1024); decode writes one row a token, prefill the last 8 of a page or 128 of a request.
It was measured only together with the windows (their file has the times).
"""

from typing import Any

from cutlass import Int64, cute

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.candidates import LANE
from sglang_dsv4.kernels.operands import VECTOR_BYTES


class WriteState:
    """The state write of one ratio and width."""

    def __init__(self, ratio: int, width: int) -> None:
        self.ratio, self.width = ratio, width

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        bias: cute.Tensor,
        positions: cute.Tensor,
        state: cute.Tensor,
        write_rows: cute.Tensor,
        write_locs: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch one block a row."""
        self.kernel(kv, gate, bias, positions, state, write_rows, write_locs).launch(
            grid=[cute.size(write_locs), 1, 1], block=[self.width // LANE, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        bias: cute.Tensor,
        positions: cute.Tensor,
        state: cute.Tensor,
        write_rows: cute.Tensor,
        write_locs: cute.Tensor,
    ) -> None:
        """Copy one row; a negative location is padding."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        channel = thread * LANE
        location: Any = write_locs[block]
        row: Any = write_rows[block]
        if location >= Int64(0):
            values = cm.load_float(
                cm.element_pointer(kv, row * cm.stride_of(kv) + channel, VECTOR_BYTES), LANE
            )
            gates = cm.load_float(
                cm.element_pointer(gate, row * cm.stride_of(gate) + channel, VECTOR_BYTES), LANE
            )
            position: Any = positions[row]
            place = position % self.ratio * self.width + channel
            added = cm.load_float(cm.element_pointer(bias, place, VECTOR_BYTES), LANE)
            target = location * cm.stride_of(state) + channel
            cm.store_vector(cm.element_pointer(state, target, VECTOR_BYTES), values)
            total = [cm.add_rn(gates[i], added[i]) for i in range(LANE)]
            gate_target = target + self.width
            cm.store_vector(cm.element_pointer(state, gate_target, VECTOR_BYTES), total)

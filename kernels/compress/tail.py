"""The second launch of the compressor: the state rows that the first may not overwrite.

A row of the state that a batch overwrites may be one that a window of the batch reads. Where the
plan cannot exclude that, this launch writes the rows, after every window's reads. Its blocks look
up their rows while the windows are still being formed, and wait for them only before they write.
"""

from typing import Any

from cutlass import cute

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.kernels.compress.operands import Operands
from sglang_dsv4.kernels.compress.state import StateRows

THREADS = 128


class Tail:
    """The state write of one ratio and layout."""

    def __init__(self, ratio: int, layout: RecordLayout | IndexerLayout) -> None:
        self.state = StateRows(ratio, layout, THREADS)

    @cute.jit
    def __call__(self, operands: Operands, stream: Any) -> None:
        """Launch over rows."""
        blocks = self.state.blocks(operands)
        self.kernel(operands, blocks).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, operands: Operands, blocks: Any) -> None:
        """Rows of one block."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        self.state.write(operands, block, blocks, thread, True)

"""hc_post on a GPU: one thread makes eight columns of all four new streams of a token.

Roofline: reads the streams and the block's output and writes the streams, 18 hidden bytes a token
(302 MB for 4096 tokens of width 4096), two flops a byte: bandwidth only. The 20 weights of a token
are read by all its threads from L1.

Measured on an H200, 2026-12-02 (BENCHMARKS.md): 4096 tokens take 73.3 us (width 4096) and 125.6 us
(7168), as long as a copy of as many bytes; 16 tokens take 2.8 and 2.9 us, that copy 2.1 and 2.4 us.
"""

from typing import Any

import torch
from cutlass import Int32, Int64, cute, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.mhc.gates import STREAMS
from sglang_dsv4.kernels.mhc.operands import fake_compact, fake_streams
from sglang_dsv4.kernels.operands import VECTOR_BYTES, fake_rows

LANE = 8
THREADS = 128


class Expand:
    """The kernel for one width."""

    def __init__(self, hidden: int) -> None:
        self.hidden, self.lanes = hidden, hidden // LANE
        self.blocks_per_token = -(-self.lanes // THREADS)

    @cute.jit
    def __call__(
        self,
        output: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        out: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch over tokens and groups of columns."""
        self.kernel(output, streams, post, comb, out).launch(
            grid=[Int32(cm.rows_in(streams)) * self.blocks_per_token, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        output: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """Eight columns a thread."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block // self.blocks_per_token
        lane = block % self.blocks_per_token * THREADS + thread
        if lane < self.lanes:
            column = lane * LANE
            source = Int64(token) * cm.stride_of(streams) + column
            rows = []
            for i in range_constexpr(STREAMS):
                at = source + i * self.hidden
                rows.append(cm.load_float(cm.element_pointer(streams, at, VECTOR_BYTES), LANE))
            at = Int64(token) * cm.stride_of(output) + column
            added = cm.load_float(cm.element_pointer(output, at, VECTOR_BYTES), LANE)
            at = Int64(token) * STREAMS
            gains = cm.load_float(cm.element_pointer(post, at, VECTOR_BYTES), STREAMS)
            at = at * STREAMS
            mix = cm.load_float(cm.element_pointer(comb, at, VECTOR_BYTES), STREAMS * STREAMS)
            target = Int64(token) * (STREAMS * self.hidden) + column
            for j in range_constexpr(STREAMS):
                values = [gains[j] * value for value in added]
                for i in range_constexpr(STREAMS):
                    weight = mix[STREAMS * i + j]
                    values = [
                        value + weight * old for value, old in zip(values, rows[i], strict=True)
                    ]
                at = target + j * self.hidden
                cm.store_vector(cm.element_pointer(out, at, VECTOR_BYTES), values)


@compiled_kernel
def compile_expand(arch: str, hidden: int) -> Any:
    """Compile for one width; needs no GPU."""
    f32, bf16 = torch.float32, torch.bfloat16
    return compile_for(
        arch,
        Expand(hidden),
        fake_rows(bf16, hidden),
        fake_streams(hidden),
        fake_compact(f32, STREAMS),
        fake_compact(f32, STREAMS, STREAMS),
        fake_compact(bf16, STREAMS, hidden),
    )

"""q_norm_rope and inverse_rope on a GPU: one warp takes one head of one token through registers.

Lane l holds values 8 l .. 8 l + 7 and 256 + 8 l .. 256 + 8 l + 7, so every 16-byte access of a warp
is one contiguous 512-byte piece; the last 64 values, four RoPE pairs a lane, are the second half of
lanes 24-31. A warp takes two heads of the same token when there are 16 or more: their loads overlap
and they share the table row.

Roofline, bf16: reads and writes 1024 B a head, about 4 flops a value: bandwidth only. 4096 tokens
of 64 heads move 537 MB; below about 1 MB the launch is all there is. inverse_rope copies 7/8 of its
bytes unchanged to keep its operand intact; attention kernels rotate in their epilogue instead.
Measured on an H200, 2026-12-02 (BENCHMARKS.md), 64 heads: 4096 tokens 137.8 us (q_norm_rope) and
132.3 us (inverse_rope), 3.9 and 4.1 TB/s, 93% and 97% of a copy of as many bytes: bandwidth limits
it. 64 tokens take 3.9 and 3.8 us, that copy 4.0 us.

Bits: all steps but the order of the sum of squares have the reference's rounding (`cute_math`).
"""

from typing import Any

import torch
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from torch import Tensor

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.operands import (
    CUTE_TYPES,
    VECTOR_BYTES,
    aligned_rows,
    fake_rows,
    fake_vector,
    index_vector,
)

HEAD_DIM = 512
ROPE_DIM = 64
HALF = HEAD_DIM // 2
LANE = 8
PAIRS = LANE // 2
FIRST_ROPE_LANE = (HALF - ROPE_DIM) // LANE
WARPS = 8


class NormRope:
    """The kernel for one number of heads; normalise = RMSNorm first, inverse = rotate back."""

    def __init__(self, heads: int, normalise: bool, inverse: bool) -> None:
        self.heads, self.normalise, self.inverse = heads, normalise, inverse
        self.heads_per_warp = 2 if heads >= 2 * WARPS else 1
        self.blocks_per_token = -(-heads // (WARPS * self.heads_per_warp))

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        out: cute.Tensor,
        eps: Float32,
        stream: Any,
    ) -> None:
        """Launch over tokens and groups of heads."""
        self.kernel(x, positions, table, out, eps).launch(
            grid=[cute.size(positions) * self.blocks_per_token, 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        out: cute.Tensor,
        eps: Float32,
    ) -> None:
        """One or two heads a warp, WARPS apart."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        token = block // self.blocks_per_token
        group = block % self.blocks_per_token
        head = group * (WARPS * self.heads_per_warp) + thread // 32
        source = Int64(token) * cm.stride_of(x) + lane * LANE
        target = Int64(token) * (self.heads * HEAD_DIM) + lane * LANE
        rows = []
        for i in range_constexpr(self.heads_per_warp):
            # A warp past the last head works on the last one again and stores the same bits.
            wanted, last = head + i * WARPS, Int32(self.heads - 1)
            this = cm.select(wanted < last, wanted, last)
            rows.append((this, self.load(x, source + this * cm.stride_of(x, 1))))
        cos = cute.make_rmem_tensor(cute.make_layout(PAIRS), Float32)
        sin = cute.make_rmem_tensor(cute.make_layout(PAIRS), Float32)
        if lane >= FIRST_ROPE_LANE:
            offset = positions[token] * cm.stride_of(table) + (lane - FIRST_ROPE_LANE) * PAIRS
            found = cm.load_float(cm.element_pointer(table, offset, VECTOR_BYTES), PAIRS)
            offset = offset + ROPE_DIM // 2
            other = cm.load_float(cm.element_pointer(table, offset, VECTOR_BYTES), PAIRS)
            for i in range_constexpr(PAIRS):
                cos[i], sin[i] = found[i], other[i]
        for i in range_constexpr(self.heads_per_warp):
            this, values = rows[i]
            self.finish(values, cos, sin, eps, out, target + this * HEAD_DIM, lane)

    @cute.jit
    def load(self, x: cute.Tensor, offset: Int64) -> cute.Tensor:
        """This lane's 16 values of one head."""
        values = cute.make_rmem_tensor(cute.make_layout(2 * LANE), Float32)
        low = cm.load_float(cm.element_pointer(x, offset, VECTOR_BYTES), LANE)
        high = cm.load_float(cm.element_pointer(x, offset + HALF, VECTOR_BYTES), LANE)
        for i in range_constexpr(LANE):
            values[i], values[LANE + i] = low[i], high[i]
        return values

    @cute.jit
    def finish(
        self,
        values: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        eps: Float32,
        out: cute.Tensor,
        offset: Int64,
        lane: Int32,
    ) -> None:
        """Norm, rotate and store one head."""
        if const_expr(self.normalise):
            total = cm.lane_sum(cm.sum_of_squares(cm.floats_of(values, 0, 2 * LANE)), 32)
            factor = cm.rsqrt(cm.add_rn(total * Float32(1.0 / HEAD_DIM), eps))
            for i in range_constexpr(2 * LANE):
                values[i] = cm.mul_rn(cm.float_at(values, i), factor)
        if lane >= FIRST_ROPE_LANE:
            rotated = cm.rotate_pairs(
                cm.floats_of(values, LANE, LANE),
                cm.floats_of(cos, 0, PAIRS),
                cm.floats_of(sin, 0, PAIRS),
                self.inverse,
            )
            for i in range_constexpr(LANE):
                values[LANE + i] = rotated[i]
        low, high = cm.floats_of(values, 0, LANE), cm.floats_of(values, LANE, LANE)
        cm.store_vector(cm.element_pointer(out, offset, VECTOR_BYTES), low)
        cm.store_vector(cm.element_pointer(out, offset + HALF, VECTOR_BYTES), high)


@compiled_kernel
def compile_norm_rope(
    arch: str, dtype: torch.dtype, heads: int, normalise: bool, inverse: bool
) -> Any:
    """Compile for one architecture, dtype and number of heads; needs no GPU."""
    tokens = cute.sym_int32()
    strides = [cute.sym_int64(divisibility=VECTOR_BYTES // dtype.itemsize) for _ in range(2)]
    shape = (tokens, heads, HEAD_DIM)
    x = cute.runtime.make_fake_tensor(
        CUTE_TYPES[dtype], shape, (*strides, 1), assumed_align=VECTOR_BYTES
    )
    out = cute.runtime.make_fake_compact_tensor(
        CUTE_TYPES[dtype], shape, stride_order=(2, 1, 0), assumed_align=VECTOR_BYTES
    )
    return compile_for(
        arch,
        NormRope(heads, normalise, inverse),
        x,
        fake_vector(torch.int64),
        fake_rows(torch.float32, ROPE_DIM),
        out,
        Float32(0.0),
    )


def _run(
    x: Tensor, positions: Tensor, table: Tensor, eps: float, normalise: bool, inverse: bool
) -> Tensor:
    if x.shape[-1] != HEAD_DIM or table.shape[-1] != ROPE_DIM:
        raise UnsupportedError(
            f"Found heads of {x.shape[-1]} values with {table.shape[-1]} rotated, wanted "
            f"{HEAD_DIM} and {ROPE_DIM}: use the reference for other widths."
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        kernel = compile_norm_rope(current_arch(), x.dtype, x.shape[1], normalise, inverse)
        kernel(aligned_rows(x), index_vector(positions), table, out, eps)
    return out


def q_norm_rope(q: Tensor, positions: Tensor, table: Tensor, eps: float) -> Tensor:
    """Per-head RMSNorm without weight, then RoPE of the last 64 values.

    Args: q bfloat16, float16 or float32 [T, H, 512], tokens and heads any distance apart;
    positions integer [T]; table float32 [max_position, 64].
    Returns [T, H, 512] in q's dtype, rounded once. As `reference.norm_rope.q_norm_rope`.

    Raises UnsupportedError for other widths.
    """
    return _run(q, positions, table, eps, normalise=True, inverse=False)


def inverse_rope(o: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Undo the rotation that V = K carries into the attention output, at the query's position.

    Args: as `q_norm_rope`. Returns a new [T, H, 512] in o's dtype.
    As `reference.norm_rope.inverse_rope`.

    Raises UnsupportedError for other widths.
    """
    return _run(o, positions, table, 0.0, normalise=False, inverse=True)

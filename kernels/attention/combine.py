"""Combination of the splits of sparse attention: one block of 128 threads per token and head.

Each split leaves float32 sums already divided by its total, and its log2-sum-exp; a split without
records leaves only the latter, -inf, and its sums are not read. The sink enters here, once.
Roofline, per token and head: bytes = splits x 2052 + 1024; bandwidth and launch only. It was
measured only together with the attention (`portable`).
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose

HEAD_DIM = 512
LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


@cute.kernel
def combine(
    part_out: Any,
    part_lse: Any,
    sinks: Any,
    out: Any,
    lse: Any,
    splits: Int32,
    out_scale: Float32,
) -> None:
    """Merge the splits of one token and head: four dims a thread, splits in ascending order."""
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    num_heads = out.shape[1]
    pitch = Int64(out.shape[0]) * num_heads
    lse_at = address(part_lse) + Int64(row) * 4
    out_at = address(part_out) + (Int64(row) * HEAD_DIM + Int64(tid) * 4) * 4
    peak = Float32(-Float32.inf)
    for s in cutlass.range(splits):
        peak = ptx.maximum(peak, ptx.global_load_f32(lse_at + s * pitch * 4))
    origin = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
    total = Float32(0.0)
    s0, s1, s2, s3 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
    for s in cutlass.range(splits):
        share = ptx.global_load_f32(lse_at + s * pitch * 4)
        weight = ptx.exp2(share - origin)
        empty = share == Float32(-Float32.inf)
        v0, v1, v2, v3 = ptx.global_load_f32x4_unless(empty, out_at + s * pitch * (HEAD_DIM * 4))
        total = total + weight
        s0, s1 = s0 + weight * v0, s1 + weight * v1
        s2, s3 = s2 + weight * v2, s3 + weight * v3
    head = row % num_heads
    sink = ptx.global_load_f32(address(sinks) + Int64(head) * 4)
    joined = total + ptx.exp2(sink * Float32(LOG2_E) - origin)
    gain = choose(total == Float32(0.0), Float32(0.0), out_scale / joined)
    at = address(out) + (Int64(row) * HEAD_DIM + Int64(tid) * 4) * 2
    ptx.global_store_u32x2(
        at, ptx.pack_bf16x2(s0 * gain, s1 * gain), ptx.pack_bf16x2(s2 * gain, s3 * gain)
    )
    value = (origin + ptx.log2(total)) * Float32(LN2)
    ptx.global_store_f32_if(tid == 0, address(lse) + Int64(row) * 4, value)

"""Combination of the splits of sparse attention: one block of 128 threads per token and head.

Each split leaves float32 sums already divided by its total, and its log2-sum-exp; a split without
records leaves only the latter, -inf, and its sums are not read. The sink enters here, once, and
RoPE dims are turned back here where they are at all.
Roofline, per token and head: bytes = splits x 2052 + 1024; bandwidth and launch only. It was
measured only together with the attention, and in a form that loaded four splits at a time.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.attention.operands import HEAD_DIM, Numbers, Operands
from sglang_dsv4.kernels.attention.rotation import (
    load_angles,
    load_position,
    table_row,
    turn_back,
)

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
# Splits whose sums are loaded together.
AT_ONCE = 8
# Of a thread.
DIMS = 4


@cute.jit
def combine_splits(
    operands: Operands, numbers: Numbers, rotated: cutlass.Constexpr, stream: Any
) -> None:
    """Launch the combination where there is more than one split."""
    rows = operands.out.shape[0] * operands.out.shape[1]
    if numbers.splits > 1:
        combine(operands, numbers.splits, numbers.out_scale, rotated).launch(
            grid=[rows, 1, 1], block=[HEAD_DIM // DIMS, 1, 1], stream=stream
        )


@cute.kernel
def combine(
    operands: Operands, splits: Int32, out_scale: Float32, rotated: cutlass.Constexpr
) -> None:
    """Merge the splits of one token and head: four dims a thread, splits in ascending order.

    rotated: whether the RoPE dims are turned back by the position of the token's query. Lane s of a
    warp takes the log-sum-exp of split s, so there are at most 32.
    """
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    out, lse = operands.out, operands.lse
    num_heads = out.shape[1]
    pitch = Int64(out.shape[0]) * num_heads
    lane = tid & 31
    listed = lane < splits
    place = choose(listed, lane, Int32(0))
    out_at = address(operands.part_out) + (Int64(row) * HEAD_DIM + Int64(tid) * 4) * 4
    position = load_position(operands, row // num_heads, rotated)
    sink = ptx.global_load_f32(address(operands.sinks) + Int64(row % num_heads) * 4)
    share = ptx.global_load_f32(address(operands.part_lse) + (place * pitch + Int64(row)) * 4)
    share = choose(listed, share, Float32(-Float32.inf))
    # What the splits without records left is not read: it may be anything.
    filled = ptx.ballot(share != Float32(-Float32.inf))
    peak = share
    for mask in (1, 2, 4, 8, 16):
        peak = ptx.maximum(peak, ptx.shuffle_xor(peak, mask))
    origin = choose(peak == Float32(-Float32.inf), Float32(0.0), peak)
    weight = ptx.exp2(share - origin)
    total = weight
    for mask in (1, 2, 4, 8, 16):
        total = total + ptx.shuffle_xor(total, mask)
    dim = tid * DIMS
    angles = cute.make_rmem_tensor(DIMS, Float32)
    if cutlass.const_expr(rotated):
        load_angles(table_row(operands, position), dim, DIMS // 2, angles)
    sums = cute.make_rmem_tensor(DIMS, Float32)
    for i in cutlass.range_constexpr(DIMS):
        sums[i] = Float32(0.0)
    for first in cutlass.range(0, splits, AT_ONCE):
        parts = []
        for j in cutlass.range_constexpr(AT_ONCE):
            s = first + j
            empty = ((filled >> Uint32(s)) & Uint32(1)) == Uint32(0)
            values = ptx.global_load_f32x4_unless(empty, out_at + s * pitch * (HEAD_DIM * 4))
            parts.append((ptx.shuffle_index(weight, s), values))
        for factor, values in parts:
            for i in cutlass.range_constexpr(DIMS):
                sums[i] = sums[i] + factor * values[i]
    joined = total + ptx.exp2(sink * Float32(LOG2_E) - origin)
    gain = choose(total == Float32(0.0), Float32(0.0), out_scale / joined)
    at = address(out) + (Int64(row) * HEAD_DIM + Int64(tid) * 4) * 2
    values = [sums[i] * gain for i in range(DIMS)]
    if cutlass.const_expr(rotated):
        values = turn_back(values, dim, angles)
    low, high = (ptx.pack_bf16x2(values[i], values[i + 1]) for i in (0, 2))
    ptx.global_store_u32x2(at, low, high)
    value = (origin + ptx.log2(total)) * Float32(LN2)
    ptx.global_store_f32_if(tid == 0, address(lse) + Int64(row) * 4, value)

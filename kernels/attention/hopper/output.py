"""Output of the wide Hopper attention kernel: accumulators of wgmma to rows in global memory.

A thread of a warpgroup holds, for each block of 8 dims, two neighbours of rows `row` and `row + 8`.
Four lanes of a quad exchange theirs by shuffles, so that each lane has 8 dims of four blocks in
turn, and stores them at once. NoPE blocks stand in the order of the decoded records (lane s of the
quad has dims 3 - s and 7 - s) and lack a factor of 2^8; RoPE blocks stand as they are, a lane's two
neighbours a pair that is turned back before it is rounded.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.hopper import ptx as hopper
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.attention.operands import HEAD_DIM, Numbers, Operands
from sglang_dsv4.kernels.attention.rotation import SINE, table_row, turn_pair

HALF_DIMS = HEAD_DIM // 2
# Units of 8 dims that four lanes of a quad exchange at once, in half the output, and RoPE's.
QUARTETS = HALF_DIMS // 32
ROPED_QUARTETS = 2
FIRST_ROPED = QUARTETS - ROPED_QUARTETS
# Units of RoPE dims, a pair of each a lane.
PAIRS = 4 * ROPED_QUARTETS
# The quartet of each head before which its angles are loaded: the sums of those before it have left
# their registers, and the loads have until the first RoPE quartet. Kept from one head to the next,
# they would cost spills.
ANGLES_BEFORE = 3


@cute.jit
def write_half(
    half: cutlass.Constexpr,
    sums: Any,
    gains: Any,
    quad: Int32,
    first: Int32,
    row: Int32,
    operands: Operands,
    numbers: Numbers,
    rotated: cutlass.Constexpr,
    position: Int64,
) -> None:
    """256 dims of two heads of each thread's quad, in their natural order.

    sums: 128 accumulators; gains: what the sums of each of the two heads are multiplied by; first:
    the first of the two heads, the other is 8 further on; row: token of the output, or of the
    partial sums; rotated: whether the output (not partial sums) is turned back by the position.
    Heads that do not exist are left out.
    """
    num_heads = operands.out.shape[1]
    angles = cute.make_rmem_tensor(2 * PAIRS, Float32)
    for h in cutlass.range_constexpr(2):
        head = first + 8 * h
        at = (Int64(row) * num_heads + head) * HEAD_DIM + Int64(half * HALF_DIMS)
        if numbers.splits == 1:
            for i in cutlass.range_constexpr(QUARTETS):
                turned = rotated and _roped(half, i)
                if cutlass.const_expr(rotated and half == 1 and i == ANGLES_BEFORE):
                    _load_angles(table_row(operands, position), quad, angles)
                words = _words(half, h, i, sums, gains[h], quad, angles if turned else None)
                place = address(operands.out) + (at + (4 * i + quad) * 8) * 2
                if head < num_heads:
                    ptx.global_store_u32x4(place, *words)
        else:
            for i in cutlass.range_constexpr(QUARTETS):
                values = _values(half, h, i, sums, gains[h], quad)
                place = address(operands.part_out) + (at + (4 * i + quad) * 8) * 4
                if head < num_heads:
                    ptx.global_store_f32x4(place, *values[:4])
                    ptx.global_store_f32x4(place + 16, *values[4:])


def _roped(half: int, i: int) -> bool:
    return half == 1 and i >= FIRST_ROPED


def _load_angles(row: Int64, quad: Int32, angles: Any) -> None:
    """Start the loads of the cosines, then the sines, of this lane's pair of each RoPE unit."""
    for u in range(PAIRS):
        at = row + Int64(4 * u + quad) * 4
        angles[u], angles[PAIRS + u] = ptx.global_load_f32(at), ptx.global_load_f32(at + SINE)


def _pairs(half: int, h: int, i: int, sums: Any, gain: Float32) -> list:
    """This thread's scaled pairs of the units 4 i to 4 i + 3 of head h."""
    unit = gain if _roped(half, i) else gain * Float32(256.0)
    return [[sums[4 * (4 * i + u) + 2 * h + y] * unit for y in range(2)] for u in range(4)]


def _transpose(values: list, kind: Any, quad: Int32) -> list:
    """Of four registers of each lane of a quad, lane q gets register q of each lane."""
    values = list(values)
    for step in (1, 2):
        upper = (quad & step) != 0
        for low in range(4):
            if low & step == 0:
                high = low + step
                sent = kind(choose(upper, values[low], values[high]))
                got = hopper.shuffle_xor(sent, step)
                values[low] = kind(choose(upper, got, values[low]))
                values[high] = kind(choose(upper, values[high], got))
    return values


def _words(half: int, h: int, i: int, sums: Any, gain: Float32, quad: Int32, angles: Any) -> list:
    """Unit 4 i + quad of head h in bf16; its pairs are turned back by the angles, if there are."""
    pairs = _pairs(half, h, i, sums, gain)
    if angles is not None:
        first = 4 * (i - FIRST_ROPED)
        pairs = [
            turn_pair(pair[0], pair[1], angles[first + u], angles[PAIRS + first + u])
            for u, pair in enumerate(pairs)
        ]
    w = _transpose([ptx.pack_bf16x2(*pair) for pair in pairs], Uint32, quad)
    if _roped(half, i):
        return w
    low, high = Uint32(0x5410), Uint32(0x7632)
    return [ptx.prmt(w[a], w[b], s) for s in (low, high) for a, b in ((3, 2), (1, 0))]


def _values(half: int, h: int, i: int, sums: Any, gain: Float32, quad: Int32) -> list:
    """As `_words` in float32."""
    pairs = _pairs(half, h, i, sums, gain)
    low = _transpose([pair[0] for pair in pairs], Float32, quad)
    high = _transpose([pair[1] for pair in pairs], Float32, quad)
    if _roped(half, i):
        return [value for both in zip(low, high, strict=True) for value in both]
    return low[::-1] + high[::-1]

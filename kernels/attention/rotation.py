"""Output inverse RoPE in the attention kernels: a head's last 64 dims turned back, in float32.

V = K carries the rotation of its own position. Turning the sum back by the query's position, before
its one rounding to bf16, is `reference.norm_rope.inverse_rope`: pair (2 i, 2 i + 1) of the RoPE
dims by minus its angle; a row of the table holds the cosines of the 32 pairs, then their sines.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.attention.operands import HEAD_DIM, ROPE_DIM, Numbers, Operands

FIRST_DIM = HEAD_DIM - ROPE_DIM
# Bytes from the cosine of a pair to its sine.
SINE = ROPE_DIM // 2 * 4


def load_position(operands: Operands, token: Any, rotated: bool) -> Int64:
    """Start the load of the position of a token's query; 0 where nothing is turned back."""
    if not rotated:
        return Int64(0)
    return ptx.global_load_i64(address(operands.positions) + Int64(token) * 8)


def table_row(operands: Operands, position: Int64) -> Int64:
    """Address of the table's row of a position."""
    return address(operands.table) + position * operands.table.stride[0] * 4


def load_angles(row: Int64, dim: Any, pairs: int, angles: Any) -> None:
    """Start the loads of the cosines, then the sines, of 2 or 4 neighbouring pairs.

    dim: the first of their dims, a multiple of 2 x pairs; for NoPE dims some pairs' angles, which
    `turn_back` leaves out. angles: 2 x pairs float32 registers.
    """
    pair = choose(dim < FIRST_DIM, Int32(0), (dim - FIRST_DIM) >> 1)
    load = ptx.global_load_f32x4 if pairs == 4 else ptx.global_load_f32x2
    start = row + Int64(pair) * 4
    for i, value in enumerate((*load(start), *load(start + SINE))):
        angles[i] = value


@cute.jit
def load_written_angles(
    angles: Any,
    operands: Operands,
    numbers: Numbers,
    position: Int64,
    dim: cutlass.Constexpr,
    rotated: cutlass.Constexpr,
) -> None:
    """`load_angles` of the eight dims from `dim()` on, where a block writes the output itself."""
    if cutlass.const_expr(rotated):  # noqa: SIM102 (static first)
        if numbers.splits == 1:
            row = table_row(operands, position)
            load_angles(row, dim(), 4, angles)


def turn_pair(even: Any, odd: Any, cos: Any, sin: Any) -> list[Float32]:
    """A pair turned by minus its angle."""
    return [even * cos + odd * sin, odd * cos - even * sin]


def turn_back(values: Sequence[Any], dim: Any, angles: Any) -> list[Float32]:
    """Neighbouring dims from `dim` on, turned back where they are RoPE's; as `load_angles`."""
    pairs = len(values) // 2
    turned = []
    for i in range(pairs):
        turned += turn_pair(values[2 * i], values[2 * i + 1], angles[i], angles[pairs + i])
    roped = dim >= FIRST_DIM
    return [choose(roped, new, old) for new, old in zip(turned, values, strict=True)]

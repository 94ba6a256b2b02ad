"""Fake tensors that the hyper-connection kernels are compiled for."""

from typing import Any

import torch
from cutlass import cute

from sglang_dsv4.kernels.mhc.gates import STREAMS
from sglang_dsv4.kernels.operands import CUTE_TYPES, VECTOR_BYTES

CHUNK = 32
CHUNKS = 4
TILE_COLUMNS = 8
PRE_ROWS = (2 + STREAMS) * STREAMS
HEAD_ROWS = STREAMS


def groups_of(hidden: int) -> int:
    """Groups of CHUNKS chunks of CHUNK columns that a width has."""
    return -(-hidden // (CHUNK * CHUNKS))


def square_column(rows: int) -> int:
    """Column of a group's sums that holds the sum of squares: after the products."""
    return -(-rows // TILE_COLUMNS) * TILE_COLUMNS


def sums_pitch(rows: int) -> int:
    """Columns of a group's sums, so that each token's begin a 32-byte sector."""
    return square_column(rows) + TILE_COLUMNS


def fake_streams(hidden: int) -> Any:
    """Fake bf16 [T, 4, hidden], tokens any distance apart."""
    stride = cute.sym_int64(divisibility=VECTOR_BYTES // 2)
    return cute.runtime.make_fake_tensor(
        CUTE_TYPES[torch.bfloat16],
        (cute.sym_int32(), STREAMS, hidden),
        (stride, hidden, 1),
        assumed_align=VECTOR_BYTES,
    )


def fake_compact(dtype: torch.dtype, *widths: int) -> Any:
    """Fake contiguous [n, *widths], 16-byte aligned."""
    order = tuple(range(len(widths), -1, -1))
    return cute.runtime.make_fake_compact_tensor(
        CUTE_TYPES[dtype],
        (cute.sym_int32(), *widths),
        stride_order=order,
        assumed_align=VECTOR_BYTES,
    )

"""What a launch of the compressor takes: one set of tensors for all of its kernels."""

from typing import Any, NamedTuple

import torch

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels.operands import fake_rows, fake_vector
from sglang_dsv4.kernels.reference.compress import OVERLAP_RATIO

FULL_RATIO = 128
ROPE_DIM = 64


class Operands(NamedTuple):
    """The tensors that `compress_store` describes.

    kv and gate have rows the same distance apart. positions are the windows' first positions,
    token_positions those of the batch.
    """

    kv: Any
    gate: Any
    bias: Any
    state: Any
    source: Any
    positions: Any
    slots: Any
    norm_weight: Any
    table: Any
    pool: Any
    token_positions: Any
    write_rows: Any
    write_locs: Any


def width_of(ratio: int, layout: RecordLayout | IndexerLayout) -> int:
    """Columns of kv and gate: two series for the overlapping ratio."""
    return layout.head_dim * (2 if ratio == OVERLAP_RATIO else 1)


def candidates_of(ratio: int) -> int:
    """Rows that a window is formed of."""
    return 2 * ratio if ratio == OVERLAP_RATIO else ratio


def pool_align(layout: RecordLayout | IndexerLayout) -> int:
    """Bytes that every part of a row is aligned to."""
    packed = isinstance(layout, IndexerLayout) and layout.format is KVFormat.NVFP4
    return 4 if packed else 16


def fake_operands(
    ratio: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    layout: RecordLayout | IndexerLayout,
) -> Operands:
    """Fake tensors to compile for, of any number of tokens, windows and rows."""
    width = width_of(ratio, layout)
    return Operands(
        kv=fake_rows(dtype, width),
        gate=fake_rows(dtype, width),
        bias=fake_vector(torch.float32, ratio * width),
        state=fake_rows(torch.float32, 2 * width),
        source=fake_rows(torch.int64, candidates_of(ratio)),
        positions=fake_vector(torch.int64),
        slots=fake_vector(torch.int64),
        norm_weight=fake_vector(weight_dtype, layout.head_dim),
        table=fake_rows(torch.float32, ROPE_DIM),
        pool=fake_rows(torch.uint8, layout.page_bytes, pool_align(layout)),
        token_positions=fake_vector(torch.int64),
        write_rows=fake_vector(torch.int64),
        write_locs=fake_vector(torch.int64),
    )

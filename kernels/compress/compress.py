"""compress_store on a GPU: form and insert the windows that a batch closes, then write the state.

Two launches on one stream, so that every state read comes before every state write; `windows` and
`state` hold the kernels with their rooflines. Nothing depends on values of the plan on the host, so
both can be captured in a CUDA graph.
"""

from typing import Any

import torch
from cutlass import Float32
from torch import Tensor

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.compress.finish import ROPE_DIM, Finish
from sglang_dsv4.kernels.compress.state import WriteState
from sglang_dsv4.kernels.compress.windows import FullWindows, OverlapWindows
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.operands import (
    aligned_rows,
    fake_rows,
    fake_vector,
    index_vector,
    require_rows,
)
from sglang_dsv4.kernels.reference.compress import OVERLAP_RATIO, CompressPlan

RATIOS = (OVERLAP_RATIO, 128)


def _width(ratio: int, layout: RecordLayout | IndexerLayout) -> int:
    """Columns of kv and gate: two series for the overlapping ratio."""
    return layout.head_dim * (2 if ratio == OVERLAP_RATIO else 1)


def _fake_operands(dtype: torch.dtype, ratio: int, width: int) -> list[Any]:
    """Fake kv, gate and position bias."""
    bias = fake_vector(torch.float32, ratio * width)
    return [fake_rows(dtype, width), fake_rows(dtype, width), bias]


@compiled_kernel
def compile_windows(
    arch: str,
    ratio: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    layout: RecordLayout | IndexerLayout,
) -> Any:
    """Compile the window kernel for one architecture, ratio, types and layout; needs no GPU."""
    width = _width(ratio, layout)
    windows: Any = OverlapWindows if ratio == OVERLAP_RATIO else FullWindows
    return compile_for(
        arch,
        windows(dtype, layout),
        *_fake_operands(dtype, ratio, width),
        fake_rows(torch.float32, 2 * width),
        fake_rows(torch.int64, 2 * OVERLAP_RATIO if ratio == OVERLAP_RATIO else ratio),
        fake_vector(torch.int64),
        fake_vector(torch.int64),
        fake_vector(weight_dtype, layout.head_dim),
        fake_rows(torch.float32, ROPE_DIM),
        fake_rows(torch.uint8, layout.page_bytes, Finish(layout).pool_align),
        Float32(0.0),
    )


@compiled_kernel
def compile_write_state(arch: str, ratio: int, dtype: torch.dtype, width: int) -> Any:
    """Compile the state write for one architecture, ratio, type and width; needs no GPU."""
    return compile_for(
        arch,
        WriteState(ratio, width),
        *_fake_operands(dtype, ratio, width),
        fake_vector(torch.int64),
        fake_rows(torch.float32, 2 * width),
        fake_vector(torch.int64),
        fake_vector(torch.int64),
    )


def compress_store(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    positions: Tensor,
    state: Tensor,
    plan: CompressPlan,
    norm_weight: Tensor,
    eps: float,
    table: Tensor,
    pool: Tensor,
    layout: RecordLayout | IndexerLayout,
) -> None:
    """Window softmax, weighted RMSNorm, RoPE at the window's first position, encode and insert.

    Args: kv, gate bfloat16 or float32 [T, coff * d], coff = 2 for ratio 4 and 1 for 128, rows may
    be slices of a wider projection; position_bias float [ratio, coff * d]; positions integer [T];
    state float32 [S, 2 * coff * d], rows (kv, gate + bias), updated in place; plan as built by
    `attention.metadata`: windows are aligned, so candidate j of a window stands at a position of
    j modulo the ratio; norm_weight float [d]; table float32 [max_position, 64]; pool uint8
    [num_pages, >= page_bytes]. An IndexerLayout also applies the Hadamard transform.
    As `reference.compress.compress_store`; a window whose slot is outside the pool is not formed.

    Raises UnsupportedError for another ratio, width or dtype, ValueError for a pool or a state
    that is not aligned.
    """
    _check(kv, gate, plan.ratio, layout)
    require_rows(pool, Finish(layout).pool_align)
    require_rows(state, 16)
    arch, width = current_arch(), _width(plan.ratio, layout)
    if kv.shape[0] == 0:
        # A window closes with a token of the batch.
        return
    kv, gate = aligned_rows(kv), aligned_rows(gate)
    bias = position_bias.to(torch.float32).contiguous().view(-1)
    if plan.slots.numel():
        compile_windows(arch, plan.ratio, kv.dtype, norm_weight.dtype, layout)(
            kv,
            gate,
            bias,
            state,
            aligned_rows(index_vector(plan.source)),
            index_vector(plan.positions),
            index_vector(plan.slots),
            norm_weight,
            table,
            pool[:, : layout.page_bytes],
            eps,
        )
    if plan.write_locs.numel():
        compile_write_state(arch, plan.ratio, kv.dtype, width)(
            kv,
            gate,
            bias,
            index_vector(positions),
            state,
            index_vector(plan.write_rows),
            index_vector(plan.write_locs),
        )


def _check(kv: Tensor, gate: Tensor, ratio: int, layout: RecordLayout | IndexerLayout) -> None:
    wanted = 128 if isinstance(layout, IndexerLayout) else 512
    full = ratio != OVERLAP_RATIO
    if ratio not in RATIOS or layout.head_dim != wanted or (full and wanted != 512):
        raise UnsupportedError(
            f"Found ratio {ratio} with entries of {layout.head_dim} values, wanted ratio 4 or 128 "
            f"with 512, or ratio 4 with indexer keys of 128: use the reference for others."
        )
    if kv.dtype != gate.dtype or kv.dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedError(
            f"Found kv of {kv.dtype} and gate of {gate.dtype}, wanted both bfloat16 or both "
            f"float32: cast them before the compressor."
        )

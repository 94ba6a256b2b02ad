"""compress_store on a GPU: form and insert the windows that a batch closes, then write the state.

Where no window reads a state row that the batch writes (`CompressPlan.disjoint`), one launch does
both; else two on one stream, so that every state read comes before every state write. `windows`,
`state` and `tail` hold the kernels. Nothing depends on values of the plan on the host, so they can
be captured in a CUDA graph.
"""

from typing import Any

import torch
from cutlass import Float32
from torch import Tensor

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.compress.operands import (
    FULL_RATIO,
    Operands,
    fake_operands,
    pool_align,
)
from sglang_dsv4.kernels.compress.tail import Tail
from sglang_dsv4.kernels.compress.windows import FullWindows, OverlapWindows
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.operands import aligned_rows, index_vector, require_rows
from sglang_dsv4.kernels.reference.compress import OVERLAP_RATIO, CompressPlan

RATIOS = (OVERLAP_RATIO, FULL_RATIO)


@compiled_kernel
def compile_windows(
    arch: str,
    ratio: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    layout: RecordLayout | IndexerLayout,
    writes: bool,
) -> Any:
    """Compile the first launch for one architecture, ratio, types and layout; needs no GPU.

    writes: it also writes the state's rows, which then needs no second launch.
    """
    windows: Any = OverlapWindows if ratio == OVERLAP_RATIO else FullWindows
    host = windows(dtype is torch.bfloat16, layout, writes)
    return compile_for(arch, host, fake_operands(ratio, dtype, weight_dtype, layout), Float32(0.0))


@compiled_kernel
def compile_tail(
    arch: str,
    ratio: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    layout: RecordLayout | IndexerLayout,
) -> Any:
    """Compile the second launch for one architecture, ratio, types and layout; needs no GPU."""
    operands = fake_operands(ratio, dtype, weight_dtype, layout)
    return compile_for(arch, Tail(ratio, layout), operands)


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
    The plan's tensors are read early: no kernel right before this call may write them.

    Raises UnsupportedError for another ratio, width or dtype, ValueError for a pool or a state
    that is not aligned.
    """
    _check(kv, gate, plan.ratio, layout)
    require_rows(pool, pool_align(layout))
    require_rows(state, 16)
    if kv.shape[0] == 0:
        # A window closes with a token of the batch.
        return
    kv, gate = aligned_rows(kv), aligned_rows(gate)
    if kv.stride(0) != gate.stride(0):
        kv, gate = kv.contiguous(), gate.contiguous()
    windows, rows = plan.slots.numel(), plan.write_locs.numel()
    together = bool(plan.disjoint and windows and rows)
    operands = Operands(
        kv=kv,
        gate=gate,
        bias=position_bias.to(torch.float32).contiguous().view(-1),
        state=state,
        source=aligned_rows(index_vector(plan.source)),
        positions=index_vector(plan.positions),
        slots=index_vector(plan.slots),
        norm_weight=norm_weight,
        table=table,
        pool=pool[:, : layout.page_bytes],
        token_positions=index_vector(positions),
        write_rows=index_vector(plan.write_rows),
        write_locs=index_vector(plan.write_locs),
    )
    key = (current_arch(), plan.ratio, kv.dtype, norm_weight.dtype, layout)
    if windows:
        compile_windows(*key, together)(operands, eps)
    if rows and not together:
        compile_tail(*key)(operands)


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

"""Sparse attention on a GPU: the public operation and its checks; `plan` chooses the kernel."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.attention.lists import TILE, ListShape
from sglang_dsv4.kernels.attention.operands import HEAD_DIM, ROPE_DIM, Numbers, Operands
from sglang_dsv4.kernels.attention.plan import Plan, plan_for
from sglang_dsv4.kernels.hardware import current_arch, num_sms
from sglang_dsv4.kernels.operands import index_vector

# Offsets inside a pool are counted in 16 bytes, in 31 bits.
MAX_POOL_BYTES = 1 << 35


@dataclass(frozen=True)
class _Unused:
    """Stand-ins for what a call does not use."""

    lengths: Tensor
    positions: Tensor
    table: Tensor
    part_out: Tensor
    part_lse: Tensor


@lru_cache(maxsize=16)
def _unused(device: torch.device) -> _Unused:
    def zeros(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return _Unused(
        lengths=zeros(torch.int32, 1),
        positions=zeros(torch.int64, 1),
        table=zeros(torch.float32, 1, ROPE_DIM),
        part_out=zeros(torch.float32, 1, HEAD_DIM),
        part_lse=zeros(torch.float32, 1),
    )


def _page_size(layout: RecordLayout) -> int:
    size = layout.page_size
    if layout.format is not KVFormat.NVFP4 or layout.head_dim != HEAD_DIM or size & (size - 1):
        raise UnsupportedError(
            f"The record layout is {layout.tag}, wanted nvfp4 records of 448+64 values in pages of "
            f"a power of two: choose --kv-cache-dtype nvfp4, or a CPU."
        )
    return size


def _aligned(tensor: Tensor, unit: int) -> Tensor:
    """The tensor itself when its rows are contiguous and start at multiples of `unit` elements.

    Otherwise a copy; unit 1 asks for contiguous rows only.
    """
    *strides, last = tensor.stride()
    start = tensor.data_ptr() // tensor.element_size()
    fits = last == 1 and all(n % unit == 0 for n in (start, *strides))
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _checked_rotation(rotation: tuple[Tensor, Tensor], num_tokens: int) -> tuple[Tensor, Tensor]:
    """(positions, table) as the kernels read them."""
    positions, table = rotation
    if table.dtype is not torch.float32 or table.shape[1:] != (ROPE_DIM,):
        raise UnsupportedError(
            f"The rotation's table is {table.dtype} {list(table.shape)}, wanted torch.float32 "
            f"[max_position, {ROPE_DIM}]: build it so, or use the reference."
        )
    if positions.shape != (num_tokens,):
        raise UnsupportedError(
            f"The rotation has positions {list(positions.shape)}, wanted [{num_tokens}]: give one "
            f"for each token."
        )
    return index_vector(positions), _aligned(table, 4)


def sparse_attention(
    q: Tensor,
    window_slots: Tensor,
    window_pool: Tensor,
    window_layout: RecordLayout,
    comp_slots: Tensor | None,
    comp_pool: Tensor | None,
    comp_layout: RecordLayout | None,
    sinks: Tensor,
    softmax_scale: float,
    out_scale: float = 1.0,
    comp_lengths: Tensor | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the records that its lists name.

    Args: q bfloat16 [T, H, 512]; window_slots int32 or int64 [T, Kw] and comp_slots [T, Kc], a
    slot outside its pool (-1) is unused and a repeated slot counts each time; pools uint8
    [num_pages, page_bytes] of NVFP4 records; the three comp arguments are None together; sinks
    float [H]; comp_lengths integer [T], or None for all: only places of comp_slots[t] below
    comp_lengths[t] are looked at; rotation: (positions integer [T] inside the table, table float32
    [max_position, 64]), by which the last 64 values of each head are turned back, in float32, as
    `reference.norm_rope.inverse_rope` does; plan: how to run it, chosen here when None.
    Returns (out bfloat16 [T, H, 512], multiplied by out_scale; lse float32 [T, H], natural
    log-sum-exp of the scaled scores over the records only, without the sink). A token whose lists
    are empty gets out 0 and lse -inf, whatever the sink. |q| must be below 2^119.
    Raises UnsupportedError for another device, dtype, width or record format, or such a rotation.
    """
    arch = current_arch()
    largest = max(pool.nbytes for pool in (window_pool, comp_pool) if pool is not None)
    if largest >= MAX_POOL_BYTES:
        raise UnsupportedError(
            f"A layer's pool has {largest} bytes, wanted less than {MAX_POOL_BYTES}: serve with a "
            f"smaller --max-total-tokens."
        )
    if q.dtype is not torch.bfloat16 or q.shape[-1] != HEAD_DIM:
        raise UnsupportedError(
            f"The query is {q.dtype} with {q.shape[-1]} dims, wanted torch.bfloat16 with "
            f"{HEAD_DIM}: convert it, or use the reference."
        )
    num_tokens, num_heads = q.shape[:2]
    window_slots = _aligned(window_slots, 1)
    window_page = _page_size(window_layout)
    num_window = window_slots.shape[1] if len(window_pool) else 0
    if comp_slots is None or comp_pool is None or comp_layout is None:
        comp_slots, comp_pool, comp_page, num_comp = window_slots, window_pool, window_page, 0
    else:
        comp_page = _page_size(comp_layout)
        num_comp = comp_slots.shape[1] if len(comp_pool) else 0
        comp_slots = _aligned(comp_slots.to(window_slots.dtype), 1)
    turning = None if rotation is None else _checked_rotation(rotation, num_tokens)
    num_tiles = math.ceil(num_window / TILE) + math.ceil(num_comp / TILE)
    if num_tiles == 0 or num_tokens == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if plan is None:
        sms = num_sms(torch.cuda.current_device())
        plan = plan_for(num_tokens, num_heads, num_tiles, sms, arch)
    out = torch.empty((num_tokens, num_heads, HEAD_DIM), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    unused = _unused(q.device)
    part_out, part_lse = unused.part_out, unused.part_lse
    if plan.splits > 1:
        rows = plan.splits * num_tokens * num_heads
        part_out = torch.empty((rows, HEAD_DIM), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((rows,), dtype=torch.float32, device=q.device)
    lengths = None if comp_lengths is None or num_comp == 0 else comp_lengths.int().contiguous()
    positions, table = turning or (unused.positions, unused.table)
    lists = ListShape(
        window_page,
        comp_page,
        window_slots.element_size(),
        has_lengths=lengths is not None,
        rotated=turning is not None,
    )
    operands = Operands(
        q=_aligned(q, 8),
        window_slots=window_slots,
        comp_slots=comp_slots,
        comp_lengths=unused.lengths if lengths is None else lengths,
        window_pool=window_pool,
        comp_pool=comp_pool,
        sinks=sinks.float().contiguous(),
        positions=positions,
        table=table,
        out=out,
        lse=lse,
        part_out=part_out,
        part_lse=part_lse,
    )
    scale_log2 = softmax_scale * math.log2(math.e)
    numbers = Numbers(num_window, num_comp, plan.splits, scale_log2, out_scale)
    plan.compile(arch, lists)(operands, numbers)
    return out, lse

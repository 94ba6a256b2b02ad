"""Sparse attention on a GPU: the public operation, its checks, the choice of tile and splits."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.attention.combine import HEAD_DIM
from sglang_dsv4.kernels.attention.portable import (
    HEAD_TILES,
    TILE,
    Shape,
    compile_sparse_attention,
    shared_bytes,
)
from sglang_dsv4.kernels.hardware import SHARED_BYTES, current_arch, num_sms

MAX_SPLITS = 32
# Offsets inside a pool are counted in 16 bytes, in 31 bits.
MAX_POOL_BYTES = 1 << 35
# Microseconds on an H200, fitted to 313 timed plans (BENCHMARKS.md), for the choice of a plan: one
# 64-key tile by head tile, on a full SM; a block; the combination, and 1000 of its partial rows.
TILE_COST = {8: 3.4, 16: 4.0, 32: 3.8}
BLOCK_COST = 2.0
COMBINE_COST = 1.3
ROW_COST = 1.5
# The time of a block that has its SM alone, relative to one that shares it.
ALONE_COST = 0.75


@dataclass(frozen=True)
class Plan:
    """Heads of a block and shares of the key list."""

    head_tile: int
    splits: int


def _fitting(arch: str) -> list[int]:
    """Head tiles whose blocks fit the architecture's shared memory, ascending."""
    return [t for t in HEAD_TILES if shared_bytes(t) + 1024 <= SHARED_BYTES[arch]]


def head_tile_for(num_heads: int, arch: str) -> int:
    """The largest useful tile: the smallest that holds all heads, else the largest that fits."""
    fitting = _fitting(arch)
    return next((tile for tile in fitting if tile >= num_heads), fitting[-1])


def plan_cost(
    plan: Plan, num_tokens: int, num_heads: int, num_tiles: int, sms: int, arch: str
) -> float:
    """Estimated microseconds of a plan, without what all plans share.

    num_tiles: 64-key tiles of both lists; sms: streaming multiprocessors.
    """
    tile, splits = plan.head_tile, plan.splits
    blocks = num_tokens * math.ceil(num_heads / tile) * splits
    per_sm = min(2, SHARED_BYTES[arch] // (shared_bytes(tile) + 1024))
    rounds, rest = divmod(math.ceil(blocks / sms), per_sm)
    passes = rounds + (ALONE_COST if rest else 0.0)
    cost = passes * (TILE_COST[tile] * math.ceil(num_tiles / splits) + BLOCK_COST)
    return cost + (COMBINE_COST + ROW_COST * blocks * tile / 1000 if splits > 1 else 0.0)


@lru_cache(maxsize=4096)
def plan_for(num_tokens: int, num_heads: int, num_tiles: int, sms: int, arch: str) -> Plan:
    """The tile of heads and the number of splits with the least estimated time.

    A split count is taken only if no split is empty, a tile below 16 only if it holds all heads.
    num_tiles: 64-key tiles of both lists.
    """
    largest = head_tile_for(num_heads, arch)
    wanted = range(1, min(MAX_SPLITS, num_tiles) + 1)
    plans = [
        Plan(tile, splits)
        for tile in _fitting(arch)
        if min(16, largest) <= tile <= largest
        for splits in wanted
        if math.ceil(num_tiles / math.ceil(num_tiles / splits)) == splits
    ]
    return min(plans, key=lambda p: plan_cost(p, num_tokens, num_heads, num_tiles, sms, arch))


@lru_cache(maxsize=16)
def _unused(device: torch.device) -> tuple[Tensor, Tensor]:
    """Stand-ins for the buffers of a launch without splits."""
    return torch.zeros(1, HEAD_DIM, device=device), torch.zeros(1, device=device)


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
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the records that its lists name.

    Args: q bfloat16 [T, H, 512]; window_slots int32 or int64 [T, Kw] and comp_slots [T, Kc], a
    slot outside its pool (-1) is unused and a repeated slot counts each time; pools uint8
    [num_pages, page_bytes] of NVFP4 records; the three comp arguments are None together; sinks
    float [H]; plan: tile and splits, chosen here when None.
    Returns (out bfloat16 [T, H, 512], multiplied by out_scale; lse float32 [T, H], natural
    log-sum-exp of the scaled scores over the records only, without the sink). A token whose lists
    are empty gets out 0 and lse -inf, whatever the sink. |q| must be below 2^119.
    Raises UnsupportedError for another device, dtype, width or record format.
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
    num_tiles = math.ceil(num_window / TILE) + math.ceil(num_comp / TILE)
    if num_tiles == 0 or num_tokens == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if plan is None:
        sms = num_sms(torch.cuda.current_device())
        plan = plan_for(num_tokens, num_heads, num_tiles, sms, arch)
    out = torch.empty((num_tokens, num_heads, HEAD_DIM), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    if plan.splits == 1:
        part_out, part_lse = _unused(q.device)
    else:
        rows = plan.splits * num_tokens * num_heads
        part_out = torch.empty((rows, HEAD_DIM), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((rows,), dtype=torch.float32, device=q.device)
    shape = Shape(plan.head_tile, window_page, comp_page, window_slots.element_size())
    compile_sparse_attention(arch, shape)(
        _aligned(q, 8),
        window_slots,
        comp_slots,
        window_pool,
        comp_pool,
        sinks.float().contiguous(),
        out,
        lse,
        part_out,
        part_lse,
        num_window,
        num_comp,
        plan.splits,
        softmax_scale * math.log2(math.e),
        out_scale,
    )
    return out, lse

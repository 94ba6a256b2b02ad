"""The slot lists of a decode batch in one launch: ``metadata.build_metadata`` for a CUDA graph.

Plain torch takes about 120 launches for them, each too short to hide the next one. Here a block a
token writes its row of every list, further blocks the pages of its request.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_dsv4.attention.metadata import C4_RING, AttentionMetadata, EntryLists
from sglang_dsv4.kernels.reference.compress import CompressPlan

_PAGES = 256
"""Pages that a block writes."""


@dataclass(frozen=True)
class ListShapes:
    """What the lists' shapes depend on besides the batch: a model's and its pools' constants.

    Attributes:
        page_size: tokens a page, 256.
        window: tokens that a query sees in the window pool, 128.
        c128_ring: state rows of a request for ratio 128.
        topk: entries that the indexer selects.
    """

    page_size: int
    window: int
    c128_ring: int
    topk: int


@triton.jit
def _window_slot(
    request_row: tl.tensor, position: tl.tensor, full_to_window: tl.tensor
) -> tl.tensor:
    """Window-pool slot of a position, -1 for a negative one."""
    there = position >= 0
    full = tl.load(request_row + position, mask=there, other=0).to(tl.int64)
    slot = tl.load(full_to_window + full, mask=there, other=-1).to(tl.int64)
    return tl.where(there, slot, -1)


@triton.jit
def _c4_row(slot: tl.tensor, PAGE: tl.constexpr, RING: tl.constexpr) -> tl.tensor:
    """State row of ratio 4 that goes with a window slot."""
    return slot // PAGE * RING + slot % RING


@triton.jit
def _lists(
    requests: tl.tensor,
    seq_lens: tl.tensor,
    all_positions: tl.tensor,
    locs: tl.tensor,
    req_to_token: tl.tensor,
    req_stride: tl.tensor,
    full_to_window: tl.tensor,
    window_out: tl.tensor,
    window_slots: tl.tensor,
    visible4: tl.tensor,
    visible128: tl.tensor,
    selected: tl.tensor,
    source4: tl.tensor,
    first4: tl.tensor,
    slots4: tl.tensor,
    locs4: tl.tensor,
    source128: tl.tensor,
    first128: tl.tensor,
    slots128: tl.tensor,
    locs128: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    entries: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    topk: tl.tensor,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    RING4: tl.constexpr,
    RING128: tl.constexpr,
    PER_PAGE: tl.constexpr,
    PAGES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request = tl.load(requests + token).to(tl.int64)
    request_row = req_to_token + request * req_stride
    if part > 0:
        nth = (part - 1) * PAGES + tl.arange(0, PAGES)
        there = nth < count
        first = tl.load(request_row + nth.to(tl.int64) * PAGE, mask=there, other=0)
        page = first // PAGE
        tl.store(pages + token * count + nth, page, mask=there)
        for e in tl.static_range(PER_PAGE):
            place = (token * count + nth) * PER_PAGE + e
            tl.store(entries + place, page.to(tl.int64) * PER_PAGE + e, mask=there)
    else:
        position = tl.load(all_positions + token).to(tl.int64)
        seq = tl.load(seq_lens + token).to(tl.int64)
        loc = tl.load(locs + token).to(tl.int64)
        live = loc >= PAGE
        out = tl.load(full_to_window + loc).to(tl.int64)
        tl.store(window_out + token, tl.where(live, out, -1))
        tl.store(rows + token, token)
        entries4 = (position + 1) // 4
        tl.store(visible4 + token, entries4)
        tl.store(visible128 + token, ((position + 1) // 128).to(tl.int32))
        tl.store(selected + token, tl.minimum(entries4, topk).to(tl.int32))

        back = WINDOW - 1 - tl.arange(0, WINDOW)
        slot = _window_slot(request_row, position - back, full_to_window)
        tl.store(window_slots + token * WINDOW + tl.arange(0, WINDOW), slot)

        closes = live & (position % 4 == 3)
        nth4 = tl.arange(0, 8)
        at = position - 7 + nth4
        row = _c4_row(_window_slot(request_row, at, full_to_window), PAGE, RING4)
        source = tl.where(at >= seq - 1, token - 7 + nth4, row + tokens)
        tl.store(source4 + token * 8 + nth4, tl.where((at >= 0) & closes, source, -1))
        tl.store(first4 + token, tl.maximum(position - 3, 0))
        tl.store(slots4 + token, tl.where(closes, loc // 4, -1))
        kept = live & ((position >= seq - RING4) | (position % PAGE >= PAGE - RING4))
        own = _c4_row(_window_slot(request_row, position, full_to_window), PAGE, RING4)
        tl.store(locs4 + token, tl.where(kept, own, -1))

        closes = live & (position % 128 == 127)
        nth128 = tl.arange(0, 128)
        at = position - 127 + nth128
        source = tl.where(
            at >= seq - 1, token - 127 + nth128, request * RING128 + at % RING128 + tokens
        )
        tl.store(source128 + token * 128 + nth128, tl.where((at >= 0) & closes, source, -1))
        tl.store(first128 + token, tl.maximum(position - 127, 0))
        tl.store(slots128 + token, tl.where(closes, loc // 128, -1))
        own = request * RING128 + position % RING128
        tl.store(locs128 + token, tl.where(live & (position >= seq - RING128), own, -1))


def decode_metadata(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_window: torch.Tensor,
    shapes: ListShapes,
) -> AttentionMetadata:
    """As ``metadata.build_metadata`` of a decode batch without spans, every token a request.

    Args:
        req_pool_indices, seq_lens, positions, out_cache_loc: integers [R] of any width, contiguous,
            as in ``metadata.BatchRows``; positions int64.
        req_to_token: int32 [requests, context], full-pool slot of each position, rows contiguous.
        full_to_window: int64 [full slots + 1], window-pool slot of each full-pool slot.
    """
    tokens, device = len(positions), positions.device
    count = max(1, -(-req_to_token.shape[1] // shapes.page_size))
    per_page = shapes.page_size // 128

    def made(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(tokens, *size, dtype=dtype, device=device)

    i32, i64 = torch.int32, torch.int64
    window_out, rows = made(i64), made(i64)
    window_slots = made(i64, shapes.window)
    visible4, visible128, selected = made(i64), made(i32), made(i32)
    source4, source128 = made(i64, 8), made(i64, 128)
    first4, slots4, locs4, first128, slots128, locs128 = (made(i64) for _ in range(6))
    pages, entries = made(i32, count), made(i64, count * per_page)
    if tokens:
        _lists[(tokens, 1 + triton.cdiv(count, _PAGES))](
            req_pool_indices,
            seq_lens,
            positions,
            out_cache_loc,
            req_to_token,
            req_to_token.stride(0),
            full_to_window,
            window_out,
            window_slots,
            visible4,
            visible128,
            selected,
            source4,
            first4,
            slots4,
            locs4,
            source128,
            first128,
            slots128,
            locs128,
            rows,
            pages,
            entries,
            tokens,
            count,
            shapes.topk,
            PAGE=shapes.page_size,
            WINDOW=shapes.window,
            RING4=C4_RING,
            RING128=shapes.c128_ring,
            PER_PAGE=per_page,
            PAGES=_PAGES,
        )
    return AttentionMetadata(
        positions=positions,
        window_out=window_out,
        window_slots=window_slots,
        row_of_token=rows,
        pages=pages,
        c4_visible=visible4,
        c128_visible=visible128,
        page_size=shapes.page_size,
        plan_c4=CompressPlan(4, source4, first4, slots4, rows, locs4, disjoint=True),
        plan_c128=CompressPlan(128, source128, first128, slots128, rows, locs128, disjoint=True),
        hca=EntryLists(entries, visible128),
        csa=selected,
    )

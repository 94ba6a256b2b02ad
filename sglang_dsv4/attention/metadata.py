"""The slot lists that one forward pass works on: what to write where, and what to read.

Everything is derived once a forward pass, for all layers, from SGLang's batch. The request-to-token
table gives the full-pool slot of each position, the allocator's mapping gives its window slot, and
``slot // ratio`` its compressed entry, since pages of 256 tokens are contiguous in every pool.

No value is read back from the device: counts that shapes depend on come from the host's copy of the
lengths, and a decode batch without one (a CUDA graph) gets shapes that depend on its size alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_dsv4.kernels.reference.compress import CompressPlan

C4_RING = 8
"""State rows a window page keeps for ratio 4: the last two windows of four tokens."""


@dataclass(frozen=True)
class BatchRows:
    """One forward pass as SGLang describes it; R requests, T tokens, request after request.

    Attributes:
        req_pool_indices: int64 [R], row of each request in the request-to-token table.
        prefix_lens: int64 [R], tokens of each request that were computed before this pass.
        seq_lens: int64 [R], tokens of each request after this pass.
        positions: int64 [T], position of each token in its request.
        out_cache_loc: int64 [T], full-pool slot of each token; one of page 0 marks padding.
        row_of_token: int64 [T], request (0..R-1) of each token.
        max_seq_len: no request is longer; known to the host.
        host_spans: (prefix length, sequence length) of each request on the host; None for a
            decode batch whose shapes must not depend on its lengths.
    """

    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    row_of_token: torch.Tensor
    max_seq_len: int
    host_spans: Sequence[tuple[int, int]] | None


@dataclass(frozen=True)
class EntryLists:
    """Compressed entries that each token attends to.

    Attributes:
        slots: int64 [T, K], slots of the compressed pool.
        lengths: int32 [T], leading places of each row that count; the others hold anything.
    """

    slots: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Slots of one forward pass; -1 marks an unused place where no length says so.

    Attributes:
        positions: int64 [T].
        window_out: int64 [T], window-pool slot that each token's record goes to.
        window_slots: int64 [T, sliding_window], window-pool slots that each token attends to.
        row_of_token: int64 [T], row of ``pages`` that belongs to each token.
        pages: int32 [R, P], page (256 tokens of the full pool) of each request's tokens; in pools
            of ratio r the page holds 256 / r entries. Beyond the request's end it is anything.
        c4_visible: int64 [T], entries of ratio 4 that each token may see, ``(t + 1) // 4``; of the
            type of ``row_of_token``, as the indexer wants them.
        c128_visible: int32 [T], the same of ratio 128.
        page_size: tokens a page.
        plan_c4, plan_c128: which windows close in this pass and what they are made of.
        hca, csa: ``hca_entries`` and ``csa_lengths`` of the model's top-k where made already.
    """

    positions: torch.Tensor
    window_out: torch.Tensor
    window_slots: torch.Tensor
    row_of_token: torch.Tensor
    pages: torch.Tensor
    c4_visible: torch.Tensor
    c128_visible: torch.Tensor
    page_size: int
    plan_c4: CompressPlan
    plan_c128: CompressPlan
    hca: EntryLists | None = None
    csa: torch.Tensor | None = None

    @cached_property
    def hca_entries(self) -> EntryLists:
        """Every ratio-128 entry of each token's request, the visible ones first."""
        if self.hca is not None:
            return self.hca
        per_page = self.page_size // 128
        entry = torch.arange(per_page, device=self.pages.device)
        slots = (self.pages.long() * per_page).unsqueeze(-1) + entry
        return EntryLists(slots.flatten(1)[self.row_of_token], self.c128_visible)

    def csa_lengths(self, topk: int) -> torch.Tensor:
        """Entries that the indexer selects for each token: int32 [T]."""
        if self.csa is not None:
            return self.csa
        if topk not in self._csa_lengths:
            self._csa_lengths[topk] = self.c4_visible.clamp(max=topk).int()
        return self._csa_lengths[topk]

    @cached_property
    def _csa_lengths(self) -> dict[int, torch.Tensor]:
        return {}


def build_metadata(
    batch: BatchRows,
    req_to_token: torch.Tensor,
    full_to_window: torch.Tensor,
    *,
    page_size: int,
    sliding_window: int,
    c128_ring: int,
) -> AttentionMetadata:
    """Builds the slot lists of one forward pass.

    Args:
        batch: the batch; T may be 0.
        req_to_token: int32 [requests, context], full-pool slot of each position.
        full_to_window: int64 [full slots + 1], window-pool slot of each full-pool slot.
        page_size: tokens a page, 256.
        sliding_window: tokens each query sees in the window pool, itself included (128).
        c128_ring: state rows of a request for ratio 128 (128 without speculation).
    """
    row = batch.row_of_token
    request = batch.req_pool_indices[row]
    back = torch.arange(sliding_window - 1, -1, -1, device=row.device)
    seen = batch.positions[:, None] - back
    window_slots = _window_slot(request[:, None], seen, req_to_token, full_to_window)
    live = batch.out_cache_loc >= page_size
    c4_state = _WindowState(request, batch.positions, req_to_token, full_to_window, page_size)
    c128_state = _RequestState(request, batch.positions, c128_ring)
    window_out = full_to_window[batch.out_cache_loc].long()
    disjoint = _is_disjoint(batch, page_size)
    return AttentionMetadata(
        positions=batch.positions,
        window_out=window_out.masked_fill(~live, -1),
        window_slots=window_slots,
        row_of_token=row,
        pages=_pages(batch, req_to_token, page_size),
        c4_visible=(batch.positions + 1) // 4,
        c128_visible=((batch.positions + 1) // 128).int(),
        page_size=page_size,
        plan_c4=_plan(
            batch, 4, 8, c4_state, live & _keeps_c4_state(batch, page_size), live, disjoint
        ),
        plan_c128=_plan(
            batch, 128, 128, c128_state, live & _within_last(batch, c128_ring), live, disjoint
        ),
    )


def _is_disjoint(batch: BatchRows, page_size: int) -> bool:
    """Whether no window of either ratio reads a state row that this pass writes.

    A request's one new token writes the place of the token one ring before it, which the window it
    closes does not reach back to. Where a request continues at a page's start, ratio 4 reads that
    page's predecessor, which it does not write, and ratio 128 nothing.
    """
    if batch.host_spans is None:
        return True
    return all(seq - prefix <= 1 or prefix % page_size == 0 for prefix, seq in batch.host_spans)


def _pages(batch: BatchRows, req_to_token: torch.Tensor, page_size: int) -> torch.Tensor:
    """Page of each 256 tokens of each request, int32 [R, at least 1]."""
    count = max(1, -(-batch.max_seq_len // page_size))
    firsts = req_to_token[:, ::page_size][batch.req_pool_indices, :count]
    return (firsts // page_size).int()


def _window_slot(
    request: torch.Tensor,
    position: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_window: torch.Tensor,
) -> torch.Tensor:
    """Window-pool slot of a position of a request; -1 for a negative position."""
    full = req_to_token[request, position.clamp(min=0)].long()
    return full_to_window[full].long().masked_fill(position < 0, -1)


class _WindowState:
    """State rows of ratio 4: ring of eight a window page, so that they live and die with it."""

    def __init__(
        self,
        request: torch.Tensor,
        positions: torch.Tensor,
        req_to_token: torch.Tensor,
        full_to_window: torch.Tensor,
        page_size: int,
    ) -> None:
        self._tables = (req_to_token, full_to_window, page_size)
        self._request = request
        self.of_tokens = self._rows(request, positions)

    def _rows(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        req_to_token, full_to_window, page_size = self._tables
        slot = _window_slot(request, position, req_to_token, full_to_window)
        return slot // page_size * C4_RING + slot % C4_RING

    def rows(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """State row of ``position`` in the request of each token, [W] and [W, n] -> [W, n]."""
        return self._rows(self._request[tokens][:, None], position)


class _RequestState:
    """State rows of ratio 128: one ring a request slot."""

    def __init__(self, request: torch.Tensor, positions: torch.Tensor, ring: int) -> None:
        self._request, self._ring = request, ring
        self.of_tokens = request * ring + positions % ring

    def rows(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """State row of ``position`` in the request of each token, [W] and [W, n] -> [W, n]."""
        return self._request[tokens][:, None] * self._ring + position % self._ring


def _within_last(batch: BatchRows, count: int) -> torch.Tensor:
    """Tokens among the last ``count`` of their request, bool [T]."""
    return batch.positions >= batch.seq_lens[batch.row_of_token] - count


def _keeps_c4_state(batch: BatchRows, page_size: int) -> torch.Tensor:
    """Tokens whose ratio-4 state survives the pass: the last eight of a page or of the request.

    No two of them share a state row, so the write needs no order.
    """
    return _within_last(batch, C4_RING) | (batch.positions % page_size >= page_size - C4_RING)


def _plan(
    batch: BatchRows,
    ratio: int,
    width: int,
    state: _WindowState | _RequestState,
    kept: torch.Tensor,
    live: torch.Tensor,
    disjoint: bool,
) -> CompressPlan:
    """The windows of ``ratio`` tokens that close in this pass, of ``width`` candidates each."""
    tokens = len(batch.positions)
    if batch.host_spans is None:
        closing = torch.arange(tokens, device=kept.device)
        closes = live & (batch.positions % ratio == ratio - 1)
    else:
        closing = _closing_tokens(batch, batch.host_spans, ratio)
        closes = live[closing]
    back = torch.arange(width - 1, -1, -1, device=closing.device)
    position = batch.positions[closing][:, None] - back
    fresh = position >= batch.prefix_lens[batch.row_of_token[closing]][:, None]
    source = torch.where(fresh, closing[:, None] - back, state.rows(closing, position) + tokens)
    return CompressPlan(
        ratio=ratio,
        source=source.masked_fill((position < 0) | ~closes[:, None], -1),
        positions=(batch.positions[closing] - (ratio - 1)).clamp(min=0),
        slots=(batch.out_cache_loc[closing] // ratio).masked_fill(~closes, -1),
        write_rows=torch.arange(tokens, device=kept.device),
        write_locs=state.of_tokens.masked_fill(~kept, -1),
        disjoint=disjoint,
    )


def _closing_tokens(batch: BatchRows, spans: Sequence[tuple[int, int]], ratio: int) -> torch.Tensor:
    """Tokens of this pass that are the last of a window, int64 [W], in ascending order."""
    device = batch.positions.device
    closed_before = batch.prefix_lens // ratio
    count = batch.seq_lens // ratio - closed_before
    total = sum(seq // ratio - prefix // ratio for prefix, seq in spans)
    row = torch.repeat_interleave(torch.arange(len(spans), device=device), count, output_size=total)
    # Request r's windows stand from cumsum(count) - count on, its tokens likewise.
    nth = torch.arange(total, device=device) - (count.cumsum(0) - count)[row]
    length = batch.seq_lens - batch.prefix_lens
    last = (closed_before[row] + nth + 1) * ratio - 1
    return (length.cumsum(0) - length)[row] + last - batch.prefix_lens[row]

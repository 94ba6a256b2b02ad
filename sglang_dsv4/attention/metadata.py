"""The slot lists that one forward pass works on: what to write where, and what to read.

Everything is derived once a forward pass, for all layers, from SGLang's batch. The request-to-token
table gives the full-pool slot of each position, the allocator's mapping gives its window slot, and
``slot // ratio`` its compressed entry, since pages of 256 tokens are contiguous in every pool.
"""

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
        out_cache_loc: int64 [T], full-pool slot of each token.
        row_of_token: int64 [T], request (0..R-1) of each token.
        max_seq_len: the largest of ``seq_lens``, known to the host.
    """

    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    row_of_token: torch.Tensor
    max_seq_len: int


@dataclass(frozen=True)
class AttentionMetadata:
    """Slots of one forward pass; -1 marks an unused place in every list.

    Attributes:
        positions: int64 [T].
        window_out: int64 [T], window-pool slot that each token's record goes to.
        window_slots: int64 [T, sliding_window], window-pool slots that each token attends to.
        row_of_token: int64 [T], row of ``c4_slots`` / ``c128_slots`` that belongs to each token.
        c4_slots: int64 [R, L4], slot of each request's ratio-4 entries, entry 0 first.
        c4_visible: int64 [T], entries of ratio 4 that each token may see, ``(t + 1) // 4``.
        c128_slots: int64 [R, L128], the same of ratio 128.
        c128_visible: int64 [T].
        plan_c4, plan_c128: which windows close in this pass and what they are made of.
    """

    positions: torch.Tensor
    window_out: torch.Tensor
    window_slots: torch.Tensor
    row_of_token: torch.Tensor
    c4_slots: torch.Tensor
    c4_visible: torch.Tensor
    c128_slots: torch.Tensor
    c128_visible: torch.Tensor
    plan_c4: CompressPlan
    plan_c128: CompressPlan

    @cached_property
    def c128_token_slots(self) -> torch.Tensor:
        """Every visible ratio-128 entry of each token: int64 [T, L128], -1 beyond the visible."""
        slots = self.c128_slots[self.row_of_token]
        entry = torch.arange(slots.shape[1], device=slots.device)
        return slots.masked_fill(entry >= self.c128_visible[:, None], -1)


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
    c4_state = _WindowState(request, batch.positions, req_to_token, full_to_window, page_size)
    c128_state = _RequestState(request, batch.positions, c128_ring)
    return AttentionMetadata(
        positions=batch.positions,
        window_out=full_to_window[batch.out_cache_loc].long(),
        window_slots=window_slots,
        row_of_token=row,
        c4_slots=_entry_slots(batch, req_to_token, 4),
        c4_visible=(batch.positions + 1) // 4,
        c128_slots=_entry_slots(batch, req_to_token, 128),
        c128_visible=(batch.positions + 1) // 128,
        plan_c4=_plan(batch, 4, 8, c4_state, _keeps_c4_state(batch, page_size)),
        plan_c128=_plan(batch, 128, 128, c128_state, _within_last(batch, c128_ring)),
    )


def _window_slot(
    request: torch.Tensor,
    position: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_window: torch.Tensor,
) -> torch.Tensor:
    """Window-pool slot of a position of a request; -1 for a negative position."""
    full = req_to_token[request, position.clamp(min=0)].long()
    return full_to_window[full].long().masked_fill(position < 0, -1)


def _entry_slots(batch: BatchRows, req_to_token: torch.Tensor, ratio: int) -> torch.Tensor:
    """Compressed slots of each request, [R, at least 1], -1 beyond the request's entries."""
    entry = torch.arange(max(1, batch.max_seq_len // ratio), device=batch.seq_lens.device)
    full = req_to_token[batch.req_pool_indices[:, None], entry * ratio].long()
    return (full // ratio).masked_fill(entry >= (batch.seq_lens // ratio)[:, None], -1)


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
) -> CompressPlan:
    """The windows of ``ratio`` tokens that close in this pass, of ``width`` candidates each."""
    tokens = len(batch.positions)
    closing = torch.nonzero(batch.positions % ratio == ratio - 1).flatten()
    back = torch.arange(width - 1, -1, -1, device=closing.device)
    position = batch.positions[closing][:, None] - back
    fresh = position >= batch.prefix_lens[batch.row_of_token[closing]][:, None]
    source = torch.where(fresh, closing[:, None] - back, state.rows(closing, position) + tokens)
    write_rows = torch.nonzero(kept).flatten()
    return CompressPlan(
        ratio=ratio,
        source=source.masked_fill(position < 0, -1),
        positions=batch.positions[closing] - (ratio - 1),
        slots=batch.out_cache_loc[closing] // ratio,
        write_rows=write_rows,
        write_locs=state.of_tokens[write_rows],
    )

"""Lightning indexer of CSA: scores and exact top-k (paper section 2.3.1 eqs. 13-17).

score(t, w) = sum_h weight(t, h) * ReLU(q(t, h) . k(w)); the scales are in the weights.

Tokens of a prefill share their request's keys, so these are read once and multiplied as one
matrix; tokens of requests with few tokens each (decode) read theirs in batches. Both are cut into
chunks of tokens by a bound on the number of scores.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import IndexerLayout

from .indexer_key import read_indexer_keys
from .matmul import bf16_operands

# Scores of one chunk before the sum over heads: 8 MB of float32. Short chunks stay in the cache and
# skip more of the causal triangle: 41 ms against 113 ms with 64 MB, for 2048 tokens of 8 heads on
# one AMX core.
MAX_SCORES = 1 << 21
# From this many tokens on, a request's keys are read once for all of them.
SHARED_TOKENS = 4


def indexer_logits(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of every key.

    Args: q float [T, Hi, d], rotated and Hadamard-transformed; weights float [T, Hi];
    keys float [L, d], shared, or [T, L, d].
    With q in bf16 the products take bf16 operands (exact for keys from a pool), else float32.
    Returns float32 [T, L].
    """
    num_tokens, num_heads, dim = q.shape
    with bf16_operands(q.dtype is torch.bfloat16):
        if keys.dim() == 2:
            scores = (q.float().reshape(-1, dim) @ keys.float().mT).view(num_tokens, num_heads, -1)
        else:
            scores = torch.bmm(q.float(), keys.float().mT)
    return torch.bmm(weights.float().unsqueeze(1), scores.relu_()).squeeze(1)


def select_topk(logits: Tensor, visible: Tensor, topk: int) -> Tensor:
    """The `topk` largest visible logits of each row, exact; equal logits by lower index.

    Args: logits float32 [T, L] (NaN ranks last); visible bool [T, L].
    Returns int64 [T, topk]: indices in ascending order, then -1.
    """
    num_tokens, length = logits.shape
    ranked = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranked = ranked.masked_fill_(~visible, -torch.inf)
    chosen = visible
    if length > topk:
        kth = ranked.topk(topk, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
        above = ranked > kth
        equal = (ranked == kth) & visible
        room = topk - above.sum(dim=-1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
    rows, columns = chosen.nonzero(as_tuple=True)
    place = chosen.cumsum(dim=-1, dtype=torch.int32)[rows, columns] - 1
    indices = columns.new_full((num_tokens, topk), -1)
    indices[rows, place] = columns
    return indices


def entry_slots(key_pages: Tensor, length: int, page_size: int) -> Tensor:
    """Slots of entries 0..length-1: integer [..., P] pages -> int64 [..., length]."""
    entry = torch.arange(length, device=key_pages.device)
    return key_pages.long()[..., entry // page_size] * page_size + entry % page_size


def _chunks(tokens: Tensor, per_token: int) -> Iterator[Tensor]:
    """Split token ids so that a chunk has at most MAX_SCORES scores; nothing for no tokens."""
    if len(tokens):
        yield from tokens.split(max(1, MAX_SCORES // max(1, per_token)))


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    layout: IndexerLayout,
    key_pages: Tensor,
    row_of_token: Tensor,
    visible: Tensor,
    topk: int,
) -> Tensor:
    """Slots of the compressed entries that each token attends to.

    Args: q float [T, Hi, d]; weights float [T, Hi]; pool uint8 [num_pages, page_bytes];
    key_pages integer [R, P], pages of each request: its entry e is slot
    key_pages[r, e // page_size] * page_size + e % page_size, and pages of entries that no token
    sees may be any number; row_of_token integer [T], row of key_pages; visible integer [T],
    entries 0..visible-1 may be seen.
    Returns int64 [T, topk]: slots in ascending order of entry, then -1; equal logits by lower
    entry. A token that sees at most topk entries gets all of them, without scoring.
    """
    num_heads, page_size = q.shape[1], layout.page_size
    capacity = key_pages.shape[1] * page_size
    visible = visible.long().clamp(0, capacity)
    selected = visible.new_full((len(q), topk), -1)

    def select(chunk: Tensor, keys: Tensor | None, slots: Tensor) -> None:
        """Selection of a chunk of tokens; slots int64 [width], or [len(chunk), width]."""
        width = slots.shape[-1]
        mask = torch.arange(width, device=slots.device) < visible[chunk, None]
        if keys is None:
            selected[chunk, :width] = slots.masked_fill(~mask, -1)
            return
        entries = select_topk(indexer_logits(q[chunk], weights[chunk], keys), mask, topk)
        chosen = slots.expand(len(chunk), width).gather(1, entries.clamp(min=0))
        selected[chunk] = chosen.masked_fill(entries < 0, -1)

    def longest(tokens: Tensor) -> int:
        return int(visible[tokens].amax())

    rows, inverse, counts = torch.unique(row_of_token, return_inverse=True, return_counts=True)
    shared = counts >= SHARED_TOKENS
    for index in shared.nonzero().flatten().tolist():
        tokens = (inverse == index).nonzero().flatten()
        slots = entry_slots(key_pages[rows[index]], longest(tokens), page_size)
        keys = read_indexer_keys(pool, slots, layout) if len(slots) > topk else None
        for chunk in _chunks(tokens, num_heads * len(slots)):
            width = longest(chunk)
            seen = None if keys is None or width <= topk else keys[:width]
            select(chunk, seen, slots[:width])

    alone = (~shared)[inverse].nonzero().flatten()
    for chunk in _chunks(alone, (num_heads + q.shape[2]) * capacity):
        width = longest(chunk)
        slots = entry_slots(key_pages[row_of_token[chunk]], width, page_size)
        keys = None
        if width > topk:
            keys = read_indexer_keys(pool, slots.flatten(), layout).view(len(chunk), width, -1)
        select(chunk, keys, slots)
    return selected

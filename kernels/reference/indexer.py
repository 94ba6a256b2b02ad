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


def _chunks(tokens: Tensor, per_token: int) -> Iterator[Tensor]:
    """Split token ids so that a chunk has at most MAX_SCORES scores; nothing for no tokens."""
    if len(tokens):
        yield from tokens.split(max(1, MAX_SCORES // max(1, per_token)))


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    layout: IndexerLayout,
    key_slots: Tensor,
    row_of_token: Tensor,
    visible: Tensor,
    topk: int,
) -> Tensor:
    """Entries that each token attends to.

    Args: q float [T, Hi, d]; weights float [T, Hi]; pool uint8 [num_pages, page_bytes];
    key_slots int64 [R, Lmax], the entries' slots of each request, -1 padded; row_of_token integer
    [T], row of key_slots; visible integer [T], entries 0..visible-1 may be seen.
    Returns int64 [T, topk]: indices into the token's row of key_slots, ascending, then -1. A token
    that sees at most topk entries gets all of them, without scoring.
    """
    num_heads, length = q.shape[1], key_slots.shape[1]
    selected = key_slots.new_full((q.shape[0], topk), -1)
    entry = torch.arange(length, device=q.device)

    def seen(tokens: Tensor, slots: Tensor) -> Tensor:
        return (entry[: slots.shape[-1]] < visible[tokens, None]) & (slots >= 0)

    def longest(tokens: Tensor) -> int:
        return int(visible[tokens].amax().clamp(0, length))

    rows, inverse, counts = torch.unique(row_of_token, return_inverse=True, return_counts=True)
    shared = counts >= SHARED_TOKENS
    for index in shared.nonzero().flatten().tolist():
        tokens = (inverse == index).nonzero().flatten()
        slots = key_slots[rows[index], : longest(tokens)]
        keys = read_indexer_keys(pool, slots, layout) if slots.numel() > topk else None
        for chunk in _chunks(tokens, num_heads * slots.numel()):
            width = longest(chunk)
            mask = seen(chunk, slots[:width])
            if keys is None or width <= topk:
                selected[chunk] = select_topk(mask.float(), mask, topk)
            else:
                logits = indexer_logits(q[chunk], weights[chunk], keys[:width])
                selected[chunk] = select_topk(logits, mask, topk)

    alone = (~shared)[inverse].nonzero().flatten()
    for chunk in _chunks(alone, (num_heads + q.shape[2]) * length):
        width = longest(chunk)
        slots = key_slots[row_of_token[chunk], :width]
        mask = seen(chunk, slots)
        if width <= topk:
            selected[chunk] = select_topk(mask.float(), mask, topk)
            continue
        keys = read_indexer_keys(pool, slots.flatten(), layout).view(len(chunk), width, -1)
        selected[chunk] = select_topk(indexer_logits(q[chunk], weights[chunk], keys), mask, topk)
    return selected

"""Attention over listed slots of the window pool and of the compressed pool, with a sink.

One softmax runs over both lists; the sink is a logit that only joins the denominator, so it scales
the output by sigmoid(lse - sink). K = V = the record (paper section 2.3.3).

Two ways to the same sums, chosen for each block of query tokens by what the tokens share:

- dense (prefill): neighbours name mostly the same slots, so each distinct record is decoded once
  and multiplied with the whole block; a bias log(count), -inf for slots that a token does not
  list, restores each token's own list with its duplicates.
- gather (decode): nothing is shared, so each token's records are decoded and multiplied alone.

Dense does (distinct slots / K) times the products of gather, on one large matrix instead of T
small ones, and decodes (distinct slots / (T K)) times the records. Decoding dominates, so dense is
taken when a record is listed DENSE_SHARE times on average. A block with a record that is not
finite goes by gather: in the dense product, 0 x NaN would reach tokens that do not list it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import RecordLayout

from .kv_store import read_records
from .matmul import bf16_operands
from .norm_rope import inverse_rope
from .paged import valid_slots

DENSE_SHARE = 2
# Query tokens of one block; fewer when heads x slots would need more than 128 MB of scores.
BLOCK_TOKENS = 128
MAX_SCORES = 1 << 25
# Values decoded at once by gather: 64 MB of float32.
MAX_GATHERED = 1 << 24


@dataclass(frozen=True)
class _Source:
    """One pool and the slots [T, K] listed in it."""

    slots: Tensor
    pool: Tensor
    layout: RecordLayout

    def block(self, start: int, stop: int) -> "_Source":
        valid = valid_slots(self.pool, self.slots[start:stop], self.layout.page_size)
        slots = self.slots[start:stop].long().masked_fill(~valid, -1)
        return _Source(slots, self.pool, self.layout)


def _softmax(scores: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """exp(scale * scores + bias - peak), in place, and log-sum-exp, over the last axis."""
    scores.mul_(scale).add_(bias)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak.masked_fill(peak == -torch.inf, 0.0)).exp_()
    return weights, weights.sum(dim=-1).log_().add_(peak.squeeze(-1))


def _gather(q: Tensor, sources: list[_Source], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(unnormalised output, sum of weights, lse) of each token's own records."""
    num_tokens, _, dim = q.shape
    records = torch.cat(
        [
            read_records(s.pool, s.slots.flatten(), s.layout).view(num_tokens, -1, dim)
            for s in sources
        ],
        dim=1,
    )
    listed = torch.cat([s.slots >= 0 for s in sources], dim=1)
    bias = torch.zeros_like(listed, dtype=torch.float32).masked_fill_(~listed, -torch.inf)
    reduced = q.dtype is torch.bfloat16
    with bf16_operands(reduced):
        scores = torch.bmm(q.float(), records.mT)
    weights, lse = _softmax(scores, bias.unsqueeze(1), scale)
    with bf16_operands(reduced):
        return torch.bmm(weights, records), weights.sum(dim=-1), lse


def _gather_in_steps(
    q: Tensor, sources: list[_Source], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_gather` over as many tokens at a time as MAX_GATHERED allows."""
    listed = sum(s.slots.shape[1] for s in sources)
    step = max(1, MAX_GATHERED // (listed * q.shape[2]))
    pieces = [
        _gather(q[i : i + step], [s.block(i, i + step) for s in sources], scale)
        for i in range(0, len(q), step)
    ]
    out, total, lse = (torch.cat(piece) for piece in zip(*pieces, strict=True))
    return out, total, lse


def _dense(q: Tensor, sources: list[_Source], scale: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """As `_gather`, over the block's distinct records; None where gather must be used."""
    num_tokens, num_heads, dim = q.shape
    distinct = [torch.unique(s.slots, return_inverse=True) for s in sources]
    num_distinct = sum(len(slots) for slots, _ in distinct)
    if DENSE_SHARE * num_distinct > sum(s.slots.numel() for s in sources):
        return None
    records = torch.cat(
        [
            read_records(s.pool, slots, s.layout)
            for s, (slots, _) in zip(sources, distinct, strict=True)
        ]
    )
    if not records.isfinite().all():
        return None
    count = torch.cat(
        [
            q.new_zeros(num_tokens, len(slots), dtype=torch.float32).scatter_add_(
                1, inverse, (s.slots >= 0).float()
            )
            for s, (slots, inverse) in zip(sources, distinct, strict=True)
        ],
        dim=1,
    )
    reduced = q.dtype is torch.bfloat16
    with bf16_operands(reduced):
        scores = (q.float().reshape(-1, dim) @ records.mT).view(num_tokens, num_heads, -1)
    weights, lse = _softmax(scores, count.log_().unsqueeze(1), scale)
    with bf16_operands(reduced):
        out = (weights.flatten(0, 1) @ records).view(num_tokens, num_heads, dim)
    return out, weights.sum(dim=-1), lse


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
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the records that its lists name.

    Args: q float [T, H, head_dim]; window_slots integer [T, Kw] and comp_slots integer [T, Kc], a
    slot outside its pool (-1) is unused and a repeated slot counts each time; pools uint8
    [num_pages, page_bytes]; the three comp arguments are None together; sinks float [H];
    comp_lengths integer [T], or None for all: only places of comp_slots[t] below comp_lengths[t]
    are looked at, none where it is 0 or less; rotation: (positions integer [T], table float32
    [max_position, rope_dim]), by which `inverse_rope` turns the output back before it is rounded to
    q's dtype.
    Returns (out [T, H, head_dim] in q's dtype, multiplied by out_scale; lse float32 [T, H], natural
    log-sum-exp of the scaled scores over the records only, without the sink). A token whose lists
    are empty gets out 0 and lse -inf, whatever the sink.
    With q in bf16, products take bf16 operands (exact but for the softmax weights, 2^-9 relative)
    and sum in float32 (`matmul`); with q in float32 everything is float32.
    """
    sources = [_Source(window_slots, window_pool, window_layout)]
    if comp_slots is not None and comp_pool is not None and comp_layout is not None:
        if comp_lengths is not None:
            place = torch.arange(comp_slots.shape[1], device=comp_slots.device)
            comp_slots = comp_slots.masked_fill(place >= comp_lengths.unsqueeze(1), -1)
        sources.append(_Source(comp_slots, comp_pool, comp_layout))
    num_tokens, num_heads = q.shape[:2]
    out = torch.zeros_like(q)
    lse = q.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    listed = sum(s.slots.shape[1] for s in sources)
    if listed == 0:
        return out, lse
    block = max(16, min(BLOCK_TOKENS, MAX_SCORES // (num_heads * (listed + BLOCK_TOKENS))))
    for start in range(0, num_tokens, block):
        stop = min(start + block, num_tokens)
        part = [s.block(start, stop) for s in sources]
        result = _dense(q[start:stop], part, softmax_scale)
        if result is None:
            result = _gather_in_steps(q[start:stop], part, softmax_scale)
        summed, total, lse[start:stop] = result
        gain = torch.sigmoid(lse[start:stop] - sinks.float()) * (out_scale / total)
        summed = summed * gain.masked_fill(total == 0, 0.0).unsqueeze(-1)
        if rotation is not None:
            positions, table = rotation
            summed = inverse_rope(summed, positions[start:stop], table)
        out[start:stop] = summed.to(q.dtype)
    return out, lse

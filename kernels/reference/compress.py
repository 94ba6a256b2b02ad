"""Compressor of CSA and HCA (paper sections 2.3.1 eqs. 9-12 and 2.3.2 eqs. 20-23).

Each window of `ratio` tokens becomes one entry: per channel, a softmax over the window's gates
weights the window's values. CSA (ratio 4) overlaps: kv and gate carry two series of d channels, and
a window takes the first series from the previous window's 4 tokens, the second from its own 4.
Tokens whose window is not complete wait in the float32 state, gate bias already added.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout

from .hadamard import hadamard_transform
from .indexer_key import write_indexer_keys
from .kv_store import write_records
from .norm_rope import rms_norm
from .rope import apply_rope_tail

OVERLAP_RATIO = 4


@dataclass(frozen=True)
class CompressPlan:
    """Which windows a batch completes and which rows it leaves in the state; all int64 tensors.

    source: [W, n], n = 8 for ratio 4 (4 of the previous window, then 4 of the current), else
        ratio. A value in [0, T) is a row of the batch, T + i the i-th state row, -1 no token
        (value 0, gate -inf).
    positions: [W] position of the window's first token.
    slots: [W] destination in the compressed pool; one outside the pool (-1) is padding and skipped.
    write_rows: [M] batch rows stored to the state, after the windows were formed.
    write_locs: [M] their state rows; none may repeat. An entry whose row is not in the batch or
        whose state row is not in the state (-1) is padding and skipped.
    disjoint: no window reads a state row that the batch writes, so the order of the two is free.
    """

    ratio: int
    source: Tensor
    positions: Tensor
    slots: Tensor
    write_rows: Tensor
    write_locs: Tensor
    disjoint: bool = False


def _gather(batch: Tensor, state: Tensor, source: Tensor, fill: float) -> Tensor:
    """Rows of the batch or of the state, [W, m, d]; `fill` where source is -1."""
    num_tokens = batch.shape[0]
    rows = batch.new_full((*source.shape, batch.shape[1]), fill)
    from_batch = (source >= 0) & (source < num_tokens)
    from_state = source >= num_tokens
    rows[from_batch] = batch[source[from_batch]]
    rows[from_state] = state[source[from_state] - num_tokens]
    return rows


def _weighted_sum(kv: Tensor, gate: Tensor) -> Tensor:
    """Softmax over axis 1 of gate [W, n, d] applied to kv; a window without tokens gives 0."""
    peak = gate.amax(dim=1, keepdim=True)
    weight = torch.exp(gate - peak.masked_fill(peak == -torch.inf, 0.0))
    total = weight.sum(dim=1)
    return (weight * kv).sum(dim=1) / total.masked_fill(total == 0, 1.0)


def compress(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    positions: Tensor,
    state: Tensor,
    plan: CompressPlan,
) -> Tensor:
    """Form the windows that the batch completes, then store the rows that later windows need.

    Args: kv, gate float [T, coff * d], coff = 2 for ratio 4 and 1 otherwise; position_bias float
    [ratio, coff * d]; positions integer [T]; state float32 [S, 2 * coff * d], rows
    (kv, gate + bias), read and then updated in place.
    Returns float32 [W, d], before the norm.
    """
    kv = kv.float()
    gate = gate.float() + position_bias.float()[positions.long() % plan.ratio]
    width = kv.shape[1]
    state_kv, state_gate = state[:, :width], state[:, width:]
    if plan.ratio == OVERLAP_RATIO:
        d = width // 2
        previous, current = plan.source[:, :OVERLAP_RATIO], plan.source[:, OVERLAP_RATIO:]
        series = [(previous, slice(0, d)), (current, slice(d, width))]
    else:
        series = [(plan.source, slice(0, width))]
    values = [_gather(kv[:, part], state_kv[:, part], rows, 0.0) for rows, part in series]
    gates = [_gather(gate[:, part], state_gate[:, part], rows, -torch.inf) for rows, part in series]
    entries = _weighted_sum(torch.cat(values, dim=1), torch.cat(gates, dim=1))

    kept = (plan.write_locs >= 0) & (plan.write_locs < state.shape[0])
    kept &= (plan.write_rows >= 0) & (plan.write_rows < kv.shape[0])
    rows, locs = plan.write_rows[kept], plan.write_locs[kept]
    state[locs] = torch.cat((kv[rows], gate[rows]), dim=-1)
    return entries


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
    """`compress`, weighted RMSNorm, RoPE at the window's first position, encode and insert.

    Args: as `compress`; norm_weight float [d], with the layer's power-of-two factor in it for
    records; table float32 [max_position, rope_dim]; pool uint8 [num_pages, page_bytes]. An
    IndexerLayout also applies the Hadamard transform, in both of its formats.
    Float32 up to the one rounding of the stored format.
    """
    entries = compress(kv, gate, position_bias, positions, state, plan)
    entries = apply_rope_tail(rms_norm(entries, norm_weight, eps), plan.positions, table)
    if isinstance(layout, IndexerLayout):
        write_indexer_keys(hadamard_transform(entries), plan.slots, pool, layout)
    else:
        write_records(entries, plan.slots, pool, layout)

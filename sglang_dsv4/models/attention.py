"""Attention of one layer (paper section 2.3): window, compressed entries, one softmax, one sink."""

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dsv4.attention.backend import Dsv4AttentionBackend
from sglang_dsv4.attention.metadata import EntryLists
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.cache.outer_scale import outer_scale
from sglang_dsv4.config import LayerKind, ModelDims
from sglang_dsv4.layers.grouped_linear import GroupedLinear
from sglang_dsv4.layers.quant_config import Dsv4QuantConfig
from sglang_dsv4.models.branches import Branches
from sglang_dsv4.models.compressor import Compressor, Indexer

COMPRESS, KEYS, QUERY = 0, 1, 2
"""Branches of a layer with compressed entries: entries, indexer keys, queries with window records.

The main stream meanwhile computes the low-rank query and, in CSA layers, scores and selects.
"""


class Attention(nn.Module):
    """Shared-KV multi-query attention: one KV head of width 512 that is both K and V.

    ``q_a_kv_proj`` holds the checkpoint's ``q_a_proj`` and ``kv_proj``. Under tensor parallelism
    the query heads, ``sinks``, the groups of ``o_a_proj`` and the rows of ``o_b_proj`` are split;
    everything that feeds the shared KV is on every rank.
    """

    def __init__(
        self,
        dims: ModelDims,
        layer_id: int,
        quant: Dsv4QuantConfig,
        branches: Branches,
        prefix: str,
    ) -> None:
        super().__init__()
        self.dims, self.layer_id, self.branches = dims, layer_id, branches
        self.kind = dims.layer_kinds[layer_id]
        tp = get_parallel().attn_tp_size
        self.heads, self.groups = dims.num_attention_heads // tp, dims.o_groups // tp
        self.eps, self.softmax_scale = dims.rms_norm_eps, dims.head_dim**-0.5
        self.q_a_kv_proj = ReplicatedLinear(
            dims.hidden_size,
            dims.q_lora_rank + dims.head_dim,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.q_a_kv_proj",
        )
        self.q_a_norm = RMSNorm(dims.q_lora_rank, self.eps)
        self.q_b_proj = ColumnParallelLinear(
            dims.q_lora_rank,
            dims.num_attention_heads * dims.head_dim,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.q_b_proj",
        )
        self.kv_norm = RMSNorm(dims.head_dim, self.eps)
        self.o_a_proj = GroupedLinear(dims, quant, prefix=f"{prefix}.o_a_proj")
        self.o_b_proj = RowParallelLinear(
            dims.o_groups * dims.o_lora_rank,
            dims.hidden_size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.o_b_proj",
        )
        self.sinks = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.compressor: Compressor | None = None
        if self.kind is not LayerKind.SWA:
            name = f"{prefix}.compressor"
            self.compressor = Compressor(dims, dims.head_dim, self.kind.ratio, quant, name)
            if self.kind is LayerKind.CSA:
                self.compressor.indexer = Indexer(dims, quant, f"{name}.indexer")
        self.record_scale = 1.0

    def set_record_scale(self, kv_format: KVFormat) -> float:
        """Choose the power of two s of ``cache.outer_scale`` and fold it into the KV norms."""
        norms = [self.kv_norm.weight]
        if self.compressor is not None:
            norms.append(self.compressor.kv_norm.weight)
        for weight in norms:
            weight.data.div_(self.record_scale)
        self.record_scale = outer_scale(norms, kv_format)
        for weight in norms:
            weight.data.mul_(self.record_scale)
        return self.record_scale

    def forward(
        self, hidden: torch.Tensor, rope_table: torch.Tensor, backend: Dsv4AttentionBackend
    ) -> torch.Tensor:
        """Hidden [T, D] -> [T, D]."""
        weights = self._compress(hidden, rope_table, backend)
        q_a, kv = self.q_a_kv_proj(hidden)[0].split(
            [self.dims.q_lora_rank, self.dims.head_dim], dim=-1
        )
        q_residual = self.q_a_norm(q_a)
        entries = None if self.compressor is None else backend.forward_metadata.hca_entries
        if weights is None:
            q = self._query(q_residual, kv, rope_table, backend)
        else:
            with self.branches.beside(QUERY):
                q = self._query(q_residual, kv, rope_table, backend)
            entries = self._select(q_residual, weights, rope_table, backend)
            self.branches.join(QUERY)
        if self.compressor is not None:
            self.branches.join(COMPRESS)
        out = backend.attend(
            self.layer_id,
            q,
            entries,
            self.sinks,
            self.softmax_scale / self.record_scale,
            1.0 / self.record_scale,
            rope_table,
        )
        return self.o_b_proj(self.o_a_proj(out.flatten(1).unflatten(1, (self.groups, -1))))[0]

    def _compress(
        self, hidden: torch.Tensor, rope_table: torch.Tensor, backend: Dsv4AttentionBackend
    ) -> torch.Tensor | None:
        """Write this pass's compressed entries and indexer keys, in branches; the head weights."""
        if self.compressor is None:
            return None
        with self.branches.beside(COMPRESS):
            kv, gate = self.compressor.kv_gate(hidden)
            backend.compress(
                self.layer_id,
                self.kind.ratio,
                kv,
                gate,
                self.compressor.position_bias,
                self.compressor.kv_norm.weight,
                self.eps,
                rope_table,
            )
        if self.compressor.indexer is None:
            return None
        with self.branches.beside(KEYS):
            return self.compressor.indexer.write_keys(self.layer_id, hidden, rope_table, backend)

    def _query(
        self,
        q_residual: torch.Tensor,
        kv: torch.Tensor,
        rope_table: torch.Tensor,
        backend: Dsv4AttentionBackend,
    ) -> torch.Tensor:
        """The rotated queries [T, H, 512]; this pass's window records are written, too."""
        q = self.q_b_proj(q_residual)[0].unflatten(-1, (self.heads, self.dims.head_dim))
        q = backend.ops.q_norm_rope(q, backend.forward_metadata.positions, rope_table, self.eps)
        backend.store_window(self.layer_id, kv, self.kv_norm.weight, self.eps, rope_table)
        return q

    def _select(
        self,
        q_residual: torch.Tensor,
        weights: torch.Tensor,
        rope_table: torch.Tensor,
        backend: Dsv4AttentionBackend,
    ) -> EntryLists:
        """The entries that each token attends to in a CSA layer, once all keys are written."""
        assert self.compressor is not None
        assert self.compressor.indexer is not None
        indexer = self.compressor.indexer
        q = indexer.query(q_residual, rope_table, backend)
        self.branches.join(KEYS)
        return backend.select(self.layer_id, q, weights, indexer.topk)

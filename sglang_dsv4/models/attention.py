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
from sglang_dsv4.models.compressor import Compressor, Indexer


class Attention(nn.Module):
    """Shared-KV multi-query attention: one KV head of width 512 that is both K and V.

    ``q_a_kv_proj`` holds the checkpoint's ``q_a_proj`` and ``kv_proj``. Under tensor parallelism
    the query heads, ``sinks``, the groups of ``o_a_proj`` and the rows of ``o_b_proj`` are split;
    everything that feeds the shared KV is on every rank.
    """

    def __init__(self, dims: ModelDims, layer_id: int, quant: Dsv4QuantConfig, prefix: str) -> None:
        super().__init__()
        self.dims, self.layer_id = dims, layer_id
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
        dims, positions = self.dims, backend.forward_metadata.positions
        q_a, kv = self.q_a_kv_proj(hidden)[0].split([dims.q_lora_rank, dims.head_dim], dim=-1)
        q_residual = self.q_a_norm(q_a)
        q = self.q_b_proj(q_residual)[0].unflatten(-1, (self.heads, dims.head_dim))
        q = backend.ops.q_norm_rope(q, positions, rope_table, self.eps)
        backend.store_window(self.layer_id, kv, self.kv_norm.weight, self.eps, rope_table)
        out = backend.attend(
            self.layer_id,
            q,
            self._entries(hidden, q_residual, rope_table, backend),
            self.sinks,
            self.softmax_scale / self.record_scale,
            1.0 / self.record_scale,
        )
        # K is V, so V carries the rotation of its position; turning the sum back by the query's
        # position leaves the contribution of each entry a function of the distance.
        out = backend.ops.inverse_rope(out, positions, rope_table)
        return self.o_b_proj(self.o_a_proj(out.flatten(1).unflatten(1, (self.groups, -1))))[0]

    def _entries(
        self,
        hidden: torch.Tensor,
        q_residual: torch.Tensor,
        rope_table: torch.Tensor,
        backend: Dsv4AttentionBackend,
    ) -> EntryLists | None:
        """Write this pass's compressed entries; those that each token attends to, None for SWA."""
        if self.compressor is None:
            return None
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
        indexer = self.compressor.indexer
        if indexer is None:
            return backend.forward_metadata.hca_entries
        return indexer(self.layer_id, hidden, q_residual, rope_table, backend)

"""Token-level compression of KV (paper sections 2.3.1 and 2.3.2) and the lightning indexer."""

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from torch import nn

from sglang_dsv4.attention.backend import Dsv4AttentionBackend
from sglang_dsv4.config import ModelDims
from sglang_dsv4.layers.quant_config import Dsv4QuantConfig


class Compressor(nn.Module):
    """One entry of width d out of every ``ratio`` tokens, a softmax-gated sum a channel.

    HCA (ratio 128): entry w sums its own 128 tokens (eqs. 20-23). CSA (ratio 4): each token carries
    two series of width d; entry w sums the first series of window w - 1 and the second series of
    window w (eqs. 9-12). ``kv_gate_proj`` holds the checkpoint's ``kv_proj`` and ``gate_proj``.
    """

    def __init__(
        self, dims: ModelDims, width: int, ratio: int, quant: Dsv4QuantConfig, prefix: str
    ) -> None:
        super().__init__()
        self.ratio, self.eps = ratio, dims.rms_norm_eps
        series = width * (2 if ratio == 4 else 1)
        self.kv_gate_proj = ReplicatedLinear(
            dims.hidden_size,
            2 * series,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.kv_gate_proj",
        )
        self.position_bias = nn.Parameter(torch.empty(ratio, series, dtype=torch.float32))
        self.kv_norm = RMSNorm(width, dims.rms_norm_eps)
        self.indexer: Indexer | None = None

    def kv_gate(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden [T, D] -> kv, gate, each [T, coff * width] (eqs. 9, 10, 20, 21)."""
        kv, gate = self.kv_gate_proj(hidden)[0].chunk(2, dim=-1)
        return kv, gate


class Scorer(nn.Module):
    """Weight of each index head for each token (eq. 16), the score's scales included."""

    def __init__(self, dims: ModelDims, quant: Dsv4QuantConfig, prefix: str) -> None:
        super().__init__()
        # One float32 value with an axis: the product is float32, in one launch.
        scale = dims.index_head_dim**-0.5 * dims.index_n_heads**-0.5
        self.register_buffer(
            "scale", torch.full((1,), scale, dtype=torch.float32), persistent=False
        )
        self.weights_proj = ReplicatedLinear(
            dims.hidden_size,
            dims.index_n_heads,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.weights_proj",
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [T, D] -> float32 [T, index heads]."""
        return self.weights_proj(hidden)[0] * self.scale


class Indexer(Compressor):
    """Picks the compressed entries that a CSA query attends to (eqs. 13-17)."""

    def __init__(self, dims: ModelDims, quant: Dsv4QuantConfig, prefix: str) -> None:
        super().__init__(dims, dims.index_head_dim, 4, quant, prefix)
        self.heads, self.width, self.topk = (
            dims.index_n_heads,
            dims.index_head_dim,
            dims.index_topk,
        )
        self.q_b_proj = ReplicatedLinear(
            dims.q_lora_rank,
            self.heads * self.width,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.q_b_proj",
        )
        self.scorer = Scorer(dims, quant, f"{prefix}.scorer")

    def write_keys(
        self,
        layer_id: int,
        hidden: torch.Tensor,
        rope_table: torch.Tensor,
        backend: Dsv4AttentionBackend,
    ) -> torch.Tensor:
        """Write the keys of this pass; the weight of each index head, float32 [T, index heads]."""
        kv, gate = self.kv_gate(hidden)
        backend.compress_indexer_keys(
            layer_id, kv, gate, self.position_bias, self.kv_norm.weight, self.eps, rope_table
        )
        return self.scorer(hidden)

    def query(
        self, q_residual: torch.Tensor, rope_table: torch.Tensor, backend: Dsv4AttentionBackend
    ) -> torch.Tensor:
        """q_residual [T, q_lora_rank] -> rotated and transformed queries [T, index heads, 128]."""
        q = self.q_b_proj(q_residual)[0].unflatten(-1, (self.heads, self.width))
        return backend.indexer_query(q, rope_table)

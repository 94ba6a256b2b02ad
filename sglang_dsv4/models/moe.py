"""Mixture of experts (paper section 2.1): hash-routed first layers, then top-k with a bias."""

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dsv4.config import ModelDims
from sglang_dsv4.layers.activation import swiglu
from sglang_dsv4.layers.quant_config import Dsv4QuantConfig
from sglang_dsv4.layers.routing import route_hash, route_topk, router_logits
from sglang_dsv4.models.branches import Branches

SHARED = 0
"""Branch of the shared expert."""


class Gate(nn.Module):
    """Router: s = sqrt(softplus(x W)); weights are s over its sum, whatever chose the experts.

    A hash layer takes the experts of ``tid2eid[token]``; another the ``top_k`` largest of
    s + ``e_score_correction_bias``.
    """

    def __init__(self, dims: ModelDims, layer_id: int) -> None:
        super().__init__()
        self.dims = dims
        self.weight = nn.Parameter(torch.empty(dims.n_routed_experts, dims.hidden_size))
        self.is_hash = layer_id < dims.num_hash_layers
        if self.is_hash:
            table = torch.empty(dims.vocab_size, dims.num_experts_per_tok, dtype=torch.int32)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            bias = torch.empty(dims.n_routed_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> StandardTopKOutput:
        """Hidden [T, D], input_ids [T] -> weights float32 [T, k] and expert ids [T, k]."""
        dims = self.dims
        logits = router_logits(hidden, self.weight)
        if self.is_hash:
            weights, ids = route_hash(
                logits,
                self.tid2eid,
                input_ids,
                norm=dims.norm_topk_prob,
                scaling=dims.routed_scaling_factor,
            )
        else:
            weights, ids = route_topk(
                logits,
                self.e_score_correction_bias,
                dims.num_experts_per_tok,
                norm=dims.norm_topk_prob,
                scaling=dims.routed_scaling_factor,
            )
        return StandardTopKOutput(weights, ids, logits)


class SharedExperts(nn.Module):
    """The expert every token passes; ``gate_up_proj`` holds ``gate_proj`` and ``up_proj``."""

    def __init__(self, dims: ModelDims, quant: Dsv4QuantConfig, prefix: str) -> None:
        super().__init__()
        inner = dims.moe_intermediate_size * dims.n_shared_experts
        self.limit = dims.swiglu_limit
        self.gate_up_proj = MergedColumnParallelLinear(
            dims.hidden_size,
            [inner, inner],
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            inner,
            dims.hidden_size,
            bias=False,
            reduce_results=False,
            quant_config=quant,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [T, D] -> [T, D], not yet summed over tensor-parallel ranks."""
        return self.down_proj(swiglu(self.gate_up_proj(hidden)[0], self.limit))[0]


def add_shared(routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Routed [T, D], or [T, k, D] where its kernels leave the sum to us, plus shared [T, D]."""
    if routed.dim() == 2:
        return routed + shared
    from sglang_dsv4.layers.expert_sum import expert_sum

    return expert_sum(routed, shared)


class MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(
        self,
        dims: ModelDims,
        layer_id: int,
        quant: Dsv4QuantConfig,
        branches: Branches,
        prefix: str,
    ) -> None:
        super().__init__()
        self.branches = branches
        self.gate = Gate(dims, layer_id)
        self.experts = FusedMoE(
            num_experts=dims.n_routed_experts,
            hidden_size=dims.hidden_size,
            intermediate_size=dims.moe_intermediate_size,
            layer_id=layer_id,
            top_k=dims.num_experts_per_tok,
            quant_config=quant,
            prefix=f"{prefix}.experts",
            inplace=False,
            swiglu_limit=dims.swiglu_limit,
        )
        self.shared_experts = SharedExperts(dims, quant, f"{prefix}.shared_experts")

    def forward(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Hidden [T, D], input_ids [T] -> [T, D]."""
        with self.branches.beside(SHARED):
            shared = self.shared_experts(hidden)
        routed = self.experts(hidden, self.gate(hidden, input_ids))
        self.branches.join(SHARED)
        out = add_shared(routed, shared)
        if get_parallel().tp_size > 1:
            out = tensor_model_parallel_all_reduce(out)
        return out

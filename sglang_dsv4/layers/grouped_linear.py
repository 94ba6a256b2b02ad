"""The grouped first half of the output projection (paper section 2.3.3)."""

from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dsv4.config import ModelDims
from sglang_dsv4.layers.nvfp4_linear import DequantLinearMethod


class GroupedLinear(ColumnParallelLinear):
    """Block-diagonal: each of g groups of heads has its own [o_lora_rank, heads / g * 512] block.

    The weight is [g * o_lora_rank, heads / g * 512], the checkpoint's ``o_a_proj``; tensor
    parallelism splits the groups. Its weight methods take x [T, groups, in].
    """

    def __init__(self, dims: ModelDims, quant: QuantizationConfig, prefix: str) -> None:
        self.o_lora_rank = dims.o_lora_rank
        super().__init__(
            dims.num_attention_heads * dims.head_dim // dims.o_groups,
            dims.o_groups * dims.o_lora_rank,
            bias=False,
            quant_config=quant,
            prefix=prefix,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, groups, in] -> [T, groups * o_lora_rank], for the groups of this rank."""
        return self.quant_method.apply(self, x)


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each group's rows of x times its own block: one batched product, written in token order.

    Args:
        x: [T, g, in], the last axis contiguous.
        weight: [g * out, in], group after group.

    Returns:
        [T, g * out] in x's dtype.
    """
    tokens, groups, width = x.shape
    blocks = weight.view(groups, -1, width)
    out = x.new_empty(tokens, groups, blocks.shape[1])
    with torch.no_grad():
        torch.bmm(x.transpose(0, 1), blocks.mT, out=out.transpose(0, 1))
    return out.flatten(1)


class DenseGroupedMethod(UnquantizedLinearMethod):
    """Plain weights."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, g, in] -> [T, g * out]."""
        return grouped_matmul(x, layer.weight)


class DequantGroupedMethod(DequantLinearMethod):
    """NVFP4 weights, dequantised at load."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, g, in] -> [T, g * out]."""
        return grouped_matmul(x, layer.weight)

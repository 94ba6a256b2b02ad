"""The grouped first half of the output projection (paper section 2.3.3)."""

import torch
from sglang.srt.layers.linear import ColumnParallelLinear

from sglang_dsv4.config import ModelDims
from sglang_dsv4.layers.quant_config import Dsv4QuantConfig


class GroupedLinear(ColumnParallelLinear):
    """Block-diagonal: each of g groups of heads has its own [o_lora_rank, heads / g * 512] block.

    The weight is [g * o_lora_rank, heads / g * 512], the checkpoint's ``o_a_proj``; tensor
    parallelism splits the groups. The method must leave a dense ``weight`` after loading.
    """

    def __init__(self, dims: ModelDims, quant: Dsv4QuantConfig, prefix: str) -> None:
        super().__init__(
            dims.num_attention_heads * dims.head_dim // dims.o_groups,
            dims.o_groups * dims.o_lora_rank,
            bias=False,
            quant_config=quant,
            prefix=prefix,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, groups, in] -> [T, groups * o_lora_rank], for the groups of this rank."""
        groups, width = x.shape[1:]
        blocks = self.weight.view(groups, -1, width)
        return torch.einsum("tgi,goi->tgo", x, blocks).flatten(1)

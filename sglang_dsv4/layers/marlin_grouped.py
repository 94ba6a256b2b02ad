"""The grouped projection on Marlin: each group an expert, the routing fixed, one launch.

Taken only where ``SGLANG_DSV4_NVFP4_WEIGHT_KERNEL=marlin`` asks (``layers.weight_kernels``), since
it was not seen right on a GPU; ``tests/layers/gpu/check_weights.py grouped`` runs it then.
Memory-bound at decode: V4-Flash reads 8 * 1024 * 4096 * (1/2 + 1/16) B = 18.9 MB a layer.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace
from sglang.srt.layers.quantization.utils import get_scalar_types

from sglang_dsv4.layers.marlin import pack_experts, round_up
from sglang_dsv4.layers.nvfp4_linear import Nvfp4LinearMethod

_BLOCK_ROWS = (8, 16, 32, 48, 64)


class Routing(NamedTuple):
    """Marlin's tables for rows that alternate between the groups.

    ``rows`` int32 [padded], each block's rows of x (tokens * groups where there is none);
    ``groups`` int32 [padded / block], the group of each block, ascending; ``counts`` int32 [2],
    padded rows in all, and blocks without a group (0).
    """

    block: int
    rows: torch.Tensor
    groups: torch.Tensor
    counts: torch.Tensor


def block_rows(tokens: int) -> int:
    """Rows of a Marlin block for ``tokens`` rows a group, chosen as SGLang does for experts."""
    return next((rows for rows in _BLOCK_ROWS if tokens / rows < 0.9), _BLOCK_ROWS[-1])


def group_routing(tokens: int, groups: int, device: torch.device) -> Routing:
    """Row t * groups + g of x goes to group g. No copy from the host, so it can be captured."""
    block = block_rows(tokens)
    padded = round_up(tokens, block)
    token = torch.arange(padded, dtype=torch.int32, device=device)
    group = torch.arange(groups, dtype=torch.int32, device=device)[:, None]
    rows = (token * groups + group).masked_fill_(token >= tokens, tokens * groups)
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    counts[0].fill_(padded * groups)
    blocks = group.expand(groups, padded // block).reshape(-1)
    return Routing(block, rows.flatten(), blocks, counts)


class RoutingCache:
    """Tables of the latest batch sizes, shared by all layers.

    A table made while a CUDA graph is captured is filled by that graph's replay only, so it is not
    kept for others; the warm-up before a capture leaves one for the capture to find.
    """

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self.tables: OrderedDict[tuple[int, int, torch.device], Routing] = OrderedDict()

    def get(self, tokens: int, groups: int, device: torch.device) -> Routing:
        """The table for that batch size."""
        key = (tokens, groups, device)
        table = self.tables.get(key)
        if table is None:
            table = group_routing(tokens, groups, device)
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return table
            self.tables[key] = table
            if len(self.tables) > self.size:
                self.tables.popitem(last=False)
        else:
            self.tables.move_to_end(key)
        return table


_ROUTINGS = RoutingCache()


class MarlinGroupedMethod(Nvfp4LinearMethod):
    """``layers.grouped_linear.GroupedLinear`` with NVFP4 weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack each group's block.

        Raises:
            UnsupportedError: a block's shape is no multiple of Marlin's tiles.
        """
        groups = layer.weight.shape[0] // layer.o_lora_rank
        packed = pack_experts(
            layer.weight.data.unflatten(0, (groups, layer.o_lora_rank)),
            layer.weight_scale.data.unflatten(0, (groups, layer.o_lora_rank)),
            layer.weight_scale_2.data.max().repeat(groups),
        )
        for name in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            delattr(layer, name)
        for name, value in zip(("weight", "weight_scale", "weight_scale_2"), packed, strict=True):
            layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        layer.workspace = marlin_make_workspace(layer.weight.device, max_blocks_per_sm=4)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x bfloat16 [T, g, in] -> [T, g * o_lora_rank]."""
        from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm

        tokens, groups, width = x.shape
        routing = _ROUTINGS.get(tokens, groups, x.device)
        out = moe_wna16_marlin_gemm(
            x.reshape(tokens * groups, width),
            x.new_empty(tokens * groups, layer.o_lora_rank),
            layer.weight,
            None,
            layer.weight_scale,
            layer.weight_scale_2,
            None,
            None,
            None,
            layer.workspace,
            routing.rows,
            routing.groups,
            routing.counts,
            x.new_empty(0, dtype=torch.float32),
            moe_block_size=routing.block,
            top_k=1,
            mul_topk_weights=False,
            is_ep=False,
            b_q_type=get_scalar_types()[1].float4_e2m1f,
            size_m=tokens * groups,
            size_n=layer.o_lora_rank,
            size_k=width,
            use_fp32_reduce=True,
            expert_ids_are_sorted=True,
            has_inactive_prefix_count=True,
        )
        return out.view(tokens, -1)

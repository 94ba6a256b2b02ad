"""NVFP4 routed experts by this project's CuTeDSL kernels on records (``kernels.experts``): W4A16.

``input_scale`` is not used. Few rows an expert are multiplied from the 4-bit weights
(``experts_decode``); on sm_90 many are multiplied by weights widened in parts
(``experts_prefill``). The width of the experts is padded with zeros to 64, the hidden size
of every DeepSeek-V4 fits.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.experts.grouped import experts_decode, prepare
from sglang_dsv4.kernels.linear.records import COLUMNS, ROWS, pack_records
from sglang_dsv4.kernels.linear.widen import DIVISOR, widen
from sglang_dsv4.layers.expert_products import Source
from sglang_dsv4.layers.experts_prefill import (
    ROWS_WORTH,
    products,
    products_fp8,
    worthwhile,
)
from sglang_dsv4.layers.nvfp4_linear import replace_parameters
from sglang_dsv4.layers.nvfp4_moe import Nvfp4MoEMethod, pad_experts, share_outer_scale

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, DispatchOutput


def source(records: torch.Tensor, outer: torch.Tensor, fp8: bool = False) -> Source:
    """Experts in records as ``experts_prefill`` takes them, widened to bfloat16 or e4m3.

    Args: records: uint8 [E, out / 16, in / 64, 576]; outer: float32 [E].
    """
    experts, down, across = records.shape[:3]
    undo = DIVISOR[torch.float8_e4m3fn if fp8 else torch.bfloat16]
    return Source(
        experts, down * ROWS, across * COLUMNS, outer, undo, functools.partial(widen, records)
    )


def _matrices(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate and up, and down, in records, and their outer scales."""
    return layer.w13_weight, layer.w2_weight, layer.w13_weight_scale_2, layer.w2_weight_scale_2


class CuteMoEMethod(Nvfp4MoEMethod):
    """Routed experts; their sum over a token's choices is left to the caller.

    Args:
        fp8: large batches are multiplied in FP8 (``prefill_precision``).
    """

    def __init__(self, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Keep the clamp and the number of choices; there is no runner of SGLang's."""
        self.clamp, self.top_k = moe_runner_config.swiglu_limit, moe_runner_config.top_k

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pad, reorder, drop the checkpoint's layout, and compile what the layer will run on.

        Raises:
            UnsupportedError: the hidden size is no multiple of 64.
            CheckpointError: a block scale is negative or NaN.
        """
        hidden = layer.w2_weight.shape[1]
        if hidden % COLUMNS:
            raise UnsupportedError(
                f"The hidden size of NVFP4 experts is {hidden}, wanted a multiple of {COLUMNS}: "
                f"use SGLANG_DSV4_NVFP4_WEIGHT_KERNEL=dequant."
            )
        scale, outer = share_outer_scale(layer.w13_weight_scale.data, layer.w13_weight_scale_2.data)
        layer.w13_weight_scale.data = scale
        pad_experts(layer, COLUMNS)
        for name, scale_2 in (("w13", outer), ("w2", layer.w2_weight_scale_2.data)):
            weight = getattr(layer, f"{name}_weight").data
            records = pack_records(weight, getattr(layer, f"{name}_weight_scale").data)
            outer_scale = scale_2.contiguous()
            replace_parameters(layer, f"{name}_", weight=records, weight_scale_2=outer_scale)
        if layer.w13_weight.is_cuda:
            self._compile(layer)

    def _compile(self, layer: Any) -> None:
        experts, device = layer.w13_weight.shape[0], layer.w13_weight.device
        rows = ROWS_WORTH[self.fp8] * experts
        most = -(-rows // self.top_k)
        prepare(layer.w13_weight, layer.w2_weight, self.top_k, most)
        x = torch.zeros(1, layer.w13_weight.shape[2] * COLUMNS, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(1, self.top_k, dtype=torch.int32, device=device)
        experts_decode(x, *_matrices(layer), ids.float(), ids, self.clamp)
        if worthwhile(ids.expand(rows, -1), experts, self.fp8):
            w13, w2, outer13, outer2 = (part[:1] for part in _matrices(layer))
            self._large(x, w13, w2, outer13, outer2, ids.float(), ids)

    def _large(
        self,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        outer13: torch.Tensor,
        outer2: torch.Tensor,
        routed: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        matrices = source(w13, outer13, self.fp8), source(w2, outer2, self.fp8)
        return (products_fp8 if self.fp8 else products)(x, *matrices, routed, ids, self.clamp)

    def apply(self, layer: Any, dispatch_output: "DispatchOutput") -> "CombineInput":
        """The chosen experts, weighted after the down projection: [T, k, D] or summed, [T, D]."""
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        topk, hidden = dispatch_output.topk_output, dispatch_output.hidden_states
        w13, w2, outer13, outer2 = _matrices(layer)
        routing = (topk.topk_weights, topk.topk_ids, self.clamp)
        if worthwhile(topk.topk_ids, len(w13), self.fp8):
            out = self._large(hidden, *_matrices(layer), *routing[:2])
        else:
            out = experts_decode(hidden, w13, w2, outer13, outer2, *routing)
        return StandardCombineInput(hidden_states=out)

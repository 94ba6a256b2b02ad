"""NVFP4 routed experts: the parameters as the checkpoint stores them, what kernels that keep them
in four bits need done to them, and their bfloat16 form."""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.moe.fused_moe_triton import FusedMoeWeightScaleSupported
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs

from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.layers.dense_moe import DenseMoEMethod
from sglang_dsv4.layers.nvfp4_linear import replace_parameters

_BLOCK = {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
_TENSOR = {"quant_method": FusedMoeWeightScaleSupported.TENSOR.value}


class Nvfp4MoEMethod(FusedMoEMethodBase):
    """Loads w13 (gate rows first) and w2 with their scales; a subclass for each kernel."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register packed weights, block scales, outer scales and input scales of all experts."""
        inner, loader = intermediate_size_per_partition, extra_weight_attrs["weight_loader"]
        e4m3, f32 = torch.float8_e4m3fn, torch.float32
        layer.params_dtype = params_dtype
        for name, shape, dtype, attrs in (
            ("w13_weight", (num_experts, 2 * inner, hidden_size // 2), torch.uint8, {}),
            ("w2_weight", (num_experts, hidden_size, inner // 2), torch.uint8, {}),
            ("w13_weight_scale", (num_experts, 2 * inner, hidden_size // 16), e4m3, _BLOCK),
            ("w2_weight_scale", (num_experts, hidden_size, inner // 16), e4m3, _BLOCK),
            ("w13_weight_scale_2", (num_experts, 2), f32, _TENSOR),
            ("w2_weight_scale_2", (num_experts,), f32, _TENSOR),
            ("w13_input_scale", (num_experts, 2), f32, _TENSOR),
            ("w2_input_scale", (num_experts,), f32, _TENSOR),
        ):
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {"weight_loader": loader, **attrs})


def share_outer_scale(
    scale: torch.Tensor, scale_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One outer scale for an expert's gate and up halves; ModelOpt already exports them equal.

    The smaller half's block scales are multiplied by its outer scale over the larger (<= 1, so none
    saturates) and rounded to e4m3 again, as ``checkpoint.scales`` does for fused linear layers.

    Args:
        scale: e4m3 [E, 2 I, in / 16], changed in place.
        scale_2: float32 [E, 2].

    Returns:
        (scale, float32 [E]).
    """
    largest = scale_2.amax(dim=1)
    for expert in (scale_2[:, 0] != scale_2[:, 1]).nonzero().flatten().tolist():
        halves = scale[expert].unflatten(0, (2, -1))
        ratio = scale_2[expert] / largest[expert]
        halves.copy_((halves.float() * ratio[:, None, None]).to(scale.dtype))
    return scale, largest


def pad_experts(layer: Any, multiple: int) -> None:
    """Widen every expert to a multiple with zero weights (silu(0) * 0 = 0), gate and up apart."""
    inner = layer.w2_weight.shape[2] * 2
    extra = -inner % multiple
    if not extra:
        return
    for name in ("w13_weight", "w13_weight_scale"):
        data = getattr(layer, name).data.view(torch.uint8)
        data = F.pad(data.unflatten(1, (2, inner)), (0, 0, 0, extra)).flatten(1, 2)
        getattr(layer, name).data = data.view(getattr(layer, name).dtype)
    for name, values in (("w2_weight", 2), ("w2_weight_scale", 16)):
        data = F.pad(getattr(layer, name).data.view(torch.uint8), (0, extra // values))
        getattr(layer, name).data = data.view(getattr(layer, name).dtype)


class DequantMoEMethod(Nvfp4MoEMethod, DenseMoEMethod):
    """Dequantised once, at load; computed as plain experts afterwards."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed experts by bfloat16 ones, an expert at a time."""
        for name in ("w13", "w2"):
            packed = getattr(layer, f"{name}_weight").data
            scale = getattr(layer, f"{name}_weight_scale").data
            outer = getattr(layer, f"{name}_weight_scale_2").data.view(len(packed), -1)
            shape = (*packed.shape[:2], packed.shape[2] * 2)
            dense = torch.empty(shape, dtype=layer.params_dtype, device=packed.device)
            for expert in range(len(packed)):
                halves = zip(
                    packed[expert].chunk(outer.shape[1]),
                    scale[expert].chunk(outer.shape[1]),
                    outer[expert],
                    strict=True,
                )
                rows = [dequantize_weight(*half).to(layer.params_dtype) for half in halves]
                torch.cat(rows, out=dense[expert])
            replace_parameters(layer, f"{name}_", weight=dense)
        super().process_weights_after_loading(layer)

"""Routed experts with plain weights: w13 [E, 2 I, D] (gate rows first), w2 [E, D, I]."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.reference.moe import moe_experts

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, DispatchOutput


class DenseMoEMethod(FusedMoEMethodBase):
    """Experts as one gated matrix product each, with the clamped SwiGLU of the paper."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``w13_weight`` and ``w2_weight``."""
        inner = intermediate_size_per_partition
        for name, shape in (
            ("w13_weight", (num_experts, 2 * inner, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, inner)),
        ):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, {"weight_loader": extra_weight_attrs["weight_loader"]})

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """No runner: ``apply`` computes directly."""
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the device.

        Raises:
            UnsupportedError: the experts are not on a CPU.
        """
        if layer.w13_weight.device.type != "cpu":
            raise UnsupportedError(
                f"Routed experts are on {layer.w13_weight.device.type}, wanted cpu: "
                f"pass --device cpu."
            )

    def apply(self, layer: Any, dispatch_output: "DispatchOutput") -> "CombineInput":
        """Sum of the chosen experts, weighted before the down projection: [T, D]."""
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        topk = dispatch_output.topk_output
        return StandardCombineInput(
            hidden_states=moe_experts(
                dispatch_output.hidden_states,
                layer.w13_weight,
                layer.w2_weight,
                topk.topk_weights,
                topk.topk_ids,
                self.moe_runner_config.swiglu_limit,
            )
        )

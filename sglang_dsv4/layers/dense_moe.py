"""Routed experts with plain weights: w13 [E, 2 I, D] (gate rows first), w2 [E, D, I]."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.reference.moe import moe_experts

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, DispatchOutput

TRITON_SWIGLU_LIMIT = 10.0
"""The one clamp that SGLang's Triton experts are made for (DeepSeek-V4's)."""


class DenseMoEMethod(FusedMoEMethodBase):
    """Experts with the clamped SwiGLU of the paper: SGLang's Triton kernels on a GPU."""

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
        """SGLang's Triton runner on a GPU; none on a CPU, where ``apply`` computes directly.

        Raises:
            UnsupportedError: the GPU kernels clamp at another limit than the model.
        """
        self.moe_runner_config = moe_runner_config
        if torch.empty(0).device.type == "cpu":
            return
        limit = moe_runner_config.swiglu_limit
        if limit is not None and limit != TRITON_SWIGLU_LIMIT:
            raise UnsupportedError(
                f"Plain experts with swiglu_limit {limit:g} are on a GPU, wanted "
                f"{TRITON_SWIGLU_LIMIT:g}, which SGLang's Triton experts are made for: "
                f"serve a checkpoint with NVFP4 experts, or pass --device cpu."
            )
        self.runner = MoeRunner(MoeRunnerBackend.TRITON, moe_runner_config)

    def apply(self, layer: Any, dispatch_output: "DispatchOutput") -> "CombineInput":
        """Sum of the chosen experts, weighted: [T, D]."""
        if self.runner is not None:
            info = TritonMoeQuantInfo(w13_weight=layer.w13_weight, w2_weight=layer.w2_weight)
            return self.runner.run(dispatch_output, info)
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

"""NVFP4 on Blackwell through FlashInfer: 4-bit weights and 4-bit activations (W4A4). Not run.

SGLang's ModelOpt methods do the work: they swizzle the weights for the chosen FlashInfer kernel and
quantise activations by x / (input_scale * block scale). ``input_scale`` is amax / (6 * 448) over
calibration data. Exports are known to hold NaN or zero there, or nothing: such a linear layer takes
the amax of each call instead, and such experts FlashInfer's per-token scales.
"""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe import get_moe_runner_backend
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

from sglang_dsv4.envs import WEIGHT_KERNEL
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers.nvfp4_linear import Nvfp4LinearMethod, modelopt_config

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, StandardDispatchOutput

AMAX_TO_SCALE = 1.0 / (6.0 * 448.0)
"""input_scale of a largest magnitude: e2m1 ends at 6, e4m3 at 448."""

_SMALLEST_AMAX = 2.0**-64


def usable(input_scale: torch.Tensor) -> torch.Tensor:
    """Which activation scales (float, any shape) can be used: finite and positive."""
    return input_scale.isfinite() & (input_scale > 0)


def scale_of_call(x: torch.Tensor) -> torch.Tensor:
    """The input_scale that calibration on this very call would give: float32 []."""
    return x.abs().amax().float().clamp_(min=_SMALLEST_AMAX).mul_(AMAX_TO_SCALE)


class FlashInferLinearMethod(Nvfp4LinearMethod):
    """A linear layer on the FP4 tensor cores; the kernel is SGLang's ``--fp4-gemm-backend``."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Swizzle the weight; decide whether the activation scale is the checkpoint's."""
        layer.scale_each_call = not bool(usable(layer.input_scale.data).all())
        if layer.scale_each_call:
            layer.input_scale.data.fill_(1.0)
        super().process_weights_after_loading(layer)
        layer.outer_scale = layer.weight_scale_2.data.max().float()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        if layer.scale_each_call and x.numel():
            scale = scale_of_call(x)
            layer.input_scale_inv.data.copy_(scale.reciprocal())
            layer.alpha.data.copy_(scale * layer.outer_scale)
        return super().apply(layer, x, bias)


class FlashInferModelOptMoEMethod(ModelOptNvFp4FusedMoEMethod):
    """Routed experts; SGLang's weight loader knows the layout by "ModelOpt" in this class's name.

    The routed TRT-LLM kernels (sm_100, sm_103) and CUTLASS (sm_120, sm_121) take our expert ids and
    weights as they are, and the clamp of SwiGLU.
    """

    def __init__(self, runner: str) -> None:
        """Args: runner: the value that ``--moe-runner-backend`` must have.

        Raises:
            UnsupportedError: it has another.
        """
        found = get_moe_runner_backend().value
        if found != runner:
            raise UnsupportedError(
                f"The MoE runner backend is {found}, wanted {runner} for NVFP4 experts on this "
                f"GPU: pass --moe-runner-backend {runner}, or set {WEIGHT_KERNEL.name}=marlin."
            )
        super().__init__(modelopt_config())

    def process_weights_after_loading(self, layer: Any) -> None:
        """Give every expert a usable activation scale, then swizzle the weights.

        An expert that no calibration token reached takes the layer's largest scale; the kernels use
        that one for all experts anyhow. Without any, activations are scaled token by token.

        Raises:
            UnsupportedError: there is none and the kernel cannot scale token by token.
        """
        for name in ("w13_input_scale", "w2_input_scale"):
            scale = getattr(layer, name).data
            good = usable(scale)
            if good.all():
                continue
            if good.any():
                scale.masked_fill_(~good, scale[good].max())
                continue
            if not self.enable_flashinfer_trtllm_moe:
                raise UnsupportedError(
                    f"No expert of a layer has a usable {name}, wanted one for the CUTLASS FP4 "
                    f"kernels: calibrate the checkpoint, or set {WEIGHT_KERNEL.name}=marlin."
                )
            self.quant_config.use_per_token_activation = True
            scale.fill_(1.0)
        super().process_weights_after_loading(layer)

    def apply(self, layer: Any, dispatch_output: "StandardDispatchOutput") -> "CombineInput":
        """Sum of the chosen experts, weighted: [T, D]."""
        return super().apply(layer, dispatch_output)

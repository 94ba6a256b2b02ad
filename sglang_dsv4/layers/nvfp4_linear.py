"""NVFP4 linear layers: the parameters as the checkpoint stores them, and their bfloat16 form.

w = e2m1(nibble) * weight_scale * weight_scale_2 (ModelOpt export: weight uint8 [out, in / 2] with
the even column in the low nibble, weight_scale e4m3 [out, in / 16], weight_scale_2 float32).
"""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.modelopt_quant import (
    ModelOptFp4Config,
    ModelOptFp4LinearMethod,
)

from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight


def modelopt_config() -> ModelOptFp4Config:
    """SGLang's description of ModelOpt NVFP4; one for each layer, since SGLang writes to it."""
    return ModelOptFp4Config(
        is_checkpoint_nvfp4_serialized=True,
        group_size=16,
        exclude_modules=[],
        packed_modules_mapping={},
    )


PARAMETERS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
"""What ModelOpt exports for a matrix; of experts with ``w13_`` or ``w2_`` before it."""


def replace_parameters(layer: Any, prefix: str = "", **values: torch.Tensor) -> None:
    """Drop the checkpoint's ``PARAMETERS`` of a matrix, and hold these tensors instead."""
    for name in PARAMETERS:
        delattr(layer, prefix + name)
    for name, value in values.items():
        layer.register_parameter(prefix + name, torch.nn.Parameter(value, requires_grad=False))


class Nvfp4LinearMethod(ModelOptFp4LinearMethod):
    """Parameters as SGLang's ModelOpt method makes them; a subclass for each kernel."""

    def __init__(self) -> None:
        super().__init__(modelopt_config())


class DequantLinearMethod(Nvfp4LinearMethod):
    """Dequantised once, at load: a bfloat16 matrix product afterwards."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weight by its bfloat16 value: [out, in].

        The parts of a fused module share one ``weight_scale_2`` by now (``checkpoint.scales``).
        The product e2m1 * e4m3 * float32 is rounded once, to bfloat16.
        """
        weight = dequantize_weight(
            layer.weight.data, layer.weight_scale.data, layer.weight_scale_2.data.max()
        ).to(layer.params_dtype)
        replace_parameters(layer, weight=weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return F.linear(x, layer.weight, bias)

"""NVFP4 linear layers on sm_90 by this project's Triton kernel (``kernels.linear``): W4A16.

``input_scale`` is not used. Any shape: columns are padded with zeros to blocks of 128, in the
weight only.
"""

from typing import Any

import torch

from sglang_dsv4.kernels.linear.fp8 import fp8_linear, takes
from sglang_dsv4.kernels.linear.linear import counters, nvfp4_linear
from sglang_dsv4.kernels.linear.packing import pack_weight
from sglang_dsv4.layers.nvfp4_linear import Nvfp4LinearMethod, replace_parameters


class TritonLinearMethod(Nvfp4LinearMethod):
    """A linear layer; 4-bit weights stay so in memory.

    Args:
        fp8: large batches are multiplied in FP8 (``prefill_precision``).
    """

    def __init__(self, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8

    def process_weights_after_loading(self, layer: Any) -> None:
        """Reorder the weight.

        The parts of a fused module share one ``weight_scale_2`` by now (``checkpoint.scales``).
        """
        weight, scale = pack_weight(layer.weight.data, layer.weight_scale.data)
        outer = layer.weight_scale_2.data.max().reshape(1)
        replace_parameters(layer, weight=weight, weight_scale=scale, weight_scale_2=outer)
        layer.arrived = counters(weight.shape[0], weight.device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x bfloat16 [..., in] -> [..., out]."""
        weight = (layer.weight, layer.weight_scale, layer.weight_scale_2)
        rows = x.flatten(0, -2)
        if self.fp8 and takes(len(rows), len(layer.weight)):
            out = fp8_linear(rows, *weight)
        else:
            out = nvfp4_linear(rows, *weight, layer.arrived)
        out = out.unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

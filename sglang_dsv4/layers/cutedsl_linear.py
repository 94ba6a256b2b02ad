"""NVFP4 linear layers by this project's CuTeDSL kernel (``kernels.linear.skinny``): W4A16.

``input_scale`` is not used. Any shape: rows are padded with zeros to 16 and columns to 64, in the
weight only.
"""

from typing import Any

import torch

from sglang_dsv4.kernels.linear.fp8 import FP8_TOKENS, fp8_product, takes
from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.linear.skinny import (
    MOST_TOKENS,
    counters,
    planned_tokens,
    records_linear,
)
from sglang_dsv4.kernels.linear.widen import DIVISOR, widen
from sglang_dsv4.layers.nvfp4_linear import Nvfp4LinearMethod, replace_parameters


class CuteLinearMethod(Nvfp4LinearMethod):
    """A linear layer; 4-bit weights stay so in memory.

    Args:
        fp8: large batches are multiplied in FP8 (``prefill_precision``).
    """

    def __init__(self, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8

    def process_weights_after_loading(self, layer: Any) -> None:
        """Reorder the weight, and compile what it will run on.

        The parts of a fused module share one ``weight_scale_2`` by now (``checkpoint.scales``).

        Raises:
            CheckpointError: a block scale is negative or NaN.
        """
        layer.rows = layer.weight.shape[0]
        weight = pack_records(layer.weight.data, layer.weight_scale.data)
        outer = layer.weight_scale_2.data.max().reshape(1)
        replace_parameters(layer, weight=weight, weight_scale_2=outer)
        layer.outer = float(outer)
        layer.fp8_outer = (outer * DIVISOR[torch.float8_e4m3fn]).repeat(layer.rows)
        layer.arrived = counters(layer.rows, weight.device)
        if weight.is_cuda:
            self._compile(layer)

    def _compile(self, layer: Any) -> None:
        """One call for each launch that a number of tokens may take, so that none waits."""
        inputs = layer.input_size_per_partition
        most = FP8_TOKENS if self.fp8 else MOST_TOKENS
        x = torch.zeros(most + 1, inputs, dtype=torch.bfloat16, device=layer.weight.device)
        for tokens in (*planned_tokens(layer.weight, inputs), MOST_TOKENS + 1, len(x)):
            self.apply(layer, x[:tokens])

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x bfloat16 [..., in] -> [..., out]."""
        rows = x.flatten(0, -2)
        if self.fp8 and takes(len(rows), layer.rows):
            out = self._fp8(layer, rows)
        else:
            held = (layer.weight, layer.weight_scale_2, layer.outer)
            out = records_linear(rows, *held, layer.rows, layer.arrived)
        out = out.unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    def _fp8(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        shape = (1, layer.rows, x.shape[1])
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
        widen(layer.weight[None], weight)
        return fp8_product(x, weight[0], layer.fp8_outer)

"""How each module's weight is held, decided from the checkpoint's tensors and the device."""

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dsv4.checkpoint.quant import QuantKind
from sglang_dsv4.errors import CheckpointError, UnsupportedError
from sglang_dsv4.layers.dense_moe import DenseMoEMethod
from sglang_dsv4.layers.flashinfer_fp4 import FlashInferLinearMethod, FlashInferModelOptMoEMethod
from sglang_dsv4.layers.grouped_linear import (
    DenseGroupedMethod,
    DequantGroupedMethod,
    GroupedLinear,
)
from sglang_dsv4.layers.marlin import MarlinLinearMethod, MarlinMoEMethod
from sglang_dsv4.layers.nvfp4_linear import DequantLinearMethod
from sglang_dsv4.layers.nvfp4_moe import DequantMoEMethod
from sglang_dsv4.layers.weight_kernels import WeightKernel, WeightKernels, weight_kernels_of

FUSED_MODULES: Mapping[str, tuple[str, ...]] = {
    "q_a_kv_proj": ("q_a_proj", "kv_proj"),
    "kv_gate_proj": ("kv_proj", "gate_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that hold several projections of the checkpoint, stacked along the output."""


class Dsv4QuantConfig(QuantizationConfig):
    """Chooses the weight method of each module by the ``QuantKind`` of its tensors.

    Args:
        kinds: kind of each quantised module, by its name in the checkpoint's own style
            (``model.layers.2.self_attn.q_a_proj``); a module not named holds plain weights.
        fp8: large batches are multiplied in FP8 (``prefill_precision``).
    """

    def __init__(self, kinds: Mapping[str, QuantKind], fp8: bool = False) -> None:
        super().__init__()
        self.kinds, self.fp8 = kinds, fp8

    def kind_of(self, prefix: str) -> QuantKind:
        """Kind of a module of the model, fused modules included.

        Raises:
            CheckpointError: the parts of a fused module differ in kind.
        """
        parent, _, name = prefix.rpartition(".")
        if name == "experts":
            parts = [f"{prefix}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        else:
            parts = [f"{parent}.{part}" for part in FUSED_MODULES.get(name, (name,))]
        found = {part: self.kinds.get(part, QuantKind.BF16) for part in parts}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{part} is {kind.value}" for part, kind in found.items())
            raise CheckpointError(
                f"The checkpoint quantises projections that are served as one differently "
                f"({listed}), wanted one kind: export the checkpoint with all of them alike."
            )
        return next(iter(found.values()))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The weight method of ``layer``; None for layers that are never quantised.

        Raises:
            UnsupportedError: the kind is one that stock SGLang serves, not this plugin.
        """
        if not isinstance(layer, LinearBase | FusedMoE):
            return None
        kind = self.kind_of(prefix)
        if kind is QuantKind.NVFP4:
            return nvfp4_method(layer, weight_kernels_of(torch.empty(0).device), self.fp8)
        if kind is QuantKind.BF16:
            if isinstance(layer, FusedMoE):
                return DenseMoEMethod()
            if isinstance(layer, GroupedLinear):
                return DenseGroupedMethod()
            return UnquantizedLinearMethod()
        raise UnsupportedError(
            f"The module {prefix} is stored as {kind.value}, wanted NVFP4 or BF16: serve this "
            f"checkpoint with stock SGLang (SGLANG_PLUGINS=none)."
        )

    def get_name(self) -> str:
        """Name of the method in SGLang's logs."""
        return "dsv4_nvfp4"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Activation dtypes."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability below which no GPU is served."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the tensors decide."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Dsv4QuantConfig":
        """Not used: the tensors decide.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "dsv4_nvfp4 quantisation was asked of a config, wanted a checkpoint: "
            "construct Dsv4QuantConfig from the checkpoint's tensors."
        )

    def get_scaled_act_names(self) -> list[str]:
        """No activation carries a scale of its own."""
        return []


def nvfp4_method(
    layer: torch.nn.Module, kernels: WeightKernels, fp8: bool = False
) -> QuantizeMethodBase:
    """The weight method of ``layer``, a linear, grouped or experts layer, on a device."""
    if isinstance(layer, FusedMoE):
        if kernels.experts is WeightKernel.FLASHINFER:
            assert kernels.experts_runner is not None
            return FlashInferModelOptMoEMethod(kernels.experts_runner)
        if kernels.experts is WeightKernel.CUTEDSL:
            # CuTeDSL is imported here, since a CPU needs none.
            from sglang_dsv4.layers.cutedsl_experts import CuteMoEMethod

            return CuteMoEMethod(fp8)
        return MarlinMoEMethod() if kernels.experts is WeightKernel.MARLIN else DequantMoEMethod()
    if isinstance(layer, GroupedLinear):
        return DequantGroupedMethod()
    if kernels.linear is WeightKernel.FLASHINFER:
        return FlashInferLinearMethod()
    if kernels.linear is WeightKernel.CUTEDSL:
        from sglang_dsv4.layers.cutedsl_linear import CuteLinearMethod

        return CuteLinearMethod(fp8)
    return MarlinLinearMethod() if kernels.linear is WeightKernel.MARLIN else DequantLinearMethod()

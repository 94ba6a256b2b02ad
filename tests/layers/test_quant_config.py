"""Which weight method a module gets, by its kind and the device's kernels."""

import pytest
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dsv4.checkpoint.quant import QuantKind
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers import dense_moe, flashinfer_fp4, quant_config
from sglang_dsv4.layers.cutedsl_experts import CuteMoEMethod
from sglang_dsv4.layers.cutedsl_linear import CuteLinearMethod
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
from sglang_dsv4.layers.quant_config import Dsv4QuantConfig, nvfp4_method
from sglang_dsv4.layers.weight_kernels import WeightKernel, weight_kernels


def blank(kind: type) -> object:
    """A layer of a kind that was not built; the choice looks at the kind only."""
    return kind.__new__(kind)


LINEAR, GROUPED, EXPERTS = blank(ReplicatedLinear), blank(GroupedLinear), blank(FusedMoE)


@pytest.mark.parametrize(
    ("capability", "forced", "methods"),
    [
        (None, None, (DequantLinearMethod, DequantGroupedMethod, DequantMoEMethod)),
        ((8, 0), None, (MarlinLinearMethod, DequantGroupedMethod, MarlinMoEMethod)),
        ((9, 0), None, (CuteLinearMethod, DequantGroupedMethod, CuteMoEMethod)),
        (
            (10, 0),
            None,
            (FlashInferLinearMethod, DequantGroupedMethod, FlashInferModelOptMoEMethod),
        ),
        ((10, 0), WeightKernel.CUTEDSL, (CuteLinearMethod, DequantGroupedMethod, CuteMoEMethod)),
        ((9, 0), WeightKernel.MARLIN, (MarlinLinearMethod, DequantGroupedMethod, MarlinMoEMethod)),
        ((12, 0), WeightKernel.MARLIN, (MarlinLinearMethod, DequantGroupedMethod, MarlinMoEMethod)),
        (
            (9, 0),
            WeightKernel.DEQUANT,
            (DequantLinearMethod, DequantGroupedMethod, DequantMoEMethod),
        ),
    ],
)
def test_methods_follow_the_table(monkeypatch, capability, forced, methods):
    monkeypatch.setattr(flashinfer_fp4.FlashInferModelOptMoEMethod, "__init__", lambda *_: None)
    kernels = weight_kernels(capability, forced)
    found = [nvfp4_method(layer, kernels) for layer in (LINEAR, GROUPED, EXPERTS)]
    assert tuple(map(type, found)) == methods


def test_plain_weights_stay_plain():
    config = Dsv4QuantConfig({})
    assert type(config.get_quant_method(LINEAR, "m.q_b_proj")) is UnquantizedLinearMethod
    assert type(config.get_quant_method(GROUPED, "m.o_a_proj")) is DenseGroupedMethod
    assert type(config.get_quant_method(EXPERTS, "m.experts")) is DenseMoEMethod
    assert config.get_quant_method(object(), "m.embed_tokens") is None


def test_other_formats_are_left_to_stock():
    config = Dsv4QuantConfig({"m.q_b_proj": QuantKind.FP8_BLOCK})
    with pytest.raises(UnsupportedError, match=r"m\.q_b_proj is stored as fp8_block"):
        config.get_quant_method(LINEAR, "m.q_b_proj")


@pytest.mark.parametrize(("limit", "fits"), [(10.0, True), (None, True), (7.0, False)])
def test_plain_experts_on_a_gpu_clamp_at_ten(monkeypatch, limit, fits):
    class Elsewhere:
        device = type("Device", (), {"type": "cuda"})

    config = type("Config", (), {"swiglu_limit": limit})
    monkeypatch.setattr(dense_moe.torch, "empty", lambda *_: Elsewhere())
    monkeypatch.setattr(dense_moe, "MoeRunner", lambda backend, _: backend.value)
    method = DenseMoEMethod()
    if fits:
        method.create_moe_runner(None, config)
        assert method.runner == "triton"
        return
    with pytest.raises(UnsupportedError, match="swiglu_limit 7 are on a GPU, wanted 10"):
        method.create_moe_runner(None, config)


def test_the_choice_is_made_for_the_device_of_new_tensors(monkeypatch):
    seen = []

    def choose(device):
        seen.append(device.type)
        return weight_kernels(None)

    monkeypatch.setattr(quant_config, "weight_kernels_of", choose)
    Dsv4QuantConfig({"m.q_b_proj": QuantKind.NVFP4}).get_quant_method(LINEAR, "m.q_b_proj")
    assert seen == ["cpu"]


@pytest.mark.parametrize("fp8", [False, True])
def test_both_kinds_of_layers_are_told_of_fp8(monkeypatch, fp8):
    monkeypatch.setattr(quant_config, "weight_kernels_of", lambda _: weight_kernels((9, 0)))
    parts = ("gate", "up", "down")
    kinds = {f"m.experts.0.{part}_proj": QuantKind.NVFP4 for part in parts}
    kinds |= dict.fromkeys(("m.q_b_proj", "m.o_a_proj"), QuantKind.NVFP4)
    config = Dsv4QuantConfig(kinds, fp8)
    assert config.get_quant_method(LINEAR, "m.q_b_proj").fp8 is fp8
    assert config.get_quant_method(EXPERTS, "m.experts").fp8 is fp8
    assert not hasattr(config.get_quant_method(GROUPED, "m.o_a_proj"), "fp8")

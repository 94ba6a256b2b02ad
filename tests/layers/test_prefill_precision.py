"""When large prefill batches are multiplied in FP8, and what is said where that does not exist."""

import pytest
from test_quant_config import EXPERTS, GROUPED, LINEAR

from sglang_dsv4.envs import PREFILL
from sglang_dsv4.errors import ConfigError, UnsupportedError
from sglang_dsv4.layers.prefill_precision import fp8_prefill
from sglang_dsv4.layers.quant_config import nvfp4_method
from sglang_dsv4.layers.weight_kernels import WeightKernel, weight_kernels

HOPPER = weight_kernels((9, 0))
OTHERS = [
    (None, None, "dequant linear layers and dequant experts on cpu"),
    ((8, 0), None, "marlin linear layers and marlin experts on sm_80"),
    ((9, 0), WeightKernel.MARLIN, "marlin linear layers and marlin experts on sm_90"),
    ((10, 0), WeightKernel.CUTEDSL, "cutedsl linear layers and cutedsl experts on sm_100"),
    ((10, 0), None, "flashinfer linear layers and flashinfer experts on sm_100"),
]


@pytest.mark.parametrize("text", [None, "", "bf16", "BF16"])
def test_bfloat16_unless_asked(monkeypatch, text):
    monkeypatch.delenv(PREFILL.name, raising=False)
    if text is not None:
        monkeypatch.setenv(PREFILL.name, text)
    for capability, forced, _ in OTHERS:
        assert fp8_prefill(weight_kernels(capability, forced)) is False
    assert fp8_prefill(HOPPER) is False
    assert nvfp4_method(LINEAR, HOPPER).fp8 is False
    assert nvfp4_method(EXPERTS, HOPPER).fp8 is False


@pytest.mark.parametrize("forced", [None, WeightKernel.CUTEDSL])
def test_both_kinds_of_layers_are_told(monkeypatch, forced):
    monkeypatch.setenv(PREFILL.name, "fp8")
    kernels = weight_kernels((9, 0), forced)
    assert fp8_prefill(kernels) is True
    assert nvfp4_method(LINEAR, kernels).fp8 is True
    assert nvfp4_method(EXPERTS, kernels).fp8 is True
    assert not hasattr(nvfp4_method(GROUPED, kernels), "fp8")


@pytest.mark.parametrize(("capability", "forced", "found"), OTHERS)
def test_it_is_refused_elsewhere(monkeypatch, capability, forced, found):
    monkeypatch.setenv(PREFILL.name, "fp8")
    with pytest.raises(UnsupportedError) as refused:
        fp8_prefill(weight_kernels(capability, forced))
    assert str(refused.value) == (
        f"{PREFILL.name}=fp8 was asked for with {found}, wanted triton and marlin or cutedsl on "
        f"sm_90: unset it."
    )


def test_another_precision_is_refused(monkeypatch):
    monkeypatch.setenv(PREFILL.name, "fp4")
    with pytest.raises(ConfigError, match=r"is 'fp4', wanted bf16 or fp8: correct or unset it"):
        fp8_prefill(HOPPER)

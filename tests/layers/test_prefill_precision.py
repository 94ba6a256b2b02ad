"""When large prefill batches are multiplied in FP8, and what is said where that does not exist."""

import pytest

from sglang_dsv4.envs import PREFILL
from sglang_dsv4.errors import ConfigError, UnsupportedError
from sglang_dsv4.layers.prefill_precision import choose_prefill, describe
from sglang_dsv4.layers.weight_kernels import WeightKernel, weight_kernels

HOPPER = weight_kernels((9, 0))
OTHERS = [
    (None, None, "dequant linear layers and dequant experts on cpu"),
    ((8, 0), None, "marlin linear layers and marlin experts on sm_80"),
    ((9, 0), WeightKernel.MARLIN, "marlin linear layers and marlin experts on sm_90"),
    ((9, 0), WeightKernel.DEQUANT, "dequant linear layers and dequant experts on sm_90"),
    ((10, 0), WeightKernel.CUTEDSL, "cutedsl linear layers and cutedsl experts on sm_100"),
    ((10, 0), None, "flashinfer linear layers and flashinfer experts on sm_100"),
]


@pytest.fixture(params=[None, "", "auto", " Auto "])
def auto(request, monkeypatch):
    monkeypatch.delenv(PREFILL.name, raising=False)
    if request.param is not None:
        monkeypatch.setenv(PREFILL.name, request.param)


@pytest.mark.parametrize("quantized", [False, True])
def test_the_checkpoint_decides_on_hopper(auto, quantized):
    found = choose_prefill(HOPPER, quantized)
    assert (found.fp8, found.precision) == (quantized, "fp8" if quantized else "bf16")
    assert "input_scale" in found.reason


@pytest.mark.parametrize(("capability", "forced", "_"), OTHERS)
def test_elsewhere_it_is_as_in_small_batches(auto, capability, forced, _):
    kernels = weight_kernels(capability, forced)
    found = choose_prefill(kernels, True)
    four_bits = kernels.linear is WeightKernel.FLASHINFER
    assert (found.fp8, found.precision) == (False, "fp4" if four_bits else "bf16")
    assert ("cutedsl on sm_90" in found.reason) != four_bits


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("text", ["bf16", "FP8"])
@pytest.mark.parametrize("forced", [None, WeightKernel.CUTEDSL])
def test_what_is_asked_for_wins(monkeypatch, text, quantized, forced):
    monkeypatch.setenv(PREFILL.name, text)
    found = choose_prefill(weight_kernels((9, 0), forced), quantized)
    assert (found.precision, found.reason) == (text.lower(), f"{PREFILL.name} asks for it")


@pytest.mark.parametrize(("capability", "forced", "found"), OTHERS)
def test_fp8_is_refused_elsewhere(monkeypatch, capability, forced, found):
    monkeypatch.setenv(PREFILL.name, "fp8")
    with pytest.raises(UnsupportedError) as refused:
        choose_prefill(weight_kernels(capability, forced), True)
    assert str(refused.value) == (
        f"{PREFILL.name}=fp8 was asked for with {found}, wanted cutedsl on sm_90: unset it."
    )


@pytest.mark.parametrize(("capability", "forced", "_"), OTHERS)
def test_bfloat16_may_be_asked_for_anywhere(monkeypatch, capability, forced, _):
    monkeypatch.setenv(PREFILL.name, "bf16")
    assert not choose_prefill(weight_kernels(capability, forced), True).fp8


def test_another_precision_is_refused(monkeypatch):
    monkeypatch.setenv(PREFILL.name, "fp4")
    with pytest.raises(ConfigError, match=r"is 'fp4', wanted auto, bf16 or fp8: correct or unset"):
        choose_prefill(HOPPER, True)


def test_the_log_line_names_precision_and_reason(monkeypatch):
    monkeypatch.delenv(PREFILL.name, raising=False)
    assert describe(choose_prefill(HOPPER, True)) == (
        "large prefill batches in fp8: the checkpoint has an input_scale for every packed matrix"
    )

"""Which kernel each architecture gets, and the sentences where there is none."""

import pytest
import torch

from sglang_dsv4.envs import WEIGHT_KERNEL
from sglang_dsv4.errors import ConfigError, UnsupportedError
from sglang_dsv4.layers import weight_kernels as table
from sglang_dsv4.layers.weight_kernels import WeightKernel, describe, weight_kernels

DEQUANT, MARLIN, FLASHINFER = WeightKernel.DEQUANT, WeightKernel.MARLIN, WeightKernel.FLASHINFER
CUTEDSL = WeightKernel.CUTEDSL
BEFORE_HOPPER = [(8, 0), (8, 6), (8, 7), (8, 9)]
HOPPER = (9, 0)
BLACKWELL = {
    (10, 0): "flashinfer_trtllm_routed",
    (10, 3): "flashinfer_trtllm_routed",
    (12, 0): "flashinfer_cutlass",
    (12, 1): "flashinfer_cutlass",
}


def kinds(kernels: table.WeightKernels) -> tuple[WeightKernel, WeightKernel]:
    return kernels.linear, kernels.experts


def test_a_cpu_dequantises():
    kernels = weight_kernels(None)
    assert kinds(kernels) == (DEQUANT,) * 2
    assert kernels.experts_runner is None


@pytest.mark.parametrize("capability", BEFORE_HOPPER)
def test_gpus_before_hopper_run_marlin(capability):
    kernels = weight_kernels(capability)
    assert kinds(kernels) == (MARLIN, MARLIN)
    assert kernels.experts_runner == "marlin"


def test_hopper_runs_cutedsl():
    kernels = weight_kernels(HOPPER)
    assert kinds(kernels) == (CUTEDSL, CUTEDSL)
    assert kernels.experts_runner == "marlin"
    assert "sm_90 has no FP4 tensor cores" in describe(kernels)


@pytest.mark.parametrize("capability", BLACKWELL)
def test_blackwell_runs_cutedsl_if_asked(capability):
    kernels = weight_kernels(capability, CUTEDSL)
    assert kinds(kernels) == (CUTEDSL, CUTEDSL)
    assert kernels.experts_runner == "marlin"


@pytest.mark.parametrize("capability", BEFORE_HOPPER)
def test_cutedsl_wants_bulk_copies(capability):
    with pytest.raises(UnsupportedError, match=r"cutedsl was asked for on sm_8., .* wanted sm_90"):
        weight_kernels(capability, CUTEDSL)


@pytest.mark.parametrize("capability", BLACKWELL)
def test_blackwell_runs_flashinfer(capability):
    kernels = weight_kernels(capability)
    assert kinds(kernels) == (FLASHINFER, FLASHINFER)
    assert kernels.experts_runner == BLACKWELL[capability]


@pytest.mark.parametrize("capability", [*BEFORE_HOPPER, HOPPER, *BLACKWELL])
@pytest.mark.parametrize(("forced", "runner"), [(DEQUANT, "triton"), (MARLIN, "marlin")])
def test_a_forced_kernel_is_taken(capability, forced, runner):
    kernels = weight_kernels(capability, forced)
    assert kinds(kernels) == (forced,) * 2
    assert kernels.experts_runner == runner
    assert WEIGHT_KERNEL.name in describe(kernels)


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (11, 0), (13, 0)])
@pytest.mark.parametrize("forced", [None, *WeightKernel])
def test_an_unknown_gpu_is_refused(capability, forced):
    name = f"sm_{capability[0]}{capability[1]}"
    with pytest.raises(UnsupportedError, match=f"{name}, for which .* wanted sm_80 to sm_90"):
        weight_kernels(capability, forced)


def test_what_a_device_cannot_do_is_refused():
    with pytest.raises(UnsupportedError, match="flashinfer was asked for on sm_90, which has no"):
        weight_kernels((9, 0), FLASHINFER)
    with pytest.raises(UnsupportedError, match="marlin was asked for on a CPU"):
        weight_kernels(None, MARLIN)
    with pytest.raises(UnsupportedError, match="are on meta, wanted cuda or cpu"):
        table.weight_kernels_of(torch.device("meta"))


def test_the_environment_forces(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    cuda = torch.device("cuda")
    monkeypatch.delenv(WEIGHT_KERNEL.name, raising=False)
    assert table.weight_kernels_of(cuda).linear is CUTEDSL
    monkeypatch.setenv(WEIGHT_KERNEL.name, " Dequant ")
    assert table.weight_kernels_of(cuda).linear is DEQUANT
    assert table.weight_kernels_of(torch.device("cpu")).linear is DEQUANT
    monkeypatch.setenv(WEIGHT_KERNEL.name, "int4")
    wanted = "'int4', wanted marlin, cutedsl, flashinfer or dequant"
    with pytest.raises(ConfigError, match=wanted):
        table.weight_kernels_of(cuda)


def test_the_log_line_names_every_choice():
    line = describe(weight_kernels((10, 0)))
    assert line == (
        "NVFP4 weights on sm_100: linear flashinfer, experts flashinfer "
        "(flashinfer_trtllm_routed): sm_100 multiplies FP4 by FP4"
    )
    assert describe(weight_kernels(HOPPER)).startswith(
        "NVFP4 weights on sm_90: linear cutedsl, experts cutedsl: sm_90 has no FP4 tensor cores"
    )
    assert "\n" not in describe(weight_kernels(None))


def test_sglang_knows_the_runners():
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    runners = {
        weight_kernels(c, f).experts_runner for c in BLACKWELL for f in (None, *WeightKernel)
    }
    for runner in runners:
        assert MoeRunnerBackend(runner).value == runner


def test_each_packed_matrix_has_the_kernel_of_its_kind():
    kernels = table.WeightKernels("sm_90", FLASHINFER, MARLIN, None, "")
    layer = "model.layers.3"
    assert kernels.of(f"{layer}.self_attn.o_a_proj") is DEQUANT
    assert kernels.of(f"{layer}.mlp.experts.17.gate_proj") is MARLIN
    for name in ("self_attn.o_b_proj", "self_attn.q_a_proj", "mlp.shared_experts.up_proj"):
        assert kernels.of(f"{layer}.{name}") is FLASHINFER

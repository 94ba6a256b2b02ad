"""One file decides which implementation runs, and every choice fits its reference's signature."""

import inspect

import pytest
import torch

from sglang_dsv4 import envs
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels import dispatch
from sglang_dsv4.kernels.hardware import ARCHS


def test_a_cpu_gets_the_reference():
    assert dispatch.operations_for(torch.device("cpu")) == dispatch.REFERENCE


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedError, match="The device is meta, wanted cpu or cuda"):
        dispatch.operations_for(torch.device("meta"))


def test_the_reference_on_a_gpu_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(envs.REFERENCE_ON_GPU.name, "1")
    chosen = dispatch.choices_for(torch.device("cuda"))
    assert all(envs.REFERENCE_ON_GPU.name in choice.why for choice in chosen.values())
    assert dispatch.operations_for(torch.device("cuda")) == dispatch.REFERENCE


@pytest.mark.parametrize("arch", sorted(set(ARCHS.values())))
def test_a_gpu_gets_kernels_with_the_reference_signatures(arch: str):
    chosen = dispatch.gpu_choices(arch)
    assert set(chosen) == set(dispatch.OPERATIONS)
    for name, choice in chosen.items():
        reference = inspect.signature(getattr(dispatch.REFERENCE, name)).parameters
        found = inspect.signature(choice.function).parameters
        assert list(found)[: len(reference)] == list(reference), name
        extra = list(found.values())[len(reference) :]
        assert all(p.default is not inspect.Parameter.empty for p in extra), name
        assert ".reference." not in choice.function.__module__
        assert ("not run" in choice.why) == (arch != "sm_90a")
        assert choice.line(name).startswith(f"{name}: sglang_dsv4.kernels.")

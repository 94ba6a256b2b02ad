"""The preflight table: what it finds, what stops it, and how it reads."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from sglang_dsv4 import memory_plan, plugin, preflight
from sglang_dsv4.check_table import Check
from sglang_dsv4.kernels import hardware
from sglang_dsv4.memory_plan import Options
from sglang_dsv4.preflight import GIB

MODEL = Path(__file__).resolve().parent.parent / "sglang_dsv4" / "demo" / "dsv4-tiny-nvfp4"


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    """Free memory is a fact of the machine, not of these tests."""
    monkeypatch.setattr(preflight, "free_bytes", lambda device: 64 * GIB)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the small model whose files may be damaged."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def of(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_the_environment_of_this_test_is_fit():
    checks = of(preflight.environment_checks())
    assert list(checks) == ["python", "sglang", "torch", "transformers", "plugin", "patches"]
    assert not preflight.first_fault(list(checks.values()))
    assert checks["sglang"].found == "0.5.23"
    assert checks["patches"].found.endswith(" fit")


def test_the_small_model_is_fit_on_a_cpu():
    checks = of(preflight.model_checks(str(MODEL), "cpu", "nvfp4", 1))
    assert list(checks) == ["device", "checkpoint", "tokenizer", "KV cache", "ranks", "memory"]
    assert not preflight.first_fault(list(checks.values()))
    assert "plain-torch reference" in checks["device"].found
    assert checks["checkpoint"].found.startswith("6 layers, ")
    assert checks["KV cache"].found.startswith("nvfp4: 384 B a record, ")


def test_bytes_a_token_are_those_of_the_format():
    """bfloat16 rows are 1024 B; per token: 0.1 * 6 windows + 2/4 CSA + 3/128 HCA records,
    2/4 indexer keys of 256 B, and the CSA state rings (2 * 2 * (512 + 128) * 4 B a row, 8 rows
    per 256 window tokens, 2 layers)."""
    check = of(preflight.model_checks(str(MODEL), "cpu", "bfloat16", 1))["KV cache"]
    rings = 0.1 * 2 * 8 / 256 * 2 * 2 * (512 + 128) * 4
    total = (0.1 * 6 + 2 / 4 + 3 / 128) * 1024 + 2 / 4 * 256 + rings
    assert check.found == f"bfloat16: 1024 B a record, {total:.0f} B a token of context"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_the_checkpoint_is_named(model, name):
    (model / name).unlink()
    checks = preflight.model_checks(str(model), "cpu", "nvfp4", 1)
    assert checks[-1].name == "checkpoint"
    assert name in preflight.first_fault(checks)


def test_missing_settings_of_the_tokenizer_are_named(model):
    (model / "tokenizer_config.json").unlink()
    fault = preflight.first_fault(preflight.model_checks(str(model), "cpu", "nvfp4", 1))
    assert fault.startswith(f"{model / 'tokenizer_config.json'} is missing")


def test_another_architecture_is_refused_by_its_config(model):
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "llama"
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    fault = preflight.first_fault(preflight.model_checks(str(model), "cpu", "nvfp4", 1))
    assert "model_type is 'llama'" in fault


def test_a_path_that_does_not_exist_is_named(tmp_path):
    path = str(tmp_path / "nowhere")
    fault = preflight.first_fault(preflight.model_checks(path, "cpu", "nvfp4", 1))
    assert fault.startswith(f"{path} is neither a directory nor a model that can be fetched")


def test_another_kv_cache_dtype_is_refused():
    fault = preflight.first_fault(preflight.model_checks(str(MODEL), "cpu", "fp8_e4m3", 1))
    assert fault.startswith("--kv-cache-dtype is fp8_e4m3, wanted nvfp4 or bfloat16")


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch see a GPU of a capability, with 140 GiB of which 139 are free."""

    def choose(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA test")
        monkeypatch.setattr(preflight, "gpu_bytes", lambda: 140 * GIB)
        monkeypatch.setattr(preflight, "free_bytes", lambda device: 139 * GIB)
        hardware._arch_of_device.cache_clear()

    monkeypatch.delenv("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", raising=False)
    yield choose
    hardware._arch_of_device.cache_clear()
    hardware._require_device.cache_clear()


def test_a_gpu_without_kernels_is_refused_by_its_capability(monkeypatch, gpu):
    gpu((8, 9))
    checks = preflight.model_checks(str(MODEL), "cuda", "nvfp4", 1)
    assert preflight.first_fault(checks).startswith("The GPU has compute capability 8.9, wanted")
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "1")
    device = of(preflight.model_checks(str(MODEL), "cuda", "nvfp4", 1))["device"]
    assert device.found == "NVIDIA test, sm_89: plain-torch reference"
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "perhaps")
    fault = preflight.first_fault(preflight.model_checks(str(MODEL), "cuda", "nvfp4", 1))
    assert "wanted 0 or 1" in fault


def test_a_gpu_with_room_is_fit(monkeypatch, gpu):
    gpu((9, 0))
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "1")
    options = Options(fraction=0.5, context_length=4096, max_running_requests=4, chunk=2048)
    checks = of(preflight.model_checks(str(MODEL), "cuda", "nvfp4", 1, options))
    assert not preflight.first_fault(list(checks.values()))
    assert checks["memory"].found == "140.0 GiB a GPU, 139.0 free"
    assert checks["memory"].wanted.startswith("0.0 GiB static and ")


@pytest.mark.parametrize("precision", [None, "bf16", "fp8"])
def test_the_precision_of_a_prefill_is_counted(monkeypatch, gpu, precision):
    """The small model has input_scales, so that FP8 is what a Hopper GPU takes."""
    gpu((9, 0))
    seen = []
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "1")
    monkeypatch.delenv("SGLANG_DSV4_NVFP4_PREFILL", raising=False)
    if precision:
        monkeypatch.setenv("SGLANG_DSV4_NVFP4_PREFILL", precision)
    plan = memory_plan.plan
    monkeypatch.setattr(memory_plan, "plan", lambda *given: seen.append(given[-1]) or plan(*given))
    assert not preflight.first_fault(preflight.model_checks(str(MODEL), "cuda", "nvfp4", 1))
    assert seen == [precision != "bf16"]


def test_a_precision_that_does_not_exist_is_refused(monkeypatch, gpu):
    gpu((9, 0))
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "1")
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_PREFILL", "fp8")
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_WEIGHT_KERNEL", "marlin")
    fault = preflight.first_fault(preflight.model_checks(str(MODEL), "cuda", "nvfp4", 1))
    assert "PREFILL=fp8 was asked for with marlin linear layers" in fault


def test_a_gpu_that_others_use_is_refused(monkeypatch, gpu):
    gpu((9, 0))
    monkeypatch.setenv("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "1")
    monkeypatch.setattr(preflight, "free_bytes", lambda device: GIB // 4)
    fault = preflight.first_fault(preflight.model_checks(str(MODEL), "cuda", "nvfp4", 1))
    wanted = (
        r"The GPU has 0\.2 GiB free of 140\.0, wanted \d\.\d GiB a rank: stop what else runs .*"
    )
    assert re.fullmatch(wanted, fault)


def test_ranks_that_do_not_split_the_model_are_refused():
    """The small model has 8 heads, 2 output groups and experts of 2 tiles of 128."""
    found = of(preflight.model_checks(str(MODEL), "cpu", "nvfp4", 2))["ranks"]
    assert (found.found, found.wanted, found.fault) == ("--tp-size 2", "one of 1, 2", "")
    fault = of(preflight.model_checks(str(MODEL), "cpu", "nvfp4", 4))["ranks"].fault
    assert fault.startswith("--tp-size is 4, wanted a divisor of the model's 2 ")


def test_four_bit_weights_count_four_times_on_a_cpu():
    """Two values a byte become two bfloat16, their scales vanish; what is BF16 stays as it is."""
    from sglang_dsv4.checkpoint.reader import Checkpoint

    tensors = Checkpoint.open(MODEL).tensors
    stored = sum(info.nbytes for info in tensors.values())
    packed = sum(info.nbytes for info in tensors.values() if info.dtype == "U8")
    names = ("weight_scale", "weight_scale_2", "input_scale")
    scales = sum(info.nbytes for name, info in tensors.items() if name.endswith(names))
    assert 0 < scales < packed
    assert preflight.cpu_weight_bytes(str(MODEL), 1) == stored + 3 * packed - scales


def test_too_little_memory_says_how_much_is_wanted(monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda device: 2 * GIB)
    checks = preflight.model_checks(str(MODEL), "cpu", "nvfp4", 1)
    assert preflight.first_fault(checks) == (
        "The memory of cpu has 2.0 GiB free, wanted 6.1 GiB a rank for weights and pools: "
        "free some, or spread the model with --tp-size."
    )


@pytest.mark.parametrize(
    ("value", "fits"),
    [("", True), ("sglang_dsv4", True), ("a, sglang_dsv4 ,b", True), ("a,b", False)],
)
def test_sglang_plugins_must_not_leave_us_out(monkeypatch, value, fits):
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    checks = preflight.environment_checks()
    fault = of(checks)["plugin"].fault
    assert (fault == "") is fits
    if not fits:
        assert fault == (
            "SGLANG_PLUGINS is 'a,b', which leaves sglang_dsv4 out: unset it or add sglang_dsv4 "
            "to it."
        )
        assert "patches" not in of(checks)


def test_a_package_that_is_not_installed_is_no_plugin(monkeypatch):
    monkeypatch.setattr(preflight, "entry_points", lambda **selection: ())
    assert "pip install -e ." in preflight.first_fault(preflight.environment_checks())


def test_an_old_python_and_a_wrong_sglang_are_both_in_the_table(monkeypatch):
    monkeypatch.setattr(preflight, "PYTHON", (9, 9))
    monkeypatch.setattr(plugin, "version", lambda name: "0.5.22")
    checks = preflight.environment_checks()
    assert [check.name for check in checks if check.fault] == ["python", "sglang"]
    table = preflight.render(checks)
    assert table.count("FAIL  ") == 2
    assert "needs Python 9.9 or newer" in table
    assert "needs sglang 0.5.23, found 0.5.22" in table


def test_the_table_has_a_line_a_check_and_what_to_do_below_a_failed_one():
    table = preflight.render(
        [Check("one", "found it", "it"), Check("longer", "?", "something", "Do this.")]
    )
    assert table.splitlines()[1:] == [
        "      check   found     wanted",
        "ok    one     found it  it",
        "FAIL  longer  ?         something",
        "      -> Do this.",
    ]


def test_the_command_prints_the_table(capsys):
    assert preflight.main([str(MODEL), "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("sglang_dsv4 ")
    assert printed.err == ""


def test_the_command_ends_with_the_sentence(model, capsys):
    (model / "tokenizer.json").unlink()
    assert preflight.main([str(model), "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "FAIL  checkpoint" in printed.out
    assert len(printed.err.splitlines()) == 1
    assert "tokenizer.json" in printed.err

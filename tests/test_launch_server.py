"""The launcher: its defaults give way to the user's, and its last line says what went wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from sglang_dsv4 import envs, launch_server, preflight
from sglang_dsv4.errors import ConfigError
from sglang_dsv4.failure import report

MODEL = Path(__file__).resolve().parent.parent / "sglang_dsv4" / "demo" / "dsv4-tiny-nvfp4"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """``main`` sets variables for its child processes; undo them after the test."""
    for name in (envs.FAILURE_FILE.name, *launch_server.ENVIRONMENT):
        monkeypatch.setenv(name, "")


def run(*command: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=os.environ, capture_output=True, text=True, timeout=timeout
    )


def served_by(monkeypatch, action) -> int:
    monkeypatch.setattr(launch_server, "_serve", action)
    return launch_server.main(["--model-path", "anything"])


def test_a_stopped_server_is_no_failure(monkeypatch, capsys):
    assert served_by(monkeypatch, lambda argv: None) == 0
    assert capsys.readouterr().err == ""


def test_an_error_of_ours_is_one_sentence(monkeypatch, capsys):
    def serve(argv):
        raise ConfigError("config.json lacks\nhidden_size: add it.")

    assert served_by(monkeypatch, serve) == 2
    assert capsys.readouterr().err == "config.json lacks hidden_size: add it.\n"


def test_the_sentence_of_a_child_replaces_the_error_that_its_death_causes(monkeypatch, capsys):
    def serve(argv):
        report("A shard is missing: fetch it.")
        raise RuntimeError("Rank 0 scheduler died during initialization (exit code: 2).")

    assert served_by(monkeypatch, serve) == 2
    assert capsys.readouterr().err == "A shard is missing: fetch it.\n"


def test_an_error_that_is_not_ours_is_not_hidden(monkeypatch):
    def serve(argv):
        raise RuntimeError("Rank 0 scheduler died during initialization (exit code: -9).")

    with pytest.raises(RuntimeError, match="exit code: -9"):
        served_by(monkeypatch, serve)


def test_the_users_environment_wins(monkeypatch):
    monkeypatch.setenv("SGLANG_DSV4_FP4_EXPERTS", "1")
    served_by(monkeypatch, lambda argv: None)
    assert os.environ["SGLANG_DSV4_FP4_EXPERTS"] == "1"
    monkeypatch.delenv("SGLANG_DSV4_FP4_EXPERTS")
    served_by(monkeypatch, lambda argv: None)
    assert os.environ["SGLANG_DSV4_FP4_EXPERTS"] == "0"


@pytest.mark.parametrize(("free", "fraction"), [(12, 0.25), (3, 0.9)])
def test_a_cpu_host_gives_the_weights_and_two_gibibytes(monkeypatch, free, fraction):
    """(1 + 2) / 12 of what is free; never above 0.9."""
    monkeypatch.setattr(preflight, "free_bytes", lambda device: free * preflight.GIB)
    monkeypatch.setattr(preflight, "cpu_weight_bytes", lambda path, tp: preflight.GIB)
    options = launch_server.cpu_options("anything", 1)
    assert float(options[options.index("--mem-fraction-static") + 1]) == fraction
    assert options[options.index("--device") + 1] == "cpu"


PREPARE = """
import json, sys
from pathlib import Path
from sglang_dsv4 import launch_server

model, folder = sys.argv[1], Path(sys.argv[2])
names = ("model_path", "device", "kv_cache_dtype", "attention_backend", "reasoning_parser",
         "tool_call_parser", "enable_cache_report", "max_running_requests", "max_total_tokens",
         "mem_fraction_static", "port")
def values(*argv):
    args = launch_server.prepare(["--model-path", model, "--device", "cpu", *argv])
    return {name: getattr(args, name) for name in names}

config = folder / "server.yaml"
config.write_text("kv-cache-dtype: bfloat16\\nport: 4001\\nmax-running-requests: 5\\n")
print(json.dumps([
    values(),
    values("--kv-cache-dtype=bfloat16", "--max-running-requests", "7", "--tool-call-parser", "glm"),
    values("--config", str(config), "--port", "4002"),
]))
"""


def test_defaults_give_way_to_options_and_to_the_config_file(tmp_path):
    done = run("-c", PREPARE, str(MODEL), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" preflight\n") == 3
    plain, options, config = json.loads(done.stdout.splitlines()[-1])
    assert 0 < plain.pop("mem_fraction_static") <= 0.9
    assert plain == {
        "model_path": str(MODEL),
        "device": "cpu",
        "kv_cache_dtype": "nvfp4",
        "attention_backend": "dsv4_nvfp4",
        "reasoning_parser": "deepseek-v4",
        "tool_call_parser": "deepseekv4",
        "enable_cache_report": True,
        "max_running_requests": 32,
        "max_total_tokens": 1048576,
        "port": 30000,
    }
    assert options["kv_cache_dtype"] == "bfloat16"
    assert options["max_running_requests"] == 7
    assert options["tool_call_parser"] == "glm"
    assert config["kv_cache_dtype"] == "bfloat16"
    assert config["max_running_requests"] == 5
    assert config["port"] == 4002
    assert config["attention_backend"] == "dsv4_nvfp4"


def test_a_damaged_checkpoint_stops_before_any_child_starts(tmp_path):
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    done = run("-m", "sglang_dsv4.launch_server", "--model-path", str(model), "--device", "cpu")
    assert done.returncode == 2
    assert "FAIL  checkpoint" in done.stdout
    assert "Traceback" not in done.stderr
    assert str(weights) in done.stderr.splitlines()[-1]


@pytest.mark.e2e
def test_a_fault_that_only_loading_finds_is_the_last_line(tmp_path):
    """A NaN among the weight scales: the scheduler, a child, finds it while it loads."""
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    weights = model / "model.safetensors"
    name = "model.layers.3.self_attn.q_b_proj.weight_scale"
    with safe_open(weights, framework="pt") as file:
        assert name in file.keys()  # noqa: SIM118 (the file object is not iterable)
    with open(weights, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, _ = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        file.write(b"\x7f")  # NaN in float8_e4m3fn
    done = run(
        *("-m", "sglang_dsv4.launch_server", "--model-path", str(model)),
        *("--device", "cpu", "--port", "30917"),
        timeout=600,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "layers.3.self_attn.q_b_proj" in last
    assert "NaN" in last

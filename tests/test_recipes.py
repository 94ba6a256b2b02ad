"""The recipes in launch/: what they pass, that it fits their GPU, that their numbers are true."""

import argparse
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4 import inspect
from sglang_dsv4.bench import header_only
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.layers.prefill_precision import choose_prefill
from sglang_dsv4.layers.weight_kernels import weight_kernels
from sglang_dsv4.memory_plan import GIB, Options, check_ranks, plan
from sglang_dsv4.model_source import open_source

ROOT = Path(__file__).resolve().parent.parent
# GiB that the driver reports for an H200 and a B200, rounded down.
RECIPES = {
    "serve_flash_h200": ("flash", 140),
    "serve_pro_h200": ("pro", 140),
    "serve_flash_b200": ("flash", 179),
    "serve_pro_b200": ("pro", 179),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Headers of the published shapes."""
    root = tmp_path_factory.mktemp("shapes")
    for shapes in ("flash", "pro"):
        assert header_only.main([shapes, str(root / shapes)]) == 0
    return {shapes: root / shapes for shapes in ("flash", "pro")}


def text_of(recipe: str) -> str:
    return (ROOT / "launch" / f"{recipe}.sh").read_text(encoding="utf-8")


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A virtual environment that is up to date and whose Python prints its arguments."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    python.write_text(f'#!/bin/bash\nexec python3 -c "{show}" "$@"\n')
    python.chmod(0o755)
    wanted = f"{ROOT}\n".encode() + (ROOT / "pyproject.toml").read_bytes()
    stamp = hashlib.sha256(wanted).hexdigest()
    (tmp_path / "sglang_dsv4-run.stamp").write_text(f"{stamp}\n")
    return tmp_path


def passed(recipe: str, venv: Path, *options: str, **environment: str) -> list[str]:
    """The command line that a recipe starts."""
    command = ["bash", str(ROOT / "launch" / f"{recipe}.sh"), *options]
    changed = {k: v for k, v in os.environ.items() if k not in ("TP", "DP")}
    changed |= {"VENV": str(venv), **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=changed)
    return json.loads(done.stdout)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_server_gets_options_that_fit_the_gpu(recipe, folders, stub):
    from sglang.srt.server_args import ServerArgs

    shapes, gib = RECIPES[recipe]
    line = passed(recipe, stub, str(folders[shapes]), "--port", "4000")
    assert line[:2] == ["-m", "sglang_dsv4.launch_server"]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    asked = parser.parse_args(line[2:])
    assert (asked.model_path, asked.port) == (str(folders[shapes]), 4000)
    options, source = Options.of(asked), open_source(str(folders[shapes]))
    check_ranks(source.dims, options)
    kernels = weight_kernels((9, 0) if recipe.endswith("h200") else (10, 0))
    fp8 = choose_prefill(kernels, source.quantized_activations).fp8
    assert fp8 == recipe.endswith("h200")
    found = plan(source, KVFormat.NVFP4, options, gib * GIB, kernels, fp8)
    assert found.fault() == ""
    # The user's options come last, so they win.
    assert parser.parse_args([*line[2:], "--tp-size", "1"]).tp_size == 1


def test_replicas_and_their_gpus_are_chosen_by_variables(stub):
    line = passed("serve_flash_h200", stub, "DIR", TP="4", DP="2")
    assert line[line.index("--tp-size") + 1] == "4"
    assert line[line.index("--dp-size") + 1] == "2"


@pytest.mark.parametrize("recipe", RECIPES)
def test_capacities_are_what_inspect_computes(recipe, folders, capsys):
    shapes, gib = RECIPES[recipe]
    text = text_of(recipe)
    assert f"# capacity: python -m sglang_dsv4.bench.header_only {shapes} DIR\n" in text
    command = re.search(r"# capacity: python -m sglang_dsv4\.inspect DIR (.*) --tp TP\n", text)
    arguments = command.group(1).split()
    assert arguments[arguments.index("--gpu-mem") + 1] == str(gib)
    for inspected, served in (
        ("--mem-fraction", "--mem-fraction-static"),
        ("--max-running-requests", "--max-running-requests"),
    ):
        value = arguments[arguments.index(inspected) + 1]
        assert f" {served} {value} " in text
    rows = re.findall(
        r"# capacity: TP (\d): weights ([\d.]+) GiB a rank, pools ([\d.]+), tokens (\d+)\n", text
    )
    assert rows
    for tp, weights, pools, tokens in rows:
        assert inspect.main([str(folders[shapes]), *arguments, "--tp", tp]) == 0
        report = capsys.readouterr().out
        assert f", {weights} GiB a rank of {tp}\n" in report
        assert f" GiB a rank, the pools {pools}\n" in report
        assert re.search(rf"^  nvfp4 .* {tokens}$", report, re.MULTILINE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_that_it_was_not_run(recipe):
    command = ["bash", str(ROOT / "launch" / f"{recipe}.sh"), "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = help_text.splitlines()
    assert "NOT RUN" in " ".join(lines[:2])
    assert f"usage: bash launch/{recipe}.sh MODEL_DIR [options of sglang serve]" in lines
    assert lines[-1].startswith("capacity: TP ")
    assert len(lines) == sum(line.startswith("#") for line in text_of(recipe).splitlines()[1:])


def test_context_that_flashinfer_takes_in_hca_layers_is_the_one_that_is_stated():
    """Twelve tiles of 128 places, one of them for the window, an entry for 128 tokens."""
    tokens = (12 - 1) * 128 * 128
    for recipe in ("serve_flash_b200", "serve_pro_b200"):
        assert f"context above {tokens} tokens" in text_of(recipe)

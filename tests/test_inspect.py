"""The report of `python -m sglang_dsv4.inspect`, from the small model and from headers alone."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint.synthetic import TINY, hf_native, write_header_only_model

from sglang_dsv4 import inspect
from sglang_dsv4.bench.published import FLASH, PRO
from sglang_dsv4.config import from_config_dict
from sglang_dsv4.model_source import open_source

GIB = 1 << 30


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert inspect.main(list(argv)) == 0
    return capsys.readouterr().out


def test_small_model(capsys: pytest.CaptureFixture[str]):
    text = report(capsys, str(TINY), "--tp", "1")
    assert "layers: 6, hash-routed: 1" in text
    assert "CSA, ratio   4:  2 (2, 4)" in text
    assert "HCA, ratio 128:  3 (0-1, 3)" in text
    assert re.search(r"self_attn\.o_a_proj +bf16 +6 +6\.00\n", text)
    # 16 x 6 experts of 256 x 256: packed bytes, one scale byte for 16, two float32 scalars.
    mib = 96 * (256 * 128 + 256 * 16 + 8) / (1 << 20)
    assert re.search(rf"experts\.\*\.up_proj +nvfp4 +96 +{mib:.2f}\n", text)
    assert "12: scale of an FP8 KV cache" in text
    assert "k_proj.k_scale" in text


def test_all_bytes_of_the_small_model_are_counted(capsys: pytest.CaptureFixture[str]):
    total, rank = inspect.weight_bytes(open_source(str(TINY)), tp=1)
    skipped = 12 * 4
    header = int.from_bytes((TINY / "model.safetensors").read_bytes()[:8], "little") + 8
    assert total == rank == (TINY / "model.safetensors").stat().st_size - header - skipped
    table = re.findall(r"^\S.* (\d+) +(\d+\.\d\d)$", report(capsys, str(TINY)), re.MULTILINE)
    assert sum(int(count) for count, _ in table) == 452
    # Each of the rows is rounded to 0.01 MiB.
    assert sum(float(mib) for _, mib in table) == pytest.approx(total / (1 << 20), abs=0.005 * 23)


def flash_nvfp4_bytes(tp: int) -> int:
    """Weights of a full-NVFP4 V4-Flash on one rank, by hand from the published dimensions."""

    def packed(rows: int, columns: int, count: int = 1) -> tuple[int, int]:
        return rows * columns * 9 // 16 * count, 8 * count

    hidden, layers, csa, hca = 4096, 43, 21, 20
    split = [
        packed(32768, 1024, layers),  # q_b
        packed(hidden, 8192, layers),  # o_b
        packed(2048, hidden, 3 * 257 * layers),  # gate, up, down of 256 experts and the shared one
    ]
    whole = [
        packed(1024, hidden, layers),  # q_a
        packed(512, hidden, layers),  # kv
        packed(1024, hidden, 2 * csa),  # compressor kv, gate
        packed(512, hidden, 2 * hca),
        packed(256, hidden, 2 * csa),  # indexer kv, gate
        packed(8192, 1024, csa),  # indexer q_b
        packed(64, hidden, csa),  # weights_proj
    ]
    bf16_split = 8192 * 4096 * layers + 2 * 129280 * hidden  # o_a, embeddings, head
    norms = layers * (2 * hidden + 1024 + 512) + 512 * (csa + hca) + 128 * csa + hidden
    bf16_whole = 256 * hidden * layers + norms  # router, norms
    streams = layers * 2 * (24 * 4 * hidden + 24 + 3) + 4 * 4 * hidden + 4 + 1
    biases = csa * (4 * 1024 + 4 * 256) + hca * 128 * 512 + layers * 64 + 40 * 256
    tables = 3 * 129280 * 6 * 8
    scalars = sum(scalar for _, scalar in split + whole)
    divided = sum(data for data, _ in split) + 2 * bf16_split
    replicated = sum(data for data, _ in whole) + 2 * bf16_whole + 4 * (streams + biases) + tables
    return replicated + scalars + divided // tp


@pytest.fixture(scope="module")
def flash_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("headers") / "flash"
    return write_header_only_model(path, hf_native(FLASH), from_config_dict(FLASH)[0])


def test_flash_from_headers(flash_dir: Path, capsys: pytest.CaptureFixture[str]):
    text = report(capsys, str(flash_dir), "--tp", "4")
    assert "SWA, ratio   0:  2 (0-1)" in text
    assert "CSA, ratio   4: 21 (2-42 step 2)" in text
    assert "HCA, ratio 128: 20 (3-41 step 2)" in text
    source = open_source(str(flash_dir))
    assert inspect.weight_bytes(source, 1) == (flash_nvfp4_bytes(1), flash_nvfp4_bytes(1))
    assert inspect.weight_bytes(source, 4) == (flash_nvfp4_bytes(1), flash_nvfp4_bytes(4))
    assert (
        f"{flash_nvfp4_bytes(1) / GIB:.2f} GiB, {flash_nvfp4_bytes(4) / GIB:.2f} GiB a rank of 4"
        in text
    )
    rows = {
        name: [float(value) for value in values.split()]
        for name, values in re.findall(r"^  (nvfp4|bfloat16|fp8) +([\d. ]+?)(?: \(|$)", text, re.M)
    }
    tables = 2 * 1048576 * 64 * 4
    left = 141 * GIB * 0.88 - flash_nvfp4_bytes(4) - tables - 33152 * 4096 * 20
    for name, per_token in (("nvfp4", 4756.2), ("bfloat16", 11955.2), ("fp8", 7086.75)):
        # The report rounds to 0.1 byte.
        assert rows[name][5] == pytest.approx(per_token, abs=0.051)
        assert rows[name][6] == int(left / per_token) // 256 * 256


def test_options_change_the_budget(flash_dir: Path, capsys: pytest.CaptureFixture[str]):
    argv = (str(flash_dir), "--gpu-mem", "96", "--tp", "2", "--mem-fraction", "0.5")
    text = report(capsys, *argv, "--max-running-requests", "8")
    assert "may take 48.00 GiB a rank" in text
    assert "tokens with 8 requests" in text
    # Half of V4-Flash does not fit in 48 GiB: no pool.
    assert re.search(r"nvfp4 .* 0\n", text)


def test_pro_from_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """V4-Pro but for its number of experts, which only costs time here."""
    config = PRO | {"n_routed_experts": 24}
    dims = from_config_dict(config)[0]
    path = write_header_only_model(tmp_path / "pro", hf_native(config), dims)
    text = report(capsys, str(path))
    assert "SWA, ratio   0:  0 (none)" in text
    assert "CSA, ratio   4: 30 (2-60 step 2)" in text
    assert "HCA, ratio 128: 31 (0-1, 3-59 step 2)" in text
    mib = 61 * 24 * (3072 * 7168 * 9 // 16 + 8) / (1 << 20)
    assert re.search(rf"\.experts\.\*\.gate_proj +nvfp4 +{61 * 24} +{mib:.2f}\n", text)
    mib = 61 * 16384 * 4096 * 2 / (1 << 20)
    assert re.search(rf"o_a_proj +bf16 +61 +{mib:.2f}\n", text)


@pytest.mark.parametrize(
    ("layers", "folded"),
    [
        ((), ""),
        ((5,), "5"),
        ((2, 4), "2, 4"),
        ((0, 1, 3), "0-1, 3"),
        ((0, 1, 3, 5, 7), "0-1, 3-7 step 2"),
        ((0, 2, 3, 4), "0, 2-4"),
    ],
)
def test_runs(layers: tuple[int, ...], folded: str):
    assert inspect._runs(layers) == folded


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_dsv4.inspect", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_line_refuses_with_one_sentence(tmp_path: Path):
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "config.json is missing" in done.stderr


def refused(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    assert inspect.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_refusals(flash_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "is not a directory" in refused(capsys, tmp_path / "absent")
    shards = sorted(flash_dir.glob("*.safetensors"))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in flash_dir.iterdir():
        if file != shards[3]:
            (damaged / file.name).symlink_to(file)
    assert shards[3].name in refused(capsys, damaged)


def test_config_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config: dict[str, Any] = hf_native(FLASH) | {"head_dim": 256}
    dims = from_config_dict(FLASH | {"num_hidden_layers": 1, "n_routed_experts": 6})[0]
    path = write_header_only_model(tmp_path / "small", config, dims)
    assert "head_dim is 256, 512 was wanted" in refused(capsys, path)


def test_bad_options(capsys: pytest.CaptureFixture[str]):
    for option in (("--tp", "0"), ("--gpu-mem", "-1"), ("--mem-fraction", "1.5")):
        with pytest.raises(SystemExit) as caught:
            inspect.main([str(TINY), *option])
        assert caught.value.code == 2
        assert f"{option[0]} " in capsys.readouterr().err.splitlines()[-1]

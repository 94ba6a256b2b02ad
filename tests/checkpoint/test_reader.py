"""Opening whole and damaged copies of the small checkpoint."""

import json
import os
from pathlib import Path

import pytest
import torch
from synthetic import TINY, write_copy, write_header_only, write_index
from test_names import STYLES
from torch import Tensor

from sglang_dsv4.checkpoint.reader import Checkpoint, read_header
from sglang_dsv4.errors import CheckpointError

SINKS = "model.layers.0.self_attn.sinks"


def refused(path: Path, *parts: str) -> None:
    """Opening fails with one sentence that holds every part."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    for part in (*parts, "wanted"):
        assert part in message
    assert message.endswith(".")
    assert "\n" not in message


def test_small_checkpoint(tiny: dict[str, Tensor]):
    checkpoint = Checkpoint.open(TINY)
    assert set(checkpoint.tensors) | set(checkpoint.skipped) == set(tiny)
    assert len(checkpoint.skipped) == 12
    assert checkpoint.config["hidden_size"] == 256
    for name, info in checkpoint.tensors.items():
        assert info.shape == tuple(tiny[name].shape)
        assert info.nbytes == tiny[name].nbytes
    scale = "model.layers.0.self_attn.q_a_proj.weight_scale"
    assert checkpoint.tensors[scale].dtype == "F8_E4M3"
    assert torch.equal(checkpoint.read(scale).view(torch.uint8), tiny[scale].view(torch.uint8))


@STYLES
def test_sharded_copy_in_every_style(copy_dir: Path, tiny: dict[str, Tensor], rename):
    write_copy(copy_dir, {rename(key): value for key, value in tiny.items()}, shards=3)
    checkpoint = Checkpoint.open(copy_dir)
    whole = Checkpoint.open(TINY)
    assert {name: (i.dtype, i.shape) for name, i in checkpoint.tensors.items()} == {
        name: (i.dtype, i.shape) for name, i in whole.tensors.items()
    }
    assert len(checkpoint.skipped) == 12
    assert torch.equal(checkpoint.read(SINKS), tiny[SINKS])


def test_not_a_directory(tmp_path: Path):
    refused(tmp_path / "absent", "absent is not a directory")


def test_config_missing_or_damaged(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, {SINKS: tiny[SINKS]})
    (copy_dir / "config.json").write_text('{"hidden_size": 256,')
    refused(copy_dir, "config.json is not JSON")
    (copy_dir / "config.json").write_bytes(b"\xff\xfe")
    refused(copy_dir, "config.json is not JSON")
    (copy_dir / "config.json").write_text("[]")
    refused(copy_dir, "config.json holds a list")
    (copy_dir / "config.json").unlink()
    refused(copy_dir, "config.json is missing")


def test_absent_tokenizer(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, {SINKS: tiny[SINKS]})
    Checkpoint.open(copy_dir)
    (copy_dir / "tokenizer.json").unlink()
    refused(copy_dir, "no tokenizer.json")


def test_no_weights(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, {SINKS: tiny[SINKS]})
    (copy_dir / "model.safetensors").unlink()
    refused(copy_dir, "neither model.safetensors nor model.safetensors.index.json")


def test_missing_shard(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, tiny, shards=3)
    (copy_dir / "model-00002-of-00003.safetensors").unlink()
    refused(copy_dir, "lacks 1 of 3 shards", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("cut", [1, 100_000])
def test_truncated_shard(copy_dir: Path, tiny: dict[str, Tensor], cut: int):
    write_copy(copy_dir, tiny, shards=3)
    shard = copy_dir / "model-00003-of-00003.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - cut)
    refused(copy_dir, shard.name, f"has {size - cut} bytes, {size} were wanted")


@pytest.mark.parametrize("keep", [0, 5, 8, 200])
def test_file_cut_inside_its_header(copy_dir: Path, tiny: dict[str, Tensor], keep: int):
    write_copy(copy_dir, {key: tiny[key] for key in list(tiny)[:20]})
    os.truncate(copy_dir / "model.safetensors", keep)
    refused(copy_dir, f"model.safetensors has {keep} bytes and a header of")


def test_longer_file(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, {SINKS: tiny[SINKS]})
    with (copy_dir / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    refused(copy_dir, "were wanted by its header")


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"not json", "unreadable header"),
        (b"[]", "unreadable header"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "data_offsets"),
        (b'{"a": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 8]}}', "Q7"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "a has 4 bytes for F32"),
        (
            b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
            "hole or an overlap at byte 0",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
            b' "a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}',
            "a is there twice",
        ),
    ],
)
def test_damaged_header(tmp_path: Path, header: bytes, named: str):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match=named):
        read_header(file)


def test_unknown_key(copy_dir: Path, tiny: dict[str, Tensor]):
    foreign = {f"model.layers.0.self_attn.q_proj.lora_{i}": torch.zeros(1) for i in range(5)}
    write_copy(copy_dir, tiny | foreign)
    refused(copy_dir, "5 tensors that are not of this model", "q_proj.lora_0", "and 2 more")


def test_two_names_of_one_tensor(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, tiny | {"layers.0.attn.attn_sink": tiny[SINKS].clone()})
    refused(copy_dir, SINKS, "layers.0.attn.attn_sink", "both name")


def test_key_in_two_shards(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, {SINKS: tiny[SINKS]})
    for name in ("a.safetensors", "b.safetensors"):
        write_header_only(copy_dir / name, [(SINKS, "F32", (8,)), (f"mtp.0.{name}", "U8", (1,))])
    weight_map = {SINKS: "a.safetensors"} | {
        f"mtp.0.{n}.safetensors": f"{n}.safetensors" for n in "ab"
    }
    write_index(copy_dir, weight_map)
    refused(copy_dir, SINKS, "a.safetensors and in b.safetensors")


def test_index_and_headers_disagree(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, tiny, shards=2)
    index = copy_dir / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    write_index(copy_dir, weight_map | {SINKS: other.get(weight_map[SINKS], next(iter(other)))})
    refused(copy_dir, "place 1 tensors differently", SINKS)
    write_index(copy_dir, {key: file for key, file in weight_map.items() if key != SINKS})
    refused(copy_dir, "place 1 tensors differently", SINKS)
    ghost = "model.layers.9.self_attn.sinks"
    write_index(copy_dir, weight_map | {ghost: weight_map[SINKS]})
    refused(copy_dir, "place 1 tensors differently", ghost)


def test_index_without_weight_map(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, {SINKS: tiny[SINKS]})
    (copy_dir / "model.safetensors.index.json").write_text('{"metadata": {}}')
    refused(copy_dir, "no weight_map")


def test_mtp_tensors_are_skipped(copy_dir: Path, tiny: dict[str, Tensor]):
    write_copy(copy_dir, tiny | {"mtp.0.enorm.weight": torch.zeros(256)})
    checkpoint = Checkpoint.open(copy_dir)
    assert "multi-token" in checkpoint.skipped["mtp.0.enorm.weight"]

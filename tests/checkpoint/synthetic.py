"""Checkpoints for tests: the published configs, copies of the small model, files without data."""

import copy
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

import sglang_dsv4
from sglang_dsv4.bench.published import Entry, nvfp4_entries
from sglang_dsv4.config import ModelDims

TINY = Path(sglang_dsv4.__file__).parent / "demo" / "dsv4-tiny-nvfp4"

_LAYER_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def hf_native(official: Mapping[str, Any]) -> dict[str, Any]:
    """The same model as transformers 5.19 saves it: what it folds in on load is gone."""
    config = copy.deepcopy(dict(official))
    layers = config["num_hidden_layers"]
    scaling = config.pop("rope_scaling")
    yarn = {key: value for key, value in scaling.items() if key != "type"}
    config["layer_types"] = [_LAYER_TYPES[r] for r in config.pop("compress_ratios")[:layers]]
    config["compress_rates"] = {_LAYER_TYPES[4]: 4, _LAYER_TYPES[128]: 128}
    hashed = config.pop("num_hash_layers")
    config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    config["partial_rotary_factor"] = config.pop("qk_rope_head_dim") / config["head_dim"]
    del config["topk_method"], config["torch_dtype"]
    config["rope_parameters"] = {
        "main": {
            "rope_type": "default",
            "rope_theta": config.pop("rope_theta"),
            "partial_rotary_factor": 0.125,
        },
        "compress": {
            **yarn,
            "rope_type": "yarn",
            "rope_theta": config.pop("compress_rope_theta"),
            "attention_factor": 1.0,
            "partial_rotary_factor": 0.125,
        },
    }
    return config


def tiny_config() -> dict[str, Any]:
    """config.json of the small model."""
    return json.loads((TINY / "config.json").read_text())


def tiny_tensors() -> dict[str, Tensor]:
    """All tensors of the small model, by their key."""
    return load_file(TINY / "model.safetensors")


def write_copy(
    path: Path, tensors: Mapping[str, Tensor], shards: int = 1, config: Any | None = None
) -> Path:
    """A checkpoint directory with these tensors and the small model's other files."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path)
    (path / "config.json").write_text(json.dumps(tiny_config() if config is None else config))
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map: dict[str, str] = {}
    keys = sorted(tensors)
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in keys[shard::shards]}
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    """model.safetensors.index.json."""
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "I64": 8}


def write_header_only(file: Path, entries: Iterable[Entry]) -> None:
    """A safetensors file with a true header and a hole for its data: any size, no disk space."""
    header: dict[str, Any] = {}
    position = 0
    for key, dtype, shape in entries:
        end = position + math.prod(shape) * _BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + position)


def write_header_only_model(path: Path, config: Mapping[str, Any], dims: ModelDims) -> Path:
    """A sharded full-NVFP4 checkpoint of any size whose files hold headers only."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(dict(config)))
    (path / "tokenizer.json").write_text("{}")
    entries = nvfp4_entries(dims)
    shards = 8
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = entries[shard::shards]
        write_header_only(path / name, part)
        weight_map |= {key: name for key, _, _ in part}
    write_index(path, weight_map)
    return path

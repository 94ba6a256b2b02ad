"""The tensors of a checkpoint directory, from the safetensors headers alone.

A safetensors file is an 8-byte little-endian header length, the header (JSON: name -> dtype, shape,
data_offsets), then the data. Reading headers only, a checkpoint of hundreds of gigabytes is checked
in seconds before any weight is loaded.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sglang_dsv4.checkpoint.names import canonical_name, skip_reason
from sglang_dsv4.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 1 << 30
_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: its key in the file, the file, its safetensors dtype, its shape."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * _DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory: its config, and its tensors by transformers' in-memory name.

    `skipped` maps each key that is knowingly left unread to the reason.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    skipped: dict[str, str]

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Read config.json and every safetensors header of a directory.

        Raises `CheckpointError` for a directory, config.json, tokenizer.json or shard that is
        missing, a truncated or unreadable file, an index that disagrees with the headers, a key
        found twice and a key that does not belong to this model.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not a directory, a checkpoint directory was wanted; correct the path."
            )
        config = _read_json(path / "config.json")
        if not (path / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{path} has no tokenizer.json, the model's tokenizer was wanted; copy it there."
            )
        tensors: dict[str, TensorInfo] = {}
        skipped: dict[str, str] = {}
        unknown: list[str] = []
        for info in _all_tensors(path):
            reason = skip_reason(info.key)
            name = canonical_name(info.key)
            if reason is not None:
                skipped[info.key] = reason
            elif name is None:
                unknown.append(info.key)
            elif name in tensors:
                raise CheckpointError(
                    f"{tensors[name].key} and {info.key} both name {name}, one of them was wanted; "
                    "remove the duplicate from the checkpoint."
                )
            else:
                tensors[name] = info
        if unknown:
            raise CheckpointError(
                f"{path} has {len(unknown)} tensors that are not of this model "
                f"({first_few(unknown)}), only DeepSeek-V4 tensors were wanted; check the file or "
                "remove them."
            )
        return cls(path, config, tensors, skipped)

    def read(self, name: str) -> torch.Tensor:
        """The tensor of a canonical name, in the file's dtype and shape, on the CPU."""
        info = self.tensors[name]
        with safe_open(info.file, framework="pt") as file:
            return file.get_tensor(info.key)


def first_few(names: Iterable[str], count: int = 3) -> str:
    """The first names of a list and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, a checkpoint directory with that file was wanted; fetch it."
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}), a JSON object was wanted; fetch it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}, a JSON object was wanted; fetch it again."
        )
    return value


def _all_tensors(path: Path) -> list[TensorInfo]:
    if not (path / INDEX_NAME).is_file():
        if (path / SINGLE_NAME).is_file():
            return read_header(path / SINGLE_NAME)
        raise CheckpointError(
            f"{path} has neither {SINGLE_NAME} nor {INDEX_NAME}, one of them was wanted; fetch the "
            "weights."
        )
    weight_map = _read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"{path / INDEX_NAME} has no weight_map of key to file, one was wanted; fetch it again."
        )
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(files)} shards ({first_few(missing)}), every "
            f"file of {INDEX_NAME} was wanted; fetch them."
        )
    infos = [info for name in files for info in read_header(path / name)]
    _check_index(path, weight_map, infos)
    return infos


def _check_index(path: Path, weight_map: dict[str, str], infos: list[TensorInfo]) -> None:
    found: dict[str, str] = {}
    for info in infos:
        if info.key in found:
            raise CheckpointError(
                f"{info.key} is in {found[info.key]} and in {info.file.name}, one place was "
                "wanted; remove the stale shard."
            )
        found[info.key] = info.file.name
    if found == weight_map:
        return
    wrong = [key for key, file in weight_map.items() if found.get(key) != file]
    wrong += [key for key in found if key not in weight_map]
    raise CheckpointError(
        f"{path / INDEX_NAME} and the shards' headers place {len(wrong)} tensors differently "
        f"({first_few(wrong)}), equal places were wanted; fetch index and shards of one release."
    )


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file.

    Raises `CheckpointError` if the header is unreadable, names a key twice, contradicts itself, or
    the file is not as long as its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} has {size} bytes and a header of {length}, a whole safetensors file was "
                "wanted; fetch the file again."
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        infos, end = _parse_header(file, header)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} has an unreadable header ({error}), a safetensors header was wanted; fetch "
            "the file again."
        ) from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{file} has {size} bytes, {8 + length + end} were wanted by its header; fetch the "
            "file again."
        )
    return infos


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in names if names.count(key) > 1)} is there twice")
    return keys


def _parse_header(file: Path, header: dict[str, Any]) -> tuple[list[TensorInfo], int]:
    """Tensors, and the end of the data; raises ValueError, KeyError, TypeError if malformed."""
    spans: list[tuple[int, int]] = []
    infos: list[TensorInfo] = []
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        info = TensorInfo(key, file, entry["dtype"], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        if end - begin != info.nbytes:
            raise ValueError(f"{key} has {end - begin} bytes for {info.dtype} {info.shape}")
        infos.append(info)
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise ValueError(f"a hole or an overlap at byte {position} of the data")
        position = end
    return infos, position

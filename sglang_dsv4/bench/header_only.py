"""Writes a full-NVFP4 checkpoint of published shapes whose files hold headers and no data.

``python -m sglang_dsv4.bench.header_only pro DIR`` gives ``inspect`` and ``preflight`` a checkpoint
of DeepSeek-V4-Pro's true size that takes a few megabytes of disk: the data are holes in the files.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dsv4.bench.published import Entry, nvfp4_entries
from sglang_dsv4.bench.random_checkpoint import CONFIGS, NVFP4_CONFIG
from sglang_dsv4.config import from_config_dict
from sglang_dsv4.demo.__main__ import MODEL_DIR
from sglang_dsv4.failure import EXIT_STATUS

BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
"""Of a value, by safetensors' name of its dtype."""
SHARDS = 8


def write_header_only_checkpoint(path: Path, config: Mapping[str, Any]) -> None:
    """Fill the folder ``path`` with config, tokenizer, index and eight files without data.

    Args:
        path: a folder that does not exist yet.
        config: official flat config (``published``).
    """
    path.mkdir(parents=True)
    ours = dict(config) | {"quantization_config": NVFP4_CONFIG}
    (path / "config.json").write_text(json.dumps(ours, indent=2), encoding="utf-8")
    for file in MODEL_DIR.glob("tokenizer*.json"):
        shutil.copy(file, path)
    entries = nvfp4_entries(from_config_dict(ours)[0])
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = entries[shard::SHARDS]
        _write_header(path / name, part)
        weight_map |= {key: name for key, _, _ in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_header(file: Path, entries: Iterable[Entry]) -> None:
    """A safetensors file with a true header and a hole of the data's size."""
    header: dict[str, Any] = {}
    position = 0
    for key, dtype, shape in entries:
        end = position + math.prod(shape) * BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + position)


def main(argv: Sequence[str] | None = None) -> int:
    """Write one checkpoint; exit status 2 after a sentence for a folder that exists."""
    parser = argparse.ArgumentParser(prog="sglang_dsv4.bench.header_only", description=__doc__)
    parser.add_argument("shapes", choices=CONFIGS)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    args = parser.parse_args(argv)
    if args.folder.exists():
        print(f"{args.folder} exists, wanted a new folder: name another.", file=sys.stderr)
        return EXIT_STATUS
    write_header_only_checkpoint(args.folder, CONFIGS[args.shapes])
    return 0


if __name__ == "__main__":
    sys.exit(main())

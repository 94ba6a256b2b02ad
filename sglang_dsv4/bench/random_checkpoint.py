"""Writes a full-NVFP4 checkpoint of published shapes with random weights, for speed and memory.

``python -m sglang_dsv4.bench.random_checkpoint flash DIR --layers 6 --experts 64`` writes the first
six layers of DeepSeek-V4-Flash with 64 experts each. Weights have the variance 1 / fan-in, so that
activations neither vanish nor overflow; the tokenizer is the embedded model's.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_dsv4.bench.published import FLASH, PRO, Entry, nvfp4_entries, reduced
from sglang_dsv4.config import from_config_dict
from sglang_dsv4.demo.__main__ import MODEL_DIR
from sglang_dsv4.errors import Dsv4Error
from sglang_dsv4.failure import EXIT_STATUS

CONFIGS: Mapping[str, Mapping[str, Any]] = {"flash": FLASH, "pro": PRO}
# Root of the mean square of the 16 e2m1 codes.
CODES_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
# Of a typical activation: largest value 10, over 6 * 448.
INPUT_SCALE = 10 / (6 * 448)
NVFP4_CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "sglang_dsv4", "version": "random"},
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {
                "dynamic": False,
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
            },
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.embed_tokens"],
}


def write_random_checkpoint(
    path: Path, config: Mapping[str, Any], device: torch.device, seed: int = 0
) -> None:
    """Fill the folder ``path`` with config, tokenizer and one safetensors file a layer.

    Args:
        path: a folder that does not exist yet.
        config: official flat config (``published``).
        device: where the numbers are drawn.
        seed: of the draws.
    """
    path.mkdir(parents=True)
    ours = dict(config) | {"quantization_config": NVFP4_CONFIG}
    (path / "config.json").write_text(json.dumps(ours, indent=2), encoding="utf-8")
    for file in MODEL_DIR.glob("tokenizer*.json"):
        shutil.copy(file, path)
    generator = torch.Generator(device).manual_seed(seed)
    experts = config["n_routed_experts"]
    weight_map: dict[str, str] = {}
    entries = sorted(nvfp4_entries(from_config_dict(ours)[0]), key=_part_of)
    fan_in = {name: 2 * shape[1] for name, dtype, shape in entries if dtype == "U8"}
    for part, members in groupby(entries, key=_part_of):
        name = f"model-{part}.safetensors"
        tensors = {e[0]: _random(e, fan_in, experts, generator, device).cpu() for e in members}
        save_file(tensors, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _part_of(entry: Entry) -> str:
    """File of a tensor: its layer, or ``rest``."""
    parts = entry[0].split(".")
    return f"{int(parts[2]):05d}" if parts[:2] == ["model", "layers"] else "rest"


def _random(
    entry: Entry,
    fan_in: Mapping[str, int],
    experts: int,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """One tensor of the checkpoint."""
    name, dtype, shape = entry
    if dtype == "I64":
        scores = torch.rand(shape[0], experts, generator=generator, device=device)
        return scores.topk(shape[1], dim=1).indices
    if dtype == "U8":
        return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
    if name.endswith(".weight_scale"):
        return torch.ones(shape, device=device).to(torch.float8_e4m3fn)
    if name.endswith(".input_scale"):
        return torch.tensor(INPUT_SCALE)
    if name.endswith(".weight_scale_2"):
        return torch.tensor(fan_in[name.removesuffix("_scale_2")] ** -0.5 / CODES_RMS)
    target = torch.float32 if dtype == "F32" else torch.bfloat16
    if len(shape) == 1:
        value = 1.0 if name.endswith(("norm.weight", "scale")) else 0.0
        return torch.full(shape, value, dtype=target, device=device)
    noise = torch.randn(shape, generator=generator, device=device)
    return (noise * shape[1] ** -0.5).to(target)


def main(argv: Sequence[str] | None = None) -> int:
    """Write one checkpoint; exit status 2 after a sentence of ours."""
    parser = argparse.ArgumentParser(prog="sglang_dsv4.bench.random_checkpoint")
    parser.add_argument("shapes", choices=CONFIGS)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    try:
        config = reduced(CONFIGS[args.shapes], args.layers, args.experts)
        write_random_checkpoint(args.folder, config, torch.device(args.device))
    except (Dsv4Error, FileExistsError) as error:
        print(error, file=sys.stderr)
        return EXIT_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())

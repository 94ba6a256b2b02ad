"""Writes bf16_projection_probe.json: bilinear probes of the bf16 checkpoint's projections.

usage: python make_bf16_probe.py BF16_CHECKPOINT_DIR NVFP4_CHECKPOINT_DIR

For each module that the NVFP4 checkpoint packs, with bf16 weight W [out, in], the file holds the
numbers z_k = u_k . (W v_k), k < PROBES. The vectors are signs from PCG64 (``signs`` below), so z is
a random projection of W, and the cosine between two such z estimates that between their weights.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
from safetensors import safe_open

PROBES = 128
TARGET = Path(__file__).parent / "bf16_projection_probe.json"


def signs(name: str, side: str, length: int) -> np.ndarray:
    """f32[PROBES, length] of +-1: the lowest bits of PCG64's raw output.

    Args:
        name: module, as in the checkpoint.
        side: "input" or "output"; both go into the seed, the CRC-32 of "name side".
        length: channels.
    """
    bits = np.random.PCG64(zlib.crc32(f"{name} {side}".encode())).random_raw(PROBES * length) & 1
    return (1 - 2 * bits.astype(np.float32)).reshape(PROBES, length)


def probe(name: str, outputs: np.ndarray) -> np.ndarray:
    """f64[PROBES]: u_k . outputs_k.

    Args:
        name: module, as in the checkpoint.
        outputs: f[PROBES, out], row k the output for the input ``signs(name, "input", in)[k]``.
    """
    return (signs(name, "output", outputs.shape[1]).astype(np.float64) * outputs).sum(-1)


def main(bf16_dir: str, nvfp4_dir: str) -> None:
    with safe_open(Path(nvfp4_dir) / "model.safetensors", "np") as file:
        suffix = ".weight_scale"
        modules = [k.removesuffix(suffix) for k in file.keys() if k.endswith(suffix)]  # noqa: SIM118
    values = {}
    with safe_open(Path(bf16_dir) / "model.safetensors", "pt") as file:
        for name in sorted(modules):
            weight = bf16_weight(file, name)
            outputs = signs(name, "input", weight.shape[1]).astype(np.float64) @ weight.T
            values[name] = [float(f"{value:.5g}") for value in probe(name, outputs)]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in values.items())
    TARGET.write_text("{\n" + lines + "\n}\n")
    print(f"{len(values)} projections, {TARGET.stat().st_size} bytes")


def bf16_weight(file: safe_open, name: str) -> np.ndarray:
    """f64[out, in]; the bf16 checkpoint holds the routed experts of a layer in two tensors."""
    experts, found, rest = name.partition(".experts.")
    if not found:
        return file.get_tensor(f"{name}.weight").double().numpy()
    expert, part = rest.split(".")
    if part == "down_proj":
        return file.get_tensor(f"{experts}.experts.down_proj")[int(expert)].double().numpy()
    gate, up = file.get_tensor(f"{experts}.experts.gate_up_proj")[int(expert)].chunk(2)
    return (gate if part == "gate_proj" else up).double().numpy()


if __name__ == "__main__":
    main(*sys.argv[1:])

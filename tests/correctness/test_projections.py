"""Every NVFP4 projection, as loaded, against the bf16 model that the checkpoint was made from.

``tests/data/bf16_projection_probe.json`` holds 128 numbers a projection of the bf16 model, made by
``tests/data/make_bf16_probe.py``, which describes them.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from harness import Runner
from torch import Tensor

from sglang_dsv4.checkpoint.quant import QuantKind

pytestmark = pytest.mark.e2e

DATA = Path(__file__).resolve().parents[1] / "data"
BF16 = json.loads((DATA / "bf16_projection_probe.json").read_text())
# Rounding to 4 bits is off by a tenth of the values in root mean square: 1 - cosine = 0.1^2 / 2.
# All weights of this checkpoint have 0.9946 or more; 128 probes give that to about 0.001.
MIN_COSINE = 0.99
FUSED = {
    "q_a_proj": ("q_a_kv_proj", 0),
    "self_attn.kv_proj": ("q_a_kv_proj", 1),
    "compressor.kv_proj": ("kv_gate_proj", 0),
    "compressor.gate_proj": ("kv_gate_proj", 1),
    "indexer.kv_proj": ("kv_gate_proj", 0),
    "indexer.gate_proj": ("kv_gate_proj", 1),
    "shared_experts.gate_proj": ("gate_up_proj", 0),
    "shared_experts.up_proj": ("gate_up_proj", 1),
}


def load_probe() -> ModuleType:
    """The script that made the numbers; its folder is not on the path."""
    spec = importlib.util.spec_from_file_location("make_bf16_probe", DATA / "make_bf16_probe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROBE = load_probe()


@pytest.fixture(scope="module")
def model() -> Iterator[torch.nn.Module]:
    with Runner(max_total_tokens=512) as runner:
        yield runner.model_runner.model


def projection(model: torch.nn.Module, name: str) -> tuple[int, Callable[[Tensor], Tensor]]:
    """(input width, function of inputs [n, in]) of a projection, inside its fused module."""
    parent, _, last = name.rpartition(".")
    routed = parent.rpartition(".experts.")
    if routed[1]:
        experts = model.get_submodule(f"{routed[0]}.experts")
        weight = (experts.w2_weight if last == "down_proj" else experts.w13_weight)[int(routed[2])]
        if last != "down_proj":
            weight = weight.chunk(2)[last == "up_proj"]
        return weight.shape[1], lambda x: torch.nn.functional.linear(x, weight)
    key = next((key for key in FUSED if name.endswith(key)), None)
    if key is None:
        module = model.get_submodule(name)
        return module.input_size, lambda x: module(x)[0]
    fused, part = FUSED[key]
    module = model.get_submodule(f"{parent}.{fused}")
    dims = model.model.dims
    sizes = [dims.q_lora_rank, dims.head_dim] if fused == "q_a_kv_proj" else 2
    split = torch.split if isinstance(sizes, list) else torch.chunk
    return module.input_size, lambda x: split(module(x)[0], sizes, dim=-1)[part]


def cosine(model: torch.nn.Module, name: str, module: str | None = None) -> float:
    """Between the bf16 probe of ``name`` and ours of the same projection, or of ``module``."""
    width, function = projection(model, module or name)
    inputs = torch.from_numpy(PROBE.signs(name, "input", width)).bfloat16()
    with torch.no_grad():
        ours = PROBE.probe(name, function(inputs).double().numpy())
    theirs = np.array(BF16[name])
    return float(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))


def test_the_file_names_every_nvfp4_projection(model):
    kinds = model.quant_config.kinds
    assert set(BF16) == {name for name, kind in kinds.items() if kind is QuantKind.NVFP4}


def test_every_projection_is_that_of_the_bf16_model(model):
    found = {name: cosine(model, name) for name in BF16}
    worst = min(found, key=found.__getitem__)
    mean = sum(found.values()) / len(found)
    print(f"{len(found)} projections: cosine {mean:.4f} on average, {found[worst]:.4f} for {worst}")
    assert found[worst] >= MIN_COSINE


def test_a_neighbour_is_not_taken_for_the_projection(model):
    """The probes tell projections apart: those of the next expert are uncorrelated."""
    name = "model.layers.3.mlp.experts.5.up_proj"
    assert abs(cosine(model, name, "model.layers.3.mlp.experts.6.up_proj")) < 0.6
    assert abs(cosine(model, name, "model.layers.3.mlp.experts.5.gate_proj")) < 0.6

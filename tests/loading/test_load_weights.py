"""Loading into the real model: streamed, complete, and with the faults that checkpoints have."""

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch
from harness import MODEL_DIR, Runner
from safetensors import safe_open

from sglang_dsv4.errors import CheckpointError
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

pytestmark = pytest.mark.e2e

FUSED = "model.layers.2.self_attn.q_a_kv_proj"
PARTS = ("model.layers.2.self_attn.q_a_proj", "model.layers.2.self_attn.kv_proj")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """SGLang's process groups and configuration, without which no layer can be built."""
    with Runner(max_total_tokens=4096, context_length=1024) as running:
        yield running


def new_model(runner: Runner) -> torch.nn.Module:
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    model = runner.model_runner.model
    with set_default_torch_dtype(torch.bfloat16):
        return type(model)(model.config)


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            yield name, file.get_tensor(name).clone()


def changed(**changes: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors with some replaced, or left out (None); dots are written __."""
    by_name = {name.replace("__", "."): value for name, value in changes.items()}
    for name, tensor in tensors():
        value = by_name.get(name, tensor)
        if value is not None:
            yield name, value


def test_tensors_are_released_as_they_are_loaded(runner):
    """Never more than the iterator's two tensors and one layer's fused parts are alive."""
    live = {"bytes": 0, "peak": 0}

    def tracked() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors():
            size = tensor.nbytes
            live["bytes"] += size
            live["peak"] = max(live["peak"], live["bytes"])
            weakref.finalize(tensor, lambda n=size: live.__setitem__("bytes", live["bytes"] - n))
            yield name, tensor

    model = new_model(runner)
    gc.collect()
    model.load_weights(tracked())
    total = sum(tensor.nbytes for _, tensor in tensors())
    largest = max(tensor.nbytes for _, tensor in tensors())
    # A CSA layer's fused projections have 0.5 MiB in 4 bits.
    assert live["peak"] <= 2 * largest + 2**19 < total / 9


def test_every_parameter_is_written(runner):
    model = new_model(runner)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0x7B)
    model.load_weights(tensors())
    for name, parameter in model.named_parameters():
        left = parameter.data.view(torch.uint8) == 0x7B
        assert not left.all(), name


def test_fused_projection_holds_its_parts(runner):
    model = new_model(runner)
    model.load_weights(tensors())
    fused = model.get_parameter(f"{FUSED}.weight")
    by_name = dict(tensors())
    assert torch.equal(fused, torch.cat([by_name[f"{part}.weight"] for part in PARTS]))


def test_a_tensor_that_never_comes_is_named(runner):
    name = "model.layers.4.self_attn.sinks"
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.self_attn\.sinks"):
        new_model(runner).load_weights(changed(**{name.replace(".", "__"): None}))


def test_a_fused_part_that_never_comes_is_named(runner):
    name = f"{PARTS[1]}.weight_scale"
    with pytest.raises(CheckpointError, match=r"q_a_kv_proj"):
        new_model(runner).load_weights(changed(**{name.replace(".", "__"): None}))


def test_nan_weight_scale_is_named(runner):
    name = "model.layers.1.mlp.experts.3.down_proj.weight_scale"
    scale = dict(tensors())[name]
    scale.view(torch.uint8)[5, 3] = 0x7F
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight_scale.*NaN"):
        new_model(runner).load_weights(changed(**{name.replace(".", "__"): scale}))


@pytest.mark.parametrize("value", [float("nan"), 0.0], ids=["nan", "zero"])
def test_unusable_input_scales_give_one_warning(runner, caplog, value):
    names = [name for name, _ in tensors() if name.endswith("input_scale")]
    bad = names[::10]
    changes = {name.replace(".", "__"): torch.tensor(value) for name in bad}
    with caplog.at_level(logging.WARNING, logger="sglang_dsv4"):
        new_model(runner).load_weights(changed(**changes))
    warnings = [r.getMessage() for r in caplog.records if "input_scale" in r.getMessage()]
    assert len(warnings) == 1
    assert f"{len(bad)} of {len(names)} modules" in warnings[0]


def test_unequal_outer_scales_of_a_fusion_are_reconciled(runner):
    """kv_proj rescaled by 3 outside and 1/3 inside: the dense weight stays within e4m3 rounding.

    A block scale that is rounded again is off by at most 1/16; its double rounding (the 1/3 here)
    by another 1/16.
    """
    by_name = dict(tensors())
    name = PARTS[1]
    scale, outer = by_name[f"{name}.weight_scale"], by_name[f"{name}.weight_scale_2"]
    third = (scale.float() / 3).to(torch.float8_e4m3fn)
    changes = {f"{name}.weight_scale": third, f"{name}.weight_scale_2": outer * 3}
    model = new_model(runner)
    model.load_weights(changed(**{k.replace(".", "__"): v for k, v in changes.items()}))
    layer = model.get_submodule(FUSED)
    layer.quant_method.process_weights_after_loading(layer)
    wanted = torch.cat(
        [
            dequantize_weight(
                *(by_name[f"{part}.{s}"] for s in ("weight", "weight_scale")),
                by_name[f"{part}.weight_scale_2"],
            )
            for part in PARTS
        ]
    )
    error = (layer.weight.float() - wanted).abs()
    assert (error <= wanted.abs() * (2 / 16 + 2 / 256) + 1e-6).all()

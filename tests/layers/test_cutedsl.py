"""The methods that hold weights in records: what they keep, and which function gets a batch.

The kernels are emulated in tests/kernels/test_experts_emulated.py and test_skinny_emulated.py.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import nvfp4, widen_records

from sglang_dsv4.errors import CheckpointError, UnsupportedError
from sglang_dsv4.kernels.experts import grouped
from sglang_dsv4.kernels.linear.records import pack_records, unpack_records
from sglang_dsv4.kernels.linear.widen import DIVISOR
from sglang_dsv4.kernels.reference.fp8 import widen_weight
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.layers import cutedsl_experts, cutedsl_linear
from sglang_dsv4.layers.cutedsl_experts import CuteMoEMethod
from sglang_dsv4.layers.cutedsl_linear import CuteLinearMethod
from sglang_dsv4.layers.experts_prefill import ROWS_WORTH


def experts_layer(experts, width, inner):
    method, layer = CuteMoEMethod(), torch.nn.Module()
    method.create_moe_runner(layer, SimpleNamespace(swiglu_limit=7.0, top_k=2))
    method.create_weights(layer, experts, width, inner, torch.bfloat16, weight_loader=None)
    for name in ("w13", "w2"):
        parameter = getattr(layer, f"{name}_weight")
        weight, scale = nvfp4(experts, parameter.shape[1], parameter.shape[2] * 2)
        parameter.data.copy_(weight)
        getattr(layer, f"{name}_weight_scale").data.copy_(scale)
    layer.w13_weight_scale_2.data.fill_(2.0**-10)
    layer.w2_weight_scale_2.data.copy_(torch.tensor([2.0**-12, 3e-4], dtype=torch.float32))
    return method, layer


@pytest.mark.parametrize(("inner", "padded"), [(96, 128), (64, 64)])
def test_experts_are_the_checkpoints(inner, padded):
    method, layer = experts_layer(2, 128, inner)
    gate_up = dequantize_weight(
        layer.w13_weight, layer.w13_weight_scale, torch.full((2,), 2.0**-10)
    )
    down = dequantize_weight(layer.w2_weight, layer.w2_weight_scale, layer.w2_weight_scale_2)
    method.process_weights_after_loading(layer)
    assert {name for name, _ in layer.named_parameters()} == {
        f"{part}_{name}" for part in ("w13", "w2") for name in ("weight", "weight_scale_2")
    }
    assert layer.w13_weight.shape == (2, 2 * padded // 16, 2, 576)
    assert layer.w2_weight.shape == (2, 8, padded // 64, 576)
    codes = unpack_records(layer.w13_weight, 2 * padded, 128)
    found = dequantize_weight(*codes, layer.w13_weight_scale_2).unflatten(1, (2, padded))
    assert torch.equal(found[:, :, :inner].flatten(1, 2), gate_up)
    assert not found[:, :, inner:].any()
    codes = unpack_records(layer.w2_weight, 128, padded)
    found = dequantize_weight(*codes, layer.w2_weight_scale_2)
    assert torch.equal(found[..., :inner], down) and not found[..., inner:].any()


def test_gate_and_up_get_one_outer_scale():
    method, layer = experts_layer(2, 128, 64)
    layer.w13_weight_scale.data.fill_(2.0)
    layer.w13_weight_scale_2.data.copy_(torch.tensor([[1.0, 0.5], [0.25, 1.0]]))
    method.process_weights_after_loading(layer)
    assert torch.equal(layer.w13_weight_scale_2.data, torch.ones(2))
    scales = unpack_records(layer.w13_weight, 128, 128)[1].float()
    assert scales[:, ::64, 0].tolist() == [[2.0, 1.0], [0.5, 2.0]]


def test_what_does_not_fit_is_refused():
    method, layer = experts_layer(2, 96, 64)
    with pytest.raises(UnsupportedError, match="hidden size of NVFP4 experts is 96, wanted"):
        method.process_weights_after_loading(layer)
    method, layer = experts_layer(2, 128, 64)
    layer.w2_weight_scale.data[1, 3, 2] = float("nan")
    with pytest.raises(CheckpointError, match="negative or NaN block scale"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_a_batch_gets_the_function_for_its_size(monkeypatch, many, fp8):
    method, layer = experts_layer(2, 128, 64)
    method.fp8 = fp8
    method.process_weights_after_loading(layer)
    calls = []
    for name in ("experts_decode", "products", "products_fp8"):

        def called(*args, name=name):
            calls.append((name, args))
            return args[0]

        monkeypatch.setattr(cutedsl_experts, name, called)

    def worthwhile(ids, experts, in_fp8):
        assert (ids, experts, in_fp8) == ("ids", 2, fp8)
        return many

    monkeypatch.setattr(cutedsl_experts, "worthwhile", worthwhile)
    topk = SimpleNamespace(topk_weights="routed", topk_ids="ids")
    given = SimpleNamespace(hidden_states="x", topk_output=topk)
    assert method.apply(layer, given).hidden_states == "x"
    ((name, args),) = calls
    assert name == (("products_fp8" if fp8 else "products") if many else "experts_decode")
    assert args[0] == "x"
    assert args[-3:] == ("routed", "ids", 7.0)
    if many:
        gate_up, down = args[1:-3]
        assert gate_up.undo == down.undo == DIVISOR[torch.float8_e4m3fn if fp8 else torch.bfloat16]
        assert (gate_up.experts, gate_up.outputs, gate_up.inputs) == (2, 128, 128)
        assert (down.experts, down.outputs, down.inputs) == (2, 128, 64)
        assert down.outer is layer.w2_weight_scale_2
    else:
        assert args[1] is layer.w13_weight and args[4] is layer.w2_weight_scale_2


@pytest.mark.parametrize("fp8", [False, True])
def test_widened_weights_times_what_they_lack_are_the_checkpoints(monkeypatch, fp8):
    weight, scale = nvfp4(3, 64, 128)
    outer = torch.tensor([2.0**-9, 2.0**-3, 1.0])
    records = pack_records(weight, scale)
    monkeypatch.setattr(cutedsl_experts, "widen", widen_records)
    made = cutedsl_experts.source(records, outer, fp8)
    out = torch.empty(2, 64, 128, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    made.widen(out, 1)
    factor = (made.outer[1:] * made.undo)[:, None, None]
    wanted = dequantize_weight(weight, scale, outer)[1:]
    if fp8:
        codes = widen_weight(weight, scale)[1:].float()
        assert torch.equal(out.float(), codes)
        # Four significant bits, below 2^-6 multiples of 2^-9.
        assert (codes * factor - wanted).abs().le(wanted.abs() / 16 + 2.0**-10 * factor).all()
    else:
        assert torch.equal(out.float() * factor, wanted)


@pytest.mark.parametrize(("tokens", "out", "fp8"), [(513, 48, True), (512, 48, False)])
def test_a_large_batch_of_a_linear_layer_in_fp8(monkeypatch, tokens, out, fp8):
    weight, scale = nvfp4(out, 80)
    layer, method = torch.nn.Module(), CuteLinearMethod(fp8=True)
    layer.rows, layer.arrived = out, None
    layer.weight, layer.weight_scale_2 = pack_records(weight, scale), torch.tensor([2.0**-6])
    layer.outer, layer.fp8_outer = 2.0**-6, torch.full((out,), 2.0**-3)
    x = torch.randn(80, tokens, dtype=torch.bfloat16).T
    calls = []

    def product(rows, dense, outer):
        calls.append("fp8")
        assert rows.stride(-1) == 1 and torch.equal(rows, x)
        assert torch.equal(dense.float(), widen_weight(weight, scale).float())
        assert outer is layer.fp8_outer
        return rows[:, :1].expand(-1, out)

    def linear(rows, *_):
        calls.append("bfloat16")
        return rows[:, :1].expand(-1, out)

    monkeypatch.setattr(cutedsl_linear, "widen", widen_records)
    monkeypatch.setattr(cutedsl_linear, "fp8_product", product)
    monkeypatch.setattr(cutedsl_linear, "records_linear", linear)
    assert method.apply(layer, x).shape == (tokens, out)
    assert calls == ["fp8" if fp8 else "bfloat16"]


@pytest.mark.parametrize(("out", "width"), [(48, 128), (40, 80)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer(monkeypatch, out, width, bias):
    weight, scale = nvfp4(out, width)
    layer = torch.nn.Module()
    values = {
        "weight": weight,
        "weight_scale": scale,
        "weight_scale_2": torch.tensor([0.25, 0.125]),
        "input_scale": torch.ones(2),
    }
    for name, value in values.items():
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    method = CuteLinearMethod()
    method.process_weights_after_loading(layer)
    assert {name for name, _ in layer.named_parameters()} == {"weight", "weight_scale_2"}
    # Widened e4m3 weights are eighths: the layer's outer scale is 0.25.
    assert layer.fp8_outer.tolist() == [2.0] * out

    def linear(x, records, scale_2, outer, rows, arrived):
        assert arrived is layer.arrived and arrived.numel() >= records.shape[0]
        assert outer == scale_2.item() == 0.25
        dense = dequantize_weight(*unpack_records(records, rows, x.shape[1]), scale_2)
        return x @ dense.T

    monkeypatch.setattr(cutedsl_linear, "records_linear", linear)
    x, extra = torch.randn(2, 3, width), torch.randn(out) if bias else None
    wanted = torch.nn.functional.linear(
        x, dequantize_weight(weight, scale, torch.tensor(0.25)), extra
    )
    torch.testing.assert_close(method.apply(layer, x, extra), wanted)


@pytest.fixture
def bfloat16_default():
    """New float tensors are bfloat16 unless told otherwise, as while SGLang loads a model."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_linear_layer_loads_under_a_bfloat16_default(bfloat16_default, monkeypatch, fp8):
    """Created, filled and repacked by its own method, then compiled for every batch size."""
    method, layer = CuteLinearMethod(fp8), torch.nn.Module()
    method.create_weights(layer, 128, [48], 128, 48, torch.bfloat16, weight_loader=None)
    weight, scale = nvfp4(48, 128)
    layer.weight.data.copy_(weight)
    layer.weight_scale.data.copy_(scale)
    layer.weight_scale_2.data.fill_(0.3)
    layer.input_size_per_partition = 128
    method.process_weights_after_loading(layer)
    assert layer.weight.dtype == torch.uint8
    assert (layer.weight_scale_2.dtype, layer.weight_scale_2.shape) == (torch.float32, (1,))
    assert layer.weight_scale_2.item() == torch.tensor(0.3, dtype=torch.float32).item()
    assert layer.arrived.dtype == torch.int32
    calls = []

    def linear(x, records, scale_2, outer, rows, arrived):
        calls.append((len(x), x.dtype, scale_2.dtype))
        return x.new_zeros(len(x), rows)

    def product(x, dense, outer):
        calls.append((len(x), x.dtype, outer.dtype))
        return x.new_zeros(len(x), len(dense))

    monkeypatch.setattr(cutedsl_linear, "planned_tokens", lambda records, inputs: (1, 64))
    monkeypatch.setattr(cutedsl_linear, "widen", widen_records)
    monkeypatch.setattr(cutedsl_linear, "records_linear", linear)
    monkeypatch.setattr(cutedsl_linear, "fp8_product", product)
    method._compile(layer)
    assert [tokens for tokens, *_ in calls] == [1, 64, 65, 513 if fp8 else 65]
    assert {call[1:] for call in calls} == {(torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("fp8", [False, True])
def test_experts_load_under_a_bfloat16_default(bfloat16_default, monkeypatch, fp8):
    """Loaded, then compiled with stand-ins for the launches, which need a GPU."""
    method, layer = experts_layer(2, 128, 96)
    method.fp8 = fp8
    layer.w13_weight_scale_2.data.copy_(torch.tensor([[0.3, 0.1], [0.1, 0.1]]))
    method.process_weights_after_loading(layer)
    for name in ("w13", "w2"):
        assert getattr(layer, f"{name}_weight").dtype == torch.uint8
        outer = getattr(layer, f"{name}_weight_scale_2")
        assert (outer.dtype, outer.shape) == (torch.float32, (2,))
    launches, calls = [], []

    def launch(shape, x, records, outer, routed, lists, out, limit):
        launches.append((x.dtype, outer.dtype, routed.dtype, lists[0].dtype, out.dtype))

    def products(x, gate_up, down, routed, ids, clamp):
        calls.append((gate_up.experts, gate_up.undo, down.undo))
        dtypes = (x.dtype, gate_up.outer.dtype, down.outer.dtype, routed.dtype, ids.dtype)
        assert dtypes == (torch.bfloat16, *[torch.float32] * 3, torch.int32)

    def worthwhile(ids, experts, in_fp8):
        assert ids.numel() >= ROWS_WORTH[fp8] * experts and in_fp8 == fp8
        return True

    plan = grouped.Plan(
        grouped.Shape(True, 128, 128, 2, 1, 1), grouped.Shape(False, 128, 128, 2, 1, 1)
    )
    asked = set()
    lists = (torch.zeros(2, dtype=torch.int32),) * 3
    monkeypatch.setattr(grouped, "num_sms", lambda index: 132)
    monkeypatch.setattr(grouped, "current_arch", lambda: "sm_90a")
    monkeypatch.setattr(grouped, "experts_plan", lambda tokens, *_: asked.add(tokens) or plan)
    monkeypatch.setattr(grouped, "slot_lists", lambda *_: lists)
    monkeypatch.setattr(grouped, "launch", launch)
    monkeypatch.setattr(cutedsl_experts, "products_fp8" if fp8 else "products", products)
    monkeypatch.setattr(cutedsl_experts, "worthwhile", worthwhile)
    method._compile(layer)
    # What prepares two shapes, and one token through both.
    f32, bf16, i32 = torch.float32, torch.bfloat16, torch.int32
    assert launches == [(bf16, f32, f32, i32, bf16)] * 4
    assert asked == set(range(1, ROWS_WORTH[fp8] + 1))
    undo = DIVISOR[torch.float8_e4m3fn if fp8 else torch.bfloat16]
    assert calls == [(1, undo, undo)]

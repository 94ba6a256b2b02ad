"""Experts of a large prefill in FP8: all but the two grouped products, which run on a GPU only.

Those have stand-ins in plain torch, the rest is interpreted; the reference is in float64.
"""

import fp8_experts as cases
import pytest
import torch
from conftest import widen_records
from interpreted import convert_to_e4m3_as_torch, interpreted, round_to_bfloat16_as_torch

from sglang_dsv4.kernels.reference.swiglu import clamped_swiglu
from sglang_dsv4.layers import cutedsl_experts, grouped_fp8

EXPERTS, WIDTH, INNER = 8, 128, 64
# A float32 sum of so many products, each of which is exact.
SUMS = WIDTH * 2.0**-24
E4M3 = torch.float8_e4m3fn


def ranges(weight, starts, factor, out):
    """(expert, slice of its rows); what the products are given is as they say."""
    assert weight.dtype == E4M3 and weight.is_contiguous()
    assert starts.dtype == torch.int32 and starts.shape == (len(weight) + 1,)
    assert factor.dtype == torch.float32 and factor.shape == (len(out),)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    bounds = starts.tolist()
    assert bounds == sorted(bounds) and bounds[0] >= 0 and bounds[-1] <= len(out)
    assert not any(size % 16 for size in weight.shape[1:])
    return [(e, slice(*bounds[e : e + 2])) for e in range(len(weight))]


def gate_up(x, weight, starts, tokens, factor, limit, hidden):
    assert x.dtype == E4M3 and x.is_contiguous() and x.shape[1] == weight.shape[2]
    assert tokens.dtype == torch.int32 and tokens.shape == factor.shape
    assert 2 * hidden.shape[1] == weight.shape[1]
    for expert, own in ranges(weight, starts, factor, hidden):
        sums = x[tokens[own].long()].float() @ weight[expert].float().T
        hidden[own] = clamped_swiglu(*(sums * factor[own, None]).chunk(2, 1), limit).bfloat16()


def down(hidden, weight, starts, factor, out):
    assert hidden.dtype == E4M3 and hidden.is_contiguous()
    assert weight.shape[1:] == (out.shape[1], hidden.shape[1])
    for expert, own in ranges(weight, starts, factor, out):
        sums = hidden[own].float() @ weight[expert].float().T
        out[own] = (sums * factor[own, None]).bfloat16()


@pytest.fixture
def layer(monkeypatch):
    from sglang.srt.layers.moe import fused_moe_triton

    convert_to_e4m3_as_torch(monkeypatch)
    round_to_bfloat16_as_torch(monkeypatch)
    monkeypatch.setattr(fused_moe_triton, "moe_align_block_size", cases.align_in_any_order)
    monkeypatch.setattr(cutedsl_experts, "widen", widen_records)
    helpers = [f"sglang_dsv4.{n}" for n in ("kernels.linear.fp8_rows", "layers.expert_rows")]
    module = interpreted("sglang_dsv4.layers.experts_prefill", monkeypatch, *helpers)
    monkeypatch.setattr(grouped_fp8, "gate_up", gate_up)
    monkeypatch.setattr(grouped_fp8, "down", down)
    made = cases.Layer(module, monkeypatch, (EXPERTS, WIDTH, INNER))
    cases.poison_allocations(monkeypatch)
    return made


@pytest.mark.parametrize("top_k", [1, 6])
@pytest.mark.parametrize("tokens", [1, 3, 127, 128, 129, 257])
def test_any_number_of_tokens(layer, tokens, top_k):
    x, ids = cases.activations(tokens, WIDTH), cases.choices("any", tokens, top_k, EXPERTS)
    routed = torch.rand(tokens, top_k)
    found = layer(x, routed, ids, 7.0)
    assert found.shape == x.shape and found.dtype == x.dtype
    layer.check(found, x, routed, ids, 7.0, SUMS)


@pytest.mark.parametrize("limit", [0.5, None])
@pytest.mark.parametrize("kind", ["any", "one", "ends", "none"])
def test_hostile_choices(layer, kind, limit):
    x, ids = cases.activations(60, WIDTH), cases.choices(kind, 60, 3, EXPERTS)
    routed = torch.rand(60, 3)
    layer.check(layer(x, routed, ids, limit), x, routed, ids, limit, SUMS)


@pytest.mark.parametrize(("held", "parts"), [(0.4, [1] * 8), (3, [3, 3, 2]), (5, [4, 4]), (9, [8])])
def test_parts_of_scratch(layer, monkeypatch, held, parts):
    """Scratch of fewer bytes than an expert has, of some experts', and of more than there are."""
    x, ids, routed = cases.activations(40, WIDTH), cases.choices("any", 40, 2, 8), torch.rand(40, 2)
    whole = layer(x, routed, ids, 7.0)
    assert layer.parts == [8]
    monkeypatch.setattr(layer.module, "EXPERTS_SCRATCH", int(held * 2 * INNER * WIDTH))
    found = layer(x, routed, ids, 7.0)
    assert layer.parts == parts
    assert torch.equal(found, whole)
    layer.check(found, x, routed, ids, 7.0, SUMS)


@pytest.mark.parametrize("limit", [0.5, None])
def test_broken_rows_stay_so_and_alone(layer, limit):
    x, ids, routed = cases.activations(40, WIDTH), cases.choices("any", 40, 3, 8), torch.rand(40, 3)
    ids[10:14] = torch.tensor([0, 3, 7])
    ids[13] = -1
    sound = layer(x, routed, ids, limit)
    assert sound.isfinite().all()
    broken = x.clone()
    broken[10, 7] = float("nan")
    broken[11, 0] = float("inf")
    broken[12, -1] = -float("inf")
    broken[13] = float("nan")
    found = layer(broken, routed, ids, limit)
    assert found[10:13].isnan().all()
    others = torch.tensor([row for row in range(40) if row not in (10, 11, 12)])
    assert torch.equal(found[others], sound[others])
    assert not found[13].any()
    layer.check(found, x, routed, ids, limit, SUMS, others)


def test_huge_rows_are_clamped(layer):
    """Sums near the end of float32's range."""
    x, ids, routed = cases.activations(20, WIDTH), cases.choices("any", 20, 2, 8), torch.rand(20, 2)
    x[9:15] *= 2.0**120
    found = layer(x, routed, ids, 7.0)
    assert found.isfinite().all()
    layer.check(found, x, routed, ids, 7.0, SUMS)


def test_under_a_bfloat16_default(layer):
    """As while SGLang loads a model, when a layer's first call is made."""
    x, ids, routed = cases.activations(20, WIDTH), cases.choices("any", 20, 2, 8), torch.rand(20, 2)
    wanted = layer(x, routed, ids, 7.0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(layer(x, routed, ids, 7.0), wanted)
    finally:
        torch.set_default_dtype(torch.float32)

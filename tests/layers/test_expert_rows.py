"""Rows of chosen experts, interpreted: their order, their factors and their sum, bit by bit."""

import fp8_experts as cases
import pytest
import torch
from interpreted import interpreted, round_to_bfloat16_as_torch

EXPERTS = 8


@pytest.fixture
def module(monkeypatch):
    from sglang.srt.layers.moe import fused_moe_triton

    round_to_bfloat16_as_torch(monkeypatch)
    monkeypatch.setattr(fused_moe_triton, "moe_align_block_size", cases.align_in_any_order)
    made = interpreted("sglang_dsv4.layers.expert_rows", monkeypatch)
    cases.poison_allocations(monkeypatch)
    return made


def owned(order):
    return order.experts >= 0


@pytest.mark.parametrize("kind", ["any", "one", "ends", "none"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (2, 2), (3, 6), (257, 6)])
def test_order(module, kind, tokens, top_k):
    ids = cases.choices(kind, tokens, top_k, EXPERTS)
    order = module.sort_slots(ids, EXPERTS)
    assert {part.dtype for part in order} == {torch.int32}
    assert order.slots.shape == order.experts.shape == (ids.numel(),)
    assert order.slots.sort().values.tolist() == list(range(ids.numel()))
    assert torch.equal(order.experts, ids.flatten()[order.slots.long()])
    assert order.experts.tolist() == sorted(ids.flatten().tolist())
    assert order.starts.shape == (EXPERTS + 1,)
    assert order.starts[0] == (ids < 0).sum() and order.starts[-1] == ids.numel()
    for expert in range(EXPERTS):
        rows = order.experts[order.starts[expert] : order.starts[expert + 1]]
        assert (rows == expert).all() and len(rows) == (ids == expert).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["any", "none"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (128, 1), (129, 6)])
def test_factors_of_gathered_rows(module, tokens, top_k, kind, dtype):
    ids = cases.choices(kind, tokens, top_k, EXPERTS)
    order = module.sort_slots(ids, EXPERTS)
    scale, outer = torch.rand(tokens), torch.rand(EXPERTS).to(dtype)
    scale[0] = float("nan")
    found, factor, places = module.gathered_rows(order, scale, outer, 8.0, top_k)
    slots, mine = order.slots.long(), owned(order)
    assert found.dtype == places.dtype == torch.int32 and factor.dtype == torch.float32
    assert torch.equal(found.long(), slots // top_k)
    wanted = outer.float()[order.experts.long()] * 8 * scale[slots // top_k]
    torch.testing.assert_close(factor[mine], wanted[mine], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places[slots[mine]], torch.arange(ids.numel(), dtype=torch.int32)[mine])
    assert (places[slots[~mine]] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["any", "none"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (128, 1), (129, 6)])
def test_factors_of_weighted_rows(module, tokens, top_k, kind, dtype):
    ids = cases.choices(kind, tokens, top_k, EXPERTS)
    order = module.sort_slots(ids, EXPERTS)
    scale, outer = torch.rand(ids.numel()), torch.rand(EXPERTS)
    scale[-1] = float("nan")
    routed = torch.rand(tokens, top_k).to(dtype)
    factor = module.weighted_factors(order, scale, outer, 8.0, routed)
    mine = owned(order)
    wanted = outer[order.experts.long()] * 8 * scale
    wanted = wanted * routed.flatten().float()[order.slots.long()]
    assert factor.dtype == torch.float32
    torch.testing.assert_close(factor[mine], wanted[mine], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [1, 64, 1024, 1040])
@pytest.mark.parametrize("top_k", [1, 6])
def test_sum(module, width, top_k):
    """In the order of the choices; what stands in rows without an expert counts for nothing."""
    parts = torch.randn(20 * top_k, width).bfloat16()
    places = torch.randperm(20 * top_k).int()
    none = torch.rand(20 * top_k) < 0.3
    none[5 * top_k : 6 * top_k] = True
    parts[places[none].long()] = float("nan")
    parts[places[0].long()] = float("inf")
    none[0] = False
    places[none] = -1
    found = module.sum_rows(parts, places, top_k)
    wanted = torch.zeros(20, width)
    for part in places.view(20, top_k).T.long():
        wanted += torch.where(part[:, None] < 0, 0.0, parts[part.clamp(min=0)].float())
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted.bfloat16())
    assert not found[5].any() and (found[0] == float("inf")).all()

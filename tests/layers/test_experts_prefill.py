"""Experts of a large prefill, interpreted: row blocks, and products of weights from records."""

import sys

import pytest
import torch
from conftest import nvfp4, widen_records
from interpreted import interpreted, round_to_bfloat16_as_torch
from slot_lists import align

from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.reference.moe import moe_experts
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.layers import cutedsl_experts, experts_prefill
from sglang_dsv4.layers.expert_products import BLOCK_ROWS, Source


def dot(_, left, right, total, *options):
    """Products of bfloat16 by torch: the interpreter multiplies the bits."""
    left, right = (torch.tensor(part.data).view(torch.bfloat16).float() for part in (left, right))
    return type(total)((left @ right).numpy() + total.data, total.dtype)


@pytest.fixture
def module(monkeypatch):
    from sglang.srt.layers.moe import fused_moe_triton
    from triton.runtime.interpreter import InterpreterBuilder

    round_to_bfloat16_as_torch(monkeypatch)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(fused_moe_triton, "moe_align_block_size", align)
    monkeypatch.setattr(cutedsl_experts, "widen", widen_records)
    helper = "sglang_dsv4.layers.expert_products"
    module = interpreted("sglang_dsv4.layers.experts_prefill", monkeypatch, helper)
    monkeypatch.setattr(sys.modules[helper], "num_sms", lambda index: 1)
    return module


def sources(matrices: list) -> list[Source]:
    """Both matrices of the experts, (weight, scale, outer) each."""
    return [cutedsl_experts.source(pack_records(w, s), outer) for w, s, outer in matrices]


@pytest.mark.parametrize(("fp8", "rows"), [(False, 288), (True, 144)])
def test_a_batch_is_large_from_so_many_rows_an_expert_on(monkeypatch, fp8, rows):
    class Ids:
        is_cuda, device = True, "cuda:0"

        def __init__(self, slots: int) -> None:
            self.numel = lambda: slots

    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert experts_prefill.worthwhile(Ids(rows * 16), 16, fp8)
    assert not experts_prefill.worthwhile(Ids(rows * 16 - 1), 16, fp8)
    capability = (10, 0)
    assert not experts_prefill.worthwhile(Ids(rows * 16), 16, fp8)
    assert not experts_prefill.worthwhile(torch.zeros(rows * 16), 16, fp8)


def test_blocks_hold_every_slot_once_with_its_expert(module):
    ids = torch.randint(0, 5, (90, 4), dtype=torch.int32)
    ids[ids == 3] = 1
    ids[ids == 0] = -1
    rows, experts, starts = module.row_blocks(ids, 6)
    assert starts[0] > 0
    assert starts[3] == starts[4]
    assert starts[5] == starts[6]
    used = rows[: starts[-1] * BLOCK_ROWS].view(-1, BLOCK_ROWS)
    for expert in range(6):
        own = used[starts[expert] : starts[expert + 1]]
        assert (experts[starts[expert] : starts[expert + 1]] == expert).all()
        found = own[own < ids.numel()]
        assert torch.equal(found.long(), (ids.flatten() == expert).nonzero().flatten())


@pytest.mark.parametrize(("limit", "inner"), [(0.5, 128), (None, 64)])
def test_experts_are_the_references(module, monkeypatch, limit, inner):
    count, width, tokens, chosen = 5, 128, 70, 3
    monkeypatch.setattr(module, "EXPERTS_SCRATCH", 2 * 4 * inner * width)
    matrices = []
    for shape in ((2 * inner, width), (width, inner)):
        outer = torch.exp2(torch.randint(-14, -10, (count,)).float())
        matrices.append((*nvfp4(count, *shape), outer))
    gate_up, down = (dequantize_weight(*matrix) for matrix in matrices)
    x = torch.randn(tokens, width).bfloat16()
    routed = torch.rand(tokens, chosen)
    ids = torch.rand(tokens, count).topk(chosen).indices.int()
    ids[ids == 2] = 4
    ids[5:9] = -1
    found = module.products(x, *sources(matrices), routed, ids, limit)
    assert not found[5:9].any()
    routed[5:9] = 0
    wanted = moe_experts(x.float(), gate_up, down, routed, ids.clamp(min=0), limit)
    error = (found.float().sum(1) - wanted).norm() / wanted.norm()
    assert error < 1e-2


def hostile_batch(count, width, inner, tokens, chosen):
    """(x, (weight, scale, outer) of both, routed, ids): no slot has expert 2, some have none."""
    matrices = []
    for shape in ((2 * inner, width), (width, inner)):
        outer = torch.exp2(torch.randint(-14, -10, (count,)).float())
        matrices.append((*nvfp4(count, *shape), outer))
    x = torch.randn(tokens, width).bfloat16()
    x[1] = 0
    x[2] *= 2.0**20
    x[3] *= 2.0**-20
    ids = torch.rand(tokens, count).topk(chosen).indices.int()
    ids[ids == 2] = 4
    ids[5:9] = -1
    ids[9, 1] = -1
    return x, matrices, torch.rand(tokens, chosen) + 0.1, ids


@pytest.mark.parametrize("limit", [0.5, None])
def test_a_broken_row_stays_one_and_alone(module, limit):
    x, matrices, routed, ids = hostile_batch(5, 128, 64, 30, 2)
    made = sources(matrices)
    sound = module.products(x, *made, routed, ids, limit)
    assert sound.isfinite().all()
    x[20, 5] = float("nan")
    found = module.products(x, *made, routed, ids, limit)
    assert found[20].isnan().all()
    others = torch.arange(30) != 20
    assert torch.equal(found[others], sound[others])

"""Experts of a large prefill, interpreted: row blocks, and products of weights from records."""

import sys

import pytest
import torch
from conftest import nvfp4, widen_records
from interpreted import convert_to_e4m3_as_torch, interpreted, round_to_bfloat16_as_torch
from slot_lists import align

from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.reference.fp8 import WEIGHT_SHIFT, quantize_rows, widen_weight
from sglang_dsv4.kernels.reference.moe import moe_experts
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.kernels.reference.swiglu import clamped_swiglu
from sglang_dsv4.layers import cutedsl_experts, experts_prefill
from sglang_dsv4.layers.expert_products import BLOCK_ROWS, Source


def dot(_, left, right, total, *options):
    """Products of bfloat16 or e4m3 by torch: the interpreter multiplies the bits of bfloat16."""
    operands = {1: torch.float8_e4m3fn, 2: torch.bfloat16}
    left, right = (
        torch.tensor(part.data).view(operands[part.data.itemsize]).float() for part in (left, right)
    )
    return type(total)((left @ right).numpy() + total.data, total.dtype)


@pytest.fixture
def module(monkeypatch):
    from sglang.srt.layers.moe import fused_moe_triton
    from triton.runtime.interpreter import InterpreterBuilder

    convert_to_e4m3_as_torch(monkeypatch)
    round_to_bfloat16_as_torch(monkeypatch)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(fused_moe_triton, "moe_align_block_size", align)
    monkeypatch.setattr(cutedsl_experts, "widen", widen_records)
    helpers = ("kernels.linear.fp8_rows", "layers.expert_products")
    helpers = [f"sglang_dsv4.{name}" for name in helpers]
    module = interpreted("sglang_dsv4.layers.experts_prefill", monkeypatch, *helpers)
    monkeypatch.setattr(sys.modules[helpers[1]], "num_sms", lambda index: 1)
    return module


def sources(matrices: list, fp8: bool = False) -> list[Source]:
    """Both matrices of the experts, (weight, scale, outer) each."""
    return [cutedsl_experts.source(pack_records(w, s), outer, fp8) for w, s, outer in matrices]


@pytest.mark.parametrize(("fp8", "rows"), [(False, 384), (True, 256)])
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


def fp8_product(x, weight, expert):
    """weight[expert[t]] @ x[t] of rounded operands: [T, N] float32."""
    values, scale = quantize_rows(x)
    product = weight[expert.clamp(min=0)] @ values.float()[:, :, None]
    return product[:, :, 0] * scale[:, None]


def fp8_experts(x, matrices, routed, ids, limit):
    """[T, k, D] float32; SwiGLU's results are rounded to bfloat16 first, as the kernel's are."""
    gate_up, down = (
        widen_weight(weight, scale).float() * (outer / WEIGHT_SHIFT)[:, None, None]
        for weight, scale, outer in matrices
    )
    results = []
    for weight, expert in zip(routed.T, ids.T, strict=True):
        gate, up = fp8_product(x, gate_up, expert).chunk(2, dim=1)
        hidden = clamped_swiglu(gate, up, limit).bfloat16()
        product = fp8_product(hidden, down, expert) * weight[:, None]
        results.append(torch.where(expert[:, None] < 0, 0.0, product))
    return torch.stack(results, 1)


@pytest.mark.parametrize(
    ("limit", "width", "inner"), [(0.5, 128, 128), (None, 128, 64), (2.0, 256, 192)]
)
def test_fp8_experts_are_the_references(module, monkeypatch, limit, width, inner):
    """Scratch holds two experts of five; widths of whole and of half steps of 128 columns."""
    torch.manual_seed(width)
    monkeypatch.setattr(module, "EXPERTS_SCRATCH", 4 * inner * width)
    x, matrices, routed, ids = hostile_batch(5, width, inner, 70, 3)
    x[10, 7] = float("nan")
    x[11, 0] = float("inf")
    x[12, -1] = -float("inf")
    found = module.products(x, *sources(matrices, fp8=True), routed, ids, limit, fp8=True).float()
    wanted = fp8_experts(x, matrices, routed, ids, limit)
    broken = torch.zeros(70, dtype=torch.bool)
    broken[10:13] = True
    assert found[broken].isnan().all() and wanted[broken].isnan().all()
    found, wanted = found[~broken], wanted[~broken]
    nothing = (ids[~broken] < 0) | (x[~broken] == 0).all(1)[:, None]
    assert not found[nothing].any() and not wanted[nothing].any()
    error = (found - wanted)[~nothing].norm(dim=1) / wanted[~nothing].norm(dim=1)
    # The result is rounded to bfloat16, 2^-8 of a value. Float32 sums in another order move a
    # hidden value by 2^-20 or so; where that crosses the middle of two bfloat16 and these the
    # middle of two e4m3 (one of 2^13), it changes by a step, up to 2^-3 of it, and the row by no
    # more. A hidden row that is not rounded to e4m3 would be off by 2.6%.
    assert error.quantile(0.9) < 2.0**-8
    assert error.max() < 2.0**-3


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

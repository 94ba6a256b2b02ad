"""Experts of a large prefill, interpreted: widening from Marlin's order, row blocks, products."""

import numpy as np
import pytest
import torch
from conftest import nvfp4
from interpreted import interpreted

from sglang_dsv4.kernels.reference.moe import moe_experts
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.layers.marlin import pack_experts


def bfloat16_dot(_, left, right, total, *options):
    """The interpreter's product multiplies the bits of bfloat16 operands."""
    left, right = ((part.data.astype(np.uint32) << 16).view(np.float32) for part in (left, right))
    return type(total)(left @ right + total.data, total.dtype)


def align(ids, block, experts, *, return_inactive_prefix_count):
    """SGLang's ``moe_align_block_size``, which needs a GPU: slots without an expert come first."""
    assert return_inactive_prefix_count
    flat, rows, owners = ids.flatten(), [], []
    for expert in range(-1, experts):
        own = (flat == expert).nonzero().flatten().tolist()
        own += [len(flat)] * (-len(own) % block)
        rows += own
        owners += [expert] * (len(own) // block)
    counts = torch.tensor([len(rows), owners.count(-1)], dtype=torch.int32)
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(owners, dtype=torch.int32), counts


@pytest.fixture
def module(monkeypatch):
    from sglang.srt.layers.moe import fused_moe_triton
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", bfloat16_dot)
    monkeypatch.setattr(fused_moe_triton, "moe_align_block_size", align)
    module = interpreted("sglang_dsv4.layers.experts_prefill", monkeypatch)
    monkeypatch.setattr(module, "num_sms", lambda index: 1)
    return module


@pytest.mark.parametrize("shape", [(128, 64), (256, 192)])
def test_widened_weights_are_the_checkpoints(module, marlin_repack, shape):
    weight, scale = nvfp4(4, *shape)
    packed = pack_experts(weight, scale, torch.ones(4))
    out = torch.empty(2, *shape, dtype=torch.bfloat16)
    module.widen(packed.weight, packed.scale, out, 1)
    wanted = dequantize_weight(weight, scale, torch.full((4,), 2.0**-7))
    assert torch.equal(out.float(), wanted[1:3])


def test_blocks_hold_every_slot_once_with_its_expert(module):
    ids = torch.randint(0, 5, (90, 4), dtype=torch.int32)
    ids[ids == 3] = 1
    ids[ids == 0] = -1
    rows, experts, starts = module.row_blocks(ids, 6)
    assert starts[0] > 0
    assert starts[3] == starts[4]
    assert starts[5] == starts[6]
    used = rows[: starts[-1] * module.BLOCK_ROWS].view(-1, module.BLOCK_ROWS)
    for expert in range(6):
        own = used[starts[expert] : starts[expert + 1]]
        assert (experts[starts[expert] : starts[expert + 1]] == expert).all()
        found = own[own < ids.numel()]
        assert torch.equal(found.long(), (ids.flatten() == expert).nonzero().flatten())


@pytest.mark.parametrize(("limit", "inner"), [(0.5, 128), (None, 64)])
def test_experts_are_the_references(module, marlin_repack, monkeypatch, limit, inner):
    count, width, tokens, chosen = 5, 128, 70, 3
    monkeypatch.setattr(module, "EXPERTS_SCRATCH", 2 * 4 * inner * width)
    matrices = []
    for shape in ((2 * inner, width), (width, inner)):
        weight, scale = nvfp4(count, *shape)
        outer = torch.exp2(torch.randint(-14, -10, (count,)).float())
        matrices.append(
            (pack_experts(weight, scale, outer), dequantize_weight(weight, scale, outer))
        )
    x = torch.randn(tokens, width).bfloat16()
    routed = torch.rand(tokens, chosen)
    ids = torch.rand(tokens, count).topk(chosen).indices.int()
    ids[ids == 2] = 4
    ids[5:9] = -1
    found = module.experts_prefill(x, matrices[0][0], matrices[1][0], routed, ids, limit)
    assert not found[5:9].any()
    routed[5:9] = 0
    wanted = moe_experts(x.float(), matrices[0][1], matrices[1][1], routed, ids.clamp(min=0), limit)
    error = (found.float().sum(1) - wanted).norm() / wanted.norm()
    assert error < 1e-2

"""The NVFP4 linear kernel on a CPU: its weight order, its launches, its arithmetic interpreted.

The interpreter multiplies in float32 (it truncates where a GPU rounds to bfloat16), so outputs are
float32 here and differ from the reference by the order of the sum: in / 2^24 of the largest term.
"""

import pytest
import torch
from interpreted import interpreted

from sglang_dsv4.kernels.linear import linear
from sglang_dsv4.kernels.linear.packing import BLOCK, pack_weight, unpack_weight
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

PACKAGE = "sglang_dsv4.kernels.linear"
LINEAR, DENSE, CODES = (f"{PACKAGE}.{name}" for name in ("linear", "dense", "codes"))
SHAPES = [(64, 128), (192, 256), (100, 96), (1, 16), (130, 416), (65, 1040)]


def random_weight(out: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(out * width)
    weight = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=draw)
    scale = torch.exp2(torch.rand(out, width // 16, generator=draw) * 14 - 7)
    scale[0, 0], scale[-1, -1] = 448.0, 2.0**-9
    return weight, scale.to(torch.float8_e4m3fn), torch.tensor([0.37])


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_packing_is_a_reordering(out, width):
    weight, scale, _ = random_weight(out, width)
    packed, packed_scale = pack_weight(weight, scale)
    blocks = -(-width // BLOCK)
    assert packed.shape == (out, blocks * 64) and packed_scale.shape == (out, blocks * 8)
    assert torch.equal(unpack_weight(packed)[:, : width // 2], weight)
    assert not unpack_weight(packed)[:, width // 2 :].any()
    assert torch.equal(packed_scale[:, : width // 16].view(torch.uint8), scale.view(torch.uint8))
    assert not packed_scale[:, width // 16 :].float().any()


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_widened_values(out, width, monkeypatch):
    module = interpreted(DENSE, monkeypatch, CODES)
    weight, scale, scale_2 = random_weight(out, width)
    packed, packed_scale = pack_weight(weight, scale)
    blocks = packed.shape[1] // 64
    found = torch.full((out, blocks * BLOCK), float("nan"))
    grid = (-(-out // 16), blocks)
    module._widen[grid](
        packed, packed_scale, scale_2, found, out, blocks, ROWS=16, FP8=False, INTERPRETED=True
    )
    wanted = dequantize_weight(weight, scale, scale_2)
    # Two float32 products in another order: one rounding each.
    torch.testing.assert_close(found[:, :width], wanted, rtol=2.0**-23, atol=0.0)
    assert not found[:, width:].any()


@pytest.mark.parametrize("tokens", [1, 17, 60])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("out", "width"), [(192, 512), (65, 1040)])
def test_products(out, width, splits, tokens, monkeypatch):
    module = interpreted(LINEAR, monkeypatch, CODES)
    weight, scale, scale_2 = random_weight(out, width)
    packed, packed_scale = pack_weight(weight, scale)
    # Rows of a wider matrix, the rest of which is NaN: no column beyond the last is read.
    draw = torch.Generator().manual_seed(tokens)
    x = torch.full((tokens, width + 40), float("nan"), dtype=torch.bfloat16)[:, :width]
    x.copy_(torch.randn(tokens, width, generator=draw))
    wanted = x.float() @ dequantize_weight(weight, scale, scale_2).T
    arrived = module.counters(out, x.device)
    plan = module.Plan(rows=64, tokens=16, splits=splits, warps=4, stages=2)
    for _ in range(2):  # the second call finds the counters as it needs them
        found = torch.full((tokens, out), float("nan"))
        module.launch_few(plan, x, packed, packed_scale, scale_2, arrived, found)
        bound = width * 2.0**-24 * float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=bound)
        assert not arrived.any()


def test_no_tokens(monkeypatch):
    weight, scale, scale_2 = random_weight(64, 128)
    x = torch.empty(0, 128, dtype=torch.bfloat16)
    arrived = linear.counters(64, x.device)
    out = linear.nvfp4_linear(x, *pack_weight(weight, scale), scale_2, arrived)
    assert out.shape == (0, 64)


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, linear.MANY_TOKENS])
@pytest.mark.parametrize(("out", "width"), [(512, 4096), (32768, 1024), (4096, 8192), (8, 128)])
def test_plans(tokens, out, width):
    blocks = width // BLOCK
    plan = linear.few_plan(tokens, out, blocks, 132)
    assert plan.tokens >= min(tokens, 64) and plan.tokens >= 16
    assert 1 <= plan.splits <= max(1, blocks // 2)
    tiles = -(-out // plan.rows) * -(-tokens // plan.tokens)
    assert tiles <= linear.counters(out, torch.device("cpu")).numel()

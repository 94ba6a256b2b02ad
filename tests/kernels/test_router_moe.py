"""Router, clamped SwiGLU and routed experts against transformers."""

import math

import cases
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Experts,
    DeepseekV4HashRouter,
    DeepseekV4MLP,
    DeepseekV4TopKRouter,
)

from sglang_dsv4.kernels.reference.moe import moe_experts
from sglang_dsv4.kernels.reference.router import route_hash, route_topk, sqrt_softplus
from sglang_dsv4.kernels.reference.swiglu import clamped_swiglu

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def sorted_by_id(weights, ids):
    order = ids.argsort(dim=-1)
    return weights.gather(1, order), ids.gather(1, order)


def test_sqrt_softplus_over_the_whole_range():
    x = torch.cat(
        (torch.linspace(-200, 200, 801), torch.tensor([-18.0, -17.99, -16.64, 0.0, 20.0]))
    )
    exact = [math.sqrt(math.log1p(math.exp(v)) if v < 500 else v) for v in x.tolist()]
    # e^x in float32 is good to a few 2^-24 times |x| / 2 <= 100 at the far end.
    torch.testing.assert_close(sqrt_softplus(x), torch.tensor(exact), rtol=2e-5, atol=0)
    assert (sqrt_softplus(x) > 0).all()


@torch.no_grad()
def test_topk_router_is_transformers():
    router = cases.randomise(DeepseekV4TopKRouter(cases.hf_config()))
    router.e_score_correction_bias.copy_(torch.randn(8))
    logits, weights, ids = router(torch.randn(40, 32))
    actual = route_topk(logits, router.e_score_correction_bias, 3, True, 1.5)
    expected = sorted_by_id(weights, ids)
    assert router.routed_scaling_factor == 1.5
    for left, right in zip(sorted_by_id(*actual), expected, strict=True):
        torch.testing.assert_close(left, right, **TOLERANCE)


@torch.no_grad()
def test_hash_router_is_transformers():
    router = cases.randomise(DeepseekV4HashRouter(cases.hf_config()))
    router.tid2eid.copy_(torch.stack([torch.randperm(8)[:3] for _ in range(64)]))
    tokens = torch.randint(0, 64, (40,))
    logits, weights, ids = router(torch.randn(40, 32), tokens)
    actual_weights, actual_ids = route_hash(logits, router.tid2eid.int(), tokens.int(), True, 1.5)
    assert torch.equal(actual_ids, ids)
    torch.testing.assert_close(actual_weights, weights, **TOLERANCE)


def test_the_bias_chooses_but_does_not_weigh():
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 5.0, 0.0, 4.0])
    weights, ids = route_topk(logits, bias, 2, True, 1.0)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]
    plain, _ = route_topk(logits, bias, 2, False, 2.0)
    assert plain[0, 0].item() == pytest.approx(2 * math.sqrt(math.log(2)))


@pytest.mark.parametrize("logit", [-20.0, -40.0, -80.0])
def test_very_negative_logits_still_share_the_weight(logit):
    logits = torch.full((2, 8), logit)
    table = torch.zeros(1, 4, dtype=torch.int64)
    for weights, _ in (
        route_topk(logits, torch.zeros(8), 4, True, 1.0),
        route_hash(logits, table, torch.zeros(2, dtype=torch.int64), True, 1.0),
    ):
        # The 1e-20 in the divisor is 0.06% of 4 e^-40.
        torch.testing.assert_close(weights, torch.full((2, 4), 0.25), rtol=1e-3, atol=0)


def test_underflown_logits_give_zero_and_not_nan():
    weights, _ = route_topk(torch.full((1, 8), -1e4), torch.zeros(8), 4, True, 1.0)
    assert weights.tolist() == [[0.0] * 4]


def test_swiglu_clamps_gate_above_and_up_on_both_sides():
    gate = torch.tensor([-50.0, 9.0, 10.0, 50.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 50.0, -50.0])

    def silu(v):
        return v / (1 + math.exp(-v))

    expected = [silu(-50), silu(9), silu(10), silu(10), 10 * silu(1), -10 * silu(1)]
    torch.testing.assert_close(clamped_swiglu(gate, up, 10.0), torch.tensor(expected))
    unlimited = clamped_swiglu(gate, up, None)
    assert unlimited[3].item() == pytest.approx(silu(50))
    assert clamped_swiglu(gate.bfloat16(), up.bfloat16(), 10.0).dtype is torch.bfloat16
    assert clamped_swiglu(torch.tensor(math.nan), torch.tensor(1.0), 10.0).isnan()


@torch.no_grad()
def test_swiglu_is_the_shared_expert_of_transformers():
    mlp = cases.randomise(DeepseekV4MLP(cases.hf_config()), scale=3.0)
    x = torch.randn(7, 32)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    assert (gate > 10).any()
    assert (up.abs() > 10).any()
    actual = mlp.down_proj(clamped_swiglu(gate, up, 10.0))
    torch.testing.assert_close(actual, mlp(x), rtol=1e-5, atol=1e-4)


def experts():
    module = cases.randomise(DeepseekV4Experts(cases.hf_config()), scale=1.0)
    x, weights = torch.randn(30, 32), torch.rand(30, 3)
    ids = torch.stack([torch.randperm(7)[:3] for _ in range(30)])
    return module, x, weights, ids


@torch.no_grad()
def test_experts_are_transformers():
    module, x, weights, ids = experts()
    expected = module(x, ids, weights)
    actual = moe_experts(x, module.gate_up_proj, module.down_proj, weights, ids, 10.0)
    # Down projections of values up to 100 over 16 products: float32 leaves 1e-4.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


@torch.no_grad()
def test_ids_outside_the_experts_contribute_nothing():
    module, x, weights, ids = experts()
    masked = weights.clone()
    ids[3], masked[3] = torch.tensor([-1, 8, 2]), torch.tensor([0.0, 0.0, 1.0])
    weights[3, 2] = 1.0
    ids[4] = -1
    args = (module.gate_up_proj, module.down_proj)
    actual = moe_experts(x, *args, weights, ids.int(), 10.0)
    expected = module(x[3:4], torch.tensor([[2]]), torch.ones(1, 1))
    torch.testing.assert_close(actual[3:4], expected, rtol=1e-5, atol=1e-3)
    assert not actual[4].any()
    assert moe_experts(x[:0], *args, weights[:0], ids[:0], 10.0).shape == (0, 32)


@torch.no_grad()
def test_bf16_experts():
    module, x, weights, ids = experts()
    args = (module.gate_up_proj.bfloat16(), module.down_proj.bfloat16(), weights, ids, 10.0)
    actual = moe_experts(x.bfloat16(), *args)
    exact = moe_experts(x.bfloat16().float(), args[0].float(), args[1].float(), *args[2:])
    assert actual.dtype is torch.bfloat16
    # bf16 rounds the two projections, the hidden values and the result, 2^-9 each, over sums of
    # mixed signs: within 2% of the largest value.
    assert (actual.float() - exact).abs().amax() <= 0.02 * exact.abs().amax()

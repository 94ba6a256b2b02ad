"""Rotary tables and rotations against transformers."""

import math

import cases
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4RotaryEmbedding,
    DeepseekV4UnweightedRMSNorm,
    apply_rotary_pos_emb,
)

from sglang_dsv4.kernels.reference.norm_rope import inverse_rope, q_norm_rope, rms_norm
from sglang_dsv4.kernels.reference.rope import YarnParams, apply_rope, build_rope_table

TABLES = {"main": (10000.0, None), "compress": (160000.0, YarnParams(16, 65536))}


@pytest.fixture(params=list(TABLES))
def rope_type(request):
    return request.param


def table_of(rope_type, length=4096):
    theta, yarn = TABLES[rope_type]
    return build_rope_table(length, theta, yarn=yarn)


def test_table_is_transformers_bit_for_bit(rope_type):
    positions = torch.cat((torch.arange(300), torch.randint(0, 200_000, (300,)))).sort().values
    rotary = DeepseekV4RotaryEmbedding(cases.hf_config())
    cos, sin = rotary(torch.zeros(1), positions[None], layer_type=rope_type)
    table = table_of(rope_type, 200_000)[positions]
    assert table.shape == (600, 64)
    assert torch.equal(table, torch.cat((cos[0], sin[0]), dim=-1))


def test_no_attention_factor_on_the_table(rope_type):
    table = table_of(rope_type)
    # cos^2 + sin^2 = 1 to three float32 roundings.
    one = table[:, :32].square() + table[:, 32:].square()
    torch.testing.assert_close(one, torch.ones_like(one), rtol=0, atol=3 * 2.0**-23)


def test_yarn_keeps_fast_pairs_and_slows_the_others():
    plain, yarn = build_rope_table(2, 160000.0), table_of("compress", 2)
    angle = [math.asin(min(1.0, t[1, 32].item())) for t in (plain, yarn)]
    assert angle[0] == angle[1]
    assert yarn[1, 63].item() == pytest.approx(plain[1, 63].item() / 16, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_transformers(rope_type, dtype):
    positions = torch.randint(0, 4096, (7,))
    x = torch.randn(1, 3, 7, 128).to(dtype)
    rotary = DeepseekV4RotaryEmbedding(cases.hf_config())
    cos, sin = rotary(torch.zeros(1), positions[None], layer_type=rope_type)
    expected = apply_rotary_pos_emb(x, cos, sin)[0].transpose(0, 1)
    table = table_of(rope_type)
    heads = x[0].transpose(0, 1)
    actual = apply_rope(heads[..., 64:], positions, table)
    # Two products and a sum in float32 each; bf16 results may differ by one ulp on a boundary.
    rtol = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(actual, expected[..., 64:], rtol=rtol, atol=1e-6)

    undone = apply_rotary_pos_emb(x, cos, -sin)[0].transpose(0, 1)
    torch.testing.assert_close(inverse_rope(heads, positions, table), undone, rtol=rtol, atol=1e-6)


def test_pairs_are_interleaved():
    table = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), dim=-1)
    x = torch.arange(64.0)
    rotated = apply_rope(x, torch.tensor(0), table)
    assert rotated[:4].tolist() == [-1.0, 0.0, -3.0, 2.0]
    assert torch.equal(apply_rope(rotated, torch.tensor(0), table, inverse=True), x)


def test_q_norm_rope_is_transformers(rope_type):
    positions = torch.randint(0, 4096, (5,))
    q = torch.randn(5, 4, 512) * 3
    normed = DeepseekV4UnweightedRMSNorm(eps=1e-6)(q).transpose(0, 1)[None]
    rotary = DeepseekV4RotaryEmbedding(cases.hf_config(head_dim=512))
    cos, sin = rotary(q, positions[None], layer_type=rope_type)
    expected = apply_rotary_pos_emb(normed, cos, sin)[0].transpose(0, 1)
    actual = q_norm_rope(q, positions, table_of(rope_type), 1e-6)
    # A mean of 512 squares, a reciprocal square root, a rotation: a few float32 roundings.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    half = q_norm_rope(q.bfloat16(), positions, table_of(rope_type), 1e-6)
    assert half.dtype is torch.bfloat16


def test_rms_norm_against_float64():
    x, weight = torch.randn(6, 96) * 5, torch.randn(96)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    # 96 squares summed in float32: well inside 1e-5 relative.
    torch.testing.assert_close(rms_norm(x, None, 1e-6).double(), exact, rtol=1e-5, atol=1e-7)
    weighted = rms_norm(x, weight, 1e-6).double()
    torch.testing.assert_close(weighted, exact * weight.double(), rtol=1e-5, atol=1e-7)
    zero = rms_norm(torch.zeros(2, 8), None, 1e-6)
    assert torch.equal(zero, torch.zeros(2, 8))
    # One rounding to bf16: half an ulp, 2^-9 relative, plus the float32 error above.
    half = rms_norm(x.bfloat16(), weight, 1e-6)
    single = rms_norm(x.bfloat16().float(), weight, 1e-6)
    torch.testing.assert_close(half.float(), single, rtol=2.0**-8, atol=0)


def test_positions_of_any_leading_shape():
    table = table_of("main")
    x, positions = torch.randn(2, 3, 5, 64), torch.randint(0, 4096, (2, 3))
    together = apply_rope(x, positions, table)
    for i in range(2):
        for j in range(3):
            assert torch.equal(together[i, j], apply_rope(x[i, j], positions[i, j], table))
    assert apply_rope(torch.zeros(0, 4, 64), torch.zeros(0, dtype=torch.int64), table).numel() == 0

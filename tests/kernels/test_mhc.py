"""Hyper-connections against transformers."""

import cases
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from sglang_dsv4.kernels.reference.mhc import hc_head, hc_post, hc_pre, hc_weights

# Projections of 128 products in float32, then 20 contractive normalisations: 1e-5 relative.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def arguments(module):
    return module.fn, module.base, module.scale, 20, 1e-6, 1e-6


@pytest.fixture
def connection():
    return cases.randomise(DeepseekV4HyperConnection(cases.hf_config()), scale=1.0)


@pytest.mark.parametrize("num_tokens", [1, 5])
@torch.no_grad()
def test_pre_is_transformers(connection, num_tokens):
    streams = torch.randn(num_tokens, 4, 32) * 3
    post, comb, collapsed = connection(streams[None])
    actual = hc_pre(streams, *arguments(connection))
    for left, right in zip(actual, (collapsed, post, comb), strict=True):
        torch.testing.assert_close(left, right[0], **TOLERANCE)


@torch.no_grad()
def test_post_sums_over_the_first_axis_of_comb(connection):
    streams, output = torch.randn(5, 4, 32), torch.randn(5, 32)
    _, post, comb = hc_pre(streams, *arguments(connection))
    # The comb of these weights is far from symmetric, so its transpose gives another result.
    assert (comb - comb.mT).abs().amax() > 0.1
    expected = torch.einsum("tj,td->tjd", post, output)
    expected += torch.einsum("tij,tid->tjd", comb, streams)
    actual = hc_post(output, streams, post, comb)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert (hc_post(output, streams, post, comb.mT) - expected).abs().amax() > 0.1


@torch.no_grad()
def test_comb_is_doubly_stochastic(connection):
    _, _, comb = hc_weights(torch.randn(50, 4, 32), *arguments(connection))
    # The last round normalises columns, so these are 1 to eps 1e-6; 20 rounds leave the rows of
    # these far from uniform weights within 0.1, where the first softmax alone leaves columns at 2.
    torch.testing.assert_close(comb.sum(-2), torch.ones(50, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(-1), torch.ones(50, 4), rtol=0, atol=0.1)


@torch.no_grad()
def test_head_is_transformers():
    head = cases.randomise(DeepseekV4HyperHead(cases.hf_config()), scale=1.0)
    streams = torch.randn(6, 4, 32)
    expected = head(streams[None])[0]
    actual = hc_head(streams, head.hc_fn, head.hc_base, head.hc_scale, 1e-6, 1e-6)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@torch.no_grad()
def test_bf16_streams_are_rounded_once(connection):
    streams, output = torch.randn(5, 4, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    collapsed, post, comb = hc_pre(streams, *arguments(connection))
    wide = hc_pre(streams.float(), *arguments(connection))
    assert torch.equal(collapsed, wide[0].bfloat16())
    assert torch.equal(post, wide[1])
    assert torch.equal(comb, wide[2])
    mixed = hc_post(output, streams, post, comb)
    assert torch.equal(mixed, hc_post(output.float(), streams.float(), post, comb).bfloat16())


@torch.no_grad()
def test_no_tokens_and_strided_streams(connection):
    streams = torch.randn(3, 4, 32)
    plain = hc_pre(streams, *arguments(connection))
    for left, right in zip(
        hc_pre(cases.strided(streams), *arguments(connection)), plain, strict=True
    ):
        torch.testing.assert_close(left, right, **TOLERANCE)
    collapsed, post, comb = hc_pre(streams[:0], *arguments(connection))
    assert collapsed.shape == (0, 32)
    assert hc_post(collapsed, streams[:0], post, comb).shape == (0, 4, 32)

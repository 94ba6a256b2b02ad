"""hc_pre, hc_post, hc_post_pre and hc_head on the GPU against float64."""

import mhc_cases as cases
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.mhc.mhc import hc_head, hc_post, hc_post_pre, hc_pre

# Around the bounds between kernels, and of their tiles of 16 and 128 tokens.
TOKENS = (0, 1, 5, 16, 64, 65, 256, 512, 513, 646)
WIDTHS = (32, 96, 4096, 7168)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_pre(tokens, hidden):
    p = cases.parameters(hidden, 24, "cuda")
    cases.check_pre(hc_pre, cases.random_streams(tokens, hidden, "cuda"), p)


@pytest.mark.parametrize("spread", [1e-6, 5.0])
def test_pre_of_flat_and_of_steep_weights(spread):
    p = cases.parameters(256, 24, "cuda", spread)
    cases.check_pre(hc_pre, cases.random_streams(64, 256, "cuda"), p)


@pytest.mark.parametrize("tokens", [5, 600])
def test_pre_of_strided_streams(tokens):
    streams = cases.random_streams(tokens, 256, "cuda")
    p = cases.parameters(256, 24, "cuda")
    plain = hc_pre(streams, p.fn, p.base, p.scale, cases.ITERS, cases.EPS, cases.EPS)
    apart = hc_pre(cases.strided(streams), p.fn, p.base, p.scale, cases.ITERS, cases.EPS, cases.EPS)
    for left, right in zip(plain, apart, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("hidden", [96, 4096, 7168])
@pytest.mark.parametrize("tokens", [1, 17, 65, 513, 2100])
def test_rows_do_not_see_each_other(tokens, hidden):
    p = cases.parameters(hidden, 24, "cuda")
    cases.check_rows_alone(hc_pre, cases.random_streams(tokens, hidden, "cuda"), p)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_head(tokens, hidden):
    p = cases.parameters(hidden, 4, "cuda")
    cases.check_head(hc_head, cases.random_streams(tokens, hidden, "cuda"), p)


@pytest.mark.parametrize("hidden", [*WIDTHS, 8, 1032])
@pytest.mark.parametrize("tokens", TOKENS)
def test_post(tokens, hidden):
    streams = cases.random_streams(tokens, hidden, "cuda")
    output = torch.randn(tokens, hidden, device="cuda").bfloat16()
    cases.check_post(hc_post, output, streams)
    cases.check_post(hc_post, output, cases.strided(streams))


@pytest.mark.parametrize("hidden", [96, 4096, 7168])
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 600])
def test_norm(tokens, hidden):
    weight = (torch.rand(hidden, device="cuda") + 0.5).bfloat16()
    p = cases.parameters(hidden, 24, "cuda")
    cases.check_norm(hc_pre, cases.random_streams(tokens, hidden, "cuda"), p, weight)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("hidden", [96, 256, 4096, 7168])
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 17, 64, 65])
def test_post_pre(tokens, hidden, normed):
    weight = (torch.rand(hidden, device="cuda") + 0.5).bfloat16() if normed else None
    p = cases.parameters(hidden, 24, "cuda")
    streams = cases.random_streams(tokens, hidden, "cuda")
    output = torch.randn(tokens, hidden, device="cuda").bfloat16()
    operations = (hc_post, hc_pre, hc_post_pre)
    new = cases.check_post_pre(operations, output, streams, p, weight)
    cases.check_post_pre(operations, output[:, :], cases.strided(new), p, weight)


def test_graph_replay_sees_new_streams():
    p = cases.parameters(4096, 24, "cuda")
    streams = cases.random_streams(64, 4096, "cuda")
    args = (p.fn, p.base, p.scale, cases.ITERS, cases.EPS, cases.EPS)
    hc_pre(streams, *args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = hc_pre(streams, *args)
    streams.copy_(cases.random_streams(64, 4096, "cuda"))
    graph.replay()
    for left, right in zip(held, hc_pre(streams, *args), strict=True):
        assert torch.equal(left, right)


def test_refusals():
    p = cases.parameters(256, 24, "cuda")
    args = (p.fn, p.base, p.scale, cases.ITERS, cases.EPS, cases.EPS)
    wide = torch.zeros(1, 4, 256, device="cuda")
    with pytest.raises(UnsupportedError, match="float32"):
        hc_pre(wide, *args)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        hc_pre(wide.bfloat16(), p.fn.bfloat16(), *args[1:])
    with pytest.raises(UnsupportedError, match="width 40"):
        hc_pre(wide[..., :40].bfloat16(), *args)
    with pytest.raises(UnsupportedError, match="multiple of 8"):
        hc_post(wide[:, 0, :44].bfloat16(), wide[..., :44].bfloat16(), wide, wide)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 600])
def test_thousand_repeats_are_bitwise_equal(tokens):
    p = cases.parameters(4096, 24, "cuda")
    streams = torch.randn(tokens, 4, 4096, device="cuda").bfloat16()
    output = torch.randn(tokens, 4096, device="cuda").bfloat16()
    post, comb = torch.rand(tokens, 4, device="cuda"), torch.rand(tokens, 4, 4, device="cuda") / 4
    args = (p.fn, p.base, p.scale, cases.ITERS, cases.EPS, cases.EPS)
    first, both = hc_pre(streams, *args), hc_post_pre(output, streams, post, comb, *args)
    for _ in range(1000):
        for left, right in zip(first, hc_pre(streams, *args), strict=True):
            assert torch.equal(left, right)
        found = hc_post_pre(output, streams, post, comb, *args)
        for left, right in zip(both, found, strict=True):
            assert torch.equal(left, right)

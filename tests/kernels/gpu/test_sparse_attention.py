"""Sparse attention on the GPU against the plain-torch reference."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import sparse_attention_cases as cases

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.attention.sparse_attention import Plan


@pytest.mark.parametrize("splits", [1, 3, 6])
@pytest.mark.parametrize("head_tile", [8, 16, 32])
@pytest.mark.parametrize("comp_page", [2, 64])
def test_each_key_alone(comp_page, head_tile, splits):
    cases.check_each_key_alone(comp_page, head_tile, splits)


@pytest.mark.parametrize("case", list(cases.random_cases()), ids=lambda c: c[0].replace(" ", "-"))
def test_random(case):
    _, inputs, plan = case
    cases.check(inputs, plan)


@pytest.mark.parametrize("splits", [None, 1, 2])
@pytest.mark.parametrize("case", list(cases.hostile_inputs()), ids=lambda c: c[0])
def test_hostile(case, splits):
    _, inputs = case
    tile = 8 if inputs.q.shape[1] <= 8 else 16
    cases.check(inputs, None if splits is None else Plan(tile, min(splits, 1 if tile == 8 else 2)))


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_chosen_plan(tokens):
    cases.check(cases.make_inputs(tokens, 16, 128, 512, 64, seed=tokens))


def test_no_tokens_and_no_lists():
    inputs = cases.make_inputs(0, 16)
    out, lse = inputs.run()
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)
    inputs = cases.make_inputs(2, 16, window=0, comp=0)
    out, lse = inputs.run()
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_refuses_float16():
    inputs = cases.make_inputs(1, 16)
    inputs.q = inputs.q.half()
    with pytest.raises(UnsupportedError, match="bfloat16"):
        inputs.run()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 5])
def test_thousand_repeats_are_bitwise_equal(splits):
    inputs = cases.make_inputs(64, 16, 128, 512, 64, seed=3)
    first, first_lse = inputs.run(Plan(16, splits))
    for _ in range(1000):
        out, lse = inputs.run(Plan(16, splits))
        assert torch.equal(out, first) and torch.equal(lse, first_lse)

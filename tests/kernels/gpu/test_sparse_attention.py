"""Sparse attention on the GPU, every kernel that it has, against the plain-torch reference."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from dataclasses import replace

import sparse_attention_cases as cases
from sparse_attention_inputs import make_inputs

from sglang_dsv4.envs import ATTENTION_KERNEL
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.attention.plan import Kernel
from sglang_dsv4.kernels.attention.sparse_attention import _unused
from sglang_dsv4.kernels.norm_rope.norm_rope import inverse_rope


def named(case):
    return case[0].replace(" ", "-")


@pytest.mark.parametrize("splits", [1, 3, 6])
@pytest.mark.parametrize("case", list(cases.head_tile_cases()), ids=lambda c: str(c[0].kernel))
@pytest.mark.parametrize("comp_page", [2, 64])
def test_each_key_alone(comp_page, case, splits):
    plan, heads = case
    cases.check_each_key_alone(comp_page, replace(plan, splits=splits), heads)


@pytest.mark.parametrize("case", list(cases.random_cases()), ids=named)
def test_random(case):
    _, make, plan = case
    cases.check(make(), plan)


@pytest.mark.parametrize("case", list(cases.length_cases()), ids=named)
def test_lengths(case):
    _, make, plan = case
    cases.check(make(), plan)


@pytest.mark.parametrize("heads", [16, 64])
def test_a_kernel_stops_at_the_length(heads):
    for plan in cases.each_plan(heads, (1,)):
        inputs = make_inputs(4, heads, 64, 640, 64)
        inputs.comp_lengths = torch.full((4,), 100, dtype=torch.int32, device="cuda")
        cut, cut_lse = inputs.run(plan)
        inputs.comp_slots = inputs.comp_slots[:, :100].contiguous()
        inputs.comp_lengths = None
        out, lse = inputs.run(plan)
        assert torch.equal(out, cut) and torch.equal(lse, cut_lse)


@pytest.mark.parametrize("case", list(cases.hostile_inputs()), ids=lambda c: c[0])
def test_hostile(case):
    _, inputs = case
    cases.check(inputs)
    for plan in cases.each_plan(inputs.q.shape[1], (1, 2)):
        cases.check(inputs, plan)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_chosen_plan(tokens, heads):
    cases.check(make_inputs(tokens, heads, 128, 512, 64, seed=tokens))
    cases.check(make_inputs(tokens, heads, 128, 512, 64, seed=tokens, rotated=True))


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_the_turn_leaves_other_dims_and_loses_nothing(heads):
    """Bit for bit what is not turned; what is, nearer to float32 than by a launch of its own."""
    inputs = make_inputs(65, heads, rotated=True)
    wanted = inputs.expected()[0][..., 448:]
    plain = replace(inputs, rotation=None)
    for plan in cases.each_plan(heads, (1, 3)):
        out, lse = inputs.run(plan)
        before, before_lse = plain.run(plan)
        assert torch.equal(out[..., :448], before[..., :448]) and torch.equal(lse, before_lse)
        two_steps = inverse_rope(before, *inputs.rotation)[..., 448:]
        error, other = ((x.float() - wanted).square().mean() for x in (out[..., 448:], two_steps))
        assert error < other


def test_positions_of_either_width_and_a_table_off_the_vector_grid():
    inputs = make_inputs(7, 16, rotated=True)
    out, _ = inputs.run()
    positions, table = inputs.rotation
    shifted = torch.nn.functional.pad(table, (1, 2))[:, 1:65]
    for rotation in ((positions.int(), table), (positions, shifted)):
        assert torch.equal(replace(inputs, rotation=rotation).run()[0], out)


def test_refuses_other_rotations():
    inputs = make_inputs(2, 16, rotated=True)
    positions, table = inputs.rotation
    for rotation in (
        (positions, table.bfloat16()),
        (positions, table[:, :32]),
        (positions[:1], table),
    ):
        with pytest.raises(UnsupportedError, match="The rotation"):
            replace(inputs, rotation=rotation).run()


def test_under_a_default_dtype_of_bfloat16():
    """SGLang loads a model under one, and warms the kernels up."""
    inputs, default = make_inputs(3, 16), torch.get_default_dtype()
    wanted, _ = inputs.run()
    _unused.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        out, _ = inputs.run()
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(out, wanted)


def test_the_environment_forces_a_kernel(monkeypatch):
    inputs = make_inputs(3, 16)
    monkeypatch.setenv(ATTENTION_KERNEL.name, "portable")
    out, _ = inputs.run()
    # Splits cut the softmax elsewhere, so the forced kernel is found among its own plans.
    plans = cases.each_plan(16, range(1, 11))
    assert any(
        torch.equal(out, inputs.run(plan)[0]) for plan in plans if plan.kernel == Kernel.PORTABLE
    )
    monkeypatch.setenv(ATTENTION_KERNEL.name, "wide")
    with pytest.raises(UnsupportedError, match="16 heads"):
        inputs.run()


def test_no_tokens_and_no_lists():
    inputs = make_inputs(0, 16)
    out, lse = inputs.run()
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)
    inputs = make_inputs(2, 16, window=0, comp=0)
    out, lse = inputs.run()
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_refuses_float16():
    inputs = make_inputs(1, 16)
    inputs.q = inputs.q.half()
    with pytest.raises(UnsupportedError, match="bfloat16"):
        inputs.run()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("heads", [16, 64])
def test_thousand_repeats_are_bitwise_equal(heads, splits):
    inputs = make_inputs(64, heads, 128, 512, 64, seed=3)
    for plan in cases.each_plan(heads, (splits,)):
        first, first_lse = inputs.run(plan)
        for _ in range(1000):
            out, lse = inputs.run(plan)
            assert torch.equal(out, first) and torch.equal(lse, first_lse)

"""The choice of the attention kernel against plans that were timed on an H200."""

import pytest

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.attention.plan import Kernel, Plan, plan_cost, plan_for

SMS = 132
# (heads, tokens, top-k): microseconds by (kernel, heads of a block, splits), window 128.
TIMED = {
    (8, 16, 1024): {("portable", 8, 9): 17.0, ("narrow", 8, 9): 16.2},
    (8, 256, 512): {("portable", 8, 1): 42.3, ("narrow", 8, 1): 35.5},
    (8, 256, 1024): {("portable", 8, 1): 69.0, ("narrow", 8, 1): 55.7},
    (16, 256, 512): {("narrow", 16, 1): 41.9},
    (16, 256, 1024): {("narrow", 16, 1): 68.1, ("portable", 16, 1): 78.7},
    (64, 64, 512): {("wide", 64, 1): 30.9, ("wide", 64, 2): 38.2},
    (64, 128, 1024): {("wide", 64, 1): 52.3},
    (64, 256, 1024): {("wide", 64, 1): 102.8},
    (128, 16, 1024): {("wide", 64, 3): 33.0, ("wide", 64, 5): 45.9},
    (128, 64, 1024): {("wide", 64, 1): 49.9},
    (128, 256, 512): {("wide", 64, 1): 126.3},
    (128, 256, 1024): {("wide", 64, 1): 194.7},
}


@pytest.mark.parametrize("row", TIMED, ids=lambda row: "H{} b{} k{}".format(*row))
def test_the_fastest_timed_kernel_is_chosen(row):
    heads, tokens, topk = row
    kernel, head_tile, splits = min(TIMED[row], key=TIMED[row].get)
    plan = plan_for(tokens, heads, 2 + topk // 64, SMS, "sm_90a")
    assert (plan.kernel, plan.head_tile) == (kernel, head_tile)
    if len(TIMED[row]) > 1 and kernel == "wide":
        assert plan.splits == splits


def test_estimates_are_near_the_times():
    errors = []
    for (heads, tokens, topk), times in TIMED.items():
        for (kernel, head_tile, splits), timed in times.items():
            plan = Plan(Kernel(kernel), head_tile, splits)
            cost = plan_cost(plan, tokens, heads, 2 + topk // 64, SMS)
            errors.append(abs(cost / timed - 1))
    # The fit's mean error is 3%, its largest 17%; 7% and 18% for the wide kernel.
    assert sum(errors) / len(errors) < 0.08
    assert max(errors) < 0.2


@pytest.mark.parametrize("splits", [0, 33])
def test_a_plan_has_as_many_splits_as_the_combination_takes(splits):
    with pytest.raises(UnsupportedError, match=f"{splits} splits"):
        Plan(Kernel.PORTABLE, 8, splits)


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
def test_other_architectures_take_the_portable_kernel(tokens, heads):
    for arch in ("sm_100a", "sm_120a"):
        assert plan_for(tokens, heads, 10, SMS, arch).kernel is Kernel.PORTABLE

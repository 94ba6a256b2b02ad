"""Each part of the model, disturbed, moves the logits away from transformers' by far.

Recall alone would not show most of these (the answers keep their margins), so this is what gives
the agreement of test_float32.py its meaning: an implementation with any of these mistakes fails it.
"""

from collections.abc import Iterator

import pytest
from comparison import SAME_MEDIAN, error, float32_runner, golden_ids, oracle_with_records
from disturbances import DISTURBANCES
from harness import Runner

pytestmark = pytest.mark.e2e

CACHE = "bfloat16"
PROMPT = "recall_511"
# From here on there are two or more HCA entries, and more CSA entries than the indexer selects.
TAIL = slice(300, None)
# What undisturbed logits may differ by, and how many times further off the disturbed ones must be:
# the least visible mistake (the indexer of layer 2 takes the most recent entries) is 12 times off.
BOUND, MARGIN = SAME_MEDIAN[CACHE], 5


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with float32_runner(CACHE) as runner:
        yield runner


def distance(runner: Runner) -> float:
    ids = golden_ids(PROMPT)
    return float(error(runner.prefill(ids), oracle_with_records(ids, CACHE))[TAIL].median())


def test_undisturbed(runner):
    assert distance(runner) <= BOUND


@pytest.mark.parametrize("name", DISTURBANCES)
def test_disturbed(runner, monkeypatch, name):
    DISTURBANCES[name](runner, monkeypatch)
    assert distance(runner) > MARGIN * BOUND


def test_undisturbed_again(runner):
    """Every disturbance was undone, so none hid behind another."""
    assert distance(runner) <= BOUND

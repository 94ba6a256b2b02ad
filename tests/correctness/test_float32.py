"""Float32 arithmetic on bfloat16 records: what remains is the records' one rounding.

Prefill, chunks, batches and decode are the same sums here, so they are compared to 1e-4.
"""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from comparison import (
    PROMPTS,
    SAME_P99,
    STORIES,
    assert_same,
    error,
    float32_runner,
    golden_ids,
    oracle_logits,
    oracle_with_records,
)
from harness import Runner
from segments import decode_in_segments
from torch import Tensor

pytestmark = pytest.mark.e2e

CACHE = "bfloat16"
NAMES = ("recall_40", "recall_127", "recall_255", "system_300", "recall_511", "multi_turn_1200")
LENGTHS = [*range(1, 10), *range(63, 66), *range(126, 131), *range(254, 259)]
LENGTHS += [*range(511, 514), *range(1023, 1026)]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with float32_runner(CACHE) as runner:
        yield runner


@pytest.fixture(scope="module")
def answered(runner) -> Callable[[str], tuple[Tensor, Tensor]]:
    """Logits of a golden prompt and, after it, of its reference answer: (f32[T, V], f32[A, V])."""

    @cache
    def run(name: str) -> tuple[Tensor, Tensor]:
        ids, tokens = golden_ids(name), PROMPTS[name]["nvfp4_weights"]["fp32_ids"]
        logits = runner.prefill(ids + tokens[:-1])
        return logits[: len(ids)], logits[len(ids) - 1 :]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_logits_on_the_same_records(answered, name):
    """Against transformers reading bfloat16 records: equal but for the order of float32 sums."""
    reference = oracle_with_records(golden_ids(name), CACHE)
    assert_same(answered(name)[0], reference, CACHE, name)


@pytest.mark.parametrize("name", NAMES)
def test_logits_within_one_rounding(answered, name):
    """Against transformers in float32.

    Transformers in bfloat16 rounds at least sixteen tensors a layer on the way of a token (two
    collapses, two norms, q_a, its norm, q_b, its norm, kv, its norm, two rotations, softmax, sum,
    o_a, o_b, the streams twice, and the experts'), here one is: the record. Independent roundings
    add in squares, so the error is at most 1 / sqrt(16) of that.
    """
    reference = oracle_logits(golden_ids(name))
    noise = float(error(oracle_logits(golden_ids(name), torch.bfloat16), reference).median())
    found = float(error(answered(name)[0], reference).median())
    assert found <= noise / 4, f"{found:.4f} against {noise:.4f}"


@pytest.mark.parametrize("name", [n for n, p in PROMPTS.items() if p["prompt_len"] < 1100])
def test_greedy_tokens(answered, name):
    """Argmax after each token of the reference answer is its next token, so greedy gives it.

    Stories have near ties: the best two logits are compared where they are 0.1 apart, some 10 times
    what the records' rounding moves them.
    """
    reference = PROMPTS[name]["nvfp4_weights"]
    tokens, margins = reference["fp32_ids"], reference["fp32_margin"]
    chosen = answered(name)[1].argmax(-1).tolist()
    clear = [i for i, margin in enumerate(margins) if margin > 0.1]
    assert len(clear) == len(tokens) or name in STORIES
    assert len(clear) > len(tokens) // 3
    assert [chosen[i] for i in clear] == [tokens[i] for i in clear]


@pytest.fixture(scope="module")
def decoded(runner) -> Tensor:
    return decode_in_segments(runner, golden_ids("recall_1023")[:1025])


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_equals_decode(runner, decoded, length):
    ids = golden_ids("recall_1023")[:length]
    logits = runner.prefill(ids)
    assert float(error(logits[-1], decoded[length - 1])) <= SAME_P99[CACHE]
    assert_same(logits, decoded[:length], CACHE)


@pytest.mark.parametrize("chunk", [64, 100, 127, 128, 129, 256])
def test_chunks_equal_one(runner, whole, chunk):
    assert_same(runner.prefill(golden_ids("recall_700"), chunk), whole, CACHE)


def test_irregular_chunks_equal_one(runner, whole):
    """Chunks that begin and end within windows of four and of 128, some of a single token."""
    lengths = [1, 2, 3, 5, 1, 116, 1, 126, 130, 3, 254, 7]
    lengths.append(len(whole) - sum(lengths))
    assert_same(runner.prefill(golden_ids("recall_700"), lengths), whole, CACHE)


@pytest.fixture(scope="module")
def whole(runner) -> Tensor:
    return runner.prefill(golden_ids("recall_700"))


def test_batch_of_mixed_lengths_equals_single_runs(runner):
    prompts = [golden_ids("recall_511")[:n] for n in (1, 3, 4, 127, 130, 256, 571)]
    prompts.append(golden_ids("recall_255"))
    for logits, ids in zip(runner.prefill_batch(prompts), prompts, strict=True):
        assert_same(logits, runner.prefill(ids), CACHE, f"{len(ids)} tokens")


def test_batch_of_chunks_and_decodes_equals_single_runs(runner):
    """Requests at different places of their prompts in one extend, then decoding together."""
    prompts = [golden_ids(name) for name in ("recall_126", "recall_255", "recall_511")]
    answers = [PROMPTS[n]["nvfp4_weights"]["fp32_ids"][:5] for n in ("recall_126", "recall_255")]
    answers.append(PROMPTS["recall_511"]["nvfp4_weights"]["fp32_ids"][:5])
    requests = [runner.start(ids) for ids in prompts]
    logits: list[list[Tensor]] = [[], [], []]

    def extend(*parts: tuple[int, int]) -> None:
        results = runner.extend([(requests[i], tokens) for i, tokens in parts])
        for (i, _), result in zip(parts, results, strict=True):
            logits[i].append(result)

    extend((2, 130))
    extend((2, 126), (0, 50))
    extend((0, requests[0].prompt_left), (1, 129), (2, 200))
    extend((2, requests[2].prompt_left), (1, requests[1].prompt_left))
    for step in zip(*answers, strict=True):
        for i, row in enumerate(runner.step(requests, step)):
            logits[i].append(row[None])
    for request in requests:
        runner.finish(request)
    for ids, answer, found in zip(prompts, answers, logits, strict=True):
        assert_same(torch.cat(found), runner.prefill([*ids, *answer]), CACHE)

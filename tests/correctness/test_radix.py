"""Prefix reuse on a small NVFP4 pool: the logits of a cold run, and every slot comes back.

In float32 on a CPU, so that a reused prefix differs from a computed one by the order of sums
alone; where there is a GPU, on it, as it serves: bfloat16, eager kernels. The
cached prefix is whole pages of 256 tokens; after it come the window's last 128 records and the
overlap state of CSA, which a wrong reuse would take from elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from comparison import ON_GPU, assert_same, float32_runner, golden_ids, oracle_with_records
from harness import Request, Runner
from torch import Tensor

pytestmark = pytest.mark.e2e

CACHE, PAGE = "nvfp4", 256
ARITHMETIC = "cuda" if ON_GPU else CACHE
CAPACITY, WINDOW_CAPACITY, REQUESTS = 3072, 2048, 4
DOCUMENT = golden_ids("recall_1023")
Cold = Callable[[Sequence[int]], Tensor]


@pytest.fixture(scope="module")
def shared_runner() -> Iterator[Runner]:
    limits: dict[str, Any] = dict(
        max_total_tokens=CAPACITY,
        swa_full_tokens_ratio=WINDOW_CAPACITY / CAPACITY,
        max_running_requests=REQUESTS,
        context_length=2048,
    )
    on_cuda = partial(Runner, kv_cache_dtype=CACHE, device="cuda")
    with on_cuda(**limits) if ON_GPU else float32_runner(CACHE, **limits) as runner:
        yield runner


@pytest.fixture(scope="module")
def cold(shared_runner) -> Cold:
    """Logits f32[T, V] of ids run without reuse; those of the document's beginnings, run once."""
    document = shared_runner.prefill(DOCUMENT, PAGE)

    def run(ids: Sequence[int]) -> Tensor:
        known = list(ids) == DOCUMENT[: len(ids)]
        return document[: len(ids)] if known else shared_runner.prefill(ids, PAGE)

    return run


@pytest.fixture
def runner(shared_runner) -> Iterator[Runner]:
    """Empty before a test; afterwards nothing is held but what the tree can evict."""
    shared_runner.flush()
    yield shared_runner
    assert_idle(shared_runner)


def assert_idle(runner: Runner) -> None:
    now = runner.accounting()
    assert (now.full_protected, now.swa_protected, now.requests) == (0, 0, REQUESTS)
    assert now.full_free + now.full_evictable == CAPACITY
    assert now.swa_free + now.swa_evictable == WINDOW_CAPACITY


def run_prompt(
    runner: Runner, ids: Sequence[int], tokens: int = 4 * PAGE
) -> tuple[Request, Tensor]:
    """Prefill as the server does, reusing and publishing: the request and the logits that it ran.

    A pass takes ``tokens``, several pages by default, so that a later request may resume at the end
    of a page in the middle of a pass.
    """
    request = runner.start(ids, reuse=True)
    logits = []
    while request.prompt_left:
        part = (request, min(tokens, request.prompt_left))
        logits += runner.extend([part], publish=True)
    return request, torch.cat(logits)


def serve(runner: Runner, ids: Sequence[int], tokens: int = 4 * PAGE) -> tuple[int, Tensor]:
    """A whole request: (tokens reused, logits of the others)."""
    request, logits = run_prompt(runner, ids, tokens)
    cached = request.cached_tokens
    runner.finish(request, publish=True)
    assert len(logits) == len(ids) - cached
    return cached, logits


def assert_as_cold(cold: Cold, ids: Sequence[int], cached: int, logits: Tensor) -> None:
    """Against a run without reuse. That may evict, so it comes after all that wants reuse."""
    assert_same(logits, cold(ids)[cached : cached + len(logits)], ARITHMETIC)


@pytest.mark.parametrize("name", ["recall_40", "system_300", "recall_1023"])
def test_cold_run_equals_the_oracle(runner, name):
    """So equal to a cold run means right."""
    scales = [layer.self_attn.record_scale for layer in runner.model_runner.model.model.layers]
    assert scales == [1.0] * len(scales)
    ids = golden_ids(name)
    assert_same(runner.prefill(ids, PAGE), oracle_with_records(ids, CACHE), ARITHMETIC)


@pytest.mark.parametrize("length", [257, 258, 259, 260, 384, 511, 513, 515, 1023, 1025])
def test_same_prompt_twice(runner, cold, length):
    ids = DOCUMENT[:length]
    assert serve(runner, ids)[0] == 0
    cached, logits = serve(runner, ids)
    assert cached == (length - 1) // PAGE * PAGE
    assert_as_cold(cold, ids, cached, logits)


def test_shared_prefix_with_other_tails(runner, cold):
    """Tails that part at a page's end, in the middle of a page and of a window of four.

    The document's pass frees the windows that it leaves behind, so the first tail finds none at
    512; computing it anew brings that window back.
    """
    serve(runner, DOCUMENT[:800])
    common = (512, 514, 700, 768, 255)
    prompts = [[*DOCUMENT[:length], *golden_ids("recall_61")[1:]] for length in common]
    served = [serve(runner, ids) for ids in prompts]
    assert [cached for cached, _ in served] == [0, 512, 512, 768, 0]
    for ids, (cached, logits) in zip(prompts, served, strict=True):
        assert_as_cold(cold, ids, cached, logits)


def test_interleaved_conversations(runner, cold):
    """Two users take turns, in one batch each time; the second turn reuses the first's pages."""
    turns = [golden_ids("recall_255"), golden_ids("system_300")]
    answers = [DOCUMENT[100:104], DOCUMENT[200:204]]
    requests = [runner.start(ids, reuse=True) for ids in turns]
    for tokens in (130, 126):
        runner.extend([(request, tokens) for request in requests], publish=tokens == 126)
    rest = runner.extend([(request, request.prompt_left) for request in requests])
    steps = [runner.step(requests, tokens) for tokens in zip(*answers, strict=True)]
    for request in requests:
        runner.finish(request, publish=True)
    second = [[*turns[i], *answers[i], *golden_ids("recall_126")] for i in (1, 0)]
    served = [serve(runner, ids) for ids in second]
    assert [cached for cached, _ in served] == [256, 256]
    for i, (ids, reply) in enumerate(zip(turns, answers, strict=True)):
        logits = torch.cat([rest[i], torch.stack([step[i] for step in steps])])
        assert_as_cold(cold, [*ids, *reply], 256, logits)
    for ids, (cached, logits) in zip(second, served, strict=True):
        assert_as_cold(cold, ids, cached, logits)


def test_two_requests_run_on_one_prefix(runner, cold):
    """Both hold the pages of the same document while they decode different continuations."""
    ids = DOCUMENT[:600]
    serve(runner, ids)
    tails = [DOCUMENT[600:603], golden_ids("recall_61")[1:4]]
    requests = [run_prompt(runner, [*ids, *tail])[0] for tail in tails]
    assert [request.cached_tokens for request in requests] == [512, 512]
    assert runner.accounting().full_protected == 512
    steps = [runner.step(requests, [7 + i, 11 + i]) for i in range(4)]
    for request in requests:
        runner.finish(request, publish=True)
    for i, (tail, first) in enumerate(zip(tails, (7, 11), strict=True)):
        whole = [*ids, *tail, *range(first, first + 4)]
        logits = torch.stack([step[i] for step in steps])
        assert_as_cold(cold, whole, len(whole) - 4, logits)


def test_eviction_under_a_tiny_pool(runner, cold):
    """Five documents of three pages on twelve: the first is evicted and computed again."""
    documents = [[*golden_ids("recall_61")[i : i + 3], *DOCUMENT[:770]] for i in range(1, 6)]
    for ids in documents:
        assert serve(runner, ids)[0] == 0
        assert_idle(runner)
    again = [documents[0], documents[-1]]
    served = [serve(runner, ids) for ids in again]
    assert [cached for cached, _ in served] == [0, 768]
    for ids, (cached, logits) in zip(again, served, strict=True):
        assert_as_cold(cold, ids, cached, logits)


def test_window_evicted_before_the_compressed_pages(runner, cold):
    """A prefix is reused only where the window before its end is still there.

    The windows of the first three of four pages are evicted: 300 tokens find none at 256 and are
    computed anew, which brings the window at 256 back; 1025 still find the one at 1024.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    serve(runner, DOCUMENT[:1025], PAGE)
    runner.tree_cache.evict(EvictParams(swa_num_tokens=3 * PAGE))
    now = runner.accounting()
    assert (now.full_evictable, now.swa_evictable) == (4 * PAGE, PAGE)
    lengths = (300, 600, 1025)
    served = [serve(runner, DOCUMENT[:length]) for length in lengths]
    assert [cached for cached, _ in served] == [0, 256, 1024]
    for length, (cached, logits) in zip(lengths, served, strict=True):
        assert_as_cold(cold, DOCUMENT[:length], cached, logits)


def test_flush(runner, cold):
    ids = DOCUMENT[:600]
    serve(runner, ids)
    runner.flush()
    now = runner.accounting()
    assert (now.full_free, now.swa_free, now.requests) == (CAPACITY, WINDOW_CAPACITY, REQUESTS)
    assert (now.full_evictable, now.swa_evictable) == (0, 0)
    cached, logits = serve(runner, ids)
    assert cached == 0
    assert_as_cold(cold, ids, cached, logits)


def test_unpublished_requests_leave_nothing(runner):
    """Cancelled in the middle of the prompt, or after some tokens: all slots are free again."""
    request = runner.start(DOCUMENT[:700], reuse=True)
    runner.extend([(request, 300)])
    runner.finish(request)
    request = runner.start(DOCUMENT[:300], reuse=True)
    runner.extend([(request, 300)])
    runner.step([request], [5])
    runner.finish(request)
    now = runner.accounting()
    assert (now.full_free, now.swa_free) == (CAPACITY, WINDOW_CAPACITY)

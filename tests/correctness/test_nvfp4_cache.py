"""The served arithmetic on NVFP4 records and FP4 indexer keys, the default; on a GPU if any."""

from collections.abc import Iterator

import oracle
import pytest
import torch
from comparison import ON_GPU, PROMPTS, error, golden_ids, kl, oracle_logits, prefill_and_answer
from harness import Runner
from segments import decode_in_segments
from torch import Tensor

pytestmark = pytest.mark.e2e

NAMES = [p["name"] for p in oracle.question_prompts() if p["prompt_len"] < 1600]
MAX_MEAN_KL = {"bf16": 0.0015, "fp8": 0.0035}
"""By the precision of large prefill batches; an H200 gave 0.0010 and 0.0023.

The limit of FP8 is a third of what activations in four bits, for which the model is made, give
(0.0113, emulated on a CPU, where FP8 gives 0.0027).
"""
PRECISIONS = [*MAX_MEAN_KL] if ON_GPU and torch.cuda.get_device_capability() == (9, 0) else ["bf16"]


@pytest.fixture(scope="module")
def bfloat16_cache() -> dict[str, Tensor]:
    """The same on a bfloat16 cache; a GPU has none, so there transformers in float32."""
    if ON_GPU:
        return {name: oracle_logits(golden_ids(name)) for name in NAMES}
    with Runner(kv_cache_dtype="bfloat16") as runner:
        return {name: runner.prefill(golden_ids(name)) for name in NAMES}


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runner(bfloat16_cache, precision) -> Iterator[Runner]:
    device = "cuda" if ON_GPU else "cpu"
    with Runner(kv_cache_dtype="nvfp4", device=device, prefill=precision) as runner:
        yield runner


@pytest.fixture(scope="module")
def answered(runner) -> dict[str, tuple[Tensor, list[int]]]:
    return {name: prefill_and_answer(runner, name) for name in NAMES}


def test_divergence_from_the_bfloat16_cache(answered, bfloat16_cache, precision):
    """A simulation inside transformers, records and keys rounded, gave 0.00075 over 11 prompts."""
    found = {name: kl(bfloat16_cache[name], logits) for name, (logits, _) in answered.items()}
    by_prompt = {name: float(divergence.mean()) for name, divergence in found.items()}
    positions = torch.cat(list(found.values()))
    print({name: f"{mean:.2e}" for name, mean in by_prompt.items()})
    print(f"mean KL {positions.mean():.2e} over {len(positions)} positions of {len(found)} prompts")
    assert len(found) >= 11
    assert float(positions.mean()) <= MAX_MEAN_KL[precision]
    assert sum(by_prompt.values()) / len(by_prompt) <= MAX_MEAN_KL[precision]


@pytest.mark.parametrize("name", NAMES)
def test_golden_answers(answered, name):
    """The longer prompts are asked over HTTP, in tests/e2e."""
    assert answered[name][1] == PROMPTS[name]["nvfp4_weights"]["fp32_ids"]


def test_decode_is_as_exact_as_prefill(runner):
    """Token by token, the logits are as near to the oracle's as those of one pass.

    The two differ by their bfloat16 roundings, which turn 4-bit codes of records; neither is more
    exact. A quarter is left for sampling: the medians are of 769 positions. Position by position
    they are compared in float32, by test_float32 and test_radix.
    """
    ids = golden_ids("recall_1023")[:769]
    reference = oracle_logits(ids)
    decoded = float(error(decode_in_segments(runner, ids), reference).median())
    prefilled = float(error(runner.prefill(ids), reference).median())
    assert decoded <= 1.25 * prefilled, f"{decoded:.4f} against {prefilled:.4f}"

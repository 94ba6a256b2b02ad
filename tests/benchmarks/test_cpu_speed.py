"""Speed of the small model on this CPU beside stock transformers, in one process, in turn.

Run with ``pytest -m benchmarks tests/benchmarks``. Nothing is asserted about time, since machines
vary; the ratios are what to read. The lower bound of a decode step is one pass over the weights at
the bandwidth of a copy of the same size.
"""

import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from harness import Runner
from oracle import load_oracle, question_prompts

pytestmark = pytest.mark.benchmarks

PREFILL, STEPS, REPEATS = 2000, 24, 5


def seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of ``run`` after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def transformers_speed(ids: list[int], dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of a prefill of ``ids``, and of one decode step after it, at batch 1 with cache."""
    model = load_oracle(dtype)
    prompt = torch.tensor([ids])

    @torch.inference_mode()
    def prefill():
        return model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    def decode(cache=None):
        cache = cache or prefill()
        token = torch.tensor([[ids[0]]])

        @torch.inference_mode()
        def step():
            return model(token, past_key_values=cache, use_cache=True)

        return seconds(step, STEPS)

    return seconds(prefill, 3), decode()


def our_speed(runner: Runner, ids: list[int]) -> tuple[float, float]:
    """The same two numbers through SGLang's model runner."""
    prefill = seconds(lambda: runner.prefill(ids), 3)
    request = runner.start(ids)
    runner.extend([(request, len(ids))])
    decode = seconds(lambda: runner.step([request], [ids[0]]), STEPS)
    runner.finish(request)
    return prefill, decode


def copy_seconds(nbytes: int) -> float:
    """One read and one write of ``nbytes``."""
    source = torch.empty(nbytes, dtype=torch.uint8)
    return seconds(source.clone) / 2


def test_speed_beside_transformers(capsys):
    ids = max((p["prompt_ids"] for p in question_prompts()), key=len)[:PREFILL]
    rows, threads = [], torch.get_num_threads()
    for dtype in (torch.bfloat16, torch.float32):
        rows.append(
            (f"transformers {dtype}".replace("torch.", ""), *transformers_speed(ids, dtype))
        )
    for cache in ("bfloat16", "nvfp4"):
        with Runner(kv_cache_dtype=cache, max_total_tokens=16384, threads=threads) as runner:
            rows.append((f"ours, {cache} cache", *our_speed(runner, ids)))
            weights = sum(p.nbytes for p in runner.model_runner.model.parameters())
    base_prefill, base_decode = rows[0][1:]
    with capsys.disabled():
        print(f"\n{threads} thread(s); prefill {PREFILL} tokens, decode at {PREFILL}")
        print(f"{'':<26}{'prefill s':>10}{'ratio':>7}{'decode ms':>11}{'ratio':>7}")
        for name, prefill, decode in rows:
            print(
                f"{name:<26}{prefill:>10.2f}{prefill / base_prefill:>7.2f}"
                f"{decode * 1e3:>11.1f}{decode / base_decode:>7.2f}"
            )
        print(f"a copy of all weights takes {copy_seconds(weights) * 1e3:.1f} ms")
    assert all(prefill > 0 and decode > 0 for _, prefill, decode in rows)

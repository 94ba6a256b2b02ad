"""A decode on the slot lists of a CUDA graph gives what an eager one gives.

A graph's lists have shapes that depend on the number of requests alone: every request has a row for
a window that may not close, and pages up to the longest context. No graph is needed to build them.
"""

import pytest
import torch
from harness import Runner

from sglang_dsv4.attention.backend import Dsv4AttentionBackend

pytestmark = pytest.mark.e2e

# Across a window of 4, of 128, a page of 256, and where the indexer begins to choose (64 entries).
PROMPT, STEPS = 250, 20


def continuation(runner: Runner, prompts: list[list[int]]) -> torch.Tensor:
    """Logits of STEPS decode steps of all prompts in one batch: f32[STEPS, requests, V]."""
    requests = [runner.start(ids[: len(ids) - STEPS]) for ids in prompts]
    runner.extend([(request, request.prompt_left) for request in requests])
    steps = [
        runner.step(requests, [ids[len(ids) - STEPS + step] for ids in prompts])
        for step in range(STEPS)
    ]
    for request in requests:
        runner.finish(request)
    return torch.stack(steps)


def test_decode_on_fixed_shapes(monkeypatch: pytest.MonkeyPatch):
    draw = torch.Generator().manual_seed(3)
    lengths = (PROMPT + STEPS, 3 + STEPS, 120 + STEPS)
    prompts = [torch.randint(2, 2000, (n,), generator=draw).tolist() for n in lengths]
    eager_init = Dsv4AttentionBackend.init_forward_metadata

    def as_in_a_graph(self, forward_batch) -> None:
        if forward_batch.forward_mode.is_decode():
            self.init_forward_metadata_in_graph(forward_batch)
        else:
            eager_init(self, forward_batch)

    with Runner(kv_cache_dtype="nvfp4", context_length=2048) as runner:
        eager = continuation(runner, prompts)
        monkeypatch.setattr(Dsv4AttentionBackend, "init_forward_metadata", as_in_a_graph)
        fixed = continuation(runner, prompts)
    # The same operations on the same numbers; only the widths of lists differ, and with them the
    # order of float32 sums, whose logits are compared after bf16 layers.
    assert (fixed - eager).abs().max() <= 2.0**-4 * eager.abs().max()
    # After random tokens the two best may be nearer to each other than that.
    assert (fixed.argmax(-1) == eager.argmax(-1)).float().mean() >= 0.95
    assert (fixed - eager).abs().median() <= 2.0**-9 * eager.abs().max()

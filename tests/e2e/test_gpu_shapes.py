"""Published shapes with random weights on a GPU: the kernels beside the reference on the same GPU.

Both servers hold the same NVFP4 weights by the same weight kernels and the same NVFP4 cache; only
the operations of ``kernels/dispatch.py`` differ. Prompts are random ids. The first server continues
them greedily, step by step through its CUDA graphs, and scores every position; the second scores
the same tokens in one prefill.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from conftest import ON_GPU

from sglang_dsv4 import envs
from sglang_dsv4.bench.compare_stock import SERVED_NAME, ours
from sglang_dsv4.bench.published import reduced
from sglang_dsv4.bench.random_checkpoint import CONFIGS, write_random_checkpoint
from sglang_dsv4.demo.server import Progress, Server, free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not ON_GPU, reason="published shapes are too large for a CPU"),
]

PROMPTS = (40, 129, 700, 2500)
NEW_TOKENS = 40
OPTIONS = ("--served-model-name", SERVED_NAME, "--context-length", "8192")
OPTIONS += ("--max-running-requests", "8", "--max-total-tokens", "65536")
# Two paths that round to bf16 at the same places but sum in other orders: each rounding moves a
# logit by up to 2^-9 of its size (about 4 for the largest of 129280 with deviation 1), and a dozen
# independent ones a layer add up as a random walk: 4 * 2^-9 * sqrt(12 * 8) = 0.08 at the far end.
MEDIAN_BOUND = 0.03
P99_BOUND = 0.2


def logprobs(server: Server, ids: list[int], new_tokens: int) -> tuple[list[int], np.ndarray]:
    """Greedy continuation, and the log-probability of each token after the first."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    reply = requests.post(f"{server.url}/generate", json=body, timeout=600).json()
    meta = reply["meta_info"]
    scored = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return reply["output_ids"], np.array([value for value, *_ in scored])


@pytest.mark.parametrize(
    ("shapes", "layers", "experts"), [("flash", 6, 64), ("pro", 4, 64)], ids=["flash", "pro"]
)
def test_kernels_score_as_the_reference(
    shapes: str, layers: int, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / shapes
    config = reduced(CONFIGS[shapes], layers, experts)
    write_random_checkpoint(folder, config, torch.device("cuda"))
    draw = random.Random(1)
    prompts = [[draw.randrange(config["vocab_size"]) for _ in range(n)] for n in PROMPTS]
    with ours(folder, OPTIONS, free_port(), tmp_path / "kernels.log") as server:
        server.wait_ready(600, Progress())
        found = [logprobs(server, ids, NEW_TOKENS) for ids in prompts]
    monkeypatch.setenv(envs.REFERENCE_ON_GPU.name, "1")
    slow = (*OPTIONS, "--disable-cuda-graph")
    with ours(folder, slow, free_port(), tmp_path / "reference.log") as server:
        server.wait_ready(600, Progress())
        for ids, (continued, kernel_scores) in zip(prompts, found, strict=True):
            _, scores = logprobs(server, [*ids, *continued], 1)
            error = np.abs(scores[: len(kernel_scores)] - kernel_scores)
            parts = (error[: len(ids) - 1], error[len(ids) - 1 :])
            for name, part in zip(("prefill", "decode"), parts, strict=True):
                median, p99 = np.median(part), np.quantile(part, 0.99)
                print(f"{shapes} {len(ids)} {name}: median {median:.4f}, p99 {p99:.4f}")
                assert median < MEDIAN_BOUND
                assert p99 < P99_BOUND

"""Published shapes with random weights on a GPU: the kernels beside the reference on the same GPU.

Both servers hold the same NVFP4 weights by the same weight kernels (prefill in bfloat16, as decode
is) and the same NVFP4 cache; only the operations of ``kernels/dispatch.py`` differ. Prompts are
random ids. The first server continues them greedily, step by step through its CUDA graphs, and
scores every position; the second scores the same tokens in one prefill. ``DSV4_SHAPES_FLASH`` and
``DSV4_SHAPES_PRO`` name two servers that run already instead, as "port,port": the kernels' and the
reference's.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
OPTIONS += ("--mem-fraction-static", "0.4")
# Random weights make a chaotic model: one turned rounding moves a router's or the indexer's choice.
# What that does is measured on the kernels' own server, whose prefill scores the tokens that its
# decode chose, other kernels of the same arithmetic. The reference may be twice as far, in the
# median and at the 99th percentile over all prompts; a wrong kernel moves scores by nats.
BOUND = 2.0


def logprobs(url: str, ids: list[int], new_tokens: int) -> tuple[list[int], np.ndarray]:
    """Greedy continuation, and the log-probability of each token after the first."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    reply = requests.post(f"{url}/generate", json=body, timeout=600).json()
    meta = reply["meta_info"]
    scored = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return reply["output_ids"], np.array([value for value, *_ in scored])


@contextmanager
def served(server: Server) -> Iterator[str]:
    """The address of a server that is started here and stopped afterwards."""
    with server:
        server.wait_ready(600, Progress())
        yield server.url


@contextmanager
def both_servers(
    shapes: str, config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """Addresses of the server with the kernels and of the one with the reference."""
    running = os.environ.get(f"DSV4_SHAPES_{shapes.upper()}")
    if running:
        kernels, reference = (f"http://127.0.0.1:{port}" for port in running.split(","))
        yield kernels, reference
        return
    checkpoint = folder / shapes
    write_random_checkpoint(checkpoint, config, torch.device("cuda"))
    monkeypatch.setenv(envs.PREFILL.name, "bf16")
    with served(ours(checkpoint, OPTIONS, free_port(), folder / "kernels.log")) as kernels:
        monkeypatch.setenv(envs.REFERENCE_ON_GPU.name, "1")
        slow = (*OPTIONS, "--disable-cuda-graph")
        log = folder / "reference.log"
        with served(ours(checkpoint, slow, free_port(), log)) as reference:
            yield kernels, reference


@pytest.mark.parametrize(
    ("shapes", "layers", "experts"), [("flash", 6, 64), ("pro", 4, 64)], ids=["flash", "pro"]
)
def test_kernels_score_as_the_reference(
    shapes: str, layers: int, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = reduced(CONFIGS[shapes], layers, experts)
    draw = random.Random(1)
    prompts = [[draw.randrange(config["vocab_size"]) for _ in range(n)] for n in PROMPTS]
    errors: dict[str, list[np.ndarray]] = {"own": [], "prefill": [], "decode": []}
    with both_servers(shapes, config, tmp_path, monkeypatch) as (kernels, reference):
        for ids in prompts:
            continued, decoded = logprobs(kernels, ids, NEW_TOKENS)
            start, whole = len(ids) - 1, [*ids, *continued]
            prefilled = logprobs(kernels, whole, 1)[1][: len(decoded)]
            scores = logprobs(reference, whole, 1)[1][: len(decoded)]
            errors["own"].append(np.abs(decoded - prefilled)[start:])
            errors["prefill"].append(np.abs(scores - prefilled))
            errors["decode"].append(np.abs(scores - decoded)[start:])
    found = {name: distance(np.concatenate(parts)) for name, parts in errors.items()}
    print(shapes, {name: f"median {a:.4f}, p99 {b:.4f}" for name, (a, b) in found.items()})
    for name in ("prefill", "decode"):
        for measured, own in zip(found[name], found["own"], strict=True):
            assert measured < BOUND * own, f"{name}: {found}"


def distance(error: np.ndarray) -> tuple[float, float]:
    """Median and 99th percentile."""
    return float(np.median(error)), float(np.quantile(error, 0.99))

"""Many users at once on a GPU: no answer of another user, no leak, no server that dies."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from conftest import MAX_RUNNING_REQUESTS, ON_GPU, Server
from test_endpoint import PROMPTS, wait_for_idle

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not ON_GPU, reason="a CPU serves 16 requests at once"),
]

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
STORY_TOKENS = 400


def test_256_at_once_do_not_mix(server):
    """Each of 256 concurrent users gets the code of its own document."""
    assert MAX_RUNNING_REQUESTS == 256
    server.flush()
    asked = [PROMPTS[i % len(PROMPTS)] for i in range(256)]
    with ThreadPoolExecutor(256) as pool:
        replies = list(pool.map(lambda prompt: server.chat(prompt["messages"]), asked))
    wrong = [
        (prompt["name"], reply.choices[0].message.content)
        for prompt, reply in zip(asked, replies, strict=True)
        if reply.choices[0].message.content != prompt["expected"]
    ]
    assert wrong == []
    wait_for_idle(server)
    server.flush()


def test_soak_with_cancellations(server, golden):
    """Questions, stories and hung-up streams, mixed for SOAK_SECONDS; then every pool is whole."""
    server.flush()
    deadline = time.monotonic() + SOAK_SECONDS
    wrong: list[str] = []
    counts = {"asked": 0, "cancelled": 0, "told": 0}
    lock = threading.Lock()

    def user(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < deadline:
            kind = draw.choice(("asked", "asked", "asked", "cancelled", "told"))
            if kind == "asked":
                prompt = draw.choice(PROMPTS)
                text = server.chat(prompt["messages"]).choices[0].message.content
                if text != prompt["expected"]:
                    wrong.append(f"{prompt['name']}: {text}")
            else:
                story = golden["story_red_boat"]["messages"]
                stream = server.chat(story, stream=True, max_tokens=STORY_TOKENS)
                for index, _ in enumerate(stream):
                    if kind == "cancelled" and index >= draw.randrange(40):
                        break
                stream.close()
            with lock:
                counts[kind] += 1

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(user, range(64)))
    print(f"soak of {SOAK_SECONDS:.0f} s: {counts}")
    assert wrong == []
    assert min(counts.values()) > 0
    wait_for_idle(server)
    server.flush()
    assert used_tokens(server) == [0]


def used_tokens(server: Server) -> list[int]:
    """Slots in use on each rank; after a flush of an idle server only a leak would hold any."""
    loads = requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"]
    return [load["num_used_tokens"] for load in loads]

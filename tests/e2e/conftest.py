"""One server for all tests of this folder, started as a user starts it, on a GPU where one is.

``DSV4_E2E_PORT`` and ``DSV4_E2E_LOG`` name a server that runs already (port and log file, started
with the limits below) instead.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import requests
import torch

ROOT = Path(__file__).resolve().parents[2]
MODEL_DIR = ROOT / "sglang_dsv4" / "demo" / "dsv4-tiny-nvfp4"
GOLDEN = ROOT / "tests" / "data" / "golden.json"
START_SECONDS = 600
CONTEXT_LENGTH = 8192
ON_GPU = torch.cuda.is_available()
MAX_TOTAL_TOKENS, MAX_RUNNING_REQUESTS = (1 << 20, 256) if ON_GPU else (1 << 16, 16)


@dataclass(frozen=True)
class Server:
    """A running server: its address, an OpenAI client, its log."""

    url: str
    client: openai.OpenAI
    log: Path
    process: subprocess.Popen | None

    def chat(self, messages: list[dict], **options):
        """One greedy chat completion, not streamed unless asked."""
        options = {"model": "default", "temperature": 0, "max_tokens": 16, **options}
        return self.client.chat.completions.create(messages=messages, **options)

    def flush(self) -> None:
        """Empty the radix cache."""
        assert requests.post(f"{self.url}/flush_cache", timeout=60).status_code == 200

    def load(self) -> dict:
        """SGLang's own account of its pools."""
        return requests.get(f"{self.url}/server_info", timeout=60).json()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if "DSV4_E2E_PORT" in os.environ:
        port = int(os.environ["DSV4_E2E_PORT"])
        yield server_at(port, Path(os.environ["DSV4_E2E_LOG"]), None)
        return
    log = tmp_path_factory.mktemp("server") / "log"
    port = free_port()
    command = [sys.executable, "-m", "sglang_dsv4.launch_server"]
    command += ["--model-path", str(MODEL_DIR), "--port", str(port)]
    command += ["--context-length", str(CONTEXT_LENGTH)]
    command += ["--max-total-tokens", str(MAX_TOTAL_TOKENS)]
    command += ["--max-running-requests", str(MAX_RUNNING_REQUESTS), "--enable-metrics"]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, cwd="/"
        )
    try:
        wait_until_ready(process, port, log)
        yield server_at(port, log, process)
    finally:
        stop(process)


def server_at(port: int, log: Path, process: subprocess.Popen | None) -> Server:
    url = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    return Server(url, client, log, process)


def wait_until_ready(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if requests.get(f"http://127.0.0.1:{port}/health_generate", timeout=30).ok:
                return
        except requests.ConnectionError:
            time.sleep(1)
    pytest.fail(f"the server did not start; the end of its log:\n{log.read_text()[-4000:]}")


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(60)


@pytest.fixture(scope="session")
def golden() -> dict[str, dict]:
    """Prompts with known answers, by name."""
    return {prompt["name"]: prompt for prompt in json.loads(GOLDEN.read_text())["prompts"]}

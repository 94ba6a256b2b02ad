"""With the package installed, SGLang's own entry points serve the checkpoint too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from conftest import GOLDEN, MODEL_DIR, free_port, stop, wait_until_ready

pytestmark = pytest.mark.e2e

SMALL = ["--device", "cpu", "--context-length", "4096", "--max-total-tokens", "32768"]
SMALL += ["--mem-fraction-static", "0.1", "--max-running-requests", "4"]

ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    ids, model = json.loads(sys.argv[1]), sys.argv[2]
    engine = sglang.Engine(
        model_path=model, device="cpu", context_length=4096, max_total_tokens=32768,
        mem_fraction_static=0.1, max_running_requests=4,
    )
    out = engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 16})
    info = engine.get_server_info()
    engine.shutdown()
    print("ANSWER", json.dumps([out["text"], info["kv_cache_dtype"], info["attention_backend"]]))
"""


def prompt() -> dict:
    prompts = json.loads(GOLDEN.read_text())["prompts"]
    return next(p for p in prompts if p["name"] == "recall_400")


def test_sglang_engine(tmp_path: Path):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(prompt()["prompt_ids"]), str(MODEL_DIR)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-3000:]
    answer, dtype, backend = json.loads(lines[0].removeprefix("ANSWER "))
    assert answer == prompt()["expected"]
    assert (dtype, backend) == ("nvfp4", "dsv4_nvfp4")


def test_sglang_serve(tmp_path: Path):
    port, log = free_port(), tmp_path / "log"
    command = [str(Path(sys.executable).parent / "sglang"), "serve"]
    command += ["--model-path", str(MODEL_DIR), "--port", str(port), *SMALL]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=tmp_path,
            env={**os.environ, "SGLANG_DSV4_FP4_EXPERTS": "0"},
        )
    try:
        wait_until_ready(process, port, log)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300)
        reply = client.chat.completions.create(
            model="default", messages=prompt()["messages"], temperature=0, max_tokens=16
        )
        assert reply.choices[0].message.content == prompt()["expected"]
    finally:
        stop(process)

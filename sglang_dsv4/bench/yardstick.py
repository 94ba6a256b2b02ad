"""What our numbers are held against: a stock SGLang server on a small model.

Of stock SGLang's models GPT-2 runs on a CPU as it is: it has no rotary embedding, for which the
others want vllm there. Its weights are random, since only its speed matters.
"""

import json
import shutil
import sys
from pathlib import Path

STOCK_NAME = "gpt2-random"
STOCK_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 2048,
    "n_positions": 4096,
    "n_embd": 768,
    "n_layer": 6,
    "n_head": 12,
    "activation_function": "gelu_new",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
YARDSTICK = "stock SGLang, GPT-2 of 6 layers x 768, random weights, bfloat16"
# No plugin has this name, so SGLang loads none.
STOCK_ENV = {"SGLANG_PLUGINS": "none"}


def make_stock_model(folder: Path, tokenizer: Path) -> None:
    """Fill the yardstick's model directory: a config, and our tokenizer, whose ids it shares."""
    (folder / "config.json").write_text(json.dumps(STOCK_CONFIG), encoding="utf-8")
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, folder)


def stock_command(folder: Path, port: int) -> list[str]:
    """What starts stock SGLang on the yardstick's model; plugins are left out by STOCK_ENV."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder)]
    command += ["--served-model-name", STOCK_NAME, "--load-format", "dummy", "--device", "cpu"]
    command += ["--max-total-tokens", "16384", "--mem-fraction-static", "0.2"]
    return [*command, "--max-running-requests", "32", "--port", str(port), "--sleep-on-idle"]

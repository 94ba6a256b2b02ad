"""What our numbers are held against: a stock SGLang server, and stock transformers.

Of stock SGLang's models GPT-2 runs on a CPU as it is (it has no rotary embedding, for which others
want vllm there); its weights are random, since only its speed matters. Stock transformers runs the
very model that we serve, its NVFP4 weights dequantised.
"""

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4.checkpoint.quant import SCALE_SUFFIXES
from sglang_dsv4.checkpoint.reader import Checkpoint
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

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
# Parameters that the checkpoint holds in float32 and transformers keeps so.
_FLOAT32 = ("_hc.", ".hc_head.", ".sinks", ".position_bias", ".e_score_correction_bias")


@dataclass(frozen=True)
class Speed:
    """Seconds of a prefill, and milliseconds of a decoded token after it, one request."""

    prefill: float
    tpot: float


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


# No plugin has this name, so SGLang loads none.
STOCK_ENV = {"SGLANG_PLUGINS": "none"}


def transformers_speed(model_dir: Path, input_len: int, output_len: int, threads: int) -> Speed:
    """Time stock transformers on ``model_dir`` in bfloat16 with its cache; the best of two runs.

    Args:
        model_dir: an NVFP4 checkpoint with one file's worth of tensors.
        input_len: tokens of the prompt.
        output_len: tokens to generate.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    model = load_transformers(model_dir)
    ids = torch.randint(7, model.config.vocab_size, (1, input_len))
    speeds = [_time(model, ids, output_len) for _ in range(2)]
    return Speed(min(s.prefill for s in speeds), min(s.tpot for s in speeds))


def load_transformers(model_dir: Path) -> Any:
    """Stock ``DeepseekV4ForCausalLM`` in bfloat16 with the checkpoint's dequantised weights.

    Raises:
        RuntimeError: the checkpoint does not fill the model exactly.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    checkpoint = Checkpoint.open(model_dir)
    fields = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    config = DeepseekV4Config.from_dict(fields)
    config._attn_implementation = "eager"
    tensors = {
        name: _cast(name, _dequantized(checkpoint, name))
        for name in checkpoint.tensors
        if name.rpartition(".")[2] not in SCALE_SUFFIXES
    }
    _fuse_experts(tensors, config.num_hidden_layers, config.n_routed_experts)
    model = DeepseekV4ForCausalLM(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def _time(model: Any, ids: Tensor, output_len: int) -> Speed:
    started = time.perf_counter()
    result = model(ids, use_cache=True, logits_to_keep=1)
    prefilled = time.perf_counter()
    for _ in range(output_len - 1):
        token = result.logits[:, -1].argmax(-1, keepdim=True)
        result = model(token, past_key_values=result.past_key_values, use_cache=True)
    ended = time.perf_counter()
    return Speed(prefilled - started, 1000 * (ended - prefilled) / (output_len - 1))


def _dequantized(checkpoint: Checkpoint, name: str) -> Tensor:
    weight = checkpoint.read(name)
    if weight.dtype != torch.uint8:
        return weight
    scale, outer = (checkpoint.read(f"{name}_{part}") for part in ("scale", "scale_2"))
    return dequantize_weight(weight, scale, outer)


def _cast(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or any(part in name for part in _FLOAT32):
        return tensor
    return tensor.bfloat16()


def _fuse_experts(tensors: dict[str, Tensor], num_layers: int, num_experts: int) -> None:
    """Replace the matrices of single experts by transformers' fused parameters, in place."""
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{e}.{name}.weight") for e in range(num_experts)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[prefix + "down_proj"] = down

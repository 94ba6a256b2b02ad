"""Stock transformers as the oracle: DeepSeek-V4 on the CPU with the dequantised NVFP4 weights.

Nothing here uses this project's kernels or loader: the NVFP4 tensors are decoded by table, the
experts are fused into transformers' own parameters, and the result must fit strictly.

Set ``DSV4_ORACLE_CACHE`` to a directory to keep results between processes (parallel test workers);
without it they are kept in memory only.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPO = Path(__file__).resolve().parents[1]
MODEL_DIR = REPO / "sglang_dsv4" / "demo" / "dsv4-tiny-nvfp4"
GOLDEN_PATH = REPO / "tests" / "data" / "golden.json"
CACHE_ENV = "DSV4_ORACLE_CACHE"

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_GROUP = 16
SCALE_SUFFIXES = (".weight_scale", ".weight_scale_2", ".input_scale", ".k_scale", ".v_scale")


def golden_prompts() -> list[dict]:
    """The reference prompts of ``tests/data/golden.json`` (22 questions, then 2 stories)."""
    return json.loads(GOLDEN_PATH.read_text())["prompts"]


def question_prompts() -> list[dict]:
    """The golden prompts that have an expected answer, shortest first."""
    questions = [prompt for prompt in golden_prompts() if prompt["expected"] is not None]
    return sorted(questions, key=lambda prompt: prompt["prompt_len"])


def e2m1_table() -> np.ndarray:
    """f32[16]: the value of each 4-bit code (sign, 2 exponent bits, 1 mantissa bit; OCP MX 1.0)."""
    magnitudes = np.array(E2M1_MAGNITUDES, dtype=np.float32)
    return np.concatenate([magnitudes, -magnitudes])


def e4m3_table() -> np.ndarray:
    """f32[256]: the value of each e4m3fn byte (bias 7, no infinity, S.1111.111 = NaN; OCP FP8)."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    value = np.where(exponent == 0, mantissa / 8 * np.exp2(-6.0), normal)
    value[(exponent == 15) & (mantissa == 7)] = np.nan
    return np.where(codes >= 128, -value, value).astype(np.float32)


def dequantise_nvfp4(weight: np.ndarray, scale_bytes: np.ndarray, scale_2: np.ndarray) -> Tensor:
    """Decode one NVFP4 weight of ModelOpt's export.

    Args:
        weight: u8[out, in / 2], two e2m1 codes a byte, the even input channel in the low nibble.
        scale_bytes: u8[out, in / 16], the bits of the e4m3 block scales.
        scale_2: f32[], the outer scale.

    Returns:
        f32[out, in] = code * block scale * outer scale.
    """
    table = e2m1_table()
    codes = np.stack([table[weight & 15], table[weight >> 4]], axis=-1)
    values = codes.reshape(weight.shape[0], -1, NVFP4_GROUP)
    scale = e4m3_table()[scale_bytes] * np.float32(scale_2)
    return torch.from_numpy((values * scale[..., None]).reshape(weight.shape[0], -1))


def _dequantised_tensors(model_dir: Path) -> dict[str, Tensor]:
    """Checkpoint tensors by name, each NVFP4 quadruple replaced by its f32 weight."""
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors: dict[str, Tensor] = {}
    for name, tensor in raw.items():
        if name.endswith(SCALE_SUFFIXES):
            continue
        if name.endswith(".weight") and tensor.dtype == torch.uint8:
            prefix = name.removesuffix("weight")
            scale = raw[prefix + "weight_scale"].view(torch.uint8)
            outer = raw[prefix + "weight_scale_2"]
            tensor = dequantise_nvfp4(tensor.numpy(), scale.numpy(), outer.numpy())
        tensors[name] = tensor
    return tensors


def _fuse_experts(tensors: dict[str, Tensor], num_layers: int, num_experts: int) -> None:
    """Replace the per-expert matrices by transformers' gate_up_proj and down_proj, in place."""
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."

        def stacked(projection: str, prefix: str = prefix) -> Tensor:
            names = [f"{prefix}{expert}.{projection}.weight" for expert in range(num_experts)]
            return torch.stack([tensors.pop(name) for name in names])

        tensors[prefix + "gate_up_proj"] = torch.cat(
            [stacked("gate_proj"), stacked("up_proj")], dim=1
        )
        tensors[prefix + "down_proj"] = stacked("down_proj")


FP32_PARAMETERS = ("_hc.", ".hc_head.", ".sinks", ".position_bias", ".e_score_correction_bias")


@lru_cache(maxsize=2)
def load_oracle(dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Stock ``DeepseekV4ForCausalLM`` with the demo checkpoint's dequantised weights, in eval mode.

    The dequantised weights are rounded to bfloat16, the dtype of the checkpoint's other matrices,
    for either dtype: that is how the logits of golden.json were made (exact products instead move
    them by up to 0.011). The tensors that the checkpoint keeps in FP32 (hyper-connections, sinks,
    position_bias, e_score_correction_bias) stay FP32, as in transformers' own loading. That loader
    leaves the norm weights in FP32 too, with which its forward pass fails in bfloat16; here they
    have the model's dtype.

    Raises:
        RuntimeError: the checkpoint does not fill the model exactly.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config_dict = json.loads((MODEL_DIR / "config.json").read_text())
    del config_dict["quantization_config"]
    config = DeepseekV4Config.from_dict(config_dict)
    config._attn_implementation = "eager"
    tensors = _dequantised_tensors(MODEL_DIR)
    _fuse_experts(tensors, config.num_hidden_layers, config.n_routed_experts)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            keep = any(part in name for part in FP32_PARAMETERS)
            tensors[name] = tensor.float() if keep else tensor.bfloat16().to(dtype)
    model = DeepseekV4ForCausalLM(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=1)
def _oracle_digest() -> str:
    """Identifies what the results depend on: weights, config, this file, torch and transformers."""
    import transformers

    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in (MODEL_DIR / "model.safetensors", MODEL_DIR / "config.json", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cached(name: str, compute: Callable[[], Tensor], *key: object) -> Tensor:
    """The stored result of (name, key), or a computed one, stored if a cache directory is set."""
    folder = os.environ.get(CACHE_ENV)
    if not folder:
        return compute()
    digest = hashlib.sha256(f"{_oracle_digest()} {name} {key}".encode()).hexdigest()
    path = Path(folder) / f"{name}-{digest[:32]}.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    result = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save(result, file)
    os.replace(file.name, path)
    return result


@torch.inference_mode()
def oracle_logits(
    ids: Sequence[int], dtype: torch.dtype = torch.float32, chunk: int | None = None
) -> Tensor:
    """Logits at every position.

    Args:
        ids: T token ids.
        dtype: torch.float32 or torch.bfloat16, the arithmetic of the model.
        chunk: tokens per pass with transformers' cache; None takes one pass without cache, which
            needs memory quadratic in T.

    Returns:
        f32[T, V].
    """

    def compute() -> Tensor:
        model, cache, logits = load_oracle(dtype), None, []
        for part in torch.tensor([list(ids)]).split(chunk or len(ids), dim=1):
            result = model(part, past_key_values=cache, use_cache=chunk is not None)
            cache = result.past_key_values
            logits.append(result.logits[0].float())
        return torch.cat(logits)

    return _cached("logits", compute, list(ids), dtype, chunk)


@torch.inference_mode()
def greedy(
    ids: Sequence[int],
    max_new_tokens: int,
    dtype: torch.dtype = torch.float32,
    prefill_chunk: int | None = None,
) -> list[int]:
    """Greedy continuation with transformers' cache, up to and including EOS.

    Args:
        ids: the prompt.
        max_new_tokens: upper bound of the returned length.
        dtype: torch.float32 or torch.bfloat16, the arithmetic of the model.
        prefill_chunk: tokens of the prompt per pass; None takes it in one.
    """

    def compute() -> Tensor:
        model, cache = load_oracle(dtype), None
        for part in torch.tensor([list(ids)]).split(prefill_chunk or len(ids), dim=1):
            result = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = result.past_key_values
        output: list[int] = []
        while True:
            output.append(int(result.logits[0, -1].argmax()))
            if output[-1] == model.config.eos_token_id or len(output) == max_new_tokens:
                return torch.tensor(output)
            step = torch.tensor([[output[-1]]])
            result = model(step, past_key_values=cache, use_cache=True)

    return _cached("greedy", compute, list(ids), max_new_tokens, dtype, prefill_chunk).tolist()


def mean_kl(logits_p: Tensor, logits_q: Tensor) -> float:
    """Mean over positions of KL(P || Q) in nats.

    Args:
        logits_p: f[T, V], the distribution that the mean is taken under.
        logits_q: f[T, V].
    """
    log_p = logits_p.double().log_softmax(-1)
    log_q = logits_q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

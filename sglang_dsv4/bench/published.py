"""The published DeepSeek-V4 configs, whole or with fewer layers and experts, and their tensors."""

from collections.abc import Mapping
from typing import Any

from sglang_dsv4.checkpoint.shapes import expected_shapes
from sglang_dsv4.config import ModelDims
from sglang_dsv4.errors import ConfigError

Entry = tuple[str, str, tuple[int, ...]]
"""(key, safetensors dtype, shape)."""

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}

FLASH: dict[str, Any] = _COMMON | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
}
PRO: dict[str, Any] = _COMMON | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
}


def reduced(config: Mapping[str, Any], layers: int, experts: int) -> dict[str, Any]:
    """The config with its first ``layers`` layers and ``experts`` routed experts.

    Raises:
        ConfigError: more than the config has, or fewer experts than a token takes.
    """
    most, every = config["num_hidden_layers"], config["n_routed_experts"]
    least = config["num_experts_per_tok"]
    if not (1 <= layers <= most and least <= experts <= every):
        raise ConfigError(
            f"{layers} layers and {experts} experts were asked for, wanted 1 to {most} layers and "
            f"{least} to {every} experts: choose within these."
        )
    return dict(config) | {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "num_nextn_predict_layers": 0,
        "num_hash_layers": min(layers, config["num_hash_layers"]),
        "compress_ratios": config["compress_ratios"][:layers],
    }


def nvfp4_entries(dims: ModelDims) -> list[Entry]:
    """The tensors of a full-NVFP4 ModelOpt export: all but o_a_proj, gate, embeddings, head."""
    plain = ("o_a_proj", "mlp.gate", "embed_tokens", "lm_head")
    float32 = ("_hc.", "hc_head", "sinks", "position_bias", "correction_bias")
    entries: list[Entry] = []
    for name, shape in expected_shapes(dims).items():
        module = name.removesuffix(".weight")
        if name.endswith("tid2eid"):
            entries.append((name, "I64", shape))
        elif len(shape) == 1 or module.endswith(plain) or any(part in name for part in float32):
            dtype = "F32" if any(part in name for part in float32) else "BF16"
            entries.append((name, dtype, shape))
        else:
            rows, columns = shape
            entries.append((name, "U8", (rows, columns // 2)))
            entries.append((f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)))
            entries.append((f"{module}.weight_scale_2", "F32", ()))
            entries.append((f"{module}.input_scale", "F32", ()))
    return entries

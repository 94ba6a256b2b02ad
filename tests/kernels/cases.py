"""Shared inputs, and slow independent versions of the codecs in exact rational arithmetic."""

from fractions import Fraction

import torch

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.kernels.reference.indexer_key import dequantize_fp4_ue8m0, quantize_fp4_ue8m0

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Slots that name no row of any pool.
GARBAGE_SLOTS = (-1, -(2**63), -2, 2**40, 2**63 - 1)
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257)


def e4m3_value(byte):
    """A finite e4m3fn byte as an exact fraction; None for NaN."""
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return None
    power = Fraction(2) ** (max(exponent, 1) - 7)
    magnitude = (Fraction(mantissa, 8) + (1 if exponent else 0)) * power
    return -magnitude if byte & 0x80 else magnitude


E4M3 = [e4m3_value(byte) for byte in range(0x7F)]


def nearest(value, table):
    """Index of the nearest entry of an ascending table; a tie takes the even index."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


def e2m1_code(value, negative):
    """Code of a non-negative exact value with a sign."""
    return nearest(value, E2M1) | (8 if negative else 0)


def slow_nvfp4_group(values):
    """(16 codes, scale byte) of 16 finite python floats by exhaustive comparison."""
    scale_byte = nearest(max(abs(Fraction(v)) for v in values) / 6, E4M3)
    scale = E4M3[scale_byte]
    signs = [str(v).startswith("-") for v in values]
    codes = [
        e2m1_code(abs(Fraction(v)) / scale if scale else Fraction(0), negative)
        for v, negative in zip(values, signs, strict=True)
    ]
    return codes, scale_byte


def slow_fp4_group(values):
    """(32 codes, scale byte) of 32 finite python floats: UE8M0, no negative zero."""
    target = max(max(abs(Fraction(v)) for v in values) / 6, Fraction(1.0e-4))
    exponent = -126
    while Fraction(2) ** exponent < target:
        exponent += 1
    scale = Fraction(2) ** exponent
    codes = [e2m1_code(abs(Fraction(v)) / scale, v < 0) for v in values]
    return [0 if code == 8 else code for code in codes], exponent + 127


def round_fp4(x):
    """The values that an FP4 indexer key keeps."""
    return dequantize_fp4_ue8m0(*quantize_fp4_ue8m0(x))


def garbage_pool(layout: RecordLayout | IndexerLayout, num_pages, padding=0):
    """A pool of 0xff bytes (NaN in every format), pages `padding` bytes apart."""
    whole = torch.full((num_pages, layout.page_bytes + padding), 0xFF, dtype=torch.uint8)
    return whole[:, : layout.page_bytes]


def strided(x):
    """The same values in memory that is contiguous along no axis."""
    wide = torch.full((*x.shape, 2), 0, dtype=x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def hf_config(**changes):
    """A small DeepSeek-V4 of transformers with the rotary settings of the real one."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    head_dim = changes.get("head_dim", 128)
    settings = {
        "hidden_size": 32,
        "head_dim": head_dim,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "vocab_size": 64,
        "sliding_window": 16,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 64 / head_dim,
            },
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 160000.0,
                "partial_rotary_factor": 64 / head_dim,
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
                "attention_factor": 1.0,
            },
        },
    }
    return DeepseekV4Config(**(settings | changes))


def randomise(module, scale=0.5):
    """Give every parameter of a module random values; norm weights stay around one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            offset = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(offset + scale * torch.randn(parameter.shape))
    return module.float().eval()

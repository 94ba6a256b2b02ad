"""Every key style gives the same canonical names; foreign keys give none."""

import re

import pytest
from synthetic import TINY
from torch import Tensor

from sglang_dsv4.checkpoint.names import canonical_name, skip_reason
from sglang_dsv4.checkpoint.reader import Checkpoint

# transformers' table, applied in order, from its names to DeepSeek's inside a layer.
TO_OFFICIAL = [
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj\.", ".attn.indexer.weights_proj."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.self_attn\.", ".attn."),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"experts((?:\.\d+)?)\.gate_proj\.", r"experts\1.w1."),
    (r"experts((?:\.\d+)?)\.down_proj\.", r"experts\1.w2."),
    (r"experts((?:\.\d+)?)\.up_proj\.", r"experts\1.w3."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(\w+)$", r".hc_\1_\2"),
]


def to_official(key: str) -> str:
    for pattern, replacement in TO_OFFICIAL:
        key = re.sub(pattern, replacement, key)
    key = re.sub(r"^model\.embed_tokens\.", "embed.", key)
    key = re.sub(r"^lm_head\.", "head.", key)
    key = re.sub(r"^model\.hc_head\.hc_", "hc_head_", key)
    return key.removeprefix("model.")


def to_hybrid(key: str) -> str:
    """What transformers 5.19's save_pretrained and ModelOpt >= 0.46 write."""
    for pattern, replacement in TO_OFFICIAL:
        key = re.sub(pattern, replacement, key)
    return re.sub(r"^lm_head\.", "head.", key).replace(".attn.kv_norm.", ".attn.norm.")


def to_hf_5_8(key: str) -> str:
    return key.replace(".indexer.scorer.weights_proj.", ".indexer.weights_proj.")


STYLES = pytest.mark.parametrize("rename", [to_official, to_hybrid, to_hf_5_8])


@STYLES
def test_small_model_in_every_style(tiny: dict[str, Tensor], rename):
    loadable = [key for key in tiny if skip_reason(key) is None]
    renamed = [rename(key) for key in loadable]
    assert renamed != loadable
    assert [canonical_name(key) for key in loadable] == loadable
    assert [canonical_name(key) for key in renamed] == loadable


# One compressed layer as transformers 5.19.0's save_pretrained was seen to write it.
HYBRID_LAYER = """
attn.attn_sink attn.compressor.ape attn.compressor.norm.weight attn.compressor.wgate.weight
attn.compressor.wkv.weight attn.indexer.compressor.ape attn.indexer.compressor.norm.weight
attn.indexer.compressor.wgate.weight attn.indexer.compressor.wkv.weight
attn.indexer.weights_proj.weight attn.indexer.wq_b.weight attn.norm.weight attn.q_norm.weight
attn.wkv.weight attn.wo_a.weight attn.wo_b.weight attn.wq_a.weight attn.wq_b.weight attn_norm.weight
ffn.experts.3.w1.weight ffn.experts.3.w2.weight ffn.experts.3.w3.weight ffn.gate.bias
ffn.gate.weight ffn.shared_experts.w1.weight ffn.shared_experts.w2.weight
ffn.shared_experts.w3.weight ffn_norm.weight hc_attn_base hc_attn_fn hc_attn_scale hc_ffn_base
hc_ffn_fn hc_ffn_scale
"""


def test_hybrid_layer_as_saved_by_transformers():
    prefix = "model.layers.2."
    wanted = {name for name in Checkpoint.open(TINY).tensors if name.startswith(prefix)}
    wanted = {name for name in wanted if not name.endswith("_scale") and "scale_2" not in name}
    wanted = {n for n in wanted if ".experts." not in n.replace("shared_experts", "")}
    wanted |= {
        f"{prefix}mlp.experts.3.{projection}_proj.weight" for projection in ("gate", "up", "down")
    }
    assert {canonical_name(prefix + name) for name in HYBRID_LAYER.split()} == wanted


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("layers.7.attn.wq_a.scale", "model.layers.7.self_attn.q_a_proj.weight_scale_inv"),
        ("layers.7.attn.wo_a.weight", "model.layers.7.self_attn.o_a_proj.weight"),
        ("layers.0.ffn.gate.tid2eid", "model.layers.0.mlp.gate.tid2eid"),
        (
            "layers.9.ffn.experts.11.w3.scale",
            "model.layers.9.mlp.experts.11.up_proj.weight_scale_inv",
        ),
        (
            "layers.9.ffn.experts.11.w2.weight_scale_2",
            "model.layers.9.mlp.experts.11.down_proj.weight_scale_2",
        ),
        ("model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.gate_up_proj"),
    ],
)
def test_single_names(key: str, name: str):
    assert canonical_name(key) == name


@pytest.mark.parametrize(
    "key",
    [
        *(
            "",
            "weight",
            "model.layers.x.self_attn.q_a_proj.weight",
            "model.layers.1.self_attn.q_proj",
        ),
        *(
            "model.layers.1.self_attn.q_a_proj.bias",
            "model.layers.1.self_attn.q_a_norm.weight_scale",
        ),
        *("model.layers.1.mlp.experts.0.w4.weight", "model.layers.1.mlp.experts.0.w1.bias"),
        *("xmodel.layers.1.self_attn.sinks", "model.layers.1.self_attn.sinks.x", "layers.1.ape"),
        "model.layers.1.self_attn.q_a_proj.weight\n",
    ],
)
def test_foreign_keys(key: str):
    assert canonical_name(key) is None
    assert skip_reason(key) is None


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("model.layers.0.self_attn.k_proj.k_scale", "FP8 KV cache"),
        ("model.layers.0.self_attn.v_proj.v_scale", "FP8 KV cache"),
        ("model.layers.12.attn.k_proj.k_scale", "FP8 KV cache"),
        ("layers.12.attn.v_scale", "FP8 KV cache"),
        ("mtp.0.attn.wq_a.weight", "multi-token prediction"),
        ("model.mtp.0.e_proj.scale", "multi-token prediction"),
    ],
)
def test_skippable_keys(key: str, reason: str):
    assert canonical_name(key) is None
    assert reason in (skip_reason(key) or "")

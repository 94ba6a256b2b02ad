"""Three styles of tensor names to one: transformers' in-memory names.

| style | looks like | written by |
|---|---|---|
| HF | `model.layers.2.self_attn.q_a_proj.weight` | transformers in memory, ModelOpt 0.45 |
| hybrid | `model.layers.2.attn.wq_a.weight`, `head.weight` | transformers 5.19, ModelOpt 0.46 |
| official | `layers.2.attn.wq_a.weight`, `embed.weight` | DeepSeek |

All three store [out, in] and rotate interleaved pairs of the last 64 dimensions, so that no tensor
changes with its name. The official block scale `.scale` is `.weight_scale_inv` here.
"""

import re

_TOP_LEVEL = {
    "model.embed_tokens": "model.embed_tokens",
    "embed": "model.embed_tokens",
    "lm_head": "lm_head",
    "head": "lm_head",
}
_TOP_LEVEL_TENSORS = {
    "model.norm.weight": "model.norm.weight",
    "norm.weight": "model.norm.weight",
} | {
    alias: f"model.hc_head.hc_{part}"
    for part in ("fn", "base", "scale")
    for alias in (f"model.hc_head.hc_{part}", f"hc_head_{part}", f"model.hc_head_{part}")
}

# Matrices of a layer, which may be quantised; several old names may stand for one.
_MATRICES = {
    "self_attn.q_a_proj": ("attn.wq_a",),
    "self_attn.q_b_proj": ("attn.wq_b",),
    "self_attn.kv_proj": ("attn.wkv",),
    "self_attn.o_a_proj": ("attn.wo_a",),
    "self_attn.o_b_proj": ("attn.wo_b",),
    "self_attn.compressor.kv_proj": ("attn.compressor.wkv",),
    "self_attn.compressor.gate_proj": ("attn.compressor.wgate",),
    "self_attn.compressor.indexer.kv_proj": ("attn.indexer.compressor.wkv",),
    "self_attn.compressor.indexer.gate_proj": ("attn.indexer.compressor.wgate",),
    "self_attn.compressor.indexer.q_b_proj": ("attn.indexer.wq_b",),
    "self_attn.compressor.indexer.scorer.weights_proj": (
        "self_attn.compressor.indexer.weights_proj",
        "attn.indexer.weights_proj",
    ),
    "mlp.gate": ("ffn.gate",),
    "mlp.shared_experts.gate_proj": ("ffn.shared_experts.w1",),
    "mlp.shared_experts.up_proj": ("ffn.shared_experts.w3",),
    "mlp.shared_experts.down_proj": ("ffn.shared_experts.w2",),
}
# Tensors of a layer that are never quantised, by their whole name.
_TENSORS = {
    "self_attn.q_a_norm.weight": ("attn.q_norm.weight",),
    "self_attn.kv_norm.weight": ("attn.kv_norm.weight", "attn.norm.weight"),
    "self_attn.sinks": ("attn.attn_sink",),
    "self_attn.compressor.position_bias": ("attn.compressor.ape",),
    "self_attn.compressor.kv_norm.weight": ("attn.compressor.norm.weight",),
    "self_attn.compressor.indexer.position_bias": ("attn.indexer.compressor.ape",),
    "self_attn.compressor.indexer.kv_norm.weight": ("attn.indexer.compressor.norm.weight",),
    "input_layernorm.weight": ("attn_norm.weight",),
    "post_attention_layernorm.weight": ("ffn_norm.weight",),
    "mlp.gate.e_score_correction_bias": ("ffn.gate.bias",),
    "mlp.gate.tid2eid": ("ffn.gate.tid2eid",),
    "mlp.experts.gate_up_proj": (),
    "mlp.experts.down_proj": (),
} | {
    f"{block}_hc.{part}": (f"hc_{block}_{part}",)
    for block in ("attn", "ffn")
    for part in ("fn", "base", "scale")
}
_EXPERT_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"} | {
    name: name for name in ("gate_proj", "up_proj", "down_proj")
}
_SUFFIXES = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "input_scale": "input_scale",
    "weight_scale_inv": "weight_scale_inv",
    "scale": "weight_scale_inv",
}


def _with_suffixes(aliases: dict[str, str]) -> dict[str, str]:
    return {
        f"{alias}.{written}": f"{name}.{suffix}"
        for alias, name in aliases.items()
        for written, suffix in _SUFFIXES.items()
    }


def _aliases(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {alias: name for name, old in table.items() for alias in (name, *old)}


_OUTSIDE_LAYERS = _with_suffixes(_TOP_LEVEL) | _TOP_LEVEL_TENSORS
_IN_LAYER = _with_suffixes(_aliases(_MATRICES)) | _aliases(_TENSORS)

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|ffn)\.experts\.(\d+)\.([^.]+)\.([^.]+)")
_MTP = re.compile(r"(?:model\.)?mtp\.")
_KV_SCALE = re.compile(r"(?:model\.)?layers\.\d+\.(?:self_attn|attn)\.(?:\w+\.)?(?:k|v|kv)_scale")

MTP_REASON = "multi-token prediction is not served"
KV_SCALE_REASON = "scale of an FP8 KV cache; the KV pool computes its own block scales"


def canonical_name(key: str) -> str | None:
    """transformers' in-memory name of a checkpoint key; None if the key is not of this model.

    Routed experts keep one name each (`model.layers.N.mlp.experts.E.gate_proj.weight`), or their
    fused in-memory name (`model.layers.N.mlp.experts.gate_up_proj`) where the file has that.
    """
    layer = _LAYER.fullmatch(key)
    if layer is None:
        return _OUTSIDE_LAYERS.get(key)
    index, rest = layer.groups()
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        name = _IN_LAYER.get(rest)
        return None if name is None else f"model.layers.{int(index)}.{name}"
    number, projection, written = expert.groups()
    if projection not in _EXPERT_PROJECTIONS or written not in _SUFFIXES:
        return None
    module = f"mlp.experts.{int(number)}.{_EXPERT_PROJECTIONS[projection]}"
    return f"model.layers.{int(index)}.{module}.{_SUFFIXES[written]}"


def skip_reason(key: str) -> str | None:
    """Why a key of this model family is left unread; None if it is not such a key."""
    if _MTP.match(key):
        return MTP_REASON
    if _KV_SCALE.fullmatch(key):
        return KV_SCALE_REASON
    return None

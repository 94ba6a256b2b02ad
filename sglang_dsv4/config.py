"""The model's dimensions from config.json, in transformers' or in DeepSeek's own form.

transformers writes `layer_types`, `mlp_layer_types` and nested `rope_parameters`; DeepSeek writes
`compress_ratios` (one entry per layer, then one per MTP slot), `num_hash_layers` and
`rope_scaling`. Both give the same `ModelDims`. Where a checkpoint's tensors tell the kind of a
layer, they win over the config (`checkpoint.shapes.layer_kinds`).
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_dsv4.checkpoint.fields import ConfigFields
from sglang_dsv4.errors import ConfigError
from sglang_dsv4.kernels.reference.rope import YarnParams


class LayerKind(Enum):
    """Attention of one layer; the value is transformers' name in `layer_types`."""

    SWA = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry; 0 where nothing is compressed."""
        return {LayerKind.SWA: 0, LayerKind.CSA: 4, LayerKind.HCA: 128}[self]

    @property
    def coff(self) -> int:
        """Heads' worth of channels that a compressor projects: CSA 2 (overlap), HCA 1, SWA 0."""
        return {LayerKind.SWA: 0, LayerKind.CSA: 2, LayerKind.HCA: 1}[self]


_KIND_OF_RATIO = {kind.ratio: kind for kind in LayerKind}


@dataclass(frozen=True)
class ModelDims:
    """Every dimension that the model, the pools and the loader need (counts unless said)."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnParams | None
    max_position_embeddings: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]

    @property
    def nope_head_dim(self) -> int:
        """Dimensions of a head that are not rotated (448)."""
        return self.head_dim - self.qk_rope_head_dim

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Indices of the layers of one kind, ascending."""
        return tuple(i for i, k in enumerate(self.layer_kinds) if k is kind)


# Where a dimension is looked for, first place first; the others go by their own name.
_PLACES = {
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "n_routed_experts": ("n_routed_experts", "num_local_experts"),
    "rope_theta": ("rope_parameters.main.rope_theta", "rope_theta", "rope_parameters.rope_theta"),
    "compress_rope_theta": ("rope_parameters.compress.rope_theta", "compress_rope_theta"),
}
# What this implementation assumes: checked where the config states it.
_FIXED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def from_config_dict(
    config: Mapping[str, Any],
    layer_kinds_from_tensors: Sequence[LayerKind] | None = None,
    num_hash_layers_from_tensors: int | None = None,
) -> tuple[ModelDims, list[str]]:
    """Dimensions from a parsed config.json of either form, and warnings to log.

    Where given, what the tensors tell (one `LayerKind` per layer; the number of hash layers) wins;
    each contradiction gives one warning naming the layers. Raises `ConfigError` for a field that is
    missing, of a wrong type or of a value that this implementation does not serve.
    """
    fields = ConfigFields(config)
    for name, wanted in _FIXED.items():
        fields.fixed(name, wanted)
    num_layers = fields.count("num_hidden_layers")
    warnings: list[str] = []
    derived: dict[str, Any] = {
        "layer_kinds": _layer_kinds(fields, num_layers, layer_kinds_from_tensors, warnings),
        "num_hash_layers": _hash_layers(fields, num_layers, num_hash_layers_from_tensors, warnings),
        "qk_rope_head_dim": _rope_head_dim(fields),
        "yarn": _yarn(fields),
    }
    read: dict[Any, Callable[..., Any]]
    read = {int: fields.count, float: fields.number, bool: fields.flag}
    plain = {
        field.name: read[field.type](*_PLACES.get(field.name, (field.name,)))
        for field in dataclasses.fields(ModelDims)
        if field.name not in derived
    }
    dims = ModelDims(**plain, **derived)
    if dims.num_experts_per_tok > dims.n_routed_experts or dims.num_attention_heads % dims.o_groups:
        raise ConfigError(
            f"config.json: found {dims.num_experts_per_tok} of {dims.n_routed_experts} experts a "
            f"token and {dims.num_attention_heads} heads in {dims.o_groups} o_groups, no more "
            "experts than exist and equal groups were wanted; correct the file."
        )
    return dims, warnings


def flat_config(
    config: Mapping[str, Any], dims: ModelDims, num_mtp_layers: int = 0
) -> dict[str, Any]:
    """A copy of `config` with the flat fields that SGLang's ModelConfig reads; idempotent.

    `num_mtp_layers` is the number of MTP layers that the checkpoint holds tensors for, whatever
    `num_nextn_predict_layers` says. `layer_types` and `mlp_layer_types`, where present, are made to
    agree with `dims`.
    """
    flat = copy.deepcopy(dict(config))
    flat.setdefault("architectures", ["DeepseekV4ForCausalLM"])
    flat.setdefault("model_type", "deepseek_v4")
    flat["num_key_value_heads"] = 1
    flat["compress_ratios"] = [k.ratio for k in dims.layer_kinds] + [0] * num_mtp_layers
    flat["num_nextn_predict_layers"] = num_mtp_layers
    flat["num_hash_layers"] = dims.num_hash_layers
    flat["scoring_func"] = "sqrtsoftplus"
    flat["topk_method"] = "noaux_tc"
    flat["moe_intermediate_size"] = dims.moe_intermediate_size
    flat["n_routed_experts"] = dims.n_routed_experts
    flat["qk_rope_head_dim"] = dims.qk_rope_head_dim
    flat["rope_theta"] = dims.rope_theta
    flat["compress_rope_theta"] = dims.compress_rope_theta
    flat["rope_scaling"] = _rope_scaling(dims.yarn)
    if "layer_types" in flat:
        flat["layer_types"] = [k.value for k in dims.layer_kinds]
    if "mlp_layer_types" in flat:
        flat["mlp_layer_types"] = [
            "hash_moe" if i < dims.num_hash_layers else "moe" for i in range(dims.num_hidden_layers)
        ]
    return flat


def _rope_scaling(yarn: YarnParams | None) -> dict[str, Any]:
    if yarn is None:
        return {"rope_type": "default", "type": "default"}
    return {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


def _layer_kinds(
    fields: ConfigFields,
    num_layers: int,
    from_tensors: Sequence[LayerKind] | None,
    warnings: list[str],
) -> tuple[LayerKind, ...]:
    for kind in (LayerKind.CSA, LayerKind.HCA):
        fields.fixed(f"compress_rates.{kind.value}", kind.ratio)
    by_name = fields.items("layer_types", {k.value: k for k in LayerKind}, num_layers)
    by_ratio = fields.items("compress_ratios", _KIND_OF_RATIO, num_layers)
    stated = by_name if by_name is not None else by_ratio
    if from_tensors is None:
        if stated is None:
            raise ConfigError(
                "config.json: compress_ratios and layer_types are missing, one of them was wanted; "
                "add one or give the checkpoint's tensors."
            )
        if by_name is not None and by_ratio is not None and by_name != by_ratio:
            layers = [i for i in range(num_layers) if by_name[i] is not by_ratio[i]]
            warnings.append(
                f"config.json: layer_types and compress_ratios differ in layers {layers}; "
                "layer_types is used."
            )
        return stated
    kinds = tuple(from_tensors)
    if len(kinds) != num_layers:
        raise ConfigError(
            f"config.json: num_hidden_layers is {num_layers}, the tensors hold {len(kinds)} "
            "layers; correct the file or fetch the missing shards."
        )
    for name, listed in (("layer_types", by_name), ("compress_ratios", by_ratio)):
        if listed is None or listed == kinds:
            continue
        layers = [i for i in range(num_layers) if listed[i] is not kinds[i]]
        said = ", ".join(f"{i} is {kinds[i].name} (config: {listed[i].name})" for i in layers)
        warnings.append(f"config.json: {name} contradicts the tensors, which win: layer {said}.")
    return kinds


def _hash_layers(
    fields: ConfigFields, num_layers: int, from_tensors: int | None, warnings: list[str]
) -> int:
    is_hash = fields.items("mlp_layer_types", {"hash_moe": True, "moe": False}, num_layers)
    stated: int | None = None
    if is_hash is not None:
        stated = sum(is_hash)
        if any(is_hash[stated:]):
            raise ConfigError(
                f"config.json: mlp_layer_types puts hash_moe at layers "
                f"{[i for i, h in enumerate(is_hash) if h]}, the first layers were wanted; "
                "correct the file."
            )
    elif fields.has("num_hash_layers"):
        stated = fields.count("num_hash_layers", minimum=0)
    if from_tensors is None:
        return fields.count("num_hash_layers", "mlp_layer_types") if stated is None else stated
    if stated is not None and stated != from_tensors:
        layers = list(range(min(stated, from_tensors), max(stated, from_tensors)))
        warnings.append(
            f"config.json: {stated} hash layers contradict the tensors, which win: tid2eid exists "
            f"in {from_tensors} layers (layers in dispute: {layers})."
        )
    return from_tensors


def _rope_head_dim(fields: ConfigFields) -> int:
    if fields.has("qk_rope_head_dim"):
        return fields.count("qk_rope_head_dim")
    factor = fields.number("partial_rotary_factor", "rope_parameters.main.partial_rotary_factor")
    rope_dim = round(fields.count("head_dim") * factor)
    if rope_dim != _FIXED["qk_rope_head_dim"]:
        raise ConfigError(
            f"config.json: partial_rotary_factor {factor} rotates {rope_dim} dimensions, "
            f"{_FIXED['qk_rope_head_dim']} were wanted; this model is not served."
        )
    return rope_dim


def _yarn(fields: ConfigFields) -> YarnParams | None:
    """YaRN of the compressed layers; `rope_parameters.main` is never scaled, whatever it says."""
    places = ("rope_parameters.compress", "rope_scaling", "rope_parameters")
    scaling = next((place for place in places if fields.has(place)), "rope_scaling")
    kind = fields.text(f"{scaling}.rope_type", f"{scaling}.type")
    if kind == "default":
        return None
    if kind not in ("yarn", "deepseek_yarn"):
        raise ConfigError(
            f"config.json: {scaling} has type {kind!r}, 'yarn' or 'default' was wanted; this model "
            "is not served."
        )
    original = f"{scaling}.original_max_position_embeddings"
    return YarnParams(
        factor=fields.number(f"{scaling}.factor"),
        original_max_position=fields.count(original),
        beta_fast=fields.number(f"{scaling}.beta_fast", default=32.0),
        beta_slow=fields.number(f"{scaling}.beta_slow", default=1.0),
    )

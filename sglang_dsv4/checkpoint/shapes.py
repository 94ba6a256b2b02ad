"""What the tensors say about the layers, and which tensor of which shape a model must have."""

import re
from collections.abc import Mapping

from sglang_dsv4.checkpoint.quant import FLOAT_DTYPES, SCALE_SUFFIXES, QuantKind
from sglang_dsv4.checkpoint.reader import Checkpoint, first_few
from sglang_dsv4.config import LayerKind, ModelDims
from sglang_dsv4.errors import CheckpointError

Shape = tuple[int, ...]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BIAS = "self_attn.compressor.position_bias"
_TABLE = "mlp.gate.tid2eid"


def _tensors_of_layers(checkpoint: Checkpoint) -> list[set[str]]:
    """Names below `model.layers.N.` for each layer up to the last one that has a tensor."""
    layers: dict[int, set[str]] = {}
    for name in checkpoint.tensors:
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(int(match[1]), set()).add(match[2])
    return [layers.get(i, set()) for i in range(max(layers, default=-1) + 1)]


def layer_kinds(checkpoint: Checkpoint) -> tuple[LayerKind, ...]:
    """Kind of every layer by the rows of `compressor.position_bias`.

    [4, 2 * head_dim] is CSA, [128, head_dim] is HCA, a layer without compressor tensors is SWA.
    Raises `CheckpointError` for another row count and for a compressor that lacks the tensor.
    """
    by_rows = {kind.ratio: kind for kind in (LayerKind.CSA, LayerKind.HCA)}
    kinds = []
    for index, names in enumerate(_tensors_of_layers(checkpoint)):
        key = f"model.layers.{index}.{_BIAS}"
        if key not in checkpoint.tensors:
            if any(name.startswith("self_attn.compressor.") for name in names):
                raise CheckpointError(
                    f"{key} is missing though layer {index} has a compressor, [4, 1024] or "
                    "[128, 512] was wanted; fetch the missing shard."
                )
            kinds.append(LayerKind.SWA)
            continue
        info = checkpoint.tensors[key]
        rows = info.shape[0] if info.shape else 0
        if rows not in by_rows:
            raise CheckpointError(
                f"{info.key} is {list(info.shape)}, [4, 1024] (CSA) or [128, 512] (HCA) was "
                "wanted; export the checkpoint again."
            )
        kinds.append(by_rows[rows])
    return tuple(kinds)


def num_hash_layers(checkpoint: Checkpoint) -> int:
    """Number of layers routed by a token table (`tid2eid`); these must be the first layers.

    Raises `CheckpointError` if they are not.
    """
    layers = _tensors_of_layers(checkpoint)
    hashed = [index for index, names in enumerate(layers) if _TABLE in names]
    if hashed != list(range(len(hashed))):
        raise CheckpointError(
            f"tid2eid exists in layers {hashed}, the first layers were wanted; export the "
            "checkpoint again."
        )
    return len(hashed)


def expected_shapes(dims: ModelDims, fused_experts: bool = False) -> dict[str, Shape]:
    """Logical (unpacked) shape of every tensor but the scales, by canonical name.

    `fused_experts`: the routed experts of a layer are one tensor for gate and up, one for down.
    """
    hidden, streams = dims.hidden_size, dims.hc_mult
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (dims.vocab_size, hidden),
        "lm_head.weight": (dims.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "model.hc_head.hc_fn": (streams, streams * hidden),
        "model.hc_head.hc_base": (streams,),
        "model.hc_head.hc_scale": (1,),
    }
    for index, kind in enumerate(dims.layer_kinds):
        layer = _attention(dims) | _compressor(dims, kind) | _hyper_connections(dims)
        layer |= _moe(dims, index < dims.num_hash_layers, fused_experts)
        layer |= {f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention(dims: ModelDims) -> dict[str, Shape]:
    width = dims.num_attention_heads * dims.head_dim
    return {
        "self_attn.q_a_proj.weight": (dims.q_lora_rank, dims.hidden_size),
        "self_attn.q_a_norm.weight": (dims.q_lora_rank,),
        "self_attn.q_b_proj.weight": (width, dims.q_lora_rank),
        "self_attn.kv_proj.weight": (dims.head_dim, dims.hidden_size),
        "self_attn.kv_norm.weight": (dims.head_dim,),
        "self_attn.sinks": (dims.num_attention_heads,),
        "self_attn.o_a_proj.weight": (dims.o_groups * dims.o_lora_rank, width // dims.o_groups),
        "self_attn.o_b_proj.weight": (dims.hidden_size, dims.o_groups * dims.o_lora_rank),
    }


def _compressor(dims: ModelDims, kind: LayerKind) -> dict[str, Shape]:
    if kind is LayerKind.SWA:
        return {}
    prefix = "self_attn.compressor"
    shapes = _window_pooling(prefix, dims.head_dim, dims.hidden_size, kind)
    if kind is LayerKind.CSA:
        prefix = f"{prefix}.indexer"
        heads, width = dims.index_n_heads, dims.index_head_dim
        shapes |= _window_pooling(prefix, width, dims.hidden_size, kind)
        shapes[f"{prefix}.q_b_proj.weight"] = (heads * width, dims.q_lora_rank)
        shapes[f"{prefix}.scorer.weights_proj.weight"] = (heads, dims.hidden_size)
    return shapes


def _window_pooling(prefix: str, width: int, hidden: int, kind: LayerKind) -> dict[str, Shape]:
    return {
        f"{prefix}.kv_proj.weight": (kind.coff * width, hidden),
        f"{prefix}.gate_proj.weight": (kind.coff * width, hidden),
        f"{prefix}.position_bias": (kind.ratio, kind.coff * width),
        f"{prefix}.kv_norm.weight": (width,),
    }


def _hyper_connections(dims: ModelDims) -> dict[str, Shape]:
    streams = dims.hc_mult
    mix = (2 + streams) * streams
    shapes: dict[str, Shape] = {}
    for block in ("attn_hc", "ffn_hc"):
        shapes[f"{block}.fn"] = (mix, streams * dims.hidden_size)
        shapes[f"{block}.base"] = (mix,)
        shapes[f"{block}.scale"] = (3,)
    return shapes


def _moe(dims: ModelDims, hashed: bool, fused: bool) -> dict[str, Shape]:
    hidden, inner, experts = dims.hidden_size, dims.moe_intermediate_size, dims.n_routed_experts
    shared = inner * dims.n_shared_experts
    shapes: dict[str, Shape] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.shared_experts.gate_proj.weight": (shared, hidden),
        "mlp.shared_experts.up_proj.weight": (shared, hidden),
        "mlp.shared_experts.down_proj.weight": (hidden, shared),
    }
    if hashed:
        shapes[_TABLE] = (dims.vocab_size, dims.num_experts_per_tok)
    else:
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    if fused:
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, inner)
        return shapes
    for expert in range(experts):
        shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (inner, hidden)
        shapes[f"mlp.experts.{expert}.up_proj.weight"] = (inner, hidden)
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, inner)
    return shapes


def check_shapes(checkpoint: Checkpoint, dims: ModelDims, kinds: Mapping[str, QuantKind]) -> None:
    """Check that every tensor of the model exists once, with its logical shape and a fit dtype.

    `kinds` is `quant.module_kinds(checkpoint)`. Raises `CheckpointError` naming the first tensors
    that are missing, unexpected, or of a wrong shape or dtype.
    """
    fused = "model.layers.0.mlp.experts.gate_up_proj" in checkpoint.tensors
    expected = expected_shapes(dims, fused)
    missing = [name for name in expected if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} of {len(expected)} tensors "
            f"({first_few(missing)}), every one was wanted; fetch the missing shard."
        )
    for name, info in checkpoint.tensors.items():
        if name.rpartition(".")[2] in SCALE_SUFFIXES:
            continue
        if name not in expected:
            raise CheckpointError(
                f"{info.key} does not belong to a model of {dims.num_hidden_layers} layers and "
                f"{dims.n_routed_experts} experts of these kinds, no such tensor was wanted; check "
                "config.json against the weights."
            )
        module = name.removesuffix(".weight")
        packed = kinds[module].values_per_element if module in kinds else 1
        shape = (*info.shape[:-1], info.shape[-1] * packed) if info.shape else ()
        if shape != expected[name]:
            raise CheckpointError(
                f"{info.key} is {list(shape)} (unpacked), {list(expected[name])} was wanted; check "
                "config.json against the weights."
            )
        allowed = ("I64", "I32") if name.endswith(_TABLE) else FLOAT_DTYPES
        if module not in kinds and info.dtype not in allowed:
            raise CheckpointError(
                f"{info.key} is {info.dtype}, {' or '.join(allowed)} was wanted; export the "
                "checkpoint again."
            )

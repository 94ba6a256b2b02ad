"""Layer kinds from the tensors, and the tensors that a model must have."""

from pathlib import Path

import pytest
import torch
from synthetic import TINY, write_copy
from torch import Tensor

from sglang_dsv4.bench.published import FLASH, PRO
from sglang_dsv4.checkpoint.quant import module_kinds
from sglang_dsv4.checkpoint.reader import Checkpoint
from sglang_dsv4.checkpoint.shapes import (
    check_shapes,
    expected_shapes,
    layer_kinds,
    num_hash_layers,
)
from sglang_dsv4.config import LayerKind, ModelDims, from_config_dict
from sglang_dsv4.errors import CheckpointError

SWA, CSA, HCA = LayerKind.SWA, LayerKind.CSA, LayerKind.HCA


def dims_of(checkpoint: Checkpoint) -> ModelDims:
    return from_config_dict(checkpoint.config)[0]


def check(checkpoint: Checkpoint) -> None:
    check_shapes(checkpoint, dims_of(checkpoint), module_kinds(checkpoint))


def test_small_checkpoint():
    checkpoint = Checkpoint.open(TINY)
    assert layer_kinds(checkpoint) == (HCA, HCA, CSA, HCA, CSA, SWA)
    assert num_hash_layers(checkpoint) == 1
    check(checkpoint)


def test_contradiction_between_config_and_tensors():
    checkpoint = Checkpoint.open(TINY)
    config = checkpoint.config | {"layer_types": ["sliding_attention"] * 6}
    dims, warnings = from_config_dict(config, layer_kinds(checkpoint), num_hash_layers(checkpoint))
    assert dims == dims_of(checkpoint)
    assert len(warnings) == 1
    assert "0 is HCA (config: SWA)" in warnings[0]
    assert "4 is CSA (config: SWA)" in warnings[0]
    check_shapes(checkpoint, dims, module_kinds(checkpoint))


# V4-Pro, unpacked, as DeepSeek's and ModelOpt's listings have them.
PRO_SHAPES = {
    "model.embed_tokens.weight": (129280, 7168),
    "model.hc_head.hc_fn": (4, 28672),
    "model.layers.0.mlp.gate.tid2eid": (129280, 6),
    "model.layers.3.mlp.gate.e_score_correction_bias": (384,),
    "model.layers.3.mlp.gate.weight": (384, 7168),
    "model.layers.3.mlp.experts.383.gate_proj.weight": (3072, 7168),
    "model.layers.3.mlp.experts.383.down_proj.weight": (7168, 3072),
    "model.layers.3.mlp.shared_experts.up_proj.weight": (3072, 7168),
    "model.layers.3.attn_hc.fn": (24, 28672),
    "model.layers.3.ffn_hc.base": (24,),
    "model.layers.3.ffn_hc.scale": (3,),
    "model.layers.3.self_attn.q_a_proj.weight": (1536, 7168),
    "model.layers.3.self_attn.q_b_proj.weight": (65536, 1536),
    "model.layers.3.self_attn.kv_proj.weight": (512, 7168),
    "model.layers.3.self_attn.o_a_proj.weight": (16384, 4096),
    "model.layers.3.self_attn.o_b_proj.weight": (7168, 16384),
    "model.layers.3.self_attn.sinks": (128,),
    "model.layers.3.self_attn.compressor.position_bias": (128, 512),
    "model.layers.3.self_attn.compressor.kv_proj.weight": (512, 7168),
    "model.layers.2.self_attn.compressor.position_bias": (4, 1024),
    "model.layers.2.self_attn.compressor.gate_proj.weight": (1024, 7168),
    "model.layers.2.self_attn.compressor.kv_norm.weight": (512,),
    "model.layers.2.self_attn.compressor.indexer.position_bias": (4, 256),
    "model.layers.2.self_attn.compressor.indexer.kv_proj.weight": (256, 7168),
    "model.layers.2.self_attn.compressor.indexer.kv_norm.weight": (128,),
    "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight": (8192, 1536),
    "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight": (64, 7168),
}


def test_pro_shapes():
    shapes = expected_shapes(from_config_dict(PRO)[0])
    assert {name: shapes[name] for name in PRO_SHAPES} == PRO_SHAPES
    assert "model.layers.3.mlp.gate.tid2eid" not in shapes
    assert "model.layers.2.mlp.gate.e_score_correction_bias" not in shapes
    assert "model.layers.3.self_attn.compressor.indexer.position_bias" not in shapes


def test_flash_inventory():
    """Tensors of a layer: 8 attention, 2 layer norms, 6 mHC, 5 router and shared, 3 an expert."""
    shapes = expected_shapes(from_config_dict(FLASH)[0])
    assert len(shapes) == 6 + 43 * (8 + 2 + 6 + 5 + 3 * 256) + 41 * 4 + 21 * 6
    assert "model.layers.1.self_attn.compressor.position_bias" not in shapes


def test_fused_experts():
    dims = from_config_dict(FLASH)[0]
    shapes = expected_shapes(dims, fused_experts=True)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (256, 4096, 4096)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (256, 4096, 2048)
    assert len(shapes) == len(expected_shapes(dims)) - 43 * (3 * 256 - 2)


def without(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    kept = {key: value for key, value in tensors.items() if part not in key}
    assert len(kept) < len(tensors)
    return kept


@pytest.mark.parametrize(
    "name",
    [
        "model.hc_head.hc_fn",
        "model.layers.0.mlp.gate.tid2eid",
        "model.layers.5.mlp.gate.e_score_correction_bias",
        "model.layers.2.self_attn.compressor.indexer.kv_norm.weight",
        "model.layers.3.ffn_hc.scale",
        "lm_head.weight",
    ],
)
def test_absent_tensor(copy_dir: Path, tiny: dict[str, Tensor], name: str):
    checkpoint = Checkpoint.open(write_copy(copy_dir, without(tiny, name)))
    with pytest.raises(CheckpointError, match=rf"lacks 1 of \d+ tensors \({name}\)"):
        check(checkpoint)


def test_absent_expert(copy_dir: Path, tiny: dict[str, Tensor]):
    checkpoint = Checkpoint.open(write_copy(copy_dir, without(tiny, "layers.4.mlp.experts.7.")))
    with pytest.raises(CheckpointError, match=r"lacks 3 .*layers\.4\.mlp\.experts\.7\.gate_proj"):
        check(checkpoint)


def test_absent_position_bias(copy_dir: Path, tiny: dict[str, Tensor]):
    rest = without(tiny, "layers.1.self_attn.compressor.position_bias")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\..*position_bias is missing though layer 1"
    ):
        layer_kinds(Checkpoint.open(write_copy(copy_dir, rest)))


def test_layer_without_any_tensor_is_reported_as_missing(copy_dir: Path, tiny: dict[str, Tensor]):
    checkpoint = Checkpoint.open(write_copy(copy_dir, without(tiny, "model.layers.3.")))
    with pytest.raises(CheckpointError, match=r"lacks \d+ of .*model\.layers\.3\."):
        check(checkpoint)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("model.layers.1.self_attn.sinks", torch.zeros(16), "is \\[16\\].*\\[8\\] was wanted"),
        ("model.layers.1.input_layernorm.weight", torch.zeros(512), "is \\[512\\]"),
        ("model.layers.1.self_attn.o_a_proj.weight", torch.zeros(2048, 256), "is \\[2048, 256\\]"),
        ("model.hc_head.hc_scale", torch.zeros(()), "is \\[\\].*\\[1\\] was wanted"),
        ("model.layers.0.mlp.gate.tid2eid", torch.zeros(2048, 4), "is F32, I64 or I32"),
        ("model.norm.weight", torch.zeros(256, dtype=torch.int64), "is I64, BF16"),
        (
            "model.layers.9.self_attn.sinks",
            torch.zeros(8),
            "does not belong to a model of 6 layers",
        ),
        ("model.layers.5.mlp.gate.tid2eid", torch.zeros(2048, 4), "does not belong"),
    ],
)
def test_wrong_shape_or_dtype(
    copy_dir: Path, tiny: dict[str, Tensor], name: str, value: Tensor, found: str
):
    with pytest.raises(CheckpointError, match=f"{name} {found}"):
        check(Checkpoint.open(write_copy(copy_dir, tiny | {name: value})))


def test_packed_matrix_of_another_width(copy_dir: Path, tiny: dict[str, Tensor]):
    module = "model.layers.1.self_attn.q_a_proj"
    narrow = {
        f"{module}.weight": torch.zeros(128, 64, dtype=torch.uint8),
        f"{module}.weight_scale": torch.zeros(128, 8).to(torch.float8_e4m3fn),
    }
    with pytest.raises(
        CheckpointError, match=r"\[128, 128\] \(unpacked\), \[128, 256\] was wanted"
    ):
        check(Checkpoint.open(write_copy(copy_dir, tiny | narrow)))


def test_position_bias_of_an_unknown_ratio(copy_dir: Path, tiny: dict[str, Tensor]):
    name = "model.layers.2.self_attn.compressor.position_bias"
    checkpoint = Checkpoint.open(write_copy(copy_dir, tiny | {name: torch.zeros(2, 1024)}))
    with pytest.raises(CheckpointError, match=r"is \[2, 1024\], \[4, 1024\] \(CSA\)"):
        layer_kinds(checkpoint)


def test_hash_layers_that_are_not_the_first(copy_dir: Path, tiny: dict[str, Tensor]):
    table = tiny["model.layers.0.mlp.gate.tid2eid"]
    moved = without(tiny, "tid2eid") | {"model.layers.2.mlp.gate.tid2eid": table}
    with pytest.raises(CheckpointError, match=r"layers \[2\], the first layers"):
        num_hash_layers(Checkpoint.open(write_copy(copy_dir, moved)))

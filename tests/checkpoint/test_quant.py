"""Storage kinds from the tensors, and what makes a matrix unusable."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from synthetic import TINY, Entry, write_copy, write_header_only
from torch import Tensor

from sglang_dsv4.checkpoint.quant import QuantKind, has_input_scales, module_kinds
from sglang_dsv4.checkpoint.reader import Checkpoint, TensorInfo
from sglang_dsv4.errors import CheckpointError

Q_A = "model.layers.2.self_attn.q_a_proj"


def kinds_of(path: Path, entries: list[Entry]) -> dict[str, QuantKind]:
    """Kinds of a header-only checkpoint."""
    write_header_only(path / "model.safetensors", entries)
    infos = {key: TensorInfo(key, path / "x", dtype, shape) for key, dtype, shape in entries}
    return module_kinds(Checkpoint(path, {}, infos, {}))


def test_small_checkpoint():
    kinds = module_kinds(Checkpoint.open(TINY))
    # 6 x (q_a, q_b, kv, o_b, 3 shared, 16 x 3 experts), 5 x 2 compressor, 2 x 4 indexer.
    assert Counter(kinds.values())[QuantKind.NVFP4] == 6 * (4 + 3 + 48) + 5 * 2 + 2 * 4
    plain = {module for module, kind in kinds.items() if kind is QuantKind.BF16}
    assert plain == {"model.embed_tokens", "lm_head"} | {
        f"model.layers.{i}.{name}" for i in range(6) for name in ("self_attn.o_a_proj", "mlp.gate")
    }
    assert len(kinds) == Counter(kinds.values())[QuantKind.NVFP4] + len(plain)


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        # V4-Pro shapes: official FP8 q_a, official MXFP4 expert, NVFP4 q_a, plain o_a.
        (
            [("weight", "F8_E4M3", (1536, 7168)), ("weight_scale_inv", "F8_E8M0", (12, 56))],
            "FP8_BLOCK",
        ),
        ([("weight", "F8_E4M3", (1536, 7168)), ("weight_scale_inv", "F32", (12, 56))], "FP8_BLOCK"),
        ([("weight", "F8_E4M3", (64, 7168)), ("weight_scale_inv", "F32", (1, 56))], "FP8_BLOCK"),
        ([("weight", "I8", (3072, 3584)), ("weight_scale_inv", "F8_E8M0", (3072, 224))], "MXFP4"),
        (
            [
                ("weight", "U8", (1536, 3584)),
                ("weight_scale", "F8_E4M3", (1536, 448)),
                ("weight_scale_2", "F32", ()),
            ],
            "NVFP4",
        ),
        ([("weight", "BF16", (16384, 4096))], "BF16"),
        ([("weight", "F32", (16384, 4096))], "BF16"),
    ],
)
def test_kinds(tmp_path: Path, entries: list[Entry], kind: str):
    named = [(f"{Q_A}.{suffix}", dtype, shape) for suffix, dtype, shape in entries]
    assert kinds_of(tmp_path, named) == {Q_A: QuantKind[kind]}


def test_norms_are_not_modules_and_fused_experts_are(tmp_path: Path):
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    entries: list[Entry] = [
        ("model.norm.weight", "BF16", (256,)),
        (fused, "BF16", (16, 512, 256)),
    ]
    assert kinds_of(tmp_path, entries) == {fused: QuantKind.BF16}


def damaged(path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    return Checkpoint.open(write_copy(path, tensors))


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_2"])
def test_missing_part(copy_dir: Path, tiny: dict[str, Tensor], suffix: str):
    rest = {key: value for key, value in tiny.items() if key != f"{Q_A}.{suffix}"}
    with pytest.raises(CheckpointError, match=rf"{Q_A}\.{suffix} is missing"):
        module_kinds(damaged(copy_dir, rest))


def test_missing_input_scale_is_no_error(copy_dir: Path, tiny: dict[str, Tensor]):
    rest = {key: value for key, value in tiny.items() if not key.endswith(".input_scale")}
    assert len(rest) == len(tiny) - 348
    weight_only = damaged(copy_dir, rest)
    assert module_kinds(weight_only) == module_kinds(Checkpoint.open(TINY))
    assert not has_input_scales(weight_only, module_kinds(weight_only))


@pytest.mark.parametrize("left_out", ["nothing", Q_A])
def test_activations_are_quantised_where_every_packed_matrix_has_an_input_scale(
    copy_dir: Path, tiny: dict[str, Tensor], left_out: str
):
    rest = {key: value for key, value in tiny.items() if key != f"{left_out}.input_scale"}
    checkpoint = damaged(copy_dir, rest)
    assert has_input_scales(checkpoint, module_kinds(checkpoint)) == (left_out == "nothing")
    assert not has_input_scales(checkpoint, {Q_A: QuantKind.BF16})


@pytest.mark.parametrize(
    ("suffix", "value", "found", "wanted"),
    [
        ("weight_scale", torch.zeros(128, 8).to(torch.float8_e4m3fn), "[128, 8]", "[128, 16]"),
        ("weight_scale", torch.zeros(16, 128).to(torch.float8_e4m3fn), "[16, 128]", "[128, 16]"),
        ("weight_scale_2", torch.zeros(128), "[128]", "[] or [1]"),
        ("input_scale", torch.zeros(2), "[2]", "[] or [1]"),
        ("weight_scale", torch.zeros(128, 16, dtype=torch.uint8), "U8", "F8_E4M3"),
        ("weight_scale", torch.zeros(128, 16, dtype=torch.bfloat16), "BF16", "F8_E4M3"),
        ("weight_scale_2", torch.zeros((), dtype=torch.bfloat16), "BF16", "F32"),
        ("weight", torch.zeros(128, 128, dtype=torch.int8), "I8", "U8"),
        ("weight", torch.zeros(128, 128, dtype=torch.int16), "I16", "U8 (FP4)"),
        ("weight", torch.zeros(128, 256, dtype=torch.bfloat16), "is BF16 but", "a packed weight"),
        (
            "weight",
            torch.zeros(128, 128).to(torch.float8_e4m3fn),
            "weight_scale_inv is missing",
            "F32",
        ),
    ],
)
def test_wrong_shape_or_dtype(
    copy_dir: Path, tiny: dict[str, Tensor], suffix: str, value: Tensor, found: str, wanted: str
):
    with pytest.raises(CheckpointError) as caught:
        module_kinds(damaged(copy_dir, tiny | {f"{Q_A}.{suffix}": value}))
    message = str(caught.value)
    assert Q_A in message
    assert found in message
    assert wanted in message


def test_scale_of_a_one_element_vector_is_a_scalar(copy_dir: Path, tiny: dict[str, Tensor]):
    reshaped = {
        f"{Q_A}.{s}": tiny[f"{Q_A}.{s}"].reshape(1) for s in ("weight_scale_2", "input_scale")
    }
    assert module_kinds(damaged(copy_dir, tiny | reshaped))[Q_A] is QuantKind.NVFP4


def test_columns_that_do_not_fill_a_block(tmp_path: Path):
    entries: list[Entry] = [(f"{Q_A}.weight", "U8", (8, 12))]
    with pytest.raises(CheckpointError, match="24 columns, a multiple of 16"):
        kinds_of(tmp_path, entries)

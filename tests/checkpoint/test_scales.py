"""Scale values: errors, reports, and one outer scale for stacked matrices."""

import logging
import math

import pytest
import torch
from torch import Tensor

from sglang_dsv4.checkpoint import scales
from sglang_dsv4.checkpoint.scales import (
    InputScaleReport,
    check_weight_scale,
    reconcile_outer_scales,
)
from sglang_dsv4.errors import CheckpointError

SCALE = "model.layers.2.self_attn.q_a_proj.weight_scale"
SCALE_2 = "model.layers.2.self_attn.q_a_proj.weight_scale_2"


def test_scales_of_the_small_checkpoint_are_good(tiny: dict[str, Tensor]):
    checked = [key for key in tiny if key.endswith(("weight_scale", "weight_scale_2"))]
    assert len(checked) == 2 * 348
    for key in checked:
        check_weight_scale(key, tiny[key])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_block_scale(tiny: dict[str, Tensor], code: int):
    damaged = tiny[SCALE].clone()
    damaged.view(torch.uint8)[3, 5] = code
    with pytest.raises(CheckpointError, match=f"{SCALE} has 1 of 2048 values that are NaN"):
        check_weight_scale(SCALE, damaged)


def test_every_other_e4m3_code_is_good():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    check_weight_scale("x", codes.view(torch.float8_e4m3fn))


def test_e8m0_scales():
    codes = torch.arange(256, dtype=torch.uint8)
    check_weight_scale("x", codes[:255].view(torch.float8_e8m0fnu))
    with pytest.raises(CheckpointError, match="1 of 256"):
        check_weight_scale("x", codes.view(torch.float8_e8m0fnu))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_bad_outer_scale(value: float):
    with pytest.raises(CheckpointError, match=SCALE_2):
        check_weight_scale(SCALE_2, torch.tensor(value))


def test_unusable_input_scales_are_one_warning(caplog: pytest.LogCaptureFixture):
    report = InputScaleReport()
    assert report.usable("good", torch.tensor(0.5))
    bad = [torch.tensor(v) for v in (math.nan, 0.0, -1.0, math.inf)]
    for index, value in enumerate([*bad, None]):
        assert not report.usable(f"bad{index}", value)
    with caplog.at_level(logging.WARNING):
        warning = report.finish()
    assert warning is not None
    assert "5 of 6 modules" in warning
    assert "bad0, bad1, bad2 and 2 more" in warning
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_usable_input_scales_give_no_warning(tiny: dict[str, Tensor]):
    report = InputScaleReport()
    assert all(report.usable(key, tiny[key]) for key in tiny if key.endswith(".input_scale"))
    assert report.finish() is None


def part(tiny: dict[str, Tensor], module: str) -> tuple[Tensor, Tensor, Tensor]:
    weight, scale, scale_2 = (
        tiny[f"model.layers.2.self_attn.{module}.{suffix}"]
        for suffix in ("weight", "weight_scale", "weight_scale_2")
    )
    return weight, scale, scale_2


FUSED = [
    ("q_a_proj", "kv_proj"),
    ("compressor.kv_proj", "compressor.gate_proj"),
    ("compressor.indexer.kv_proj", "compressor.indexer.gate_proj"),
]


@pytest.mark.parametrize("modules", FUSED)
def test_equal_outer_scales_are_unchanged(tiny: dict[str, Tensor], modules: tuple[str, str]):
    """ModelOpt gives matrices with one input one weight_scale_2."""
    parts = [part(tiny, module) for module in modules]
    for before, after in zip(parts, reconcile_outer_scales(parts), strict=True):
        assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "_rescalings", iter(range(1000)))


@pytest.mark.usefixtures("fresh_log")
def test_unequal_outer_scales(tiny: dict[str, Tensor], caplog: pytest.LogCaptureFixture):
    weight, scale, scale_2 = part(tiny, "q_a_proj")
    other = part(tiny, "kv_proj")
    smaller = scale_2 / 3
    with caplog.at_level(logging.WARNING):
        first, second = reconcile_outer_scales([(weight, scale, smaller), other], "q_a|kv")
        reconcile_outer_scales([(weight, scale, smaller), other], "another")
    assert float(first[2]) == float(second[2]) == float(other[2])
    assert second[1] is other[1]
    assert first[0] is weight
    before = scale.float() * smaller
    after = first[1].float() * first[2]
    # Rounding to e4m3: half of the last of 3 mantissa bits, 2^-4 relative, for a normal result;
    # half of a subnormal's step, 2^-10, times the outer scale, below 2^-6. The float32 products
    # add a few 2^-24.
    bound = torch.maximum(before * 2**-4, first[2] * 2**-10) * (1 + 2**-20)
    assert bool(((after - before).abs() <= bound).all())
    assert bool((after != before).any())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith("q_a|kv is stored with unequal weight_scale_2")


@pytest.mark.usefixtures("fresh_log")
def test_power_of_two_ratio_is_exact():
    scale = torch.tensor([[0.5, 1.125, 448.0, 2.0**-4]]).to(torch.float8_e4m3fn)
    weight = torch.zeros(1, 32, dtype=torch.uint8)
    parts = [(weight, scale, torch.tensor(0.25)), (weight, scale, torch.tensor(1.0))]
    small, large = reconcile_outer_scales(parts)
    assert torch.equal(small[1].float() * small[2], scale.float() * 0.25)
    assert torch.equal(large[1].float(), scale.float())


def test_zero_matrix_takes_part():
    """An all-zero matrix has weight_scale_2 0; its block scales become 0."""
    scale = torch.ones(1, 2).to(torch.float8_e4m3fn)
    weight = torch.zeros(1, 16, dtype=torch.uint8)
    parts = [(weight, scale, torch.tensor(0.0)), (weight, scale, torch.tensor(2.0))]
    zero, other = reconcile_outer_scales(parts)
    assert torch.equal(zero[1].float(), torch.zeros(1, 2))
    assert torch.equal(other[1].float(), torch.ones(1, 2))


def test_outer_scale_that_is_not_finite():
    parts = [(torch.zeros(1), torch.zeros(1), torch.tensor(v)) for v in (1.0, math.nan)]
    with pytest.raises(CheckpointError, match=r"weight_scale_2 of gate\|up is \[1.0, nan\]"):
        reconcile_outer_scales(parts, "gate|up")

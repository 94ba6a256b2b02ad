"""The skinny kernel's own source, lane by lane on the CPU, against the reference weight."""

import numpy as np
import pytest
import torch
from records_emulation import RecordDevice

from sglang_dsv4.kernels.linear import skinny
from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.linear.skinny_plan import THREADS, SkinnyPlan, SkinnyShape, skinny_plan
from sglang_dsv4.kernels.linear.stream import BATCH, StreamShape
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

SCALE_2 = 0.37
NAN = 0x7FC0


def random_weight(out, width, generator):
    """Codes of all kinds; scales over 2^14, the largest and smallest among them."""
    weight = torch.randint(0, 256, (out, width // 2), generator=generator, dtype=torch.uint8)
    scale = torch.exp2(torch.rand(out, width // 16, generator=generator) * 14 - 7)
    scale[0, 0], scale[-1, -1] = 448.0, 2.0**-9
    return weight, scale.to(torch.float8_e4m3fn)


def emulate(plan, x, records, out_features):
    """The kernel's result.

    Tokens are rows of a wider matrix of NaN that ends with the last one; scratch and output begin
    as NaN; what is stored behind the output, or left in a counter, fails.
    """
    shape = plan.shape
    device = RecordDevice(1 << 24)
    tokens, width = x.shape
    groups = -(-out_features // shape.rows)
    put = device.tensor
    padded = np.full((tokens, width + 24), NAN, np.uint16)
    padded[:, :width] = x.view(torch.int16).numpy().view(np.uint16)
    # First in memory: what lies before the weight is out of bounds. Behind it lies NaN.
    weight = put(records.numpy())
    put(np.full(4096, 0xFF, np.uint8))
    source = put(padded)
    source.shape = (np.int32(tokens), np.int32(width))
    put(np.full(4096, 0xFF, np.uint8))
    out = put(np.full((tokens + 1, out_features), NAN, np.uint16))
    out.shape = (np.int32(tokens), np.int32(out_features))
    size = plan.part_floats(records.shape[0])
    parts, arrived = put(np.full(size, np.nan, np.float32)), put(np.zeros(groups, np.int32))
    factor = put(np.array([SCALE_2], np.float32))
    operands = (source, weight, factor, out, parts, arrived, np.int32(plan.splits))
    names = device.load(skinny)
    device.launch(
        lambda: names["SkinnyLinear"](shape, "sm_90a").kernel(*operands),
        (groups, plan.splits, 1),
        THREADS,
        shape.shared_bytes,
    )
    assert not arrived.read().any()
    bits = out.read()
    assert (bits[tokens:] == NAN).all()
    return torch.from_numpy(bits[:tokens].astype(np.int32)).to(torch.int16).view(torch.bfloat16)


def case(tokens, out, width):
    generator = torch.Generator().manual_seed(tokens * 1000 + out + width)
    weight, scale = random_weight(out, width, generator)
    dense = dequantize_weight(weight, scale, torch.tensor(SCALE_2)).double()
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    return x, pack_records(weight, scale), dense


def check(tokens, out, width, plan):
    x, records, dense = case(tokens, out, width)
    found = emulate(plan, x, records, out)
    wanted = x.double() @ dense.T
    # bfloat16: half a unit of the last place, up to 2^-8 of the value. Sums in float32: at most
    # in / 16 roundings of the products' sums and 100 of the warps' and blocks', each 2^-24 of a sum
    # no larger than that of |x w|.
    largest = x.double().abs() @ dense.abs().T
    bound = wanted.abs() * 2.0**-8 + largest * ((width / 16 + 100) * 2.0**-24)
    assert (found.double() - wanted).abs().le(bound).all()


def plan_of(tokens, width, row_tiles=1, row_warps=1, splits=1, staged=0, stages=4):
    ragged = width % (64 * BATCH) != 0
    stream = StreamShape(row_tiles, -(-tokens // 8), ragged, staged, stages)
    return SkinnyPlan(SkinnyShape(stream, row_warps, splits > 1, 1), splits)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize(
    ("out", "width"), [(1, 16), (15, 48), (16, 64), (17, 80), (100, 1040), (33, 2048)]
)
def test_few_tokens(tokens, out, width):
    check(tokens, out, width, plan_of(tokens, width))


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("out", "width"), [(17, 80), (100, 1040), (64, 1024)])
def test_two_rows_of_records_a_warp(tokens, out, width):
    check(tokens, out, width, plan_of(tokens, width, row_tiles=2))


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("width", [1040, 2432])
def test_rings_are_filled_again(width, row_tiles, stages):
    """One warp for all columns: 9 and 19 stages."""
    check(3, 40, width, plan_of(3, width, row_tiles, 8, stages=stages))


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize(("out", "width"), [(17, 1040), (16, 4096), (7, 48)])
def test_blocks_share_columns(out, width, splits):
    check(9, out, width, plan_of(9, width, splits=splits))


@pytest.mark.parametrize("tokens", [17, 63, 64])
@pytest.mark.parametrize(("out", "width"), [(1, 16), (17, 80), (100, 256), (100, 1040)])
def test_staged_tokens(tokens, out, width):
    staged = -(-width // 256) * 256
    check(tokens, out, width, plan_of(tokens, width, 2, 4, 1, staged))


@pytest.mark.parametrize(
    ("row_tiles", "row_warps", "splits", "staged", "stages"),
    [(2, 8, 5, 256, 4), (2, 2, 2, 768, 4), (2, 4, 3, 512, 2), (1, 8, 5, 256, 2), (2, 1, 9, 256, 8)],
)
def test_staged_tokens_of_blocks_that_share_columns(row_tiles, row_warps, splits, staged, stages):
    for width in (1040, 1152):
        plan = plan_of(33, width, row_tiles, row_warps, splits, staged, stages)
        check(33, 100, width, plan)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("tokens", [1, 8, 16, 24, 64])
@pytest.mark.parametrize(("out", "width"), [(100, 1040), (272, 512)])
def test_planned_launches(out, width, tokens, arch):
    plan = skinny_plan(tokens, -(-out // 16), -(-width // 64), width, 12, arch)
    check(tokens, out, width, plan)


@pytest.mark.parametrize("staged", [0, 256])
def test_a_token_that_is_not_finite_spoils_only_itself(staged):
    x, records, _ = case(20, 40, 144)
    plan = plan_of(20, 144, 2, 2, 1, staged)
    clean = emulate(plan, x, records, 40)
    x[5, 143], x[13, 0] = float("nan"), float("inf")
    found = emulate(plan, x, records, 40)
    others = [t for t in range(20) if t not in (5, 13)]
    assert torch.equal(found[others], clean[others])
    assert found[5].isnan().all()
    assert not found[13].isfinite().any()


@pytest.mark.parametrize(("out", "width"), [(1536, 4096), (100, 80)])
def test_every_launch_of_a_layer_is_prepared(out, width, monkeypatch):
    monkeypatch.setattr(skinny, "num_sms", lambda index: 132)
    monkeypatch.setattr(skinny, "current_arch", lambda: "sm_90a")
    down, across = -(-out // 16), -(-width // 64)
    records = torch.empty(down, across, 576, dtype=torch.uint8)

    def plan(tokens):
        return skinny_plan(tokens, down, across, width, 132, "sm_90a")

    chosen = skinny.planned_tokens(records, width)
    assert {plan(tokens) for tokens in chosen} == {plan(tokens) for tokens in range(1, 65)}
    assert len(chosen) < 20

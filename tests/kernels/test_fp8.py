"""FP8 operands: rows of activations, interpreted against plain torch bit by bit; widened weights.

The product is torch's on a CPU, not the one of a GPU: float32 sums, rounded to bfloat16 once.
"""

import pytest
import torch
from interpreted import convert_to_e4m3_as_torch, interpreted

from sglang_dsv4.kernels.reference import fp8 as reference
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight, pack_nibbles

ROWS = "sglang_dsv4.kernels.linear.fp8_rows"


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """[127, 128 / 2] and [127, 8]: each of the 16 codes under each finite scale, eight times."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 8)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 8)
    return pack_nibbles(codes), scale.view(torch.float8_e4m3fn)


def hostile_rows(width: int) -> torch.Tensor:
    x = torch.randn(12, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    x[1] = 0
    x[2] *= 2.0**120
    x[3] *= 2.0**-99
    x[4] = 2.0**-133
    x[5, width // 2] = float("nan")
    x[6, 0] = float("inf")
    x[7, -1] = -float("inf")
    x[8] = -0.0
    x[9] = x[9] * 2.0**-8
    x[9, 3] = 300.0
    x[10] = torch.finfo(torch.bfloat16).max
    return x


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("width", [16, 48, 128, 1040])
def test_rows(width, monkeypatch):
    convert_to_e4m3_as_torch(monkeypatch)
    module = interpreted(ROWS, monkeypatch)
    # Rows of a wider matrix, the rest of which is NaN.
    wide = torch.full((12, width + 8), float("nan"), dtype=torch.bfloat16)
    wide[:, :width] = hostile_rows(width)
    found, scale = module.quantize_rows(wide[:, :width])
    wanted, wanted_scale = reference.quantize_rows(wide[:, :width])
    assert_same(found, wanted)
    assert torch.equal(scale.isnan().nonzero().flatten(), torch.tensor([5, 6, 7]))
    assert torch.equal(scale.nan_to_num(), wanted_scale.nan_to_num())


def test_every_largest_value(monkeypatch):
    """Rows of every mantissa and many exponents of the largest value: divisions round the same."""
    convert_to_e4m3_as_torch(monkeypatch)
    module = interpreted(ROWS, monkeypatch)
    largest = torch.arange(0x0080, 0x7F80, 37, dtype=torch.int16).view(torch.bfloat16)
    part = torch.randn(16, generator=torch.Generator().manual_seed(3)).clamp(-1, 1)
    part[3] = -1
    x = (largest[:, None].float() * part).bfloat16()
    found, scale = module.quantize_rows(x)
    wanted, wanted_scale = reference.quantize_rows(x)
    assert_same(found, wanted)
    assert torch.equal(scale, wanted_scale)
    normal = largest.float() >= reference.SMALLEST_AMAX
    assert (found[normal, 3].float() == -448).all()


def test_rows_keep_four_bits():
    """An error of 2^-4 of a value at most, or 2^-10 of a step of the scale; zeros exactly."""
    x = hostile_rows(256)
    values, scale = reference.quantize_rows(x)
    for row in (0, 1, 2, 3, 8, 9, 10, 11):
        found, wanted = values[row].double() * scale[row].double(), x[row].double()
        bound = torch.maximum(wanted.abs() * 2.0**-4, scale[row].double() * 2.0**-10)
        # Scale and factor are rounded to float32 as well.
        bound = bound + wanted.abs() * 2.0**-22
        assert (found - wanted).abs().le(bound).all()
    assert not values[1].float().any() and not values[8].float().any()


def test_no_rows():
    from sglang_dsv4.kernels.linear.fp8_rows import quantize_rows

    values, scale = quantize_rows(torch.empty(0, 64, dtype=torch.bfloat16))
    assert values.shape == (0, 64) and scale.shape == (0,)


@pytest.mark.parametrize("inference", [False, True])
def test_rows_are_made_once_for_a_tensor(inference, monkeypatch):
    convert_to_e4m3_as_torch(monkeypatch)
    module = interpreted(ROWS, monkeypatch)
    calls, stock = [], module.quantize_rows
    monkeypatch.setattr(module, "quantize_rows", lambda x: calls.append(x) or stock(x))
    with torch.inference_mode(inference):
        x = hostile_rows(48)
        first = module.shared_rows(x)
        assert module.shared_rows(x) is first
        assert module.shared_rows(x.flatten(0, -2)) is first, "as the linear layers pass it on"
        assert len(calls) == 1 and calls[0] is x
        other = x[:]
        other[0] *= 2
        found, scale = module.shared_rows(other)
    assert len(calls) == 2
    wanted, wanted_scale = reference.quantize_rows(other)
    assert_same(found, wanted)
    assert torch.equal(scale.nan_to_num(), wanted_scale.nan_to_num())
    assert scale[0] == 2 * first[1][0]


def test_rows_are_not_kept_in_a_capture(monkeypatch):
    """Branches of a graph do not wait for each other."""
    module = interpreted(ROWS, monkeypatch)

    class Captured:
        is_cuda = True

    made = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(module, "quantize_rows", lambda x: made.append(x) or ("rows", "scale"))
    x = Captured()
    assert module.shared_rows(x) == module.shared_rows(x) == ("rows", "scale")
    assert made == [x, x] and not vars(x)


def test_what_widening_loses():
    """As ``widen_weight`` says, from scale 2^-2 on: which values are exact, and by how much not."""
    weight, scale = every_code_and_scale()
    exact = dequantize_weight(weight, scale, torch.tensor(0.125))
    found = reference.widen_weight(weight, scale).float()
    normal = scale[:, 0].float() >= 0.25
    error = ((found - exact).abs() / exact.abs().clamp(min=2.0**-20))[normal, :16]
    halves = [3, 5, 7, 11, 13, 15]
    plain = [code for code in range(16) if code not in halves]
    assert not error[:, plain].any()
    mantissa = torch.arange(127)[normal] % 8
    assert not error[torch.isin(mantissa, torch.tensor([0, 2, 4]))].any()
    assert error.max() <= 1 / 21 + 1e-6
    assert found.abs().max() == 320  # of 336, a tie
    bound = (exact.abs() * 2.0**-4).clamp(min=2.0**-10)
    assert (found - exact).abs().le(bound).all()
    small = exact.abs() < 2.0**-6
    steps = found[small] * 2.0**9
    assert torch.equal(steps, steps.round())
    assert scale.float().repeat_interleave(16, 1)[small & (exact != 0)].max() < 0.25


@pytest.mark.parametrize(("out", "width"), [(64, 128), (48, 416)])
def test_product(out, width, monkeypatch):
    from sglang_dsv4.kernels.linear import fp8

    convert_to_e4m3_as_torch(monkeypatch)
    monkeypatch.setattr(fp8, "shared_rows", interpreted(ROWS, monkeypatch).shared_rows)
    draw = torch.Generator().manual_seed(width)
    weight = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=draw)
    scale = torch.exp2(torch.rand(out, width // 16, generator=draw) * 6).to(torch.float8_e4m3fn)
    scale_2 = torch.tensor([0.01])
    x = torch.randn(20, width, generator=draw).bfloat16()
    x[3] = 0
    x[5, 7] = float("nan")
    dense = reference.widen_weight(weight, scale)
    found = fp8.fp8_product(x, dense, (scale_2 / reference.WEIGHT_SHIFT).repeat(out)).float()
    values, row_scale = reference.quantize_rows(x)
    wide = dense.double()
    wanted = values.double() @ wide.T * row_scale.double()[:, None] * 0.08
    assert found[5].isnan().all() and not found[3].any()
    good = [row for row in range(20) if row != 5]
    terms = values.double().abs() @ wide.abs().T * row_scale.double()[:, None] * 0.08
    bound = wanted.abs() * 2.0**-8 + terms * width * 2.0**-24
    assert (found.double() - wanted)[good].abs().le(bound[good]).all()
    # Against the weights that were not rounded: random errors of 3% of the operands' products.
    plain = x[good].double() @ dequantize_weight(weight, scale, scale_2).double().T
    assert (found[good].double() - plain).norm() / plain.norm() < 0.05


def test_which_layers_have_the_form():
    from sglang_dsv4.kernels.linear.fp8 import FP8_TOKENS, takes

    assert takes(FP8_TOKENS + 1, 1536)
    assert not takes(FP8_TOKENS, 1536)
    assert not takes(8192, 100)

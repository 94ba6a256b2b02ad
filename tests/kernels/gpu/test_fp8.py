"""FP8 operands and products on sm_90: bit by bit where the reference fixes the bits.

A product's result is rounded to bfloat16, by up to 2^-8 of it. Within 32 columns the instruction
adds numbers cut at 2^-13 of the largest of them or of the sum so far, which is up to some ten times
the mean term: 2^-10 of the sum of |x w| is allowed. For random signs that is 2^-4 of the sum itself
at 4096 columns; the error's norm is far below, so that 2^-7 of the result's is allowed there.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs sm_90", allow_module_level=True)

from sglang_dsv4.kernels.linear import fp8
from sglang_dsv4.kernels.linear.fp8_rows import quantize_rows
from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.linear.widen import DIVISOR, widen
from sglang_dsv4.kernels.reference import fp8 as reference
from sglang_dsv4.kernels.reference.nvfp4 import pack_nibbles


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bytes; ``wanted`` may be on the CPU."""
    assert torch.equal(found.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


def nvfp4(*shape: int, lowest: int = -3, highest: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weight uint8 [..., out, in / 2] and block scales e4m3 between powers of two."""
    *front, width = shape
    weight = torch.randint(0, 256, (*front, width // 2), dtype=torch.uint8, device="cuda")
    scale = torch.rand(*front, width // 16, device="cuda") * (highest - lowest) + lowest
    return weight, torch.exp2(scale).to(torch.float8_e4m3fn)


def widen_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A weight uint8 [out, in / 2] through records to e4m3 [out, in], over its ``DIVISOR``."""
    shape = (1, weight.shape[0], 2 * weight.shape[1])
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    widen(pack_records(weight, scale)[None], out)
    return out[0]


@pytest.mark.parametrize("width", [16, 48, 96, 1040, 2048, 4096, 16384])
def test_rows(width):
    """Rows of a wider matrix, the rest of which is NaN."""
    torch.manual_seed(width)
    x = torch.full((300, width + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    x[:, :width] = torch.randn(300, width, device="cuda")
    x[:, :width] *= torch.exp2(torch.randint(-90, 90, (300, 1), device="cuda"))
    x[1, :width] = 0
    x[2, :width] = torch.finfo(torch.bfloat16).max
    x[3, :width] = 2.0**-133
    x[4, :width] = -0.0
    x[5, width // 2] = float("nan")
    x[6, 0] = float("inf")
    x[7, width - 1] = -float("inf")
    found, scale = quantize_rows(x[:, :width])
    wanted, wanted_scale = reference.quantize_rows(x[:, :width].cpu())
    assert_same(found, wanted)
    assert scale[5:8].isnan().all()
    assert torch.equal(scale.cpu().nan_to_num(), wanted_scale.nan_to_num())


def test_every_largest_value():
    """Every positive finite bfloat16 as the largest value of a row: divisions are not estimates."""
    largest = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    part = torch.randn(64, generator=torch.Generator().manual_seed(3)).clamp(-1, 1)
    part[3] = -1
    x = (largest[:, None].float() * part).bfloat16()
    found, scale = quantize_rows(x.cuda())
    wanted, wanted_scale = reference.quantize_rows(x)
    assert_same(found, wanted)
    assert torch.equal(scale.cpu(), wanted_scale)


def test_every_code_under_every_scale():
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 8)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e4m3fn)
    weight = pack_nibbles(codes)
    assert_same(widen_fp8(weight.cuda(), scale.cuda()), reference.widen_weight(weight, scale))


@pytest.mark.parametrize(("out", "width"), [(1536, 4096), (32768, 1024), (112, 96), (16, 16)])
def test_widened_weights(out, width):
    weight, scale = nvfp4(out, width, lowest=-9, highest=8)
    assert_same(widen_fp8(weight, scale), reference.widen_weight(weight, scale))


@pytest.mark.parametrize("tokens", [fp8.FP8_TOKENS + 1, 1000, 2048])
@pytest.mark.parametrize(
    ("out", "width"), [(1536, 4096), (4096, 2048), (32768, 1024), (112, 96), (2064, 4176)]
)
def test_linear(out, width, tokens):
    assert fp8.takes(tokens, out)
    torch.manual_seed(out)
    weight, scale = nvfp4(out, width)
    scale_2 = torch.tensor([0.37], device="cuda")
    x = torch.full((tokens, width + 24), float("nan"), dtype=torch.bfloat16, device="cuda")
    x = x[:, :width]
    x[:] = torch.randn(tokens, width, device="cuda")
    x[3] = 0
    x[5, 7] = float("nan")
    x[6, 0] = float("inf")
    outer = (scale_2 * DIVISOR[torch.float8_e4m3fn]).repeat(len(weight))
    found = fp8.fp8_product(x, widen_fp8(weight, scale), outer)
    assert found.shape == (tokens, out) and found.dtype == torch.bfloat16
    assert found[5:7].isnan().all() and not found[3].any()
    sound = torch.ones(tokens, dtype=torch.bool, device="cuda")
    sound[5:7] = False
    values, row_scale = reference.quantize_rows(x)
    wide = reference.widen_weight(weight, scale).double().T
    factor = row_scale[sound].double()[:, None] * scale_2.double() / reference.WEIGHT_SHIFT
    values = values[sound].double()
    wanted, terms = values @ wide * factor, values.abs() @ wide.abs() * factor
    error = found[sound].double() - wanted
    assert error.abs().le(wanted.abs() * 2.0**-8 + terms * 2.0**-10).all()
    assert error.norm() <= wanted.norm() * 2.0**-7

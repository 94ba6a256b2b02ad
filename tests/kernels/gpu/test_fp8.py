"""FP8 operands and products on sm_90: bit by bit where the reference fixes the bits.

A product's result is rounded to bfloat16, by up to 2^-8 of it. Within 32 columns the instruction
adds numbers cut at 2^-13 of the largest of them or of the sum so far, which is up to some ten times
the mean term: 2^-10 of the sum of |x w| is allowed. For random signs that is 2^-4 of the sum itself
at 4096 columns; the error's norm is far below, so that 2^-7 of the result's is allowed there.
"""

import functools

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
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight, pack_nibbles
from sglang_dsv4.kernels.reference.swiglu import clamped_swiglu


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
    found = fp8.fp8_product(x, widen_fp8(weight, scale), scale_2 * DIVISOR[torch.float8_e4m3fn])
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


def by_expert(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """weight[ids[s]] @ x[s] of each slot s, zeros where ids[s] is -1: [S, N] float32."""
    out = torch.zeros(len(x), weight.shape[1], device=x.device)
    for expert in range(len(weight)):
        out[ids == expert] = x[ids == expert] @ weight[expert].T
    return out


def experts(x, matrices, routed, ids, limit, rounded: bool) -> torch.Tensor:
    """[T, k, D] float32; ``rounded`` operands are e4m3's."""

    def operand(rows: torch.Tensor) -> torch.Tensor:
        if not rounded:
            return rows.float()
        values, scale = reference.quantize_rows(rows)
        return values.float() * scale[:, None]

    def dense(weight: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        if not rounded:
            return dequantize_weight(weight, scale, outer)
        wide = reference.widen_weight(weight, scale).float()
        return wide * (outer / reference.WEIGHT_SHIFT)[:, None, None]

    gate_up, down = (dense(*matrix) for matrix in matrices)
    slots = ids.flatten()
    rows = operand(x).repeat_interleave(ids.shape[1], 0)
    gate, up = by_expert(rows, gate_up, slots).chunk(2, dim=1)
    hidden = clamped_swiglu(gate, up, limit).bfloat16()
    out = by_expert(operand(hidden), down, slots) * routed.flatten()[:, None]
    return out.view(*ids.shape, -1)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("limit", [None, 10.0])
@pytest.mark.parametrize(("width", "inner"), [(1024, 512), (512, 192), (4096, 2048)])
def test_experts(width, inner, limit, rounded, monkeypatch):
    """Scratch for two of six experts at a time, one of them without rows; -1, NaN, infinity."""
    pytest.importorskip("sglang")
    from sglang_dsv4.layers import experts_prefill
    from sglang_dsv4.layers.cutedsl_experts import source

    torch.manual_seed(width)
    itemsize = 1 if rounded else 2
    monkeypatch.setattr(experts_prefill, "EXPERTS_SCRATCH", itemsize * 4 * inner * width)
    matrices = []
    for shape in ((2 * inner, width), (width, inner)):
        outer = torch.exp2(torch.randint(-6, -3, (6,), device="cuda").float())
        matrices.append((*nvfp4(6, *shape), outer))
    x = torch.randn(700, width, device="cuda").bfloat16()
    x[1] = 0
    x[2] *= 2.0**20
    x[3] *= 2.0**-20
    routed = torch.rand(700, 3, device="cuda") + 0.1
    ids = torch.rand(700, 6, device="cuda").topk(3).indices.int()
    ids[ids == 2] = -1
    ids[10:14] = -1
    broken = torch.zeros(700, dtype=torch.bool, device="cuda")
    broken[20:22] = True
    ids[20:22] = torch.tensor([0, 1, 5], device="cuda", dtype=torch.int32)
    x[20, 7] = float("nan")
    # A sum with one infinity may be clamped to the limit: not in FP8, where its row has no scale.
    x[21, 0] = float("inf") if rounded else float("nan")
    w13, w2 = (source(pack_records(w, s), outer, rounded) for w, s, outer in matrices)
    torch.empty(1 << 26, device="cuda").fill_(float("nan"))  # what new_empty hands out next
    call = functools.partial(experts_prefill.products, x, w13, w2, routed, ids, limit)
    found = call(fp8=rounded)
    assert found[broken].isnan().all()
    wanted = experts(x, matrices, routed, ids, limit, rounded)[~broken]
    again, found, own = call(fp8=rounded)[~broken], found[~broken], ids[~broken]
    assert torch.equal(again, found)
    nothing = (own < 0) | (x[~broken] == 0).all(1)[:, None]
    assert not found[nothing].any() and not wanted[nothing].any()
    error = (found.float() - wanted)[~nothing].norm(dim=1) / wanted[~nothing].norm(dim=1)
    if not rounded:
        # SwiGLU's results and the output are rounded to bfloat16, 2^-8 each at most; in the
        # reference SwiGLU's are too, and float32 sums in another order move few of them.
        assert error.max() < 2.0**-7
        return
    # Sums off by 2^-10 (above) move one hidden value of 2^6 or so across the middle of two e4m3,
    # by a step of 2^-3.5 on average: 2^-6.5 of a row in the root mean square. A hidden row that is
    # not rounded at all would be off by 2.6%, another row by more than all of it.
    assert error.median() < 2.0**-6
    assert error.max() < 2.0**-3

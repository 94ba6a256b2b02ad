"""The kernels on records on a GPU against float64.

bfloat16 results: half a unit of the last place, up to 2^-8 of the value; the float32 sum adds at
most in / 2^24 of the sum of |x w|, the sums of warps and blocks included. Widened weights are
exact.
"""

import functools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from linear_cases import inputs, random_weight

from sglang_dsv4.kernels.hardware import current_arch, num_sms
from sglang_dsv4.kernels.linear import skinny
from sglang_dsv4.kernels.linear.records import pack_records, unpack_records
from sglang_dsv4.kernels.linear.skinny_plan import SkinnyPlan, SkinnyShape, skinny_plan
from sglang_dsv4.kernels.linear.stream import StreamShape
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

SHAPES = [
    (1536, 4096),
    (4096, 2048),
    (32768, 1024),
    (100, 96),
    (1, 16),
    (15, 48),
    (17, 80),
    (2064, 4176),
    (512, 4096),
]
SCALE_2 = 0.37


@functools.cache
def case(out: int, width: int):
    weight, scale = random_weight(out, width)
    scale_2 = torch.tensor([SCALE_2], device="cuda")
    records = pack_records(weight, scale)
    again, scale_again = unpack_records(records, out, width)
    assert torch.equal(again, weight)
    assert torch.equal(scale_again.view(torch.uint8), scale.view(torch.uint8))
    return records, scale_2, dequantize_weight(weight, scale, scale_2).double()


def bounds(x: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = x.double() @ dense.T
    largest = x.double().abs() @ dense.abs().T
    return wanted, wanted.abs() * 2.0**-8 + largest * (max(x.shape[1], 64) * 2.0**-24)


def spoil_free_memory() -> None:
    """What torch.empty hands out next is NaN."""
    torch.empty(1 << 24, device="cuda").fill_(float("nan"))


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 16, 17, 24, 40, 63, 64])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_few_tokens(out, width, tokens):
    records, scale_2, dense = case(out, width)
    x = inputs(tokens, width)
    wanted, bound = bounds(x, dense)
    arrived = skinny.counters(out, x.device)
    for _ in range(2):
        spoil_free_memory()
        found = skinny.records_linear(x, records, scale_2, float(scale_2), out, arrived)
        assert (found.double() - wanted).abs().le(bound).all()
        assert not arrived.any()


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("row_tiles", "row_warps", "staged", "stages"),
    [(1, 1, 0, 4), (2, 1, 0, 4), (1, 2, 0, 2), (2, 8, 512, 4), (2, 4, 1024, 4), (1, 2, 256, 8)],
)
@pytest.mark.parametrize("tokens", [8, 16, 30])
def test_every_launch(tokens, row_tiles, row_warps, staged, stages, splits):
    out, width = 1536, 4096
    stream = StreamShape(row_tiles, -(-tokens // 8), False, staged, stages)
    if staged and -(-width // 128 // splits) * 128 > staged:
        splits = width // staged
    plan = SkinnyPlan(SkinnyShape(stream, row_warps, splits > 1, 1), splits)
    records, scale_2, dense = case(out, width)
    x = inputs(tokens, width)
    wanted, bound = bounds(x, dense)
    found = torch.full((tokens, out), float("nan"), device="cuda", dtype=torch.bfloat16)
    spoil_free_memory()
    skinny.launch(plan, x, records, scale_2, skinny.counters(out, x.device), found)
    assert (found.double() - wanted).abs().le(bound).all()


@pytest.mark.parametrize("tokens", [65, 128, 257])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_many_tokens(out, width, tokens):
    records, scale_2, dense = case(out, width)
    x = inputs(tokens, width)
    wanted, bound = bounds(x, dense)
    held = (records, scale_2, float(scale_2), out, skinny.counters(out, x.device))
    found = skinny.records_linear(x, *held)
    assert (found.double() - wanted).abs().le(bound).all()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize(("out", "width"), [(1536, 4096), (512, 4096)])
def test_a_thousand_times_the_same_bits(out, width, tokens):
    records, scale_2, _ = case(out, width)
    x = inputs(tokens, width)
    arrived = skinny.counters(out, x.device)
    first = skinny.skinny_linear(x, records, scale_2, out, arrived)
    for _ in range(1000):
        again = skinny.skinny_linear(x, records, scale_2, out, arrived)
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))


def test_blocks_share_columns_somewhere():
    """Or the thousand repetitions would say little."""
    sms, arch = num_sms(0), current_arch()
    assert skinny_plan(64, 96, 64, 4096, sms, arch).splits > 1


@pytest.mark.parametrize("tokens", [1, 5, 16, 64])
def test_in_a_graph(tokens):
    """Two layers in a row, so that the second is launched while the first runs."""
    first, scale_2, _ = case(1536, 4096)
    second, _, _ = case(4096, 2048)
    x, y = inputs(tokens, 4096), inputs(tokens, 2048)
    arrived = skinny.counters(1536, x.device), skinny.counters(4096, x.device)

    def step() -> torch.Tensor:
        y[:, :1536] = skinny.skinny_linear(x, first, scale_2, 1536, arrived[0])
        out = skinny.skinny_linear(y, second, scale_2, 4096, arrived[1])
        return skinny.skinny_linear(out, first, scale_2, 1536, arrived[0])

    wanted = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))

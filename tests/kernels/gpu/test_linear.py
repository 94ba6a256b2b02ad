"""The NVFP4 linear kernel on sm_90 against float64.

bfloat16 results: half a unit of the last place, up to 2^-8 of the value; the float32 sum adds
in / 2^24 of the sum of |x w|, the instruction's own sums included. A widened weight is rounded to
bfloat16 once, by up to 2^-8, independently for each column: at most sqrt(in) 2^-8 |x w| as a random
walk, of which six times are allowed.
"""

import functools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs sm_90", allow_module_level=True)

from linear_cases import inputs, random_weight

from sglang_dsv4.kernels.linear import linear
from sglang_dsv4.kernels.linear.dense import widen
from sglang_dsv4.kernels.linear.packing import pack_weight
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

SHAPES = [(1536, 4096), (4096, 2048), (32768, 1024), (100, 96), (1, 16), (2064, 4176)]


@functools.cache
def case(out: int, width: int):
    weight, scale = random_weight(out, width)
    scale_2 = torch.tensor([0.37], device="cuda")
    dense = dequantize_weight(weight, scale, scale_2).double()
    return (*pack_weight(weight, scale), scale_2), dense


def bounds(x: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = x.double() @ dense.T
    return wanted, wanted.abs() * 2.0**-8 + x.double().abs() @ dense.abs().T * (
        x.shape[1] * 2.0**-24
    )


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 63, 64])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_few_tokens(out, width, tokens):
    weight, dense = case(out, width)
    x = inputs(tokens, width)
    wanted, bound = bounds(x, dense)
    arrived = linear.counters(out, x.device)
    for _ in range(2):
        torch.empty(1 << 22, device="cuda").fill_(float("nan"))  # what torch.empty hands out next
        found = linear.nvfp4_linear(x, *weight, arrived)
        assert (found.double() - wanted).abs().le(bound).all()
        assert not arrived.any()


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("rows", "warps"), [(64, 4), (128, 4), (128, 8)])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_every_launch(rows, warps, splits, tile):
    weight, dense = case(1536, 4096)
    x = inputs(60, 4096)
    wanted, bound = bounds(x, dense)
    found = torch.full((60, 1536), float("nan"), device="cuda", dtype=torch.bfloat16)
    plan = linear.Plan(rows, tile, splits, warps, 3)
    linear.launch_few(plan, x, *weight, linear.counters(1536, x.device), found)
    assert (found.double() - wanted).abs().le(bound).all()


@pytest.mark.parametrize("tokens", [65, 128, 256, 257, 1000])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_many_tokens(out, width, tokens):
    weight, dense = case(out, width)
    widened = widen(*weight)
    assert (widened[:, :width].double() - dense).abs().le(dense.abs() * 2.0**-8).all()
    assert not widened[:, width:].any()
    x = inputs(tokens, width)
    wanted, bound = bounds(x, dense)
    spread = (x.double().square() @ dense.square().T).sqrt() * 2.0**-8
    found = linear.nvfp4_linear(x, *weight, linear.counters(out, x.device))
    assert (found.double() - wanted).abs().le(bound + 6 * spread).all()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_thousand_times_the_same_bits(tokens):
    weight, _ = case(1536, 4096)
    x = inputs(tokens, 4096)
    arrived = linear.counters(1536, x.device)
    assert linear.few_plan(tokens, 1536, 32, 132).splits > 1
    first = linear.nvfp4_linear(x, *weight, arrived)
    for _ in range(1000):
        assert torch.equal(linear.nvfp4_linear(x, *weight, arrived), first)


def test_in_a_graph():
    weight, _ = case(1536, 4096)
    x = inputs(5, 4096)
    arrived = linear.counters(1536, x.device)
    wanted = linear.nvfp4_linear(x, *weight, arrived)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear.nvfp4_linear(x, *weight, arrived)
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, wanted)

"""Experts of a large prefill in FP8 on an H200, against float64 on the same e4m3 operands.

No server is started. After an illegal access nothing else runs in the same process.
"""

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an H100 or H200", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fp8_experts as cases

from sglang_dsv4.layers import experts_prefill

# The instruction cuts what it adds, 32 products and a sum, to about 14 bits below the largest: each
# is off by 2^-13 of it at most, all by 2^-13 sqrt(33) < 2^-10 of it where signs are random. The
# largest is no more than the sum of magnitudes, of which later steps of 32 have their own part.
SUMS = 2.0**-10
FLASH, PRO_RANK = (4096, 2048), (7168, 384)


@pytest.fixture(autouse=True)
def on_gpu():
    with torch.device("cuda"), torch.no_grad():
        yield


@pytest.fixture
def make(monkeypatch):
    """A layer of (E, D, I); from then on new tensors are full of NaN."""

    def made(*shape):
        layer = cases.Layer(experts_prefill, monkeypatch, shape)
        cases.poison_allocations(monkeypatch)
        return layer

    return made


def batch(kind, tokens, top_k, experts, width):
    """(x, routed, ids)."""
    ids = cases.choices(kind, tokens, top_k, experts)
    return cases.activations(tokens, width), torch.rand(tokens, top_k), ids


def check(layer, x, routed, ids, limit):
    """Near the reference, and the same bits in every call: slots are sorted anew each time."""
    found = layer(x, routed, ids, limit)
    assert found.shape == x.shape and found.dtype == x.dtype
    layer.check(found, x, routed, ids, limit, SUMS)
    for _ in range(3):
        assert torch.equal(layer(x.clone(), routed, ids, limit), found)
    return found


@pytest.mark.parametrize("top_k", [1, 6])
@pytest.mark.parametrize("tokens", [1, 3, 127, 128, 129, 257, 1100])
def test_any_number_of_tokens(make, tokens, top_k):
    check(make(16, 1024, 192), *batch("any", tokens, top_k, 16, 1024), 10.0)


@pytest.mark.parametrize("limit", [10.0, None])
@pytest.mark.parametrize(
    ("width", "inner"), [FLASH, PRO_RANK, (4096, 256), (192, 64), (64, 64), (128, 320)]
)
def test_shapes(make, width, inner, limit):
    """Published ones, a rank of eight's, and half stages of 128 columns in either product."""
    check(make(16, width, inner), *batch("any", 700, 6, 16, width), limit)


@pytest.mark.parametrize("kind", ["one", "ends", "none"])
@pytest.mark.parametrize("tokens", [40, 700])
def test_hostile_choices(make, kind, tokens):
    check(make(16, 1024, 192), *batch(kind, tokens, 6, 16, 1024), 10.0)


def test_many_experts(make):
    """More than a warp looks up at a time, most of them without rows."""
    x, routed, ids = batch("any", 300, 6, 384, 512)
    ids[ids % 5 != 0] = -1
    check(make(384, 512, 64), x, routed, ids, 10.0)


@pytest.mark.parametrize(("held", "parts"), [(0.4, [1] * 16), (3, [3] * 5 + [1]), (5, [4] * 4)])
def test_parts_of_scratch(make, monkeypatch, held, parts):
    """The first rows of a part lie at any multiple of four bytes."""
    layer, given = make(16, 1024, 192), batch("any", 700, 6, 16, 1024)
    whole = layer(*given, 10.0)
    assert layer.parts == [16]
    monkeypatch.setattr(experts_prefill, "EXPERTS_SCRATCH", int(held * 2 * 192 * 1024))
    assert torch.equal(check(layer, *given, 10.0), whole)
    assert layer.parts == parts


@pytest.mark.parametrize("limit", [10.0, None])
def test_broken_rows_stay_so_and_alone(make, limit):
    layer, (x, routed, ids) = make(16, 1024, 192), batch("any", 700, 6, 16, 1024)
    ids[10:14] = torch.arange(6)
    ids[13] = -1
    sound = check(layer, x, routed, ids, limit)
    assert sound.isfinite().all()
    broken = x.clone()
    broken[10, 7] = float("nan")
    broken[11, 0] = float("inf")
    broken[12, -1] = -float("inf")
    broken[13] = float("nan")
    found = layer(broken, routed, ids, limit)
    assert found[10:13].isnan().all()
    others = torch.ones(700, dtype=torch.bool)
    others[10:13] = False
    assert torch.equal(found[others], sound[others])


def test_huge_rows_are_clamped(make):
    """Sums near the end of float32's range."""
    x, routed, ids = batch("any", 700, 6, 16, 1024)
    x[9:15] *= 2.0**110
    assert check(make(16, 1024, 192), x, routed, ids, 10.0).isfinite().all()


@pytest.mark.parametrize(("width", "inner"), [FLASH, PRO_RANK])
def test_rows_are_near_the_references(make, width, inner):
    """The whole way, without the SwiGLU that the kernel has rounded."""
    layer, (x, routed, ids) = make(16, width, inner), batch("any", 1100, 6, 16, width)
    found = layer(x, routed, ids, 10.0).double()
    hidden = cases.hidden_near(x, layer.matrices[0], ids, 10.0, SUMS).value.bfloat16()
    wanted = cases.total_near(hidden, layer.matrices[1], routed, ids, SUMS).value
    rows = wanted.norm(dim=1) > 0
    error = (found - wanted)[rows].norm(dim=1) / wanted[rows].norm(dim=1)
    # Sums off by 2^-10 move one hidden value of 2^6 or so across the middle of two e4m3, by a step
    # of 2^-3.5 on average: 2^-6.5 of a row in the root mean square. A row whose largest value moves
    # gets another scale, which rounds all of it anew, each value by no more than a step, 2^-3.
    assert error.median() < 2.0**-6
    assert error.max() < 2.0**-3


@pytest.mark.parametrize(("width", "inner"), [(7168, 64), (64, 6144)])
def test_offsets_beyond_31_bits(make, width, inner):
    """SwiGLU's rows, or those of the output, have more than 2^31 elements."""
    tokens = 60000
    assert tokens * 6 * max(width, inner) > 1 << 31
    layer, (x, routed, ids) = make(8, width, inner), batch("any", tokens, 6, 8, width)
    found = layer(x, routed, ids, 10.0)
    some = torch.cat(
        [torch.arange(16), torch.randint(tokens, (200,)), tokens - 1 - torch.arange(9)]
    )
    layer.check(found, x, routed, ids, 10.0, SUMS, some)


def test_in_a_cuda_graph(make):
    """A decode batch may be large for its experts. Rows are quantised in each replay."""
    layer, (x, routed, ids) = make(4, 512, 64), batch("any", 200, 4, 4, 512)
    wanted = layer(x, routed, ids, 10.0)
    given = torch.zeros_like(x)
    layer(given, routed, ids, 10.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(given, routed, ids, 10.0)
    given.copy_(x)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted)

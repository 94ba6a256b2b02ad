"""Routed experts on records on a GPU, against the reference in float32.

SwiGLU's result and the output are rounded to bfloat16, each by up to 2^-8 of itself; float32 sums
of `in` terms and an exponential of 2 ulp add less than 2^-10 of the largest terms (in / 2^24 of
their sum, 7168 at most). So each slot is within 2^-8 of itself and (2^-8 + 2^-10) of
sum |SwiGLU| |w2|.
"""

import functools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs sm_90 or later", allow_module_level=True)

from sglang_dsv4.kernels.experts import grouped
from sglang_dsv4.kernels.experts.shape import CHUNK, PLACES, Shape
from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.kernels.reference.swiglu import clamped_swiglu

SHAPES = [(16, 4096, 2048), (12, 7168, 384), (9, 4096, 256), (5, 128, 64), (7, 192, 192)]
"""Experts, D, I."""


@functools.cache
def layer(experts: int, width: int, inner: int):
    draw = torch.Generator("cuda").manual_seed(width + inner)
    made = []
    for out, columns in ((2 * inner, width), (width, inner)):
        size = (experts, out, columns)
        weight = torch.randint(
            0, 256, (*size[:2], columns // 2), generator=draw, device="cuda", dtype=torch.uint8
        )
        scale = torch.exp2(
            torch.rand(*size[:2], columns // 16, generator=draw, device="cuda") * 6 - 3
        )
        scale[:, 0, 0], scale[:, -1, -1] = 448.0, 2.0**-9
        scale = scale.to(torch.float8_e4m3fn)
        outer = torch.exp2(torch.rand(experts, generator=draw, device="cuda") * 2 - 6)
        made.append((pack_records(weight, scale), outer, dequantize_weight(weight, scale, outer)))
    return made


def choices(tokens: int, chosen: int, experts: int) -> torch.Tensor:
    """Distinct experts for each token, some without."""
    ids = torch.rand(tokens, experts, device="cuda").topk(chosen).indices.int()
    ids[torch.rand(tokens, chosen, device="cuda") < 0.05] = -1
    return ids


def call(made, x, routed, ids, limit):
    (w13, outer13, _), (w2, outer2, _) = made
    torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # what new_empty hands out next
    return grouped.experts_decode(x, w13, w2, outer13, outer2, routed, ids, limit)


def check(made, x, routed, ids, limit, found):
    """Every slot, an expert at a time, in float32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    gate_up, down = made[0][2], made[1][2]
    flat, found = ids.flatten(), found.flatten(0, 1).float()
    assert not found[flat < 0].any()
    for expert in flat[flat >= 0].unique().tolist():
        slots = (flat == expert).nonzero().flatten()
        gate, up = (x[slots // ids.shape[1]].float() @ gate_up[expert].T).chunk(2, dim=1)
        hidden = clamped_swiglu(gate, up, limit)
        weight = routed.flatten()[slots, None]
        wanted = hidden @ down[expert].T * weight
        size = hidden.abs() @ down[expert].abs().T * weight
        error = (found[slots] - wanted).abs()
        assert (error <= wanted.abs() * 2.0**-8 + (2.0**-8 + 2.0**-10) * size).all()


TOKENS = (1, 3, 4, 5, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)
FORMS = [0, "all", "ring"]
"""Activations that are not staged, all columns of them, or a ring of chunks."""


def form(shape: Shape, staged) -> Shape:
    """The shape with that form of staging, or with none where it does not fit."""
    columns = {0: 0, "all": shape.inputs, "ring": PLACES * CHUNK}[staged]
    made = replace(shape, staged=columns)
    can = staged != "ring" or (shape.can_go_round and made.goes_round)
    fits = can and grouped.resident_blocks(made, grouped.current_arch())
    return made if fits else shape


def forms(tiles: int, split: int, staged) -> tuple[Shape, Shape]:
    """Both launches of V4-Flash's experts; skips the test where neither has that form."""
    gate_up = form(Shape(True, 2048, 4096, 6, tiles, split), staged)
    down = form(Shape(False, 4096, 2048, 6, tiles, split), staged)
    if staged and not gate_up.staged and not down.staged:
        pytest.skip("takes more shared memory than there is")
    return gate_up, down


def both(made, shapes, x, routed, ids, limit):
    """Both launches by given shapes, into NaN: [T, k, D]."""
    (w13, outer13, _), (w2, outer2, _) = made
    lists = grouped.slot_lists(ids, shapes[0].slots, len(w13))
    hidden, out = (
        torch.full((ids.numel(), shape.outputs), float("nan"), device="cuda").bfloat16()
        for shape in shapes
    )
    bound = float("inf") if limit is None else limit
    grouped.launch(shapes[0], x, w13, outer13, routed, lists, hidden, bound)
    grouped.launch(shapes[1], hidden, w2, outer2, routed, lists, out, bound)
    return out.view(*ids.shape, -1)


@pytest.mark.parametrize("limit", [None, 10.0])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("staged", FORMS)
def test_staged(staged, tiles, tokens, limit):
    """Each form on tokens drawn at random, all of one expert, and without an expert."""
    made = layer(16, 4096, 2048)
    gate_up, down = forms(tiles, 1, staged)
    x = torch.randn(tokens, 4096, device="cuda").bfloat16()
    routed = torch.rand(tokens, 6, device="cuda")
    several = choices(tokens, 6, 16)
    for ids in (several, torch.full_like(several, 11), torch.full_like(several, -1)):
        there = x.clone()
        there[(ids < 0).all(dim=1)] = float("nan")
        found = both(made, (gate_up, down), there, routed, ids, limit)
        check(made, there, routed, ids, limit, found)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("staged", FORMS)
def test_a_thousand_times_the_same_bits_staged(staged, tiles):
    made = layer(16, 4096, 2048)
    gate_up, down = forms(tiles, 1, staged)
    x, ids = torch.randn(129, 4096, device="cuda").bfloat16(), choices(129, 6, 16)
    routed = torch.rand(129, 6, device="cuda")
    plain = (replace(gate_up, staged=0), replace(down, staged=0))
    first = both(made, plain, x, routed, ids, 10.0)
    for _ in range(1000):
        assert torch.equal(both(made, (gate_up, down), x, routed, ids, 10.0), first)


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("tokens", [*TOKENS, 33, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts(shape, tokens, limit):
    made = layer(*shape)
    x = torch.randn(tokens, shape[1], device="cuda").bfloat16()
    chosen = min(6, shape[0])
    ids, routed = choices(tokens, chosen, shape[0]), torch.rand(tokens, chosen, device="cuda")
    x[(ids < 0).all(dim=1)] = float("nan")
    check(made, x, routed, ids, limit, call(made, x, routed, ids, limit))


@pytest.mark.parametrize("tokens", [9, 100])
@pytest.mark.parametrize("expert", [-1, 0, 4])
def test_one_expert_for_all(tokens, expert):
    made = layer(5, 128, 64)
    x, routed = torch.randn(tokens, 128, device="cuda").bfloat16(), torch.rand(tokens, 1).cuda()
    ids = torch.full((tokens, 1), expert, dtype=torch.int32, device="cuda")
    check(made, x, routed, ids, None, call(made, x, routed, ids, None))


@pytest.mark.parametrize("staged", [0, "all"])
@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_every_launch(tiles, split, staged):
    """Bits depend on the split alone, which orders the sum."""
    made = layer(16, 4096, 2048)
    x, ids = torch.randn(60, 4096, device="cuda").bfloat16(), choices(60, 6, 16)
    routed = torch.rand(60, 6, device="cuda")
    found = []
    for each, how in ((tiles, staged), (1, 0)):
        found.append(both(made, forms(each, split, how), x, routed, ids, 10.0))
    check(made, x, routed, ids, 10.0, found[0])
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_a_thousand_times_the_same_bits(tokens):
    made = layer(16, 4096, 2048)
    x, ids = torch.randn(tokens, 4096, device="cuda").bfloat16(), choices(tokens, 6, 16)
    routed = torch.rand(tokens, 6, device="cuda")
    first = call(made, x, routed, ids, 10.0)
    for _ in range(1000):
        assert torch.equal(call(made, x, routed, ids, 10.0), first)


def test_in_a_graph():
    """Other choices at each replay, with no work for the host."""
    made = layer(16, 4096, 2048)
    x, ids = torch.randn(24, 4096, device="cuda").bfloat16(), choices(24, 6, 16)
    routed = torch.rand(24, 6, device="cuda")
    call(made, x, routed, ids, 10.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped.experts_decode(
            x, *(made[i][0] for i in range(2)), *(made[i][1] for i in range(2)), routed, ids, 10.0
        )
    for chosen in (choices(24, 6, 16), torch.full_like(ids, -1), torch.full_like(ids, 3)):
        ids.copy_(chosen)
        x.normal_()
        found.fill_(float("nan"))
        graph.replay()
        check(made, x, routed, ids, 10.0, found)


def test_preparing():
    """Launches without a slot end, and every plan is there afterwards."""
    made = layer(5, 128, 64)
    grouped.prepare(made[0][0], made[1][0], 2, 64)
    torch.cuda.synchronize()

"""The experts' kernel source, lane by lane on the CPU, against the reference: both launches."""

from dataclasses import replace

import pytest
import torch
from experts_emulation import compiled, emulate
from slot_lists import align

from sglang_dsv4.kernels.experts import grouped
from sglang_dsv4.kernels.experts.shape import CHUNK, PLACES, Shape
from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.reference.moe import moe_experts
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.kernels.reference.swiglu import clamped_swiglu


def matrices(experts, out, width):
    """(records, outer, dense float32): codes of all kinds, the largest and smallest scales."""
    weight = torch.randint(0, 256, (experts, out, width // 2), dtype=torch.uint8)
    scale = torch.exp2(torch.rand(experts, out, width // 16) * 6 - 3)
    scale[:, 0, 0], scale[:, -1, -1] = 448.0, 2.0**-9
    scale = scale.to(torch.float8_e4m3fn)
    outer = torch.exp2(torch.rand(experts) * 2 - 5)
    return pack_records(weight, scale), outer, dequantize_weight(weight, scale, outer)


def staging(shape, staged):
    """The shape with all columns staged, or by a ring where it can go round, or with none."""
    if staged == "ring" and shape.can_go_round and shape.inputs > PLACES * CHUNK:
        return replace(shape, staged=PLACES * CHUNK)
    return replace(shape, staged=shape.inputs if staged else 0)


def check(ids, experts, inner, width, tiles, splits, limit, grid=(2, 1), staged=None, slow=()):
    """Both launches over ``ids`` [T, k]; slots that are not written are seen as NaN."""
    (tokens, chosen), slots = ids.shape, ids.numel()
    gate_up, down = matrices(experts, 2 * inner, width), matrices(experts, width, inner)
    x = torch.randn(tokens, width).bfloat16()
    # A token without an expert is not read.
    x[(ids < 0).all(dim=1)] = float("nan")
    routed = torch.rand(tokens, chosen) + 0.1
    shapes = (
        Shape(True, inner, width, chosen, tiles, splits[0]),
        Shape(False, width, inner, chosen, tiles, splits[1]),
    )
    shapes = [staging(shape, staged) for shape in shapes]
    lists = align(ids, 8 * tiles, experts, return_inactive_prefix_count=True)
    bound = float("inf") if limit is None else limit
    hidden = emulate(shapes[0], x, *gate_up[:2], routed, lists, slots, bound, *grid, slow)
    idle = ids.flatten() < 0
    assert hidden[idle].isnan().all()
    found = emulate(shapes[1], hidden, *down[:2], routed, lists, slots, bound, *grid, slow)

    found = found.float()
    # A token for each slot, so that the reference adds nothing up.
    rows = x.float().repeat_interleave(chosen, 0)
    each = (routed.view(-1, 1), ids.view(-1, 1), limit)
    wanted = moe_experts(rows, gate_up[2], down[2], *each)
    assert not found[idle].any()
    for slot in (~idle).nonzero().flatten().tolist():
        expert = int(ids.flatten()[slot])
        sums = gate_up[2][expert] @ rows[slot]
        wide = clamped_swiglu(*sums.chunk(2), limit)
        size = wide.abs() @ down[2][expert].abs().T * routed.flatten()[slot]
        # The result is rounded to bfloat16, by up to 2^-8 of it, and SwiGLU's before, by 2^-8 of
        # each; float32 sums and an exponential of 2 ulp are below 2^-16 of their largest terms,
        # which gate and up may exceed their sum by: 2^-10 of the sum of sizes in all.
        error = (found[slot] - wanted[slot]).abs()
        slack = (2.0**-8 + 2.0**-10) * size
        assert (error <= wanted[slot].abs() * 2.0**-8 + slack).all(), (slot, expert)
    if limit is not None:
        assert (sums.chunk(2)[0] > limit).any() and (sums.chunk(2)[1] < -limit).any()


@pytest.mark.parametrize(
    ("tokens", "inner", "width", "limit"),
    [
        (1, 64, 64, None),
        (1, 192, 128, 0.25),
        (3, 64, 192, 0.25),
        (3, 192, 128, None),
        (5, 64, 192, None),
        (5, 192, 64, 0.25),
    ],
)
def test_any_choice(tokens, inner, width, limit):
    ids = torch.randint(0, 4, (tokens, 2), dtype=torch.int32)
    check(ids, 5, inner, width, 1, (1, 1), limit)


@pytest.mark.parametrize("staged", [None, "all"])
@pytest.mark.parametrize(("tiles", "splits"), [(1, (4, 4)), (2, (1, 2)), (2, (2, 1)), (4, (4, 1))])
def test_shares_of_the_columns(tiles, splits, staged):
    """Equal and unequal numbers of records; several blocks and groups of row tiles an expert."""
    ids = torch.randint(-1, 2, (20, 2), dtype=torch.int32)
    check(ids, 2, 256, 320, tiles, splits, 0.25, staged=staged)


@pytest.mark.parametrize(
    ("inner", "width", "splits"), [(128, 1024, (4, 1)), (320, 128, (1, 2)), (128, 704, (2, 1))]
)
def test_staged_in_several_chunks(inner, width, splits):
    """Whole and partial chunks, shares of the columns that begin within a chunk."""
    ids = torch.randint(-1, 3, (21, 2), dtype=torch.int32)
    check(ids, 3, inner, width, 2, splits, 0.25, (1, 2), "all")


@pytest.mark.parametrize("slow", [(), (0,), (1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize(("tiles", "grid"), [(2, (1, 1)), (4, (2, 1))])
def test_staged_in_a_ring(tiles, grid, slow):
    """The ring goes round within an item, over items and over blocks; warps are early and late."""
    ids = torch.randint(-1, 2, (20, 2), dtype=torch.int32)
    check(ids, 2, 192, 1280, tiles, (1, 1), None, grid, "ring", slow)


def test_down_staged_in_a_ring():
    ids = torch.randint(-1, 2, (10, 2), dtype=torch.int32)
    check(ids, 2, 1536, 64, 2, (1, 1), None, (2, 1), "ring")


@pytest.mark.parametrize("slow", [(3,), (0, 1, 2, 4, 5, 6, 7)])
def test_staged_anew_while_warps_are_late(slow):
    ids = torch.randint(0, 3, (30, 2), dtype=torch.int32)
    check(ids, 3, 256, 320, 2, (1, 2), None, (1, 1), "all", slow)


@pytest.mark.parametrize("staged", [None, "all"])
@pytest.mark.parametrize(("tiles", "grid"), [(1, (3, 2)), (2, (1, 1)), (2, (5, 1))])
def test_sixty_four_tokens(tiles, grid, staged):
    """Experts of no, one and several blocks, and slots without an expert."""
    ids = torch.randint(0, 6, (64, 2), dtype=torch.int32)
    ids[ids == 2] = 4
    ids[torch.rand(64, 2) < 0.1] = -1
    ids[7] = -1
    check(ids, 7, 64, 192, tiles, (1, 1), None, grid, staged)


@pytest.mark.parametrize("staged", [None, "all"])
@pytest.mark.parametrize("tiles", [1, 4])
def test_all_tokens_to_one_expert(tiles, staged):
    ids = torch.full((33, 1), 2, dtype=torch.int32)
    check(ids, 4, 64, 128, tiles, (2, 1), None, staged=staged)


@pytest.mark.parametrize("staged", [None, "all"])
def test_more_blocks_than_one_look_covers(staged):
    """Forty blocks: the last expert's begin in one window of 32 and end in the next."""
    ids = torch.full((300, 1), 1, dtype=torch.int32)
    ids[:6, 0] = torch.arange(6, dtype=torch.int32) % 2 * 3 - 1
    ids[6:40] = 0
    check(ids, 3, 128, 128, 1, (2, 2), None, staged=staged)


@pytest.mark.parametrize(("width", "staged"), [(64, None), (64, "all"), (1280, "ring")])
def test_no_slot_has_an_expert(width, staged):
    ids = torch.full((5, 2), -1, dtype=torch.int32)
    check(ids, 3, 64, width, 1, (1, 1), None, (2, 2), staged)


def test_the_same_bits_in_any_block():
    """A slot's result does not depend on the other slots, nor on the grid."""
    ids = torch.tensor([[1, 0], [1, 2], [1, 1], [0, 1]], dtype=torch.int32)
    records, outer, _ = matrices(3, 128, 128)
    x, routed = torch.randn(4, 128).bfloat16(), torch.ones(4, 2)
    found = []
    for grid, tiles, staged in (((1, 1), 1, 0), ((3, 1), 2, 0), ((2, 2), 1, 0), ((3, 1), 2, 128)):
        lists = align(ids, 8 * tiles, 3, return_inactive_prefix_count=True)
        shape = Shape(True, 64, 128, 2, tiles, 2, staged)
        found.append(emulate(shape, x, records, outer, routed, lists, 8, 1e9, *grid))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.fixture
def host(monkeypatch):
    """The host's functions with emulated launches, on a GPU of two multiprocessors."""
    monkeypatch.setattr(grouped, "compile_product", compiled)
    monkeypatch.setattr(grouped, "num_sms", lambda index: 2)
    monkeypatch.setattr(grouped, "current_arch", lambda: "sm_90a")
    monkeypatch.setattr(
        grouped,
        "slot_lists",
        lambda ids, block, experts: align(ids, block, experts, return_inactive_prefix_count=True),
    )
    return grouped


@pytest.mark.parametrize(("tokens", "limit"), [(1, None), (20, 0.25)])
def test_both_launches(host, tokens, limit):
    experts, inner, width = 4, 64, 128
    (w13, outer13, gate_up), (w2, outer2, down) = (
        matrices(experts, 2 * inner, width),
        matrices(experts, width, inner),
    )
    x, routed = torch.randn(tokens, width).bfloat16(), torch.rand(tokens, 2)
    ids = torch.randint(-1, experts, (tokens, 2), dtype=torch.int32)
    found = host.experts_decode(x, w13, w2, outer13, outer2, routed, ids, limit)
    assert found.shape == (tokens, 2, width) and found.dtype == torch.bfloat16
    wanted = moe_experts(x.float(), gate_up, down, routed, ids, limit)
    # Elements are checked above; here that the launches fit together: two roundings to bfloat16.
    assert (found.float().sum(1) - wanted).norm() <= 2.0**-7 * wanted.norm()
    empty = host.experts_decode(x[:0], w13, w2, outer13, outer2, routed[:0], ids[:0], limit)
    assert empty.shape == (0, 2, width)


def test_preparing_runs_every_launch_without_a_slot(host, monkeypatch):
    called = []

    def made(arch, shape):
        called.append(shape)
        return compiled(arch, shape)

    monkeypatch.setattr(grouped, "compile_product", made)
    w13, w2 = matrices(3, 128, 64)[0], matrices(3, 64, 64)[0]
    host.prepare(w13, w2, 2, 100)
    plans = [host.experts_plan(t, 2, 3, 64, 64, 2, "sm_90a") for t in range(1, 101)]
    assert set(called) == {shape for plan in plans for shape in (plan.gate_up, plan.down)}
    assert len(called) == len(set(called)) and {shape.tiles for shape in called} == {1, 2, 4}


@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
@pytest.mark.parametrize(
    ("experts", "width", "inner"),
    [(256, 4096, 2048), (256, 4096, 256), (384, 7168, 3072), (384, 7168, 384), (16, 256, 128)],
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_plans(arch, experts, width, inner, tokens):
    plan = grouped.experts_plan(tokens, 6, experts, width, inner, 132, arch)
    assert plan.gate_up.slots == plan.down.slots
    for shape in (plan.gate_up, plan.down):
        assert shape.split <= shape.inputs // 64
        assert shape.groups * (8 // shape.split) >= shape.pairs
        assert grouped.resident_blocks(shape, arch) >= 1

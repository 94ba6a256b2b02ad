"""Checks and cases of sparse attention on a GPU; no pytest, so that scripts share them."""

import math
from dataclasses import replace
from functools import partial

import torch
from sparse_attention_inputs import make_inputs, make_rotation

from sglang_dsv4.envs import attention_kernel
from sglang_dsv4.kernels.attention.plan import IMPLEMENTATIONS, Plan
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.reference.kv_store import read_records
from sglang_dsv4.kernels.reference.norm_rope import inverse_rope


def describe(got, want, bad):
    """Where a comparison failed: counts by token, head, 64-dim block, dim in 8, and samples."""
    where = bad.nonzero()
    lines = [f"{int(bad.sum())} of {bad.numel()} values differ"]
    for name, axes in (("token", (1, 2)), ("head", (0, 2)), ("dim block", (0, 1))):
        count = bad.sum(dim=axes)
        if name == "dim block":
            count = count.view(8, 64).sum(1)
        hit = count.nonzero().flatten().tolist()
        lines.append(f"  {name}s hit ({len(hit)} of {len(count)}): {hit[:40]}")
    in_eight = bad.sum(dim=(0, 1)).view(64, 8).sum(0).tolist()
    lines.append(f"  by dim % 8: {in_eight}")
    for t, h, d in where[:: max(1, len(where) // 8)][:8].tolist():
        lines.append(
            f"  [{t},{h},{d}] got {got[t, h, d].item():.6g} want {want[t, h, d].item():.6g}"
        )
    t, h, d = where[0].tolist()
    nearby = (want[t, h] - got[t, h, d]).abs().argmin().item()
    lines.append(f"  the first one's value is nearest to the wanted dim {nearby} of its row")
    return "\n".join(lines)


def check(inputs, plan=None):
    """Compare with the reference; raises AssertionError saying where they differ."""
    got, lse = inputs.run(plan)
    torch.cuda.synchronize()
    out, want_lse, bound, lse_bound = inputs.expected()
    value = got.float()
    same = (value == out) | (value.isnan() & out.isnan())
    bad = ~(same | ((value - out).abs() <= bound))
    messages = []
    if bad.any():
        messages.append("out: " + describe(value, out, bad))
    same = (lse == want_lse) | (lse.isnan() & want_lse.isnan())
    wrong = ~(same | ((lse - want_lse).abs() <= lse_bound))
    if wrong.any():
        t, h = wrong.nonzero()[0].tolist()
        messages.append(
            f"lse: {int(wrong.sum())} of {wrong.numel()} differ, first [{t},{h}] "
            f"got {lse[t, h].item():.7g} want {want_lse[t, h].item():.7g}"
        )
    assert not messages, "\n".join(messages)


def kernels_taking(heads):
    """The implementations that may run so many heads on this GPU; the environment may name one."""
    arch, forced = current_arch(), attention_kernel()
    return [
        name
        for name, kernel in IMPLEMENTATIONS.items()
        if kernel.takes(heads, arch) and forced in (None, name)
    ]


def head_tile_cases():
    """(plan with one split, heads) for every implementation of this GPU and tile of heads."""
    for heads in (3, 40):
        for name in kernels_taking(heads):
            kernel = IMPLEMENTATIONS[name]
            if heads == 40 and 3 in kernel.heads:
                continue
            for tile in kernel.costs:
                if tile in kernel.head_tiles(tile, current_arch()):
                    yield Plan(name, tile, 1), heads


def check_each_key_alone(comp_page, plan, heads):
    """One listed key a token, at every place of both lists, no sink: out is the record exactly.

    The weight is exp2(0) = 1 and every decoded value is exact in bf16. Turned back, it is rounded
    once, and its float32 products may be contracted.
    """
    places = 128 + 200
    inputs = make_inputs(places, heads, 128, 200, comp_page, seed=5, empty=0.0)
    token = torch.arange(places, device="cuda")
    window = torch.where(
        token[:, None] == torch.arange(128, device="cuda"), inputs.window_slots, -1
    )
    comp = torch.where(
        token[:, None] - 128 == torch.arange(200, device="cuda"), inputs.comp_slots, -1
    )
    records = torch.cat(
        [
            read_records(inputs.window_pool, window.amax(1)[:128], inputs.window_layout),
            read_records(inputs.comp_pool, comp.amax(1)[128:], inputs.comp_layout),
        ]
    )
    inputs.window_slots, inputs.comp_slots = window, comp
    inputs.sinks = torch.full_like(inputs.sinks, -torch.inf)
    out, _ = inputs.run(plan)
    want = records[:, None].expand(-1, heads, -1)
    bad = out.float() != want
    assert not bad.any(), describe(out.float(), want, bad)
    inputs.rotation = make_rotation(places, torch.Generator("cuda").manual_seed(6))
    out, _ = inputs.run(plan)
    turned = inverse_rope(want, *inputs.rotation)
    bound = turned.abs() * 2**-8 + want.abs().amax(dim=-1, keepdim=True) * 2**-22
    bound[..., :448] = 0
    bad = (out.float() - turned).abs() > bound
    assert not bad.any(), describe(out.float(), turned, bad)


def hostile_inputs():
    """As `plain_hostile_inputs`, each also turned: int32 positions, rows of a wider table."""
    for name, inputs in plain_hostile_inputs():
        yield name, inputs
        positions, table = make_rotation(len(inputs.q), torch.Generator("cuda").manual_seed(7))
        wider = torch.nn.functional.pad(table, (0, 12), value=torch.nan)[:, :64]
        yield f"{name}, turned", replace(inputs, rotation=(positions.int(), wider))


def plain_hostile_inputs():
    """NaN records, garbage slots, empty lists, duplicates and infinite sinks, with their names."""
    base = make_inputs(6, 7, 100, 300, 2, seed=11)
    base.window_slots[0] = -1
    base.comp_slots[0] = -1
    base.window_slots[1, :5] = torch.tensor([-(2**63), -2, 2**40, 2**63 - 1, 40 * 64])
    base.comp_slots[2] = base.comp_slots[2, 0]
    base.comp_slots[3] = -1
    base.window_slots[4] = -1
    base.sinks[0], base.sinks[1] = torch.inf, -torch.inf
    yield "garbage", base
    many = make_inputs(6, 70, 100, 300, 2, seed=18)
    many.window_slots[0] = -1
    many.comp_slots[0] = -1
    many.window_slots[1, :5] = torch.tensor([-(2**63), -2, 2**40, 2**63 - 1, 40 * 64])
    many.sinks[0], many.sinks[69] = torch.inf, -torch.inf
    yield "garbage, 70 heads", many
    nan = make_inputs(4, 16, 128, 512, 64, seed=12)
    page, row = 3, 9
    layout = nan.comp_layout
    nan.comp_pool[page, layout.scale_offset(row) + 2] = 0x7F
    slot = page * 64 + row
    nan.comp_slots[nan.comp_slots == slot] = -1
    yield "nan not listed", nan
    listed = make_inputs(4, 16, 128, 512, 64, seed=12)
    listed.comp_pool[page, layout.scale_offset(row) + 2] = 0x7F
    listed.comp_slots[listed.comp_slots == slot] = -1
    listed.comp_slots[1, 77] = slot
    yield "nan listed", listed
    wide = make_inputs(3, 64, 128, 1024, 64, seed=13, slot_dtype=torch.int32, extra=96)
    wide.q = torch.randn(3, 64, 1024, device="cuda").bfloat16()[..., 512:]
    wide.out_scale = 0.25
    yield "strided", wide
    huge = make_inputs(2, 16, 128, 128, 64, seed=14)
    huge.q = huge.q * 40
    yield "sharp", huge
    ragged = make_inputs(6, 16, 100, 700, 64, seed=16)
    ragged.comp_lengths = torch.tensor([0, -3, 1, 64, 65, 9999], dtype=torch.int32, device="cuda")
    beyond = torch.arange(700, device="cuda") >= ragged.comp_lengths[:, None]
    page, row = 3, 9
    ragged.comp_pool[page, ragged.comp_layout.scale_offset(row) + 2] = 0x7F
    ragged.comp_slots[ragged.comp_slots == page * 64 + row] = -1
    ragged.comp_slots[beyond] = page * 64 + row
    yield "lengths, NaN beyond", ragged
    nothing = make_inputs(3, 16, 0, 700, 64, seed=17)
    nothing.comp_lengths = torch.tensor([0, 70, 0], dtype=torch.int32, device="cuda")
    yield "lengths 0 without window", nothing
    alone = make_inputs(3, 9, 37, 5, 64, seed=15)
    alone.comp_slots = alone.comp_pool = alone.comp_layout = None
    yield "window only", alone


def each_plan(heads, splits):
    """Plans of every implementation of this GPU, its useful tiles and the wanted splits."""
    for kernel in kernels_taking(heads):
        for tile in IMPLEMENTATIONS[kernel].head_tiles(heads, current_arch()):
            for n in splits:
                yield Plan(kernel, tile, n)


def describe_plan(plan):
    return f"{plan.kernel} {plan.head_tile}x{plan.splits}"


def ragged_inputs(heads, splits, rotated):
    """Compressed lists of different lengths."""
    inputs = make_inputs(9, heads, 70, 640, 64, seed=splits, rotated=rotated)
    lengths = [0, 1, 63, 64, 65, 200, 500, 640, 641]
    inputs.comp_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return inputs


def length_cases():
    """(name, function making inputs, plan): fewer tiles than splits, and as many."""
    for heads in (5, 16, 32, 64):
        for plan in each_plan(heads, (1, 4, 13)):
            for rotated in (False, True):
                name = f"lengths H{heads} {describe_plan(plan)}{' turned' * rotated}"
                yield name, partial(ragged_inputs, heads, plan.splits, rotated), plan


def random_cases():
    """(name, function making inputs, plan) over heads, list lengths, pages and plans."""
    for heads in (1, 8, 16, 17, 32, 33, 64, 128):
        for window, comp, page in ((128, 512, 64), (1, 1, 2), (65, 1000, 2)):
            tiles = math.ceil(window / 64) + math.ceil(comp / 64)
            for plan in each_plan(heads, sorted({1, min(2, tiles), tiles})):
                name = f"H{heads} {describe_plan(plan)} lists {window}+{comp} page {page}"
                make = partial(make_inputs, 5, heads, window, comp, page, seed=heads + comp)
                yield name, make, plan
                yield f"{name} turned", partial(make, rotated=True), plan

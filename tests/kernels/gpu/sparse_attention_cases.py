"""Inputs, oracle and checks of sparse attention on a GPU; no pytest, so that scripts share them."""

import math
from dataclasses import dataclass

import torch

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention.sparse_attention import Plan, sparse_attention
from sglang_dsv4.kernels.reference import sparse_attention as reference
from sglang_dsv4.kernels.reference.kv_store import read_records, write_records

SCALE = 512**-0.5


@dataclass
class Inputs:
    """Arguments of one call, in the order of the operation's signature."""

    q: torch.Tensor
    window_slots: torch.Tensor
    window_pool: torch.Tensor
    window_layout: RecordLayout
    comp_slots: torch.Tensor | None
    comp_pool: torch.Tensor | None
    comp_layout: RecordLayout | None
    sinks: torch.Tensor
    scale: float = SCALE
    out_scale: float = 1.0

    def run(self, plan=None):
        return sparse_attention(
            self.q,
            self.window_slots,
            self.window_pool,
            self.window_layout,
            self.comp_slots,
            self.comp_pool,
            self.comp_layout,
            self.sinks,
            self.scale,
            self.out_scale,
            plan,
        )

    def lists(self):
        yield self.window_slots, self.window_pool, self.window_layout
        if self.comp_slots is not None:
            yield self.comp_slots, self.comp_pool, self.comp_layout

    def expected(self):
        """(out, lse, bound of out, bound of lse): the reference in float32 and its distance.

        Each weight is rounded to bf16 (2^-9 relative; 2^-8 leaves room for the approximate
        exponential and the order of sums), so out may differ by 2^-8 sum(w |v|) times the gain;
        out itself is rounded to bf16 once, 2^-9 relative. A score is a sum of 512 products in
        float32: 2^-19 of the sum of their magnitudes leaves 32 roundings.
        """
        args = [
            self.window_slots,
            self.window_pool,
            self.window_layout,
            self.comp_slots,
            self.comp_pool,
            self.comp_layout,
            self.sinks,
            self.scale,
            self.out_scale,
        ]
        out, lse = reference.sparse_attention(self.q.float(), *args)
        spread, drift = torch.zeros_like(out), torch.zeros_like(lse)
        for token in range(len(self.q)):
            gain = torch.sigmoid(lse[token] - self.sinks) * abs(self.out_scale)
            for slots, pool, layout in self.lists():
                inside = (slots[token] >= 0) & (slots[token] < len(pool) * layout.page_size)
                records = read_records(pool, slots[token][inside], layout)
                if len(records) == 0:
                    continue
                query = self.q[token].float()
                weights = (query @ records.T * self.scale - lse[token, :, None]).exp()
                spread[token] += gain[:, None] * (weights @ records.abs())
                size = (query.abs() @ records.abs().T).amax(dim=1) * self.scale
                drift[token] = torch.maximum(drift[token], size.nan_to_num())
        bound = (spread.nan_to_num() + out.abs().nan_to_num()) * 2**-8 + 1e-6
        return out, lse, bound, drift * 2**-19 + 1e-5


def make_pool(layout, pages, generator, amplitude=2.0, extra=0):
    """Random records in every row; `extra` unused bytes at the end of each page."""
    storage = torch.randint(
        0, 256, (pages, layout.page_bytes + extra), generator=generator, device="cuda"
    ).to(torch.uint8)
    rows = pages * layout.page_size
    latent = torch.randn(rows, 512, generator=generator, device="cuda") * amplitude
    write_records(latent, torch.arange(rows, device="cuda"), storage, layout)
    return storage


def make_inputs(
    tokens,
    heads,
    window=128,
    comp=512,
    comp_page=64,
    seed=0,
    slot_dtype=torch.int64,
    empty=0.1,
    extra=0,
    pages=40,
):
    """Random records, queries, lists with a share of unused slots, and sinks."""
    g = torch.Generator("cuda").manual_seed(seed)
    layouts = [RecordLayout(KVFormat.NVFP4, size) for size in (64, comp_page)]
    counts = [pages, pages * 64 // comp_page]
    pools = [make_pool(lay, n, g, extra=extra) for lay, n in zip(layouts, counts, strict=True)]
    lists = []
    for pool, layout, length in zip(pools, layouts, (window, comp), strict=True):
        slots = torch.randint(
            0, len(pool) * layout.page_size, (tokens, length), generator=g, device="cuda"
        )
        drop = torch.rand(slots.shape, generator=g, device="cuda") < empty
        lists.append(slots.masked_fill(drop, -1).to(slot_dtype))
    q = torch.randn(tokens, heads, 512, generator=g, device="cuda").bfloat16()
    sinks = torch.randn(heads, generator=g, device="cuda")
    return Inputs(q, lists[0], pools[0], layouts[0], lists[1], pools[1], layouts[1], sinks)


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


def check_each_key_alone(comp_page, head_tile, splits):
    """One listed key a token, at every place of both lists, no sink: out is the record exactly.

    The weight is exp2(0) = 1 and every decoded value is exact in bf16.
    """
    places = 128 + 200
    inputs = make_inputs(places, 3, 128, 200, comp_page, seed=5, empty=0.0)
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
    out, _ = inputs.run(Plan(head_tile, splits))
    want = records[:, None].expand(-1, 3, -1)
    bad = out.float() != want
    assert not bad.any(), describe(out.float(), want, bad)


def hostile_inputs():
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
    alone = make_inputs(3, 9, 37, 5, 64, seed=15)
    alone.comp_slots = alone.comp_pool = alone.comp_layout = None
    yield "window only", alone


def random_cases():
    """(name, inputs, plan) over heads, list lengths, pages, tiles and splits."""
    for heads, tile in ((1, 8), (8, 8), (16, 16), (17, 16), (32, 32), (64, 32), (128, 16)):
        for window, comp, page in ((128, 512, 64), (1, 1, 2), (65, 1000, 2)):
            tiles = math.ceil(window / 64) + math.ceil(comp / 64)
            for splits in sorted({1, min(2, tiles), tiles}):
                inputs = make_inputs(5, heads, window, comp, page, seed=heads + comp)
                name = f"H{heads} tile {tile} lists {window}+{comp} page {page} split {splits}"
                yield name, inputs, Plan(tile, splits)

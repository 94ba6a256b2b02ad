"""Sparse attention by both of its ways, against float64 loops and against transformers."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import cases
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.reference import sparse_attention as module
from sglang_dsv4.kernels.reference.kv_store import read_records, write_records
from sglang_dsv4.kernels.reference.norm_rope import inverse_rope
from sglang_dsv4.kernels.reference.rope import build_rope_table
from sglang_dsv4.kernels.reference.sparse_attention import sparse_attention

SCALE = 512**-0.5
WAYS = {"by rule": module.DENSE_SHARE, "dense": 0, "gather": math.inf}
# Float32: scores reach 10, so their sums of 512 products err by 10 x 2^-23 x a few, as does the
# output, a mean of records of order 1.
FLOAT32 = {"rtol": 1e-4, "atol": 2e-5}
# bf16 q: softmax weights and the output are rounded to 2^-9 each, over records up to 4.
BFLOAT16 = {"rtol": 2.0**-7, "atol": 4 * 2.0**-8}


@pytest.fixture(params=list(WAYS))
def way(request, monkeypatch):
    """Runs a test by each way; the way must not change the result."""
    monkeypatch.setattr(module, "DENSE_SHARE", WAYS[request.param])
    return request.param


@dataclass
class Case:
    """Arguments of one call; the pools are NaN wherever no record was written."""

    q: torch.Tensor
    window: torch.Tensor
    window_pool: torch.Tensor
    window_layout: RecordLayout
    comp: torch.Tensor | None
    comp_pool: torch.Tensor | None
    comp_layout: RecordLayout | None
    sinks: torch.Tensor
    comp_lengths: torch.Tensor | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, out_scale=1.0):
        return sparse_attention(
            self.q,
            self.window,
            self.window_pool,
            self.window_layout,
            self.comp,
            self.comp_pool,
            self.comp_layout,
            self.sinks,
            SCALE,
            out_scale,
            self.comp_lengths,
            self.rotation,
        )

    def exact(self):
        """Float64, one token after another, from the very definition."""
        num_tokens, num_heads, dim = self.q.shape
        out = torch.zeros(num_tokens, num_heads, dim, dtype=torch.float64)
        lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
        for t in range(num_tokens):
            records = torch.cat(
                [
                    read_records(pool, slots[used(slots, pool, layout)], layout).double()
                    for slots, pool, layout in self.lists(t)
                ]
            )
            if len(records):
                scores = self.q[t].double() @ records.mT * SCALE
                lse[t] = scores.logsumexp(-1)
                with_sink = torch.cat((scores, self.sinks.double()[:, None]), -1)
                weights = (with_sink - with_sink.logsumexp(-1, keepdim=True)).exp()[:, :-1]
                # An infinite sink takes the whole weight; inf - inf has no value.
                weights = torch.where((self.sinks == math.inf)[:, None], 0.0, weights)
                out[t] = weights @ records
            if self.rotation is not None:
                positions, table = self.rotation
                cos, sin = table[int(positions[t])].double().chunk(2)
                # A turn by minus the angle is the product with the conjugate.
                pairs = torch.view_as_complex(out[t, :, -64:].unflatten(-1, (32, 2)).contiguous())
                turned = torch.view_as_real(pairs * torch.complex(cos, -sin)).flatten(-2)
                out[t, :, -64:] = turned
        return out, lse

    def lists(self, t):
        lists = [(self.window[t], self.window_pool, self.window_layout)]
        if self.comp is not None:
            length = self.comp.shape[1]
            if self.comp_lengths is not None:
                length = max(0, int(self.comp_lengths[t]))
            lists.append((self.comp[t, :length], self.comp_pool, self.comp_layout))
        return lists


def used(slots, pool, layout):
    return (slots >= 0) & (slots < len(pool) * layout.page_size)


def pool_of(layout, num_records):
    pool = cases.garbage_pool(layout, num_pages=-(-num_records // layout.page_size) + 1, padding=64)
    slots = torch.randperm(num_records + layout.page_size // 2)[:num_records]
    write_records(torch.randn(num_records, 512), slots, pool, layout)
    return pool, slots


def prefill(length, heads=4, window=128, dtype=torch.float32, kv_format=KVFormat.NVFP4):
    """Tokens of one request: the last `window` records and every second visible entry."""
    window_layout, comp_layout = RecordLayout(kv_format, 64), RecordLayout(kv_format, 2)
    window_pool, slots = pool_of(window_layout, length)
    comp_pool, entries = pool_of(comp_layout, max(1, length // 4))
    token = torch.arange(length)
    past = token[:, None] - torch.arange(window)
    window_slots = slots[past.clamp(min=0)].masked_fill(past < 0, -1)
    index = torch.arange(0, len(entries), 2)
    comp_slots = entries[index].expand(length, -1)
    comp_slots = comp_slots.masked_fill(index >= ((token + 1) // 4)[:, None], -1)
    q = torch.randn(length, heads, 512).to(dtype)
    return Case(
        q,
        window_slots,
        window_pool,
        window_layout,
        comp_slots,
        comp_pool,
        comp_layout,
        torch.randn(heads),
    )


def check(case, tolerance):
    out, lse = case.run()
    exact_out, exact_lse = case.exact()
    assert out.dtype is case.q.dtype
    torch.testing.assert_close(out.double(), exact_out, **tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, **FLOAT32)


@pytest.mark.parametrize("length", cases.LENGTHS)
def test_prefill_lengths(length, way):
    check(prefill(length, heads=2), FLOAT32)


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("heads", [1, 8])
def test_bf16_queries(way, heads, kv_format):
    check(prefill(150, heads, dtype=torch.bfloat16, kv_format=kv_format), BFLOAT16)


def decode(num_tokens, window=128, comp=64, heads=8):
    """Tokens that share nothing."""
    layout = RecordLayout(KVFormat.NVFP4, 64)
    window_pool, slots = pool_of(layout, num_tokens * window)
    comp_pool, entries = pool_of(layout, num_tokens * comp)
    return Case(
        torch.randn(num_tokens, heads, 512),
        slots.view(num_tokens, window),
        window_pool,
        layout,
        entries.view(num_tokens, comp),
        comp_pool,
        layout,
        torch.randn(heads),
    )


def turned(case, dtype=torch.int64):
    """The case with an output turned back by positions in no order."""
    positions = torch.randint(0, 4096, (len(case.q),)).to(dtype)
    return replace(case, rotation=(positions, build_rope_table(4096, 1e4)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heads", [1, 8])
def test_output_turned_back(way, heads, dtype):
    case = turned(prefill(150, heads), dtype)
    case.window[2], case.comp[2] = -1, -1
    check(case, FLOAT32)
    assert not case.run()[0][2].any()
    plain = replace(case, rotation=None).run()[0]
    # The one thing that differs from the standalone operation in float32 is nothing.
    assert torch.equal(case.run()[0], inverse_rope(plain, *case.rotation))
    assert torch.equal(case.run()[0][..., :-64], plain[..., :-64])
    # In bf16 it is rounded once, after the turn; the tolerance of what is turned grows by
    # |cos| + |sin| <= sqrt(2).
    check(replace(case, q=case.q.bfloat16()), {**BFLOAT16, "atol": BFLOAT16["atol"] * math.sqrt(2)})
    halved, _ = case.run(out_scale=0.5)
    assert torch.equal(halved, case.run()[0] * 0.5)


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_decode(num_tokens, way):
    check(decode(num_tokens), FLOAT32)


def test_memory_bounds_do_not_change_the_result(monkeypatch, way):
    case = prefill(70)
    out, lse = case.run()
    monkeypatch.setattr(module, "MAX_GATHERED", 3 * 512 * 140)
    monkeypatch.setattr(module, "MAX_SCORES", 1)
    small_out, small_lse = case.run()
    torch.testing.assert_close(small_out, out, **FLOAT32)
    torch.testing.assert_close(small_lse, lse, **FLOAT32)


def test_the_rule_takes_dense_for_prefill_and_gather_for_decode(monkeypatch):
    taken = []
    gather = module._gather
    monkeypatch.setattr(module, "_gather", lambda *args: taken.append(1) or gather(*args))
    prefill(64).run()
    assert not taken
    decode(4).run()
    assert taken


def test_window_only(way):
    case = prefill(40)
    check(replace(case, comp=None, comp_pool=None, comp_layout=None), FLOAT32)


def test_duplicates_count_each_time(way):
    case = prefill(20)
    case.window[:, 3] = case.window[:, 0]
    case.comp[:, 1] = case.comp[:, 0]
    check(case, FLOAT32)
    two = replace(case, window=case.window[:, :1].repeat(1, 2), comp=None)
    one = replace(case, window=case.window[:, :1], comp=None)
    torch.testing.assert_close(two.run()[1], one.run()[1] + math.log(2), **FLOAT32)


def test_garbage_slots_are_masked(way):
    case = prefill(30)
    limit = len(case.window_pool) * 64
    case.window[5, :6] = torch.tensor([*cases.GARBAGE_SLOTS, limit])
    case.comp[29, :3] = torch.tensor(cases.GARBAGE_SLOTS[1:4])
    check(case, FLOAT32)
    check(replace(case, window=cases.strided(case.window), q=cases.strided(case.q)), FLOAT32)


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 200.0, -200.0, 0.0])
def test_sinks(sink, way):
    case = prefill(12)
    case.sinks[1] = sink
    check(case, FLOAT32)
    if sink == math.inf:
        assert not case.run()[0][:, 1].any()


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.inf])
def test_no_record_at_all(sink, way):
    case = prefill(6)
    case.window[2], case.comp[2] = -1, -1
    case.sinks[:] = sink
    out, lse = case.run()
    assert not out[2].any()
    assert (lse[2] == -math.inf).all()
    assert out[3].isfinite().all()


def test_zero_lengths(way):
    case = prefill(4)
    empty = replace(case, window=case.window[:, :0], comp=None)
    out, lse = empty.run()
    assert not out.any()
    assert (lse == -math.inf).all()
    check(replace(case, comp=case.comp[:, :0]), FLOAT32)
    none = replace(case, q=case.q[:0], window=case.window[:0], comp=case.comp[:0])
    assert none.run()[0].shape == (0, 4, 512)


def test_lengths_cut_the_compressed_list(way):
    case = prefill(30)
    case.comp_lengths = torch.randint(0, case.comp.shape[1] + 1, (30,), dtype=torch.int32)
    case.comp_lengths[:4] = torch.tensor([-5, 0, 1, case.comp.shape[1] + 9])
    # What lies beyond is another request's: slots that exist, of records that are NaN.
    beyond = torch.arange(case.comp.shape[1]) >= case.comp_lengths[:, None]
    poison = case.comp_pool.shape[0] * case.comp_layout.page_size - 1
    write_records(
        torch.full((1, 512), math.nan), torch.tensor([poison]), case.comp_pool, case.comp_layout
    )
    case.comp[beyond] = poison
    check(case, FLOAT32)
    cut = replace(case, comp=case.comp.masked_fill(beyond, -1), comp_lengths=None)
    for got, want in zip(case.run(), cut.run(), strict=True):
        assert torch.equal(got, want)


def test_lengths_without_a_compressed_list_are_ignored(way):
    case = prefill(5)
    window = replace(case, comp=None, comp_pool=None, comp_layout=None)
    cut = replace(window, comp_lengths=torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32))
    assert torch.equal(cut.run()[0], window.run()[0])


def test_a_poisoned_record_reaches_only_the_tokens_that_list_it(way):
    case = prefill(50)
    clean = case.run()[0]
    write_records(
        torch.full((1, 512), math.nan), case.window[20, :1], case.window_pool, case.window_layout
    )
    out, _ = case.run()
    listing = (case.window == case.window[20, 0]).any(dim=1)
    assert listing.sum() == 30
    assert out[listing].isnan().all()
    torch.testing.assert_close(out[~listing], clean[~listing], **FLOAT32)


def test_large_scores_do_not_overflow(way):
    case = prefill(30)
    case.q *= 1000
    # Scores reach 10^4 and float32 resolves them to 10^-3, so near ties shift by that much.
    out, lse = case.run()
    exact_out, exact_lse = case.exact()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=3e-2)


def test_out_scale_and_the_power_of_two_factor(way):
    case = prefill(30)
    out, lse = case.run()
    halved, same = case.run(out_scale=0.5)
    assert torch.equal(halved, out * 0.5)
    assert torch.equal(same, lse)


def test_causal_window_attention_is_transformers(way):
    length, window, heads = 60, 16, 4
    layout = RecordLayout(KVFormat.NVFP4, 64)
    pool, slots = pool_of(layout, length)
    records = read_records(pool, slots, layout)
    past = torch.arange(length)[:, None] - torch.arange(window)
    case = Case(
        torch.randn(length, heads, 512),
        slots[past.clamp(min=0)].masked_fill(past < 0, -1),
        pool,
        layout,
        None,
        None,
        None,
        torch.randn(heads),
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = torch.zeros(length, length).masked_fill((distance < 0) | (distance >= window), -math.inf)
    attention = SimpleNamespace(num_key_value_groups=heads, sinks=case.sinks, training=False)
    keys = records[None, None]
    q = case.q.transpose(0, 1)[None]
    expected, _ = eager_attention_forward(attention, q, keys, keys, mask, SCALE)
    torch.testing.assert_close(case.run()[0], expected[0], **FLOAT32)

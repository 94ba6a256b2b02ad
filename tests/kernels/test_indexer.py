"""Indexer scores against transformers; top-k against a sort, with ties and hostile lengths."""

import math

import cases
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Indexer,
    DeepseekV4IndexerScorer,
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
)

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.kernels.reference import indexer
from sglang_dsv4.kernels.reference.hadamard import hadamard_transform
from sglang_dsv4.kernels.reference.indexer import (
    indexer_logits,
    indexer_topk,
    select_topk,
)
from sglang_dsv4.kernels.reference.indexer_key import (
    read_indexer_keys,
    write_indexer_keys,
)
from sglang_dsv4.kernels.reference.indexer_query import indexer_query
from sglang_dsv4.kernels.reference.rope import YarnParams, build_rope_table

# Page numbers of a table's unused end: never looked at.
GARBAGE_PAGES = (-1, -(2**31), 2**31 - 1, 10**6, -2)
LAYOUT = IndexerLayout(KVFormat.NVFP4, 64)
TABLE = build_rope_table(4096, 160000.0, yarn=YarnParams(16, 65536))


def expected_topk(logits, visible, topk):
    """By a stable sort of python pairs: descending score, then ascending index."""
    rows = []
    for scores, seen in zip(logits.tolist(), visible.tolist(), strict=True):
        ranked = sorted(
            (-math.inf if math.isnan(s) else s, -i) for i, s in enumerate(scores) if seen[i]
        )
        chosen = sorted(-i for _, i in ranked[::-1][:topk])
        rows.append(chosen + [-1] * (topk - len(chosen)))
    return torch.tensor(rows)


def test_logits_are_transformers_scores():
    scorer = cases.randomise(DeepseekV4IndexerScorer(cases.hf_config()))
    q, keys, hidden = torch.randn(6, 4, 128), torch.randn(9, 128), torch.randn(6, 32)
    with torch.no_grad():
        expected = scorer(q[None], keys[None], hidden[None])[0]
        weights = scorer.weights_proj(hidden) * 128**-0.5 * 4**-0.5
    # 128 products and 4 heads in float32, scores of order 1.
    actual = indexer_logits(hadamard_transform(q), weights, hadamard_transform(keys))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    own = indexer_logits(q, weights, keys.expand(6, 9, 128))
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_bf16_queries_lose_nothing_over_fp4_keys():
    q, keys = cases.round_fp4(torch.randn(80, 64, 128)), cases.round_fp4(torch.randn(70, 128))
    weights = torch.randn(80, 64)
    assert torch.equal(q.bfloat16().float(), q)
    exact = torch.einsum("th,thl->tl", weights.double(), (q.double() @ keys.double().mT).relu())
    actual = indexer_logits(q.bfloat16(), weights, keys)
    # Exact products; 64 head sums of terms up to 40 in float32. A bf16 result would be off by 0.1.
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=2e-3)


def test_query_is_rotated_and_transformed():
    q, positions = torch.randn(5, 4, 128), torch.randint(0, 4096, (5,))
    rotary = DeepseekV4RotaryEmbedding(cases.hf_config())
    cos, sin = rotary(q, positions[None], layer_type="compress")
    rotated = apply_rotary_pos_emb(q.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1)
    actual = indexer_query(q, positions, TABLE)
    # 128 additions in float32 on values of order 1.
    torch.testing.assert_close(actual, hadamard_transform(rotated), rtol=1e-5, atol=1e-5)
    # One rounding to bf16 at the end.
    half = indexer_query(q.bfloat16(), positions, TABLE)
    assert torch.equal(half, indexer_query(q.bfloat16().float(), positions, TABLE).bfloat16())


def test_whole_indexer_selects_what_transformers_selects():
    module = cases.randomise(DeepseekV4Indexer(cases.hf_config()))
    length = 90
    hidden, residual = torch.randn(1, length, 32), torch.randn(1, length, 16)
    positions = torch.arange(length)[None]
    seen = {}
    module.scorer.register_forward_hook(
        lambda m, args, out: seen.update(q=args[0], k=args[1], scores=out[0])
    )
    with torch.no_grad():
        expected = module(hidden, residual, positions, None, 0)[0]
        weights = module.scorer.weights_proj(hidden)[0] * 128**-0.5 * 4**-0.5
    visible = (torch.arange(length) + 1) // 4
    logits = indexer_logits(seen["q"][0], weights, seen["k"][0])
    mask = torch.arange(logits.shape[1]) < visible[:, None]
    actual = select_topk(logits, mask, 8)

    def scores(chosen):
        picked = seen["scores"].gather(1, chosen.clamp(min=0))
        return picked.masked_fill(chosen < 0, -math.inf).sort().values

    # By score and not by index: heads that all clip to zero tie, and transformers' choice among
    # ties is arbitrary. Scores agree to float32 sums of 128 products.
    torch.testing.assert_close(scores(actual), scores(expected), rtol=1e-5, atol=1e-5)


def test_select_ties_nan_and_infinities():
    logits = torch.randint(-3, 3, (200, 37)).float()
    logits[3], logits[4, ::2], logits[5, ::3] = 1.0, math.nan, -math.inf
    logits[6, 1], logits[7] = math.inf, math.nan
    visible = torch.arange(37) < torch.randint(0, 38, (200, 1))
    visible[3:8] = True
    visible[8], visible[9] = False, torch.arange(37) % 2 == 0
    for topk in (1, 8, 36, 37, 50):
        assert torch.equal(select_topk(logits, visible, topk), expected_topk(logits, visible, topk))


def batch(lengths, tokens_each, visible=None):
    """Requests of `lengths` entries on shuffled pages, `tokens_each` tokens in each.

    Pages beyond a request's entries are numbers that name no page.
    """
    pages_each = [-(-length // 64) for length in lengths]
    pool = cases.garbage_pool(LAYOUT, num_pages=sum(pages_each) + 3)
    order = torch.randperm(len(pool))
    garbage = torch.tensor(GARBAGE_PAGES)[torch.randint(len(GARBAGE_PAGES), (len(lengths), 5))]
    key_pages = garbage[:, : max(*pages_each, 1) + 1].int()
    for row, count in enumerate(pages_each):
        key_pages[row, :count] = order[sum(pages_each[:row]) :][:count]
        entry = torch.arange(lengths[row])
        slots = key_pages[row].long()[entry // 64] * 64 + entry % 64
        write_indexer_keys(torch.randn(lengths[row], 128), slots, pool, LAYOUT)
    row_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(tokens_each))
    if visible is None:
        visible = (torch.rand(len(row_of_token)) * (torch.tensor(lengths)[row_of_token] + 1)).long()
    q = cases.round_fp4(torch.randn(len(row_of_token), 4, 128)).bfloat16()
    return q, torch.randn(len(q), 4), pool, LAYOUT, key_pages, row_of_token, visible


def brute_force(q, weights, pool, layout, key_pages, row_of_token, visible, topk):
    """One token at a time, one slot list each, in double precision."""
    selected = torch.full((len(q), topk), -1)
    for token in range(len(q)):
        pages, seen = key_pages[row_of_token[token]].tolist(), int(visible[token])
        slots = torch.tensor([pages[e // 64] * 64 + e % 64 for e in range(seen)], dtype=torch.int64)
        keys = read_indexer_keys(pool, slots, layout).double()
        scores = (keys @ q[token].double().mT).relu() @ weights[token].double()
        entries = expected_topk(scores[None], torch.ones(1, seen, dtype=torch.bool), topk)[0]
        selected[token] = torch.where(
            entries < 0, -1, torch.cat([slots, slots.new_zeros(1)])[entries]
        )
    return selected


@pytest.mark.parametrize(
    ("lengths", "tokens_each"),
    [
        ([200], [60]),
        ([0, 1, 7, 8, 9, 130], [1, 1, 1, 1, 1, 1]),
        ([90, 0, 64, 8], [40, 2, 5, 1]),
        ([65, 6], [9, 1]),
    ],
)
@pytest.mark.parametrize("max_scores", [indexer.MAX_SCORES, 1 << 11])
def test_topk_of_batches(lengths, tokens_each, max_scores, monkeypatch):
    monkeypatch.setattr(indexer, "MAX_SCORES", max_scores)
    args = batch(lengths, tokens_each)
    shuffle = torch.randperm(len(args[0]))
    q, weights, pool, layout, key_pages, row_of_token, visible = args
    args = (
        cases.strided(q[shuffle]),
        weights[shuffle],
        pool,
        layout,
        key_pages,
        row_of_token[shuffle],
        visible[shuffle],
    )
    assert torch.equal(indexer_topk(*args, topk=8), brute_force(*args, topk=8))


@pytest.mark.parametrize("tokens_each", [1, 6])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 63, 64, 65, 127, 128, 129])
def test_every_visible_count_around_topk_and_pages(length, tokens_each):
    for seen in {0, 1, 8, 9, 63, 64, 65, length}:
        if seen <= length:
            args = batch([length], [tokens_each], torch.full((tokens_each,), seen))
            assert torch.equal(indexer_topk(*args, topk=8), brute_force(*args, topk=8)), seen


def test_all_visible_entries_are_returned_without_scoring():
    args = list(batch([20], [5], torch.full((5,), 20)))
    args[0] = args[0] * math.nan
    expected = args[4][0, 0] * 64 + torch.cat([torch.arange(20), torch.full((4,), -1)])
    expected[20:] = -1
    assert torch.equal(indexer_topk(*args, topk=24), expected.expand(5, 24))


def test_no_tokens_and_no_entries():
    args = batch([0, 0], [5, 1])
    assert torch.equal(indexer_topk(*args, topk=4), torch.full((6, 4), -1))
    q, weights, pool, layout, key_pages, rows, visible = args
    none = indexer_topk(q[:0], weights[:0], pool, layout, key_pages, rows[:0], visible[:0], 4)
    assert none.shape == (0, 4)


def test_visible_beyond_the_pages_is_clamped():
    args = list(batch([64], [5]))
    args[4], args[6] = args[4][:, :1], torch.full((5,), 1000)
    expected = brute_force(*args[:6], args[6].clamp(max=64), topk=4)
    assert torch.equal(indexer_topk(*args, topk=4), expected)

"""Inputs and checks of the indexer on a GPU.

Selection is compared bit for bit where every score is an integer that float32 holds in any order
of summation, and otherwise up to swaps among scores that lie within the rounding bound.
"""

import math
from dataclasses import dataclass

import torch

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.kernels.indexer.indexer import indexer_topk
from sglang_dsv4.kernels.reference.indexer import entry_slots
from sglang_dsv4.kernels.reference.indexer import indexer_topk as reference_topk
from sglang_dsv4.kernels.reference.indexer_key import read_indexer_keys, write_indexer_keys

LAYOUT = IndexerLayout(KVFormat.NVFP4, 64)
GARBAGE_PAGES = (-1, -(2**31), 2**31 - 1, 10**6)
# Error of a score relative to the sum of the sizes of its 128 Hi products. The tensor cores add 16
# products at a time to float32 sums, cutting bits below 2^-22 of the largest term: 8 steps, then
# Hi weighted terms and 4 roundings in float32: (8 * 4 + 64 + 4) * 2^-24 is below 2^-17.
SCORE_ERROR = 2.0**-17
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass
class Inputs:
    """Arguments of `indexer_topk` but for topk, on the GPU."""

    q: torch.Tensor
    weights: torch.Tensor
    pool: torch.Tensor
    key_pages: torch.Tensor
    row_of_token: torch.Tensor
    visible: torch.Tensor

    def arguments(self):
        return (
            self.q,
            self.weights,
            self.pool,
            LAYOUT,
            self.key_pages,
            self.row_of_token,
            self.visible,
        )

    def run(self, topk):
        return indexer_topk(*self.arguments(), topk)


def make_keys(count, exact, generator):
    """Keys [count, 128]; exact ones are e2m1 values with scale 1."""
    if not exact:
        keys = torch.randn(count, 128, generator=generator)
        return keys * 2.0 ** torch.randint(-3, 4, (count, 1), generator=generator).float()
    keys = E2M1[torch.randint(8, (count, 128), generator=generator)]
    keys = keys * (torch.randint(2, (count, 128), generator=generator) * 2 - 1)
    keys[:, ::32] = 6.0
    return keys


def make_inputs(lengths, visible, row_of_token, heads, exact=False, seed=0, spare_pages=2):
    """Requests of `lengths` entries on shuffled pages of a pool of NaN bytes."""
    generator = torch.Generator().manual_seed(seed)
    pages_each = [-(-length // 64) for length in lengths]
    pool = torch.full((sum(pages_each) + 3, LAYOUT.page_bytes + 32), 0xFF, dtype=torch.uint8)
    pool = pool[:, : LAYOUT.page_bytes]
    order = torch.randperm(len(pool), generator=generator)
    width = max(*pages_each, 1) + spare_pages
    choice = torch.randint(len(GARBAGE_PAGES), (len(lengths), width), generator=generator)
    key_pages = torch.tensor(GARBAGE_PAGES)[choice].int()
    for row, (length, count) in enumerate(zip(lengths, pages_each, strict=True)):
        key_pages[row, :count] = order[sum(pages_each[:row]) :][:count]
        slots = entry_slots(key_pages[row], length, 64)
        write_indexer_keys(make_keys(length, exact, generator), slots, pool, LAYOUT)
    tokens = len(row_of_token)
    wide = torch.zeros(tokens, heads, 256, dtype=torch.bfloat16)
    if exact:
        values = torch.randint(-4, 5, (tokens, heads, 128), generator=generator).float()
        weights = torch.randint(-3, 5, (tokens, heads), generator=generator).float()
    else:
        values = torch.randn(tokens, heads, 128, generator=generator)
        weights = torch.randn(tokens, heads, generator=generator)
    wide[..., 128:] = values
    # The pool keeps its padding between pages.
    whole = torch.empty_strided(pool.shape, pool.stride(), dtype=torch.uint8, device="cuda")
    return Inputs(
        wide.cuda()[..., 128:],
        weights.cuda(),
        whole.copy_(pool),
        key_pages.cuda(),
        torch.tensor(row_of_token, device="cuda"),
        torch.tensor(visible, device="cuda"),
    )


def exact_scores(inputs, token):
    """(scores, sizes) of a token's visible entries in double precision."""
    seen = int(inputs.visible[token])
    slots = entry_slots(inputs.key_pages[inputs.row_of_token[token]], seen, 64)
    keys = read_indexer_keys(inputs.pool, slots, LAYOUT).double()
    q, weights = inputs.q[token].double(), inputs.weights[token].double()
    return (keys @ q.mT).relu() @ weights, (keys.abs() @ q.abs().mT) @ weights.abs()


def check_exact(inputs, topk):
    """The selection is the reference's, slot for slot."""
    found = inputs.run(topk)
    wanted = reference_topk(*inputs.arguments(), topk)
    same = (found == wanted).all(dim=1)
    if not same.all():
        token = int((~same).nonzero()[0])
        place = int((found[token] != wanted[token]).nonzero()[0])
        raise AssertionError(
            f"{int((~same).sum())} of {len(same)} tokens differ, first {token} (visible "
            f"{int(inputs.visible[token])}, topk {topk}) at place {place}: found "
            f"{found[token, place : place + 6].tolist()}, wanted "
            f"{wanted[token, place : place + 6].tolist()}"
        )


def check_close(inputs, topk):
    """The selection is right up to swaps among scores within the rounding bound."""
    found = inputs.run(topk)
    for token, seen in enumerate(inputs.visible.tolist()):
        chosen = found[token]
        count = min(seen, topk)
        assert (chosen[count:] == -1).all(), (token, chosen[count:][:8])
        pages = inputs.key_pages[inputs.row_of_token[token]]
        slots = entry_slots(pages, seen, 64)
        entry_of = torch.full((len(inputs.pool) * 64,), -1, device="cuda")
        entry_of[slots] = torch.arange(seen, device="cuda")
        entries = entry_of[chosen[:count]]
        assert (entries >= 0).all() and (entries.diff() > 0).all(), (token, entries[:8])
        if seen > topk:
            scores, sizes = exact_scores(inputs, token)
            bound = sizes.max() * SCORE_ERROR
            kth = scores.topk(topk).values[-1]
            assert (scores[entries] >= kth - 2 * bound).all(), (token, seen)
            left = torch.ones(seen, dtype=torch.bool, device="cuda")
            left[entries] = False
            assert (scores[left] <= kth + 2 * bound).all(), (token, seen)


def spread(length, tokens):
    """`tokens` visible counts of a request, among them the ones around topk and page borders."""
    edges = [v for v in (0, 1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257) if v <= length]
    return [*(length - i * (length // 7) // 9 for i in range(tokens)), *edges][-tokens:]


def hostile_inputs():
    """(name, inputs, topk, exact) of every kind of batch."""
    for heads in (1, 4, 8, 9, 20, 63, 64):
        lengths = [700, 0, 257, 1, 64]
        visible = [700, 0, 257, 1, 64]
        inputs = make_inputs(lengths, visible, list(range(5)), heads, exact=True, seed=heads)
        yield f"decode heads {heads}", inputs, 100, True
    for topk in (1, 2, 63, 64, 65, 511, 512, 1024, 2048):
        counts = [0, 1, topk, topk + 1, 5000, 4999, 4097, 4096]
        lengths = [max(c, 1) for c in counts]
        inputs = make_inputs(lengths, counts, list(range(8)), 8, exact=True, seed=topk)
        yield f"topk {topk}", inputs, topk, True
    for length in (1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 8192, 8193, 20000):
        inputs = make_inputs([length], [length], [0], 4, exact=True, seed=length, spare_pages=0)
        yield f"one row of {length}", inputs, min(length, 37), True
    for tokens in (2, 3, 7, 8, 9, 33):
        rows = [0] * tokens + [1] + [2] * tokens
        visible = [*spread(900, tokens), 300, *spread(257, tokens)]
        inputs = make_inputs([900, 300, 257], visible, rows, 16, exact=True, seed=tokens)
        yield f"shared by {tokens}", inputs, 60, True
    shuffled = make_inputs([500, 600], [500, 600] * 20, [0, 1] * 20, 64, exact=True, seed=5)
    yield "tokens of two requests in turn", shuffled, 100, True
    ties = make_inputs([3000, 3000], [3000, 2999], [0, 1], 64, exact=True, seed=6)
    ties.weights.zero_()
    yield "all scores 0 or -0", ties, 512, True
    few = make_inputs([9000] * 3, [9000, 8999, 513], [0, 1, 2], 8, exact=True, seed=7)
    few.q.zero_()
    few.q[:, :, 5] = 1.0
    yield "few distinct scores", few, 512, True
    odd = make_inputs([3000] * 4, [3000] * 4, list(range(4)), 8, exact=True, seed=8)
    odd.weights[0, 3], odd.weights[1, 3] = math.nan, math.inf
    odd.weights[2, 3] = -math.inf
    yield "NaN and infinite weights", odd, 512, True
    poisoned = make_inputs([3000], [3000] * 3, [0] * 3, 8, exact=True, seed=9)
    poisoned.pool[::2, 64 * 64 : 64 * 64 + 40] = 0xFF
    yield "NaN keys", poisoned, 1024, True
    for heads in (4, 64):
        visible = [*spread(2500, 20), 700, 2100]
        rows = [0] * 20 + [1, 2]
        inputs = make_inputs([2500, 700, 2100], visible, rows, heads, seed=heads + 20)
        yield f"random, heads {heads}", inputs, 512, False
    wide = make_inputs([4000], [4000] * 9, [0] * 9, 64, seed=30)
    wide.q.mul_(1e12)
    wide.weights.mul_(1e-20)
    yield "large queries, small weights", wide, 512, False

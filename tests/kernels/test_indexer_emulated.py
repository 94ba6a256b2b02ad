"""The indexer kernels' own source, lane by lane on the CPU, against the reference."""

import math

import cases
import numpy as np
import pytest
import torch
from indexer_emulator import IndexerDevice

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.kernels.indexer import scores, topk
from sglang_dsv4.kernels.reference import indexer as reference
from sglang_dsv4.kernels.reference.indexer_key import read_indexer_keys, write_indexer_keys

LAYOUT = IndexerLayout(KVFormat.NVFP4, 64)


def requests(lengths, pages_each):
    """(pool, key_pages) of requests on shuffled pages; unused pages are garbage numbers."""
    pool = cases.garbage_pool(LAYOUT, len(lengths) * pages_each + 2, padding=64)
    order = torch.randperm(len(pool))
    key_pages = torch.full((len(lengths), pages_each), -(2**31), dtype=torch.int32)
    for row, length in enumerate(lengths):
        used = -(-length // 64)
        key_pages[row, :used] = order[row * pages_each :][:used]
        slots = reference.entry_slots(key_pages[row], length, 64)
        # Scale bytes far apart inside a key and between keys.
        keys = torch.randn(length, 128) * 2.0 ** torch.randint(-30, 30, (length, 1))
        keys[::3, 32:64] *= 2.0**-20
        write_indexer_keys(keys, slots, pool, LAYOUT)
    return pool, key_pages


def emulate_scores(batch, limit, tokens, wgmma, blocks):
    q, weights, pool, key_pages, row_of_token, visible = batch
    device = IndexerDevice(1 << 24)
    heads = -(-q.shape[1] // 8) * 8
    source = device.load(scores)
    shape = scores.ScoreShape(heads, tokens, 8, wgmma)
    kernels = [source["IndexerScores"](shape) for _ in range(16)]
    put = device.tensor
    out = put(np.full((len(q), key_pages.shape[1] * 64), np.nan, np.float32))
    operands = scores.ScoreOperands(
        put(q.view(torch.int16).numpy()),
        put(weights.numpy()),
        put(pool.contiguous().numpy()),
        put(key_pages.numpy()),
        put(row_of_token.numpy()),
        put(visible.numpy()),
        out,
    )

    def body():
        kernels[device.local.warp].kernel(operands, np.int32(limit))

    device.launch(body, (blocks, 1, 1), shape.threads, scores.shared_bytes(shape))
    return torch.from_numpy(out.read())


@pytest.mark.parametrize(
    ("heads", "tokens", "wgmma", "blocks"),
    [
        (1, 1, False, 3),
        (64, 2, False, 3),
        (20, 4, True, 3),
        (9, 8, True, 2),
        (64, 1, True, 3),
        (16, 1, True, 1),
        (64, 1, True, 5),
    ],
)
def test_scores(heads, tokens, wgmma, blocks):
    lengths, limit = [900, 3, 130], 5
    pool, key_pages = requests(lengths, 15)
    row_of_token = torch.tensor([0, 0, 1, 1, 0, 2, 2, 2, 2, 2, 1])
    visible = torch.tensor([900, 431, 3, 0, 6, 130, 4, 129, 64, 65, 0])
    q = torch.randn(len(visible), heads, 128).bfloat16()
    weights = torch.randn(len(visible), heads)
    batch = (q, weights, pool, key_pages, row_of_token, visible)
    found = emulate_scores(batch, limit, tokens, wgmma, blocks)
    for token, seen in enumerate(visible.tolist()):
        if seen > limit:
            slots = reference.entry_slots(key_pages[row_of_token[token]], seen, 64)
            keys = read_indexer_keys(pool, slots, LAYOUT).double()
            dots = keys @ q[token].double().mT
            wanted = dots.relu() @ weights[token].double()
            size = (keys.abs() @ q[token].double().abs().mT) @ weights[token].double().abs()
            # Float32 sums of 128 products and `heads` terms: far below 2^-18 of their sizes.
            assert ((found[token, :seen] - wanted).abs() <= size * 2**-18).all(), token


def emulate_topk(logits, key_pages, row_of_token, visible, count, threads, chunk):
    device = IndexerDevice(1 << 24)
    shape = topk.TopkShape(threads, chunk, 1, 8)
    source = device.load(topk)
    kernels = [source["SelectTopk"](shape) for _ in range(32)]
    put = device.tensor
    out = put(np.full((len(logits), count), -7, np.int64))
    operands = topk.TopkOperands(
        put(logits.numpy()),
        put(key_pages.numpy()),
        put(row_of_token.numpy()),
        put(visible.numpy()),
        out,
    )

    def body():
        kernels[device.local.warp].kernel(operands)

    device.launch(body, (len(logits), 1, 1), threads, shape.shared_bytes)
    return torch.from_numpy(out.read())


@pytest.mark.parametrize(
    ("pages", "count", "threads", "chunk"),
    [(4, 100, 1024, 8192), (129, 512, 1024, 8192), (129, 512, 256, 4096), (129, 1024, 512, 16384)],
)
def test_topk(pages, count, threads, chunk):
    length = pages * 64
    logits = torch.randn(6, length)
    logits[1] = torch.randint(-2, 3, (length,)).float() * torch.tensor(0.0)
    logits[2] = torch.randint(-2, 3, (length,)).float()
    logits[3, ::2], logits[3, 1::5], logits[3, 2::7] = math.nan, math.inf, -math.inf
    logits[4] = torch.randint(0, 2**31 - 1, (length,), dtype=torch.int32).view(torch.float32)
    visible = torch.tensor([length, length - 1, length, length, count + 1, count])
    key_pages = torch.randperm(3 * pages).view(3, pages).int()
    row_of_token = torch.tensor([0, 1, 2, 0, 1, 2])
    found = emulate_topk(logits, key_pages, row_of_token, visible, count, threads, chunk)
    mask = torch.arange(length) < visible[:, None]
    wanted = reference.select_topk(logits, mask, count)
    slots = reference.entry_slots(key_pages, length, 64)[row_of_token].gather(1, wanted.clamp(0))
    assert torch.equal(found, slots.masked_fill(wanted < 0, -1))

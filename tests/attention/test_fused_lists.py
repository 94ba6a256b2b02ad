"""The fused slot lists of a decode batch, number by number those of ``build_metadata``."""

import pytest
import torch
from interpreted import interpreted

from sglang_dsv4.attention.metadata import BatchRows, build_metadata

PAGE, WINDOW, TOPK = 256, 128, 64


def batch(lengths: list[int], context: int, padding: int = 0):
    """A decode batch over shuffled pages: (BatchRows, request-to-token table, window mapping).

    Padding rows are as in SGLang's graphs: length 1, slot 0.
    """
    draw = torch.Generator().manual_seed(len(lengths) + context)
    rows, per_request = len(lengths) + padding + 2, -(-context // PAGE)
    pages = torch.randperm(rows * per_request, generator=draw).view(rows, per_request) + 1
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :context]
    table = slots.int().contiguous()
    mapping = torch.randperm(int(table.max()) + 2, generator=draw)
    requests = torch.randperm(rows, generator=draw)[: len(lengths) + padding]
    seq_lens = torch.tensor(lengths + [1] * padding, dtype=torch.int64)
    locs = table[requests, seq_lens - 1].long()
    locs[len(lengths) :] = 0
    made = BatchRows(
        req_pool_indices=requests,
        prefix_lens=seq_lens - 1,
        seq_lens=seq_lens,
        positions=seq_lens - 1,
        out_cache_loc=locs,
        row_of_token=torch.arange(len(seq_lens)),
        max_seq_len=context,
        host_spans=None,
    )
    return made, table, mapping


def same(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    return ours.dtype == wanted.dtype and torch.equal(ours, wanted)


@pytest.mark.parametrize(
    ("lengths", "context", "padding", "ring"),
    [
        ([1], 100, 0, 128),
        # A window of four closes, one of 128, a page ends, one begins; two rows of padding.
        ([4, 3, 128, 127, 256, 257, 300, 512, 1000], 2048, 2, 128),
        # More pages than one block writes, and a context that is no multiple of the page.
        ([70_000, 5, 66_048], 70_001, 0, 128),
        ([255, 640], 1024, 1, 256),
    ],
)
def test_as_built_in_plain_torch(lengths, context, padding, ring, monkeypatch):
    fused = interpreted("sglang_dsv4.attention.fused_lists", monkeypatch)
    rows, *tables = batch(lengths, context, padding)
    sizes = dict(page_size=PAGE, sliding_window=WINDOW, c128_ring=ring)
    wanted = build_metadata(rows, *tables, **sizes)
    shapes = fused.ListShapes(PAGE, WINDOW, ring, TOPK)
    # SGLang's buffers are of either width.
    narrow = (rows.req_pool_indices.int(), rows.seq_lens.int())
    found = fused.decode_metadata(*narrow, rows.positions, rows.out_cache_loc, *tables, shapes)
    names = ("positions", "window_out", "window_slots", "row_of_token", "pages", "c4_visible")
    for name in (*names, "c128_visible"):
        assert same(getattr(found, name), getattr(wanted, name)), name
    for plan in ("plan_c4", "plan_c128"):
        ours, theirs = getattr(found, plan), getattr(wanted, plan)
        assert (ours.ratio, ours.disjoint) == (theirs.ratio, theirs.disjoint)
        for name in ("source", "positions", "slots", "write_rows", "write_locs"):
            assert same(getattr(ours, name), getattr(theirs, name)), (plan, name)
    assert same(found.hca_entries.slots, wanted.hca_entries.slots)
    assert same(found.hca_entries.lengths, wanted.hca_entries.lengths)
    assert same(found.csa_lengths(TOPK), wanted.csa_lengths(TOPK))


def test_a_batch_without_requests(monkeypatch):
    fused = interpreted("sglang_dsv4.attention.fused_lists", monkeypatch)
    rows, *tables = batch([], 512)
    inputs = (rows.req_pool_indices, rows.seq_lens, rows.positions, rows.out_cache_loc)
    shapes = fused.ListShapes(PAGE, WINDOW, 128, TOPK)
    assert fused.decode_metadata(*inputs, *tables, shapes).window_slots.shape == (0, WINDOW)

"""The slot lists against a slow per-token construction over a made-up paged allocation."""

from dataclasses import dataclass

import pytest
import torch

from sglang_dsv4.attention.metadata import C4_RING, BatchRows, build_metadata

PAGE, WINDOW, C128_RING = 256, 128, 128
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 513)


@dataclass
class World:
    """Pages of the full pool given to requests in random order, and their window pages."""

    req_to_token: torch.Tensor
    full_to_window: torch.Tensor


def make_world(rows: int, context: int) -> World:
    pages = rows * context // PAGE
    full_pages = torch.randperm(pages) + 1
    window_pages = torch.randperm(pages) + 1
    full_to_window = torch.zeros((pages + 1) * PAGE, dtype=torch.int64)
    for full, window in zip(full_pages.tolist(), window_pages.tolist(), strict=True):
        slots = torch.arange(PAGE)
        full_to_window[full * PAGE + slots] = window * PAGE + slots
    slots = full_pages[:, None] * PAGE + torch.arange(PAGE)
    return World(slots.reshape(rows, context).int(), full_to_window)


def make_batch(world: World, parts: list[tuple[int, int, int]]) -> BatchRows:
    """``parts``: (row of the request, tokens before the pass, tokens after it)."""
    positions = torch.cat([torch.arange(before, after) for _, before, after in parts])
    row = torch.cat(
        [torch.full((after - before,), i) for i, (_, before, after) in enumerate(parts)]
    )
    request = torch.tensor([r for r, _, _ in parts])
    return BatchRows(
        req_pool_indices=request,
        prefix_lens=torch.tensor([before for _, before, _ in parts]),
        seq_lens=torch.tensor([after for _, _, after in parts]),
        positions=positions,
        out_cache_loc=world.req_to_token[request[row], positions].long(),
        row_of_token=row,
        max_seq_len=max(after for _, _, after in parts),
    )


def build(world: World, batch: BatchRows):
    return build_metadata(
        batch,
        world.req_to_token,
        world.full_to_window,
        page_size=PAGE,
        sliding_window=WINDOW,
        c128_ring=C128_RING,
    )


def window_slot(world: World, request: int, position: int) -> int:
    return int(world.full_to_window[int(world.req_to_token[request, position])])


def state_row(world: World, request: int, position: int, ratio: int) -> int:
    if ratio == 128:
        return request * C128_RING + position % C128_RING
    slot = window_slot(world, request, position)
    return slot // PAGE * C4_RING + slot % C4_RING


CASES = (
    [pytest.param([(0, 0, n)], id=f"prefill-{n}") for n in LENGTHS]
    + [pytest.param([(2, n - 1, n)], id=f"decode-{n}") for n in LENGTHS]
    + [
        pytest.param([(0, 100, 227), (3, 0, 5), (1, 255, 513)], id="mixed-chunks"),
        pytest.param([(i, n - 1, n) for i, n in enumerate((4, 128, 257, 1))], id="decode-batch"),
    ]
)


@pytest.mark.parametrize("parts", CASES)
def test_slot_lists(parts):
    world = make_world(rows=4, context=768)
    batch = make_batch(world, parts)
    meta = build(world, batch)
    token = 0
    for row, (request, before, after) in enumerate(parts):
        for position in range(before, after):
            assert meta.window_out[token] == window_slot(world, request, position)
            seen = [p for p in range(position - WINDOW + 1, position + 1)]
            wanted = [window_slot(world, request, p) if p >= 0 else -1 for p in seen]
            assert meta.window_slots[token].tolist() == wanted
            assert meta.row_of_token[token] == row
            assert meta.c4_visible[token] == (position + 1) // 4
            assert meta.c128_visible[token] == (position + 1) // 128
            token += 1
        for ratio, slots in ((4, meta.c4_slots[row]), (128, meta.c128_slots[row])):
            entries = [
                int(world.req_to_token[request, w * ratio]) // ratio for w in range(after // ratio)
            ]
            assert slots.tolist() == entries + [-1] * (len(slots) - len(entries))
    assert token == len(batch.positions)


@pytest.mark.parametrize("parts", CASES)
def test_hca_tokens_see_whole_windows_only(parts):
    world = make_world(rows=4, context=768)
    batch = make_batch(world, parts)
    meta = build(world, batch)
    for token, slots in enumerate(meta.c128_token_slots.tolist()):
        position = int(batch.positions[token])
        assert sum(slot >= 0 for slot in slots) == (position + 1) // 128


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("parts", CASES)
def test_plans(parts, ratio):
    """Every window that closes reads each of its tokens from this pass or from its state row."""
    world = make_world(rows=4, context=768)
    batch = make_batch(world, parts)
    meta = build(world, batch)
    plan = meta.plan_c4 if ratio == 4 else meta.plan_c128
    width, tokens = (8 if ratio == 4 else 128), len(batch.positions)
    first_row = {}
    wanted_source, wanted_positions, wanted_slots = [], [], []
    token = 0
    for request, before, after in parts:
        first_row[request] = token
        for position in range(before, after):
            if position % ratio == ratio - 1:
                source = []
                for p in range(position - width + 1, position + 1):
                    if p < 0:
                        source.append(-1)
                    elif p >= before:
                        source.append(token - (position - p))
                    else:
                        source.append(tokens + state_row(world, request, p, ratio))
                wanted_source.append(source)
                wanted_positions.append(position - ratio + 1)
                wanted_slots.append(int(world.req_to_token[request, position]) // ratio)
            token += 1
    assert plan.source.tolist() == wanted_source
    assert plan.positions.tolist() == wanted_positions
    assert plan.slots.tolist() == wanted_slots


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("parts", CASES)
def test_state_that_later_windows_need_is_kept(parts, ratio):
    """What the next pass may ask of the state is written, once, and to a row of its own."""
    world = make_world(rows=4, context=768)
    batch = make_batch(world, parts)
    meta = build(world, batch)
    plan = meta.plan_c4 if ratio == 4 else meta.plan_c128
    locs = plan.write_locs.tolist()
    assert len(set(locs)) == len(locs)
    written = dict(zip(plan.write_rows.tolist(), locs, strict=True))
    width = 8 if ratio == 4 else 128
    token = 0
    for request, before, after in parts:
        for position in range(before, after):
            next_window = after // ratio * ratio
            needed_by_next_window = position >= next_window + ratio - width
            # A later request may share the prefix up to the end of any whole page.
            page_end = (position // PAGE + 1) * PAGE
            needed_by_prefix_hit = ratio == 4 and page_end <= after and position >= page_end - 4
            if needed_by_next_window or needed_by_prefix_hit:
                assert written[token] == state_row(world, request, position, ratio)
            token += 1


def test_no_tokens():
    world = make_world(rows=1, context=256)
    empty = torch.zeros(0, dtype=torch.int64)
    meta = build(world, BatchRows(empty, empty, empty, empty, empty, empty, 0))
    assert meta.window_slots.shape == (0, WINDOW)
    assert meta.plan_c4.source.shape == (0, 8)
    assert meta.plan_c128.source.shape == (0, 128)

"""The slot lists against a slow per-token construction over a made-up paged allocation."""

from dataclasses import dataclass, replace

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
        host_spans=[(before, after) for _, before, after in parts],
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
        pytest.param([(0, 256, 513), (3, 0, 300), (1, 511, 512)], id="whole-pages-before"),
        pytest.param([(0, 128, 256), (1, 4, 8)], id="whole-windows-before"),
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
        used = -(-after // PAGE)
        firsts = world.req_to_token[request, :after:PAGE]
        assert meta.pages[row, :used].tolist() == (firsts // PAGE).tolist()
    assert token == len(batch.positions)


@pytest.mark.parametrize("parts", CASES)
def test_hca_tokens_see_whole_windows_only(parts):
    world = make_world(rows=4, context=768)
    batch = make_batch(world, parts)
    entries = build(world, batch).hca_entries
    assert entries.lengths.dtype is torch.int32
    for token, (slots, length) in enumerate(zip(entries.slots, entries.lengths, strict=True)):
        request = int(batch.req_pool_indices[batch.row_of_token[token]])
        assert length == (int(batch.positions[token]) + 1) // 128
        firsts = [int(world.req_to_token[request, 128 * w]) for w in range(int(length))]
        assert slots[: int(length)].tolist() == [full // 128 for full in firsts]


@pytest.mark.parametrize("topk", [1, 64, 512])
def test_csa_lengths(topk):
    world = make_world(rows=4, context=768)
    batch = make_batch(world, [(0, 0, 513)])
    meta = build(world, batch)
    assert meta.csa_lengths(topk).tolist() == [min((p + 1) // 4, topk) for p in range(513)]


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
    written = {
        row: loc
        for row, loc in zip(plan.write_rows.tolist(), plan.write_locs.tolist(), strict=True)
        if loc >= 0
    }
    assert len(set(written.values())) == len(written)
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


@pytest.mark.parametrize("parts", CASES)
def test_disjoint_plans_read_no_row_that_they_write(parts):
    batch = make_batch(make_world(rows=4, context=768), parts)
    wanted = all(after - before == 1 or before % PAGE == 0 for _, before, after in parts)
    meta = build(make_world(rows=4, context=768), batch)
    for plan in (meta.plan_c4, meta.plan_c128):
        assert plan.disjoint is wanted
        read = set((plan.source - len(batch.positions)).flatten().tolist())
        written = {loc for loc in plan.write_locs.tolist() if loc >= 0}
        assert not (wanted and read & written)


def test_plans_that_overwrite_what_they_read_are_not_disjoint():
    """The rule's other side: two tokens after an odd prefix, and a whole window after one."""
    world = make_world(rows=4, context=768)
    for parts, number in (([(0, 4, 12)], 0), ([(0, 128, 257), (1, 100, 228)], 1)):
        batch = make_batch(world, parts)
        plan = (build(world, batch).plan_c4, build(world, batch).plan_c128)[number]
        read = set((plan.source - len(batch.positions)).flatten().tolist())
        assert read & {loc for loc in plan.write_locs.tolist() if loc >= 0}
        assert not plan.disjoint


def in_graph(batch: BatchRows, context: int) -> BatchRows:
    return replace(batch, host_spans=None, max_seq_len=context)


@pytest.mark.parametrize("length", [4, 5, 127, 128, 256, 512])
def test_a_graph_sees_what_an_eager_decode_sees(length):
    """Shapes that depend on the batch size alone, and padding rows that touch nothing."""
    world = make_world(rows=4, context=768)
    parts = [(2, length - 1, length), (0, 3, 4), (1, 300, 301), (0, 0, 1)]
    batch = make_batch(world, parts)
    # As SGLang pads a bucket: slot 0, row 0, position 0, length 1.
    batch.out_cache_loc[3] = 0
    eager = build(world, make_batch(world, parts[:3]))
    meta = build(world, in_graph(batch, 768))
    assert meta.pages.shape == (4, 3)
    assert meta.window_out.tolist() == [*eager.window_out.tolist(), -1]
    assert torch.equal(meta.window_slots[:3], eager.window_slots)
    for plan, wanted in ((meta.plan_c4, eager.plan_c4), (meta.plan_c128, eager.plan_c128)):
        assert plan.source.shape[0] == len(parts)
        assert plan.disjoint and wanted.disjoint
        closed = plan.slots >= 0
        assert plan.slots[closed].tolist() == wanted.slots.tolist()
        assert plan.positions[closed].tolist() == wanted.positions.tolist()
        # Rows of the state are numbered from the batch's end on, which has a padding row more.
        source = plan.source[closed]
        assert torch.equal(torch.where(source > 3, source - 1, source), wanted.source)
        assert plan.source[~closed].eq(-1).all()
        assert plan.write_locs.tolist() == [*wanted.write_locs.tolist(), -1]


def test_no_tokens():
    world = make_world(rows=1, context=256)
    empty = torch.zeros(0, dtype=torch.int64)
    meta = build(world, BatchRows(empty, empty, empty, empty, empty, empty, 0, []))
    assert meta.window_slots.shape == (0, WINDOW)
    assert meta.plan_c4.source.shape == (0, 8)
    assert meta.plan_c128.source.shape == (0, 128)

"""Rows of a paged uint8 pool by flat slot id."""

from torch import Tensor

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout


def _part(pool: Tensor, layout: RecordLayout | IndexerLayout, offset: int, size: int) -> Tensor:
    """View [num_pages, page_size, size] of one part of every row."""
    return pool[:, offset : offset + layout.page_size * size].unflatten(1, (layout.page_size, size))


def valid_slots(pool: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """Which slots name a row of the pool: bool, the shape of slots."""
    return (slots >= 0) & (slots < pool.shape[0] * page_size)


def read_rows(
    pool: Tensor, slots: Tensor, layout: RecordLayout | IndexerLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Raw bytes of the rows at `slots`.

    Args: pool uint8 [num_pages, >= page_bytes], rows of a page contiguous; slots integer [N].
    Returns (data uint8 [N, data_bytes], scale uint8 [N, scale_bytes], valid bool [N]); the bytes
    of a slot outside the pool are those of some other row and must be masked.
    """
    valid = valid_slots(pool, slots, layout.page_size)
    safe = slots.long().masked_fill(~valid, 0)
    page, row = safe // layout.page_size, safe % layout.page_size
    data = _part(pool, layout, 0, layout.data_bytes)[page, row]
    scale = _part(pool, layout, layout.scale_offset(0), layout.scale_bytes)[page, row]
    return data, scale, valid


def write_rows(
    pool: Tensor,
    slots: Tensor,
    layout: RecordLayout | IndexerLayout,
    data: Tensor,
    scale: Tensor | None,
) -> None:
    """Write rows at `slots`; a slot outside the pool is skipped. A slot must not repeat.

    Args: pool uint8 [num_pages, >= page_bytes]; slots integer [N]; data uint8 [N, data_bytes];
    scale uint8 [N, scale_bytes] or None for a format without scales.
    """
    valid = valid_slots(pool, slots, layout.page_size)
    slots = slots[valid].long()
    page, row = slots // layout.page_size, slots % layout.page_size
    _part(pool, layout, 0, layout.data_bytes)[page, row] = data[valid]
    if scale is not None:
        offset = layout.scale_offset(0)
        _part(pool, layout, offset, layout.scale_bytes)[page, row] = scale[valid]

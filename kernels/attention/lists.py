"""The walk over one token's two lists of slots, 64 places a tile, window tiles first."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.dequant import DATA_BYTES, SCALE_BYTES
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.attention.operands import Numbers, Operands

TILE = 64


@dataclass(frozen=True)
class ListShape:
    """Static: tokens a page of each pool, bytes of a slot, whether lists have their own lengths.

    rotated: whether the output is turned back by the query's position (`rotation`).
    """

    window_page: int
    comp_page: int
    slot_bytes: int
    has_lengths: bool = False
    rotated: bool = False


class TokenLists:
    """The lists of one token inside a kernel; `num_tiles` is the token's own number of tiles."""

    def __init__(
        self, shape: ListShape, operands: Operands, numbers: Numbers, token: Int32
    ) -> None:
        self.shape = shape
        self.pools = (operands.window_pool, operands.comp_pool)
        self.num_window, self.num_comp = numbers.num_window, numbers.num_comp
        if shape.has_lengths:
            length = ptx.global_load_i32(address(operands.comp_lengths) + Int64(token) * 4)
            length = cute.arch.make_warp_uniform(length)
            self.num_comp = cutlass.max(cutlass.min(self.num_comp, length), Int32(0))
        self.window_tiles = (self.num_window + (TILE - 1)) // TILE
        self.num_tiles = self.window_tiles + (self.num_comp + (TILE - 1)) // TILE
        self.rows = [
            address(slots) + Int64(token) * slots.stride[0] * shape.slot_bytes
            for slots in (operands.window_slots, operands.comp_slots)
        ]

    def share(self, split: Int32, splits: Int32) -> tuple[Int32, Int32]:
        """The tiles [first, last) of one split; empty for some where there are fewer tiles."""
        return split * self.num_tiles // splits, (split + 1) * self.num_tiles // splits

    def _place(self, tile: Any, key: Int32) -> tuple[Any, Any]:
        """(place in its list of a key of a tile, places in that list)."""
        windowed = tile < self.window_tiles
        in_list = tile - choose(windowed, Int32(0), self.window_tiles)
        return in_list * TILE + key, choose(windowed, self.num_window, self.num_comp)

    def slot_address(self, tile: Any, key: Any) -> Any:
        """Where the list holds the slot of a key of a tile; that of its first slot past its end."""
        place, count = self._place(tile, key)
        row = choose(tile < self.window_tiles, *self.rows)
        return row + Int64(choose(place < count, place, Int32(0))) * self.shape.slot_bytes

    def load_slot(self, tile: Any, key: Int32) -> Any:
        """What the list holds for a key of a tile, or the list's first slot past its end.

        Nothing is asked of the slot here: a comparison would wait for the load.
        """
        load = ptx.global_load_i64 if self.shape.slot_bytes == 8 else ptx.global_load_i32
        return load(self.slot_address(tile, key))

    def locate(self, tile: Any, key: Int32, slot: Any) -> tuple[Any, Int32, Int32]:
        """(whether the key has a record, offsets in its pool of data and scales in 16 bytes).

        A key without record gets the offsets of row 0.
        """
        wide = Int64 if self.shape.slot_bytes == 8 else Int32
        place, count = self._place(tile, key)
        windowed = tile < self.window_tiles
        window_page, comp_page = self.shape.window_page, self.shape.comp_page
        window_rows, comp_rows = (
            Int32(pool.shape[0]) * page
            for pool, page in zip(self.pools, (window_page, comp_page), strict=True)
        )
        rows = choose(windowed, window_rows, comp_rows)
        present = (place < count) & (slot >= wide(0)) & (slot < wide(rows))
        safe = choose(present, Int32(slot), Int32(0))
        shifts = (Int32(page.bit_length() - 1) for page in (window_page, comp_page))
        shift = choose(windowed, *shifts)
        page = safe >> shift
        in_page = safe - (page << shift)
        pitch = Int32(choose(windowed, *(pool.stride[0] for pool in self.pools)))
        start = page * (pitch >> 4)
        data = start + in_page * (DATA_BYTES // 16)
        scale = start + (Int32(DATA_BYTES // 16) << shift) + in_page * (SCALE_BYTES // 16)
        return present, data, scale

    def pool(self, tile: Any) -> Any:
        """Address of the pool that a tile's slots name."""
        return choose(tile < self.window_tiles, *(address(pool) for pool in self.pools))

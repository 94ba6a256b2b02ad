"""Products of the streams with fn and sums of squares, in parts with the same bits in any batch.

A chunk is 32 columns of all four streams, a group four chunks. A chunk's sums are one warp's chain
of tensor-core additions; a group's are its chunks' sums in order; `finish` adds the groups. The
groups' sums are float32 [groups, T, `sums_pitch`], products and then the sum of squares.

A block takes one group of 16 tokens, a warp a chunk, so that the whole GPU fetches fn. All that a
thread reads is in flight at once, fn before the kernel that makes the streams has ended.

Fragments are those of m16n8k8 (TF32, `gates`): lane 4 g + c holds columns 8 c .. 8 c + 7 of tokens
g and g + 8, loaded in 16 bytes; the columns that its registers stand for are permuted, and those of
fn likewise.
"""

from typing import Any

import torch
from cutlass import Float32, Int32, Int64, Uint32, cute, memory, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import (
    global_load_f32x4,
)
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.mhc.gates import STREAMS, bf16_words, mma_tf32, tf32_parts
from sglang_dsv4.kernels.mhc.operands import (
    CHUNK,
    CHUNKS,
    TILE_COLUMNS,
    fake_compact,
    fake_streams,
    groups_of,
    square_column,
    sums_pitch,
)
from sglang_dsv4.kernels.operands import VECTOR_BYTES

TILE_ROWS = 16


class Project:
    """A block is one group of 16 tokens, for `rows` 24 (hc_pre) or 4 (hc_head) of fn."""

    def __init__(self, hidden: int, rows: int) -> None:
        self.hidden, self.rows = hidden, rows
        self.chunks, self.groups = hidden // CHUNK, groups_of(hidden)
        self.tiles = -(-rows // TILE_COLUMNS)
        self.square, self.pitch = square_column(rows), sums_pitch(rows)

    def row_addresses(self, streams: cute.Tensor, first: Int32, lane: Int32) -> list[Int64]:
        """Addresses of this lane's two tokens; one past the last stands for the last."""
        count = Int32(cm.rows_in(streams))
        found = []
        for half in range(2):
            token = first + lane // 4 + 8 * half
            row = cm.select(token < count, token, count - 1)
            at = Int64(row) * cm.stride_of(streams) + lane % 4 * 8
            found.append(cm.address_of(streams, at))
        return found

    def load(
        self, streams: cute.Tensor, starts: list[Int64], chunk: Int32, wanted: Any
    ) -> list[list[list[Any]]]:
        """Four words [stream][half] of a chunk; zeros without a load where it is not wanted."""
        words = []
        for i in range(STREAMS):
            pair = []
            for start in starts:
                at = start + Int64(chunk * (CHUNK * 2)) + i * self.hidden * 2
                pair.append(cm.load_words_if(wanted, at, [Uint32(0)] * 4))
            words.append(pair)
        return words

    def together(self, words: list[Any], others: list[Any], count: Int32) -> list[Any]:
        """A chunk's words, the first of which waits for all of them and for the others."""
        loaded = [pair[half][0] for pair in words for half in range(2)]
        # The sign bit of a number of tokens is 0, which no compiler knows.
        zero = cm.word_of(count) >> 31
        words[0][0][0] = cm.after_loads(words[0][0][0], [*loaded[1:], *others], zero)
        return words

    def split(self, pieces: list[Any]) -> list[list[tuple[Any, Any]]]:
        """Parts of fn's values [column tile][4] for two products each."""
        return [[tf32_parts(x) for x in piece] for piece in pieces]

    def add_half(
        self,
        pair: list[list[Any]],
        half: int,
        parts: list[list[tuple[Any, Any]]],
        sums: list[list[Any]],
        squares: list[Any],
    ) -> None:
        """Add four of each lane's eight columns of one stream, of 16 tokens."""
        values = [
            [value for word in words[2 * half :][:2] for value in bf16_words(word)]
            for words in pair
        ]
        for row, found in enumerate(values):
            for value in map(cm.float_of, found):
                squares[row] = squares[row] + value * value
        upper, lower = values
        for tile in range(self.tiles):
            for part in (1, 0):
                for k in (0, 2):
                    b = [parts[tile][k][part], parts[tile][k + 1][part]]
                    a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                    sums[tile] = mma_tf32(a, b, sums[tile])

    def fresh_sums(self) -> tuple[list[list[Any]], list[Any]]:
        """Sums of a chunk before it."""
        zero = Float32(0.0)
        return [[zero] * 4 for _ in range(self.tiles)], [zero] * 2

    @cute.jit
    def __call__(
        self, streams: cute.Tensor, fn: cute.Tensor, partial: cute.Tensor, stream: Any
    ) -> None:
        """Launch over groups and tiles of tokens."""
        tiles = (Int32(cm.rows_in(streams)) + TILE_ROWS - 1) // TILE_ROWS
        self.kernel(streams, fn, partial).launch(
            grid=[self.groups, tiles, 1], block=[32 * CHUNKS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, streams: cute.Tensor, fn: cute.Tensor, partial: cute.Tensor) -> None:
        """A warp is one chunk."""
        thread, _, _ = cute.arch.thread_idx()
        group, tile, _ = cute.arch.block_idx()
        lane, warp = thread % 32, thread // 32
        first, count = tile * TILE_ROWS, Int32(cm.rows_in(streams))
        chunk = group * CHUNKS + warp
        exists = chunk < self.chunks
        chunk = cm.select(exists, chunk, Int32(0))
        shared = self.shared_sums()
        pieces = self.load_fn(fn, chunk, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        starts = self.row_addresses(streams, first, lane)
        words = self.together(self.load(streams, starts, chunk, exists), [], count)
        self.finish(words, pieces, shared, partial, group, first, count, thread)

    def shared_sums(self) -> cute.Tensor:
        """Room for the sums of the block's warps."""
        places = cute.make_layout(CHUNKS * TILE_ROWS * self.pitch)
        return memory.SmemAllocator().allocate_tensor(Float32, places, VECTOR_BYTES)

    @cute.jit
    def finish(
        self,
        words: list[Any],
        pieces: list[Any],
        shared: cute.Tensor,
        partial: cute.Tensor,
        group: Int32,
        first: Int32,
        count: Int32,
        thread: Int32,
    ) -> None:
        """Products of one chunk a warp, and their sum over the block's warps."""
        lane, warp = thread % 32, thread // 32
        sums, squares = self.fresh_sums()
        for i in range_constexpr(STREAMS):
            for half in range_constexpr(2):
                self.add_half(words[i], half, self.split(pieces[i][half]), sums, squares)
        start = warp * (TILE_ROWS * self.pitch)
        for half in range_constexpr(2):
            at = start + (lane // 4 + 8 * half) * self.pitch
            for column in range_constexpr(self.tiles):
                target = at + column * TILE_COLUMNS + lane % 4 * 2
                cm.store_vector(
                    cm.element_pointer(shared, target, 8), sums[column][2 * half : 2 * half + 2]
                )
            square = cm.lane_sum(squares[half], 4)
            if lane % 4 == 0:
                cm.store_vector(cm.element_pointer(shared, at + self.square, 16), [square] * 4)
        cute.arch.sync_threads()
        quads = self.square // 4 + 1
        for step in range_constexpr(-(-TILE_ROWS * quads // (32 * CHUNKS))):
            index = thread + step * (32 * CHUNKS)
            row, quad = index // quads, index % quads
            if (row < TILE_ROWS) & (first + row < count):
                at = row * self.pitch + quad * 4
                total = cm.load_vector(cm.element_pointer(shared, at, 16), 4)
                for other in range_constexpr(1, CHUNKS):
                    there = at + other * (TILE_ROWS * self.pitch)
                    found = cm.load_vector(cm.element_pointer(shared, there, 16), 4)
                    total = [a + b for a, b in zip(total, found, strict=True)]
                place = (Int64(group) * count + (first + row)) * self.pitch + quad * 4
                cm.store_vector(cm.element_pointer(partial, place, 16), total)

    def load_fn(self, fn: cute.Tensor, chunk: Int32, lane: Int32) -> list[Any]:
        """Four values of fn, [stream][half][column tile]."""
        found = []
        for i in range(STREAMS):
            halves = []
            for half in range(2):
                tiles = []
                for tile in range(self.tiles):
                    row = tile * TILE_COLUMNS + lane // 4
                    if self.rows % TILE_COLUMNS:
                        row = cm.select(row < self.rows, row, Int32(self.rows - 1))
                    column = chunk * CHUNK + lane % 4 * 8 + (i * self.hidden + 4 * half)
                    at = Int64(row) * (STREAMS * self.hidden) + column
                    tiles.append(global_load_f32x4(cm.address_of(fn, at)))
                halves.append(tiles)
            found.append(halves)
        return found


@compiled_kernel
def compile_project(arch: str, hidden: int, rows: int) -> Any:
    """Compile for streams of width `hidden`; needs no GPU."""
    return compile_for(
        arch,
        Project(hidden, rows),
        fake_streams(hidden),
        fake_compact(torch.float32, STREAMS * hidden),
        fake_compact(torch.float32, sums_pitch(rows)),
    )

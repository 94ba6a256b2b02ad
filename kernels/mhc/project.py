"""Products of the streams with fn and sums of squares, in parts with the same bits in any batch.

A chunk is 32 columns of all four streams, a group four chunks. A chunk's sums are one warp's chain
of tensor-core additions; a group's are its chunks' sums in order; `finish` adds the groups. Two
kernels make the groups' sums, float32 [groups, T, `sums_pitch`], products and then the sum of
squares:

Few tokens: a block takes one group of 16 tokens, a warp a chunk, so that the whole GPU fetches fn.
All that a thread reads is in flight at once, fn before the kernel that makes the streams has ended.

Many tokens: a warp takes 16 tokens and all chunks of some groups. fn passes through a ring of
shared memory that the block's warps share, the streams through another of each lane's own.

Fragments are those of m16n8k8 (TF32, `gates`): lane 4 g + c holds columns 8 c .. 8 c + 7 of tokens
g and g + 8, loaded in 16 bytes; the columns that its registers stand for are permuted, and those of
fn likewise.
"""

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, memory, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import (
    copy_async_16,
    global_load_f32x4,
    global_store_f32,
    shared_load_f32x4,
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
PIECES = 8
ROW_BYTES = PIECES * VECTOR_BYTES
# Threads that copy eight rows of one stream's chunk.
LINE_THREADS = TILE_COLUMNS * PIECES
# Shared memory of an SM, which the carveout is a share of.
SM_BYTES = 228 << 10


class Project:
    """What both kernels share, for `rows` 24 (hc_pre) or 4 (hc_head) of fn."""

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


class ProjectFew(Project):
    """A block is one group of 16 tokens."""

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


class ProjectMany(Project):
    """A block is 16 tokens a row tile of a warp, and a range of groups.

    ahead: chunks in the ring; resident: blocks that an SM is to hold.
    """

    def __init__(
        self, hidden: int, rows: int, warps: int, row_tiles: int, ahead: int, resident: int
    ) -> None:
        super().__init__(hidden, rows)
        self.warps, self.row_tiles = warps, row_tiles
        self.ahead, self.resident = ahead, resident
        self.threads, self.tokens = 32 * warps, TILE_ROWS * row_tiles * warps
        self.stream_bytes = self.square * ROW_BYTES
        self.fn_bytes = STREAMS * self.stream_bytes
        # A thread copies what it will read itself: 16 bytes, side by side over a warp's lanes.
        self.own_bytes = 32 * VECTOR_BYTES
        self.slot_bytes = self.fn_bytes + warps * row_tiles * 2 * STREAMS * self.own_bytes
        self.percent = min(100, -(-100 * resident * (ahead * self.slot_bytes + 1024) // SM_BYTES))

    @cute.jit
    def __call__(
        self,
        streams: cute.Tensor,
        fn: cute.Tensor,
        partial: cute.Tensor,
        each: Int32,
        stream: Any,
    ) -> None:
        """Launch over tiles of tokens and ranges of `each` groups."""
        tiles = (Int32(cm.rows_in(streams)) + self.tokens - 1) // self.tokens
        ranges = (Int32(self.groups) + each - 1) // each
        self.kernel(streams, fn, partial, each).launch(
            grid=[ranges, tiles, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=self.percent,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, streams: cute.Tensor, fn: cute.Tensor, partial: cute.Tensor, each: Int32
    ) -> None:
        """A warp is `row_tiles` times 16 tokens."""
        thread, _, _ = cute.arch.thread_idx()
        part, tile, _ = cute.arch.block_idx()
        lane, warp = thread % 32, thread // 32
        count = Int32(cm.rows_in(streams))
        first = tile * self.tokens + warp * (TILE_ROWS * self.row_tiles)
        ring = memory.SmemAllocator().allocate(self.ahead * self.slot_bytes, 128).toint()
        begin, end = part * each, (part + 1) * each
        end = cm.select(end < self.groups, end, Int32(self.groups))
        start, last = begin * CHUNKS, end * CHUNKS
        last = cm.select(last < self.chunks, last, Int32(self.chunks))
        source, place = self.source(fn, thread)
        rows = []
        for m in range_constexpr(self.row_tiles):
            rows += self.row_addresses(streams, first + m * TILE_ROWS, lane)
        mine = self.own_slot(ring, warp, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for number in range_constexpr(self.ahead - 1):
            shift = number * self.slot_bytes
            self.fetch(source, ring + place + shift, start + number, last)
            self.fetch_streams(rows, mine + shift, start + number, last)
        keeps = self.row_tiles * (4 * self.tiles + 2)
        total = cute.make_rmem_tensor(cute.make_layout(keeps), Float32)
        reads = self.reads(lane)
        slot = Int32(0)
        for group in range(begin, end):
            for c in range_constexpr(CHUNKS):
                chunk = Int32(group * CHUNKS + c)
                cute.arch.cp_async_wait_group(self.ahead - 2)
                # Every thread's copies have arrived, and every warp has read the slot before.
                cute.arch.sync_threads()
                free = cm.select(slot == 0, Int32(self.ahead - 1), slot - 1) * self.slot_bytes
                self.fetch(source, ring + place + free, chunk + self.ahead - 1, last)
                self.fetch_streams(rows, mine + free, chunk + self.ahead - 1, last)
                here = slot * self.slot_bytes
                found = self.chunk_sums([ring + here + read for read in reads], mine + here)
                for k in range_constexpr(keeps):
                    if const_expr(c == 0):
                        total[k] = found[k]
                    else:
                        total[k] = cm.float_at(total, k) + cm.float_at(found, k)
                slot = cm.select(slot == self.ahead - 1, Int32(0), slot + 1)
            for m in range_constexpr(self.row_tiles):
                self.publish(total, m, partial, group, first + m * TILE_ROWS, count, lane)

    def own_slot(self, ring: Any, warp: Any, lane: Any) -> Any:
        """Where in the first slot a lane's values of the streams lie."""
        first = warp * (2 * self.row_tiles * STREAMS * 32)
        return ring + self.fn_bytes + (first + lane) * VECTOR_BYTES

    def reads(self, lane: Any) -> list[Any]:
        """Where in a slot this lane's two pieces of fn lie: columns 8 c .. 8 c + 7."""
        row, piece = lane // 4, lane % 4 * 2
        return [row * ROW_BYTES + (piece + (half ^ (row & 1))) * VECTOR_BYTES for half in range(2)]

    @cute.jit
    def chunk_sums(self, reads: list[Int32], mine: Int32) -> cute.Tensor:
        """One chunk's sums, [row tile][column tile][4] and two sums of squares a row tile.

        The streams are a loop of the kernel: unrolled, the compiler loads so much ahead that
        registers do not suffice.
        """
        each = 4 * self.tiles + 2
        kept = cute.make_rmem_tensor(cute.make_layout(self.row_tiles * each), Float32)
        kept.fill(0.0)
        for i in cutlass.range(STREAMS, unroll=1):
            words = []
            for row in range_constexpr(2 * self.row_tiles):
                at = mine + (row * STREAMS + i) * self.own_bytes
                words.append([cm.word_of(value) for value in shared_load_f32x4(at)])
            fresh = []
            for m in range_constexpr(self.row_tiles):
                values = cm.floats_of(kept, m * each, each)
                sums = [values[4 * tile : 4 * tile + 4] for tile in range(self.tiles)]
                fresh.append((sums, values[4 * self.tiles :]))
            for half in range_constexpr(2):
                at = reads[half] + i * self.stream_bytes
                parts = self.split(
                    [
                        shared_load_f32x4(at + tile * TILE_COLUMNS * ROW_BYTES)
                        for tile in range(self.tiles)
                    ]
                )
                for m in range_constexpr(self.row_tiles):
                    self.add_half(words[2 * m : 2 * m + 2], half, parts, *fresh[m])
            for m in range_constexpr(self.row_tiles):
                sums, squares = fresh[m]
                values = [x for tile_sums in sums for x in tile_sums] + squares
                for k in range_constexpr(each):
                    kept[m * each + k] = values[k]
        for m in range_constexpr(self.row_tiles):
            for half in range_constexpr(2):
                at = m * each + 4 * self.tiles + half
                kept[at] = cm.lane_sum(cm.float_at(kept, at), 4)
        return kept

    def source(self, fn: cute.Tensor, thread: Int32) -> tuple[Int64, Int32]:
        """Where in fn and in a slot this thread's first copy lies, at chunk 0."""
        piece, row, i = thread % PIECES, thread // PIECES % TILE_COLUMNS, thread // LINE_THREADS
        place = i * self.stream_bytes + row * ROW_BYTES + (piece ^ (row & 1)) * VECTOR_BYTES
        if self.rows < TILE_COLUMNS:
            row = cm.select(row < self.rows, row, Int32(self.rows - 1))
        at = row * (STREAMS * self.hidden) + i * self.hidden + piece * 4
        return cm.address_of(fn, at), place

    def fetch(self, source: Int64, target: Int32, chunk: Int32, last: Int32) -> None:
        """Begin to copy fn's values of a chunk; zeros for a chunk that does not exist."""
        size = cm.select(chunk < last, Int32(VECTOR_BYTES), Int32(0))
        at = source + Int64(cm.select(chunk < last, chunk, Int32(0)) * (CHUNK * 4))
        together = self.threads // LINE_THREADS
        for i in range(0, STREAMS, together):
            for tile in range(self.tiles):
                offset = (tile * TILE_COLUMNS * STREAMS + i) * self.hidden * 4
                place = i * self.stream_bytes + tile * TILE_COLUMNS * ROW_BYTES
                copy_async_16(target + place, at + offset, size)

    def fetch_streams(self, rows: list[Int64], target: Int32, chunk: Int32, last: Int32) -> None:
        """Begin to copy this lane's own values of a chunk, and close the group of copies."""
        size = cm.select(chunk < last, Int32(VECTOR_BYTES), Int32(0))
        shift = Int64(cm.select(chunk < last, chunk, Int32(0)) * (CHUNK * 2))
        for number, row in enumerate(rows):
            for i in range(STREAMS):
                place = (number * STREAMS + i) * self.own_bytes
                copy_async_16(target + place, row + shift + i * self.hidden * 2, size)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def publish(
        self,
        total: cute.Tensor,
        m: int,
        partial: cute.Tensor,
        group: Int32,
        first: Int32,
        count: Int32,
        lane: Int32,
    ) -> None:
        """One group's sums of a row tile."""
        start = m * (4 * self.tiles + 2)
        for half in range_constexpr(2):
            token = first + lane // 4 + 8 * half
            if token < count:
                at = (Int64(group) * count + token) * self.pitch
                for tile in range_constexpr(self.tiles):
                    target = at + (tile * TILE_COLUMNS) + lane % 4 * 2
                    pair = [cm.float_at(total, start + 4 * tile + 2 * half + k) for k in range(2)]
                    cm.store_vector(cm.element_pointer(partial, target, 8), pair)
                if lane % 4 == 0:
                    square = cm.float_at(total, start + 4 * self.tiles + half)
                    global_store_f32(cm.address_of(partial, at + self.square), square)


@compiled_kernel
def compile_few(arch: str, hidden: int, rows: int) -> Any:
    """Compile for few tokens; needs no GPU."""
    return compile_for(
        arch,
        ProjectFew(hidden, rows),
        fake_streams(hidden),
        fake_compact(torch.float32, STREAMS * hidden),
        fake_compact(torch.float32, sums_pitch(rows)),
    )


@compiled_kernel
def compile_many(
    arch: str, hidden: int, rows: int, warps: int, row_tiles: int, ahead: int, resident: int
) -> Any:
    """Compile for many tokens; needs no GPU."""
    return compile_for(
        arch,
        ProjectMany(hidden, rows, warps, row_tiles, ahead, resident),
        fake_streams(hidden),
        fake_compact(torch.float32, STREAMS * hidden),
        fake_compact(torch.float32, sums_pitch(rows)),
        Int32(0),
    )

"""Mixing weights and collapse of the four streams in one launch: hc_pre and hc_head.

A cluster of up to eight blocks takes 16 or 32 tokens; a block owns hidden / 8 columns of all four
streams and keeps them in registers between the two uses, so each stream value is read once. A warp
owns 32 or 64 columns, as A fragments of m16n8k8 (TF32, `gates`): lane 4 g + c holds values
8 c .. 8 c + 7 of 32 columns of tokens g and g + 8, loaded in 16 bytes; the columns that its
registers stand for are permuted, and the fragments of fn likewise. fn passes through a ring of
shared memory that each warp has for itself, 32 columns of eight rows a slot. Warps meet in shared
memory, blocks in distributed shared memory, always summed in the same order: a token's result has
the same bits in every batch.

Roofline, hc_pre at hidden 4096: 32 KB a token in, 8 KB out, 1.6 Mflop of products with fn in two
parts on the tensor cores: bandwidth only. But every cluster reads fn, 1.6 MB, from L2: 32 tokens
bring in 1 MB of streams, so L2 moves 2.5 times the streams' bytes (5 times at hidden 7168, where
only 16 tokens fit in registers). For few tokens the launch, one trip to memory, and 39 dependent
normalisations are all there is; when there are many tokens the normalisations are a launch of their
own, one thread a token, as nothing overlaps them here.

Measured on an H200, 2026-12-02 (BENCHMARKS.md). hc_pre of 16 tokens takes 9.3 us (width 4096) and
13.5 us (7168), of which the 39 normalisations are 1.3 us; a copy of as many bytes, fn among them,
takes 2.5 and 3.1 us. A block of few tokens is bound by the latency of its part of fn, 196 KB and
344 KB, which only eight SMs fetch: clusters of 16, which not every GPU has, took 8.8 and 10.5 us.
256 tokens are 16 clusters and take twice as long as 64, as not all find eight free SMs in one of
the GPU's clusters of SMs. 4096 tokens take 149.5 us (28% of a copy's rate) and 216.2 us (33%): one
block an SM, whose loading, products and meeting follow each other.
"""

from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, memory, range_constexpr

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import (
    address,
    copy_async_16,
    global_load_f32x4,
    global_store_f32,
    global_store_u32x4,
    prmt,
    shared_load_f32x4,
)
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.mhc.gates import (
    STREAMS,
    bf16_words,
    mma_tf32,
    sigmoid,
    sinkhorn,
    tf32_parts,
)
from sglang_dsv4.kernels.operands import CUTE_TYPES, VECTOR_BYTES, fake_vector

CHUNK = 32
TILE_ROWS = 16
TILE_COLUMNS = 8
PRE_ROWS = (2 + STREAMS) * STREAMS
HEAD_ROWS = STREAMS
SINKHORN_THREADS = 64
# More would leave a thread fewer than 128 registers.
MAX_WARPS = 16
# Up to here clusters of 16 tokens fill at most one wave of 132 SMs.
FEW_TOKENS = 256
# Rows of fn of a slot are 128 bytes; the 16-byte pieces of odd rows are swapped in pairs, so that
# eight lanes that read together meet all banks.
PIECES = 8
ROW_BYTES = PIECES * VECTOR_BYTES
SLOT_BYTES = TILE_COLUMNS * ROW_BYTES
# Of a block's shared memory: the system's share and alignment.
RESERVED_BYTES = 2048
# Lanes that share the sums over warps and the stores to blocks.
MEETING_LANES = 4
# Shared memory of a block with two row tiles, 16 warps, and a ring that is worth it.
TWO_TILES_BYTES = 160 << 10
# Bytes of fn on their way to a block.
IN_FLIGHT = 128 << 10


@dataclass(frozen=True)
class Shape:
    """How a width is shared: blocks of a cluster, 32-column chunks of each warp of a block."""

    hidden: int
    blocks: int
    chunks: int

    @property
    def columns(self) -> int:
        """Columns of each stream that a block owns."""
        return self.hidden // self.blocks

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.columns // (self.chunks * CHUNK)

    def row_tiles(self, tokens: int, arch: str) -> int:
        """Tiles of 16 tokens for a cluster: two, where there are many tokens and the values fit in
        64 registers of a thread, the sums in shared memory."""
        fits = self.chunks == 1 and SHARED_BYTES[arch] >= TWO_TILES_BYTES
        return 2 if fits and tokens > FEW_TOKENS else 1


def shape_of(hidden: int) -> Shape:
    """The shape with most blocks, then most warps. It does not depend on the number of tokens, nor
    do the orders of a token's sums.

    Raises:
        UnsupportedError: the width is no multiple of 32, or does not fit.
    """
    for blocks in (8, 4, 2, 1):
        for chunks in (1, 2):
            shape = Shape(hidden, blocks, chunks)
            if hidden % (blocks * chunks * CHUNK) == 0 and shape.warps <= MAX_WARPS:
                return shape
    raise UnsupportedError(
        f"Found streams of width {hidden}, wanted a multiple of 256 up to 4096, or of 512 up to "
        f"8192: use the reference."
    )


class Collapse:
    """hc_pre (rows 24) or hc_head (rows 4) for one width.

    normalise: Sinkhorn inside, else in a launch of its own.
    """

    def __init__(
        self, shape: Shape, rows: int, row_tiles: int, normalise: bool, shared_bytes: int
    ) -> None:
        self.shape, self.rows, self.row_tiles, self.normalise = shape, rows, row_tiles, normalise
        self.tiles = -(-rows // TILE_COLUMNS)
        self.pitch = self.tiles * TILE_COLUMNS + 4
        self.tokens = TILE_ROWS * row_tiles
        self.threads = 32 * shape.warps
        flat = 4 * self.tokens * self.pitch
        rest = (shape.warps + shape.blocks + 1) * flat + 8 * PRE_ROWS
        slot = shape.warps * SLOT_BYTES
        self.stages = [
            (chunk, i, tile)
            for chunk in range(shape.chunks)
            for i in range(STREAMS)
            for tile in range(self.tiles)
        ]
        free = min(IN_FLIGHT, shared_bytes - RESERVED_BYTES - rest)
        self.ahead = min(len(self.stages), free // slot)

    @cute.jit
    def __call__(
        self,
        streams: cute.Tensor,
        fn: cute.Tensor,
        base: cute.Tensor,
        scale: cute.Tensor,
        out: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        iters: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
        stream: Any,
    ) -> None:
        """Launch one cluster for each group of tokens, then the normalisations if apart."""
        blocks = self.shape.blocks
        groups = (Int32(cm.rows_in(streams)) + self.tokens - 1) // self.tokens
        self.kernel(streams, fn, base, scale, out, post, comb, iters, hc_eps, rms_eps).launch(
            grid=[groups * blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[blocks, 1, 1],
            stream=stream,
        )
        if const_expr(self.rows == PRE_ROWS and not self.normalise):
            count = (Int32(cm.rows_in(streams)) + SINKHORN_THREADS - 1) // SINKHORN_THREADS
            normalise_rows(comb, iters, hc_eps).launch(
                grid=[count, 1, 1], block=[SINKHORN_THREADS, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        streams: cute.Tensor,
        fn: cute.Tensor,
        base: cute.Tensor,
        scale: cute.Tensor,
        out: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        iters: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
    ) -> None:
        """Products, meeting, weights, collapse, normalisations."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks = self.shape.blocks
        rank, first = block % blocks, block // blocks * self.tokens
        lane, warp = thread % 32, thread // 32
        count = Int32(cm.rows_in(streams))
        allocator = memory.SmemAllocator()
        flat = self.tokens * self.pitch
        partial = allocator.allocate_tensor(Float32, cute.make_layout(self.shape.warps * flat), 16)
        gathered = allocator.allocate_tensor(Float32, cute.make_layout(blocks * flat), 16)
        gates = allocator.allocate_tensor(
            Float32, cute.make_layout(self.tokens * self.tiles * TILE_COLUMNS), 16
        )
        affine = allocator.allocate_tensor(Float32, cute.make_layout(2 * PRE_ROWS), 16)
        ring = allocator.allocate(self.ahead * self.shape.warps * SLOT_BYTES, 128).toint()
        arrived = allocator.allocate_array(Int64, 1, byte_alignment=8)
        used = cm.select(count - first < self.tokens, count - first, Int32(self.tokens))
        if const_expr(blocks > 1):
            if thread == 0:
                cute.arch.mbarrier_init(arrived, 1)
                cute.arch.mbarrier_init_fence()
                size = used * (self.pitch * 4 * blocks)
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, size)
            # All blocks have begun, with their barrier ready, before one stores to another's.
            cute.arch.cluster_arrive_relaxed()
        for step in range_constexpr(-(-self.rows // self.threads)):
            row = thread + step * self.threads
            if row < self.rows:
                affine[row] = scale[cm.select(row < 2 * STREAMS, row // STREAMS, Int32(2))]
                affine[PRE_ROWS + row] = base[row]
        column = rank * self.shape.columns + warp * (self.shape.chunks * CHUNK) + lane % 4 * 8
        tokens = [first + lane // 4 + 8 * half for half in range(2 * self.row_tiles)]
        words = self.load_streams(streams, tokens, count, column)
        source, place = self.copies(fn, ring, rank, warp, lane)
        for number in range_constexpr(self.ahead):
            self.fetch(number, source, place)
        # Loads are not moved past a barrier: all have begun before the first is waited for.
        cute.arch.sync_threads()
        sums, squares = self.multiply(words, source, place, self.reads(ring, warp, lane))
        self.publish(sums, squares, partial, warp, lane)
        cute.arch.sync_threads()
        if const_expr(blocks > 1):
            cute.arch.cluster_wait()
        for step in range_constexpr(-(-flat // self.threads)):
            index = thread + step * self.threads
            self.meet(partial, gathered, arrived, index, used, rank)
        if const_expr(blocks > 1):
            cute.arch.mbarrier_wait(arrived, 0)
        else:
            cute.arch.sync_threads()
        for step in range_constexpr(-(-self.tokens * self.rows // self.threads)):
            index = thread + step * self.threads
            if index < used * self.rows:
                row, n = index // self.rows, index % self.rows
                value = self.gate(gathered, affine, row, n, hc_eps, rms_eps)
                gates[row * (self.tiles * TILE_COLUMNS) + n] = value
                if const_expr(self.rows == PRE_ROWS):
                    token = first + row
                    if (row % blocks == rank) & (n // STREAMS == 1):
                        target = address(post) + (Int64(token) * STREAMS + n % STREAMS) * 4
                        global_store_f32(target, value)
        cute.arch.sync_threads()
        for half in range_constexpr(2 * self.row_tiles):
            if tokens[half] < count:
                local = tokens[half] - first
                self.store(words[half], gates, local, out, tokens[half], column)
        if const_expr(self.rows == PRE_ROWS):
            row = lane * blocks + rank
            token = first + row
            if (warp == 0) & (row < self.tokens) & (token < count):
                self.finish_comb(gates, comb, row, token, iters, hc_eps)

    def load_streams(
        self, streams: cute.Tensor, tokens: list[Int32], count: Int32, column: Int32
    ) -> list[list[list[Any]]]:
        """Four words (eight values) for each token of the lane, chunk and stream.

        A token past the last one stands for the last one: its results are not stored.
        """
        words = []
        for token in tokens:
            row = Int64(cm.select(token < count, token, count - 1)) * cm.stride_of(streams)
            chunks = []
            for chunk in range(self.shape.chunks):
                found = []
                for i in range(STREAMS):
                    at = row + cm.stride_of(streams, 1) * i + (column + chunk * CHUNK)
                    values = global_load_f32x4(address(streams) + at * 2)
                    found.append([cm.word_of(value) for value in values])
                chunks.append(found)
            words.append(chunks)
        return words

    def copies(
        self, fn: cute.Tensor, ring: Any, rank: Int32, warp: Any, lane: Any
    ) -> tuple[Int64, Int32]:
        """Where in fn and in the ring this lane's first 16-byte copy of a slot lies."""
        row, piece = lane // PIECES, lane % PIECES
        column = rank * self.shape.columns + warp * (self.shape.chunks * CHUNK) + piece * 4
        source = address(fn) + (Int64(row) * (STREAMS * self.shape.hidden) + column) * 4
        place = warp * SLOT_BYTES + row * ROW_BYTES + (piece ^ (row & 1)) * VECTOR_BYTES
        return source, ring + place

    def reads(self, ring: Any, warp: Any, lane: Any) -> list[Int32]:
        """Where in the ring this lane's two pieces of a slot lie: columns 8 c .. 8 c + 7."""
        row, piece = lane // 4, lane % 4 * 2
        start = ring + (warp * SLOT_BYTES + row * ROW_BYTES)
        return [start + (piece + (half ^ (row & 1))) * VECTOR_BYTES for half in range(2)]

    def fetch(self, number: int, source: Int64, place: Int32) -> None:
        """Begin to copy one stage's slot: 32 columns of eight rows of fn (four in hc_head)."""
        chunk, i, tile = self.stages[number]
        hidden = self.shape.hidden
        offset = (tile * TILE_COLUMNS * STREAMS + i) * hidden + chunk * CHUNK
        target = place + number % self.ahead * (self.shape.warps * SLOT_BYTES)
        for row in range(0, min(TILE_COLUMNS, self.rows), 4):
            at = source + (offset + row * STREAMS * hidden) * 4
            copy_async_16(target + row * ROW_BYTES, at, Int32(VECTOR_BYTES))
        cute.arch.cp_async_commit_group()

    def multiply(
        self, words: list[Any], source: Int64, place: Int32, reads: list[Int32]
    ) -> tuple[list[list[list[Any]]], list[Any]]:
        """Products with fn, [row tile][column tile] fragments, and each token's sum of squares."""
        zero, count = Float32(0.0), len(self.stages)
        sums = [[[zero] * 4 for _ in range(self.tiles)] for _ in range(self.row_tiles)]
        squares = [zero] * (2 * self.row_tiles)
        for first in range(0, count, self.tiles):
            chunk, i, _ = self.stages[first]
            begun = min(count, first + self.ahead)
            cute.arch.cp_async_wait_group(begun - first - self.tiles)
            # Every lane's copies have arrived.
            cute.arch.sync_warp()
            for half in range(2):
                values = [
                    [value for word in row[chunk][i][2 * half :][:2] for value in bf16_words(word)]
                    for row in words
                ]
                for row, found in enumerate(values):
                    for value in map(cm.float_of, found):
                        squares[row] = squares[row] + value * value
                for tile in range(self.tiles):
                    shift = (first + tile) % self.ahead * (self.shape.warps * SLOT_BYTES)
                    loaded = shared_load_f32x4(reads[half] + shift)
                    self.add_products(values, [tf32_parts(x) for x in loaded], sums, tile)
            if begun < count:
                # Every lane has read its pieces.
                cute.arch.sync_warp()
            for number in range(begun, min(count, begun + self.tiles)):
                self.fetch(number, source, place)
        return sums, squares

    def add_products(
        self, values: list[Any], parts: list[Any], sums: list[list[list[Any]]], tile: int
    ) -> None:
        """Add two k-steps of one column tile to the sums: the rests of fn, then what TF32 holds."""
        for part in (1, 0):
            for k in (0, 2):
                b = [parts[k][part], parts[k + 1][part]]
                for m in range(self.row_tiles):
                    upper, lower = values[2 * m], values[2 * m + 1]
                    a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                    sums[m][tile] = mma_tf32(a, b, sums[m][tile])

    @cute.jit
    def publish(
        self,
        sums: list[list[list[Any]]],
        squares: list[Any],
        partial: cute.Tensor,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """This warp's sums to shared memory: [token][products, sum of squares]."""
        for half in range_constexpr(2 * self.row_tiles):
            local = lane // 4 + 8 * half
            at = (warp * self.tokens + local) * self.pitch
            for tile in range_constexpr(self.tiles):
                pair = sums[half // 2][tile]
                where = at + tile * TILE_COLUMNS + lane % 4 * 2
                partial[where] = pair[half % 2 * 2]
                partial[where + 1] = pair[half % 2 * 2 + 1]
            square = cm.lane_sum(squares[half], 4)
            if lane % 4 == 0:
                partial[at + self.pitch - 4] = square

    @cute.jit
    def meet(
        self,
        partial: cute.Tensor,
        gathered: cute.Tensor,
        arrived: cute.Pointer,
        index: Int32,
        used: Int32,
        rank: Int32,
    ) -> None:
        """Sum four values over the warps, by four lanes that give them to the cluster's blocks."""
        flat, group = self.tokens * self.pitch, index % MEETING_LANES
        quad = index // MEETING_LANES * 4
        valid = quad < used * self.pitch
        start = cm.select(valid, quad, Int32(0))
        zero = Float32(0.0)
        sums = [zero] * 4
        for step in range_constexpr(-(-self.shape.warps // MEETING_LANES)):
            warp = group + step * MEETING_LANES
            exists = warp < self.shape.warps
            at = start + cm.select(exists, warp, Int32(0)) * flat
            found = cm.load_vector(cm.element_pointer(partial, at, VECTOR_BYTES), 4)
            sums = [
                left + cm.select(exists, right, zero)
                for left, right in zip(sums, found, strict=True)
            ]
        sums = [cm.lane_sum(value, MEETING_LANES) for value in sums]
        target = cm.element_pointer(gathered, rank * flat + start, VECTOR_BYTES)
        for step in range_constexpr(-(-self.shape.blocks // MEETING_LANES)):
            peer = group + step * MEETING_LANES
            if valid & (peer < self.shape.blocks):
                if const_expr(self.shape.blocks == 1):
                    cm.store_vector(target, sums)
                else:
                    store_to_block(target, arrived, peer, sums)

    def gate(
        self,
        gathered: cute.Tensor,
        affine: cute.Tensor,
        row: Int32,
        n: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
    ) -> Float32:
        """Weight n of one token: pre and post are final, comb is a logit."""
        flat, start = self.tokens * self.pitch, row * self.pitch
        product = cm.float_at(gathered, start + n)
        square = cm.float_at(gathered, start + self.pitch - 4)
        for peer in range(1, self.shape.blocks):
            product = product + cm.float_at(gathered, start + n + peer * flat)
            square = square + cm.float_at(gathered, start + self.pitch - 4 + peer * flat)
        mean = square * Float32(1.0 / (STREAMS * self.shape.hidden))
        z = product * cm.rsqrt(mean + rms_eps)
        value = z * cm.float_at(affine, n) + cm.float_at(affine, n + PRE_ROWS)
        weight = sigmoid(value)
        chosen = cm.select(n < STREAMS, weight + hc_eps, weight * Float32(2.0))
        return cm.select(n < 2 * STREAMS, chosen, value)

    @cute.jit
    def store(
        self,
        words: list[Any],
        gates: cute.Tensor,
        local: Int32,
        out: cute.Tensor,
        token: Int32,
        column: Int32,
    ) -> None:
        """Weighted sum of one token's streams over the lane's columns."""
        start = local * (self.tiles * TILE_COLUMNS)
        pre = [cm.float_at(gates, start + i) for i in range(STREAMS)]
        for chunk in range_constexpr(self.shape.chunks):
            pairs = []
            for word in range_constexpr(4):
                low, high = Float32(0.0), Float32(0.0)
                for i in range_constexpr(STREAMS):
                    first, second = bf16_values_again(words[chunk][i][word])
                    low, high = low + pre[i] * first, high + pre[i] * second
                pairs.append(cm.bf16_pair(low, high))
            at = Int64(token) * self.shape.hidden + (column + chunk * CHUNK)
            global_store_u32x4(address(out) + at * 2, *pairs)

    @cute.jit
    def finish_comb(
        self,
        gates: cute.Tensor,
        comb: cute.Tensor,
        local: Int32,
        token: Int32,
        iters: Int32,
        hc_eps: Float32,
    ) -> None:
        """One token's comb from its logits, or the logits themselves."""
        matrix = cute.make_rmem_tensor(cute.make_layout(STREAMS * STREAMS), Float32)
        start = local * (self.tiles * TILE_COLUMNS) + 2 * STREAMS
        for i in range_constexpr(STREAMS * STREAMS):
            matrix[i] = cm.float_at(gates, start + i)
        if const_expr(self.normalise):
            sinkhorn(matrix, iters, hc_eps)
        store_matrix(matrix, comb, token)


def store_to_block(
    pointer: cute.Pointer, barrier: cute.Pointer, rank: Int32, values: list[Any]
) -> None:
    """Store four float32 at the same shared-memory address in block `rank` of the cluster.

    Their 16 bytes count at that block's mbarrier when they are visible there.
    """
    cute.arch.inline_ptx(
        "{.reg .b32 there, done; mapa.shared::cluster.u32 there, {$r0}, {$r2};"
        " mapa.shared::cluster.u32 done, {$r1}, {$r2};"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        " [there], {{$r3}, {$r4}, {$r5}, {$r6}}, [done];}",
        read_only_args=[Int32(pointer.toint()), Int32(barrier.toint()), rank, *values],
    )


def bf16_values_again(word: Any) -> list[Float32]:
    """The two bf16 values of a word by other instructions than `bf16_words` uses.

    The compiler then does not keep that function's results in registers, two for each word.
    """
    zero = Uint32(0)
    return [cm.float_of(prmt(word, zero, Uint32(digits))) for digits in (0x1044, 0x3244)]


def store_matrix(matrix: cute.Tensor, comb: cute.Tensor, token: Int32) -> None:
    """16 registers to comb[token]."""
    target = cm.element_pointer(comb, Int64(token) * STREAMS * STREAMS, VECTOR_BYTES)
    cm.store_vector(target, cm.floats_of(matrix, 0, STREAMS * STREAMS))


@cute.kernel
def normalise_rows(comb: cute.Tensor, iters: Int32, hc_eps: Float32) -> None:
    """Sinkhorn in place, one token a thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = block * SINKHORN_THREADS + thread
    if token < Int32(cm.rows_in(comb)):
        matrix = cute.make_rmem_tensor(cute.make_layout(STREAMS * STREAMS), Float32)
        source = cm.element_pointer(comb, Int64(token) * STREAMS * STREAMS, VECTOR_BYTES)
        found = cm.load_vector(source, STREAMS * STREAMS)
        for i in range_constexpr(STREAMS * STREAMS):
            matrix[i] = found[i]
        sinkhorn(matrix, iters, hc_eps)
        store_matrix(matrix, comb, token)


def fake_streams(hidden: int) -> Any:
    """Fake bf16 [T, 4, hidden], tokens and streams any distance apart."""
    strides = [cute.sym_int64(divisibility=VECTOR_BYTES // 2) for _ in range(2)]
    return cute.runtime.make_fake_tensor(
        CUTE_TYPES[torch.bfloat16],
        (cute.sym_int32(), STREAMS, hidden),
        (*strides, 1),
        assumed_align=VECTOR_BYTES,
    )


def fake_compact(dtype: torch.dtype, *widths: int) -> Any:
    """Fake contiguous [n, *widths], 16-byte aligned."""
    order = tuple(range(len(widths), -1, -1))
    return cute.runtime.make_fake_compact_tensor(
        CUTE_TYPES[dtype],
        (cute.sym_int32(), *widths),
        stride_order=order,
        assumed_align=VECTOR_BYTES,
    )


@compiled_kernel
def compile_collapse(arch: str, shape: Shape, rows: int, row_tiles: int, normalise: bool) -> Any:
    """Compile hc_pre (rows 24) or hc_head (rows 4) for one shape; needs no GPU."""
    f32 = torch.float32
    return compile_for(
        arch,
        Collapse(shape, rows, row_tiles, normalise, SHARED_BYTES[arch]),
        fake_streams(shape.hidden),
        fake_compact(f32, STREAMS * shape.hidden),
        fake_vector(f32, rows),
        fake_vector(f32, 3 if rows == PRE_ROWS else 1),
        fake_compact(torch.bfloat16, shape.hidden),
        fake_compact(f32, STREAMS),
        fake_compact(f32, STREAMS, STREAMS),
        Int32(0),
        Float32(0.0),
        Float32(0.0),
    )

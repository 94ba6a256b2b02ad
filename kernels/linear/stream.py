"""The main loop of the kernels on records: a warp streams its records past its tokens.

A warp has `row_tiles` rows of records (16 weight rows each) and `token_tiles` tiles of 8 tokens,
and multiplies `count` consecutive records of each of its rows with the tokens' columns. Records
come by bulk copies, BATCH records of each row at a time, into the warp's own ring of `stages`
places in shared memory; no other warp is waited for. Lane (g, t) = (lane / 4, lane % 4) reads
columns 16 t .. 16 t + 15 of token g of each tile: from global memory, BATCH records ahead
(`multiply`), or from shared memory where the block has put them, one tile ahead
(`multiply_staged`), which pays where many tokens are read by many warps.

Sums are those of mma.m16n8k16: of row tile m and token tile n, lane (g, t) holds rows g (c = 0, 1)
and g + 8 (c = 2, 3) for tokens 2 t + c % 2, at index 4 (m * token_tiles + n) + c.

SASS of the loop, everything included, for each record (sm_90a, ptxas 13.4): see
tests/kernels/test_compile_skinny.py. Run on an H200 as part of ``skinny``.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import choose
from sglang_dsv4.kernels.linear import decode
from sglang_dsv4.kernels.linear.records import CODE_BYTES, COLUMNS, RECORD_BYTES, ROWS

BATCH = 2
"""Records of a row in one copy."""
CHUNK = 256
"""Columns of staged tokens that one mbarrier stands for."""
UNDO = 2.0**7
"""Decoded weights are values over 2^7, so sums are multiplied by it once."""
_BARRIER_BYTES = 64
_ROW_BYTES = 2 * COLUMNS
"""Activations of a token that one record meets."""


@dataclass(frozen=True)
class StreamShape:
    """Static shape.

    Attributes:
        row_tiles: rows of records of a warp.
        token_tiles: tiles of 8 tokens.
        ragged: whether counts may be no multiple of BATCH, and the last record's columns may lie
            beyond the tokens' width.
        staged: columns of tokens in shared memory, a multiple of CHUNK; 0: tokens are read from
            global memory.
        stages: places of the ring: 2, 4 or 8.
    """

    row_tiles: int
    token_tiles: int
    ragged: bool
    staged: int = 0
    stages: int = 4

    @property
    def place_bytes(self) -> int:
        """Shared memory of one place of the ring."""
        return self.row_tiles * BATCH * RECORD_BYTES

    @property
    def pitch(self) -> int:
        """Float32 from one token to the next where sums are left; spreads tokens over banks."""
        return ROWS * self.row_tiles + 4

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp, a multiple of 64: barriers, then the ring, later the sums.

        Sums written over live barriers were not read back as written (H200).
        """
        ring = self.stages * self.place_bytes
        sums = 4 * 8 * self.token_tiles * self.pitch
        return _BARRIER_BYTES + -(-max(ring, sums) // 64) * 64

    @property
    def token_bytes(self) -> int:
        """From one staged token to the next; an odd multiple of 16, which spreads over banks."""
        return 2 * self.staged + 16

    @property
    def sums(self) -> int:
        """Float32 sums of a lane."""
        return 4 * self.row_tiles * self.token_tiles


class Stream:
    """The records of one warp."""

    def __init__(self, shape: StreamShape) -> None:
        self.shape = shape

    def start(self, ring: Int32, sources: list, count: Int32) -> None:
        """Begin to copy records; needs nothing that an earlier kernel writes.

        Args: ring: shared address of shape.warp_bytes of this warp, 64-byte aligned; sources:
        global address of the first record of each row tile; count: records of each.
        """
        lane = cute.arch.lane_idx()
        self.barriers, self.places = ring, ring + _BARRIER_BYTES
        self.sources, self.count = sources, count
        self.codes = self.places + 16 * lane
        self.scales = self.places + CODE_BYTES + 2 * lane
        decode.barriers_init(True, self.barriers, self.shape.stages, 1)
        cute.arch.sync_warp()
        for stage in range(self.shape.stages):
            self._copy(Int32(stage))

    def _copy(self, stage: Int32) -> None:
        """Ask for the records of a stage, if there is such a stage."""
        place = stage & (self.shape.stages - 1)
        size = Int32(BATCH * RECORD_BYTES)
        left = self.count - stage * BATCH
        if self.shape.ragged:
            size = cutlass.min(left, Int32(BATCH)) * RECORD_BYTES
        start = self.places + place * self.shape.place_bytes
        starts = [start + m * (BATCH * RECORD_BYTES) for m in range(self.shape.row_tiles)]
        offset = Int64(stage) * (BATCH * RECORD_BYTES)
        sources = [source + offset for source in self.sources]
        decode.copy_bytes(left > 0, self.barriers + 8 * place, starts, sources, size)

    def _registers(self, token_tiles: int) -> tuple[Any, Any, Any, Any]:
        """So many token tiles; operands of a record; codes and scales of a batch."""
        tiles = self.shape.row_tiles
        x = cute.make_rmem_tensor(8 * token_tiles, Uint32)
        a = cute.make_rmem_tensor(16 * tiles, Uint32)
        words = cute.make_rmem_tensor(4 * BATCH * tiles, Uint32)
        return x, a, words, cute.make_rmem_tensor(BATCH * tiles, Uint32)

    @cute.jit
    def multiply(self, sums: Any, tokens: Any, left: Int32) -> None:
        """Add to the sums.

        Args: sums: register tensor float32 [shape.sums]; tokens: register tensor int64
        [token_tiles], address of column 16 t of the first record of this lane's token g of each
        tile, 16-byte aligned, of any readable token where there is none: nothing of it reaches the
        sums of others; left: columns of a token from the first record on (used where ragged).
        """
        tiles = self.shape.token_tiles
        left = cutlass.min(left, COLUMNS * self.count) - 16 * (cute.arch.lane_idx() & 3)
        x, a, words, pairs = self._registers(BATCH * tiles)
        for at in cutlass.range_constexpr(BATCH * tiles):
            start = tokens[at % tiles] + at // tiles * _ROW_BYTES
            self._load_tokens(x, at, start, left > COLUMNS * (at // tiles))
        stages = (self.count + (BATCH - 1)) // BATCH
        for number in cutlass.range(0, stages, 1):
            stage = Int32(number)
            self._take(stage, words, pairs)
            # What is asked for in the last stage is not used.
            step = choose(stage + 1 < stages, Int32(BATCH * _ROW_BYTES), Int32(0))
            left = left - COLUMNS * BATCH
            for n in cutlass.range_constexpr(tiles):
                tokens[n] = tokens[n] + step
            for r in cutlass.range_constexpr(BATCH):
                self._decode(a, words, pairs, r)
                for n in cutlass.range_constexpr(tiles):
                    at = r * tiles + n
                    self._products(sums, a, x, n, at)
                    # The next stage's columns take the registers of this one's.
                    wanted = left > COLUMNS * r if self.shape.ragged else None
                    self._load_tokens(x, at, tokens[n] + r * _ROW_BYTES, wanted)

    @cute.jit
    def multiply_staged(self, sums: Any, tokens: Int32, ready: Int32, batch: Int32) -> None:
        """Add to the sums, with tokens in shared memory, shape.token_bytes apart.

        Args: sums: as for `multiply`; tokens: shared address of column 16 t of the first record of
        this lane's token g of the first tile; ready: of the mbarriers of the staged chunks, each
        of which completes once; batch: the first record's number in the staged columns, in
        batches. Columns beyond the tokens' width are zero up to the end of their batch.
        """
        tiles = self.shape.token_tiles
        x, a, words, pairs = self._registers(2)
        stages = (self.count + (BATCH - 1)) // BATCH
        for number in cutlass.range(0, stages, 1):
            stage = Int32(number)
            chunk = (batch + stage) // (CHUNK // (COLUMNS * BATCH))
            ptx.barrier_wait(ready + 8 * chunk, Int32(0))
            self._take(stage, words, pairs)
            self._read_tokens(x, 0, tokens)
            for r in cutlass.range_constexpr(BATCH):
                self._decode(a, words, pairs, r)
                for n in cutlass.range_constexpr(tiles):
                    at = r * tiles + n
                    if cutlass.const_expr(at + 1 < BATCH * tiles):
                        row = (at + 1) % tiles * (8 * self.shape.token_bytes)
                        start = tokens + (row + (at + 1) // tiles * _ROW_BYTES)
                        self._read_tokens(x, (at + 1) % 2, start)
                    self._products(sums, a, x, n, at % 2)
            tokens = tokens + BATCH * _ROW_BYTES

    @cute.jit
    def _take(self, stage: Int32, words: Any, pairs: Any) -> None:
        """This lane's codes and scales of a stage; ask for what takes the place of the last."""
        stages = self.shape.stages
        place = stage & (stages - 1)
        phase = stage // stages & 1
        ptx.barrier_wait(self.barriers + 8 * place, phase)
        self._load_records(words, pairs, place * self.shape.place_bytes, self.count - stage * BATCH)
        # The place of the stage before: every lane has had its part of it in registers.
        cute.arch.sync_warp()
        if stage > 0:
            self._copy(stage + (stages - 1))

    def _load_tokens(self, x: Any, at: int, address: Int64, wanted: Any) -> None:
        """A token's columns of one record to tile `at` of x; zeros unless wanted (None: always)."""
        for i in range(2):
            if wanted is None:
                loaded = decode.global_load_x4(address + 16 * i)
            else:
                loaded = ptx.global_load_u32x4_if(wanted, address + 16 * i)
            for j in range(4):
                x[8 * at + 4 * i + j] = loaded[j]

    def _read_tokens(self, x: Any, at: int, address: Int32) -> None:
        """A staged token's columns for one record to tile `at` of x."""
        for i in range(2):
            loaded = ptx.shared_load_u32x4(address + 16 * i)
            for j in range(4):
                x[8 * at + 4 * i + j] = loaded[j]

    def _load_records(self, words: Any, pairs: Any, offset: Int32, left: Int32) -> None:
        """This lane's codes and scales of a place; where ragged, zeros beyond `left` records."""
        for i in range(BATCH * self.shape.row_tiles):
            start = offset + i * RECORD_BYTES
            loaded = ptx.shared_load_u32x4(self.codes + start)
            pair = decode.shared_load_u16(self.scales + start)
            mask = choose(left > i % BATCH, Uint32(0xFFFFFFFF), Uint32(0))
            for j in range(4):
                words[4 * i + j] = loaded[j] & mask if self.shape.ragged else loaded[j]
            pairs[i] = pair & mask if self.shape.ragged else pair

    def _decode(self, a: Any, words: Any, pairs: Any, record: int) -> None:
        """Record `record` of a batch to operands, all four steps of every row tile."""
        for m in range(self.shape.row_tiles):
            at = m * BATCH + record
            scales = decode.spread_scales(pairs[at])
            for s in range(4):
                codes = decode.spread_codes(words[4 * at + s])
                for i in range(4):
                    a[16 * m + 4 * s + i] = ptx.mul_bf16x2(codes[i], scales[i % 2])

    def _products(self, sums: Any, a: Any, x: Any, n: int, held: int) -> None:
        """All row tiles of one record by token tile n, which is tile `held` of x."""
        for s in range(4):
            for m in range(self.shape.row_tiles):
                at = 4 * (m * self.shape.token_tiles + n)
                b = [x[8 * held + 2 * s + i] for i in range(2)]
                weights = [a[16 * m + 4 * s + i] for i in range(4)]
                old = [sums[at + c] for c in range(4)]
                for c, value in enumerate(ptx.mma_bf16(weights, b, old)):
                    sums[at + c] = value

    def zero(self, sums: Any, number: int) -> None:
        """Clear so many sums."""
        for i in range(number):
            sums[i] = Float32(0.0)

    def leave(self, sums: Any) -> None:
        """Write the sums to the warp's shared memory, for `left_at`, when its ring is through."""
        shape = self.shape
        lane = cute.arch.lane_idx()
        start = self.places + ((lane & 3) * (2 * shape.pitch) + (lane >> 2)) * 4
        for m in range(shape.row_tiles):
            for n in range(shape.token_tiles):
                for c in range(4):
                    at = (8 * n + c % 2) * shape.pitch + ROWS * m + 8 * (c // 2)
                    value = sums[4 * (m * shape.token_tiles + n) + c]
                    ptx.shared_store_f32(start + 4 * at, value)

    def left_at(self, ring: Int32, row: Int32, token: Int32) -> Int32:
        """Shared address of a float32 sum that the warp with that ring has left there.

        Args: row: of 16 row_tiles; token: of 8 token_tiles.
        """
        return ring + _BARRIER_BYTES + (token * self.shape.pitch + row) * 4

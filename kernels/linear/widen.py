"""Records to matrices of 16-bit or 8-bit elements, for a product with many tokens.

A warp takes two neighbouring records of a row of records, then those below them, `tiles` times,
and reads ahead by one. What a lane decodes at a time is 16 bytes of row g and 16 of row g + 8: two
words of a record for bfloat16, four for e4m3. Eight neighbouring lanes have a whole line of 128
bytes of a row (one record's columns in bfloat16, two records' in e4m3), so each store fills four
lines; half a sector at a time would be two writes for L2.

A value is 0.5625 bytes read and 2 (1) written; [4096, 4096] to bfloat16 moves 43 MB. For a record
(1024 values), everything included, a warp issues 83 slots to bfloat16 and 150 to e4m3 (SASS of the
loop, sm_90a, ptxas 13.4). That is 21 and 38 clocks of an SM's four schedulers, of 140 and 85 that
its bytes take at 4.2 TB/s over 132 SMs at 1.7 GHz: memory is the bound. Stores of a record fill 64
(32) sectors. Measured on an H200: 64 experts of [4096, 4096] to bfloat16 795 us (3.46 TB/s), to
e4m3 454 (3.70), one matrix 14.9 and 10.3, 87% and 83% of a copy of as many bytes (the factor of
e4m3 was a number of the launch then).
"""

from typing import Any

import cutlass
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.hardware import current_arch, num_sms
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.linear import decode
from sglang_dsv4.kernels.linear.records import CODE_BYTES, COLUMNS, RECORD_BYTES, ROWS
from sglang_dsv4.kernels.linear.stream import UNDO
from sglang_dsv4.kernels.operands import fake_compact
from sglang_dsv4.kernels.reference.fp8 import WEIGHT_SHIFT

WARPS = 8
THREADS = 32 * WARPS
BLOCKS = 4
"""Blocks of an SM that its registers hold."""
RECORDS = 2
"""Neighbouring records of a warp."""
LINE = 128
"""Bytes that eight lanes store to a row."""
MOST_TILES = 4
"""Rows of records of a warp; more leave less to spread over the SMs at the end."""
ELEMENTS = {torch.bfloat16: BFloat16, torch.float8_e4m3fn: Uint8}
"""What the kernel is told of the output; a byte is a byte."""


DIVISOR = {torch.bfloat16: UNDO, torch.float8_e4m3fn: 1.0 / WEIGHT_SHIFT}
"""Elements are values over it: exact in bfloat16; in e4m3 below its 448, as values end at 2688."""


class Widen:
    """The kernel for one type of elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property
    def words(self) -> int:
        """32-bit words of codes that a lane decodes at a time: 16 bytes of each of two rows."""
        return 4 // self.dtype.itemsize

    @property
    def lines(self) -> int:
        """Lines of a row that the warp's records make."""
        return RECORDS * COLUMNS * self.dtype.itemsize // LINE

    @cute.jit
    def __call__(
        self,
        records: Any,
        out: Any,
        tiles: Int32,
        stream: Any,
    ) -> None:
        """Launch a warp for each two records of `tiles` rows of records."""
        warps = (records.shape[1] + tiles - 1) // tiles * self.across(records)
        self.kernel(records, out, tiles).launch(
            grid=[(warps + (WARPS - 1)) // WARPS, records.shape[0], 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, records: Any, out: Any, tiles: Int32) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, matrix, _ = cute.arch.block_idx()
        lane, item = tid & 31, self.dtype.itemsize
        index = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = index // self.across(records)
        first, across = group * tiles, (index - group * self.across(records)) * RECORDS
        record = (Int64(matrix) * records.shape[1] + first) * records.shape[2] + across
        start = address(records) + record * RECORD_BYTES
        codes, scales = self.sources(start, lane)
        below = Int64(records.shape[2]) * RECORD_BYTES

        # Lane 8 i + j has bytes 16 j of each line of rows i, i + 4, i + 8, i + 12.
        row, place = lane >> 3, 16 * (lane & 7)
        rows, width = Int32(out.shape[1]), Int32(out.shape[2])
        pitch = Int64(width) * item
        line = Int64(matrix) * rows + first * ROWS + row
        target = address(out) + line * pitch + (across * (COLUMNS * item) + place)
        # Rows below this lane's first, itself included; none where its column does not exist.
        left = cute.make_rmem_tensor(self.lines, Int32)
        for n in cutlass.range_constexpr(self.lines):
            column = across * COLUMNS + (LINE * n + place) // item
            known = cutlass.min(rows - first * ROWS, tiles * ROWS) - row
            left[n] = choose(column < width, known, Int32(0))

        number = self.words + 1
        held = cute.make_rmem_tensor(2 * self.lines * number, Uint32)
        for i in cutlass.range_constexpr(2 * self.lines * number):
            held[i] = Uint32(0)
        for n in cutlass.range_constexpr(self.lines):
            for q in cutlass.range_constexpr(2):
                self.load(held, n, q, left[n] > 0, codes, scales)
        for _ in cutlass.range(0, tiles, 1, unroll=1):
            codes, scales = codes + below, scales + below
            for n in cutlass.range_constexpr(self.lines):
                for q in cutlass.range_constexpr(2):
                    at = (2 * n + q) * number
                    words = [held[at + i] for i in range(number)]
                    halves = self.decode(words[:-1], words[-1])
                    # The next row's take the registers of this one's.
                    self.load(held, n, q, left[n] > ROWS, codes, scales)
                    for h in cutlass.range_constexpr(2):
                        down = 4 * q + 8 * h
                        stored = self.elements(halves[h])
                        place_of = target + (pitch * down + LINE * n)
                        decode.store_u32x4_if(left[n] > down, place_of, stored)
            for n in cutlass.range_constexpr(self.lines):
                left[n] = left[n] - ROWS
            target = target + pitch * ROWS

    def across(self, records: Any) -> Any:
        """Warps for one row of records."""
        return (Int32(records.shape[2]) + (RECORDS - 1)) // RECORDS

    def sources(self, start: Int64, lane: Int32) -> tuple[Int64, Int64]:
        """Where a lane's first codes and scales are, of the record that its line begins with."""
        words = self.words
        lanes = 16 // words  # of a row of a record
        record, part = (lane & 7) // lanes, (lane & 7) % lanes
        own = start + record * RECORD_BYTES
        codes = own + (64 * (lane >> 3) + 4 * words * part)
        return codes, own + (CODE_BYTES + 8 * (lane >> 3) + 2 * (words * part // 4))

    def load(self, held: Any, n: int, q: int, known: Any, codes: Int64, scales: Int64) -> None:
        """Codes and scales of line n of rows 4 q + lane / 8 and those 8 below, where known."""
        number = self.words + 1
        at, record = (2 * n + q) * number, n * RECORD_BYTES
        old = [held[at + i] for i in range(number)]
        new = decode.load_codes_if(
            known, codes + (record + 256 * q), scales + (record + 32 * q), old
        )
        for i in range(number):
            held[at + i] = new[i]

    def decode(self, words: list, pair: Uint32) -> list:
        """The columns of row g and of row g + 8 as bf16 pairs, over 2^7."""
        scales = decode.spread_scales(pair)
        halves: list = [[], []]
        for word in words:
            codes = decode.spread_codes(word)
            for i in range(4):
                halves[i % 2].append(ptx.mul_bf16x2(codes[i], scales[i % 2]))
        return halves

    def elements(self, pairs: list) -> list:
        """bf16 pairs over 2^7 as the four registers of what is stored."""
        if self.dtype == torch.bfloat16:
            return pairs
        factor = Float32(UNDO / DIVISOR[self.dtype])
        values = [v * factor for pair in pairs for v in decode.bf16x2_to_f32x2(pair)]
        return [decode.pack_e4m3x4(*values[i : i + 4]) for i in range(0, 16, 4)]


@compiled_kernel
def compile_widen(arch: str, dtype: torch.dtype) -> Any:
    """Compile for an architecture and a type of elements, from fake tensors; needs no GPU."""
    size = cute.sym_int32

    matrices = size()
    return compile_for(
        arch,
        Widen(dtype),
        fake_compact(Uint8, (matrices, size(), size(), RECORD_BYTES), 16),
        fake_compact(ELEMENTS[dtype], (matrices, size(), size()), 16),
        Int32(1),
    )


def row_tiles(matrices: int, down: int, across: int, sms: int) -> int:
    """Rows of records of a warp: as many as leave a warp for each place of ``sms``."""
    warps = matrices * down * -(-across // RECORDS)
    return max(1, min(MOST_TILES, warps // (sms * BLOCKS * WARPS)))


def widen(records: Tensor, out: Tensor, first: int = 0) -> None:
    """Matrices first, first + 1, ... over ``DIVISOR`` and without ``scale_2``.

    Args:
        records: uint8 [E, R, C, 576] by ``records.pack_records``.
        out: bfloat16, or float8_e4m3fn, rounded to nearest even, contiguous [n, out, in], ``in`` a
            multiple of 16; written here.
    """
    if not out.numel():
        return
    records, dtype = records[first : first + len(out)].contiguous(), out.dtype
    matrices, down, across, _ = records.shape
    tiles = row_tiles(matrices, down, across, num_sms(records.device.index or 0))
    stored = out if dtype == torch.bfloat16 else out.view(torch.uint8)
    compile_widen(current_arch(), dtype)(records, stored, tiles)

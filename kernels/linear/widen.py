"""Records to matrices of 16-bit or 8-bit elements, for a product with many tokens.

A warp takes four neighbouring records of a row of records; lane (g, t) decodes columns
16 t .. 16 t + 15 of rows g and g + 8 and writes 32 (16) contiguous bytes of each.

Roofline: 0.5625 bytes read and 2 (1) written for a value; [4096, 4096] to bfloat16 moves 43 MB.
Compiled and emulated, not run.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.linear import decode
from sglang_dsv4.kernels.linear.records import CODE_BYTES, COLUMNS, RECORD_BYTES, ROWS
from sglang_dsv4.kernels.linear.stream import UNDO
from sglang_dsv4.kernels.operands import fake_compact

WARPS = 8
THREADS = 32 * WARPS
RECORDS = 4
"""Records of a warp."""
ELEMENTS = {torch.bfloat16: BFloat16, torch.float8_e4m3fn: Uint8}
"""What the kernel is told of the output; a byte is a byte."""


@dataclass(frozen=True)
class WidenShape:
    """Static shape.

    Attributes:
        dtype: bfloat16, or float8_e4m3fn, which saturates at 448.
        exact: elements are values over 2^7, which bfloat16 holds exactly; else they are values
            times a factor, rounded to nearest even once.
        scaled: the factor is scale_2 times a number, else the number.
    """

    dtype: torch.dtype
    exact: bool
    scaled: bool


class Widen:
    """The kernel for one static shape."""

    def __init__(self, shape: WidenShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(
        self,
        records: Any,
        scale_2: Any,
        factor: Float32,
        out: Any,
        stream: Any,
    ) -> None:
        """Launch a block for each 32 records of a row of records."""
        blocks = (records.shape[2] + (WARPS * RECORDS - 1)) // (WARPS * RECORDS)
        self.kernel(records, scale_2, factor, out).launch(
            grid=[blocks, records.shape[1], records.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, records: Any, scale_2: Any, factor: Float32, out: Any) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, tile, matrix = cute.arch.block_idx()
        lane = tid & 31
        first = (block * WARPS + (tid >> 5)) * RECORDS
        across = Int32(records.shape[2])
        words = cute.make_rmem_tensor(4 * RECORDS, Uint32)
        pairs = cute.make_rmem_tensor(RECORDS, Uint32)
        row = (Int64(matrix) * records.shape[1] + tile) * across
        for r in cutlass.range_constexpr(RECORDS):
            # Records beyond the last are read as the last and not stored.
            record = row + cutlass.min(first + r, across - 1)
            start = address(records) + record * RECORD_BYTES
            loaded = ptx.global_load_x4(start + 16 * lane)
            for i in cutlass.range_constexpr(4):
                words[4 * r + i] = loaded[i]
            pairs[r] = ptx.global_load_u16(start + CODE_BYTES + 2 * lane)
        if cutlass.const_expr(self.shape.scaled):
            factor = factor * ptx.global_load_f32(address(scale_2))
        rows, width = Int32(out.shape[1]), Int32(out.shape[2])
        bytes_each = self.shape.dtype.itemsize
        for r in cutlass.range_constexpr(RECORDS):
            halves = self.decode([words[4 * r + i] for i in range(4)], pairs[r])
            column = (first + r) * COLUMNS + 16 * (lane & 3)
            for h in cutlass.range_constexpr(2):
                line = tile * ROWS + 8 * h + (lane >> 2)
                known = (line < rows) & (column < width)
                at = (Int64(matrix) * rows + line) * width + column
                stored = self.elements(halves[h], factor)
                for i in cutlass.range_constexpr(len(stored) // 4):
                    target = address(out) + at * bytes_each + 16 * i
                    decode.store_u32x4_if(known, target, stored[4 * i : 4 * i + 4])

    def decode(self, words: list, pair: Uint32) -> list:
        """The 16 columns of row g and of row g + 8 as bf16 pairs, over 2^7."""
        scales = decode.spread_scales(pair)
        halves: list = [[], []]
        for word in words:
            codes = decode.spread_codes(word)
            for i in range(4):
                halves[i % 2].append(ptx.mul_bf16x2(codes[i], scales[i % 2]))
        return halves

    def elements(self, pairs: list, factor: Float32) -> list:
        """bf16 pairs over 2^7 as registers of what is stored."""
        if self.shape.exact:
            return pairs
        values = [v * factor for pair in pairs for v in decode.bf16x2_to_f32x2(pair)]
        if self.shape.dtype == torch.bfloat16:
            return [ptx.pack_bf16x2(*values[i : i + 2]) for i in range(0, 16, 2)]
        return [decode.pack_e4m3x4(*values[i : i + 4]) for i in range(0, 16, 4)]


@compiled_kernel
def compile_widen(arch: str, shape: WidenShape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    size = cute.sym_int32

    matrices = size()
    return compile_for(
        arch,
        Widen(shape),
        fake_compact(Uint8, (matrices, size(), size(), RECORD_BYTES), 16),
        fake_compact(Float32, (1,), 4),
        Float32(1.0),
        fake_compact(ELEMENTS[shape.dtype], (matrices, size(), size()), 16),
    )


def widen(records: Tensor, scale_2: Tensor, out_features: int, in_features: int) -> Tensor:
    """A weight in bfloat16, rounded once.

    Args:
        records: uint8 [R, C, 576] by ``records.pack_records``; scale_2: float32 [1].
        out_features, in_features: the weight's shape; in_features a multiple of 16.

    Returns:
        bfloat16 [out, in].
    """
    out = torch.empty((out_features, in_features), dtype=torch.bfloat16, device=records.device)
    _launch(records[None], scale_2, UNDO, out[None])
    return out


def widen_experts(records: Tensor, first: int, out: Tensor, factor: float = 1.0 / UNDO) -> None:
    """Weights of experts first, first + 1, ... without ``scale_2``, each value times ``factor``.

    Args:
        records: uint8 [E, R, C, 576]. out: bfloat16, exact with the factor 2^-7, or float8_e4m3fn,
            which saturates at 448, contiguous [n, out, in], in a multiple of 16; written here.
    """
    _launch(records[first : first + len(out)], None, factor * UNDO, out)


def _launch(records: Tensor, scale_2: Tensor | None, factor: float, out: Tensor) -> None:
    if not out.numel():
        return
    exact = scale_2 is None and factor == 1.0 and out.dtype == torch.bfloat16
    kernel = compile_widen(current_arch(), WidenShape(out.dtype, exact, scale_2 is not None))
    if scale_2 is None:
        scale_2 = torch.empty(1, device=records.device)
    if out.dtype != torch.bfloat16:
        out = out.view(torch.uint8)
    kernel(records.contiguous(), scale_2, factor, out)

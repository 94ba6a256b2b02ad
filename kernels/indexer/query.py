"""indexer_query on a GPU: RoPE and Hadamard transform of the indexer's queries, one pass.

Four lanes take one head of 128 values, eight heads a warp: lane c holds values 32 p + 8 c + e,
p < 4, e < 8, in four 16-byte accesses. Of the seven butterfly stages, spans 1, 2, 4 (e) and 32, 64
(p) stay within a lane, 8 and 16 are exchanges between lanes; the rotated half is p = 2 and 3, so
every lane rotates eight pairs and no warp diverges. The stages keep the reference's order, and no
sum is contracted: the bits are the reference's.

Roofline, bf16: reads and writes 256 B a head, 8 flops a value and two shuffles: bandwidth only.
4096 tokens of 64 heads move 135 MB.

Measured on an H200, 2026-12-02 (BENCHMARKS.md), 64 heads: 4096 tokens take 40.2 us, 3.4 TB/s, 85%
of the rate of a copy of as many bytes; 16 tokens 3.6 us, that copy 1.9 us. The bits of the result
were the reference's in 100 tests.
"""

from typing import Any

import torch
from cutlass import Float32, Int32, Int64, cute, range_constexpr
from torch import Tensor

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.operands import (
    CUTE_TYPES,
    VECTOR_BYTES,
    aligned_rows,
    fake_rows,
    fake_vector,
    index_vector,
)

HEAD_DIM = 128
ROPE_DIM = 64
LANES = 4
VECTOR = 8
PIECES = 4
PIECE = LANES * VECTOR
PAIRS = VECTOR // 2
WARPS = 8
HEADS_PER_BLOCK = WARPS * 32 // LANES


def _butterflies(values: list[Float32], span: int) -> list[Float32]:
    """One stage within a lane: values i and i + span, where i has no such bit."""
    mixed = list(values)
    for i in range(len(values)):
        if i & span == 0:
            mixed[i] = cm.add_rn(values[i], values[i + span])
            mixed[i + span] = cm.sub_rn(values[i], values[i + span])
    return mixed


def _exchanges(values: list[Float32], lane: Int32, distance: int) -> list[Float32]:
    """One stage between lanes: low + high in the low lane, low - high in the high one."""
    is_high = lane // distance % 2 != 0
    mixed = []
    for value in values:
        other = cute.arch.shuffle_sync_bfly(value, distance)
        mixed.append(cm.add_rn(other, cm.select(is_high, -value, value)))
    return mixed


class IndexerQuery:
    """The kernel for one number of heads."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        out: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch over heads of all tokens."""
        total = cute.size(positions) * self.heads
        self.kernel(q, positions, table, out).launch(
            grid=[(total + HEADS_PER_BLOCK - 1) // HEADS_PER_BLOCK, 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, positions: cute.Tensor, table: cute.Tensor, out: cute.Tensor
    ) -> None:
        """One head for four lanes; those past the last head work on it again, with its bits."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % LANES
        wanted = block * HEADS_PER_BLOCK + thread // LANES
        last = Int32(cute.size(positions) * self.heads) - 1
        index = cm.select(wanted < last, wanted, last)
        token, head = index // self.heads, index % self.heads
        source = Int64(token) * cm.stride_of(q) + head * cm.stride_of(q, 1) + lane * VECTOR
        values = []
        for piece in range_constexpr(PIECES):
            at = source + piece * PIECE
            values += cm.load_float(cm.element_pointer(q, at, VECTOR_BYTES), VECTOR)
        row = Int64(positions[token]) * cm.stride_of(table) + lane * PAIRS
        for part in range_constexpr(ROPE_DIM // PIECE):
            at = row + part * (PIECE // 2)
            cos = cm.load_float(cm.element_pointer(table, at, VECTOR_BYTES), PAIRS)
            at = at + ROPE_DIM // 2
            sin = cm.load_float(cm.element_pointer(table, at, VECTOR_BYTES), PAIRS)
            start = (PIECES - ROPE_DIM // PIECE + part) * VECTOR
            rotated = cm.rotate_pairs(values[start : start + VECTOR], cos, sin, False)
            values = values[:start] + rotated + values[start + VECTOR :]
        for span in (1, 2, 4):
            values = _butterflies(values, span)
        for distance in (1, 2):
            values = _exchanges(values, lane, distance)
        for span in (VECTOR, 2 * VECTOR):
            values = _butterflies(values, span)
        values = [cm.mul_rn(value, Float32(HEAD_DIM**-0.5)) for value in values]
        target = Int64(index) * HEAD_DIM + lane * VECTOR
        for piece in range_constexpr(PIECES):
            at = target + piece * PIECE
            span_values = values[piece * VECTOR : (piece + 1) * VECTOR]
            cm.store_vector(cm.element_pointer(out, at, VECTOR_BYTES), span_values)


@compiled_kernel
def compile_indexer_query(arch: str, dtype: torch.dtype, heads: int) -> Any:
    """Compile for one architecture, dtype and number of heads; needs no GPU."""
    tokens = cute.sym_int32()
    strides = [cute.sym_int64(divisibility=VECTOR_BYTES // dtype.itemsize) for _ in range(2)]
    shape = (tokens, heads, HEAD_DIM)
    q = cute.runtime.make_fake_tensor(
        CUTE_TYPES[dtype], shape, (*strides, 1), assumed_align=VECTOR_BYTES
    )
    out = cute.runtime.make_fake_compact_tensor(
        CUTE_TYPES[dtype], shape, stride_order=(2, 1, 0), assumed_align=VECTOR_BYTES
    )
    table = fake_rows(torch.float32, ROPE_DIM)
    return compile_for(arch, IndexerQuery(heads), q, fake_vector(torch.int64), table, out)


def indexer_query(q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """RoPE of the last 64 values, then the orthonormal Hadamard transform of all 128.

    Args: q bfloat16, float16 or float32 [T, Hi, 128], tokens and heads any distance apart;
    positions integer [T]; table float32 [max_position, 64].
    Returns [T, Hi, 128] in q's dtype, rounded once. As `reference.indexer_query.indexer_query`.

    Raises UnsupportedError for other widths.
    """
    if q.shape[-1] != HEAD_DIM or table.shape[-1] != ROPE_DIM:
        raise UnsupportedError(
            f"Found heads of {q.shape[-1]} values with {table.shape[-1]} rotated, wanted "
            f"{HEAD_DIM} and {ROPE_DIM}: use the reference for other widths."
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel():
        kernel = compile_indexer_query(current_arch(), q.dtype, q.shape[1])
        kernel(aligned_rows(q), index_vector(positions), table, out)
    return out

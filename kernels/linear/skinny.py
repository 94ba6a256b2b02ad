"""y = x W^T for up to 64 tokens with an NVFP4 weight in records, W4A16.

The warps of a block stream records (`stream`) and multiply them by mma.sync (m16n8k16), the weight
rows as left operand; sums of warps, then of blocks, that share columns are added in a fixed order:
the same bits every time. Up to 16 tokens are read straight from global memory, by warps that share
the columns of few rows. More tokens are staged: one bulk copy for each token and chunk of columns
brings the block's columns to shared memory, where warps of different rows share them. The launch is
programmatic; copies of weights begin before the kernel before this one has ended, so that kernel
must not write the weight.

Roofline. Bytes: 0.5625 out * in + 2 T (in + out). Instructions: a record (1024 values) takes 75
issue slots at 1 to 8 tokens (72 with two rows of records a warp), 35 of them on the half-rate
integer pipe, so an SM of four schedulers decodes 55 values a clock; 4.8 TB/s over 132 SMs at 1.7
GHz brings 38. At 64 tokens a record takes 111 slots, 32 of them products; those are the bound, on
mma.sync's rate. Run on an H200: the same bits in every repetition, cosines to the reference above
0.99999. On sm_100a and sm_120a compiled, not run.

e2m1 * e4m3 has six significant bits and is exact in bfloat16; ``scale_2`` multiplies the float32
sum.
"""

import math
from typing import Any

import cutlass
import cutlass.memory
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.hardware import SHARED_BYTES, current_arch, num_sms
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.linear import decode
from sglang_dsv4.kernels.linear.records import COLUMNS, RECORD_BYTES, ROWS
from sglang_dsv4.kernels.linear.skinny_plan import (
    READY_OFFSET,
    RESERVED_BYTES,
    THREADS,
    WARPS,
    WARPS_OFFSET,
    SkinnyPlan,
    SkinnyShape,
    skinny_plan,
)
from sglang_dsv4.kernels.linear.stream import BATCH, CHUNK, UNDO, Stream
from sglang_dsv4.kernels.linear.widen import DIVISOR, widen
from sglang_dsv4.kernels.operands import aligned_rows, fake_compact

MOST_TOKENS = 64
"""Above it the weight is widened first."""


class SkinnyLinear:
    """The kernel for one static shape on one architecture."""

    def __init__(self, shape: SkinnyShape, arch: str) -> None:
        self.shape = shape
        self.stream = Stream(shape.stream)
        self.column_warps = WARPS // shape.row_warps
        block = shape.shared_bytes + RESERVED_BYTES
        whole = SHARED_BYTES[arch] + RESERVED_BYTES
        # What the blocks leave of an SM's shared memory (in percent) is L1, for the tokens.
        self.carveout = min(100, math.ceil(100 * shape.blocks * block / whole))

    @cute.jit
    def __call__(
        self,
        x: Any,
        records: Any,
        scale_2: Any,
        out: Any,
        parts: Any,
        arrived: Any,
        splits: Int32,
        stream: Any,
    ) -> None:
        """Launch a block for each group of rows and each share of the columns."""
        groups = (out.shape[1] + (self.shape.rows - 1)) // self.shape.rows
        self.kernel(x, records, scale_2, out, parts, arrived, splits).launch(
            grid=[groups, splits, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.shape.blocks,
            preferred_smem_carveout=self.carveout,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: Any,
        records: Any,
        scale_2: Any,
        out: Any,
        parts: Any,
        arrived: Any,
        splits: Int32,
    ) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        group, split, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid & 31
        memory = cutlass.memory.SmemAllocator().allocate(self.shape.shared_bytes, 128)
        self.base = memory.toint()
        row_warp, column_warp = warp // self.column_warps, warp % self.column_warps
        first, count = self.share(split * self.column_warps + column_warp, splits, records)
        row_tile = (group * self.shape.row_warps + row_warp) * self.shape.stream.row_tiles
        sources = [
            self.source(records, row_tile + m, first) for m in range(self.shape.stream.row_tiles)
        ]
        self.stream.start(self.ring(warp), sources, count)
        sums = cute.make_rmem_tensor(self.shape.stream.sums, Float32)
        self.stream.zero(sums, self.shape.stream.sums)
        if cutlass.const_expr(self.shape.stream.staged):
            block_first, _ = self.share(split * self.column_warps, splits, records)
            block_last, _ = self.share((split + 1) * self.column_warps, splits, records)
            width = cutlass.min(Int32(x.shape[1]), block_last * COLUMNS) - block_first * COLUMNS
            self.prepare_tile(warp, lane, width)
            cute.arch.sync_threads()
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.fill_tile(warp, x, block_first, width)
            tile = self.base + self.shape.tile_offset
            row = (lane >> 2) * self.shape.stream.token_bytes + (lane & 3) * 32
            start = tile + row + (first - block_first) * (2 * COLUMNS)
            batch = (first - block_first) // BATCH
            self.stream.multiply_staged(sums, start, self.base + READY_OFFSET, batch)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            tokens = cute.make_rmem_tensor(self.shape.stream.token_tiles, Int64)
            column = Int64(first * COLUMNS + 16 * (lane & 3)) * 2
            for n in cutlass.range_constexpr(self.shape.stream.token_tiles):
                token = cutlass.min(Int32(8 * n) + (lane >> 2), Int32(x.shape[0]) - 1)
                tokens[n] = address(x) + Int64(token) * x.stride[0] * 2 + column
            self.stream.multiply(sums, tokens, Int32(x.shape[1]) - first * COLUMNS)
        self.stream.leave(sums)
        cute.arch.sync_threads()
        self.finish(tid, group, split, splits, scale_2, out, parts, arrived)

    def ring(self, warp: Int32) -> Int32:
        """Shared address of a warp's own memory."""
        return self.base + WARPS_OFFSET + warp * self.shape.stream.warp_bytes

    def prepare_tile(self, warp: Int32, lane: Int32, width: Int32) -> None:
        """Barriers of the chunks; zeros from the block's width to the end of its batch."""
        shape = self.shape.stream
        chunks, arrivals = shape.staged // CHUNK, 8 * shape.token_tiles
        decode.barriers_init(warp == 0, self.base + READY_OFFSET, chunks, arrivals)
        if shape.ragged:
            column = width + 8 * lane
            end = (width + (BATCH * COLUMNS - 1)) // (BATCH * COLUMNS) * (BATCH * COLUMNS)
            for n in range(shape.token_tiles):
                start = self.tile_row(warp, n) + 2 * column
                decode.shared_zero_x4_if(column < end, start)

    def tile_row(self, warp: Int32, n: int) -> Int32:
        """Shared address of token `warp` of a tile."""
        return self.base + self.shape.tile_offset + (8 * n + warp) * self.shape.stream.token_bytes

    def fill_tile(self, warp: Int32, x: Any, first: Int32, width: Int32) -> None:
        """Ask for this warp's tokens, one of each tile, chunk by chunk of the block's columns."""
        shape = self.shape.stream
        start = address(x) + Int64(first) * (2 * COLUMNS)
        for chunk in range(shape.staged // CHUNK):
            size = cutlass.min(width - chunk * CHUNK, Int32(CHUNK)) * 2
            for n in range(shape.token_tiles):
                token = 8 * n + warp
                source = start + Int64(token) * x.stride[0] * 2 + chunk * (2 * CHUNK)
                target = self.tile_row(warp, n) + chunk * (2 * CHUNK)
                known = (token < Int32(x.shape[0])) & (size > 0)
                barrier = self.base + READY_OFFSET + 8 * chunk
                decode.arrive_with_bytes(known, barrier, target, source, size)

    def share(self, index: Int32, splits: Int32, records: Any) -> tuple[Int32, Int32]:
        """First record and number of records in each row of a warp's share, whole batches."""
        across = Int32(records.shape[1])
        batches = (across + (BATCH - 1)) // BATCH
        shares = splits * self.column_warps
        first = batches * index // shares * BATCH
        last = cutlass.min(batches * (index + 1) // shares * BATCH, across)
        return first, last - first

    def source(self, records: Any, row_tile: Int32, first: Int32) -> Int64:
        """Address of a record; rows beyond the last read the last, and are not stored."""
        known = cutlass.min(row_tile, Int32(records.shape[0]) - 1)
        at = Int64(known) * records.shape[1] + first
        return address(records) + at * RECORD_BYTES

    @cute.jit
    def finish(
        self,
        tid: Int32,
        group: Int32,
        split: Int32,
        splits: Int32,
        scale_2: Any,
        out: Any,
        parts: Any,
        arrived: Any,
    ) -> None:
        """Add what the warps have, in their order, then what the blocks have, in theirs."""
        factor = ptx.global_load_f32(address(scale_2)) * Float32(UNDO)
        vectors = self.shape.rows * 8 * self.shape.stream.token_tiles // 4
        rounds = -(-vectors // THREADS)
        tile = address(parts) + Int64(group) * splits * (vectors * 16)
        for k in cutlass.range_constexpr(rounds):
            vector = tid + THREADS * k
            total = self.total(cutlass.min(vector, Int32(vectors - 1)))
            if cutlass.const_expr(self.shape.shared):
                at = tile + (Int64(split) * vectors + vector) * 16
                decode.store_f32x4_if(vector < vectors, at, *total)
            else:
                self.store(vector, group, [value * factor for value in total], out)
        if cutlass.const_expr(self.shape.shared):
            cute.arch.sync_threads()
            decode.arrive_if(tid == 0, address(arrived) + Int64(group) * 4, splits, self.base)
            cute.arch.sync_threads()
            if ptx.shared_load_u32(self.base) == 1:
                # All of a block's loads are under way at once.
                sums = cute.make_rmem_tensor(4 * rounds, Float32)
                self.stream.zero(sums, 4 * rounds)
                for other in cutlass.range(0, splits, 1, unroll=max(1, 4 // rounds)):
                    start = tile + Int64(other) * (vectors * 16)
                    for k in cutlass.range_constexpr(rounds):
                        vector = cutlass.min(tid + THREADS * k, Int32(vectors - 1))
                        part = decode.load_written_f32x4(start + Int64(vector) * 16)
                        for i in cutlass.range_constexpr(4):
                            sums[4 * k + i] = sums[4 * k + i] + part[i]
                for k in cutlass.range_constexpr(rounds):
                    values = [sums[4 * k + i] * factor for i in range(4)]
                    self.store(tid + THREADS * k, group, values, out)

    def total(self, vector: Int32) -> list:
        """Four neighbouring rows of one token, summed over the warps that share its columns."""
        row, token = vector % (self.shape.rows // 4) * 4, vector // (self.shape.rows // 4)
        own = ROWS * self.shape.stream.row_tiles
        warp = row // own * self.column_warps
        at = self.stream.left_at(self.ring(warp), row % own, token)
        total = list(ptx.shared_load_f32x4(at))
        for other in range(1, self.column_warps):
            part = ptx.shared_load_f32x4(at + other * self.shape.stream.warp_bytes)
            total = [a + b for a, b in zip(total, part, strict=True)]
        return total

    def store(self, vector: Int32, group: Int32, values: list, out: Any) -> None:
        """Those of four neighbouring rows of one token that exist."""
        row, token = vector % (self.shape.rows // 4) * 4, vector // (self.shape.rows // 4)
        row = row + group * self.shape.rows
        rows = Int32(out.shape[1])
        known = choose(token < Int32(out.shape[0]), rows - row, Int32(0))
        at = address(out) + (Int64(token) * rows + row) * 2
        decode.store_bf16x4(known, rows % 4 == 0, at, values)


@compiled_kernel
def compile_skinny(arch: str, shape: SkinnyShape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    size = cute.sym_int32

    tokens, rows = size(), size()
    stride = cute.sym_int64(divisibility=8)
    return compile_for(
        arch,
        SkinnyLinear(shape, arch),
        make_fake_tensor(BFloat16, (tokens, size()), (stride, 1), assumed_align=16),
        fake_compact(Uint8, (size(), size(), RECORD_BYTES), 16),
        fake_compact(Float32, (1,), 4),
        fake_compact(BFloat16, (tokens, rows), 16),
        fake_compact(Float32, (size(),), 16),
        fake_compact(Int32, (size(),), 4),
        Int32(1),
    )


def counters(rows: int, device: torch.device) -> Tensor:
    """Zeroed int32 counters of a layer of ``rows`` rows; the kernel leaves them at zero."""
    return torch.zeros(-(-rows // ROWS), dtype=torch.int32, device=device)


def planned_tokens(records: Tensor, in_features: int) -> list[int]:
    """Numbers of tokens that take every launch which up to ``MOST_TOKENS`` take."""
    sms, arch = num_sms(records.device.index or 0), current_arch()
    size = (*records.shape[:2], in_features, sms, arch)
    by_plan = {skinny_plan(tokens, *size): tokens for tokens in range(1, MOST_TOKENS + 1)}
    return list(by_plan.values())


def skinny_linear(
    x: Tensor, records: Tensor, scale_2: Tensor, out_features: int, arrived: Tensor
) -> Tensor:
    """x W^T for few tokens.

    Args:
        x: bfloat16 [T, in], T up to 64, in a multiple of 16.
        records: uint8 [R, C, 576] by ``records.pack_records``; scale_2: float32 [1].
        out_features: rows of the weight.
        arrived: ``counters`` of this layer; calls that share them may not overlap.

    Returns:
        bfloat16 [T, out_features].
    """
    out = torch.empty((x.shape[0], out_features), dtype=x.dtype, device=x.device)
    if out.numel():
        sms = num_sms(x.device.index or 0)
        plan = skinny_plan(x.shape[0], *records.shape[:2], x.shape[1], sms, current_arch())
        launch(plan, x, records, scale_2, arrived, out)
    return out


def launch(
    plan: SkinnyPlan, x: Tensor, records: Tensor, scale_2: Tensor, arrived: Tensor, out: Tensor
) -> None:
    """``skinny_linear`` by a plan, into ``out``."""
    parts = torch.empty(plan.part_floats(records.shape[0]), dtype=torch.float32, device=x.device)
    kernel = compile_skinny(current_arch(), plan.shape)
    kernel(aligned_rows(x), records, scale_2, out, parts, arrived, plan.splits)


def records_linear(
    x: Tensor, records: Tensor, scale_2: Tensor, outer: float, out_features: int, arrived: Tensor
) -> Tensor:
    """x W^T for any number of tokens: from 65 on the weight is widened first, exactly.

    Args, returns: as ``skinny_linear``; outer: the number in ``scale_2``, for the host.
    """
    if x.shape[0] <= MOST_TOKENS:
        return skinny_linear(x, records, scale_2, out_features, arrived)
    shape = (1, out_features, x.shape[1])
    weight = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    widen(records[None], weight)
    out = torch.empty((x.shape[0], out_features), dtype=x.dtype, device=x.device)
    # beta 0: what ``out`` holds is not read. alpha multiplies the float32 sums.
    scale = outer * DIVISOR[weight.dtype]
    return torch.addmm(out, x, weight[0].t(), beta=0, alpha=scale, out=out)

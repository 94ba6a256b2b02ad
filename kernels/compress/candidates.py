"""Device side of the window softmax: candidate rows, and softmax sums that can be merged.

A lane owns LANE = 8 consecutive channels, 16 bytes of bf16. Candidates are taken CHUNK = 4 at a
time: all their loads are issued before the first is used, without a branch, each switched off by
its predicate where the row lies elsewhere. The sums of a channel are (peak, total, weighted): the
softmax is invariant to the peak, so partial sums merge exactly as in online softmax. Whether a row
comes from the batch or from the state changes no rounding: chunked and whole prefill agree bit for
bit.
"""

from typing import Any

import torch
from cutlass import Float32, Int32, Int64, Uint32, cute, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.operands import VECTOR_BYTES

LANE = 8
CHUNK = 4
SUMS = 3
# Two bf16 or one float32 of minus infinity.
_MINUS_INFINITY = {torch.bfloat16: 0xFF80FF80, torch.float32: 0xFF800000}


def empty_sums() -> cute.Tensor:
    """Sums of no candidates: peak -inf, total 0, weighted 0 for each channel; [SUMS, LANE]."""
    sums = cute.make_rmem_tensor(cute.make_layout((SUMS, LANE)), Float32)
    for i in range(LANE):
        sums[0, i] = Float32(float("-inf"))
        sums[1, i] = Float32(0.0)
        sums[2, i] = Float32(0.0)
    return sums


def _read_batch(
    condition: Any, tensor: cute.Tensor, offset: Int64, dtype: torch.dtype, absent: int
) -> list[Float32]:
    """LANE values at an element offset, or those of the word `absent`, as float32."""
    per_load = VECTOR_BYTES // dtype.itemsize
    values: list[Float32] = []
    for start in range(0, LANE, per_load):
        pointer = cm.element_pointer(tensor, offset + start, VECTOR_BYTES)
        words = cm.load_words_if(condition, pointer, [Uint32(absent)] * 4)
        for word in words:
            values += cm.bf16_values(word) if per_load == LANE else [cm.float_of(word)]
    return values


def _read_state(
    condition: Any, state: cute.Tensor, offset: Int64, otherwise: list[Float32]
) -> list[Float32]:
    """LANE values of the state at an element offset, or `otherwise`."""
    values: list[Float32] = []
    for start in range(0, LANE, 4):
        pointer = cm.element_pointer(state, offset + start, VECTOR_BYTES)
        kept = [cm.word_of(value) for value in otherwise[start : start + 4]]
        values += [cm.float_of(word) for word in cm.load_words_if(condition, pointer, kept)]
    return values


class Candidates:
    """Reads the candidate rows of one dtype and width."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self.dtype, self.width = dtype, width

    @cute.jit
    def add_chunk(
        self,
        sums: cute.Tensor,
        kv: cute.Tensor,
        gate: cute.Tensor,
        bias: cute.Tensor,
        state: cute.Tensor,
        sources: cute.Tensor,
        channel: Int32,
        bias_row: Int32,
    ) -> None:
        """Add CHUNK candidates to the sums.

        sources: registers [CHUNK], as `CompressPlan.source`; channel: this lane's first column;
        bias_row: place of the first candidate in its window, its position modulo the ratio.
        """
        tokens = cm.rows_in(kv)
        values = cute.make_rmem_tensor(cute.make_layout((CHUNK, LANE)), Float32)
        gates = cute.make_rmem_tensor(cute.make_layout((CHUNK, LANE)), Float32)
        from_state = Int32(0)
        for j in range_constexpr(CHUNK):
            row: Any = sources[j]
            in_batch = (row >= Int64(0)) & (row < tokens)
            from_state = from_state | Int32(row >= tokens)
            absent = _MINUS_INFINITY[self.dtype]
            offset = row * cm.stride_of(kv) + channel
            found = _read_batch(in_batch, kv, offset, self.dtype, 0)
            offset = row * cm.stride_of(gate) + channel
            other = _read_batch(in_batch, gate, offset, self.dtype, absent)
            place = (bias_row + j) * self.width + channel
            added = cm.load_float(cm.element_pointer(bias, place, VECTOR_BYTES), LANE)
            for i in range_constexpr(LANE):
                values[j, i] = found[i]
                gates[j, i] = cm.add_rn(other[i], added[i])
        if from_state != 0:
            for j in range_constexpr(CHUNK):
                row = sources[j] - tokens
                waits = row >= Int64(0)
                offset = row * cm.stride_of(state) + channel
                found = _read_state(waits, state, offset, [values[j, i] for i in range(LANE)])
                offset = offset + self.width
                other = _read_state(waits, state, offset, [gates[j, i] for i in range(LANE)])
                for i in range_constexpr(LANE):
                    values[j, i] = found[i]
                    gates[j, i] = other[i]
        for i in range_constexpr(LANE):
            peak: Any = sums[0, i]
            for j in range_constexpr(CHUNK):
                peak = cute.arch.fmax(peak, gates[j, i])
            base = _finite_peak(peak)
            keep = cm.exp2((sums[0, i] - base) * Float32(cm.LOG2_E))
            total, weighted = sums[1, i] * keep, sums[2, i] * keep
            for j in range_constexpr(CHUNK):
                weight = cm.exp2((gates[j, i] - base) * Float32(cm.LOG2_E))
                total = total + weight
                weighted = weighted + weight * values[j, i]
            sums[0, i], sums[1, i], sums[2, i] = peak, total, weighted


def _finite_peak(peak: Float32) -> Float32:
    """The peak to subtract: 0 where there is no candidate, so that -inf - base is no NaN."""
    return cm.select(peak == Float32(float("-inf")), Float32(0.0), peak)


def merge_sums(sums: cute.Tensor, others: cute.Tensor) -> None:
    """Add the sums of other candidates of the same channels."""
    for i in range(LANE):
        peak = cute.arch.fmax(sums[0, i], others[0, i])
        base = _finite_peak(peak)
        ours = cm.exp2((sums[0, i] - base) * Float32(cm.LOG2_E))
        theirs = cm.exp2((others[0, i] - base) * Float32(cm.LOG2_E))
        sums[1, i] = sums[1, i] * ours + others[1, i] * theirs
        sums[2, i] = sums[2, i] * ours + others[2, i] * theirs
        sums[0, i] = peak


def merge_lanes(sums: cute.Tensor, distance: int) -> None:
    """Add the sums of the lane whose number differs in the bit `distance`."""
    others = cute.make_rmem_tensor(cute.make_layout((SUMS, LANE)), Float32)
    for k in range(SUMS):
        for i in range(LANE):
            others[k, i] = cute.arch.shuffle_sync_bfly(sums[k, i], distance)
    merge_sums(sums, others)


def weighted_means(sums: cute.Tensor) -> list[Float32]:
    """Weighted sum over total of each channel; a window without candidates gives 0."""
    means = []
    for i in range(LANE):
        total = cm.float_at(sums, (1, i))
        divisor = cm.select(total == Float32(0.0), Float32(1.0), total)
        means.append(cm.div_rn(cm.float_at(sums, (2, i)), divisor))
    return means

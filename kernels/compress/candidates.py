"""Device side of the window softmax: candidate rows of one thread, and their sums.

A thread owns LANE = 4 consecutive channels of COUNT = 8 candidates. Where all of them are rows of
the batch, it takes all 16 vectors of kv and gate into flight at once, 8 bytes each of bf16, with
the ones of absent rows switched off. If a candidate is a row of the state, every candidate is read
in steps of STEP channels instead: one address and one load whatever the row's kind, so that no load
waits for another. The steps after the first find their lines in L1.

The sums of a channel are (peak, total, weighted). Whether a row comes from the batch or from the
state changes no rounding: chunked and whole prefill agree bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.operands import Operands

# A member that is generated at import, which type checkers do not see.
_math: Any = cute.math

LANE = 4
COUNT = 8
STEP = 2
SUMS = 3
_MINUS_INFINITY = 0xFF800000
# Two bf16 of minus infinity.
_MINUS_INFINITIES = 0xFF80FF80


def finite_peak(peak: Float32) -> Float32:
    """The peak to subtract: 0 where there is no candidate, so that -inf - base is no NaN."""
    return cm.select(peak == Float32(float("-inf")), Float32(0.0), peak)


def shift_of(peak: Float32) -> Float32:
    """What `scaled_exp` adds for a peak."""
    return finite_peak(peak) * Float32(-cm.LOG2_E)


def scaled_exp(gate: Float32, shift: Float32) -> Float32:
    """exp(gate - peak); the shift's rounding is a factor that all weights of a channel share."""
    return cm.exp2(_math.fma(gate, Float32(cm.LOG2_E), shift))


def weights_of(gates: Sequence[Float32]) -> tuple[Float32, list[Float32]]:
    """Peak of one channel's gates, and exp(gate - peak) of each."""
    peak = gates[0]
    for gate in gates[1:]:
        peak = cute.arch.fmax(peak, gate)
    shift = shift_of(peak)
    return peak, [scaled_exp(gate, shift) for gate in gates]


def weighted_sums(weights: Sequence[Float32], values: Sequence[Float32]) -> tuple[Float32, Float32]:
    """Sum of the weights, and of the weighted values."""
    total, weighted = Float32(0.0), Float32(0.0)
    for weight, value in zip(weights, values, strict=True):
        total = total + weight
        weighted = weighted + weight * value
    return total, weighted


def mean_of(total: Float32, weighted: Float32) -> Float32:
    """Softmax-weighted mean; a window without candidates gives 0."""
    divisor = cm.select(total == Float32(0.0), Float32(1.0), total)
    return weighted * cute.arch.rcp_approx(divisor)


class Candidates:
    """Reads the candidate rows of kv and gate with `width` columns, bf16 or float32.

    channels, series, places: each candidate's first column for this thread is channel + series[j];
    its place in the window, its position modulo the ratio, is place + places[j]. rolled: the steps
    are a loop of the kernel, which takes fewer registers.
    """

    def __init__(
        self, is_bf16: bool, width: int, series: list[int], places: list[int], rolled: bool
    ) -> None:
        self.is_bf16, self.width, self.rolled = is_bf16, width, rolled
        self.series, self.places = series, places
        self.item = 2 if is_bf16 else 4

    @cute.jit
    def add(
        self,
        sums: cute.Tensor,
        operands: Operands,
        rows: list[Int32],
        channel: Int32,
        place: Int32,
        waits: list[Any],
        zero: Uint32,
        staged: Any = None,
    ) -> None:
        """Sums [SUMS, LANE] of COUNT candidates.

        rows: as `CompressPlan.source`; waits: registers that later steps need, whose loads are to
        be in flight with these; staged: this thread's bias [COUNT, LANE] in shared memory, else it
        is read where it is.
        """
        last = rows[0]
        for j in range_constexpr(1, COUNT):
            last = cm.select(rows[j] > last, rows[j], last)
        if last < tokens_of(operands):
            self.add_batch(sums, operands, rows, channel, place, waits, zero, staged)
        else:
            self.add_mixed(sums, operands, rows, channel, place, waits, zero, staged)

    @cute.jit
    def add_batch(
        self,
        sums: cute.Tensor,
        operands: Operands,
        rows: list[Int32],
        channel: Int32,
        place: Int32,
        waits: list[Any],
        zero: Uint32,
        staged: Any,
    ) -> None:
        """All candidates are rows of the batch or absent."""
        size = LANE * self.item // 4
        absent = _MINUS_INFINITIES if self.is_bf16 else _MINUS_INFINITY
        found = []
        for tensor, nothing in ((operands.gate, absent), (operands.kv, 0)):
            base, pitch = cm.address_of(tensor, channel), row_bytes(tensor)
            for j in range_constexpr(COUNT):
                address = base + Int64(rows[j]) * pitch + self.series[j] * self.item
                empty = [Uint32(nothing)] * size
                found.append(cm.load_words_if(rows[j] >= 0, address, empty))
        first = cm.float_of(found[0][0])
        first = cm.after_loads(first, [*waits, *[words[0] for words in found]], zero)
        found[0][0] = cm.word_of(first)
        half = size // 2
        kind = operands.kv.element_type
        for part in range_constexpr(2):
            bias = self.bias_of(operands, channel, place, 2 * part, 2, staged)
            wide = [cm.floats_in(words[half * part : half * (part + 1)], kind) for words in found]
            for i in range_constexpr(2):
                gates = [cm.add_rn(wide[j][i], bias[j][i]) for j in range(COUNT)]
                values = [wide[COUNT + j][i] for j in range(COUNT)]
                peak, weights = weights_of(gates)
                total, weighted = weighted_sums(weights, values)
                sums[0, 2 * part + i], sums[1, 2 * part + i] = peak, total
                sums[2, 2 * part + i] = weighted

    @cute.jit
    def add_mixed(
        self,
        sums: cute.Tensor,
        operands: Operands,
        rows: list[Int32],
        channel: Int32,
        place: Int32,
        waits: list[Any],
        zero: Uint32,
        staged: Any,
    ) -> None:
        """Some candidate is a row of the state."""
        tokens = tokens_of(operands)
        kept_pitch = row_bytes(operands.state)
        units, known, ours = [], Uint32(0), Uint32(0)
        for j in range_constexpr(COUNT):
            # Rows are 16-byte aligned: in such units offsets stay below 2^32.
            in_batch = rows[j] < tokens
            number = cm.select(in_batch, rows[j], rows[j] - tokens)
            units.append(
                number * cm.select(in_batch, row_bytes(operands.kv) // 16, kept_pitch // 16)
            )
            known = known | (Uint32(rows[j] >= 0) << j)
            ours = ours | (Uint32((rows[j] >= 0) & in_batch) << j)
        if const_expr(self.rolled):
            for number in cutlass.range(LANE // STEP, unroll=1):
                step = self.mixed_step(
                    operands, known, ours, units, channel, place, number * STEP, waits, zero, staged
                )
                for k in range_constexpr(SUMS):
                    for i in range_constexpr(LANE):
                        is_fresh = number == i // STEP
                        sums[k, i] = cm.select(is_fresh, step[i % STEP][k], sums[k, i])
        else:
            for start in range_constexpr(0, LANE, STEP):
                step = self.mixed_step(
                    operands, known, ours, units, channel, place, start, waits, zero, staged
                )
                for k in range_constexpr(SUMS):
                    for i in range_constexpr(STEP):
                        sums[k, start + i] = step[i][k]

    def mixed_step(
        self,
        operands: Operands,
        known: Uint32,
        ours: Uint32,
        units: list[Int32],
        channel: Int32,
        place: Int32,
        start: Any,
        waits: list[Any],
        zero: Uint32,
        staged: Any,
    ) -> list[tuple[Float32, Float32, Float32]]:
        """Sums of STEP channels from channel `start` of this thread on."""
        gate_words = self.load_step(operands, True, known, ours, units, channel, start)
        kv_words = self.load_step(operands, False, known, ours, units, channel, start)
        loaded = [words[0] for words in (*kv_words, *gate_words)]
        first = cm.after_loads(cm.float_of(gate_words[0][0]), [*waits, *loaded], zero)
        gate_words[0][0] = cm.word_of(first)
        bias = self.bias_of(operands, channel, place, start, STEP, staged)
        sums = []
        for i in range(STEP):
            gates = []
            for j in range(COUNT):
                gate = self.value_of(gate_words[j], cm.has_bit(ours, j), start, i)
                biased = cm.add_rn(gate, bias[j][i])
                gates.append(cm.select(cm.has_bit(ours, j), biased, gate))
            peak, weights = weights_of(gates)
            values = [
                self.value_of(kv_words[j], cm.has_bit(ours, j), start, i) for j in range(COUNT)
            ]
            sums.append((peak, *weighted_sums(weights, values)))
        return sums

    def load_step(
        self,
        operands: Operands,
        gate: bool,
        known: Uint32,
        ours: Uint32,
        units: list[Int32],
        channel: Int32,
        start: Any,
    ) -> list[list[Uint32]]:
        """STEP words of each candidate's gate or kv from channel `start` of this thread on.

        known: bit j says that candidate j is a row; ours: that it is one of the batch; units:
        16-byte units from the first row to each row. Of a bf16 row of the batch these words are all
        of LANE.
        """
        tensor = operands.gate if gate else operands.kv
        skipped = 0 if self.is_bf16 else 4 * start
        in_batch = cm.address_of(tensor, channel) + skipped
        first = start + (self.width if gate else 0)
        in_state = cm.address_of(operands.state, channel) + 4 * first
        empty = [Uint32(_MINUS_INFINITY if gate else 0)] * STEP
        found = []
        for j, (unit, series) in enumerate(zip(units, self.series, strict=True)):
            base = cm.select(
                cm.has_bit(ours, j), in_batch + series * self.item, in_state + series * 4
            )
            address = base + Int64(Uint32(unit)) * 16
            found.append(cm.load_words_if(cm.has_bit(known, j), address, empty, reused=True))
        return found

    def value_of(self, words: list[Uint32], is_ours: Any, start: Any, i: int) -> Float32:
        """Channel start + i of a candidate from the words of one step."""
        wide = cm.float_of(words[i])
        if not self.is_bf16:
            return wide
        if isinstance(start, int):
            word = words[start // STEP]
        else:
            word = cm.select(start == 0, words[0], words[1])
        return cm.select(is_ours, cm.bf16_values(word)[i], wide)

    def bias_of(
        self,
        operands: Operands,
        channel: Int32,
        place: Int32,
        start: Any,
        count: int,
        staged: Any,
    ) -> list[list[Float32]]:
        """Gate bias of `count` channels of each candidate."""
        if staged is not None:
            return [
                cm.load_vector(cm.element_pointer(staged, j * staged.stride[0] + start, 8), count)
                for j in range(COUNT)
            ]
        first = cm.address_of(operands.bias, place * self.width + channel)
        rows = []
        for series, distance in zip(self.series, self.places, strict=True):
            address = first + 4 * (distance * self.width + series + start)
            rows.append([cm.float_of(word) for word in cm.load_words(address, count)])
        return rows


def tokens_of(operands: Operands) -> Int32:
    """Rows of the batch."""
    return Int32(cm.rows_in(operands.kv))


def row_bytes(tensor: cute.Tensor) -> Int32:
    """Distance of neighbouring rows in bytes, below 2^31."""
    width: Any = tensor.element_type.width
    return Int32(cm.stride_of(tensor)) * (width // 8)

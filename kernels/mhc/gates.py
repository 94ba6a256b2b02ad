"""Device arithmetic of the mixing weights: products with fn, sigmoid, Sinkhorn-Knopp.

fn is float32 and the tensor cores take TF32, of whose operands they read the upper 19 bits. A
stream's bf16 value is a TF32 value already. Of fn, the instruction cuts off what TF32 does not
hold; that rest, value - cut(value), is exact in float32 with 13 significant bits, of which a second
product takes the upper 11. So two products have fn to 2^-21 of each value, and what is lost has the
sign of the value: z loses less than 2^-21 of itself.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint32, cute, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import maximum

# A member that is generated at import, which type checkers do not see.
_math: Any = cute.math

STREAMS = 4
TF32_BITS = 0xFFFFE000
BF16_BITS = 0xFFFF0000


def mma_tf32(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
    """m16n8k8: four A words, two B words, four float32 sums; 13 low bits of words are ignored."""
    return list(
        cute.arch.inline_ptx(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
            " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )


def tf32_parts(value: Float32) -> tuple[Any, Any]:
    """The words of a float32 for two products: itself, which is cut off, and the rest."""
    word = cm.word_of(value)
    return word, cm.word_of(value - cm.float_of(word & Uint32(TF32_BITS)))


def bf16_words(word: Uint32) -> tuple[Any, Any]:
    """The two bf16 values of a word as float32 words, the low half first."""
    return word << 16, word & Uint32(BF16_BITS)


def reciprocal(a: Float32) -> Float32:
    """1 / a to 1 ulp; 1 / inf = 0."""
    return cute.arch.inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a]
    )


def sigmoid(a: Float32) -> Float32:
    """1 / (1 + e^-a); exactly 0 below -88.8."""
    return reciprocal(Float32(1.0) + cm.exp2(a * Float32(-cm.LOG2_E)))


def total(values: Sequence[Any]) -> Any:
    """Sum of four values, pairwise."""
    return (values[0] + values[1]) + (values[2] + values[3])


def reciprocals(divisors: Sequence[Any]) -> list[Any]:
    """1 / value of four values, two by one reciprocal of their product."""
    found = []
    for i in (0, 2):
        both = reciprocal(divisors[i] * divisors[i + 1])
        found += [both * divisors[i + 1], both * divisors[i]]
    return found


def weighted(values: Sequence[Any], factors: Sequence[Any], start: Any) -> Any:
    """start + sum of four products."""
    left = _math.fma(values[1], factors[1], values[0] * factors[0])
    right = _math.fma(values[3], factors[3], _math.fma(values[2], factors[2], start))
    return left + right


@cute.jit
def sinkhorn(matrix: cute.Tensor, iters: Int32, eps: Float32) -> None:
    """Logits [16], row-major, to a doubly stochastic matrix, in this thread's registers.

    Row softmax plus eps, one division by the column sums, then iters - 1 rounds of rows and
    columns; eps joins each divisor. The matrix stays as it is after the softmax; its entries'
    factors are kept for rows and columns: a row's new one is 1 / (sum + eps / old one).
    """
    for i in range_constexpr(STREAMS):
        row = [cm.float_at(matrix, STREAMS * i + j) for j in range(STREAMS)]
        peak = maximum(maximum(row[0], row[1]), maximum(row[2], row[3]))
        weights = [cm.exp2((value - peak) * Float32(cm.LOG2_E)) for value in row]
        factor = reciprocal(total(weights))
        for j in range_constexpr(STREAMS):
            matrix[STREAMS * i + j] = weights[j] * factor + eps
    kept = [cm.float_at(matrix, k) for k in range(STREAMS * STREAMS)]
    state = cute.make_rmem_tensor(cute.make_layout(4 * STREAMS), Float32)
    ones = [Float32(1.0)] * STREAMS
    down = [weighted(kept[j::STREAMS], ones, eps) for j in range(STREAMS)]
    across = reciprocals(down)
    for k in range_constexpr(STREAMS):
        # Factors of rows and of columns, and one over them.
        state[k], state[STREAMS + k] = Float32(1.0), across[k]
        state[2 * STREAMS + k], state[3 * STREAMS + k] = Float32(1.0), down[k]
    for _ in range(iters - 1):
        columns = [cm.float_at(state, STREAMS + k) for k in range(STREAMS)]
        inverse = [
            weighted(
                kept[STREAMS * i : STREAMS * i + STREAMS],
                columns,
                eps * cm.float_at(state, 2 * STREAMS + i),
            )
            for i in range(STREAMS)
        ]
        rows = reciprocals(inverse)
        for k in range_constexpr(STREAMS):
            state[k], state[2 * STREAMS + k] = rows[k], inverse[k]
        inverse = [
            weighted(kept[j::STREAMS], rows, eps * cm.float_at(state, 3 * STREAMS + j))
            for j in range(STREAMS)
        ]
        columns = reciprocals(inverse)
        for k in range_constexpr(STREAMS):
            state[STREAMS + k], state[3 * STREAMS + k] = columns[k], inverse[k]
    for i in range_constexpr(STREAMS):
        for j in range_constexpr(STREAMS):
            entry = kept[STREAMS * i + j] * cm.float_at(state, i)
            matrix[STREAMS * i + j] = entry * cm.float_at(state, STREAMS + j)

"""Device helpers that several CuTeDSL kernels share: vector access, norm, RoPE, e2m1 and e4m3.

They are plain Python on lists of register values, unrolled while the kernel is traced; everything
but the named PTX instructions also runs on the host (tests/kernels/test_compile_memory_bound.py).

Rounding. LLVM and ptxas may contract a * b + c to one fma, which is not what the reference does;
`mul_rn`, `add_rn` and `sub_rn` name their rounding mode, and PTX never contracts those.

e2m1 without a conversion instruction (none on sm_90) and without a division. The reference takes
the code of q = RN(x / s) by comparing q with the seven midpoints b of e2m1. Here |x| is compared
with b * s. Both agree for every float32 x and e4m3 s: b * s has at most 3 + 4 significant bits, so
it is exact. Let it be M * 2^e with 1 <= M < 2. The next float32 above is 2^(e-23) away, so its
quotient exceeds b by 2^-23 * b / M, more than half an ulp of b, and its rounded quotient stays
above b. Below b the same holds, as no b * s that must be told from its lower neighbour is a power
of two (0.75, 1.75 and 3.5 times a 4-bit number never are).
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LOG2_E = 1.4426950408889634


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """One of two values of the same type."""
    return type(if_true)(cutlass.select_(condition, if_true, if_false))


def element_pointer(tensor: cute.Tensor, offset: Any, align: int) -> cute.Pointer:
    """Pointer to element `offset` (an integer, 64-bit where it may be large) of a tensor's memory,
    which the caller knows to be `align` bytes aligned."""
    return (tensor.iterator + offset).align(align)


def stride_of(tensor: cute.Tensor, axis: int = 0) -> Any:
    """Distance of neighbours along an axis, in elements."""
    strides: Any = tensor.stride
    return strides[axis]


def rows_in(tensor: cute.Tensor) -> Int64:
    """Length of the first axis."""
    shape: Any = tensor.shape
    return Int64(shape[0])


def float_at(registers: cute.Tensor, index: Any) -> Float32:
    """One value of a float32 register tensor."""
    value: Any = registers[index]
    return value


def floats_of(registers: cute.Tensor, start: int, count: int) -> list[Float32]:
    """`count` consecutive values of a float32 register tensor [n]."""
    return [float_at(registers, start + i) for i in range(count)]


def float_of(word: Uint32) -> Float32:
    """The float32 with the bits of a word."""
    value: Any = word.bitcast(Float32)
    return value


def word_of(value: Float32) -> Uint32:
    """The bits of a float32."""
    word: Any = value.bitcast(Uint32)
    return word


def load_vector(pointer: cute.Pointer, count: int) -> list[Any]:
    """`count` consecutive values in 16-byte loads where the pointer's alignment allows."""
    fragment = cute.make_rmem_tensor(cute.make_layout(count), pointer.dtype)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), fragment)
    return [fragment[i] for i in range(count)]


def load_float(pointer: cute.Pointer, count: int) -> list[Float32]:
    """`load_vector` of floating-point memory, widened to float32."""
    return [value.to(Float32) for value in load_vector(pointer, count)]


def store_vector(pointer: cute.Pointer, values: Sequence[Any]) -> None:
    """Store consecutive values, converted to the pointer's type, in 16-byte stores."""
    count = len(values)
    fragment = cute.make_rmem_tensor(cute.make_layout(count), pointer.dtype)
    for i in range(count):
        fragment[i] = values[i].to(pointer.dtype)
    cute.autovec_copy(fragment, cute.make_tensor(pointer, cute.make_layout(count)))


def words_of(pointer: cute.Pointer) -> cute.Pointer:
    """The same address as a pointer to 32-bit words; its alignment must be at least 4."""
    return cute.recast_ptr(pointer, dtype=Uint32)


def load_words_if(
    condition: Any, pointer: cute.Pointer, otherwise: Sequence[Uint32]
) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes that no one writes during the kernel, or the four words `otherwise`, branch-free.

    The line is not kept in L1: each byte is read once. The pointer is not followed when the
    condition is false.
    """
    return cute.arch.inline_ptx(
        "{.reg .pred wanted; setp.ne.b32 wanted, {$r1}, 0;"
        " mov.b32 {$w0}, {$r2}; mov.b32 {$w1}, {$r3}; mov.b32 {$w2}, {$r4}; mov.b32 {$w3}, {$r5};"
        " @wanted ld.global.nc.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];}",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer, Int32(condition), *otherwise],
    )


def store_to_block(pointer: cute.Pointer, rank: Int32, value: Float32) -> None:
    """Store to the same shared-memory address in block `rank` of the cluster."""
    cute.arch.inline_ptx(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1};"
        " st.shared::cluster.f32 [there], {$r2};}",
        read_only_args=[Int32(pointer.toint()), rank, value],
    )


def bf16_values(word: Uint32) -> tuple[Float32, Float32]:
    """The two bf16 values of a word, the low half first."""
    return (word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)


def mul_rn(a: Float32, b: Float32) -> Float32:
    """a * b, rounded to nearest even, never contracted."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def add_rn(a: Float32, b: Float32) -> Float32:
    """a + b, rounded to nearest even, never contracted."""
    return cute.arch.inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def sub_rn(a: Float32, b: Float32) -> Float32:
    """a - b, rounded to nearest even, never contracted."""
    return cute.arch.inline_ptx(
        "sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def div_rn(a: Float32, b: float | Float32) -> Float32:
    """a / b, correctly rounded."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[a, Float32(b)],
    )


def rsqrt(a: Float32) -> Float32:
    """a^-0.5 by the instruction that torch.rsqrt uses on a GPU."""
    return cute.arch.inline_ptx(
        "rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a]
    )


def exp2(a: Float32) -> Float32:
    """2^a (2 ulp); exp2(-inf) = 0."""
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a]
    )


def absolute(a: Float32) -> Float32:
    """|a|; a NaN loses its sign."""
    bits: Any = a.bitcast(Uint32)
    return (bits & Uint32(0x7FFFFFFF)).bitcast(Float32)


def max_nan(a: Float32, b: Float32) -> Float32:
    """The larger of a and b, NaN if either is."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def absolute_max(values: Sequence[Float32]) -> Float32:
    """max |value|, NaN if any value is."""
    peak = absolute(values[0])
    for value in values[1:]:
        peak = max_nan(peak, absolute(value))
    return peak


def lane_sum(value: Float32, lanes: int) -> Float32:
    """Sum over groups of `lanes` consecutive lanes, the same bits in each of them."""
    span = lanes // 2
    while span:
        value = value + cute.arch.shuffle_sync_bfly(value, span)
        span //= 2
    return value


def sum_of_squares(values: Sequence[Float32]) -> Float32:
    """Sum of the squares of this lane's values."""
    total = values[0] * values[0]
    for value in values[1:]:
        total = total + value * value
    return total


def rotate_pairs(
    values: Sequence[Float32], cos: Sequence[Float32], sin: Sequence[Float32], inverse: bool
) -> list[Float32]:
    """Interleaved RoPE of the pairs (2i, 2i + 1) with the rounding of the reference."""
    rotated = []
    for i in range(len(cos)):
        even, odd = values[2 * i], values[2 * i + 1]
        plus, minus = (sub_rn, add_rn) if inverse else (add_rn, sub_rn)
        rotated.append(minus(mul_rn(even, cos[i]), mul_rn(odd, sin[i])))
        rotated.append(plus(mul_rn(odd, cos[i]), mul_rn(even, sin[i])))
    return rotated


def e4m3_byte(value: Float32) -> Uint32:
    """e4m3fn byte of a value >= 0, to nearest even, saturated at 448; a NaN gives 0x7f."""
    return cute.arch.inline_ptx(
        "{.reg .b16 pair; .reg .f32 zero; mov.f32 zero, 0f00000000;"
        " cvt.rn.satfinite.e4m3x2.f32 pair, zero, {$r0}; cvt.u32.u16 {$w0}, pair;}",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def e4m3_value(byte: Uint32) -> Float32:
    """Value of an e4m3fn byte, exact."""
    return cute.arch.inline_ptx(
        "{.reg .b16 pair, low, high; .reg .b32 both; cvt.u16.u32 pair, {$r0};"
        " cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {low, high}, both; cvt.f32.f16 {$w0}, low;}",
        write_only_types=[Float32],
        read_only_args=[byte],
    )


def e2m1_word(
    values: Sequence[Float32], bounds: Sequence[Float32], keep_negative_zero: bool
) -> Uint32:
    """Codes of up to 8 values, the first in the lowest nibble; the value must not be NaN.

    bounds: the seven midpoints of e2m1, times the group's scale. A value on the midpoints
    0.25, 1.25, 2.5 and 5 takes the lower code, on 0.75, 1.75 and 3.5 the upper: the even one.
    """
    word = Uint32(0)
    zero = Uint32(0)
    for i, value in enumerate(values):
        magnitude = absolute(value)
        bit2 = magnitude >= bounds[3]
        bit1 = magnitude >= select(bit2, bounds[5], bounds[1])
        upper = select(bit2, bounds[6], bounds[2])
        lower = select(bit2, bounds[4], bounds[0])
        bit0 = magnitude > select(bit1, upper, lower)
        shift = 4 * i
        bits: Any = value.bitcast(Uint32)
        sign = (bits & Uint32(0x80000000)) >> (28 - shift)
        if not keep_negative_zero:
            sign = select(magnitude > bounds[0], sign, zero)
        word = word | select(bit2, Uint32(4 << shift), zero)
        word = word | select(bit1, Uint32(2 << shift), zero)
        word = word | select(bit0, Uint32(1 << shift), zero) | sign
    return word


def nvfp4_bounds(scale: Float32) -> list[Float32]:
    """Bounds of `e2m1_word` under an e4m3 scale; scale 0 rounds every value to a signed zero."""
    divisor = select(scale == Float32(0.0), Float32(float("inf")), scale)
    return [divisor * Float32(b) for b in E2M1_MIDPOINTS]


def ue8m0_exponent(amax: Float32) -> Int32:
    """Biased exponent of the UE8M0 scale: 2^ceil(log2(max(amax / 6, 1e-4))), 1..254."""
    least = Float32(1.0e-4)
    target = div_rn(amax, 6.0)
    bits = select(target > least, target, least).bitcast(Int32)
    exponent = ((bits >> 23) & Int32(0xFF)) + Int32((bits & Int32(0x7FFFFF)) != Int32(0))
    return select(exponent > Int32(254), Int32(254), exponent)


def bf16_pair(low: Float32, high: Float32) -> Uint32:
    """Two values as bf16, rounded to nearest even, `low` in the low half."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def nvfp4_encode(values: Sequence[Float32], amax: Float32) -> tuple[list[Uint32], Uint32]:
    """Codes of 8 or 16 values of one group and the group's e4m3 scale byte.

    amax: max |value| over the whole group, NaN if the group holds one: the scale is then NaN and
    the codes are 0. Returns (one word for 8 values, scale byte).
    """
    byte = e4m3_byte(div_rn(amax, 6.0))
    bounds = nvfp4_bounds(e4m3_value(byte))
    poisoned = amax != amax
    words = []
    for start in range(0, len(values), 8):
        word = e2m1_word(values[start : start + 8], bounds, keep_negative_zero=True)
        words.append(select(poisoned, Uint32(0), word))
    return words, byte

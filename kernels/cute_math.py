"""Device helpers that several CuTeDSL kernels share: vector access, norm, RoPE, e2m1 and e4m3.

They are plain Python on lists of register values, unrolled while the kernel is traced; everything
but the named PTX instructions also runs on the host (tests/kernels/test_compile_memory_bound.py).

Rounding. LLVM and ptxas may contract a * b + c to one fma, which is not what the reference does;
`mul_rn`, `add_rn` and `sub_rn` name their rounding mode, and PTX never contracts those.

e2m1 without a conversion instruction (none on sm_90), on exact quotients without a division. The
reference takes the code of q = RN(x / s). With the reciprocal in two parts, hi < 1 / s and
lo = 1 / s - hi up to 2^-41 / s, RN(x * hi + x * lo) differs from x / s, before its one rounding, by
2^-41 of it at most. What must be right is on which side of the seven midpoints b of e2m1 it falls.
b * s has at most 3 + 4 significant bits, so it is a float32: M * 2^e with 1 <= M < 2. If x is equal
to it, x / s is b, and so is the rounded sum. The next float32 above is 2^(e-23) away, so its
quotient exceeds b by 2^-23 * b / M, at least 1.06 times half an ulp of b, and rounds above b. Below
b the same holds, as no b * s that must be told from its lower neighbour is a power of two (0.75,
1.75 and 3.5 times a 4-bit number never are).

The code of q is then the low bits of one addition. Let 2^k be the power of two of |q|, but at least
1: codes are steps of 2^(k-1) there, and 2^(k+22) + |q| has just that ulp, so the addition rounds
|q| to a whole number m of steps, ties to even, and the code is m + 2 k. Everything is scaled by
`CODE_SCALE` = 8, which makes the exponent's field 4 * 38 + k.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm as _llvm
from cutlass.cutlass_dsl import dsl_user_op

# Members that are generated at import, which type checkers do not see.
llvm: Any = _llvm
_math: Any = cute.math

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
CODE_SCALE = 8.0
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


def word_of(value: Any) -> Uint32:
    """The bits of a 32-bit value."""
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


def address_of(tensor: cute.Tensor, offset: Any) -> Int64:
    """Address of element `offset` of a tensor's memory."""
    iterator: Any = tensor.iterator
    start: Any = iterator.toint()
    width: Any = tensor.element_type.width
    return Int64(start) + Int64(offset) * (width // 8)


@dsl_user_op
def _load(
    kind: Any,
    count: int,
    address: Any,
    hint: str = "",
    condition: Any = None,
    otherwise: Sequence[Any] = (),
    *,
    loc: Any = None,
    ip: Any = None,
) -> list[Any]:
    """1, 2 or 4 values of 32 or 64 bits at an address, or `otherwise`; see `after_loads`."""
    letter = "r" if kind.width == 32 else "l"
    vector = f".v{count}" if count > 1 else ""
    names = ", ".join(f"${i}" for i in range(count))
    target = f"{{{names}}}" if count > 1 else names
    load = f"ld.global{hint}{vector}.b{kind.width} {target}, [${count}];"
    operands: list[Any] = [Int64(address)]
    constraints = ["=" + letter] * count + ["l"]
    if condition is not None:
        # An operand tied to an output register: the load overwrites it or leaves it.
        load = f"{{.reg .pred wanted; setp.ne.b32 wanted, ${count + 1}, 0; @wanted {load}}}"
        operands += [Int32(condition), *otherwise]
        constraints += ["r", *[str(i) for i in range(count)]]
    single = kind.mlir_type
    found = llvm.inline_asm(
        single if count == 1 else llvm.StructType.get_literal([single] * count),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        load,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if count == 1:
        return [kind(found)]
    return [kind(llvm.extractvalue(single, found, [i], loc=loc, ip=ip)) for i in range(count)]


def load_words_if(
    condition: Any, address: Any, otherwise: Sequence[Uint32], reused: bool = False
) -> list[Uint32]:
    """One, two or four words at an address, or the words `otherwise`, branch-free.

    The address is not followed when the condition is false. Without `reused` the line is not kept
    in L1. See `after_loads`.
    """
    hint = "" if reused else ".L1::no_allocate"
    return _load(Uint32, len(otherwise), address, hint, condition, otherwise)


def load_words(address: Int64, count: int) -> list[Uint32]:
    """`count` words (1, 2, or a multiple of 4) at an address, as `load_words_if` with `reused`."""
    words: list[Uint32] = []
    for start in range(0, count, 4):
        words += _load(Uint32, min(4, count - start), address + 4 * start)
    return words


def load_integers(address: Int64, count: int) -> list[Int64]:
    """One int64, or an even number of them 16 bytes aligned, loaded as `load_words` does."""
    values: list[Int64] = []
    for start in range(0, count, 2):
        values += _load(Int64, min(2, count - start), address + 8 * start)
    return values


def hidden_zero(eps: Float32) -> Uint32:
    """The sign bit of a kernel argument that is not negative: 0, which no compiler knows."""
    return word_of(eps) >> 31


def after_loads(value: Any, loaded: Sequence[Any], zero: Uint32) -> Any:
    """`value` itself (32 or 64 bits), so computed that it depends on all the values `loaded`.

    The assembler moves a load down to its first use, past branches and exchanges that wait for
    other loads, which turns independent loads into a chain. What waits for one load is therefore
    made to wait for the others as well, at one instruction each: they are all in flight together.

    zero: `hidden_zero` of an argument of the kernel.
    """
    bits = Uint32(0)
    for other in loaded:
        bits = bits | ((Uint32(other) if other.width == 64 else word_of(other)) & zero)
    if isinstance(value, Float32):
        return float_of(word_of(value) | bits)
    return value | type(value)(bits)


def load_values(tensor: cute.Tensor, offset: Any, count: int) -> list[Uint32]:
    """The words of `count` values from element `offset` on, as `load_words` loads them."""
    width: Any = tensor.element_type.width
    return load_words(address_of(tensor, offset), count * width // 32)


def floats_in(words: Sequence[Uint32], dtype: Any) -> list[Float32]:
    """The values that words of a floating-point type hold, in order."""
    if dtype is Float32:
        return [float_of(word) for word in words]
    unpack = bf16_values if dtype is cutlass.BFloat16 else f16_values
    return [value for word in words for value in unpack(word)]


def bf16_values(word: Uint32) -> tuple[Float32, Float32]:
    """The two bf16 values of a word, the low half first."""
    return (word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)


def f16_values(word: Uint32) -> tuple[Float32, Float32]:
    """The two f16 values of a word, the low half first."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high; mov.b32 {low, high}, {$r0};"
        " cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high;}",
        write_only_types=[Float32] * 2,
        read_only_args=[word],
    )


def has_bit(mask: Uint32, number: int) -> Any:
    """Whether a bit of a word is set."""
    return (mask & Uint32(1 << number)) != Uint32(0)


def lowest_bit(mask: Any) -> Int32:
    """Number of the lowest bit set in a word that is not 0."""
    return cute.arch.popc((mask & -mask) - 1)


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
    return cute.math.absf(a)


def max_nan(a: Float32, b: Float32) -> Float32:
    """The larger of a and b, NaN if either is."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def min_nan(a: Float32, b: Float32) -> Float32:
    """The smaller of a and b, NaN if either is."""
    return cute.arch.inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
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
    values: Sequence[Float32], inverse: Sequence[Float32], keep_negative_zero: bool
) -> Uint32:
    """Codes of up to 8 values, the first in the lowest nibble; a NaN gets some code.

    inverse: CODE_SCALE over the group's scale, as one float32 if that is exact, else as two
    (`split_inverse`).
    """
    if len(inverse) not in (1, 2):
        raise ValueError(f"found {len(inverse)} parts, wanted CODE_SCALE / scale in one or two")
    word = Uint32(0)
    for value in reversed(values):
        if len(inverse) == 1:
            quotient = value * inverse[0]
        else:
            quotient = _math.fma(value, inverse[0], value * inverse[1])
        magnitude = cutlass.min(absolute(quotient), Float32(6.0 * CODE_SCALE))
        power = float_of(word_of(magnitude) & Uint32(0x7F800000))
        power = cutlass.max(power, Float32(CODE_SCALE))
        rounded = word_of(_math.fma(power, Float32(2.0**22), magnitude))
        # The steps to bits 29-31, and the exponent, whose field begins at bit 23, to bit 30.
        code = rounded * Uint32((1 << 29) + (1 << 7))
        word = (word << 1) | (word_of(value) >> 31)
        word = (word << 3) | (code >> 29)
    if not keep_negative_zero:
        is_nonzero = (word | (word >> 1) | (word >> 2)) & Uint32(0x11111111)
        word = word & (Uint32(0x77777777) | (is_nonzero << 3))
    return word


def split_inverse(scale: Float32, reciprocal: Float32) -> list[Float32]:
    """CODE_SCALE / scale of an e4m3 scale as hi + lo, both zero for scale 0 (codes: signed zeros).

    reciprocal: 1 / scale with a relative error of at most 2^-22. lo is positive, so that an
    infinite value keeps an infinite quotient.
    """
    known = select(scale == Float32(0.0), Float32(0.0), reciprocal)
    hi = known * Float32(CODE_SCALE * (1.0 - 2.0**-21))
    # Exact: scale has four significant bits, and CODE_SCALE - scale * hi is below 2^-17.
    rest = _math.fma(-scale, hi, Float32(CODE_SCALE))
    return [hi, rest * known]


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


def corrected_sixth(amax: Float32) -> Float32:
    """amax / 6 correctly rounded, for 2^-100 <= amax <= 2^120, by a residue (Markstein)."""
    first = amax * Float32(1.0 / 6.0)
    rest = _math.fma(Float32(-6.0), first, amax)
    return _math.fma(rest, Float32(1.0 / 6.0), first)


def nvfp4_scale(amax: Float32) -> Uint32:
    """e4m3 byte of amax / 6; NaN stays NaN.

    Beyond 2^20 every scale is saturated, below 2^-100 it is zero however the quotient is rounded.
    """
    return e4m3_byte(corrected_sixth(min_nan(amax, Float32(2.0**20))))


def fp4_encode(values: Sequence[Float32], amax: Float32) -> tuple[Uint32, Uint32]:
    """Codes of up to 8 values of one indexer-key group and the group's UE8M0 byte.

    amax: max |value| over the whole group, NaN if the group holds one: the byte is then 255 and the
    codes are 0. Zeros have no sign.
    """
    exponent = ue8m0_exponent(amax)
    # CODE_SCALE / scale is 2^(3 + 127 - exponent).
    inverse = float_of((Uint32(257) - Uint32(exponent)) << 23)
    word = e2m1_word(values, [inverse], keep_negative_zero=False)
    poisoned = amax != amax
    return select(poisoned, Uint32(0), word), select(poisoned, Uint32(255), Uint32(exponent))


def nvfp4_encode(values: Sequence[Float32], amax: Float32) -> tuple[list[Uint32], Uint32]:
    """Codes of 4, 8 or 16 values of one group and the group's e4m3 scale byte.

    amax: max |value| over the whole group, NaN if the group holds one: the scale is then NaN and
    the codes are 0. Returns (one word for 8 values, scale byte).
    """
    byte = nvfp4_scale(amax)
    scale = e4m3_value(byte)
    inverse = split_inverse(scale, cute.arch.rcp_approx(scale))
    poisoned = amax != amax
    words = []
    for start in range(0, len(values), 8):
        word = e2m1_word(values[start : start + 8], inverse, keep_negative_zero=True)
        words.append(select(poisoned, Uint32(0), word))
    return words, byte

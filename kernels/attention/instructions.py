"""PTX instructions of the attention kernels, as functions on 32-bit registers and addresses.

Shared-memory addresses are 32-bit byte addresses, global ones 64-bit. Loads, stores and copies are
volatile and keep their order among themselves and around barriers; arithmetic is free to move.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm as _llvm
from cutlass.cutlass_dsl import dsl_user_op

# The dialect's members are generated at import, which type checkers do not see.
llvm: Any = _llvm

_MEMORY = ",~{memory}"


def _value(operand: Any, loc: Any, ip: Any) -> Any:
    return operand.ir_value(loc=loc, ip=ip)


def _asm(
    results: list[Any],
    operands: list[Any],
    text: str,
    constraints: str,
    volatile: bool,
    loc: Any,
    ip: Any,
) -> Any:
    """One inline-assembly statement; results are DSL types (an empty list gives None)."""
    kinds = [kind.mlir_type for kind in results]
    if not kinds:
        result_type = None
    elif len(kinds) == 1:
        result_type = kinds[0]
    else:
        result_type = llvm.StructType.get_literal(kinds)
    out = llvm.inline_asm(
        result_type,
        [_value(operand, loc, ip) for operand in operands],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not kinds:
        return None
    if len(kinds) == 1:
        return results[0](out)
    return tuple(
        kind(llvm.extractvalue(kind.mlir_type, out, [i], loc=loc, ip=ip))
        for i, kind in enumerate(results)
    )


@dsl_user_op
def mma_bf16(a: Any, b: Any, c: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """m16n8k16, bf16 operands: four A registers, two B registers, four float32 sums."""
    return _asm(
        [Float32] * 4,
        [*a, *b, *c],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        False,
        loc,
        ip,
    )


@dsl_user_op
def ldmatrix_x4(address: Int32, *, loc: Any = None, ip: Any = None) -> Any:
    """Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8."""
    return _asm(
        [Uint32] * 4,
        [address],
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,r" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def ldmatrix_x4_trans(address: Int32, *, loc: Any = None, ip: Any = None) -> Any:
    """As `ldmatrix_x4`, each matrix transposed."""
    return _asm(
        [Uint32] * 4,
        [address],
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,r" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def shared_store_x4(
    address: Int32, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four 32-bit registers at a 16-byte aligned shared address."""
    _asm(
        [],
        [address, a, b, c, d],
        "st.shared.v4.b32 [$0], {$1,$2,$3,$4};",
        "r,r,r,r,r" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def shared_store_u32(address: Int32, a: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Store one 32-bit register to shared memory."""
    _asm([], [address, a], "st.shared.b32 [$0], $1;", "r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_store_f32(address: Int32, a: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Store one float32 to shared memory."""
    _asm([], [address, a], "st.shared.f32 [$0], $1;", "r,f" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_store_f32x2(
    address: Int32, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store two float32 at an 8-byte aligned shared address."""
    text = "st.shared.v2.f32 [$0], {$1,$2};"
    _asm([], [address, a, b], text, "r,f,f" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_load_f32(address: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Load one float32 from shared memory."""
    return _asm([Float32], [address], "ld.shared.f32 $0, [$1];", "=f,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_load_f32x2(address: Int32, *, loc: Any = None, ip: Any = None) -> Any:
    """Load two float32 from an 8-byte aligned shared address."""
    return _asm(
        [Float32] * 2,
        [address],
        "ld.shared.v2.f32 {$0,$1}, [$2];",
        "=f,=f,r" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def shared_load_f32x4(address: Int32, *, loc: Any = None, ip: Any = None) -> Any:
    """Load four float32 from a 16-byte aligned shared address."""
    return _asm(
        [Float32] * 4,
        [address],
        "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];",
        "=f,=f,=f,=f,r" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def global_load_x4(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """Load four 32-bit registers from a 16-byte aligned address of read-only data."""
    return _asm(
        [Uint32] * 4,
        [address],
        "ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,l" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def global_load_x2(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """Load two 32-bit registers from an 8-byte aligned address of read-only data."""
    return _asm(
        [Uint32] * 2,
        [address],
        "ld.global.nc.v2.b32 {$0,$1}, [$2];",
        "=r,=r,l" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def global_load_x2_if(
    condition: Any, address: Int64, a: Any, b: Any, *, loc: Any = None, ip: Any = None
) -> Any:
    """As `global_load_x2` past L1 where the condition holds, else a and b without a load."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $2, 0; "
        "@p ld.global.nc.L1::no_allocate.v2.b32 {$0,$1}, [$3];}"
    )
    operands = [Int32(condition), address, a, b]
    return _asm([Uint32] * 2, operands, text, "=r,=r,r,l,0,1" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_u16(address: Int64, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Load two bytes of read-only data, zero-extended."""
    text = "{.reg .b16 h; ld.global.nc.b16 h, [$1]; cvt.u32.u16 $0, h;}"
    return _asm([Uint32], [address], text, "=r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_i32(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a 32-bit integer of read-only data."""
    return _asm([Int32], [address], "ld.global.nc.b32 $0, [$1];", "=r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_i64(address: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """Load a 64-bit integer of read-only data."""
    return _asm([Int64], [address], "ld.global.nc.b64 $0, [$1];", "=l,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_f32(address: Int64, *, loc: Any = None, ip: Any = None) -> Float32:
    """Load one float32 that this grid does not write."""
    return _asm([Float32], [address], "ld.global.f32 $0, [$1];", "=f,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_f32x2(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """Load two float32 that this grid does not write, from an 8-byte aligned address."""
    text = "ld.global.v2.f32 {$0,$1}, [$2];"
    return _asm([Float32] * 2, [address], text, "=f,=f,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_f32x4(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """Load four float32 that this grid does not write, from a 16-byte aligned address."""
    return _asm(
        [Float32] * 4,
        [address],
        "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];",
        "=f,=f,=f,=f,l" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def global_load_f32x4_unless(
    condition: Any, address: Int64, *, loc: Any = None, ip: Any = None
) -> Any:
    """As `global_load_f32x4`, or zeros without a load where the condition holds."""
    text = (
        "{.reg .pred p; setp.eq.b32 p, $4, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; "
        "mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000; "
        "@p ld.global.v4.f32 {$0,$1,$2,$3}, [$5];}"
    )
    constraints = "=&f,=&f,=&f,=&f,r,l" + _MEMORY
    return _asm([Float32] * 4, [Int32(condition), address], text, constraints, True, loc, ip)


@dsl_user_op
def global_store_u32x4(
    address: Int64, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four 32-bit registers at a 16-byte aligned global address."""
    _asm(
        [],
        [address, a, b, c, d],
        "st.global.v4.b32 [$0], {$1,$2,$3,$4};",
        "l,r,r,r,r" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def global_store_u32x2(address: Int64, a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store two 32-bit registers at an 8-byte aligned global address."""
    _asm([], [address, a, b], "st.global.v2.b32 [$0], {$1,$2};", "l,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_store_f32x4(
    address: Int64, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four float32 at a 16-byte aligned global address."""
    _asm(
        [],
        [address, a, b, c, d],
        "st.global.v4.f32 [$0], {$1,$2,$3,$4};",
        "l,f,f,f,f" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def global_store_f32(address: Int64, a: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Store one float32."""
    _asm([], [address, a], "st.global.f32 [$0], $1;", "l,f" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_store_f32_if(
    condition: Any, address: Int64, a: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store one float32 where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.f32 [$1], $2;}"
    _asm([], [Int32(condition), address, a], text, "r,l,f" + _MEMORY, True, loc, ip)


@dsl_user_op
def copy_async_16(
    shared: Int32, address: Int64, size: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """cp.async of 16 bytes past L1; of the 16, `size` (0 or 16) are read and the rest are zero."""
    _asm(
        [],
        [shared, address, size],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r" + _MEMORY,
        True,
        loc,
        ip,
    )


@dsl_user_op
def opaque(x: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """x, as a value that the compiler cannot move out of a loop with all that follows from it."""
    return _asm([Int32], [x], "mov.b32 $0, $1;", "=r,r", True, loc, ip)


@dsl_user_op
def mul_bf16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two bf16 products; subnormal operands keep their value."""
    return _asm([Uint32], [a, b], "mul.bf16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def pack_bf16x2(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two float32 rounded to bf16, nearest even, the first in the low half."""
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return _asm([Uint32], [low, high], text, "=r,f,f", False, loc, ip)


@dsl_user_op
def prmt(a: Uint32, b: Uint32, selector: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Byte i of the result is the byte of b:a that hexadecimal digit i of the selector names."""
    text = "prmt.b32 $0, $1, $2, $3;"
    return _asm([Uint32], [a, b, selector], text, "=r,r,r,r", False, loc, ip)


@dsl_user_op
def e4m3x2_to_f32x2(pair: Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """The e4m3 values of the two low bytes, exact; 0x7f and 0xff give NaN (sm_89 and later)."""
    text = (
        "{.reg .b16 e, l, h; .reg .b32 p; cvt.u16.u32 e, $2; cvt.rn.f16x2.e4m3x2 p, e; "
        "mov.b32 {l, h}, p; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
    )
    return _asm([Float32, Float32], [pair], text, "=f,=f,r", False, loc, ip)


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^x to 2 ulp; -inf gives 0."""
    return _asm([Float32], [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip)


@dsl_user_op
def log2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Binary logarithm, absolute error 2^-22; 0 gives -inf."""
    return _asm([Float32], [x], "lg2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip)


@dsl_user_op
def maximum(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The larger of two float32; a NaN loses."""
    return _asm([Float32], [a, b], "max.f32 $0, $1, $2;", "=f,f,f", False, loc, ip)


@dsl_user_op
def shuffle_xor(x: Float32, mask: int, *, loc: Any = None, ip: Any = None) -> Float32:
    """The value of lane (own lane xor mask); every lane of the warp must take part."""
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"
    return _asm([Float32], [x], text, "=f,f", True, loc, ip)


@dsl_user_op
def shuffle_index(x: Any, source: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The 32-bit number of lane `source`; every lane of the warp must take part."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    kind = "f" if type(x) is Float32 else "r"
    return _asm([type(x)], [x, Int32(source)], text, f"={kind},{kind},r", True, loc, ip)


@dsl_user_op
def any_lane(condition: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Whether the condition holds in any lane; every lane of the warp must take part."""
    text = (
        "{.reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; "
        "selp.b32 $0, 1, 0, q;}"
    )
    return _asm([Int32], [Int32(condition)], text, "=r,r", True, loc, ip) != 0


@dsl_user_op
def ballot(condition: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """One bit for each lane whose condition holds; every lane of the warp must take part."""
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    return _asm([Uint32], [Int32(condition)], text, "=r,r", True, loc, ip)


def address(tensor: Any) -> Any:
    """Address of a tensor's first element, 64 bits."""
    return tensor.iterator.toint()


def choose(condition: Any, one: Any, other: Any) -> Any:
    """`one` where the run-time condition holds, else `other`; both are evaluated."""
    return cutlass.select_(condition, one, other)


@dsl_user_op
def shared_load_u32(address: Int32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Load one 32-bit register from shared memory."""
    return _asm([Uint32], [address], "ld.shared.u32 $0, [$1];", "=r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_load_u32x4(address: Int32, *, loc: Any = None, ip: Any = None) -> Any:
    """Load four 32-bit registers from a 16-byte aligned shared address."""
    text = "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Uint32] * 4, [address], text, "=r,=r,=r,=r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_u32x4_if(condition: Any, address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """Load four 32-bit registers, that this grid does not write, where the condition holds."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; "
        "mov.b32 $3, 0; @p ld.global.v4.b32 {$0,$1,$2,$3}, [$5];}"
    )
    constraints = "=&r,=&r,=&r,=&r,r,l" + _MEMORY
    return _asm([Uint32] * 4, [Int32(condition), address], text, constraints, True, loc, ip)


@dsl_user_op
def count_bits(x: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Number of ones."""
    return _asm([Uint32], [x], "popc.b32 $0, $1;", "=r,r", False, loc, ip)


@dsl_user_op
def barrier_wait(address: Int32, parity: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until the phase of this parity is complete; on a fresh mbarrier parity 1 passes."""
    text = (
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
        "@p bra DONE; bra AGAIN; DONE: }"
    )
    _asm([], [address, parity], text, "r,r" + _MEMORY, True, loc, ip)

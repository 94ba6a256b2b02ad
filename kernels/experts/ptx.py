"""PTX of the experts' kernel: loads and stores under a condition, a named barrier."""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from sglang_dsv4.kernels.attention.instructions import _MEMORY, _asm


@dsl_user_op
def load_i32_if(
    condition: Any, address: Int64, other: Int32, *, loc: Any = None, ip: Any = None
) -> Int32:
    """A 32-bit integer past L1 where the condition holds, else the other number."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $1, 0; mov.b32 $0, $3; "
        "@p ld.relaxed.gpu.global.b32 $0, [$2];}"
    )
    operands = [Int32(condition), address, other]
    return _asm([Int32], operands, text, "=&r,r,l,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def load_f32_if(condition: Any, address: Int64, *, loc: Any = None, ip: Any = None) -> Float32:
    """One float32 where the condition holds, else 0 without a load."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $1, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$2];}"
    )
    return _asm([Float32], [Int32(condition), address], text, "=&f,r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def store_u32_if(
    condition: Any, address: Int64, a: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store one 32-bit register where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.b32 [$1], $2;}"
    _asm([], [Int32(condition), address, a], text, "r,l,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def store_zeros_if(condition: Any, address: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes of zeros to an aligned address where the condition holds."""
    text = (
        "{.reg .pred p; .reg .b32 z; setp.ne.b32 p, $0, 0; mov.b32 z, 0; "
        "@p st.global.v4.b32 [$1], {z,z,z,z};}"
    )
    _asm([], [Int32(condition), address], text, "r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def divide(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a / b to 2 ulp; 0 for b above 2^126."""
    return _asm([Float32], [a, b], "div.full.f32 $0, $1, $2;", "=f,f,f", False, loc, ip)


@dsl_user_op
def named_barrier(number: Int32, threads: int, *, loc: Any = None, ip: Any = None) -> None:
    """Barrier of `threads` threads; numbers 1 to 15, the same for all of them."""
    _asm([], [number], f"bar.sync $0, {threads};", "r" + _MEMORY, True, loc, ip)

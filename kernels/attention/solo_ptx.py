"""PTX that only the solo kernel uses: loads under a condition, matrix stores, wide stores."""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from sglang_dsv4.kernels.attention.instructions import _MEMORY, _asm


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a b + c with one rounding."""
    return _asm([Float32], [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", False, loc, ip)


@dsl_user_op
def load_record_x4_if(
    condition: Any, address: Int64, old: Any, *, loc: Any = None, ip: Any = None
) -> Any:
    """16 bytes of read-only data past L1 where the condition holds, else the old registers."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $4, 0; "
        "@p ld.global.nc.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$5];}"
    )
    operands = [Int32(condition), address, *old]
    constraints = "=r,=r,=r,=r,r,l,0,1,2,3" + _MEMORY
    return _asm([Uint32] * 4, operands, text, constraints, True, loc, ip)


def _load_one_if(kind: str, condition: Any, address: Any, old: Any, loc: Any, ip: Any) -> Any:
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, $1, 0; @p ld.global.nc.L1::no_allocate.{kind} $0, [$2];}}"
    )
    operands = [Int32(condition), address, old]
    return _asm([Uint32], operands, text, "=r,r,l,0" + _MEMORY, True, loc, ip)


@dsl_user_op
def load_record_u16_if(
    condition: Any, address: Int64, old: Uint32, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """Two bytes, zero-extended, where the condition holds, else the old register."""
    return _load_one_if("u16", condition, address, old, loc, ip)


@dsl_user_op
def load_record_u8_if(
    condition: Any, address: Int64, old: Uint32, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """One byte, zero-extended, where the condition holds, else the old register."""
    return _load_one_if("u8", condition, address, old, loc, ip)


@dsl_user_op
def stmatrix_x4(
    address: Int32, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four 8x8 matrices of 16 bits; lane l names the place of row l % 8 of matrix l / 8."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
    _asm([], [address, a, b, c, d], text, "r,r,r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def stmatrix_x2_trans(address: Int32, a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store two 8x8 matrices of 16 bits, each transposed; lanes below 16 name their rows."""
    text = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1,$2};"
    _asm([], [address, a, b], text, "r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_store_f32x4(
    address: Int32, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four float32 at a 16-byte aligned shared address."""
    text = "st.shared.v4.f32 [$0], {$1,$2,$3,$4};"
    _asm([], [address, a, b, c, d], text, "r,f,f,f,f" + _MEMORY, True, loc, ip)

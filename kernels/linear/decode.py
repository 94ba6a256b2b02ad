"""A lane's part of records: decoding to bf16 operands, and the copies that bring records.

The layout is that of ``records``. Shared-memory addresses are 32-bit byte addresses.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from sglang_dsv4.kernels.attention.instructions import _MEMORY, _asm


@dsl_user_op
def spread_codes(word: Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """The eight codes of a word as bf16 pairs a0 to a3, values times 2^-126 (see ``records``)."""
    text = (
        "{.reg .b32 r; "
        "and.b32 $0, $4, 0x81C081C0; "
        "shf.r.wrap.b32 r, $4, $4, 3; and.b32 $1, r, 0x81C081C0; "
        "shf.r.wrap.b32 r, $4, $4, 6; and.b32 $2, r, 0x81C081C0; "
        "and.b32 r, $4, 0x001B001B; mul.lo.u32 r, r, 0x4108; and.b32 $3, r, 0x81C081C0;}"
    )
    return _asm([Uint32] * 4, [word], text, "=&r,=&r,=&r,=&r,r", False, loc, ip)


@dsl_user_op
def spread_scales(pair: Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """Two e4m3 in the low 16 bits -> each times 2^119 as a pair of equal bf16.

    A byte shifted left by 4 reads as bf16 as its value times 2^-120, subnormals included; two
    exact multiplications bring that to 2^119. The product has the bytes at bits 4 and 20, and in
    bits 12 to 19 their sum, which is less than 2^8 because neither sign is set.
    """
    text = (
        "{.reg .b32 r, k; mul.lo.u32 r, $2, 0x1010; and.b32 r, r, 0x07F007F0; "
        "mov.b32 k, 0x7B807B80; mul.bf16x2 r, r, k; mov.b32 k, 0x7B007B00; mul.bf16x2 r, r, k; "
        "prmt.b32 $0, r, r, 0x1010; prmt.b32 $1, r, r, 0x3232;}"
    )
    return _asm([Uint32] * 2, [pair], text, "=&r,=&r,r", False, loc, ip)


@dsl_user_op
def shared_load_u16(address: Int32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Load two bytes of shared memory, zero-extended."""
    text = "{.reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h;}"
    return _asm([Uint32], [address], text, "=r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_x4(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """16 bytes of what another kernel may have written while this one had begun.

    Not by the read-only path, which is for what nobody writes as long as a kernel runs.
    """
    text = "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Uint32] * 4, [address], text, "=r,=r,=r,=r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def barriers_init(
    condition: Any, address: Int32, number: int, arrivals: int, *, loc: Any = None, ip: Any = None
) -> None:
    """Where the warp's condition holds, one lane makes `number` mbarriers, 8 bytes each, visible.

    Each completes a phase at so many arrivals and the bytes that these expect.
    """
    inits = "".join(
        f"@p mbarrier.init.shared::cta.b64 [$1 + {8 * i}], {arrivals}; " for i in range(number)
    )
    text = (
        "{.reg .pred p, q; setp.ne.b32 q, $0, 0; elect.sync _|p, 0xffffffff; and.pred p, p, q; "
        f"{inits}fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;}}"
    )
    _asm([], [Int32(condition), address], text, "r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def copy_bytes(
    condition: Any,
    barrier: Int32,
    shared: Any,
    sources: Any,
    size: Int32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Where the condition holds, one lane of the warp copies ``size`` bytes of each source.

    Args: shared and sources: as many 16-byte aligned shared as global addresses; size a multiple
    of 16; the mbarrier's phase completes when all have arrived. The condition is the warp's.
    """
    count = len(sources)
    copies = "".join(
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[${3 + i}], [${3 + count + i}], $2, [$1]; "
        for i in range(count)
    )
    text = (
        "{.reg .pred p, q; .reg .b32 n; setp.ne.b32 q, $0, 0; elect.sync _|p, 0xffffffff; "
        f"and.pred p, p, q; mul.lo.u32 n, $2, {count}; "
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], n; "
        f"{copies}}}"
    )
    operands = [Int32(condition), barrier, size, *shared, *sources]
    constraints = "r,r,r" + ",r" * count + ",l" * count + _MEMORY
    _asm([], operands, text, constraints, True, loc, ip)


@dsl_user_op
def arrive_with_bytes(
    condition: Any,
    barrier: Int32,
    shared: Int32,
    source: Int64,
    size: Int32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """One lane of the warp arrives, with a copy of `size` bytes where the condition holds.

    Args: as `copy_bytes`, for one source.
    """
    text = (
        "{.reg .pred p, q; .reg .b32 n; setp.ne.b32 q, $0, 0; elect.sync _|p, 0xffffffff; "
        "selp.b32 n, $4, 0, q; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], n; "
        "and.pred q, p, q; @q cp.async.bulk.shared::cluster.global"
        ".mbarrier::complete_tx::bytes [$2], [$3], $4, [$1];}"
    )
    operands = [Int32(condition), barrier, shared, source, size]
    _asm([], operands, text, "r,r,r,l,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_zero_x4_if(condition: Any, address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Clear 16 bytes of shared memory where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.v4.b32 [$1], {$2,$2,$2,$2};}"
    operands = [Int32(condition), address, Uint32(0)]
    _asm([], operands, text, "r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def arrive_if(
    condition: Any, counter: Int64, number: Int32, flag: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Where the condition holds, count one arrival; whether it is number `number` to shared memory.

    What the block's threads wrote before a barrier is seen by who arrives later; what earlier
    arrivals wrote is seen after the next barrier. The last arrival leaves the counter at zero.
    """
    text = (
        "{.reg .pred p, q; .reg .b32 n, f; setp.ne.b32 p, $0, 0; mov.b32 n, 0; "
        "@p atom.acq_rel.gpu.global.add.u32 n, [$1], 1; "
        "add.u32 n, n, 1; setp.eq.u32 q, n, $2; selp.b32 f, 1, 0, q; "
        "@p st.shared.b32 [$3], f; and.pred q, p, q; @q st.relaxed.gpu.global.b32 [$1], 0;}"
    )
    operands = [Int32(condition), counter, number, flag]
    _asm([], operands, text, "r,l,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def load_written_f32x4(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """Load four float32 that another block wrote before it arrived."""
    text = "ld.relaxed.gpu.global.v4.f32 {$0,$1,$2,$3}, [$4];"
    return _asm([Float32] * 4, [address], text, "=f,=f,=f,=f,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def store_f32x4_if(
    condition: Any,
    address: Int64,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Store four float32 at a 16-byte aligned address where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.v4.f32 [$1], {$2,$3,$4,$5};}"
    operands = [Int32(condition), address, a, b, c, d]
    _asm([], operands, text, "r,l,f,f,f,f" + _MEMORY, True, loc, ip)


@dsl_user_op
def store_bf16x4(
    known: Int32, aligned: Any, address: Int64, values: list, *, loc: Any = None, ip: Any = None
) -> None:
    """Store the first `known` of four float32 rounded to bf16, all four at once where aligned to 8.

    None where `known` is not positive, all where it is 4 or more.
    """
    single = "".join(
        f"mov.b32 {{l, h}}, {'vw'[i // 2]}; setp.gt.s32 q, $0, {i}; and.pred q, q, s; "
        f"@q st.global.b16 [$2 + {2 * i}], {'lh'[i % 2]}; "
        for i in range(4)
    )
    text = (
        "{.reg .pred p, q, s; .reg .b32 v, w; .reg .b16 l, h; "
        "cvt.rn.bf16x2.f32 v, $4, $3; cvt.rn.bf16x2.f32 w, $6, $5; "
        "setp.ne.b32 s, $1, 0; setp.ge.s32 p, $0, 4; and.pred p, p, s; "
        f"@p st.global.v2.b32 [$2], {{v, w}}; not.pred s, p; {single}}}"
    )
    operands = [known, Int32(aligned), address, *values]
    _asm([], operands, text, "r,r,l,f,f,f,f" + _MEMORY, True, loc, ip)


@dsl_user_op
def bf16x2_to_f32x2(pair: Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """Both bf16 as float32, the low half first."""
    text = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
    return _asm([Float32] * 2, [pair], text, "=&r,=&r,r", False, loc, ip)


@dsl_user_op
def pack_e4m3x4(
    a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """Four float32 rounded to e4m3, nearest even, at most 448; the first in the lowest byte."""
    text = (
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h};}"
    )
    return _asm([Uint32], [a, b, c, d], text, "=r,f,f,f,f", False, loc, ip)


@dsl_user_op
def store_u32x4_if(
    condition: Any, address: Int64, values: list, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four 32-bit registers at a 16-byte aligned address where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.v4.b32 [$1], {$2,$3,$4,$5};}"
    operands = [Int32(condition), address, *values]
    _asm([], operands, text, "r,l,r,r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def load_codes_if(
    condition: Any, codes: Int64, scales: Int64, old: list, *, loc: Any = None, ip: Any = None
) -> Any:
    """Two or four words of codes and a scale pair of read-only data where the condition holds.

    Args: codes, scales: addresses; old: words and pair that are returned where it does not.
    """
    pair = len(old) - 1
    words = ",".join(f"${i}" for i in range(pair))
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, ${pair + 1}, 0; "
        f"@p ld.global.nc.L1::no_allocate.v{pair}.b32 {{{words}}}, [${pair + 2}]; "
        f"@p ld.global.nc.L1::no_allocate.u16 ${pair}, [${pair + 3}];}}"
    )
    tied = "".join(f",{i}" for i in range(pair + 1))
    constraints = "=&r," * (pair + 1) + "r,l,l" + tied + _MEMORY
    operands = [Int32(condition), codes, scales, *old]
    return _asm([Uint32] * (pair + 1), operands, text, constraints, True, loc, ip)

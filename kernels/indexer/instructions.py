"""PTX of the indexer kernels beyond `kernels.attention.instructions`: scans, histograms, wgmma.

Shared-memory addresses are 32-bit byte addresses, global ones 64-bit.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from sglang_dsv4.kernels.attention.instructions import _MEMORY, _asm

# Stands for "no lane" in the source of a shuffle: lanes below the distance keep their own value.
_UP = "0x0, 0xffffffff"


@dsl_user_op
def shared_load_u8(address: Int32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Load one byte from shared memory, zero-extended."""
    return _asm([Uint32], [address], "ld.shared.u8 $0, [$1];", "=r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_store_u32_if(
    condition: Any, address: Int32, a: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store one 32-bit register to shared memory where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.b32 [$1], $2;}"
    _asm([], [Int32(condition), address, a], text, "r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_store_f32_if(
    condition: Any, address: Int32, a: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store one float32 to shared memory where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.f32 [$1], $2;}"
    _asm([], [Int32(condition), address, a], text, "r,r,f" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_store_x4_if(
    condition: Any,
    address: Int32,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Store four 32-bit registers at a 16-byte aligned shared address where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.v4.b32 [$1], {$2,$3,$4,$5};}"
    operands = [Int32(condition), address, a, b, c, d]
    _asm([], operands, text, "r,r,r,r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_count_if(condition: Any, address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Add one to a counter in shared memory, atomically, where the condition holds."""
    text = (
        "{.reg .pred p; .reg .u32 old; setp.ne.b32 p, $0, 0; @p atom.shared.add.u32 old, [$1], 1;}"
    )
    _asm([], [Int32(condition), address], text, "r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def cluster_load_u32(address: Int32, rank: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Load 32 bits at this shared address in the block of that rank of the cluster."""
    text = "{.reg .b32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.u32 $0, [a];}"
    return _asm([Uint32], [address, Int32(rank)], text, "=r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def cluster_add_if(
    condition: Any, address: Int32, rank: Any, a: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """Add atomically to this shared address in the block of that rank where the condition holds."""
    text = (
        "{.reg .pred p; .reg .b32 a; setp.ne.b32 p, $0, 0; mapa.shared::cluster.u32 a, $1, $2; "
        "@p red.relaxed.cluster.shared::cluster.add.u32 [a], $3;}"
    )
    operands = [Int32(condition), address, Int32(rank), a]
    _asm([], operands, text, "r,r,r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def cluster_arrive(*, loc: Any = None, ip: Any = None) -> None:
    """Arrive at the barrier of all threads of the cluster; to be followed by `cluster_wait`."""
    _asm([], [], "barrier.cluster.arrive.aligned;", "~{memory}", True, loc, ip)


@dsl_user_op
def cluster_wait(*, loc: Any = None, ip: Any = None) -> None:
    """Wait for the cluster's arrivals; shared stores before them are visible after it."""
    _asm([], [], "barrier.cluster.wait.aligned;", "~{memory}", True, loc, ip)


@dsl_user_op
def copy_async_16_if(
    condition: Any, shared: Int32, address: Int64, *, loc: Any = None, ip: Any = None
) -> None:
    """cp.async of 16 bytes past L1 where the condition holds."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $0, 0; "
        "@p cp.async.cg.shared.global.L2::128B [$1], [$2], 16;}"
    )
    _asm([], [Int32(condition), shared, address], text, "r,r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_load_i32_if(condition: Any, address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a 32-bit integer of read-only data where the condition holds, else 0."""
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$2];}"
    operands = [Int32(condition), address]
    return _asm([Int32], operands, text, "=&r,r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def global_store_i64_if(
    condition: Any, address: Int64, a: Int64, *, loc: Any = None, ip: Any = None
) -> None:
    """Store a 64-bit integer where the condition holds."""
    text = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.b64 [$1], $2;}"
    _asm([], [Int32(condition), address, a], text, "r,l,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def shuffle_xor_u32(x: Uint32, mask: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The value of lane (own lane xor mask); every lane of the warp must take part."""
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"
    return _asm([Uint32], [x], text, "=r,r", True, loc, ip)


@dsl_user_op
def shuffle_up(x: Uint32, distance: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The value of the lane `distance` below, or 0 where there is none."""
    text = (
        "{.reg .pred p; .reg .u32 v; "
        f"shfl.sync.up.b32 v|p, $1, {distance}, {_UP}; selp.u32 $0, v, 0, p;}}"
    )
    return _asm([Uint32], [x], text, "=r,r", True, loc, ip)


@dsl_user_op
def max_u16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The larger of each unsigned half (sm_90 and later)."""
    return _asm([Uint32], [a, b], "max.u16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def pin(x: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """x, as a value that is computed here once, not again where it is used."""
    return _asm([Int64], [x], "mov.b64 $0, $1;", "=l,l", True, loc, ip)


@dsl_user_op
def multiply_add_wide(a: Uint32, b: Uint32, c: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """a x b + c with the whole product."""
    return _asm([Int64], [a, b, c], "mad.wide.u32 $0, $1, $2, $3;", "=l,r,r,l", False, loc, ip)


@dsl_user_op
def float_of(bits: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The float32 with these bits."""
    return _asm([Float32], [bits], "mov.b32 $0, $1;", "=f,r", False, loc, ip)


@dsl_user_op
def twice_relu(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x + |x| = 2 max(x, 0) in one addition; NaN for NaN and for -inf."""
    text = "{.reg .f32 a; abs.f32 a, $1; add.f32 $0, $1, a;}"
    return _asm([Float32], [x], text, "=f,f", False, loc, ip)


@dsl_user_op
def fence_async(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's shared stores before later reads by wgmma."""
    _asm([], [], "fence.proxy.async.shared::cta;", "~{memory}", True, loc, ip)


def _places(first: int, count: int) -> str:
    return "{" + ",".join(f"${i}" for i in range(first, first + count)) + "}"


@dsl_user_op
def wgmma_start(
    a: Sequence[Any],
    b: Int64,
    columns: int,
    step: int,
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """m64nNk16 bf16 products over all of K from zero, one group; `wgmma_wait` gives the sums.

    a: four registers for each 16 of K; b: descriptor of the first 16 of K; columns: N; step: bytes
    from one 16 of K to the next in shared memory. Returns N / 2 float32, not to be used yet.
    """
    n = columns // 2
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    lines = ["{.reg .pred p; .reg .b64 b;", "wgmma.fence.sync.aligned;"]
    for i in range(len(a) // 4):
        lines += [
            f"setp.ne.b32 p, {min(i, 1)}, 0;",
            f"add.s64 b, ${n + len(a)}, {i * step >> 4};",
            f"{name} {_places(0, n)}, {_places(n + 4 * i, 4)}, b, p, 1, 1, 0;",
        ]
    lines.append("wgmma.commit_group.sync.aligned;}")
    constraints = ",".join(["=f"] * n + ["r"] * len(a) + ["l"]) + _MEMORY
    return _asm([Float32] * n, [*a, b], "\n".join(lines), constraints, True, loc, ip)


@dsl_user_op
def wgmma_wait(
    sums: Sequence[Any], a: Sequence[Any], pending: int, *, loc: Any = None, ip: Any = None
) -> Any:
    """Wait until at most `pending` groups run; returns the sums of a finished one.

    a: registers that its products read, kept until here.
    """
    n = len(sums)
    tied = [str(i) for i in range(n)]
    constraints = ",".join(["=f"] * n + tied + ["r"] * len(a)) + _MEMORY
    text = f"wgmma.wait_group.sync.aligned {pending};"
    return _asm([Float32] * n, [*sums, *a], text, constraints, True, loc, ip)

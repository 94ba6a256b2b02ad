"""PTX of Hopper: mbarriers, proxy fences, register budgets and warpgroup products (wgmma).

Shared-memory addresses are 32-bit byte addresses. A product is asynchronous: its accumulators are
passed through `wgmma_wait`, so that nothing that reads them can move before the wait.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from sglang_dsv4.kernels.attention.instructions import _MEMORY, _asm

# Matrix descriptor: bits 62-63 = 1 name the 128-byte swizzle; byte offsets are counted in 16.
_SWIZZLE_128 = 1 << 62
# Eight rows of 128 bytes to the next eight rows.
_GROUP_STEP = (1024 >> 4) << 32


@dsl_user_op
def barrier_init(address: Int32, count: int, *, loc: Any = None, ip: Any = None) -> None:
    """An mbarrier that completes a phase at `count` arrivals."""
    text = f"mbarrier.init.shared::cta.b64 [$0], {count};"
    _asm([], [address], text, "r" + _MEMORY, True, loc, ip)


@dsl_user_op
def barrier_init_fence(*, loc: Any = None, ip: Any = None) -> None:
    """Make initialised mbarriers visible to the block's other threads and to the async proxy."""
    text = "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;"
    _asm([], [], text, "~{memory}", True, loc, ip)


@dsl_user_op
def barrier_arrive(address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival; what the thread wrote before is visible to who waits."""
    text = "{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [$0];}"
    _asm([], [address], text, "r" + _MEMORY, True, loc, ip)


@dsl_user_op
def fence_async(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's shared stores before later reads by wgmma."""
    _asm([], [], "fence.proxy.async.shared::cta;", "~{memory}", True, loc, ip)


@dsl_user_op
def named_barrier(number: int, threads: int, *, loc: Any = None, ip: Any = None) -> None:
    """Barrier of `threads` threads; numbers 1 to 15."""
    _asm([], [], f"bar.sync {number}, {threads};", "~{memory}", True, loc, ip)


@dsl_user_op
def named_barrier_arrive(number: int, threads: int, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive at a named barrier without waiting for the others."""
    _asm([], [], f"bar.arrive {number}, {threads};", "~{memory}", True, loc, ip)


@dsl_user_op
def prefetch_l2(address: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Bring the 32 bytes at a global address, or more, into L2."""
    _asm([], [address], "prefetch.global.L2 [$0];", "l", True, loc, ip)


@dsl_user_op
def shuffle_xor(x: Any, mask: int, *, loc: Any = None, ip: Any = None) -> Any:
    """The 32-bit value of lane (own lane xor mask); every lane of the warp must take part."""
    kind = "f" if isinstance(x, Float32) else "r"
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"
    return _asm([type(x)], [x], text, f"={kind},{kind}", True, loc, ip)


@dsl_user_op
def shared_store_u16(address: Int32, a: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Store the low half of a register to shared memory."""
    text = "{.reg .b16 h; cvt.u16.u32 h, $1; st.shared.b16 [$0], h;}"
    _asm([], [address, a], text, "r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def shared_load_u32x2(address: Int32, *, loc: Any = None, ip: Any = None) -> Any:
    """Load two 32-bit registers from an 8-byte aligned shared address."""
    text = "ld.shared.v2.b32 {$0,$1}, [$2];"
    return _asm([Uint32] * 2, [address], text, "=r,=r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def stmatrix_x4(
    address: Int32, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four 8x8 matrices of 16 bits; lane l names the place of row l % 8 of matrix l / 8."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
    _asm([], [address, a, b, c, d], text, "r,r,r,r,r" + _MEMORY, True, loc, ip)


def descriptor_k_major(address: Any) -> Int64:
    """Operand of [64 or more rows, 64 values], 128 bytes a row in the 128-byte swizzle."""
    start = Int64((address >> 4) & 0x3FFF)
    return start | Int64(_SWIZZLE_128 | _GROUP_STEP | (1 << 16))


def descriptor_mn_major(address: Any, block_step: int) -> Int64:
    """Operand read across its rows: [k rows, 64 columns] blocks, `block_step` bytes apart.

    Its M or N index runs over the 64 columns of a block, then over blocks; k runs over rows.
    """
    start = Int64((address >> 4) & 0x3FFF)
    return start | Int64(_SWIZZLE_128 | _GROUP_STEP | ((block_step >> 4) << 16))


def _places(first: int, count: int) -> str:
    return "{" + ",".join(f"${i}" for i in range(first, first + count)) + "}"


def _product(sums: int) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{2 * sums}k16.f32.bf16.bf16"


def _wgmma(
    sums: Sequence[Any] | int,
    operands: Sequence[Any],
    kinds: str,
    body: str,
    loc: Any,
    ip: Any,
) -> Any:
    """Products on accumulators tied in and out, or on `sums` fresh ones; operands follow them."""
    old = [] if isinstance(sums, int) else list(sums)
    n = sums if isinstance(sums, int) else len(old)
    constraints = ["=f"] * n + [str(i) for i in range(len(old))] + ([kinds] if kinds else [])
    text = ",".join(constraints) + _MEMORY
    out = _asm([Float32] * n, [*old, *operands], body, text, True, loc, ip)
    return list(out)


@dsl_user_op
def wgmma_ss(
    sums: Sequence[Any] | int,
    a: Int64,
    b: Int64,
    steps: Sequence[tuple[int, int]],
    trans_b: int,
    parts: Sequence[tuple[int, int]] = (),
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Products of 16 bf16 each, both operands in shared memory, committed as one group.

    sums: accumulators of m64n(2 len)k16, or their number when the first product starts them;
    steps: byte offsets of A and B for each product; trans_b 1: B is MN-major; parts: the sums are
    cut into parts of so many, whose columns of B lie at these byte offsets.
    """
    fresh = isinstance(sums, int)
    n = sums if isinstance(sums, int) else len(sums)
    first = n if fresh else 2 * n
    lines = ["{.reg .pred p; .reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
    for i, (step_a, step_b) in enumerate(steps):
        keep = 0 if fresh and i == 0 else 1
        lines += [f"setp.ne.b32 p, {keep}, 0;", f"add.s64 a, ${first}, {step_a >> 4};"]
        start = 0
        for size, part_step in parts or ((n, 0),):
            lines += [
                f"add.s64 b, ${first + 1}, {(step_b + part_step) >> 4};",
                f"{_product(size)} {_places(start, size)}, a, b, p, 1, 1, 0, {trans_b};",
            ]
            start += size
    lines.append("wgmma.commit_group.sync.aligned;}")
    return _wgmma(sums, [a, b], "l,l", "\n".join(lines), loc, ip)


@dsl_user_op
def wgmma_rs(
    sums: Sequence[Any],
    a: Sequence[Any],
    b: Int64,
    steps: Sequence[int],
    trans_b: int,
    parts: Sequence[tuple[int, int]] = (),
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """As `wgmma_ss` with A in registers, four for each product; always adds to the sums."""
    n = len(sums)
    lines = ["{.reg .pred p; .reg .b64 b;", "setp.ne.b32 p, 1, 0;", "wgmma.fence.sync.aligned;"]
    for i, step_b in enumerate(steps):
        four = _places(2 * n + 4 * i, 4)
        start = 0
        for size, part_step in parts or ((n, 0),):
            lines += [
                f"add.s64 b, ${2 * n + len(a)}, {(step_b + part_step) >> 4};",
                f"{_product(size)} {_places(start, size)}, {four}, b, p, 1, 1, {trans_b};",
            ]
            start += size
    lines.append("wgmma.commit_group.sync.aligned;}")
    return _wgmma(sums, [*a, b], "r," * len(a) + "l", "\n".join(lines), loc, ip)


@dsl_user_op
def wgmma_wait(sums: Sequence[Any], pending: int, *, loc: Any = None, ip: Any = None) -> Any:
    """Wait until at most `pending` groups are under way; returns the accumulators."""
    return _wgmma(sums, [], "", f"wgmma.wait_group.sync.aligned {pending};", loc, ip)

"""PTX that only the narrow kernel uses: products with a transposed A, votes, transposed stores."""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from sglang_dsv4.kernels.attention.instructions import _MEMORY, _asm


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a b + c with one rounding."""
    return _asm([Float32], [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", False, loc, ip)


@dsl_user_op
def load_record_x4(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """Load 16 bytes of read-only data that will not be read again; kept out of L1."""
    text = "ld.global.nc.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Uint32] * 4, [address], text, "=r,=r,=r,=r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def load_record_x2(address: Int64, *, loc: Any = None, ip: Any = None) -> Any:
    """As `load_record_x4` for 8 bytes."""
    text = "ld.global.nc.L1::no_allocate.v2.b32 {$0,$1}, [$2];"
    return _asm([Uint32] * 2, [address], text, "=r,=r,l" + _MEMORY, True, loc, ip)


@dsl_user_op
def barrier_any(
    number: int, threads: int, condition: Any, *, loc: Any = None, ip: Any = None
) -> Int32:
    """Barrier of `threads` threads; 1 for all of them where the condition holds for any, else 0."""
    text = (
        "{.reg .pred p, q; setp.ne.b32 p, $1, 0; "
        f"bar.red.or.pred q, {number}, {threads}, p; selp.b32 $0, 1, 0, q;}}"
    )
    return _asm([Int32], [Int32(condition)], text, "=r,r" + _MEMORY, True, loc, ip)


@dsl_user_op
def stmatrix_trans(address: Int32, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store two or four 8x8 matrices of 16 bits, each transposed.

    Lane l names the place of column l % 8 of matrix l / 8; with two matrices, lanes above 15 name
    none that is written.
    """
    count = len(values)
    places = ",".join(f"${i + 1}" for i in range(count))
    text = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{places}}};"
    _asm([], [address, *values], text, "r" + ",r" * count + _MEMORY, True, loc, ip)


@dsl_user_op
def wgmma_wait_only(pending: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until at most `pending` groups are under way, without passing accumulators through."""
    _asm([], [], f"wgmma.wait_group.sync.aligned {pending};", "~{memory}", True, loc, ip)


# Upper half of a matrix descriptor: the 128-byte swizzle, 1024 bytes from eight rows to the next.
_DESCRIPTOR_HIGH = (1 << 30) | (1024 >> 4)


def descriptor_low(address: Any) -> Any:
    """Lower half of the descriptor of an operand of at most 64 columns, either major."""
    return ((address >> 4) & 0x3FFF) | (1 << 16)


def _products(lines: list[str]) -> str:
    """A statement of products, fenced before and committed after, with descriptors a and b."""
    head = [
        "{.reg .pred p; .reg .b32 low, high; .reg .b64 a, b;",
        f"setp.ne.b32 p, 1, 0; mov.b32 high, {_DESCRIPTOR_HIGH};",
        "wgmma.fence.sync.aligned;",
    ]
    return "\n".join([*head, *lines, "wgmma.commit_group.sync.aligned;}"])


def _descriptor(name: str, place: int, offset: int) -> str:
    return f"add.u32 low, ${place}, {offset >> 4}; mov.b64 {name}, {{low, high}};"


def _places(first: int, count: int) -> str:
    return "{" + ",".join(f"${i}" for i in range(first, first + count)) + "}"


def _tied(sums: Sequence[Any], operands: Sequence[Any], text: str, loc: Any, ip: Any) -> list:
    n = len(sums)
    ties = ",".join(str(i) for i in range(n))
    constraints = "=f," * n + ties + ",r" * len(operands) + _MEMORY
    return list(_asm([Float32] * n, [*sums, *operands], text, constraints, True, loc, ip))


@dsl_user_op
def wgmma_registers(
    sums: Sequence[Any],
    a: Sequence[Any],
    b: Int32,
    steps: Sequence[int],
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Add products of A in registers and a K-major B in shared memory, committed as one group.

    sums: accumulators of m64n(2 len)k16; a: four registers for each step; b: `descriptor_low`;
    steps: byte offset of B for each 16 of the contraction.
    """
    n = len(sums)
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.bf16.bf16"
    lines = []
    for i, step in enumerate(steps):
        lines.append(_descriptor("b", 2 * n + len(a), step))
        lines.append(f"{name} {_places(0, n)}, {_places(2 * n + 4 * i, 4)}, b, p, 1, 1, 0;")
    return _tied(sums, [*a, b], _products(lines), loc, ip)


@dsl_user_op
def wgmma_transposed(
    sums: Sequence[Any],
    a: Int32,
    b: Int32,
    rows: Sequence[int],
    steps: Sequence[tuple[int, int]],
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Add products of an MN-major A and a K-major B in shared memory, committed as one group.

    a, b: `descriptor_low`; rows: byte offsets in A of each block of 64 rows, which share the
    accumulators evenly; steps: byte offsets of A and B for each 16 of the contraction.
    """
    n = len(sums)
    each = n // len(rows)
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * each}k16.f32.bf16.bf16"
    lines = []
    for step_a, step_b in steps:
        lines.append(_descriptor("b", 2 * n + 1, step_b))
        for i, row in enumerate(rows):
            lines.append(_descriptor("a", 2 * n, row + step_a))
            lines.append(f"{name} {_places(i * each, each)}, a, b, p, 1, 1, 1, 0;")
    return _tied(sums, [a, b], _products(lines), loc, ip)

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
def e4m3x4_to_f16x2(word: Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """Four e4m3 as two f16 pairs, exact: bytes 0 and 1, bytes 2 and 3; 0x7f, 0xff give NaN."""
    text = (
        "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; "
        "cvt.rn.f16x2.e4m3x2 $1, h;}"
    )
    return _asm([Uint32] * 2, [word], text, "=r,=r,r", False, loc, ip)


@dsl_user_op
def mul_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two f16 products."""
    return _asm([Uint32], [a, b], "mul.f16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def pack_f16x2(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two float32 rounded to f16, nearest even, the first in the low half."""
    text = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return _asm([Uint32], [low, high], text, "=r,f,f", False, loc, ip)


@dsl_user_op
def bits_to_f32(bits: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The float32 of these bits."""
    return _asm([Float32], [bits], "mov.b32 $0, $1;", "=f,r", False, loc, ip)


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
def cluster_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Barrier of all threads of a cluster; what they wrote before is visible to all after."""
    text = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    _asm([], [], text, "~{memory}", True, loc, ip)


def _cluster_load(count: int, condition: Any, address: Int32, rank: Any, loc: Any, ip: Any) -> Any:
    zeros = " ".join(f"mov.f32 ${i}, 0f00000000;" for i in range(count))
    text = (
        f"{{.reg .pred p; .reg .b32 a; setp.ne.b32 p, ${count}, 0; {zeros} "
        f"mapa.shared::cluster.u32 a, ${count + 1}, ${count + 2}; "
        f"@p ld.shared::cluster.v{count}.f32 {_places(0, count)}, [a];}}"
    )
    constraints = "=&f," * count + "r,r,r" + _MEMORY
    operands = [Int32(condition), address, Int32(rank)]
    return _asm([Float32] * count, operands, text, constraints, True, loc, ip)


@dsl_user_op
def cluster_load_f32x2_if(
    condition: Any, address: Int32, rank: Any, *, loc: Any = None, ip: Any = None
) -> Any:
    """Two float32 at this shared address of block `rank` of the cluster; else zeros."""
    return _cluster_load(2, condition, address, rank, loc, ip)


@dsl_user_op
def cluster_load_f32x4_if(
    condition: Any, address: Int32, rank: Any, *, loc: Any = None, ip: Any = None
) -> Any:
    """Four float32 at this shared address of block `rank` of the cluster; else zeros."""
    return _cluster_load(4, condition, address, rank, loc, ip)


@dsl_user_op
def stmatrix_trans(address: Int32, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store two or four 8x8 matrices of 16 bits, each transposed.

    Lane l names the place of column l % 8 of matrix l / 8; with two matrices lanes above 15 name
    nothing.
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


def descriptor_low(address: Int32) -> Int32:
    """Lower half of the descriptor of an operand of at most 64 columns, either major."""
    return ((address >> 4) & 0x3FFF) | (1 << 16)


def _products(sums: int, lines: list[str]) -> str:
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
    kind: str = "bf16",
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Add products of A in registers and a K-major B in shared memory, committed as one group.

    sums: accumulators of m64n(2 len)k16; a: four registers for each step; b: `descriptor_low`;
    steps: byte offset of B for each 16 of the contraction.
    """
    n = len(sums)
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.{kind}.{kind}"
    lines = []
    for i, step in enumerate(steps):
        lines.append(_descriptor("b", 2 * n + len(a), step))
        lines.append(f"{name} {_places(0, n)}, {_places(2 * n + 4 * i, 4)}, b, p, 1, 1, 0;")
    return _tied(sums, [*a, b], _products(n, lines), loc, ip)


@dsl_user_op
def wgmma_transposed(
    sums: Sequence[Any],
    a: Int32,
    b: Int32,
    rows: Sequence[int],
    steps: Sequence[tuple[int, int]],
    kind: str = "bf16",
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
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * each}k16.f32.{kind}.{kind}"
    lines = []
    for step_a, step_b in steps:
        lines.append(_descriptor("b", 2 * n + 1, step_b))
        for i, row in enumerate(rows):
            lines.append(_descriptor("a", 2 * n, row + step_a))
            lines.append(f"{name} {_places(i * each, each)}, a, b, p, 1, 1, 1, 0;")
    return _tied(sums, [a, b], _products(n, lines), loc, ip)

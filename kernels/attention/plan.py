"""Which kernel of sparse attention runs a call, with how many heads a block and how many splits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from sglang_dsv4.envs import ATTENTION_KERNEL, attention_kernel
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.attention import portable, solo
from sglang_dsv4.kernels.attention.hopper import narrow, wide
from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.hardware import SHARED_BYTES

MAX_SPLITS = 32
# Shared memory that the driver keeps for itself in each block, in bytes.
RESERVED_BYTES = 1024
# Microseconds on an H200: the combination, each split of it, and 1000 of all its partial rows.
# These and the costs below are one least-squares fit to 208 timed plans of 8 to 128 heads (mean
# error 3%, largest 17%). Of them, the portable kernel's 60 with 16 and 32 heads were timed before
# its last gain and scaled by it (0.87, and by guess 0.92). The wide kernel's costs were set since,
# with the rest as it was, to the 26 timed plans of its present form: of the values on a grid that
# choose the faster number of splits in them, those with the least error (mean 7%, largest 18%).
COMBINE_COST = 1.85
SPLIT_COST = 0.18
ROW_COST = 1.00


class Kernel(StrEnum):
    """The implementations; the names are those of SGLANG_DSV4_NVFP4_ATTENTION_KERNEL."""

    PORTABLE = "portable"
    WIDE = "wide"
    NARROW = "narrow"


@dataclass(frozen=True)
class Cost:
    """Time of one head tile's blocks on an H200.

    per_sm: blocks that share an SM; tile: microseconds of 64 keys when as many share it; block:
    microseconds of a block's start and end; launch: microseconds of a launch without blocks;
    alone: time of a block alone on its SM, relative.
    """

    per_sm: int
    tile: float
    block: float
    launch: float
    alone: float = 1.0


@dataclass(frozen=True)
class Implementation:
    """One kernel: where it runs, for how many heads it is meant, its tiles of heads.

    archs is empty where any will do. compile(arch, head_tile, lists) gives a function of
    (Operands, Numbers).
    """

    archs: tuple[str, ...]
    heads: range
    costs: dict[int, Cost]
    shared_bytes: Callable[[int], int]
    compile: Callable[[str, int, ListShape], Any]

    def takes(self, num_heads: int, arch: str) -> bool:
        """Whether it is meant for so many heads on such a GPU."""
        return num_heads in self.heads and (not self.archs or arch in self.archs)

    def head_tiles(self, num_heads: int, arch: str) -> list[int]:
        """Useful tiles of heads, ascending: those that fit, none twice as large as is needed."""
        room = SHARED_BYTES[arch] - RESERVED_BYTES
        fitting = [tile for tile in self.costs if self.shared_bytes(tile) <= room]
        largest = next((tile for tile in fitting if tile >= num_heads), fitting[-1])
        return [tile for tile in fitting if tile <= largest]


def _compile_portable(arch: str, head_tile: int, lists: ListShape) -> Any:
    return portable.compile_sparse_attention(arch, portable.Shape(head_tile, lists))


def _compile_wide(arch: str, head_tile: int, lists: ListShape) -> Any:
    return wide.compile_wide(arch, lists)


def _compile_narrow(arch: str, head_tile: int, lists: ListShape) -> Any:
    if head_tile == solo.HEADS:
        return solo.compile_solo(arch, solo.SoloShape(lists))
    return narrow.compile_narrow(arch, narrow.NarrowShape(head_tile, lists))


def _narrow_shared_bytes(head_tile: int) -> int:
    return solo.shared_bytes() if head_tile == solo.HEADS else narrow.shared_bytes(head_tile)


IMPLEMENTATIONS: dict[Kernel, Implementation] = {
    Kernel.PORTABLE: Implementation(
        archs=(),
        heads=range(1, 1 << 16),
        costs={
            8: Cost(2, 3.44, 5.91, 0.35, alone=0.64),
            16: Cost(2, 4.41, 2.38, 1.56, alone=0.70),
            32: Cost(1, 2.75, 4.31, 2.21),
        },
        shared_bytes=portable.shared_bytes,
        compile=_compile_portable,
    ),
    Kernel.WIDE: Implementation(
        archs=("sm_90a",),
        heads=range(33, 1 << 16),
        costs={64: Cost(1, 2.05, 7.0, 3.5)},
        shared_bytes=lambda tile: wide.WideAttention(ListShape(64, 64, 8)).shared_bytes,
        compile=_compile_wide,
    ),
    Kernel.NARROW: Implementation(
        archs=("sm_90a",),
        heads=range(1, 1 << 16),
        costs={
            8: Cost(2, 2.89, 3.99, 1.72, alone=0.70),
            16: Cost(2, 3.41, 4.54, 0.96, alone=0.68),
        },
        shared_bytes=_narrow_shared_bytes,
        compile=_compile_narrow,
    ),
}


@dataclass(frozen=True)
class Plan:
    """The kernel, heads of a block, and blocks that share a token's lists (1 to MAX_SPLITS).

    Raises UnsupportedError for more splits than the combination takes.
    """

    kernel: Kernel
    head_tile: int
    splits: int

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= MAX_SPLITS:
            raise UnsupportedError(
                f"A plan has {self.splits} splits, wanted 1 to {MAX_SPLITS}: choose fewer."
            )

    def compile(self, arch: str, lists: ListShape) -> Any:
        """The compiled kernel, a function of (Operands, Numbers)."""
        return IMPLEMENTATIONS[self.kernel].compile(arch, self.head_tile, lists)


def kernels_for(num_heads: int, arch: str) -> list[Kernel]:
    """The kernels that are meant for so many heads on such a GPU; the environment may force one.

    Raises UnsupportedError where the forced one is not.
    """
    taking = [name for name, kernel in IMPLEMENTATIONS.items() if kernel.takes(num_heads, arch)]
    forced = attention_kernel()
    if forced is None:
        return taking
    if forced not in taking:
        raise UnsupportedError(
            f"The environment variable {ATTENTION_KERNEL.name} is {forced!r} for {num_heads} heads "
            f"on {arch}, wanted {' or '.join(taking)}: correct or unset it."
        )
    return [Kernel(forced)]


def plans(num_heads: int, num_tiles: int, arch: str, kernels: tuple[Kernel, ...]) -> list[Plan]:
    """Every sensible plan of some kernels; of the split counts, those that shorten a share.

    num_tiles: 64-key tiles of both lists.
    """
    splits = [
        n
        for n in range(1, min(MAX_SPLITS, num_tiles) + 1)
        if math.ceil(num_tiles / math.ceil(num_tiles / n)) == n
    ]
    return [
        Plan(kernel, tile, n)
        for kernel in kernels
        for tile in IMPLEMENTATIONS[kernel].head_tiles(num_heads, arch)
        for n in splits
    ]


def plan_cost(plan: Plan, num_tokens: int, num_heads: int, num_tiles: int, sms: int) -> float:
    """Estimated microseconds of a plan.

    num_tiles: 64-key tiles of both lists; sms: streaming multiprocessors.
    """
    cost = IMPLEMENTATIONS[plan.kernel].costs[plan.head_tile]
    blocks = num_tokens * math.ceil(num_heads / plan.head_tile) * plan.splits
    passes, rest = divmod(math.ceil(blocks / sms), cost.per_sm)
    share = cost.tile * math.ceil(num_tiles / plan.splits) + cost.block
    if rest:
        # From the time of one block alone to that of a full SM.
        filled = (rest - 1) / (cost.per_sm - 1)
        total = share * (passes + cost.alone + (1 - cost.alone) * filled)
    else:
        total = share * passes
    if plan.splits > 1:
        rows = blocks * plan.head_tile
        total += COMBINE_COST + SPLIT_COST * plan.splits + ROW_COST * rows / 1000
    return cost.launch + total


@lru_cache(maxsize=4096)
def _cheapest(
    num_tokens: int,
    num_heads: int,
    num_tiles: int,
    sms: int,
    arch: str,
    kernels: tuple[Kernel, ...],
) -> Plan:
    return min(
        plans(num_heads, num_tiles, arch, kernels),
        key=lambda plan: plan_cost(plan, num_tokens, num_heads, num_tiles, sms),
    )


def plan_for(num_tokens: int, num_heads: int, num_tiles: int, sms: int, arch: str) -> Plan:
    """The plan with the least estimated time among the kernels that may run.

    Raises UnsupportedError where the environment forces a kernel that may not.
    """
    kernels = tuple(kernels_for(num_heads, arch))
    return _cheapest(num_tokens, num_heads, num_tiles, sms, arch, kernels)

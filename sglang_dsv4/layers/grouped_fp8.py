"""Grouped FP8 products of routed experts on sm_90 by quack's Hopper GEMM (CuTeDSL).

Rows of the left operand are in the order of their experts, whose first rows ``starts`` holds, or
are gathered from their tokens by the kernel's loads. A factor of each row, the product of the
activation's scale and the expert's outer scale, multiplies the float32 sums. The sums of the Hopper
FP8 instruction, which adds with about 14 bits, go to float32 registers after each 128 columns.
"""

from pathlib import Path
from typing import Any

import quack.cache
import torch
from cutlass import Float32, cute
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import Pair, unpack
from quack.epilogue.ops import ColVecLoad

from sglang_dsv4.envs import kernel_cache
from sglang_dsv4.kernels import cute_math
from sglang_dsv4.kernels.cute_math import LOG2_E, select

# Members that are generated at import, which type checkers do not see.
_math: Any = cute.math

TILE_ROWS = 128
GATE_UP_COLUMNS, GATE_UP_CLUSTER = 192, 2
DOWN_COLUMNS, DOWN_CLUSTER = 128, 1

# quack keeps what it has compiled by the text of these folders too, where it is told to; without,
# in a temporary folder that other users may write to.
quack.cache.EXTRA_SOURCE_DIRS += [Path(str(path)).parent for path in (__file__, cute_math.__file__)]
if quack.cache.CACHE_DIR is None:
    quack.cache.CACHE_DIR = str(kernel_cache() / "quack")


def clamped_swiglu(gate: Float32, up: Float32, limit: Float32) -> Float32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); a NaN stays one."""
    gate = select(gate > limit, limit, gate)
    up = select(up > limit, limit, select(up < -limit, -limit, up))
    turned = _math.exp2(gate * Float32(-LOG2_E), fastmath=True)
    return gate * cute.arch.rcp_approx(turned + Float32(1.0)) * up


@gemm_epilogue(outputs=("hidden",), mode="acc_pair", ops={"factor": ColVecLoad("factor")})
def _gated(acc: Pair, factor: Float32, limit: Float32) -> dict[str, Float32]:
    gate, up = unpack(acc * factor)
    return {"hidden": clamped_swiglu(gate, up, limit)}


@gemm_epilogue(ops={"factor": ColVecLoad("factor")})
def _scaled(acc: Float32, factor: Float32) -> dict[str, Float32]:
    return {"D": acc * factor}


def _aligned(starts: torch.Tensor) -> torch.Tensor:
    """At an address of which the kernel's loads know that it is a multiple of 16."""
    return starts if starts.data_ptr() % 16 == 0 else starts.clone()


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    factor: torch.Tensor,
    limit: float | None,
    hidden: torch.Tensor,
) -> None:
    """The clamped SwiGLU of the rows of some experts, into their rows of ``hidden``.

    Args:
        x: e4m3 [T, in].
        weight: e4m3 [parts, 2 I, in], gate rows first.
        starts: int32 [parts + 1], each expert's first row of ``hidden``, and the end of the last's.
        tokens: int32 [R], the row of x of each row.
        factor: float32 [R].
        limit: ``swiglu_limit``; None clamps nothing.
        hidden: bfloat16 [R, I].
    """
    _gated.gemm(
        x,
        weight,
        None,
        epi_args={
            "factor": factor,
            "limit": float("inf") if limit is None else limit,
            "hidden": hidden,
        },
        tile_M=TILE_ROWS,
        tile_N=GATE_UP_COLUMNS,
        cluster_M=GATE_UP_CLUSTER,
        cu_seqlens_m=_aligned(starts),
        A_idx=tokens,
        concat_layout=("B",),
    )


def down(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    factor: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """factor * hidden W^T of the rows of some experts, into their rows of ``out``.

    Args:
        hidden: e4m3 [R, I].
        weight: e4m3 [parts, D, I].
        starts, factor: as for ``gate_up``.
        out: bfloat16 [R, D].
    """
    _scaled.gemm(
        hidden,
        weight,
        out,
        epi_args={"factor": factor},
        tile_M=TILE_ROWS,
        tile_N=DOWN_COLUMNS,
        cluster_M=DOWN_CLUSTER,
        cu_seqlens_m=_aligned(starts),
    )

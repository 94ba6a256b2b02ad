"""Hyper-connections on a GPU, with the signatures of `kernels.reference.mhc`.

Streams are bfloat16 of four streams, weights float32. A token's results have the same bits in every
batch and on every run. hc_pre and hc_head are two launches: `project` and `finish`.

Roofline of hc_pre for T tokens of width d: bytes = 16 * 24 d (fn) + 18 d T, and 8 d T more where
`finish` does not find the streams in L2; flops = 3 * 2 * 24 * 4 d T (TF32, in two parts).

Measured on an H200, 2026-12-02, us, hc_pre with the norm, in brackets with the kernel for few
tokens in `project` for all:

    width    16     64     256     512     1024            4096
    4096     6.2    7.4    13.3    20.8    33.6 (35.1)     106.7 (117.9)
    7168     6.3    8.8    18.6    32.7    56.4 (60.4)     188.5 (207.5)

Of 104.5 us without norm at 4096 tokens of width 4096 `project` takes 59 and `finish` the rest; of
fewer tokens at a time, so that `finish` finds the streams in L2, 512 take 158 and 1024 119 in all.
At 16 tokens Sinkhorn's rounds take 1.0 us. hc_head there: 4.3 and 4.7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.hardware import SHARED_BYTES, current_arch, num_sms
from sglang_dsv4.kernels.mhc.boundary import compile_boundary
from sglang_dsv4.kernels.mhc.expand import LANE, compile_expand
from sglang_dsv4.kernels.mhc.finish import compile_finish
from sglang_dsv4.kernels.mhc.gates import STREAMS
from sglang_dsv4.kernels.mhc.operands import (
    CHUNK,
    HEAD_ROWS,
    PRE_ROWS,
    groups_of,
    sums_pitch,
)
from sglang_dsv4.kernels.mhc.project import TILE_ROWS, compile_few, compile_many
from sglang_dsv4.kernels.operands import aligned_rows

# Up to here comb is made where the token is collapsed, and hc_post_pre is one operation.
FEW_TOKENS = 64
# Up to here every tile of 16 tokens has a block for each group.
SOME_TOKENS = 512
# Threads of a block that takes a slice of a token's columns, and of one that takes a whole token.
SLICE_THREADS = 128
TOKEN_THREADS = 512


@dataclass(frozen=True)
class ManyShape:
    """Blocks of `project.ProjectMany`."""

    warps: int
    row_tiles: int
    ahead: int
    resident: int


def many_shape(arch: str) -> ManyShape:
    """Blocks for many tokens; two on an SM where its shared memory allows."""
    return ManyShape(8, 1, 2, 2) if SHARED_BYTES[arch] > 200 << 10 else ManyShape(4, 1, 2, 1)


def _require(streams: Tensor) -> None:
    if streams.dim() != 3 or streams.shape[1] != STREAMS or streams.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"Found streams {tuple(streams.shape)} of {streams.dtype}, wanted [tokens, {STREAMS}, "
            f"width] of torch.bfloat16: use the reference for others."
        )


def _require_width(hidden: int) -> None:
    if hidden % CHUNK:
        raise UnsupportedError(
            f"Found streams of width {hidden}, wanted a multiple of {CHUNK}: use the reference."
        )


def _parameters(norm_weight: Tensor | None, *weights: Tensor) -> None:
    # They are read before the kernel ahead has ended, which a conversion would be.
    for weight in weights:
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            raise UnsupportedError(
                f"Found mixing parameters of {weight.dtype}, wanted contiguous torch.float32: "
                f"convert them when they are loaded."
            )
    if norm_weight is not None and norm_weight.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"Found a norm weight of {norm_weight.dtype}, wanted torch.bfloat16: use the reference "
            f"for others."
        )


def _weights(*weights: Tensor) -> list[Tensor]:
    """Mixing weights as contiguous float32: themselves where they are that already."""
    return [weight.to(torch.float32).contiguous() for weight in weights]


def _dense(streams: Tensor) -> Tensor:
    """Streams that lie side by side, tokens any distance apart: themselves, or a copy."""
    streams = aligned_rows(streams)
    return streams if streams.stride(1) == streams.shape[2] else streams.contiguous()


def _sums(streams: Tensor, rows: int) -> Tensor:
    """Room for the groups' sums."""
    tokens, _, hidden = streams.shape
    size = (groups_of(hidden) * tokens, sums_pitch(rows))
    return torch.empty(size, dtype=torch.float32, device=streams.device)


def _project(streams: Tensor, fn: Tensor, sums: Tensor) -> None:
    arch, (tokens, _, hidden), rows = current_arch(), streams.shape, len(fn)
    if tokens <= SOME_TOKENS:
        compile_few(arch, hidden, rows)(streams, fn, sums)
        return
    shape = many_shape(arch)
    tiles = -(-tokens // (TILE_ROWS * shape.row_tiles * shape.warps))
    ranges = max(1, shape.resident * num_sms(streams.device.index) // tiles)
    each = -(-groups_of(hidden) // ranges)
    static = (shape.warps, shape.row_tiles, shape.ahead, shape.resident)
    compile_many(arch, hidden, rows, *static)(streams, fn, sums, each)


def _finish(
    streams: Tensor,
    sums: Tensor,
    base: Tensor,
    scale: Tensor,
    iters: int,
    hc_eps: float,
    rms_eps: float,
    norm_weight: Tensor | None = None,
    fresh: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(collapse, post, comb) from the groups' sums; hc_head's have no post and no comb."""
    (tokens, _, hidden), rows, device = streams.shape, len(base), streams.device
    many = tokens if rows == PRE_ROWS else 0
    out = torch.empty(tokens, hidden, dtype=streams.dtype, device=device)
    post = torch.empty(many, STREAMS, dtype=torch.float32, device=device)
    comb = torch.empty(many, STREAMS, STREAMS, dtype=torch.float32, device=device)
    lanes, threads, columns = hidden // LANE, SLICE_THREADS, 1
    normed, apart = norm_weight is not None, tokens > FEW_TOKENS and rows == PRE_ROWS
    if normed:
        columns = -(-lanes // TOKEN_THREADS)
        threads = -(-lanes // (columns * 32)) * 32
    static = (hidden, rows, threads, columns, normed, fresh, apart)
    kernel = compile_finish(current_arch(), *static)
    # Without a norm the kernel does not look at its weight.
    weight = streams[0, 0] if norm_weight is None else norm_weight
    kernel(streams, sums, base, scale, weight, out, post, comb, iters, hc_eps, rms_eps)
    return out, post, comb


def _nothing(streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results of no tokens."""
    found = [
        streams.new_empty(0, *size, dtype=torch.float32) for size in ((STREAMS,), (STREAMS,) * 2)
    ]
    return streams.new_empty(0, streams.shape[2]), found[0], found[1]


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams into the input of a block. As `reference.mhc.hc_pre`.

    Args: streams bfloat16 [T, 4, d], d a multiple of 32, tokens any distance apart;
    fn float32 [24, 4 d]; base float32 [24]; scale float32 [3]; norm_weight bfloat16 [d] or None.
    Parameters must not be made by the kernel launched right before.
    Returns (input bfloat16 [T, d], post float32 [T, 4], comb float32 [T, 4, 4]).

    Raises UnsupportedError for other shapes and dtypes.
    """
    _require(streams)
    _require_width(streams.shape[2])
    _parameters(norm_weight, fn, base, scale)
    if not len(streams):
        return _nothing(streams)
    streams, sums = _dense(streams), _sums(streams, PRE_ROWS)
    _project(streams, fn, sums)
    args = (sinkhorn_iters, hc_eps, rms_eps, norm_weight)
    return _finish(streams, sums, base, scale, *args)


def hc_post(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: x'_j = post_j y + sum_i comb[i, j] x_i. As `reference.mhc.hc_post`.

    Args: output y bfloat16 [T, d], d a multiple of 8; streams x bfloat16 [T, 4, d];
    post float32 [T, 4]; comb float32 [T, 4, 4]. Returns bfloat16 [T, 4, d].

    Raises UnsupportedError for other shapes and dtypes.
    """
    _require(streams)
    if output.dtype != streams.dtype or streams.shape[2] % LANE:
        raise UnsupportedError(
            f"Found a block output of {output.dtype} and width {streams.shape[2]}, wanted "
            f"torch.bfloat16 and a multiple of {LANE}: use the reference for others."
        )
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if len(out):
        kernel = compile_expand(current_arch(), streams.shape[2])
        kernel(aligned_rows(output), _dense(streams), *_weights(post, comb), out)
    return out


def hc_post_pre(
    output: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hc_post of one block, then hc_pre of the next. As `reference.mhc.hc_post_pre`.

    Few tokens take two launches, in which the new streams are multiplied as they are made; the
    results have the bits of the two operations. Args as theirs.
    Returns (new streams, input, post, comb).

    Raises UnsupportedError for other shapes and dtypes.
    """
    rest = (sinkhorn_iters, hc_eps, rms_eps, norm_weight)
    if not 0 < len(streams) <= FEW_TOKENS:
        new = hc_post(output, streams, post, comb)
        return new, *hc_pre(new, fn, base, scale, *rest)
    _require(streams)
    _require_width(streams.shape[2])
    _parameters(norm_weight, fn, base, scale)
    if output.dtype != streams.dtype:
        raise UnsupportedError(
            f"Found a block output of {output.dtype}, wanted torch.bfloat16: use the reference."
        )
    sums, new = (
        _sums(streams, PRE_ROWS),
        torch.empty_like(streams, memory_format=torch.contiguous_format),
    )
    kernel = compile_boundary(current_arch(), streams.shape[2])
    kernel(aligned_rows(output), _dense(streams), *_weights(post, comb), fn, new, sums)
    return new, *_finish(new, sums, base, scale, *rest, fresh=True)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, rms_eps: float
) -> Tensor:
    """Last collapse of the streams, before the final norm. As `reference.mhc.hc_head`.

    Args: streams bfloat16 [T, 4, d], d a multiple of 32; fn float32 [4, 4 d]; base float32 [4];
    scale float32 [1]. Returns bfloat16 [T, d].

    Raises UnsupportedError for other shapes and dtypes.
    """
    _require(streams)
    _require_width(streams.shape[2])
    _parameters(None, fn, base, scale)
    if not len(streams):
        return _nothing(streams)[0]
    streams, sums = _dense(streams), _sums(streams, HEAD_ROWS)
    _project(streams, fn, sums)
    return _finish(streams, sums, base, scale, 0, hc_eps, rms_eps)[0]

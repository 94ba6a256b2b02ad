"""Hyper-connections on a GPU, with the signatures of `kernels.reference.mhc`.

Streams are bfloat16 of four streams, weights float32. A token's results have the same bits in every
batch and on every run.
"""

import torch
from torch import Tensor

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.mhc.collapse import (
    FEW_TOKENS,
    HEAD_ROWS,
    PRE_ROWS,
    compile_collapse,
    shape_of,
)
from sglang_dsv4.kernels.mhc.expand import LANE, compile_expand
from sglang_dsv4.kernels.mhc.gates import STREAMS
from sglang_dsv4.kernels.operands import aligned_rows


def _require(streams: Tensor) -> None:
    if streams.dim() != 3 or streams.shape[1] != STREAMS or streams.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"Found streams {tuple(streams.shape)} of {streams.dtype}, wanted [tokens, {STREAMS}, "
            f"width] of torch.bfloat16: use the reference for others."
        )


def _weights(*weights: Tensor) -> list[Tensor]:
    """Parameters as contiguous float32: themselves where they are that already."""
    return [weight.to(torch.float32).contiguous() for weight in weights]


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams into the input of a block. As `reference.mhc.hc_pre`.

    Args: streams bfloat16 [T, 4, d], d a multiple of 32, tokens and streams any distance apart;
    fn float32 [24, 4 d]; base float32 [24]; scale float32 [3].
    Returns (input bfloat16 [T, d], post float32 [T, 4], comb float32 [T, 4, 4]).

    Raises UnsupportedError for other shapes and dtypes.
    """
    _require(streams)
    tokens, _, hidden = streams.shape
    shape = shape_of(hidden)
    out = torch.empty(tokens, hidden, dtype=streams.dtype, device=streams.device)
    post = torch.empty(tokens, STREAMS, dtype=torch.float32, device=streams.device)
    comb = torch.empty(tokens, STREAMS, STREAMS, dtype=torch.float32, device=streams.device)
    if tokens:
        arch = current_arch()
        row_tiles = shape.row_tiles(tokens, arch)
        kernel = compile_collapse(arch, shape, PRE_ROWS, row_tiles, tokens <= FEW_TOKENS)
        weights = _weights(fn, base, scale)
        args = (sinkhorn_iters, hc_eps, rms_eps)
        kernel(aligned_rows(streams), *weights, out, post, comb, *args)
    return out, post, comb


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
        kernel(aligned_rows(output), aligned_rows(streams), *_weights(post, comb), out)
    return out


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, rms_eps: float
) -> Tensor:
    """Last collapse of the streams, before the final norm. As `reference.mhc.hc_head`.

    Args: streams bfloat16 [T, 4, d], d a multiple of 32; fn float32 [4, 4 d]; base float32 [4];
    scale float32 [1]. Returns bfloat16 [T, d].

    Raises UnsupportedError for other shapes and dtypes.
    """
    _require(streams)
    tokens, _, hidden = streams.shape
    shape = shape_of(hidden)
    out = torch.empty(tokens, hidden, dtype=streams.dtype, device=streams.device)
    if tokens:
        arch = current_arch()
        row_tiles = shape.row_tiles(tokens, arch)
        kernel = compile_collapse(arch, shape, HEAD_ROWS, row_tiles, True)
        # The kernel's two other results belong to hc_pre.
        none = [streams.new_empty(0, *n, dtype=torch.float32) for n in ((4,), (4, 4))]
        kernel(aligned_rows(streams), *_weights(fn, base, scale), out, *none, 0, hc_eps, rms_eps)
    return out

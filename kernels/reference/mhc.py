"""Manifold-constrained hyper-connections (paper section 2.2; transformers 5.19.0).

Four residual streams a token. Before a block they collapse into one with weights `pre`; after it,
the block's output spreads over them with weights `post` while `comb`, a doubly stochastic matrix
(Sinkhorn-Knopp), mixes the old streams. Everything is float32, with one rounding of each result.
"""

import torch
from torch import Tensor

from .norm_rope import rms_norm


def _project(streams: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """Linear map of the normalised, flattened streams [T, n, d]: float32 [T, rows of fn]."""
    return rms_norm(streams.float().flatten(-2), None, rms_eps) @ fn.float().mT


def hc_weights(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three mixing weights.

    Args: streams float [T, n, d]; fn [(2 + n) n, n d], base [(2 + n) n], rows in the order pre,
    post, comb (row-major); scale [3], one factor for each; sinkhorn_iters counts the column
    normalisations, the first of which has no row normalisation before it.
    Returns float32 (pre [T, n], post [T, n], comb [T, n, n]).
    """
    n = streams.shape[-2]
    sizes = (n, n, n * n)
    z_pre, z_post, z_comb = _project(streams, fn, rms_eps).split(sizes, dim=-1)
    b_pre, b_post, b_comb = base.float().split(sizes)
    s_pre, s_post, s_comb = scale.float().unbind()
    pre = torch.sigmoid(z_pre * s_pre + b_pre) + hc_eps
    post = 2 * torch.sigmoid(z_post * s_post + b_post)
    logits = (z_comb * s_comb + b_comb).unflatten(-1, (n, n))
    comb = torch.softmax(logits, dim=-1) + hc_eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    return pre, post, comb


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
    """Collapse the streams into the input of a block: sum_i pre_i x_i, with its norm if asked for.

    Args: as `hc_weights`; norm_weight [d] of the block's RMSNorm, whose eps is rms_eps, or None.
    Returns (input [T, d] in streams' dtype, post float32 [T, n], comb float32 [T, n, n]).
    """
    pre, post, comb = hc_weights(streams, fn, base, scale, sinkhorn_iters, hc_eps, rms_eps)
    collapsed = _collapse(streams, pre)
    if norm_weight is not None:
        collapsed = rms_norm(collapsed, norm_weight, rms_eps)
    return collapsed, post, comb


def _collapse(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * streams.float()).sum(dim=-2).to(streams.dtype)


def hc_post(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: x'_j = post_j y + sum_i comb[i, j] x_i, the sum over comb's first axis.

    Args: output y float [T, d]; streams x float [T, n, d]; post float32 [T, n];
    comb float32 [T, n, n]. Returns [T, n, d] in streams' dtype.
    """
    mixed = comb.mT @ streams.float()
    return (post.unsqueeze(-1) * output.float().unsqueeze(-2) + mixed).to(streams.dtype)


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
    """`hc_post` of one block, then `hc_pre` of the next: (new streams, input, post, comb)."""
    new = hc_post(output, streams, post, comb)
    args = (sinkhorn_iters, hc_eps, rms_eps, norm_weight)
    return new, *hc_pre(new, fn, base, scale, *args)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, rms_eps: float
) -> Tensor:
    """Last collapse of the streams, before the final norm.

    Args: streams float [T, n, d]; fn [n, n d]; base [n]; scale [1].
    Returns [T, d] in streams' dtype.
    """
    logits = _project(streams, fn, rms_eps) * scale.float() + base.float()
    return _collapse(streams, torch.sigmoid(logits) + hc_eps)

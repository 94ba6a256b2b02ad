"""Manifold-constrained hyper-connections (paper section 2.2): four residual streams a token."""

from typing import NamedTuple

import torch
from sglang.srt.layers.layernorm import RMSNorm
from torch import nn

from sglang_dsv4.config import ModelDims
from sglang_dsv4.kernels.dispatch import Operations


class Pending(NamedTuple):
    """Streams [T, n, d] and a block's output [T, d] that is not yet mixed into them.

    ``output``, ``post`` float32 [T, n] and ``comb`` float32 [T, n, n] are None before the first
    block.
    """

    streams: torch.Tensor
    output: torch.Tensor | None = None
    post: torch.Tensor | None = None
    comb: torch.Tensor | None = None

    def mixed(self, ops: Operations) -> torch.Tensor:
        """The new streams [T, n, d]."""
        if self.output is None:
            return self.streams
        return ops.hc_post(self.output, self.streams, self.post, self.comb)


class HyperConnection(nn.Module):
    """Mixes the streams with the last block's output and collapses them into a block's input.

    Parameters (float32, names of the checkpoint): ``fn`` [(2 + n) n, n d], ``base`` [(2 + n) n],
    ``scale`` [3], for n streams of width d.
    """

    def __init__(self, dims: ModelDims, ops: Operations) -> None:
        super().__init__()
        streams, self.ops = dims.hc_mult, ops
        mix = (2 + streams) * streams
        self.sinkhorn_iters, self.hc_eps, self.rms_eps = (
            dims.hc_sinkhorn_iters,
            dims.hc_eps,
            dims.rms_norm_eps,
        )
        self.fn = nn.Parameter(torch.empty(mix, streams * dims.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(mix, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def enter(
        self, pending: Pending, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The streams with the block before mixed in, and what this block starts from.

        Args:
            norm: the block's own norm, of the same eps as the hyper-connection.

        Returns:
            (streams [T, n, d], normed block input [T, d], ``post`` float32 [T, n], ``comb``
            float32 [T, n, n]).
        """
        numbers = (self.sinkhorn_iters, self.hc_eps, self.rms_eps)
        args = (self.fn, self.base, self.scale, *numbers, norm.weight)
        if pending.output is None:
            return pending.streams, *self.ops.hc_pre(pending.streams, *args)
        mixing = (pending.output, pending.streams, pending.post, pending.comb)
        return self.ops.hc_post_pre(*mixing, *args)


class HyperHead(nn.Module):
    """Last collapse of the streams, before the final norm: ``hc_fn``, ``hc_base``, ``hc_scale``."""

    def __init__(self, dims: ModelDims, ops: Operations) -> None:
        super().__init__()
        streams, self.ops = dims.hc_mult, ops
        self.hc_eps, self.rms_eps = dims.hc_eps, dims.rms_norm_eps
        self.hc_fn = nn.Parameter(
            torch.empty(streams, streams * dims.hidden_size, dtype=torch.float32)
        )
        self.hc_base = nn.Parameter(torch.empty(streams, dtype=torch.float32))
        self.hc_scale = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams [T, n, d] -> [T, d]."""
        return self.ops.hc_head(
            streams, self.hc_fn, self.hc_base, self.hc_scale, self.hc_eps, self.rms_eps
        )

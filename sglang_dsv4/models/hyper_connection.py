"""Manifold-constrained hyper-connections (paper section 2.2): four residual streams a token."""

import torch
from torch import nn

from sglang_dsv4.config import ModelDims
from sglang_dsv4.kernels.dispatch import Operations


class HyperConnection(nn.Module):
    """Collapses the streams before a block and mixes them with its output after it.

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

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Streams [T, n, d] -> block input [T, d], ``post`` float32 [T, n], ``comb`` [T, n, n]."""
        return self.ops.hc_pre(
            streams,
            self.fn,
            self.base,
            self.scale,
            self.sinkhorn_iters,
            self.hc_eps,
            self.rms_eps,
        )

    def expand(
        self,
        output: torch.Tensor,
        streams: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
    ) -> torch.Tensor:
        """Block output [T, d] and old streams [T, n, d] -> new streams [T, n, d]."""
        return self.ops.hc_post(output, streams, post, comb)


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

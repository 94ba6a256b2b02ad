"""RMSNorm, and the norm + rotation of queries and outputs (transformers 5.19.0 attention)."""

import torch
from torch import Tensor

from .rope import apply_rope_tail


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Args: x float [..., d]; weight float [d] or None. Float32 inside, one rounding at the end.
    Returns [..., d] in x's dtype.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)


def q_norm_rope(q: Tensor, positions: Tensor, table: Tensor, eps: float) -> Tensor:
    """Per-head RMSNorm without weight, then RoPE of the last `table.shape[-1]` values.

    Args: q float [T, H, d]; positions integer [T]; table float32 [max_position, rope_dim].
    Returns [T, H, d] in q's dtype, rounded once.
    """
    return apply_rope_tail(rms_norm(q.float(), None, eps), positions, table).to(q.dtype)


def inverse_rope(o: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Undo the rotation that V = K carries into the attention output, at the query's position.

    Args: o float [T, H, d]; positions integer [T]; table float32 [max_position, rope_dim].
    Returns [T, H, d] in o's dtype.
    """
    return apply_rope_tail(o, positions, table, inverse=True)

"""Interleaved rotary embedding with YaRN (transformers 5.19.0 `DeepseekV4RotaryEmbedding`)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class YarnParams:
    """YaRN (arXiv 2309.00071). DeepSeek-V4's attention factor is 1.0: no scale on cos and sin."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def inverse_frequencies(theta: float, rope_dim: int, yarn: YarnParams | None) -> Tensor:
    """Angle per position of each pair: float32 [rope_dim / 2]."""
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    extrapolated = 1.0 / (theta**exponent)
    if yarn is None:
        return extrapolated
    interpolated = 1.0 / (yarn.factor * theta**exponent)

    def pair_with_rotations(rotations: float) -> float:
        wavelengths = yarn.original_max_position / (rotations * 2 * math.pi)
        return rope_dim * math.log(wavelengths) / (2 * math.log(theta))

    low = max(math.floor(pair_with_rotations(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(yarn.beta_slow)), rope_dim - 1)
    # Equal bounds would divide by zero.
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep


def build_rope_table(
    max_position: int, theta: float, rope_dim: int = 64, yarn: YarnParams | None = None
) -> Tensor:
    """Cosines then sines of every position.

    Returns float32 [max_position, rope_dim]: cos of the rope_dim / 2 pairs, then their sin.
    """
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(theta, rope_dim, yarn)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def apply_rope(x: Tensor, positions: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last axis by their angle at `positions`.

    Args: x float [..., rope_dim]; positions integer, its shape a prefix of x's leading axes (the
    axes it lacks, such as heads, share a position); table float32 [max_position, rope_dim].
    inverse rotates by the negative angle. Float32 inside. Returns [..., rope_dim] in x's dtype.
    """
    half = x.shape[-1] // 2
    rows = table[positions.long()]
    rows = rows.view(*positions.shape, *[1] * (x.dim() - 1 - positions.dim()), 2 * half)
    cos, sin = rows[..., :half], rows[..., half:]
    if inverse:
        sin = -sin
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def apply_rope_tail(x: Tensor, positions: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """`apply_rope` on the last `table.shape[-1]` values of x [..., d]; the others are copied."""
    rope_dim = table.shape[-1]
    rotated = apply_rope(x[..., -rope_dim:], positions, table, inverse)
    return torch.cat((x[..., :-rope_dim], rotated), dim=-1)

"""Walsh-Hadamard transform in Sylvester order."""

import torch
from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of the last axis: x @ H_n * n^-0.5.

    Args: x float [..., n], n a power of two. Returns float32 [..., n].
    Raises ValueError for another n.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"found a last axis of {n}, wanted a power of two: pad it")
    y = x.float()
    span = 1
    while span < n:
        pairs = y.unflatten(-1, (n // (2 * span), 2, span))
        low, high = pairs.unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        span *= 2
    return y * n**-0.5

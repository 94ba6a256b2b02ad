"""FP8 (e4m3) operands of a product: rows of activations, and NVFP4 weights widened to it.

e4m3 has 4 significant bits down to 2^-6, multiples of 2^-9 below, and ends at 448 (OCP FP8, 5.1).
"""

import torch
from torch import Tensor

from .nvfp4 import E4M3_MAX, dequantize_weight

SMALLEST_AMAX = 2.0**-100
"""Largest magnitude that a row is scaled by at least; rows below lose bits, down to zeros."""
WEIGHT_SHIFT = 2.0**-3
"""e2m1 * block scale reaches 6 * 448; times this 336, below e4m3's 448, rounded to 320."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / (amax / 448) of each row, to the nearest e4m3, ties to even.

    A row with a NaN or an infinity has scale NaN and zeros, so that all that is made of it is NaN.

    Args: x float [T, n].
    Returns (float8_e4m3fn [T, n], scale float32 [T]).
    """
    x = x.float()
    amax = x.abs().amax(dim=-1)
    finite = amax.isfinite()
    amax = amax.clamp(min=SMALLEST_AMAX)
    # Divided by a tensor: torch multiplies by the rounded reciprocal of a number.
    largest = torch.full_like(amax, E4M3_MAX)
    factor = torch.where(finite, largest / amax, 0.0)[:, None]
    value = torch.where(finite[:, None], x * factor, 0.0).clamp(-E4M3_MAX, E4M3_MAX)
    return value.to(torch.float8_e4m3fn), torch.where(finite, amax / largest, torch.nan)


def widen_weight(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """e2m1 * block scale / 8 to the nearest e4m3, ties to even.

    Exact for the codes 0, 0.5, 1, 2 and 4 of block scales from 2^-2 on, and for 1.5, 3 and 6 under
    the mantissas 1, 1.25 and 1.5; under the other five off by at most 1 / 21 of the value.
    Values below 2^-6, of block scales below 2^-2 only, are rounded to multiples of 2^-9.

    Args: weight uint8 [..., out, in / 2]; weight_scale float8_e4m3fn [..., out, in / 16].
    Returns float8_e4m3fn [..., out, in].
    """
    shift = torch.full(weight.shape[:-2], WEIGHT_SHIFT, dtype=torch.float32, device=weight.device)
    return dequantize_weight(weight, weight_scale, shift).to(torch.float8_e4m3fn)

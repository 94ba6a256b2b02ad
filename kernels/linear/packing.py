"""The order in which the linear kernel reads an NVFP4 weight.

ModelOpt packs column 2 j in the low and 2 j + 1 in the high nibble of byte j. Here a byte holds the
columns j and j + 64 of a block of 128, so that the two halves of a block meet 64 contiguous
activations each. Same bytes, same size; columns are padded with zeros to whole blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Columns of a block; its first half lies in the low nibbles."""


def pack_weight(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Reorder a weight for ``linear.nvfp4_linear``.

    Args:
        weight: uint8 [out, in / 2] as ModelOpt packs it.
        scale: float8_e4m3fn [out, in / 16].

    Returns:
        (uint8 [out, blocks * 64], float8_e4m3fn [out, blocks * 8]), blocks = ceil(in / 128).
    """
    missing = -weight.shape[1] * 2 % BLOCK
    weight = F.pad(weight, (0, missing // 2))
    padded_scale = F.pad(scale.view(torch.uint8), (0, missing // 16)).view(scale.dtype)
    codes = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1)
    low, high = codes.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
    return (low | high << 4).flatten(1).contiguous(), padded_scale.contiguous()


def unpack_weight(packed: Tensor) -> Tensor:
    """ModelOpt's order again, padding included: the inverse of ``pack_weight``.

    Args:
        packed: uint8 [out, blocks * 64].

    Returns:
        uint8 [out, blocks * 64].
    """
    blocks = packed.unflatten(1, (-1, BLOCK // 2))
    codes = torch.cat((blocks & 15, blocks >> 4), dim=2).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4

"""NVFP4 codec: e2m1 values, one e4m3 scale for 16 of them (OCP MX 1.0 section 5.3; PTX cvt.rn).

The rules are those of FlashInfer 0.7.2's DSV4 cache writer (`quantize_fp32_group16_to_nvfp4`):
scale = e4m3(amax / 6), rounded to nearest even and saturated at 448, with no lower bound, so a
group below 6 x 2^-10 is stored as scale 0 and signed zeros; value = e2m1(x / scale).
Three things are settled here where that source leaves them to the hardware: the quotient is a
correctly rounded division (a product with 1 / scale rounds some exact ties away), a NaN poisons
its group (scale byte 0x7f, codes 0), and an infinity saturates (scale 448, code 7).

e2m1 x e4m3 has at most 2 + 4 significant bits, so a decoded value is exact in bf16.
"""

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import NVFP4_GROUP

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
# A magnitude above the i-th bound takes code i + 1. The midpoints 0.75, 1.75 and 3.5 round up to
# an even code, so their bound is the float32 just below.
_BOUNDS = (0.25, 0.75 - 2.0**-24, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0)


def e2m1_encode(x: Tensor) -> Tensor:
    """Nearest e2m1 code of each value.

    Args: x float [...], any value but NaN (a NaN gets an unspecified code).
    Returns uint8 [...] in 0..15: bit 3 sign (kept for zero), ties to the even code, saturated at 6.
    """
    x = x.float().contiguous()
    bounds = torch.tensor(_BOUNDS, dtype=torch.float32, device=x.device)
    magnitude = torch.bucketize(x.abs(), bounds).to(torch.uint8)
    return magnitude | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Values of e2m1 codes: integer [...] in 0..15 to float32 [...]."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte, even index in the low nibble: uint8 [..., n] to uint8 [..., n / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: uint8 [..., n / 2] to uint8 [..., n]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: Tensor) -> Tensor:
    """`e2m1_decode(unpack_nibbles(packed))` by one table of byte pairs.

    Args: packed uint8 [..., n / 2]. Returns float32 [..., n].
    """
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    # Two floats under one int64: selecting single elements is the fast case.
    pairs = torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1).view(torch.int64)
    chosen = pairs.flatten().index_select(0, packed.flatten().int())
    return chosen.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise groups of 16 along the last axis.

    Args: x float [..., n], n a multiple of 16.
    Returns (packed uint8 [..., n / 2], scale float8_e4m3fn [..., n / 16]).
    Raises ValueError when n is no multiple of 16.
    """
    if x.shape[-1] % NVFP4_GROUP:
        raise ValueError(
            f"found a last axis of {x.shape[-1]}, wanted a multiple of {NVFP4_GROUP}: "
            "pad it to whole scale groups"
        )
    groups = x.float().unflatten(-1, (x.shape[-1] // NVFP4_GROUP, NVFP4_GROUP))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    scale = (amax / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    # x / inf is a zero of x's sign.
    divisor = scale.float()
    codes = e2m1_encode(groups / divisor.masked_fill(divisor == 0, torch.inf))
    codes = codes.masked_fill(amax.isnan(), 0)
    return pack_nibbles(codes.flatten(-2)), scale.squeeze(-1)


def dequantize_nvfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_nvfp4` up to its rounding.

    Args: packed uint8 [..., n / 2]; scale float8_e4m3fn [..., n / 16].
    Returns float32 [..., n]; every value under a NaN scale is NaN.
    """
    groups = decode_packed(packed).unflatten(-1, (scale.shape[-1], NVFP4_GROUP))
    return groups.mul_(scale.float().unsqueeze(-1)).flatten(-2)


def dequantize_weight(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """A ModelOpt NVFP4 weight as float32: e2m1 x block scale x tensor scale.

    Args: weight uint8 [..., out, in / 2]; weight_scale float8_e4m3fn [..., out, in / 16];
    weight_scale_2 float32, one value for a matrix: [...], or one value in any shape.
    Returns float32 [..., out, in].
    """
    if weight_scale_2.numel() == 1:
        weight_scale_2 = weight_scale_2.reshape(())
    block_scale = weight_scale.float() * weight_scale_2.float()[..., None, None]
    groups = decode_packed(weight).unflatten(-1, (weight_scale.shape[-1], NVFP4_GROUP))
    return groups.mul_(block_scale.unsqueeze(-1)).flatten(-2)

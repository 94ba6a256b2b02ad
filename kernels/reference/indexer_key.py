"""Indexer keys: e2m1 with one UE8M0 scale for 32 values (stock SGLang's FP4 indexer, rne=True).

scale = 2^ceil(log2(max(amax / 6, 1e-4))), found on the float's bits so that powers of two are
exact; byte = biased exponent, 1..254. Values round to nearest even and, unlike the latent
record, a value that rounds to zero loses its sign. A NaN poisons its group (byte 255, E8M0's NaN);
an infinity gets byte 254 and decodes to an infinity.
"""

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import INDEXER_GROUP, IndexerLayout, KVFormat

from .nvfp4 import E2M1_MAX, decode_packed, e2m1_encode, pack_nibbles
from .paged import read_rows, write_rows

_MIN_SCALE = 1.0e-4
_UE8M0_NAN = 255


def quantize_fp4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise groups of 32 along the last axis.

    Args: x float [..., n], n a multiple of 32.
    Returns (packed uint8 [..., n / 2], scale uint8 [..., n / 32], biased exponents).
    """
    groups = x.float().unflatten(-1, (x.shape[-1] // INDEXER_GROUP, INDEXER_GROUP))
    amax = groups.abs().amax(dim=-1)
    bits = (amax / E2M1_MAX).clamp(min=_MIN_SCALE).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    exponent = exponent.clamp(1, 254)
    # The exponent in a float's exponent field is the scale itself.
    codes = e2m1_encode(groups / (exponent << 23).view(torch.float32).unsqueeze(-1))
    codes = codes.masked_fill((codes & 7) == 0, 0).masked_fill(amax.isnan().unsqueeze(-1), 0)
    scale = exponent.to(torch.uint8).masked_fill(amax.isnan(), _UE8M0_NAN)
    return pack_nibbles(codes.flatten(-2)), scale


def dequantize_fp4_ue8m0(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_fp4_ue8m0` up to its rounding; exact in bf16.

    Args: packed uint8 [..., n / 2]; scale uint8 [..., n / 32]. Returns float32 [..., n].
    """
    groups = decode_packed(packed).unflatten(-1, (scale.shape[-1], INDEXER_GROUP))
    factor = scale.contiguous().view(torch.float8_e8m0fnu).float()
    return groups.mul_(factor.unsqueeze(-1)).flatten(-2)


def write_indexer_keys(keys: Tensor, slots: Tensor, pool: Tensor, layout: IndexerLayout) -> None:
    """Encode and insert keys; slots outside the pool (-1) are skipped, none may repeat.

    Args: keys float [N, head_dim], Hadamard-transformed; slots integer [N];
    pool uint8 [num_pages, page_bytes].
    """
    if layout.format is KVFormat.BFLOAT16:
        write_rows(pool, slots, layout, keys.bfloat16().contiguous().view(torch.uint8), None)
        return
    packed, scale = quantize_fp4_ue8m0(keys)
    write_rows(pool, slots, layout, packed, scale)


def read_indexer_keys(pool: Tensor, slots: Tensor, layout: IndexerLayout) -> Tensor:
    """Decode the keys at `slots`.

    Args: pool uint8 [num_pages, page_bytes]; slots integer [N].
    Returns float32 [N, head_dim]; a slot outside the pool (-1) gives zeros.
    """
    data, scale, valid = read_rows(pool, slots, layout)
    if layout.format is KVFormat.BFLOAT16:
        keys = data.contiguous().view(torch.bfloat16).float()
    else:
        keys = dequantize_fp4_ue8m0(data, scale)
    return keys.masked_fill_(~valid[:, None], 0.0)

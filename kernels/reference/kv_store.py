"""Latent records: encode, write, read, and the fused store of the window KV."""

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout

from .norm_rope import rms_norm
from .nvfp4 import dequantize_nvfp4, quantize_nvfp4
from .paged import read_rows, write_rows
from .rope import apply_rope_tail


def encode_records(latent: Tensor, layout: RecordLayout) -> tuple[Tensor, Tensor | None]:
    """Bytes of latent records (byte map: `kv_layout`).

    Args: latent float [N, head_dim], NoPE then rotated RoPE.
    Returns (data uint8 [N, data_bytes], scale uint8 [N, scale_bytes] or None for bfloat16).
    Values go from float32 to the stored format in one rounding.
    """
    wide = latent.float()
    if layout.format is KVFormat.BFLOAT16:
        return wide.bfloat16().contiguous().view(torch.uint8), None
    packed, scale = quantize_nvfp4(wide[:, : layout.nope_dim])
    rope = wide[:, layout.nope_dim :].bfloat16().contiguous().view(torch.uint8)
    padding = layout.scale_bytes - layout.num_scales
    scale_bytes = torch.nn.functional.pad(scale.view(torch.uint8), (0, padding))
    return torch.cat((packed, rope), dim=-1), scale_bytes


def decode_records(data: Tensor, scale: Tensor, layout: RecordLayout) -> Tensor:
    """Inverse of `encode_records` up to its rounding; every value is exact in bf16.

    Args: data uint8 [N, data_bytes]; scale uint8 [N, scale_bytes], ignored for bfloat16.
    Returns float32 [N, head_dim].
    """
    if layout.format is KVFormat.BFLOAT16:
        return data.contiguous().view(torch.bfloat16).float()
    scales = scale[:, : layout.num_scales].contiguous().view(torch.float8_e4m3fn)
    nope = dequantize_nvfp4(data[:, : layout.nope_bytes], scales)
    rope = data[:, layout.nope_bytes :].contiguous().view(torch.bfloat16)
    return torch.cat((nope, rope.float()), dim=-1)


def write_records(latent: Tensor, slots: Tensor, pool: Tensor, layout: RecordLayout) -> None:
    """Encode and insert records; slots outside the pool (-1) are skipped, none may repeat.

    Args: latent float [N, head_dim]; slots integer [N]; pool uint8 [num_pages, page_bytes].
    """
    data, scale = encode_records(latent, layout)
    write_rows(pool, slots, layout, data, scale)


def read_records(pool: Tensor, slots: Tensor, layout: RecordLayout) -> Tensor:
    """Decode the records at `slots`.

    Args: pool uint8 [num_pages, page_bytes]; slots integer [N].
    Returns float32 [N, head_dim]; a slot outside the pool (-1) gives zeros.
    """
    data, scale, valid = read_rows(pool, slots, layout)
    return decode_records(data, scale, layout).masked_fill_(~valid[:, None], 0.0)


def kv_store(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    pool: Tensor,
    layout: RecordLayout,
) -> None:
    """Weighted RMSNorm, RoPE of the last values, encode and insert: one token's window KV.

    Args: kv float [T, head_dim] (output of kv_proj); norm_weight float [head_dim], with the
    layer's power-of-two factor in it; positions integer [T]; table float32
    [max_position, rope_dim]; slots integer [T], -1 skipped; pool uint8 [num_pages, page_bytes].
    Float32 up to the one rounding of the stored format.
    """
    latent = apply_rope_tail(rms_norm(kv.float(), norm_weight, eps), positions, table)
    write_records(latent, slots, pool, layout)

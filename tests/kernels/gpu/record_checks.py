"""What bytes in a pool must be, told with the row, the channel and the latent of a mismatch."""

import torch

from sglang_dsv4.cache.kv_layout import INDEXER_GROUP, NVFP4_GROUP, IndexerLayout, KVFormat
from sglang_dsv4.kernels.reference.indexer_key import quantize_fp4_ue8m0
from sglang_dsv4.kernels.reference.kv_store import encode_records
from sglang_dsv4.kernels.reference.nvfp4 import (
    decode_packed,
    e2m1_decode,
    e2m1_encode,
    quantize_nvfp4,
)
from sglang_dsv4.kernels.reference.paged import read_rows, write_rows


def describe(bad, found, wanted, behind=None, limit=6):
    """Text of the first mismatches of two [rows, columns] tensors."""
    lines = [f"{int(bad.sum())} of {bad.numel()} differ, in {int(bad.any(1).sum())} rows"]
    for row, column in bad.nonzero()[:limit].tolist():
        text = f"  row {row} column {column}: found {found[row, column].item()!r}"
        text += f", wanted {wanted[row, column].item()!r}"
        if behind is not None:
            group = slice(column // 16 * 16, column // 16 * 16 + 16)
            text += f"; group {[f'{v:.9g}' for v in behind[row, group].tolist()]}"
        lines.append(text)
    return "\n".join(lines)


def assert_same_bytes(found, wanted, what, behind=None):
    """Every byte of two [rows, bytes] tensors."""
    found, wanted = found.cpu(), wanted.cpu()
    bad = found != wanted
    assert not bad.any(), f"{what}: {describe(bad, found, wanted, behind)}"


def assert_only_rows_changed(pool, before, slots, layout, what):
    """Bytes outside the rows at `slots` are as they were."""
    pool, before, slots = pool.cpu(), before.cpu(), slots.cpu()
    data, scale, valid = read_rows(pool, slots, layout)
    expected = before.clone()
    write_rows(expected, slots, layout, data, scale if layout.scale_bytes else None)
    assert_same_bytes(pool, expected, f"{what}: bytes outside the named rows")
    assert valid.any()


def assert_encodes(pool, slots, latent, tolerance, layout, what):
    """The rows at `slots` are encodings of values within `tolerance` [N, d] of `latent` [N, d].

    For a quantised row: each scale is that of some amax within the tolerance, and each code lies
    between the codes of latent -/+ tolerance under that scale. Returns the share of bytes that
    differ from the encoding of `latent` itself, rows with a NaN left out.
    """
    data, scale, valid = (x.cpu() for x in read_rows(pool.cpu(), slots.cpu(), layout))
    data, scale = data[valid], scale[valid]
    latent, tolerance = latent.cpu()[valid], tolerance.cpu()[valid]
    # A NaN's payload is free, and differs between a GPU's conversion and a CPU's.
    whole = ~latent.isnan().any(1)
    if layout.format is KVFormat.BFLOAT16:
        assert_bf16(data, latent, tolerance, what)
        return (data != latent.bfloat16().view(torch.uint8))[whole].float().mean().item()
    if isinstance(layout, IndexerLayout):
        wanted, wanted_scale = quantize_fp4_ue8m0(latent)
        codes, width = latent, INDEXER_GROUP
    else:
        wanted, wanted_scale = encode_records(latent, layout)
        codes, width = latent[:, : layout.nope_dim], NVFP4_GROUP
        assert not scale[:, layout.num_scales :].any(), f"{what}: reserved scale bytes are not zero"
        rope = slice(layout.nope_dim, None)
        assert_bf16(data[:, layout.nope_bytes :], latent[:, rope], tolerance[:, rope], what)
    margin = tolerance[:, : codes.shape[1]]
    assert_codes(data[:, : codes.shape[1] // 2], scale, codes, margin, width, what)
    bytes_found, bytes_wanted = torch.cat((data, scale), 1), torch.cat((wanted, wanted_scale), 1)
    return (bytes_found[whole] != bytes_wanted[whole]).float().mean().item()


def assert_bf16(data, latent, tolerance, what):
    """bf16 bytes of values within the tolerance, plus half an ulp; NaN where the latent is NaN."""
    found = data.contiguous().view(torch.bfloat16).float()
    bad = (found - latent).abs() > latent.abs() * 2.0**-8 + tolerance
    bad |= found.isnan() != latent.isnan()
    assert not bad.any(), f"{what}: bf16 values: {describe(bad, found, latent)}"


def scale_bytes_of(amax, width):
    """Scale byte of groups with a given largest magnitude."""
    peaks = torch.zeros(*amax.shape, width)
    peaks[..., 0] = amax
    if width == INDEXER_GROUP:
        return quantize_fp4_ue8m0(peaks.flatten(-2))[1]
    return quantize_nvfp4(peaks.flatten(-2))[1].view(torch.uint8)


def assert_codes(data, scale, latent, tolerance, width, what):
    """Packed e2m1 codes and scales of values within the tolerance of `latent`."""
    groups = latent.unflatten(-1, (-1, width))
    margin = tolerance.unflatten(-1, (-1, width)).amax(-1)
    amax = groups.abs().amax(-1)
    scale = scale[:, : groups.shape[1]]
    low, high = (scale_bytes_of((amax + m).clamp(min=0), width) for m in (-margin, margin))
    # An infinite latent has an infinite margin: both ends saturate.
    low = torch.where(amax.isinf(), high, low)
    bad = (scale < low) | (scale > high)
    assert not bad.any(), f"{what}: scales: {describe(bad, scale, low)} .. {high[bad][:6].tolist()}"

    poisoned = groups.isnan().any(-1)
    if width == INDEXER_GROUP:
        step = scale.contiguous().view(torch.float8_e8m0fnu).float()
    else:
        step = scale.contiguous().view(torch.float8_e4m3fn).float()
        step = step.masked_fill(step == 0, torch.inf)
    found = decode_packed(data).unflatten(-1, (-1, width))
    spread = tolerance.unflatten(-1, (-1, width))
    ends = [e2m1_decode(e2m1_encode((groups + s * spread) / step[..., None])) for s in (-1, 1)]
    bad = (found < ends[0]) | (found > ends[1])
    infinite = groups.isinf()
    bad = torch.where(infinite, found != 6.0 * groups.sign(), bad)
    bad = torch.where(poisoned[..., None], found != 0, bad)
    flat = [x.flatten(1) for x in (bad, found, ends[0])]
    assert not bad.any(), f"{what}: codes: {describe(*flat, latent)}"

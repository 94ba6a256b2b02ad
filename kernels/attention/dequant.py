"""NVFP4 records in registers: e2m1 x e4m3 decoded exactly to bf16, and Q in the order it asks for.

Shifts and masks place sign, exponent and mantissa in a bf16 of value x 2^-126, one mul.bf16x2 by
scale x 2^118 gives value x scale x 2^-8: at most 2 x 4 significant bits, so nothing is rounded.
Whoever multiplies with these values carries the 2^8.
"""

from typing import Any

from cutlass import Float32, Uint32

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention import instructions as ptx

_LAYOUT = RecordLayout(KVFormat.NVFP4, 64)
DATA_BYTES = _LAYOUT.data_bytes
SCALE_BYTES = _LAYOUT.scale_bytes
ROPE_OFFSET = _LAYOUT.nope_bytes
NOPE_ROW = 2 * _LAYOUT.nope_dim
ROPE_ROW = 2 * _LAYOUT.rope_dim

SIGN, MAGNITUDE = 0x80008000, 0x01C001C0
BF16X2_256 = 0x43804380


def unpack8(word: Uint32, scale: Uint32) -> list[Uint32]:
    """Eight e2m1 values of a word times the scale pair: element j holds values (3 - j, 7 - j)."""
    out = []
    for j, magnitude in enumerate((word >> 6, word >> 2, word << 2, word << 6)):
        bits = ((word << (4 * j)) & Uint32(SIGN)) | (magnitude & Uint32(MAGNITUDE))
        out.append(ptx.mul_bf16x2(bits, scale))
    return out


def scale_pairs(pair: Uint32) -> list[Uint32]:
    """Two e4m3 bytes as bf16x2 of (scale x 2^118) twice, one register for each byte."""
    return [
        ptx.pack_bf16x2(wide, wide)
        for wide in (value * Float32(2.0**118) for value in ptx.e4m3x2_to_f32x2(pair))
    ]


def query_pairs(words: Any, mask: Uint32) -> list[Uint32]:
    """Q of eight dims (four bf16x2) in the order of `unpack8`, times 2^8, or 0 under mask 0."""
    r0, r1, r2, r3 = words
    high, low = Uint32(0x7632), Uint32(0x5410)
    pairs = (
        ptx.prmt(r1, r3, high),
        ptx.prmt(r1, r3, low),
        ptx.prmt(r0, r2, high),
        ptx.prmt(r0, r2, low),
    )
    return [ptx.mul_bf16x2(pair, Uint32(BF16X2_256)) & mask for pair in pairs]

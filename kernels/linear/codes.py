"""Values of a packed NVFP4 weight in registers (Triton), for whoever reads ``packing``'s order.

e2m1 * e4m3 has six significant bits and is exact in bfloat16. A code's exponent and mantissa become
the lowest ones of a bfloat16, so that a value is 2^126 too small; block scales are multiplied by
2^119, the largest power that leaves them finite, and the rest, ``UNDO``, is the caller's.
"""

import triton
import triton.language as tl

UNDO = tl.constexpr(2.0**7)
"""What ``values`` are to be multiplied by."""

_UP = tl.constexpr(2.0**119)
_BIAS = tl.constexpr(2.0**126)


@triton.jit
def _spread(scale: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """[ROWS, 4] -> [ROWS, 64], each value 16 times."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, 4, 16)), (ROWS, 64))


@triton.jit
def values(
    codes: tl.tensor,
    scale_low: tl.tensor,
    scale_high: tl.tensor,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Bytes [ROWS, 64], scales [ROWS, 4] of each half -> low and high values, times 2^-7."""
    if INTERPRETED:  # in float32: Triton's interpreter truncates to bfloat16
        low = (codes & 15).to(tl.uint32)
        high = (codes >> 4).to(tl.uint32)
        low = (((low & 8) << 28) | ((low & 7) << 22)).to(tl.float32, bitcast=True) * _BIAS
        high = (((high & 8) << 28) | ((high & 7) << 22)).to(tl.float32, bitcast=True) * _BIAS
        low = low * _spread(scale_low.to(tl.float32), ROWS) / UNDO
        high = high * _spread(scale_high.to(tl.float32), ROWS) / UNDO
        return low, high
    # Four bytes a register: spread two into 16-bit lanes, then sign to bit 15, magnitude to 8..6.
    low, high = tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b, s, m;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 s, a, 12;
            shl.b32 m, a, 6;
            and.b32 s, s, 0x80008000;
            and.b32 m, m, 0x01C001C0;
            or.b32 $0, s, m;
            shl.b32 s, b, 12;
            shl.b32 m, b, 6;
            and.b32 s, s, 0x80008000;
            and.b32 m, m, 0x01C001C0;
            or.b32 $1, s, m;
            shl.b32 s, a, 8;
            shl.b32 m, a, 2;
            and.b32 s, s, 0x80008000;
            and.b32 m, m, 0x01C001C0;
            or.b32 $2, s, m;
            shl.b32 s, b, 8;
            shl.b32 m, b, 2;
            and.b32 s, s, 0x80008000;
            and.b32 m, m, 0x01C001C0;
            or.b32 $3, s, m;
        }
        """,
        "=r,=r,=r,=r,r",
        [codes],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    low *= _spread((scale_low.to(tl.float32) * _UP).to(tl.bfloat16), ROWS)
    high *= _spread((scale_high.to(tl.float32) * _UP).to(tl.bfloat16), ROWS)
    return low, high

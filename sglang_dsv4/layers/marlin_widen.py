"""Experts in Marlin's order to dense matrices, a part of them at a time (Triton, sm_90).

To bfloat16 a weight is exact over 2^7; to e4m3 it is rounded once, over 2^3 (how far is said by
``kernels.reference.fp8``). 2.5625 or 1.5625 bytes a value.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_dsv4.layers.expert_products import Source

if TYPE_CHECKING:
    from sglang_dsv4.layers.marlin import MarlinExperts

_TILES = 8
_OUTER = {torch.bfloat16: 2.0**-112, torch.float8_e4m3fn: 2.0**-116}
"""Marlin's outer scale (times 2^119) times this is that of widened weights (over 2^7 or 2^3)."""


@triton.jit
def _values(
    words: tl.tensor, scale: tl.tensor, COLUMNS: tl.constexpr, TILES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Even and odd inputs, float32 [64 COLUMNS, 8 TILES], over 2^7.

    ``words`` [TILES, 128 COLUMNS] of 16 x 64 Marlin tiles; ``scale`` [64 COLUMNS, TILES], times
    2^119, outputs in their own order.
    """
    # A tile's words: output % 8, input / 2 % 4, output / 16; their nibbles: input odd, output / 8,
    # input / 8, from the highest bit.
    words = tl.reshape(words, (TILES, COLUMNS, 8, 4, 4))
    words = tl.permute(words, (1, 4, 2, 0, 3))
    words = tl.reshape(words, (COLUMNS * 4, 1, 8, TILES, 1, 4))
    second = tl.arange(0, 2).to(tl.uint32)
    shift = 8 * tl.reshape(second, (1, 2, 1, 1, 1, 1)) + 4 * tl.reshape(second, (1, 1, 1, 1, 2, 1))
    words = words >> shift
    scale = tl.reshape(scale, (COLUMNS * 4, 2, 8, TILES, 1, 1))
    # The code's exponent and mantissa as float32's lowest ones: the value over 2^126.
    even = ((words & 7) << 22) | ((words & 8) << 28)
    odd = ((words & 0x70000) << 6) | ((words & 0x80000) << 12)
    even = even.to(tl.float32, bitcast=True) * scale
    odd = odd.to(tl.float32, bitcast=True) * scale
    shape: tl.constexpr = (COLUMNS * 64, TILES * 8)
    return tl.reshape(even, shape), tl.reshape(odd, shape)


@triton.jit
def _scales(scale: tl.tensor, tile: tl.tensor, output: tl.tensor, outputs: tl.tensor) -> tl.tensor:
    """Block scales [output, tile] of one expert, times 2^119, from bytes of float16 times 2^7."""
    # Marlin's place of an output within 64: its bits 210543, then the lowest two swapped.
    place = output // 64 * 64 + output % 8 * 8 + output // 32 % 2 * 4
    place += output // 8 % 2 * 2 + output // 16 % 2
    half = tl.load(scale + tile[None, :] * outputs + place[:, None]).to(tl.int16) << 7
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 2.0**112


@triton.jit(do_not_specialize=["first"])
def _widen(
    weight: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    TILES: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """``out`` holds pairs: int32 of bfloat16, int16 of e4m3."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    column = tl.program_id(1)
    local = tl.program_id(2).to(tl.int64)
    size = inputs.to(tl.int64) * outputs
    there = tile < inputs // 16
    tile = tl.where(there, tile, 0)
    words = weight + (first + local) * (size // 8) + column * 128
    words = tl.load(words + tile[:, None] * (outputs * 2) + tl.arange(0, 128)[None, :])
    output = column * 64 + tl.arange(0, 64)
    block = _scales(scale + (first + local) * (size // 16), tile, output, outputs)
    even, odd = _values(words.to(tl.uint32, bitcast=True), block, 1, TILES)
    if FP8:
        even = (even * 16.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        odd = (odd * 16.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        pair = (even.to(tl.uint16) | (odd.to(tl.uint16) << 8)).to(tl.int16, bitcast=True)
    else:
        # Exact, so the upper halves are the bfloat16 values.
        pair = even.to(tl.uint32, bitcast=True) >> 16
        pair |= odd.to(tl.uint32, bitcast=True) & 0xFFFF0000
        pair = pair.to(tl.int32, bitcast=True)
    place = tl.program_id(0) * TILES * 8 + tl.arange(0, TILES * 8)
    target = out + local * (size // 2) + output[:, None] * (inputs // 2) + place[None, :]
    tl.store(target, pair, mask=(place < inputs // 2)[None, :])


def widen(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Experts first .. first + len(out) of ``marlin.MarlinExperts``, without scale_2.

    Args:
        weight: int32 [E, in / 16, 2 out].
        scale: bytes [E, in / 16, out].
        out: [parts, out, in], bfloat16 (over 2^7) or float8_e4m3fn (over 2^3).
    """
    experts, outputs, inputs = out.shape
    fp8 = out.dtype == torch.float8_e4m3fn
    grid = (triton.cdiv(inputs, 16 * _TILES), outputs // 64, experts)
    _widen[grid](
        weight,
        scale.view(torch.uint8),
        out.view(torch.int16 if fp8 else torch.int32),
        first,
        outputs,
        inputs,
        TILES=_TILES,
        FP8=fp8,
    )


def source(packed: "MarlinExperts", dtype: torch.dtype) -> Source:
    """Experts in Marlin's order for ``experts_prefill.products``, widened to ``dtype``."""
    weight, scale, outer = packed
    return Source(
        experts=weight.shape[0],
        outputs=weight.shape[2] // 2,
        inputs=weight.shape[1] * 16,
        outer=outer,
        undo=_OUTER[dtype],
        widen=lambda out, first: widen(weight, scale, out, first),
    )

"""The wide Hopper kernel's own source, lane by lane on the CPU, against the reference."""

from functools import partial

import attention_emulation
import pytest
from attention_emulation import check_source, list_shape
from hopper_emulator import HopperDevice

from sglang_dsv4.kernels.attention.hopper import wide


def emulate(q, lists, lengths, pools, layouts, sinks, scale, out_scale, rotation, splits, blocks):
    """(out, lse) of the kernel's source, by so many blocks in all."""
    shape = list_shape(layouts, lengths, rotation)
    return attention_emulation.emulate(
        HopperDevice(1 << 24, seed=blocks),
        wide,
        lambda names: names["WideAttention"](shape),
        *(q, lists, lengths, pools, sinks, scale, out_scale, rotation, wide.HEADS, splits),
        wide.WideAttention(shape).shared_bytes,
        blocks,
    )


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("heads", "splits", "blocks", "window", "comp", "comp_page", "lengths", "sharp"),
    [
        # Scores that move the reference more than once.
        (66, 1, 2, 70, 190, 2, None, 60),
        # Five splits of one tile or none.
        (128, 5, 4, 40, 200, 64, (64, -7), 1),
    ],
)
def test_kernel_source(heads, splits, blocks, window, comp, comp_page, lengths, sharp, rotated):
    emulated = partial(emulate, splits=splits, blocks=blocks)
    check_source(emulated, heads, window, comp, comp_page, lengths, sharp, rotated=rotated)

"""The portable kernel's own source, lane by lane on the CPU, against the reference."""

import attention_emulation
import pytest
from attention_emulation import check_source, list_shape
from warp_emulator import Device

from sglang_dsv4.kernels.attention import portable


def emulate(
    q, lists, lengths, pools, layouts, sinks, scale, out_scale, rotation, head_tile, splits
):
    """(out, lse) of the kernel's source."""
    shape = portable.Shape(head_tile, list_shape(layouts, lengths, rotation))
    return attention_emulation.emulate(
        Device(1 << 24),
        portable,
        lambda names: names["SparseAttention"](shape, "sm_90a"),
        *(q, lists, lengths, pools, sinks, scale, out_scale, rotation, head_tile, splits),
        portable.shared_bytes(head_tile),
    )


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_tile", "splits", "window", "comp", "comp_page", "lengths"),
    [
        (16, 16, 1, 70, 130, 64, None),
        (5, 8, 1, 64, 65, 2, (65, 3)),
        (20, 16, 2, 33, 100, 64, None),
        (32, 32, 1, 10, 0, 2, None),
        # Five splits of 2, 1 and 3 tiles; of no tile at all.
        (8, 8, 5, 40, 200, 64, (64, -7)),
        (3, 8, 3, 0, 70, 64, (0, 70)),
        (3, 8, 1, 0, 70, 64, (0, 69)),
    ],
)
def test_kernel_source(heads, head_tile, splits, window, comp, comp_page, lengths, rotated):
    check_source(
        lambda *args: emulate(*args, head_tile, splits),
        heads,
        window,
        comp,
        comp_page,
        lengths,
        atol=2**-8,
        rotated=rotated,
    )

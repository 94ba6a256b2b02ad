"""The portable kernel's own source, lane by lane on the CPU, against the reference."""

import attention_emulation
import pytest
import torch
from attention_emulation import list_shape, make_pool
from warp_emulator import Device

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention import portable
from sglang_dsv4.kernels.reference.sparse_attention import sparse_attention


def emulate(q, lists, lengths, pools, layouts, sinks, scale, out_scale, head_tile, splits):
    """(out, lse) of the kernel's source."""
    shape = portable.Shape(head_tile, list_shape(layouts, lengths))
    return attention_emulation.emulate(
        Device(1 << 24),
        portable,
        lambda names: names["SparseAttention"](shape, "sm_90a"),
        *(q, lists, lengths, pools, sinks, scale, out_scale, head_tile, splits),
        portable.shared_bytes(head_tile),
    )


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
def test_kernel_source(heads, head_tile, splits, window, comp, comp_page, lengths):
    generator = torch.Generator().manual_seed(heads * 1000 + window)
    layouts = (RecordLayout(KVFormat.NVFP4, 64), RecordLayout(KVFormat.NVFP4, comp_page))
    pools = (
        make_pool(layouts[0], 3, generator),
        make_pool(layouts[1], 96 // comp_page * 2, generator),
    )
    tokens = 2
    q = torch.randn(tokens, heads, 512, generator=generator).bfloat16()
    lists = tuple(
        torch.randint(0, len(pool) * layout.page_size, (tokens, n), generator=generator)
        for pool, layout, n in zip(pools, layouts, (window, comp), strict=True)
    )
    for slots in lists:
        if slots.shape[1]:
            slots[torch.rand(slots.shape, generator=generator) < 0.2] = -1
            slots[0, -1] = 2**40
    if window:
        lists[0][1] = -1
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32)
    sinks = torch.randn(heads, generator=generator)
    scale = 512**-0.5
    args = (lists[0], pools[0], layouts[0], lists[1], pools[1], layouts[1], sinks, scale, 0.5)
    want, want_lse = sparse_attention(q, *args, lengths)
    got, lse = emulate(q, lists, lengths, pools, layouts, sinks, scale, 0.5, head_tile, splits)
    # Weights are rounded to bf16 (2^-9 relative) before they meet values up to 20, in both, at
    # different origins; the output is rounded to bf16 (2^-9).
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)

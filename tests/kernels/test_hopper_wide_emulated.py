"""The wide Hopper kernel's own source, lane by lane on the CPU, against the reference."""

import attention_emulation
import pytest
import torch
from attention_emulation import list_shape, make_pool
from hopper_emulator import HopperDevice

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention.hopper import wide
from sglang_dsv4.kernels.reference.sparse_attention import sparse_attention


def emulate(q, lists, lengths, pools, layouts, sinks, scale, out_scale, splits, blocks):
    """(out, lse) of the kernel's source, by so many blocks in all."""
    shape = list_shape(layouts, lengths)
    return attention_emulation.emulate(
        HopperDevice(1 << 24, seed=blocks),
        wide,
        lambda names: names["WideAttention"](shape),
        *(q, lists, lengths, pools, sinks, scale, out_scale, wide.HEADS, splits),
        wide.WideAttention(shape).shared_bytes,
        blocks,
    )


@pytest.mark.parametrize(
    ("heads", "splits", "blocks", "window", "comp", "comp_page", "lengths", "sharp"),
    [
        # Scores that move the reference more than once.
        (66, 1, 2, 70, 190, 2, None, 60),
        # Five splits of one tile or none.
        (128, 5, 4, 40, 200, 64, (64, -7), 1),
    ],
)
def test_kernel_source(heads, splits, blocks, window, comp, comp_page, lengths, sharp):
    generator = torch.Generator().manual_seed(heads * 1000 + window)
    layouts = (RecordLayout(KVFormat.NVFP4, 64), RecordLayout(KVFormat.NVFP4, comp_page))
    pools = (
        make_pool(layouts[0], 3, generator),
        make_pool(layouts[1], 96 // comp_page * 2, generator),
    )
    tokens = 2
    q = (torch.randn(tokens, heads, 512, generator=generator) * sharp).bfloat16()
    lists = tuple(
        torch.randint(0, len(pool) * layout.page_size, (tokens, n), generator=generator)
        for pool, layout, n in zip(pools, layouts, (window, comp), strict=True)
    )
    for slots in lists:
        slots[torch.rand(slots.shape, generator=generator) < 0.2] = -1
        slots[0, -1] = 2**40
    lists[0][1] = -1
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32)
    sinks = torch.randn(heads, generator=generator)
    scale = 512**-0.5
    args = (lists[0], pools[0], layouts[0], lists[1], pools[1], layouts[1], sinks, scale, 0.5)
    want, want_lse = sparse_attention(q, *args, lengths)
    got, lse = emulate(q, lists, lengths, pools, layouts, sinks, scale, 0.5, splits, blocks)
    # Weights are rounded to bf16 (2^-9 relative) before they meet values up to 20, in both, at
    # different references; the output is rounded to bf16 (2^-9).
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)

"""The portable kernel's own source, lane by lane on the CPU, against the reference."""

import math

import numpy as np
import pytest
import torch
from warp_emulator import Device

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention import combine, portable
from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.attention.operands import Numbers, Operands
from sglang_dsv4.kernels.reference.kv_store import write_records
from sglang_dsv4.kernels.reference.sparse_attention import sparse_attention


def make_pool(layout, pages, generator):
    pool = torch.randint(0, 256, (pages, layout.page_bytes), generator=generator).to(torch.uint8)
    rows = pages * layout.page_size
    latent = torch.randn(rows, 512, generator=generator) * 3
    write_records(latent, torch.arange(rows), pool, layout)
    return pool


def emulate(q, lists, lengths, pools, layouts, sinks, scale, out_scale, head_tile, splits):
    """(out, lse) of the kernel's source; splits > 1 runs the combination too."""
    device = Device(1 << 24)
    pages = (layout.page_size for layout in layouts)
    shape = portable.Shape(head_tile, ListShape(*pages, 8, lengths is not None))
    kernel_class = device.load(portable)["SparseAttention"]
    merge_splits = device.load(combine)["combine"]
    kernel = [kernel_class(shape, "sm_90a") for _ in range(8)]
    tokens, heads = q.shape[:2]
    put = device.tensor
    if lengths is None:
        lengths = torch.zeros(1, dtype=torch.int32)
    operands = Operands(
        put(q.view(torch.int16).numpy()),
        *(put(slots.numpy()) for slots in lists),
        put(lengths.numpy()),
        *(put(pool.numpy()) for pool in pools),
        sinks=put(sinks.numpy()),
        out=put(np.full((tokens, heads, 512), 0x7FC0, np.uint16)),
        lse=put(np.full((tokens, heads), np.nan, np.float32)),
        part_out=put(np.full((splits * tokens * heads, 512), np.nan, np.float32)),
        part_lse=put(np.full((splits * tokens * heads,), np.nan, np.float32)),
    )
    numbers = Numbers(
        np.int32(lists[0].shape[1]),
        np.int32(lists[1].shape[1]),
        np.int32(splits),
        np.float32(scale * math.log2(math.e)),
        np.float32(out_scale),
    )
    head_tiles = math.ceil(heads / head_tile)

    def attention():
        kernel[device.local.warp].kernel(operands, numbers, np.int32(head_tiles))

    grid = (tokens * head_tiles, splits, 1)
    device.launch(attention, grid, portable.THREADS, portable.shared_bytes(head_tile))
    if splits > 1:
        device.launch(
            lambda: merge_splits(
                operands.part_out,
                operands.part_lse,
                operands.sinks,
                operands.out,
                operands.lse,
                numbers.splits,
                numbers.out_scale,
            ),
            (tokens * heads, 1, 1),
            128,
            16,
        )
    bits = torch.from_numpy(operands.out.read().astype(np.int32)).to(torch.int16)
    return bits.view(torch.bfloat16), torch.from_numpy(operands.lse.read())


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

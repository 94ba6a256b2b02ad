"""The portable kernel's own source, lane by lane on the CPU, against the reference."""

import math

import numpy as np
import pytest
import torch
from warp_emulator import Device, fresh

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention import combine, portable
from sglang_dsv4.kernels.reference.kv_store import write_records
from sglang_dsv4.kernels.reference.sparse_attention import sparse_attention


def make_pool(layout, pages, generator):
    pool = torch.randint(0, 256, (pages, layout.page_bytes), generator=generator).to(torch.uint8)
    rows = pages * layout.page_size
    latent = torch.randn(rows, 512, generator=generator) * 3
    write_records(latent, torch.arange(rows), pool, layout)
    return pool


def emulate(q, lists, pools, layouts, sinks, scale, out_scale, head_tile, splits):
    """(out, lse) of the kernel's source; splits > 1 runs the combination too."""
    device = Device(1 << 24)
    shape = portable.Shape(head_tile, layouts[0].page_size, layouts[1].page_size, 8)
    source = fresh(portable)
    kernel_class, _ = device.bind(source, source.SparseAttention)
    _, functions = device.bind(fresh(combine), source.SparseAttention)
    kernel = [kernel_class(shape) for _ in range(8)]
    tokens, heads = q.shape[:2]
    put = device.tensor
    arrays = [put(q.view(torch.int16).numpy())]
    arrays += [put(slots.numpy()) for slots in lists] + [put(pool.numpy()) for pool in pools]
    arrays.append(put(sinks.numpy()))
    out = put(np.full((tokens, heads, 512), 0x7FC0, np.uint16))
    lse = put(np.full((tokens, heads), np.nan, np.float32))
    part_out = put(np.full((splits * tokens * heads, 512), np.nan, np.float32))
    part_lse = put(np.full((splits * tokens * heads,), np.nan, np.float32))
    head_tiles = math.ceil(heads / head_tile)

    def attention():
        kernel[device.local.warp].kernel(
            *arrays,
            out,
            lse,
            part_out,
            part_lse,
            np.int32(lists[0].shape[1]),
            np.int32(lists[1].shape[1]),
            np.float32(scale * math.log2(math.e)),
            np.float32(out_scale),
            np.int32(head_tiles),
        )

    grid = (tokens * head_tiles, splits, 1)
    device.launch(attention, grid, portable.THREADS, portable.shared_bytes(head_tile))
    if splits > 1:

        def merge():
            functions["combine"](
                part_out, part_lse, arrays[5], out, lse, np.int32(splits), np.float32(out_scale)
            )

        device.launch(merge, (tokens * heads, 1, 1), 128, 16)
    bits = torch.from_numpy(out.read().astype(np.int32)).to(torch.int16)
    return bits.view(torch.bfloat16), torch.from_numpy(lse.read())


@pytest.mark.parametrize(
    ("heads", "head_tile", "splits", "window", "comp", "comp_page"),
    [
        (16, 16, 1, 70, 130, 64),
        (5, 8, 1, 64, 65, 2),
        (20, 16, 2, 33, 100, 64),
        (32, 32, 1, 10, 0, 2),
    ],
)
def test_kernel_source(heads, head_tile, splits, window, comp, comp_page):
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
    lists[0][1] = -1
    sinks = torch.randn(heads, generator=generator)
    scale = 512**-0.5
    want, want_lse = sparse_attention(
        q, lists[0], pools[0], layouts[0], lists[1], pools[1], layouts[1], sinks, scale, 0.5
    )
    got, lse = emulate(q, lists, pools, layouts, sinks, scale, 0.5, head_tile, splits)
    # Weights are rounded to bf16 (2^-9 relative) before they meet values up to 20, in both, at
    # different origins; the output is rounded to bf16 (2^-9).
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)

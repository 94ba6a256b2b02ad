"""Runs an attention kernel's own source on the emulated device, the combination included."""

import math

import numpy as np
import torch

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention import combine
from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.attention.operands import Numbers, Operands
from sglang_dsv4.kernels.reference.kv_store import write_records
from sglang_dsv4.kernels.reference.rope import build_rope_table
from sglang_dsv4.kernels.reference.sparse_attention import sparse_attention


def make_pool(layout, pages, generator):
    pool = torch.randint(0, 256, (pages, layout.page_bytes), generator=generator).to(torch.uint8)
    rows = pages * layout.page_size
    latent = torch.randn(rows, 512, generator=generator) * 3
    write_records(latent, torch.arange(rows), pool, layout)
    return pool


def list_shape(layouts, lengths, rotation):
    """Static shape of a call's lists, with int64 slots."""
    window, comp = (layout.page_size for layout in layouts)
    return ListShape(window, comp, 8, lengths is not None, rotation is not None)


def emulate(
    device,
    module,
    make_kernel,
    q,
    lists,
    lengths,
    pools,
    sinks,
    scale,
    out_scale,
    rotation,
    head_tile,
    splits,
    shared_size,
    blocks=None,
):
    """(out, lse) of the kernel that make_kernel(names of the module) gives for one warp.

    splits > 1 runs the combination too; shared_size: shared memory of a block, in bytes; blocks:
    of a kernel whose blocks take items in turn and are told their number, None for one an item.
    """
    names = device.load(module)
    merge_splits = device.load(combine)["combine"]
    tokens, heads = q.shape[:2]
    put = device.tensor
    # First in memory, so that a read before the window's list is out of bounds.
    placed = [put(slots.numpy()) for slots in lists]
    if lengths is None:
        lengths = torch.zeros(1, dtype=torch.int32)
    # Of a call without rotation, as for lengths: NaN shows that it is read.
    positions, table = rotation or (torch.zeros(1).long(), torch.full((1, 64), torch.nan))
    operands = Operands(
        put(q.view(torch.int16).numpy()),
        *placed,
        put(lengths.numpy()),
        *(put(pool.numpy()) for pool in pools),
        sinks=put(sinks.numpy()),
        positions=put(positions.numpy()),
        table=put(table.numpy()),
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
        make_kernel(names).kernel(operands, numbers, np.int32(head_tiles), *extra)

    grid = (tokens * head_tiles, splits, 1) if blocks is None else (blocks, 1, 1)
    extra = () if blocks is None else (np.int32(tokens * head_tiles * splits),)
    device.launch(attention, grid, module.THREADS, shared_size)
    if splits > 1:
        device.launch(
            lambda: merge_splits(operands, numbers.splits, numbers.out_scale, rotation is not None),
            (tokens * heads, 1, 1),
            128,
            16,
        )
    bits = torch.from_numpy(operands.out.read().astype(np.int32)).to(torch.int16)
    return bits.view(torch.bfloat16), torch.from_numpy(operands.lse.read())


def make_rotation(tokens, generator):
    """Positions far apart, and a table whose angles are those of no other position."""
    table = build_rope_table(4096, 1e4)
    return torch.randint(1, len(table), (tokens,), generator=generator), table


def check_source(
    emulated, heads, window, comp, comp_page, lengths, sharp=1, atol=2**-7, rotated=False
):
    """Two tokens by a kernel's source and by the reference.

    emulated(q, lists, lengths, pools, layouts, sinks, scale, out_scale, rotation) gives (out, lse);
    window and comp: slots of a list, comp_page: entries a page of the second pool; sharp multiplies
    q; rotated: whether the output is turned back.
    """
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
    rotation = make_rotation(tokens, generator) if rotated else None
    want, want_lse = sparse_attention(q, *args, lengths, rotation)
    got, lse = emulated(q, lists, lengths, pools, layouts, sinks, scale, 0.5, rotation)
    # Weights are rounded to bf16 (2^-9 relative) before they meet values up to 20, in both, at
    # different origins; the output is rounded to bf16 (2^-9) after it is turned back, when a value
    # has the differences of two, times |cos| + |sin| <= sqrt(2).
    atol *= math.sqrt(2) if rotated else 1
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=atol)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)

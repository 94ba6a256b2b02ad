"""Runs each operation once at server start, so that no request waits for a compiler.

A kernel compiles for the static part of its shape (heads, widths, page sizes) on its first call and
is kept on disk (`jit`), so later starts only load. Every call here works on small buffers of its
own. Numbers of tokens vary because the plan of attention, and with it the kernel, follows them.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.kernels.dispatch import Operations
from sglang_dsv4.kernels.reference.compress import CompressPlan

logger = logging.getLogger(__name__)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EPS = 1e-6
ROPE_DIM = 64
PAGES = 2


@dataclass(frozen=True)
class ServedShapes:
    """What the served model calls the operations with, on this rank.

    Attributes:
        heads, index_heads: attention heads and index heads.
        index_topk: entries a CSA query attends to.
        hidden: width of a residual stream; streams: their number; sinkhorn_iters: of mHC.
        sliding_window: slots of the window list.
        window, c4, c128, keys: layouts of the pools, None without such layers.
    """

    heads: int
    index_heads: int
    index_topk: int
    hidden: int
    streams: int
    sinkhorn_iters: int
    sliding_window: int
    window: RecordLayout
    c4: RecordLayout | None
    c128: RecordLayout | None
    keys: IndexerLayout | None


def warm_up(ops: Operations, shapes: ServedShapes, device: torch.device) -> None:
    """Call every operation with the served shapes; one line of the log for each."""
    steps = list(_steps(ops, shapes, device))
    begin = time.monotonic()
    for number, (name, call) in enumerate(steps, 1):
        start = time.monotonic()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - start
        logger.info("GPU kernels %d/%d: %s ready in %.1f s", number, len(steps), name, seconds)
    logger.info("GPU kernels ready in %.1f s", time.monotonic() - begin)


def _steps(
    ops: Operations, shapes: ServedShapes, device: torch.device
) -> Iterator[tuple[str, Callable[[], None]]]:
    buffers = _Buffers(device)
    yield "mHC", partial(_hyper_connections, ops, shapes, buffers)
    yield "q_norm_rope", partial(_query, ops, shapes, buffers)
    yield "kv_store", partial(_store, ops, shapes, buffers)
    for name, ratio, layout in (
        ("compress C4", 4, shapes.c4),
        ("compress C128", 128, shapes.c128),
        ("compress indexer keys", 4, shapes.keys),
    ):
        if layout is not None:
            yield name, partial(_compress, ops, buffers, ratio, layout)
    if shapes.keys is not None:
        yield "indexer", partial(_index, ops, shapes, shapes.keys, buffers)
    yield "sparse attention", partial(_attend, ops, shapes, buffers)


class _Buffers:
    """Zeroed inputs, made on demand."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.table = self.f32(2, ROPE_DIM)

    def bf16(self, *size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16, device=self.device)

    def f32(self, *size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self.device)

    def i64(self, *size: int, value: int = 0) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.int64, device=self.device)

    def i32(self, *size: int, value: int = 0) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.int32, device=self.device)

    def pool(self, layout: RecordLayout | IndexerLayout) -> torch.Tensor:
        return torch.zeros(PAGES, layout.page_bytes, dtype=torch.uint8, device=self.device)


def _hyper_connections(ops: Operations, shapes: ServedShapes, buffers: _Buffers) -> None:
    n, hidden = shapes.streams, shapes.hidden
    fn, base, scale = buffers.f32((2 + n) * n, n * hidden), buffers.f32((2 + n) * n), buffers.f32(3)
    head, head_base, head_scale = buffers.f32(n, n * hidden), buffers.f32(n), buffers.f32(1)
    for tokens in TOKENS:
        streams = buffers.bf16(tokens, n, hidden)
        mixing = (fn, base, scale, shapes.sinkhorn_iters, EPS, EPS)
        for norm in (None, buffers.bf16(hidden)):
            out, post, comb = ops.hc_pre(streams, *mixing, norm)
        ops.hc_post(out, streams, post, comb)
        ops.hc_post_pre(out, streams, post, comb, *mixing, norm)
        ops.hc_head(streams, head, head_base, head_scale, EPS, EPS)


def _query(ops: Operations, shapes: ServedShapes, buffers: _Buffers) -> None:
    q = buffers.bf16(1, shapes.heads, shapes.window.head_dim)
    ops.q_norm_rope(q, buffers.i64(1), buffers.table, EPS)


def _store(ops: Operations, shapes: ServedShapes, buffers: _Buffers) -> None:
    width, layout = shapes.window.head_dim, shapes.window
    weight = buffers.bf16(width)
    for tokens in TOKENS:
        slots = buffers.i64(tokens, value=-1)
        positions, pool = buffers.i64(tokens), buffers.pool(layout)
        kv = buffers.bf16(tokens, width)
        ops.kv_store(kv, weight, EPS, positions, buffers.table, slots, pool, layout)


def _compress(
    ops: Operations, buffers: _Buffers, ratio: int, layout: RecordLayout | IndexerLayout
) -> None:
    overlap = 2 if ratio == 4 else 1
    width = layout.head_dim
    weight, bias = buffers.bf16(width), buffers.f32(ratio, overlap * width)
    state = buffers.f32(8, 2 * overlap * width)
    for tokens in TOKENS:
        series = buffers.bf16(tokens, 2 * overlap * width)
        kv, gate = series.chunk(2, dim=-1)
        for disjoint in (False, True):
            plan = CompressPlan(
                ratio=ratio,
                source=buffers.i64(tokens, 8 if ratio == 4 else 128, value=-1),
                positions=buffers.i64(tokens),
                slots=buffers.i64(tokens, value=-1),
                write_rows=torch.arange(tokens, device=buffers.device),
                write_locs=buffers.i64(tokens, value=-1),
                disjoint=disjoint,
            )
            ops.compress_store(
                kv,
                gate,
                bias,
                buffers.i64(tokens),
                state,
                plan,
                weight,
                EPS,
                buffers.table,
                buffers.pool(layout),
                layout,
            )


def _index(ops: Operations, shapes: ServedShapes, layout: IndexerLayout, buffers: _Buffers) -> None:
    pool = buffers.pool(layout)
    pages = 2 * shapes.index_topk // layout.page_size + 1
    for tokens in TOKENS:
        q = buffers.bf16(tokens, shapes.index_heads, layout.head_dim)
        q = ops.indexer_query(q, buffers.i64(tokens), buffers.table)
        ops.indexer_topk(
            q,
            buffers.f32(tokens, shapes.index_heads),
            pool,
            layout,
            buffers.i32(tokens, pages),
            torch.arange(tokens, device=buffers.device),
            buffers.i32(tokens, value=pages * layout.page_size),
            shapes.index_topk,
        )


def _attend(ops: Operations, shapes: ServedShapes, buffers: _Buffers) -> None:
    sinks, window = buffers.f32(shapes.heads), buffers.pool(shapes.window)
    lists: list[tuple[RecordLayout | None, int]] = [(None, 0)]
    lists += [(shapes.c4, shapes.index_topk)] if shapes.c4 else []
    lists += [(shapes.c128, 64), (shapes.c128, 1024)] if shapes.c128 else []
    for tokens in TOKENS:
        q = buffers.bf16(tokens, shapes.heads, shapes.window.head_dim)
        window_slots = buffers.i64(tokens, shapes.sliding_window)
        rotation = buffers.i64(tokens), buffers.table
        for layout, width in lists:
            entries = (
                (None, None, None)
                if layout is None
                else (
                    buffers.i64(tokens, width),
                    buffers.pool(layout),
                    layout,
                )
            )
            lengths = None if layout is None else buffers.i32(tokens, value=width)
            ops.sparse_attention(
                q,
                window_slots,
                window,
                shapes.window,
                *entries,
                sinks,
                1.0,
                1.0,
                lengths,
                rotation,
            )

"""The indexer on a GPU: scores of FP4 keys, then exact top-k, in bounded scratch memory."""

import math

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.hardware import SHARED_BYTES, current_arch, num_sms
from sglang_dsv4.kernels.indexer.scores import (
    BLOCK_TOKENS,
    HEAD_DIM,
    MAX_HEADS,
    PAGE,
    ScoreShape,
    compile_scores,
    shared_bytes,
)
from sglang_dsv4.kernels.indexer.topk import TopkShape, compile_topk
from sglang_dsv4.kernels.operands import aligned_rows

# Scores of one round of tokens, float32.
MAX_WORKSPACE_BYTES = 256 << 20
MAX_TOPK = 1 << 15
# Entries that a block of the top-k holds in shared memory: 32, 64 or 128 KB.
CHUNKS = (1 << 13, 1 << 14, 1 << 15)
# Blocks that may share a row, and the part of the GPU's SMs that may be in such clusters at once:
# eight blocks of one cluster need as many free SMs in one processing cluster of the GPU.
CLUSTERS = (1, 2, 4, 8)
CLUSTER_SHARE = {2: 1.0, 4: 0.5, 8: 0.5}
# Part of the SMs that the scores use at least.
MIN_BLOCKS = 0.94
# The driver takes this much of a block's shared memory.
RESERVED_SHARED = 1024


def round_tokens(num_tokens: int, num_pages: int) -> int:
    """Tokens whose scores are held at once: all of them unless the workspace would be too big."""
    row = max(1, num_pages) * PAGE * 4
    return max(1, min(num_tokens, MAX_WORKSPACE_BYTES // row))


def workspace_bytes(num_tokens: int, num_pages: int) -> int:
    """Scratch memory of `indexer_topk` for T tokens and tables of P pages.

    At most MAX_WORKSPACE_BYTES, or one token's row where that is more (2^26 entries).
    """
    return round_tokens(num_tokens, num_pages) * num_pages * PAGE * 4


def score_shape(
    num_tokens: int, num_requests: int, num_heads: int, index_bytes: int, arch: str
) -> ScoreShape:
    """Heads padded to eight, and as many tokens in a block as a request has on average."""
    heads = max(8, math.ceil(num_heads / 8) * 8)
    wanted = num_tokens / max(1, num_requests)
    shapes = [
        ScoreShape(heads, tokens, index_bytes, arch == "sm_90a")
        for tokens in BLOCK_TOKENS
        if tokens == 1 or tokens < 2 * wanted
    ]
    room = SHARED_BYTES[arch] - RESERVED_SHARED
    return next(shape for shape in reversed(shapes) if shared_bytes(shape) <= room)


def score_blocks(num_tokens: int, sms: int) -> int:
    """Blocks of the scores: one an SM, or a few less if then tokens of one length share none.

    A block that ends one token and begins the next waits for another query.
    """
    whole = sms // max(1, num_tokens) * num_tokens
    return whole if whole >= sms * MIN_BLOCKS else sms


def topk_shape(num_tokens: int, num_pages: int, index_bytes: int, arch: str, sms: int) -> TopkShape:
    """Small blocks for many rows; else one large block a row, or a cluster of them if it is long.

    A cluster is taken only where its blocks find a free SM each, and no larger than the row asks.
    """
    if num_tokens > sms:
        return TopkShape(256, CHUNKS[0], 1, index_bytes)
    entries = num_pages * PAGE
    room = SHARED_BYTES[arch] - RESERVED_SHARED
    fitting = [c for c in CHUNKS if TopkShape(1024, c, 1, index_bytes).shared_bytes <= room]
    clusters = [c for c in CLUSTERS if c == 1 or num_tokens * c <= sms * CLUSTER_SHARE[c]]
    for cluster in clusters:
        if entries <= CHUNKS[0] * cluster:
            return TopkShape(1024, CHUNKS[0], cluster, index_bytes)
    cluster = clusters[-1]
    chunk = min((c for c in fitting if c * cluster >= entries), default=fitting[-1])
    return TopkShape(1024, chunk, cluster, index_bytes)


def _check(q: Tensor, pool: Tensor, layout: IndexerLayout, topk: int) -> None:
    if q.dtype is not torch.bfloat16 or q.shape[2] != HEAD_DIM or not 1 <= q.shape[1] <= MAX_HEADS:
        raise UnsupportedError(
            f"The indexer query is {q.dtype} with {q.shape[1]} heads of {q.shape[2]}, wanted "
            f"torch.bfloat16 with 1 to {MAX_HEADS} heads of {HEAD_DIM}: convert it, or run on a "
            f"CPU with --device cpu."
        )
    if layout != IndexerLayout(KVFormat.NVFP4, PAGE, HEAD_DIM):
        raise UnsupportedError(
            f"The indexer keys are {layout.tag}, wanted nvfp4 keys of {HEAD_DIM} in pages of "
            f"{PAGE}: choose --kv-cache-dtype nvfp4, or run on a CPU with --device cpu."
        )
    if pool.dtype is not torch.uint8 or pool.stride(1) != 1 or pool.stride(0) % 16:
        raise UnsupportedError(
            f"The indexer pool is {pool.dtype} with strides {tuple(pool.stride())}, wanted "
            f"torch.uint8 pages at multiples of 16 bytes: allocate it with torch.empty."
        )
    if not 1 <= topk <= MAX_TOPK:
        raise UnsupportedError(
            f"index_topk is {topk}, wanted 1 to {MAX_TOPK}: run on a CPU with --device cpu."
        )


def _index(row_of_token: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Both vectors contiguous and of one integer type, int32 or int64."""
    wide = row_of_token.dtype is not torch.int32 or visible.dtype is not torch.int32
    dtype = torch.int64 if wide else torch.int32
    return row_of_token.to(dtype).contiguous(), visible.to(dtype).contiguous()


def indexer_scores(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    key_pages: Tensor,
    row_of_token: Tensor,
    visible: Tensor,
    topk: int,
    scores: Tensor,
) -> None:
    """Writes the scores of entries 0..visible-1 of each token that sees more than topk entries.

    Args: as `indexer_topk`, with row_of_token and visible of one integer type; scores float32
    [T, 64 P], of which everything else stays or is written with any number.
    """
    arch = current_arch()
    shape = score_shape(len(q), len(key_pages), q.shape[1], visible.element_size(), arch)
    blocks = score_blocks(len(q), num_sms(torch.cuda.current_device()))
    compile_scores(arch, shape)(
        (q, weights, pool, key_pages, row_of_token, visible, scores), topk, blocks
    )


def select_topk(
    scores: Tensor, key_pages: Tensor, row_of_token: Tensor, visible: Tensor, slots: Tensor
) -> None:
    """Writes the slots of each row's largest scores, in ascending order of entry, then -1.

    Args: scores float32 [T, 64 P], read only where more than topk entries are visible; key_pages
    int32 [R, P]; row_of_token and visible of one integer type [T]; slots int64 [T, topk], written.
    """
    arch, sms = current_arch(), num_sms(torch.cuda.current_device())
    shape = topk_shape(len(slots), key_pages.shape[1], visible.element_size(), arch, sms)
    compile_topk(arch, shape)((scores, key_pages, row_of_token, visible, slots))


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    layout: IndexerLayout,
    key_pages: Tensor,
    row_of_token: Tensor,
    visible: Tensor,
    topk: int,
) -> Tensor:
    """Slots of the compressed entries that each token attends to.

    Args: q bfloat16 [T, Hi, 128], rotated and Hadamard-transformed, Hi 1 to 64; weights float32
    [T, Hi], scales included; pool uint8 [num_pages, page_bytes] of FP4 keys; key_pages int32
    [R, P], pages of each request: its entry e is slot key_pages[r, e // 64] * 64 + e % 64, and
    pages of entries that no token sees may be any number; row_of_token integer [T], row of
    key_pages; visible integer [T], entries 0..visible-1 may be seen.
    Returns int64 [T, topk]: slots in ascending order of entry, then -1; equal scores by lower
    entry, NaN scores last. A token that sees at most topk entries gets all of them, without
    scoring. Products and sums are float32 and must not overflow it. Nothing is read on the host,
    so the call can be captured in a CUDA graph; `workspace_bytes` is its scratch memory.
    Raises UnsupportedError for another device, dtype, width or key format.
    """
    current_arch()
    _check(q, pool, layout, topk)
    num_tokens, num_pages = len(q), key_pages.shape[1]
    slots = torch.empty((num_tokens, topk), dtype=torch.int64, device=q.device)
    if num_tokens == 0 or num_pages == 0:
        return slots.fill_(-1)
    q, weights, key_pages = aligned_rows(q), weights.float().contiguous(), key_pages.contiguous()
    key_pages = key_pages.to(torch.int32)
    row_of_token, visible = _index(row_of_token, visible)
    step = round_tokens(num_tokens, num_pages)
    scored = num_pages * PAGE > topk
    scores = torch.empty(
        (step, num_pages * PAGE) if scored else (1, 4), dtype=torch.float32, device=q.device
    )
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        rows, seen, chosen = row_of_token[part], visible[part], slots[part]
        if scored:
            indexer_scores(
                q[part], weights[part], pool, key_pages, rows, seen, topk, scores[: len(chosen)]
            )
        select_topk(scores, key_pages, rows, seen, chosen)
    return slots

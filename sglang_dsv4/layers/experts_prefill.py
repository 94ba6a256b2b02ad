"""Routed experts of a large prefill on sm_90: widened to bfloat16 in parts, then a dense product.

Marlin widens a weight anew for every block of 64 rows; with hundreds of rows an expert the product
is faster on bfloat16 weights. Marlin's layout stays the only copy that lasts: ``EXPERTS_SCRATCH``
bytes of experts at a time are widened into scratch and multiplied by a grouped kernel with TMA. A
weight is exact in bfloat16 but for its expert's outer scale, which is applied to the float32 sums.

On one H200, V4-Flash's experts (4096 x 2048, 6 of 64 a token), 8192 tokens, 768 rows an expert:
5.37 ms (460 TFLOP/s) against 9.36 (264) of Marlin. 1.06 of it widens (3.9 TB/s), 0.23 makes the
tables of rows. Widening within the product's loop took 12.6 ms. ``ROWS_WORTH`` is an estimate from
these numbers; no smaller batch was timed. A server's answers to prompts of up to 5961 tokens were
the expected ones on it (16 experts, 4 a token); the kernels were not compared with a reference on
a GPU apart from that, on a CPU they are (interpreted).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang_dsv4.kernels.hardware import num_sms
from sglang_dsv4.layers.weight_kernels import EXPERTS_SCRATCH

if TYPE_CHECKING:
    from sglang_dsv4.layers.marlin import MarlinExperts

ROWS_WORTH = 256
"""Rows an expert, on average, from which on this is taken instead of Marlin."""
BLOCK_ROWS = 128
_DEPTH = 64
_GROUP = 8
_TILES = 8
_OUTER = tl.constexpr(2.0**-112)
"""Marlin's outer scale (times 2^119) times this is that of ``_widen``'s weights (over 2^7)."""


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
) -> None:
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
    # Exact, so the upper halves are the bfloat16 values.
    pair = even.to(tl.uint32, bitcast=True) >> 16
    pair |= odd.to(tl.uint32, bitcast=True) & 0xFFFF0000
    pair = pair.to(tl.int32, bitcast=True)
    place = tl.program_id(0) * TILES * 8 + tl.arange(0, TILES * 8)
    target = out + local * (size // 2) + output[:, None] * (inputs // 2) + place[None, :]
    tl.store(target, pair, mask=(place < inputs // 2)[None, :])


@triton.jit(do_not_specialize=["first", "last", "slots"])
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    outer: tl.tensor,
    routed: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    slots: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    limit: tl.tensor,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Row blocks of experts [first, last), whose weights are ``weight`` [(last - first) N, inputs].

    GATED: N is gate and up of ``outputs`` each, ``out`` their SwiGLU, x has a row for each token.
    Otherwise N = outputs, x has a row for each slot, and ``out`` is weighted by ``routed``.
    """
    begin = tl.load(starts + first)
    blocks = tl.load(starts + last) - begin
    columns = (outputs + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), blocks * columns, PROGRAMS):
        # Neighbours in time share rows and weights in the L2 cache.
        group = tile // (GROUP * columns)
        height = tl.minimum(blocks - group * GROUP, GROUP)
        inner = tile % (GROUP * columns)
        block = begin + group * GROUP + inner % height
        column = inner // height * COLUMNS
        expert = tl.load(experts + block)
        slot = tl.load(rows + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = slot < slots
        row = tl.where(there, slot // TOP_K if GATED else slot, 0)
        source = x + row[:, None] * inputs + tl.arange(0, DEPTH)[None, :]
        base = (expert - first) * (outputs * 2 if GATED else outputs) + column
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        up = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for depth in range(0, inputs, DEPTH):
            left = tl.load(source)
            total = tl.dot(left, weight.load([base, depth]).T, total)
            if GATED:
                up = tl.dot(left, weight.load([base + outputs, depth]).T, up)
            source += DEPTH
        factor = tl.load(outer + expert).to(tl.float32) * _OUTER
        if GATED:
            total = tl.minimum(total * factor, limit)
            up = tl.minimum(tl.maximum(up * factor, -limit), limit)
            total = total / (1.0 + tl.exp(-total)) * up
        else:
            weighted = tl.load(routed + slot, mask=there, other=0.0).to(tl.float32)
            total *= (weighted * factor)[:, None]
        place = column + tl.arange(0, COLUMNS)
        target = out + slot[:, None] * outputs + place[None, :]
        mask = there[:, None] & (place < outputs)[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots"])
def _clear(
    rows: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Zeros for the slots without an expert, whose blocks are before the first expert's."""
    for row in range(tl.program_id(0), tl.load(starts) * ROWS, PROGRAMS):
        slot = tl.load(rows + row).to(tl.int64)
        if slot < slots:
            for begin in range(0, width, BLOCK):
                place = begin + tl.arange(0, BLOCK)
                zeros = tl.full((BLOCK,), 0.0, out.dtype.element_ty)
                tl.store(out + slot * width + place, zeros, mask=place < width)


def worthwhile(ids: torch.Tensor, experts: int) -> bool:
    """Whether a batch [T, k] is large enough, and the GPU the one this is made for."""
    return ids.numel() >= ROWS_WORTH * experts and _made_for(ids.device)


def _made_for(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


class Blocks(NamedTuple):
    """Slots (token * k + choice) by expert, each expert's rounded up to ``BLOCK_ROWS``.

    ``rows`` int32 [blocks * BLOCK_ROWS], the number of slots or more where there is none;
    ``experts`` int32 [blocks], ascending; ``starts`` int32 [E + 1], each expert's first block,
    after the blocks of the slots without an expert.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor


def row_blocks(ids: torch.Tensor, experts: int) -> Blocks:
    """The blocks of ``ids`` int32 [T, k], in [0, experts) or -1. Nothing is copied to the host."""
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size

    bucket = ids.flatten().long() + 1
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, bucket, torch.ones_like(bucket, dtype=torch.int32))
    starts = torch.cumsum((counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0, dtype=torch.int32)
    rows, owners, _ = moe_align_block_size(
        ids, BLOCK_ROWS, experts, return_inactive_prefix_count=True
    )
    return Blocks(rows, owners, starts)


def widen(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Experts first .. first + len(out) of ``marlin.MarlinExperts`` over 2^7, without scale_2.

    Args:
        weight: int32 [E, in / 16, 2 out].
        scale: bytes [E, in / 16, out].
        out: bfloat16 [parts, out, in].
    """
    experts, outputs, inputs = out.shape
    grid = (triton.cdiv(inputs, 16 * _TILES), outputs // 64, experts)
    _widen[grid](
        weight, scale.view(torch.uint8), out.view(torch.int32), first, outputs, inputs, TILES=_TILES
    )


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    outer: torch.Tensor,
    routed: torch.Tensor,
    blocks: Blocks,
    out: torch.Tensor,
    first: int,
    limit: float | None = None,
    gated: bool = False,
) -> None:
    """The products of a part of the experts; see ``_multiply``."""
    experts, outputs, inputs = weight.shape
    columns = 128 if gated else 256
    programs = num_sms(x.device.index)
    _multiply[(programs,)](
        x,
        TensorDescriptor.from_tensor(weight.view(-1, inputs), [columns, _DEPTH]),
        outer,
        routed,
        blocks.rows,
        blocks.experts,
        blocks.starts,
        out,
        first,
        first + experts,
        routed.numel(),
        outputs // 2 if gated else outputs,
        inputs,
        float("inf") if limit is None else limit,
        GATED=gated,
        TOP_K=routed.shape[1],
        PROGRAMS=programs,
        ROWS=BLOCK_ROWS,
        COLUMNS=columns,
        DEPTH=_DEPTH,
        GROUP=_GROUP,
        num_warps=8,
        num_stages=4,
    )


def experts_prefill(
    x: torch.Tensor,
    w13: "MarlinExperts",
    w2: "MarlinExperts",
    routed: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Each token's chosen experts, weighted after the down projection: [T, k, D].

    Args:
        x: bfloat16 [T, D].
        w13: ``marlin.MarlinExperts`` of gate and up.
        w2: of the down projection.
        routed: float32 [T, k], the router's weights.
        ids: int32 [T, k], in [0, E) or -1.
        limit: ``swiglu_limit``; None clamps nothing.
    """
    blocks = row_blocks(ids, len(w13[0]))
    inner, width = w2[0].shape[1] * 16, x.shape[1]
    hidden = x.new_empty(routed.numel(), inner)
    out = x.new_empty(routed.numel(), width)
    part = max(EXPERTS_SCRATCH // (4 * inner * width), 1)
    scratch = x.new_empty(min(part, len(w13[0])) * 2 * inner * width)
    for gated, (weight, scale, outer), source, target in (
        (True, w13, x, hidden),
        (False, w2, hidden, out),
    ):
        shape = (2 * inner, width) if gated else (width, inner)
        parts = -(-len(weight) * shape[0] * shape[1] // scratch.numel())
        held = -(-len(weight) // parts)
        for first in range(0, len(weight), held):
            count = min(held, len(weight) - first)
            dense = scratch[: count * shape[0] * shape[1]].view(count, *shape)
            widen(weight, scale, dense, first)
            multiply(source, dense, outer, routed, blocks, target, first, limit, gated)
    programs = num_sms(x.device.index)
    _clear[(programs,)](
        blocks.rows,
        blocks.starts,
        out,
        routed.numel(),
        width,
        PROGRAMS=programs,
        ROWS=BLOCK_ROWS,
        BLOCK=1024,
    )
    return out.view(*routed.shape, width)


def compile_for(
    w13: "MarlinExperts", w2: "MarlinExperts", chosen: int, limit: float | None
) -> None:
    """Compile the kernels by one token through the first expert, so that no request waits."""
    device = w13.weight.device
    if not _made_for(device):
        return
    x = torch.zeros(1, w13.weight.shape[1] * 16, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, chosen, dtype=torch.int32, device=device)
    w13, w2 = (type(packed)(*(part[:1] for part in packed)) for packed in (w13, w2))
    experts_prefill(x, w13, w2, ids.float(), ids, limit)

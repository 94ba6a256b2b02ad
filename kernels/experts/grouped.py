"""Routed experts for few tokens by two grouped products on records (`product`): W4A16.

Bytes: 0.5625 (2 I D + D I) for each expert that is hit; activations, 2 T k (D + 2 I + D), are small
beside them. On an H200 (4.8 TB/s) V4-Flash's 64 experts (I 2048, D 4096) take 189 us so at the
least. For each record of 16 x 64 weights and tile of 8 slots a warp issues 4 products m16n8k16,
which bound the rate from about three tiles on.

Measured on an H200, L2-cold, us of gate and up + down, V4-Flash's 64 experts, six a token (in
brackets the bytes at 4.24 TB/s, and from 64 tokens on the same tiles without staging):

    1 token 30 + 18 (13 + 7)            64 tokens 175 + 96 (143 + 72; 181 + 104)
    8 tokens 108 + 62 (76 + 38)        128 tokens 197 + 109 (143 + 73; 223 + 130)
    32 tokens 162 + 103 (138 + 70)     256 tokens 277 + 140 (144 + 76; 413 + 216)

From 64 tokens on the products and reading activations bound it: one block of eight warps an SM,
whose registers and shared memory leave no room for a second.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.kernels.experts.product import Numbers, Operands, compile_product
from sglang_dsv4.kernels.experts.shape import TOKENS, WARPS, Shape, resident_blocks, with_staging
from sglang_dsv4.kernels.hardware import current_arch, num_sms
from sglang_dsv4.kernels.linear.records import COLUMNS

TILES = ((4.8, 1), (12.8, 2), (float("inf"), 4))
"""Token tiles of a block of slots, up to so many slots an expert on average.

A second block of an expert decodes its weights again, so that few experts should have one: at 12.8
slots one of seven, about as much as four tiles cost more than two.
"""
STAGED_TILES = 2
"""Token tiles from which on activations are staged where they fit."""
ITEM_RECORDS = 4
"""What an item costs a warp beside its records, in records. An estimate."""
UNSTAGED = 2
"""How much longer a record takes with four tiles whose activations are not staged, about: L1 moves
16 of each 32 bytes. On an H200 1.5 times, with two tiles 1.03 to 1.2."""


@dataclass(frozen=True)
class Plan:
    """The two launches: gate and up, and down."""

    gate_up: Shape
    down: Shape


@functools.cache
def experts_plan(
    tokens: int, chosen: int, experts: int, width: int, inner: int, sms: int, arch: str
) -> Plan:
    """The launches for ``tokens`` tokens, as if the router chose at random.

    Args: width, inner: D and I, multiples of 64.
    """
    slots = tokens * chosen
    tiles = next(tiles for most, tiles in TILES if slots <= most * experts)
    hit = experts * (1.0 - (1.0 - 1.0 / experts) ** slots)
    blocks = hit * max(1.0, slots / (hit * TOKENS * tiles))

    def launch(gated: bool, outputs: int, inputs: int) -> Shape:
        across = inputs // COLUMNS
        shapes = [
            Shape(gated, outputs, inputs, chosen, tiles, split)
            for split in (1, 2, 4, WARPS)
            if split <= across
        ]
        if tiles >= STAGED_TILES:
            shapes = [with_staging(shape, arch) for shape in shapes]

        def cost(shape: Shape) -> float:
            """Records that a multiprocessor's warps take in turn."""
            resident = resident_blocks(shape, arch)
            rounds = -(-round(blocks * shape.groups) // (sms * resident))
            slow = 1 if shape.staged or tiles < STAGED_TILES else UNSTAGED
            return rounds * resident * (slow * -(-across // shape.split) + ITEM_RECORDS)

        return min(shapes, key=cost)

    return Plan(launch(True, inner, width), launch(False, width, inner))


def slot_lists(ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of ``ids`` int32 [T, k] by expert in blocks: rows, owners, counts of `Operands`."""
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size

    return moe_align_block_size(ids, block, experts, return_inactive_prefix_count=True)


def experts_decode(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    outer13: Tensor,
    outer2: Tensor,
    routed: Tensor,
    ids: Tensor,
    limit: float | None,
) -> Tensor:
    """Each token's chosen experts, weighted after the down projection; zeros for an id of -1.

    Args:
        x: bfloat16 [T, D].
        w13: records uint8 [E, 2 I / 16, D / 64, 576] of gate and up, gate rows first.
        w2: records uint8 [E, D / 16, I / 64, 576]. D and I are multiples of 64.
        outer13, outer2: float32 [E], the outer scales.
        routed: float32 [T, k], the router's weights.
        ids: int32 [T, k], in [0, E) or -1.
        limit: ``swiglu_limit``; None clamps nothing.

    Returns:
        bfloat16 [T, k, D].
    """
    experts, inner = w13.shape[0], w2.shape[2] * COLUMNS
    (tokens, chosen), width = ids.shape, x.shape[1]
    out = x.new_empty(tokens * chosen, width)
    if tokens:
        sms, arch = num_sms(x.device.index or 0), current_arch()
        plan = experts_plan(tokens, chosen, experts, width, inner, sms, arch)
        lists = slot_lists(ids, plan.down.slots, experts)
        hidden = x.new_empty(tokens * chosen, inner)
        routed, bound = routed.contiguous(), float("inf") if limit is None else limit
        launch(plan.gate_up, x.contiguous(), w13, outer13, routed, lists, hidden, bound)
        launch(plan.down, hidden, w2, outer2, routed, lists, out, bound)
    return out.view(tokens, chosen, width)


def launch(
    shape: Shape,
    x: Tensor,
    records: Tensor,
    outer: Tensor,
    routed: Tensor,
    lists: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    limit: float,
) -> None:
    """One product by a static shape; ``lists`` as `slot_lists` for its blocks."""
    sms, arch = num_sms(x.device.index or 0), current_arch()
    operands = Operands(x, records.view(-1), outer, routed.view(-1), *lists, out)
    blocks = sms * resident_blocks(shape, arch)
    compile_product(arch, shape)(operands, Numbers(out.shape[0], blocks, sms, limit))


def prepare(w13: Tensor, w2: Tensor, chosen: int, most: int) -> None:
    """Compile or load every kernel that 1 .. most tokens take, by launches without any slot.

    Args: w13, w2: as ``experts_decode``, on a GPU; chosen: experts of a token.
    """
    device, inner = w13.device, w2.shape[2] * COLUMNS
    experts, width = len(w13), w13.shape[2] * COLUMNS
    sms, arch = num_sms(device.index or 0), current_arch()
    shapes: set[Shape] = set()
    for tokens in range(1, most + 1):
        plan = experts_plan(tokens, chosen, experts, width, inner, sms, arch)
        shapes |= {plan.gate_up, plan.down}
    # SGLang loads models with bfloat16 as torch's default.
    one = torch.ones(experts, dtype=torch.float32, device=device)
    none = torch.zeros(2, dtype=torch.int32, device=device)
    for shape in sorted(shapes, key=repr):
        rows = torch.zeros(chosen, shape.inputs, dtype=torch.bfloat16, device=device)
        out = torch.zeros(chosen, shape.outputs, dtype=torch.bfloat16, device=device)
        weight = w13 if shape.gated else w2
        launch(shape, rows, weight, one, one[:1].expand(chosen).contiguous(), (none,) * 3, out, 1.0)

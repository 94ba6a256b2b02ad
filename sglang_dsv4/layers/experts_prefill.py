"""Routed experts of a large prefill on sm_90: widened in parts, then a dense product.

Marlin widens a weight anew for every block of 64 rows; with hundreds of rows an expert the product
is faster on dense weights. The 4-bit weights stay the only copy that lasts: ``EXPERTS_SCRATCH``
bytes of experts at a time are widened into scratch and multiplied by ``expert_products``.

In bfloat16, on one H200, V4-Flash's experts (4096 x 2048, 6 of 64 a token), 8192 tokens, 768 rows
an expert: 5.37 ms (460 TFLOP/s) against 9.36 (264) of Marlin. 1.06 of it widens (3.9 TB/s), 0.23
makes the tables of rows. Widening within the product's loop took 12.6 ms. ``ROWS_WORTH`` is an
estimate from these numbers; no smaller batch was timed. A server's answers to prompts of up to 5961
tokens were the expected ones on it (16 experts, 4 a token); the kernels were not compared with a
reference on a GPU apart from that, on a CPU they are (interpreted).

In FP8 (``prefill_precision``) activations and SwiGLU's results are rounded to e4m3 with a scale for
each row. Not run.
"""

from typing import TYPE_CHECKING

import torch

from sglang_dsv4.kernels.linear.fp8_rows import quantize_rows
from sglang_dsv4.layers.expert_products import Source, clear, multiply, row_blocks
from sglang_dsv4.layers.marlin_widen import source
from sglang_dsv4.layers.weight_kernels import EXPERTS_SCRATCH

if TYPE_CHECKING:
    from sglang_dsv4.layers.marlin import MarlinExperts

ROWS_WORTH = 256
"""Rows an expert, on average, from which on this is taken instead of Marlin."""


def worthwhile(ids: torch.Tensor, experts: int) -> bool:
    """Whether a batch [T, k] is large enough, and the GPU the one this is made for."""
    return ids.numel() >= ROWS_WORTH * experts and _made_for(ids.device)


def _made_for(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def products(
    x: torch.Tensor,
    w13: Source,
    w2: Source,
    routed: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    fp8: bool = False,
) -> torch.Tensor:
    """Each token's chosen experts, weighted after the down projection: [T, k, D].

    Args:
        x: bfloat16 [T, D], contiguous.
        w13: gate and up, gate rows first; w2: the down projection. Both widen to e4m3 if fp8,
            else to bfloat16.
        routed: float32 [T, k], the router's weights.
        ids: int32 [T, k], in [0, E) or -1.
        limit: ``swiglu_limit``; None clamps nothing.
    """
    blocks = row_blocks(ids, w13.experts)
    hidden = x.new_empty(routed.numel(), w2.inputs)
    out = x.new_empty(routed.numel(), w2.outputs)
    dtype = torch.float8_e4m3fn if fp8 else x.dtype
    largest = max(w13.outputs * w13.inputs, w2.outputs * w2.inputs)
    part = max(EXPERTS_SCRATCH // (dtype.itemsize * largest), 1)
    scratch = torch.empty(min(part, w13.experts) * largest, dtype=dtype, device=x.device)
    for gated, weight, rows, target in ((True, w13, x, hidden), (False, w2, hidden, out)):
        size = weight.outputs * weight.inputs
        parts = -(-weight.experts * size // scratch.numel())
        held = -(-weight.experts // parts)
        scale = None
        if fp8:
            rows, scale = quantize_rows(rows)
        for first in range(0, weight.experts, held):
            count = min(held, weight.experts - first)
            dense = scratch[: count * size].view(count, weight.outputs, weight.inputs)
            weight.widen(dense, first)
            multiply(
                rows,
                dense,
                weight.outer,
                weight.undo,
                routed,
                blocks,
                target,
                first,
                limit,
                gated,
                scale,
            )
    clear(blocks, out)
    return out.view(*routed.shape, -1)


def experts_prefill(
    x: torch.Tensor,
    w13: "MarlinExperts",
    w2: "MarlinExperts",
    routed: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    fp8: bool = False,
) -> torch.Tensor:
    """``products`` of experts in Marlin's order."""
    dtype = torch.float8_e4m3fn if fp8 else x.dtype
    return products(x, source(w13, dtype), source(w2, dtype), routed, ids, limit, fp8)


def compile_for(
    w13: "MarlinExperts", w2: "MarlinExperts", chosen: int, limit: float | None, fp8: bool = False
) -> None:
    """Compile the kernels by one token through the first expert, so that no request waits."""
    device = w13.weight.device
    if not _made_for(device):
        return
    x = torch.zeros(1, w13.weight.shape[1] * 16, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, chosen, dtype=torch.int32, device=device)
    w13, w2 = (type(packed)(*(part[:1] for part in packed)) for packed in (w13, w2))
    experts_prefill(x, w13, w2, ids.float(), ids, limit, fp8)

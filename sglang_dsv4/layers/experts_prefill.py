"""Routed experts of a large prefill on sm_90: widened in parts, then a dense product.

A kernel for few rows widens a weight anew for every block of them; with hundreds of rows an expert
the product is faster on dense weights. The 4-bit weights stay the only copy that lasts:
``EXPERTS_SCRATCH`` bytes of experts at a time are widened into scratch and multiplied by
``expert_products``. Widening within the product's loop took more than twice as long.

In FP8 (``prefill_precision``) activations and SwiGLU's results are rounded to e4m3 with a scale for
each row.
"""

import torch

from sglang_dsv4.kernels.linear.fp8_rows import quantize_rows
from sglang_dsv4.layers.expert_products import Source, clear, multiply, row_blocks
from sglang_dsv4.layers.weight_kernels import EXPERTS_SCRATCH

ROWS_WORTH = {False: 384, True: 256}
"""Rows an expert, on average, from which on this is taken instead of ``kernels.experts``; by
whether it is in FP8. Set by timings on an H200 of earlier forms of both, not timed again since."""


def worthwhile(ids: torch.Tensor, experts: int, fp8: bool) -> bool:
    """Whether a batch [T, k] is large enough, and the GPU the one this is made for."""
    if ids.numel() < ROWS_WORTH[fp8] * experts or not ids.is_cuda:
        return False
    return torch.cuda.get_device_capability(ids.device) == (9, 0)


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

"""Routed experts, grouped by expert."""

import torch
from torch import Tensor

from .swiglu import clamped_swiglu


def moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, limit: float | None
) -> Tensor:
    """sum_j weights[t, j] * down[e] @ swiglu(gate_up[e] @ x[t]), e = ids[t, j].

    Args: x float [T, D]; gate_up [E, 2 I, D], gate rows first; down [E, D, I]; weights float
    [T, k]; ids integer [T, k], a value outside [0, E) (-1) contributes nothing; limit as
    `clamped_swiglu`. The weight multiplies the down projection's input, as the model was trained.
    Matmuls run in gate_up's dtype; sums over experts are float32. Returns [T, D] in x's dtype.
    """
    num_experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    order = order[(flat[order] >= 0) & (flat[order] < num_experts)]
    token = order // max(1, ids.shape[1])
    scale = weights.flatten()[order].float()
    counts = torch.bincount(flat[order], minlength=num_experts).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    stop = 0
    for expert, count in enumerate(counts):
        start, stop = stop, stop + count
        if not count:
            continue
        rows = token[start:stop]
        projected = x[rows].to(gate_up.dtype) @ gate_up[expert].mT
        hidden = clamped_swiglu(projected[:, :inner].float(), projected[:, inner:].float(), limit)
        hidden = hidden * scale[start:stop, None]
        out.index_add_(0, rows, (hidden.to(down.dtype) @ down[expert].mT).float())
    return out.to(x.dtype)

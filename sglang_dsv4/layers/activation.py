"""Clamped SwiGLU of the shared expert, on the kernels of the device."""

import torch

from sglang_dsv4.kernels.reference.swiglu import clamped_swiglu


def swiglu(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in float32, rounded once.

    Args:
        gate_up: [T, 2 n], gate first; on a GPU bfloat16, n a multiple of 8.
        limit: ``swiglu_limit``; None clamps nothing.

    Returns:
        [T, n] in gate_up's dtype.
    """
    if gate_up.device.type == "cpu":
        gate, up = gate_up.chunk(2, dim=-1)
        return clamped_swiglu(gate, up, limit)
    from sglang.kernels.ops.activation.silu_and_mul_clamp import silu_and_mul_clamp

    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    silu_and_mul_clamp(gate_up, out, torch.inf if limit is None else limit)
    return out

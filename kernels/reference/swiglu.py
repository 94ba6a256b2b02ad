"""SwiGLU with clamped inputs (`swiglu_limit`)."""

import torch
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit).

    Args: gate, up float [...]; limit None leaves both as they are. Float32 inside.
    Returns [...] in gate's dtype.
    """
    wide_gate, wide_up = gate.float(), up.float()
    if limit is not None:
        wide_gate, wide_up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
    return (torch.nn.functional.silu(wide_gate) * wide_up).to(gate.dtype)

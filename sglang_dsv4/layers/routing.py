"""Router logits and expert choice on the kernels of the device.

A CPU runs ``kernels.reference.router``; a GPU SGLang's own DeepSeek-V4 kernels, whose scores are
the same up to rounding for logits above -87 (below, e^x is zero in float32 there).
"""

import torch

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.reference import router

# SGLang's hash kernel has it built in; ours is the same number (``kernels.reference.router``).
_SUM_EPS = 1e-20


def router_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Hidden [T, D] times weight [E, D] -> float32 [T, E]; products of bfloat16 are exact."""
    if hidden.device.type == "cpu":
        return torch.nn.functional.linear(hidden.float(), weight.float())
    from sglang.kernels.ops.gemm.bf16_fp32 import linear_bf16_fp32

    return linear_bf16_fp32(hidden, weight)


def route_topk(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, norm: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As its namesake in ``kernels.reference.router``; ids are int32 on a GPU."""
    if logits.device.type == "cpu":
        return router.route_topk(logits, bias, top_k, norm, scaling)
    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

    return moe_fused_gate(
        logits,
        bias,
        top_k,
        scoring_func="sqrtsoftplus",
        renormalize=norm,
        routed_scaling_factor=scaling,
        apply_routed_scaling_factor_on_output=True,
        renormalize_epsilon=_SUM_EPS,
    )


def route_hash(
    logits: torch.Tensor,
    tid2eid: torch.Tensor,
    input_ids: torch.Tensor,
    norm: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As its namesake in ``kernels.reference.router``; ids are int32 on a GPU.

    On a GPU tid2eid is int32 and input_ids int64.

    Raises:
        UnsupportedError: unnormalised weights are wanted on a GPU.
    """
    if logits.device.type == "cpu":
        return router.route_hash(logits, tid2eid, input_ids, norm, scaling)
    if not norm:
        raise UnsupportedError(
            "norm_topk_prob is false in a hash-routed layer on a GPU, wanted true, which SGLang's "
            "hash router is made for: pass --device cpu."
        )
    from sglang.kernels.ops.moe.dsv4 import hash_topk

    weights, ids = hash_topk(logits, input_ids, tid2eid)
    return weights.mul_(scaling), ids

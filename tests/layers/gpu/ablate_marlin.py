"""What Marlin's atomics buy and cost: time, error, and calls that differ from the first.

SGLang lets Marlin add the partial sums of a split K in bfloat16 by atomics: in a linear layer where
out < 2048 <= in, and on sm_90 in every product of the experts. "never" sums in float32 in a fixed
order. "experts, ours" is SGLang's two products without atomics and its clamped SwiGLU between them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import weight_cases as cases
from timing import graph_time

CALLS = 100


def report(name: str, call: Callable[[], torch.Tensor], wanted: torch.Tensor) -> None:
    results = [call().clone() for _ in range(CALLS)]
    different = sum(not torch.equal(results[0], result) for result in results)
    error = 1 - cases.cosine(results[0], wanted)
    print(
        f"  {name:34s} {graph_time([call], 10):7.1f} us   1 - cosine {error:.1e}   "
        f"{different} of {CALLS} calls differ"
    )


def linear(name: str, tokens: int) -> None:
    from sglang.srt.layers.quantization import marlin_utils_fp4 as stock

    layer, weight = cases.random_linear(*cases.FLASH[name])
    x = cases.inputs(tokens, weight.shape[1])
    wanted = x.float() @ weight.T
    chosen = stock.should_use_atomic_add_reduce
    for choice, rule in (("as SGLang", chosen), ("never", lambda **_: False)):
        stock.should_use_atomic_add_reduce = rule
        report(f"{name}, T {tokens}, {choice}", lambda: layer(x)[0], wanted)
    stock.should_use_atomic_add_reduce = chosen


def two_products(layer: Any, x: torch.Tensor, topk: Any, atomics: bool) -> torch.Tensor:
    """The experts without SGLang's wrapper."""
    from sgl_kernel import moe_sum_reduce
    from sglang.kernels.ops.activation.silu_and_mul_clamp import silu_and_mul_clamp
    from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace
    from sglang.srt.layers.quantization.utils import get_scalar_types

    tokens, hidden = x.shape
    experts, inner = layer.w2_weight.shape[0], layer.w2_weight.shape[1] * 16
    ids, weights = topk.topk_ids, topk.topk_weights
    top_k = ids.shape[1]
    blocks = (8, 16, 32, 48, 64)
    block = next((b for b in blocks if tokens * top_k / experts / b < 0.9), 64)
    rows, groups, counts = moe_align_block_size(
        ids, block, experts, return_inactive_prefix_count=True
    )
    if not hasattr(layer, "workspace"):
        layer.workspace = marlin_make_workspace(x.device, max_blocks_per_sm=4)
    product = functools.partial(
        moe_wna16_marlin_gemm,
        b_bias_or_none=None,
        b_zeros_or_none=None,
        g_idx_or_none=None,
        perm_or_none=None,
        workspace=layer.workspace,
        sorted_token_ids=rows,
        expert_ids=groups,
        num_tokens_post_padded=counts,
        topk_weights=weights,
        moe_block_size=block,
        is_ep=False,
        b_q_type=get_scalar_types()[1].float4_e2m1f,
        use_atomic_add=atomics,
        use_fp32_reduce=True,
        expert_ids_are_sorted=True,
        has_inactive_prefix_count=True,
    )
    gate_up = product(
        x,
        x.new_empty(tokens * top_k, 2 * inner),
        b_q_weight=layer.w13_weight,
        b_scales=layer.w13_weight_scale,
        global_scale_or_none=layer.w13_weight_scale_2,
        top_k=top_k,
        mul_topk_weights=False,
        size_m=tokens,
        size_n=2 * inner,
        size_k=hidden,
    )
    act = x.new_empty(tokens * top_k, inner)
    silu_and_mul_clamp(gate_up, act, 10.0)
    down = product(
        act,
        x.new_empty(tokens * top_k, hidden),
        b_q_weight=layer.w2_weight,
        b_scales=layer.w2_weight_scale,
        global_scale_or_none=layer.w2_weight_scale_2,
        top_k=1,
        mul_topk_weights=True,
        zero_inactive_output=True,
        size_m=tokens * top_k,
        size_n=hidden,
        size_k=inner,
    )
    out = torch.empty_like(x)
    moe_sum_reduce(down.view(tokens, top_k, hidden), out, 1.0)
    return out


def experts(tokens: int) -> None:
    from sglang_dsv4.kernels.reference.moe import moe_experts

    layer, (gate_up, down) = cases.random_experts(16, 4096, 2048, nvfp4=True)
    x, topk = cases.inputs(tokens, 4096), cases.random_topk(tokens, 16)
    wanted = moe_experts(x.float(), gate_up, down, topk.topk_weights, topk.topk_ids, 10.0)
    report(f"experts, T {tokens}, SGLang", lambda: layer(x, topk), wanted)
    for atomics in (True, False):
        name = f"experts, ours, T {tokens}, {'atomics' if atomics else 'never'}"
        report(name, functools.partial(two_products, layer, x, topk, atomics), wanted)


def run() -> None:
    """Print the table."""
    for tokens in (1, 16):
        for name in ("q_a_kv_proj", "kv_gate_proj hca", "indexer.kv_gate_proj"):
            linear(name, tokens)
        experts(tokens)

"""Weight kernels on the GPU against the dequantised weights, and their time against bfloat16.

    python check_weights.py [--model] [--shapes] [--speed] [--atomics]     (all when none is named)

--model: every NVFP4 module of the small model, loaded from its checkpoint, the router and the
experts. --shapes: random weights in the shapes of V4-Flash and of its ranks, and shapes that need
padding. --speed: microseconds from cold L2, one call in a CUDA graph, beside a bfloat16 product.
--atomics: see ``ablate_marlin``. No server is started. Exits with 1 where a cosine is too small.
"""

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import ablate_marlin
import weight_cases as cases
from timing import graph_time

# bfloat16 rounding of operands and result (2^-9 each) leaves 1 - cosine below 1e-5; quantised
# activations (W4A4) are off by a tenth: 1 - 0.1^2 / 2.
BOUND = {"dequant": 0.9999, "marlin": 0.9999, "flashinfer": 0.99}
TOKENS = (1, 5, 70)
PADDED = {"weights_proj, small": (8, 256), "odd in": (192, 96), "odd both": (40, 4176)}
bounds: dict[str, float] = {"plain": BOUND["dequant"]}
failures: list[str] = []


def judge(name: str, part: str, ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """Cosine; a failure when below the bound, or when the size is off by 1% (10% in W4A4)."""
    value = cases.cosine(ours, wanted)
    size = float(ours.double().norm() / wanted.double().norm())
    if not value >= bounds[part] or not abs(size - 1) < (0.01 if bounds[part] > 0.999 else 0.1):
        failures.append(f"{name}: cosine {value:.6f}, size {size:.4f}")
    return value


def check_model(hf_config: Any) -> None:
    """Every module of the small model, as loaded."""
    from safetensors import safe_open
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from sglang_dsv4.kernels.reference.moe import moe_experts
    from sglang_dsv4.layers.grouped_linear import GroupedLinear
    from sglang_dsv4.layers.nvfp4_linear import Nvfp4LinearMethod
    from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM
    from sglang_dsv4.models.moe import MoE

    with set_default_torch_dtype(torch.bfloat16):
        model = DeepseekV4ForCausalLM(hf_config)
    with safe_open(cases.MODEL / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        model.load_weights((name, file.get_tensor(name)) for name in names)
    modules = dict(model.named_modules())
    linear = {
        name: cases.dense_weight(module)
        for name, module in modules.items()
        if isinstance(getattr(module, "quant_method", None), Nvfp4LinearMethod)
    }
    experts = {n: cases.dense_experts(m) for n, m in modules.items() if isinstance(m, FusedMoE)}
    for module in modules.values():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    worst: dict[str, float] = {}
    for name, weight in linear.items():
        kind = ".".join(name.split(".")[3:])
        for tokens in TOKENS:
            x = cases.inputs(tokens, weight.shape[1])
            value = judge(name, "linear", modules[name](x)[0], x.float() @ weight.T)
            worst[kind] = min(value, worst.get(kind, 1.0))
    for name, module in modules.items():
        if isinstance(module, GroupedLinear):
            blocks = module.weight.float().unflatten(0, (-1, module.o_lora_rank))
            x = cases.inputs(5, blocks.shape[0] * blocks.shape[2]).unflatten(
                1, (blocks.shape[0], -1)
            )
            wanted = torch.einsum("tgi,goi->tgo", x.float(), blocks).flatten(1)
            worst["o_a_proj (bf16)"] = judge(name, "plain", module(x), wanted)
        if not isinstance(module, MoE):
            continue
        x, ids = cases.inputs(70, model.model.dims.hidden_size), torch.arange(70) * 7
        topk = module.gate(x, ids)
        check_router(module.gate, x, ids, topk)
        gate_up, down = experts[f"{name}.experts"]
        for tokens in TOKENS:
            part = topk._replace(
                topk_weights=topk.topk_weights[:tokens].contiguous(),
                topk_ids=topk.topk_ids[:tokens].contiguous(),
                router_logits=topk.router_logits[:tokens],
            )
            wanted = moe_experts(
                x[:tokens].float(), gate_up, down, part.topk_weights, part.topk_ids, 10.0
            )
            value = judge(f"{name}.experts", "experts", module.experts(x[:tokens], part), wanted)
            worst["mlp.experts"] = min(value, worst.get("mlp.experts", 1.0))
        shared = module.shared_experts(x)
        weights = [
            linear[f"{name}.shared_experts.{part}"] for part in ("gate_up_proj", "down_proj")
        ]
        gate, up = (x.float() @ weights[0].T).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
        worst["shared_experts, whole"] = judge(name, "shared", shared, hidden @ weights[1].T)
    print(f"small model: {len(linear)} linear layers, {len(experts)} experts layers, T {TOKENS}")
    for kind, value in sorted(worst.items()):
        print(f"  {kind:40s} worst cosine {value:.6f}")


def check_router(gate: Any, x: torch.Tensor, ids: torch.Tensor, topk: Any) -> None:
    """Ids equal, weights within float32 rounding of the reference."""
    from sglang_dsv4.kernels.reference import router

    logits = x.float() @ gate.weight.float().T
    dims = gate.dims
    if gate.is_hash:
        weights, wanted = router.route_hash(
            logits, gate.tid2eid, ids, dims.norm_topk_prob, dims.routed_scaling_factor
        )
    else:
        weights, wanted = router.route_topk(
            logits,
            gate.e_score_correction_bias,
            dims.num_experts_per_tok,
            dims.norm_topk_prob,
            dims.routed_scaling_factor,
        )
    order, ours = wanted.argsort(dim=1), topk.topk_ids.long().argsort(dim=1)
    same = (wanted.gather(1, order) == topk.topk_ids.long().gather(1, ours)).all(1)
    error = (weights.gather(1, order) - topk.topk_weights.gather(1, ours)).abs()[same].max()
    # A pair of experts whose scores differ by less than the sum's rounding may swap.
    if same.float().mean() < 0.97 or not error < 1e-4:
        failures.append(f"router: {same.float().mean():.3f} of tokens alike, error {error:.2e}")


def check_shapes() -> None:
    """Random weights in the shapes of V4-Flash, and shapes that need padding."""
    from sglang_dsv4.kernels.reference.moe import moe_experts

    print("V4-Flash shapes, random weights: worst cosine over T", TOKENS)
    for name, (out, width) in (cases.FLASH | PADDED).items():
        layer, weight = cases.random_linear(out, width)
        found = []
        for tokens in TOKENS:
            x = cases.inputs(tokens, width)
            found.append(judge(name, "linear", layer(x)[0], x.float() @ weight.T))
        print(f"  {name:22s} [{out}, {width}] {min(found):.6f}")
    for groups in (8, 1):
        layer, weight = cases.random_grouped(groups, 1024, 4096)
        found = []
        for tokens in (1, 5, 70, 300):
            x = cases.inputs(tokens, groups * 4096).unflatten(1, (groups, 4096))
            wanted = torch.einsum("tgi,goi->tgo", x.float(), weight).flatten(1)
            found.append(judge("o_a_proj", "grouped", layer(x), wanted))
        print(f"  o_a_proj grouped       {groups} x [1024, 4096] {min(found):.6f}")
    for inner in (2048, 256, 96):
        layer, (gate_up, down) = cases.random_experts(16, 4096, inner, nvfp4=True)
        found = []
        for tokens in (1, 5, 70, 300):
            x, topk = cases.inputs(tokens, 4096), cases.random_topk(tokens, 16)
            wanted = moe_experts(x.float(), gate_up, down, topk.topk_weights, topk.topk_ids, 10.0)
            found.append(judge(f"experts {inner}", "experts", layer(x, topk), wanted))
        print(f"  experts, 16 of inner {inner:5d}    {min(found):.6f}")
    layer, _ = cases.random_experts(16, 4096, 256, nvfp4=False)
    x, topk = cases.inputs(70, 4096), cases.random_topk(70, 16)
    weights = layer.w13_weight.float(), layer.w2_weight.float()
    wanted = moe_experts(x.float(), *weights, topk.topk_weights, topk.topk_ids, 10.0)
    print(f"  bf16 experts (Triton)  {judge('bf16 experts', 'plain', layer(x, topk), wanted):.6f}")


def check_speed() -> None:
    """Microseconds of one call, W4A16 | bfloat16, at several T."""
    tokens = (1, 16, 64, 512)
    print("microseconds, 4-bit | bf16, T", tokens)
    names = ("q_a_kv_proj", "q_b_proj", "o_b_proj", "kv_gate_proj csa", "shared.gate_up")
    for name in names:
        out, width = cases.FLASH[name]
        layer, weight = cases.random_linear(out, width)
        weight = weight.bfloat16()
        row = []
        for count in tokens:
            x = cases.inputs(count, width)
            ours = graph_time([lambda x=x, layer=layer: layer(x)], 8)
            rival = graph_time([lambda x=x, w=weight: torch.nn.functional.linear(x, w)], 8)
            row.append(f"{ours:6.1f} | {rival:6.1f}")
        print(f"  {name:18s} [{out}, {width}]  " + "   ".join(row))
    from sglang_dsv4.layers.grouped_linear import grouped_matmul

    layer, weight = cases.random_grouped(8, 1024, 4096)
    weight, row = weight.bfloat16().flatten(0, 1), []
    for count in tokens:
        x = cases.inputs(count, 8 * 4096).unflatten(1, (8, 4096))
        ours = graph_time([lambda x=x, layer=layer: layer(x)], 8)
        rival = graph_time([lambda x=x, w=weight: grouped_matmul(x, w)], 8)
        row.append(f"{ours:6.1f} | {rival:6.1f}")
    print("  o_a_proj           8 x [1024, 4096]  " + "   ".join(row))
    layer, _ = cases.random_experts(256, 4096, 2048, nvfp4=True)
    plain, _ = cases.random_experts(256, 4096, 2048, nvfp4=False)
    row = []
    for count in tokens:
        x, topk = cases.inputs(count, 4096), cases.random_topk(count, 256)
        ours = graph_time([lambda x=x, t=topk, layer=layer: layer(x, t)], 8)
        rival = graph_time([lambda x=x, t=topk, layer=plain: layer(x, t)], 8)
        row.append(f"{ours:6.1f} | {rival:6.1f}")
    print("  experts 256, top-6, 4096 x 2048      " + "   ".join(row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("model", "shapes", "speed", "atomics")
    for part in parts:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    options = parser.parse_args()
    every = not any(getattr(options, part) for part in parts)
    torch.manual_seed(0)
    os.environ.setdefault("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = cases.start(cases.MODEL, options.device)
    from sglang_dsv4.layers.weight_kernels import describe, weight_kernels_of

    kernels = weight_kernels_of(torch.device(options.device))
    print(describe(kernels))
    for part in ("linear", "experts", "grouped"):
        bounds[part] = BOUND[getattr(kernels, part).value]
    bounds["shared"] = bounds["linear"] ** 2
    with torch.no_grad():
        for wanted, part in (
            (options.model or every, lambda: check_model(config)),
            (options.shapes or every, check_shapes),
            (options.speed or every, check_speed),
            (options.atomics or every, ablate_marlin.run),
        ):
            try:
                if wanted:
                    part()
            except Exception:
                traceback.print_exc()
                failures.append("a part stopped with an exception")
    print("failures:", len(failures), *failures[:12], sep="\n  ")
    return 1 if failures else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

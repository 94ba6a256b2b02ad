"""Weight kernels on the GPU against the dequantised weights, and their time against bfloat16.

    python check_weights.py [PART ...] [--of flash pro]     (all parts when none is named)

model: every NVFP4 module of the small model, loaded from its checkpoint, the router and the
experts. linear, experts, plain (bfloat16 experts): random weights in the shapes of V4-Flash, V4-Pro
and their ranks, and shapes that need padding. speed: microseconds from cold L2, one call in a CUDA
graph, beside a bfloat16 product. atomics: see ``ablate_marlin``.
No server is started. Exits with 1 where a cosine is too small. After an illegal access nothing else
runs in the same process, so a first run takes one for each part.
"""

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable
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
BOUND = {"dequant": 0.9999, "marlin": 0.9999, "triton": 0.9999, "flashinfer": 0.99}
TOKENS = (1, 5, 70)
TIMED = (1, 16, 64, 256, 4096)
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


def check_linear(name: str) -> None:
    """Random weights in the shapes of a published model's linear layers and of its ranks'."""
    print(f"{name}, random weights, linear: worst cosine over T {TOKENS}")
    for part, (out, width) in (cases.MODELS[name].linear | PADDED).items():
        print(f"  {part:22s} [{out}, {width}] {linear_cosine(part, out, width):.6f}", flush=True)


def check_experts(name: str) -> None:
    """Sixteen experts, whole, one rank's of eight, and a width that needs padding."""
    model = cases.MODELS[name]
    for inner in (model.inner, model.inner // 8, 96):
        value = experts_cosine(model.hidden, inner)
        print(f"{name}, 16 experts [{model.hidden}, {inner}] {value:.6f}", flush=True)


def linear_cosine(name: str, out: int, width: int) -> float:
    """Worst cosine of one linear layer over ``TOKENS``."""
    layer, weight = cases.random_linear(out, width)
    found = []
    for tokens in TOKENS:
        x = cases.inputs(tokens, width)
        found.append(judge(name, "linear", layer(x)[0], x.float() @ weight.T))
    return min(found)


def experts_cosine(hidden: int, inner: int) -> float:
    """Worst cosine of 16 experts over ``TOKENS`` and 300."""
    from sglang_dsv4.kernels.reference.moe import moe_experts

    layer, (gate_up, down) = cases.random_experts(16, hidden, inner, nvfp4=True)
    found = []
    for tokens in (*TOKENS, 300):
        x, topk = cases.inputs(tokens, hidden), cases.random_topk(tokens, 16)
        wanted = moe_experts(x.float(), gate_up, down, topk.topk_weights, topk.topk_ids, 10.0)
        found.append(judge(f"experts {inner}", "experts", layer(x, topk), wanted))
    return min(found)


def check_plain(name: str) -> None:
    """bfloat16 experts on SGLang's Triton kernels."""
    from sglang_dsv4.kernels.reference.moe import moe_experts

    hidden = cases.MODELS[name].hidden
    layer, _ = cases.random_experts(16, hidden, 256, nvfp4=False)
    x, topk = cases.inputs(70, hidden), cases.random_topk(70, 16)
    weights = layer.w13_weight.float(), layer.w2_weight.float()
    wanted = moe_experts(x.float(), *weights, topk.topk_weights, topk.topk_ids, 10.0)
    value = judge("bf16 experts", "plain", layer(x, topk), wanted)
    print(f"{name}, 16 bf16 experts (Triton) {value:.6f}", flush=True)


def check_speed(name: str) -> None:
    """Microseconds of one call, 4 bits | bfloat16, at several T."""
    model = cases.MODELS[name]
    print(f"{name}: microseconds, 4 bits | bf16, T {TIMED}")
    for part, (out, width) in model.linear.items():
        layer, weight = cases.random_linear(out, width)
        plain = weight.bfloat16()
        row = [
            both(
                functools.partial(layer, x), functools.partial(torch.nn.functional.linear, x, plain)
            )
            for x in (cases.inputs(count, width) for count in TIMED)
        ]
        print(f"  {part:20s} [{out}, {width}]".ljust(40) + "   ".join(row))
    inner = model.inner // model.expert_ranks
    packed, _ = cases.random_experts(model.experts, model.hidden, inner, nvfp4=True)
    wide, _ = cases.random_experts(model.experts, model.hidden, inner, nvfp4=False)
    row = []
    for count in TIMED:
        x, topk = cases.inputs(count, model.hidden), cases.random_topk(count, model.experts)
        row.append(both(functools.partial(packed, x, topk), functools.partial(wide, x, topk)))
    print(f"  experts {model.experts} of inner {inner}, top-6".ljust(40) + "   ".join(row))


def both(ours: Callable, rival: Callable) -> str:
    """The two times side by side."""
    return f"{graph_time([ours], 8):6.1f} | {graph_time([rival], 8):6.1f}"


PARTS: dict[str, Callable[[str], None]] = {
    "linear": check_linear,
    "experts": check_experts,
    "plain": check_plain,
    "speed": check_speed,
}
ALL = ("model", *PARTS, "atomics")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(ALL))
    parser.add_argument("--of", choices=cases.MODELS, nargs="+", default=list(cases.MODELS))
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    options = parser.parse_args()
    parts = options.parts or ALL
    torch.manual_seed(0)
    os.environ.setdefault("SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = cases.start(cases.MODEL, options.device)
    from sglang_dsv4.layers.weight_kernels import describe, weight_kernels_of

    kernels = weight_kernels_of(torch.device(options.device))
    print(describe(kernels))
    for part in ("linear", "experts"):
        bounds[part] = BOUND[getattr(kernels, part).value]
    bounds["shared"] = bounds["linear"] ** 2
    calls = [functools.partial(PARTS[p], name) for p in PARTS if p in parts for name in options.of]
    calls += [functools.partial(check_model, config)] if "model" in parts else []
    calls += [ablate_marlin.run] if "atomics" in parts else []
    with torch.no_grad():
        for call in calls:
            try:
                call()
            except Exception:
                traceback.print_exc()
                failures.append("a part stopped with an exception")
    print("failures:", len(failures), *failures[:12], sep="\n  ")
    return 1 if failures else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

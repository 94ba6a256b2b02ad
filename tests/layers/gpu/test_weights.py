"""NVFP4 layers on the GPU, built and loaded as SGLang does, against the dequantised weights.

The device's own kernels, and Marlin beside them on sm_90. No server is started. After an illegal
access nothing else runs in the same process.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent))

import weight_cases as cases

from sglang_dsv4.envs import PREFILL, REFERENCE_ON_GPU, WEIGHT_KERNEL
from sglang_dsv4.kernels.reference.moe import moe_experts
from sglang_dsv4.layers.weight_kernels import weight_kernels

DEFAULT = weight_kernels(torch.cuda.get_device_capability()).linear.value
HOPPER = DEFAULT == "cutedsl"
# SGLang compiles its modules on first use, for minutes.
MARLIN = pytest.param(("marlin", False), marks=pytest.mark.slow)
# bfloat16 rounding of operands and result (2^-9 each) leaves 1 - cosine below 1e-5, Marlin's outer
# scale and atomics in bfloat16 more; quantised activations (W4A4) are off by a tenth: 0.1^2 / 2.
COSINE = {"cutedsl": 0.99999, "marlin": 0.9999, "plain": 0.9999, "flashinfer": 0.99}
# Operands of 4 significant bits: 0.9994 and 0.9982 in the reference's arithmetic on these weights.
FP8_LINEAR, FP8_EXPERTS = 0.999, 0.997
SIZE = {"flashinfer": 0.1}
FP8_TOKENS = 512
TOKENS = (1, 5, 64, 70, 513)
ODD = {"weights_proj, small": (8, 256), "odd in": (192, 96), "odd both": (40, 4176)}
HOSTILE = [(1, 16), (35, 80), (65, 1040), (16, 48), (2064, 4176)]
LINEAR = [
    pytest.param(*shape, id=f"{name} {part}")
    for name, model in cases.MODELS.items()
    for part, shape in (model.linear | ODD).items()
]
EXPERTS = [
    (model.hidden, inner)
    for model in cases.MODELS.values()
    for inner in (model.inner, model.inner // 8, 96)
]
only_hopper = pytest.mark.skipif(not HOPPER, reason="cutedsl is the default on sm_90 only")


@pytest.fixture(scope="module")
def hf_config():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(REFERENCE_ON_GPU.name, "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv(WEIGHT_KERNEL.name, raising=False)
        config = cases.start(cases.MODEL, "cuda")
        yield config
    cases.stop()


@pytest.fixture(autouse=True)
def on_gpu(hf_config):
    with torch.device("cuda"), torch.no_grad():
        yield


@pytest.fixture(
    params=[(DEFAULT, False), *([("cutedsl", True), MARLIN] if HOPPER else [])],
    ids=lambda choice: f"{choice[0]}{' fp8' if choice[1] else ''}",
)
def choice(request, monkeypatch) -> tuple[str, bool]:
    """A kernel, and whether it multiplies large batches in FP8."""
    kernel, fp8 = request.param
    monkeypatch.setenv(WEIGHT_KERNEL.name, kernel)
    monkeypatch.setenv(PREFILL.name, "fp8" if fp8 else "bf16")
    return request.param


def assert_near(ours: torch.Tensor, wanted: torch.Tensor, kernel: str, fp8: float = 0.0) -> None:
    """Direction and size; ``fp8`` is the least cosine where operands are rounded to e4m3."""
    value = cases.cosine(ours, wanted)
    size = float(ours.double().norm() / wanted.double().norm())
    assert value >= (fp8 or COSINE[kernel]), f"cosine {value:.7f}"
    assert abs(size - 1) < (0.05 if fp8 else SIZE.get(kernel, 0.01)), f"size {size:.4f}"


def total(parts: torch.Tensor) -> torch.Tensor:
    """The sum over a token's experts, which some kernels leave to the caller: float32 [T, D]."""
    return parts.float().sum(1) if parts.dim() == 3 else parts.float()


def experts_in_fp8(fp8: bool, slots: int, experts: int) -> float:
    """The least cosine of so many rows, 0 where they are multiplied in bfloat16."""
    from sglang_dsv4.layers.experts_prefill import ROWS_WORTH

    return FP8_EXPERTS if fp8 and slots >= ROWS_WORTH[True] * experts else 0.0


@pytest.mark.parametrize(("out", "width"), LINEAR)
def test_linear(choice, out, width):
    kernel, fp8 = choice
    layer, weight = cases.random_linear(out, width, fp8)
    for tokens in TOKENS:
        x = cases.inputs(tokens, width)
        in_fp8 = fp8 and tokens > FP8_TOKENS and out % 16 == 0
        wanted = x.float() @ weight.T
        assert_near(layer(x)[0], wanted, kernel, FP8_LINEAR if in_fp8 else 0.0)


@only_hopper
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 600])
@pytest.mark.parametrize(("out", "width"), [*HOSTILE, (1536, 4096)])
def test_hostile_linear(out, width, tokens, fp8):
    """Ragged shapes; a largest, a smallest and zero block scales; rows of a wider NaN matrix; a row
    of zeros, a huge, a tiny and a broken one, none of which changes another."""
    layer, weight = cases.random_linear(out, width, fp8, hostile=True)
    x = torch.full((tokens, width + 8), float("nan"), dtype=cases.BF16)[:, :width]
    x.copy_(cases.inputs(tokens, width))
    inputs = x.float()
    wanted = inputs @ weight.T
    sound = layer(x)[0]
    assert sound.isfinite().all()
    if tokens < 5:
        assert_near(sound, wanted, "cutedsl")
        return
    # Another tensor of the same memory: quantised rows are kept with the one that they are of.
    x = x[:]
    x[1] = 0
    x[2] *= 2.0**40
    x[3] *= 2.0**-40
    x[4, width // 2] = float("nan")
    found, whole = layer(x)[0], torch.ones(tokens, dtype=torch.bool)
    assert not found[1].any() and found[4].isnan().all()
    whole[1:5] = False
    assert torch.equal(found[whole], sound[whole])
    in_fp8 = FP8_LINEAR if fp8 and tokens > FP8_TOKENS and out % 16 == 0 else 0.0
    # One output of a row is a single number; the cosine of a column of them says more.
    assert_near(found[whole], wanted[whole], "cutedsl", in_fp8)
    for row, factor in ((2, 2.0**40), (3, 2.0**-40)) if out > 1 else ():
        ours = found[row].double() / factor
        if in_fp8:
            # Each operand is off by 2^-4 of itself at most, a product by less than 0.13: as much
            # of the sum of magnitudes, which is all that 48 columns that cancel allow.
            terms = inputs[row].abs() @ weight.abs().T
            assert (ours - wanted[row]).norm() < 0.13 * terms.norm()
        else:
            assert_near(ours, wanted[row], "cutedsl")


@pytest.mark.parametrize(("hidden", "inner"), EXPERTS)
def test_experts(choice, hidden, inner):
    """Whole, a rank of eight's, and a width that is padded; the last batch is a large prefill's."""
    kernel, fp8 = choice
    layer, (gate_up, down) = cases.random_experts(16, hidden, inner, fp8=fp8)
    for tokens in (1, 5, 70, 300, 1100):
        x, topk = cases.inputs(tokens, hidden), cases.random_topk(tokens, 16)
        wanted = moe_experts(x.float(), gate_up, down, topk.topk_weights, topk.topk_ids, 10.0)
        bound = experts_in_fp8(fp8, topk.topk_ids.numel(), 16)
        assert_near(total(layer(x, topk)), wanted, kernel, bound)


@only_hopper
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [30, 1100])
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 256), (192, 96), (128, 16)])
def test_hostile_experts(hidden, inner, tokens, fp8):
    """Gate and up with outer scales of their own, hostile block scales, slots and tokens without an
    expert, an expert without tokens, and a broken row, which changes no other."""
    layer, (gate_up, down) = cases.random_experts(16, hidden, inner, fp8=fp8, hostile=True)
    x, topk = cases.inputs(tokens, hidden), cases.random_topk(tokens, 16)
    ids = topk.topk_ids
    ids[ids == 2] = 3
    ids[5:9] = -1
    ids[9, 1] = -1
    weights = topk.topk_weights.masked_fill(ids < 0, 0.0)
    wanted = moe_experts(x.float(), gate_up, down, weights, ids.clamp(min=0), 10.0)
    sound = layer(x, topk)
    if sound.dim() == 3:
        assert sound.shape == (tokens, 6, hidden) and not sound[ids < 0].any()
    assert not total(sound)[5:9].any()
    assert_near(total(sound), wanted, "cutedsl", experts_in_fp8(fp8, ids.numel(), 16))
    x = x.clone()
    x[20, 7] = float("nan")
    found, others = layer(x, topk), torch.arange(tokens) != 20
    assert found[20].isnan().all()
    assert torch.equal(found[others], sound[others])


@only_hopper
@pytest.mark.parametrize("tokens", [1, 30, 1100])
def test_all_tokens_to_the_same_experts(tokens):
    layer, (gate_up, down) = cases.random_experts(16, 1024, 128)
    x, topk = cases.inputs(tokens, 1024), cases.random_topk(tokens, 16)
    topk.topk_ids.copy_(torch.arange(6, dtype=torch.int32))
    wanted = moe_experts(x.float(), gate_up, down, topk.topk_weights, topk.topk_ids, 10.0)
    assert_near(total(layer(x, topk)), wanted, "cutedsl")


@only_hopper
def test_decode_is_captured_without_a_call_before():
    """Loading has compiled what any decode batch takes."""
    linear, _ = cases.random_linear(1536, 4096)
    experts, _ = cases.random_experts(16, 4096, 256)
    for tokens in (1, 2, 3, 9, 17, 33, 48, 64):
        x, topk = cases.inputs(tokens, 4096), cases.random_topk(tokens, 16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, parts = linear(x)[0], experts(x, topk)
        out.fill_(float("nan"))
        parts.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, linear(x)[0])
        assert torch.equal(parts, experts(x, topk))


def test_plain_experts():
    """bfloat16 experts on SGLang's Triton kernels."""
    layer, _ = cases.random_experts(16, 4096, 256, nvfp4=False)
    x, topk = cases.inputs(70, 4096), cases.random_topk(70, 16)
    weights = layer.w13_weight.float(), layer.w2_weight.float()
    wanted = moe_experts(x.float(), *weights, topk.topk_weights, topk.topk_ids, 10.0)
    assert_near(total(layer(x, topk)), wanted, "plain")


@pytest.fixture
def small_model(choice, hf_config) -> SimpleNamespace:
    """The embedded model as loaded, and the float32 weights that it had before."""
    from safetensors import safe_open
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from sglang_dsv4.layers.nvfp4_linear import Nvfp4LinearMethod
    from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM

    with set_default_torch_dtype(cases.BF16):
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
    return SimpleNamespace(dims=model.model.dims, modules=modules, linear=linear, experts=experts)


def test_the_small_model(choice, small_model):
    """Every NVFP4 module, the grouped projection, the router, the experts and the shared one."""
    from sglang_dsv4.layers.grouped_linear import GroupedLinear
    from sglang_dsv4.models.moe import MoE

    kernel, fp8 = choice
    modules, linear = small_model.modules, small_model.linear
    assert len(linear) >= 6 * 5 and len(small_model.experts) == 6
    for name, weight in linear.items():
        for tokens in TOKENS:
            x = cases.inputs(tokens, weight.shape[1])
            in_fp8 = fp8 and tokens > FP8_TOKENS and weight.shape[0] % 16 == 0
            wanted = x.float() @ weight.T
            assert_near(modules[name](x)[0], wanted, kernel, FP8_LINEAR if in_fp8 else 0.0)
    for name, module in modules.items():
        if isinstance(module, GroupedLinear):
            blocks = module.weight.float().unflatten(0, (-1, module.o_lora_rank))
            x = cases.inputs(5, blocks.shape[0] * blocks.shape[2])
            x = x.unflatten(1, (blocks.shape[0], -1))
            wanted = torch.einsum("tgi,goi->tgo", x.float(), blocks).flatten(1)
            assert_near(module(x), wanted, "plain")
        if isinstance(module, MoE):
            check_moe(name, module, small_model, kernel, fp8)


def check_moe(name: str, module: Any, model: SimpleNamespace, kernel: str, fp8: bool) -> None:
    """One layer's router, experts and shared expert."""
    x, ids = cases.inputs(1100, model.dims.hidden_size), torch.arange(1100) * 7
    ids %= model.dims.vocab_size
    topk = module.gate(x, ids)
    check_router(module.gate, x, ids, topk)
    gate_up, down = model.experts[f"{name}.experts"]
    for tokens in (1, 5, 70, 1100):
        part = topk._replace(
            topk_weights=topk.topk_weights[:tokens].contiguous(),
            topk_ids=topk.topk_ids[:tokens].contiguous(),
            router_logits=topk.router_logits[:tokens],
        )
        rows = x[:tokens]
        wanted = moe_experts(rows.float(), gate_up, down, part.topk_weights, part.topk_ids, 10.0)
        bound = experts_in_fp8(fp8, part.topk_ids.numel(), len(down))
        assert_near(total(module.experts(rows, part)), wanted, kernel, bound)
    shared = [model.linear[f"{name}.shared_experts.{p}"] for p in ("gate_up_proj", "down_proj")]
    gate, up = (x[:70].float() @ shared[0].T).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    value = cases.cosine(module.shared_experts(x[:70]), hidden @ shared[1].T)
    assert value >= COSINE[kernel] ** 2


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
    assert same.float().mean() >= 0.97
    assert error < 1e-4

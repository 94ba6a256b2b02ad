"""The Blackwell glue: activation scales, and the signatures of what is called. No such GPU is here.

SGLang's own methods run on the CPU with its FP4 quantiser and product replaced by plain torch.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from conftest import nvfp4
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmRunnerBackend

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.reference.nvfp4 import (
    dequantize_nvfp4,
    dequantize_weight,
    quantize_nvfp4,
)
from sglang_dsv4.layers import flashinfer_fp4
from sglang_dsv4.layers.flashinfer_fp4 import (
    FlashInferLinearMethod,
    FlashInferModelOptMoEMethod,
    scale_of_call,
    usable,
)

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def blackwell(monkeypatch):
    """SGLang's ModelOpt methods believe that they run on sm_120."""
    platform = SimpleNamespace(is_blackwell=True, is_sm100=False, is_sm120=True)
    monkeypatch.setattr(modelopt_quant, "get_platform", lambda: platform)
    backend = Fp4GemmRunnerBackend.FLASHINFER_CUTLASS
    monkeypatch.setattr(modelopt_quant, "get_fp4_gemm_runner_backend", lambda: backend)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, -1.0])
def test_faulty_scales_are_seen(value):
    assert usable(torch.tensor([1e-6, value])).tolist() == [True, False]


def test_the_scale_of_a_call_spans_its_values():
    x = torch.tensor([[0.5, -13.0], [2.0, 0.0]]).bfloat16()
    assert scale_of_call(x).item() == pytest.approx(13.0 / (6 * 448))
    assert scale_of_call(torch.zeros(2, 2)).item() > 0


@pytest.mark.parametrize("scale", [NAN, 0.0, INF, None], ids=str)
def test_a_linear_layer_quantises_by_a_usable_scale(blackwell, monkeypatch, scale):
    """None: the checkpoint's own scale, half of what the values of the call would give."""
    weight, block = nvfp4(64, 96)
    block = torch.exp2(torch.rand(block.shape) * 8).to(block.dtype)
    outer = torch.tensor(0.01)
    x = (torch.randn(7, 96) * 3).bfloat16()
    given = scale_of_call(x).item() * 2 if scale is None else scale
    method, layer = FlashInferLinearMethod(), torch.nn.Module()
    method.create_weights(layer, 96, [64], 96, 64, torch.bfloat16, weight_loader=None)
    for name, value in (("weight", weight), ("weight_scale", block)):
        getattr(layer, name).data.copy_(value)
    layer.weight_scale_2.data.fill_(outer)
    layer.input_scale.data.fill_(given)
    method.process_weights_after_loading(layer)
    dense = dequantize_weight(weight, block, torch.tensor(1.0))
    inverses = []

    def fp4_quantize(values, inverse):
        inverses.append(float(inverse))
        return quantize_nvfp4(values.float() * inverse)

    def fp4_gemm(values, w, scales, w_scales, alpha, dtype, out):
        assert out == 64
        return (alpha * dequantize_nvfp4(values, scales) @ dense.T).to(dtype)

    monkeypatch.setattr(modelopt_quant, "fp4_quantize", fp4_quantize)
    monkeypatch.setattr(modelopt_quant, "fp4_gemm", fp4_gemm)
    for factor in (1.0, 1e-3):
        found = method.apply(layer, x * factor).float()
        wanted = (x * factor).float() @ (dense * outer).T
        cosine = torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0)
        # Four bits are off by a tenth of the values: 1 - 0.1^2 / 2. A calibrated scale keeps small
        # activations on e4m3's subnormals, which costs more.
        assert cosine > (0.99 if scale is not None or factor == 1 else 0.9)
    expected = [given, given] if scale is None else [scale_of_call(x * f) for f in (1.0, 1e-3)]
    assert inverses == pytest.approx([1 / float(e) for e in expected], rel=1e-5)


@pytest.fixture
def experts(monkeypatch):
    """Makes an experts method for a runner, its stock half replaced by a recorder."""

    def make(runner: str) -> FlashInferModelOptMoEMethod:
        backend = SimpleNamespace(value=runner)
        monkeypatch.setattr(flashinfer_fp4, "get_moe_runner_backend", lambda: backend)
        stock = modelopt_quant.ModelOptNvFp4FusedMoEMethod

        def init(self, config):
            self.quant_config = config
            self.enable_flashinfer_trtllm_moe = "trtllm" in runner

        monkeypatch.setattr(stock, "__init__", init)
        monkeypatch.setattr(stock, "process_weights_after_loading", lambda self, layer: None)
        return FlashInferModelOptMoEMethod(runner)

    return make


def layer_with(w13: list, w2: list) -> SimpleNamespace:
    return SimpleNamespace(
        w13_input_scale=torch.nn.Parameter(torch.tensor(w13)),
        w2_input_scale=torch.nn.Parameter(torch.tensor(w2)),
    )


def test_an_expert_that_saw_no_token_takes_the_largest_scale(experts):
    method = experts("flashinfer_cutlass")
    layer = layer_with([[0.5, 0.5], [NAN, 0.0], [0.25, 0.25]], [0.1, INF, 0.2])
    method.process_weights_after_loading(layer)
    assert layer.w13_input_scale.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.25, 0.25]]
    torch.testing.assert_close(layer.w2_input_scale.data, torch.tensor([0.1, 0.2, 0.2]))
    assert not method.quant_config.use_per_token_activation


def test_without_any_scale_tokens_are_scaled_one_by_one(experts):
    method = experts("flashinfer_trtllm_routed")
    layer = layer_with([[NAN, NAN]], [NAN])
    method.process_weights_after_loading(layer)
    assert method.quant_config.use_per_token_activation
    assert layer.w13_input_scale.tolist() == [[1.0, 1.0]]
    with pytest.raises(UnsupportedError, match=r"No expert .* usable w13_input_scale, wanted one"):
        experts("flashinfer_cutlass").process_weights_after_loading(layer_with([[NAN, 0.0]], [0.1]))


def test_another_runner_is_refused(monkeypatch):
    backend = SimpleNamespace(value="flashinfer_mxfp4")
    monkeypatch.setattr(flashinfer_fp4, "get_moe_runner_backend", lambda: backend)
    wanted = r"is flashinfer_mxfp4, wanted flashinfer_cutlass .* pass --moe-runner-backend"
    with pytest.raises(UnsupportedError, match=wanted):
        FlashInferModelOptMoEMethod("flashinfer_cutlass")


def test_sglangs_loader_knows_the_class():
    """It tells ModelOpt's layout by the class's name, and per-tensor scales by its base class."""
    assert "ModelOpt" in FlashInferModelOptMoEMethod.__name__
    assert issubclass(FlashInferModelOptMoEMethod, modelopt_quant.ModelOptNvFp4FusedMoEMethod)


def parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_flashinfer_takes_what_sglang_passes():
    """SGLang's calls, by its source, bind to the installed FlashInfer."""
    flashinfer = pytest.importorskip("flashinfer")
    from flashinfer import fused_moe

    inspect.signature(flashinfer.mm_fp4).bind(0, 1, 2, 3, 4, torch.bfloat16, backend="cutlass")
    assert {"global_scale", "sf_vec_size", "is_sf_swizzled_layout"} <= parameters(
        flashinfer.fp4_quantize
    )
    assert {"per_token_activation", "sfLayout"} <= parameters(flashinfer.nvfp4_quantize)
    assert {
        "topk_ids",
        "gemm1_clamp_limit",
        "per_token_scale",
        "output2_scale_scalar",
    } <= parameters(fused_moe.trtllm_fp4_block_scale_routed_moe)
    assert {
        "token_selected_experts",
        "token_final_scales",
        "quant_scales",
        "swiglu_limit",
    } <= parameters(fused_moe.cutlass_fused_moe)


def test_sglangs_methods_are_those_that_we_extend():
    for base in (modelopt_quant.ModelOptFp4LinearMethod, FlashInferLinearMethod):
        assert list(inspect.signature(base.apply).parameters) == ["self", "layer", "x", "bias"]
    stock = modelopt_quant.ModelOptNvFp4FusedMoEMethod
    assert list(inspect.signature(stock.apply).parameters) == ["self", "layer", "dispatch_output"]
    assert list(inspect.signature(stock.__init__).parameters) == ["self", "quant_config"]

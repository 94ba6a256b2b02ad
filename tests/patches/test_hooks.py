"""Each hook hands through what is not ours, untouched; what is ours it changes as it says."""

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dsv4.errors import CheckpointError, UnsupportedError
from sglang_dsv4.layers.weight_kernels import weight_kernels
from sglang_dsv4.patches import model_runner, registry, scheduler, server_args

STRANGERS = {
    "another architecture": SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "stock's FP8 DeepSeek-V4": SimpleNamespace(
        architectures=["DeepseekV4ForCausalLM"], quantization_config={"quant_method": "fp8"}
    ),
    "no architecture": SimpleNamespace(architectures=None),
}
OURS = SimpleNamespace(
    architectures=["DeepseekV4ForCausalLM"],
    quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"},
)


def holder(hf_config: SimpleNamespace) -> SimpleNamespace:
    """Stands for the ModelConfig, and for anything that has a ``model_config``."""
    model_config = SimpleNamespace(hf_config=hf_config)
    return SimpleNamespace(hf_config=hf_config, model_config=model_config, is_hybrid_swa=True)


# Target -> arguments of the original, given the holder of a config.
CASES = {
    "sglang.srt.arg_groups.overrides._deepseek_v4_kv_cache_dtype": lambda h: ((h,), {}),
    "sglang.srt.managers.scheduler.Scheduler.__init__": lambda h: ((h, "args"), {"port_args": 1}),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_dsv4_kv_pool": (
        lambda h: ((h,), {"max_running_requests": 3, "req_to_token_pool": None})
    ),
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": lambda h: ((h,), {}),
    "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator": (
        lambda h: ((h,), {})
    ),
    "sglang.srt.model_loader.loader._get_quantization_config": lambda h: ((h, "load config"), {}),
    "sglang.srt.model_loader.utils.get_model_architecture": lambda h: ((h,), {}),
    "sglang.srt.utils.hf_transformers.config.get_config": (
        lambda h: (("no/such/model", False), {"revision": "main", "extra": 5})
    ),
}


def test_every_hook_has_a_case():
    around = {p.target for p in registry.all_patches() if p.kind is HookType.AROUND}
    assert set(CASES) == around


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS.keys())
@pytest.mark.parametrize("patch", registry.all_patches(), ids=lambda patch: patch.target)
def test_what_is_not_ours_passes_through(monkeypatch, patch, stranger):
    monkeypatch.setattr(server_args, "model_config_of", lambda view: view.model_config)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    args, kwargs = CASES[patch.target](holder(stranger))
    calls = []

    def original(*given, **named):
        calls.append((given, named))
        return stranger

    returned = patch.hook(original, *args, **kwargs)
    assert len(calls) == 1
    assert all(a is b for a, b in zip(calls[0][0], args, strict=True))
    assert calls[0][1] == kwargs
    if patch.target != "sglang.srt.managers.scheduler.Scheduler.__init__":
        assert returned is stranger


def test_weights_of_ours_are_not_loaded_by_a_half_patched_sglang(monkeypatch, capsys):
    monkeypatch.setattr(HookRegistry, "_patched", set())
    with pytest.raises(SystemExit) as stopped:
        model_runner.around_load_model(lambda self: pytest.fail("loaded"), holder(OURS))
    assert stopped.value.code == 2
    assert "is not fully applied" in capsys.readouterr().err


def test_weights_of_ours_are_loaded_when_all_is_applied(monkeypatch):
    applied = {patch.target for patch in registry.all_patches()}
    monkeypatch.setattr(HookRegistry, "_patched", applied)
    assert model_runner.around_load_model(lambda self: self, holder(OURS)).hf_config is OURS


def failing(error: Exception):
    def original(self) -> None:
        raise error

    return original


def test_an_error_of_ours_ends_the_scheduler_in_one_sentence(capsys):
    error = CheckpointError("model.safetensors is cut short,\nwanted 8 bytes: fetch it again.")
    with pytest.raises(SystemExit) as stopped:
        scheduler.around_init(failing(error), holder(OURS))
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "model.safetensors is cut short, wanted 8 bytes: fetch it again.\n"
    )


def test_any_other_error_stays_as_it_is():
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.around_init(failing(RuntimeError("out of memory")), holder(OURS))


def test_stock_options_of_other_models_are_not_overridden(monkeypatch):
    monkeypatch.setattr(server_args, "resolving_view", lambda args: args)
    cpu = SimpleNamespace(device="cpu", moe_runner_backend="auto")
    for stranger in STRANGERS.values():
        assert server_args.backend_override(cpu, stranger) == {}
    assert server_args.backend_override(cpu, OURS) == {"attention_backend": "dsv4_nvfp4"}


@pytest.mark.parametrize(("asked", "chosen"), [("auto", "marlin"), ("triton", None)])
def test_the_moe_runner_of_ours_on_a_gpu(monkeypatch, asked, chosen):
    monkeypatch.setattr(server_args, "resolving_view", lambda args: args)
    monkeypatch.setattr(server_args, "weight_kernels_of", lambda device: weight_kernels((9, 0)))
    gpu = SimpleNamespace(device="cuda", moe_runner_backend=asked)
    assert server_args.backend_override(gpu, OURS).get("moe_runner_backend") == chosen


class Arguments(SimpleNamespace):
    """Stands for ServerArgs during resolution."""

    def __init__(self, hf_config: SimpleNamespace, prefill: str, locked: bool) -> None:
        config = CudaGraphConfig()
        config.prefill.backend = prefill
        super().__init__(
            model_config=SimpleNamespace(hf_config=hf_config),
            cuda_graph_config=config,
            _cuda_graph_config_locked={("prefill", "backend")} if locked else set(),
        )


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What hooks declare; views and declarations of the arguments are the arguments themselves."""
    found: dict = {}
    monkeypatch.setattr(server_args, "model_config_of", lambda args: args.model_config)
    monkeypatch.setattr(server_args, "resolving_view", lambda args: args)
    monkeypatch.setattr(
        server_args, "declare_resolution", lambda args, source, **fields: found.update(fields)
    )
    return found


def test_prefill_of_ours_gets_no_cuda_graph(declared):
    server_args.run_prefill_eagerly(Arguments(OURS, "breakable", False), lambda args: None)
    assert declared["cuda_graph_config"].prefill.backend == "disabled"
    assert declared["cuda_graph_config"].decode.backend == CudaGraphConfig().decode.backend


def test_a_prefill_graph_that_was_asked_for_is_refused(declared):
    with pytest.raises(UnsupportedError, match="prefill are breakable, wanted disabled"):
        server_args.run_prefill_eagerly(Arguments(OURS, "breakable", True), lambda args: None)


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS.keys())
def test_prefill_graphs_of_others_stay(declared, stranger):
    calls = []
    server_args.run_prefill_eagerly(Arguments(stranger, "breakable", True), calls.append)
    assert len(calls) == 1
    assert declared == {}

"""sglang/srt/arg_groups: the KV cache dtypes and the attention backend of this plugin."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import (
    _MODEL_OVERRIDE_FNS,
    model_config_of,
    register_model_override,
    resolving_view,
)
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from sglang_dsv4.attention.backend import BACKEND_NAME
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers.weight_kernels import weight_kernels_of
from sglang_dsv4.model_source import ARCHITECTURE, serves
from sglang_dsv4.patches.patch import Patch


def around_kv_cache_dtype(original: Callable, view: Any) -> dict[str, Any]:
    """``auto`` becomes nvfp4, ``bf16`` bfloat16; the checkpoint's ``kv_cache_scheme`` is a hint.

    Raises:
        UnsupportedError: another dtype was asked for.
    """
    if not serves(model_config_of(view).hf_config):
        return original(view)
    chosen = KVFormat.from_option(view.kv_cache_dtype).value
    return {} if chosen == view.kv_cache_dtype else {"kv_cache_dtype": chosen}


def skip_nvfp4_rules(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Stock's NVFP4 rules are about its multi-head pools and SM100 kernels, not about ours."""
    if resolving_view(server_args).kv_cache_dtype == "nvfp4" and serves(
        model_config_of(server_args).hf_config
    ):
        return
    previous(server_args)


def backend_override(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """For what we serve: our attention backend, and the MoE runner of our weight kernels.

    Stock would take ``dsv4`` and, on a GPU, a runner for MXFP4 experts.
    """
    if not serves(hf_config):
        return {}
    view = resolving_view(server_args)
    chosen = {"attention_backend": BACKEND_NAME}
    if view.device == "cuda" and view.moe_runner_backend == "auto":
        runner = weight_kernels_of(torch.device("cuda")).experts_runner
        if runner is not None:
            chosen["moe_runner_backend"] = runner
    return chosen


def load_one_shard_at_a_time(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Stock reads up to nine shards at once; memory shall stay at the weights and one shard.

    A ``--model-loader-extra-config`` of the user's is left as it is.
    """
    previous(server_args)
    if resolving_view(server_args).model_loader_extra_config == "{}" and serves(
        model_config_of(server_args).hf_config
    ):
        extra = '{"enable_multithread_load": false}'
        declare_resolution(server_args, "sglang_dsv4", model_loader_extra_config=extra)


def run_prefill_eagerly(server_args: Any, previous: Callable[[Any], None]) -> None:
    """A prefill's shapes follow its lengths, so no CUDA graph is captured for it.

    Raises:
        UnsupportedError: one was asked for.
    """
    previous(server_args)
    config = resolving_view(server_args).cuda_graph_config
    if config.prefill.backend == Backend.DISABLED or not serves(
        model_config_of(server_args).hf_config
    ):
        return
    if (Phase.PREFILL, "backend") in server_args._cuda_graph_config_locked:
        raise UnsupportedError(
            f"CUDA graphs for prefill are {config.prefill.backend}, wanted disabled: pass "
            f"--cuda-graph-backend-prefill disabled, or leave the option out."
        )
    eager = with_phase(config, Phase.PREFILL, backend=Backend.DISABLED)
    declare_resolution(server_args, "sglang_dsv4", cuda_graph_config=eager)


def register_overrides() -> None:
    """Register at SGLang's own extension points; the last declaration counts. Idempotent."""
    if backend_override in _MODEL_OVERRIDE_FNS.get(ARCHITECTURE, ()):
        return
    register_model_override(ARCHITECTURE)(backend_override)
    for step in ("handle_nvfp4_prefill_kv_dequant_dtype", "handle_kv4_compatibility"):
        register_resolution_hook(step)(skip_nvfp4_rules)
    register_resolution_hook("handle_load_format")(load_one_shard_at_a_time)
    register_resolution_hook("disable_prefill_cuda_graph_for_deepseek_trtllm_mla")(
        run_prefill_eagerly
    )


PATCHES = (
    Patch(
        target="sglang.srt.arg_groups.overrides._deepseek_v4_kv_cache_dtype",
        hook=around_kv_cache_dtype,
        signature="(view)",
        why="Stock turns auto into fp8_e4m3 for DeepSeek-V4 and asserts that it is fp8_e4m3 or "
        "bfloat16.",
        remove_when="Stock serves DeepSeek-V4 with an NVFP4 latent pool.",
        upstream="https://github.com/sgl-project/sglang/pull/38646",
    ),
)

"""sglang/srt/utils/hf_transformers/config.py: a DeepSeek-V4 config in transformers' form.

Stock ModelConfig reads the flat fields of DeepSeek's own config.json. transformers (and ModelOpt,
which exports through it) writes ``layer_types`` and ``rope_parameters`` and drops the flat ones.
"""

from collections.abc import Callable
from typing import Any

from sglang_dsv4.model_source import open_source, serves
from sglang_dsv4.patches.patch import Patch


def around_get_config(original: Callable, model: str, *args: Any, **kwargs: Any) -> Any:
    """Add the flat fields, as the checkpoint's tensors have them, to a config that we serve.

    Raises:
        ConfigError: config.json lacks what the tensors do not tell.
        CheckpointError: the checkpoint is damaged.
    """
    config = original(model, *args, **kwargs)
    if serves(config):
        config.update(open_source(model).flat_config)
    return config


PATCHES = (
    Patch(
        target="sglang.srt.utils.hf_transformers.config.get_config",
        hook=around_get_config,
        signature="(model, trust_remote_code, revision=None, model_override_args=None, "
        "model_config_parser='auto', **kwargs)",
        why="Stock stops at AttributeError compress_ratios with a config.json that transformers or "
        "ModelOpt wrote.",
        remove_when="SGLang derives compress_ratios, num_hash_layers, topk_method and rope_scaling "
        "from layer_types, mlp_layer_types and rope_parameters.",
    ),
)

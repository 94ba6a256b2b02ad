"""sglang/srt/model_loader: which model class serves a checkpoint, and who reads its quantisation.

SGLang's model registry maps an architecture to one class; whether a checkpoint is ours depends on
its quantisation as well, so the choice is made where SGLang resolves the class.
"""

from collections.abc import Callable
from typing import Any

from sglang_dsv4.model_source import ARCHITECTURE, serves
from sglang_dsv4.patches.patch import Patch


def around_get_model_architecture(original: Callable, model_config: Any) -> tuple[type, str]:
    """Our model class for what we serve; SGLang's notes about the choice are kept."""
    resolved = original(model_config)
    if not serves(model_config.hf_config):
        return resolved
    from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM

    return DeepseekV4ForCausalLM, ARCHITECTURE


def around_get_quantization_config(original: Callable, model_config: Any, load_config: Any) -> Any:
    """None for what we serve: the model reads the quantisation of each module from its tensors."""
    if serves(model_config.hf_config):
        return None
    return original(model_config, load_config)


PATCHES = (
    Patch(
        target="sglang.srt.model_loader.utils.get_model_architecture",
        hook=around_get_model_architecture,
        signature="(model_config)",
        why="Stock's DeepSeek-V4 model knows DeepSeek's key names and FP8 or BF16 attention "
        "weights, and no CPU.",
        remove_when="Stock loads ModelOpt NVFP4 in every linear under transformers' key names.",
    ),
    Patch(
        target="sglang.srt.model_loader.loader._get_quantization_config",
        hook=around_get_quantization_config,
        signature="(model_config, load_config)",
        why="Stock's ModelOpt config takes the ignore list at its word; exports leave o_a_proj in "
        "BF16 without listing it.",
        remove_when="Stock decides the quantisation of a module by its tensors.",
    ),
)

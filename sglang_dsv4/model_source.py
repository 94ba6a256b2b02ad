"""A checkpoint opened once a process: tensors, dimensions, quantisation; and whether it is ours."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang_dsv4.checkpoint.quant import QuantKind, has_input_scales, module_kinds
from sglang_dsv4.checkpoint.reader import Checkpoint
from sglang_dsv4.checkpoint.shapes import check_shapes, layer_kinds, num_hash_layers
from sglang_dsv4.config import ModelDims, flat_config, from_config_dict
from sglang_dsv4.errors import CheckpointError

logger = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV4ForCausalLM"


@dataclass(frozen=True)
class ModelSource:
    """What the model is built from.

    Attributes:
        checkpoint: headers of the checkpoint.
        dims: dimensions, layer kinds as the tensors have them.
        kinds: quantisation of each module, by its name in the checkpoint's canonical style.
        flat_config: the fields of config.json that SGLang reads, in DeepSeek's flat form.
    """

    checkpoint: Checkpoint
    dims: ModelDims
    kinds: Mapping[str, QuantKind]
    flat_config: Mapping[str, Any]

    @property
    def quantized_activations(self) -> bool:
        """Whether the export is made for 4-bit activations too (``has_input_scales``)."""
        return has_input_scales(self.checkpoint, self.kinds)


def serves(hf_config: Any) -> bool:
    """Whether this plugin serves a config: DeepSeek-V4, quantised by ModelOpt NVFP4 or not at all.

    FP8, MXFP4 and the mixed checkpoints with FP8 attention stay with stock SGLang.
    """
    if ARCHITECTURE not in (getattr(hf_config, "architectures", None) or ()):
        return False
    quantization = getattr(hf_config, "quantization_config", None) or {}
    # SGLang rewrites "modelopt" to "modelopt_fp4" in its copy of the config.
    by_modelopt = str(quantization.get("quant_method")).startswith("modelopt")
    return not quantization or (by_modelopt and quantization.get("quant_algo") == "NVFP4")


def checkpoint_dir(model_path: str) -> Path:
    """The local directory of a model path; a hub id is looked up in, or fetched to, the hub cache.

    Raises:
        CheckpointError: there is no such directory, and no such model cached or reachable.
    """
    if Path(model_path).exists():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{model_path} is neither a directory nor a model that can be fetched "
            f"({type(error).__name__}), wanted a checkpoint: correct --model-path."
        ) from error


@lru_cache(maxsize=4)
def open_source(model_path: str) -> ModelSource:
    """Open and check a checkpoint by its headers; warnings are logged once.

    Raises:
        CheckpointError: a file or tensor is missing, damaged or unknown.
        ConfigError: config.json lacks what the tensors do not tell.
    """
    checkpoint = Checkpoint.open(checkpoint_dir(model_path))
    dims, warnings = from_config_dict(
        checkpoint.config, layer_kinds(checkpoint), num_hash_layers(checkpoint)
    )
    for warning in warnings:
        logger.warning(warning)
    kinds = module_kinds(checkpoint)
    check_shapes(checkpoint, dims, kinds)
    return ModelSource(checkpoint, dims, kinds, flat_config(checkpoint.config, dims))

"""From the checkpoint's tensors to the model's parameters, each accounted for.

Tensors arrive one by one from SGLang's iterator. A plain tensor goes straight to its parameter; a
part of a fused module waits for its partners (``layers.quant_config.FUSED_MODULES``), so that their
outer scales can be made equal; a routed expert's goes to its slice of the experts' parameters.
"""

import logging
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dsv4.checkpoint.account import Account
from sglang_dsv4.checkpoint.names import canonical_name
from sglang_dsv4.checkpoint.quant import SCALE_SUFFIXES, QuantKind
from sglang_dsv4.checkpoint.scales import (
    InputScaleReport,
    check_weight_scale,
    reconcile_outer_scales,
)
from sglang_dsv4.layers.quant_config import FUSED_MODULES

if TYPE_CHECKING:
    from sglang_dsv4.model_source import ModelSource

logger = logging.getLogger(__name__)

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)")
_EXPERT_SHARD = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_FUSED_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}


def load_weights(
    model: nn.Module, source: "ModelSource", weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Load ``weights`` (key in the checkpoint's own style, tensor) into ``model``.

    Raises:
        CheckpointError: a tensor is unknown, absent or damaged, or a parameter stays unwritten.
    """
    loader = _Loader(model, source)
    for key, tensor in weights:
        loader.take(key, tensor)
    loader.finish()


class _Loader:
    """One load: where each tensor goes, what still waits, and the account."""

    def __init__(self, model: nn.Module, source: "ModelSource") -> None:
        self.parameters = dict(model.named_parameters())
        self.kinds = source.kinds
        self.skipped = source.checkpoint.skipped
        self.tensors = tensors = source.checkpoint.tensors
        self.account = Account(tensors, self.parameters)
        self.input_scales = InputScaleReport()
        for parameter_name, parameter in self.parameters.items():
            if parameter_name.endswith("input_scale"):
                parameter.data.fill_(float("nan"))
                self.account.derived(parameter_name)
        self.fused = _fused_parts(self.parameters)
        self.waiting: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        self.wanted = {
            part: {
                suffix for suffix in ("weight", *SCALE_SUFFIXES) if f"{part}.{suffix}" in tensors
            }
            for part in self.fused
        }

    def take(self, key: str, tensor: torch.Tensor) -> None:
        """Load one tensor of the checkpoint, or keep it until its partners are there."""
        name = canonical_name(key)
        if name is None or key in self.skipped:
            return
        module, _, suffix = name.rpartition(".")
        if suffix in ("weight_scale", "weight_scale_2"):
            check_weight_scale(key, tensor)
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            self._load_expert(name, tensor, *expert.groups())
        elif module.endswith(".mlp.experts"):
            target = f"{module}.{_FUSED_EXPERTS[suffix]}"
            self._write(target, tensor, _copy_expert_slices)
            self.account.loaded(name, target)
        elif module in self.fused:
            self._collect(module, suffix, tensor)
        else:
            if suffix == "input_scale":
                self.input_scales.usable(module, tensor)
            elif suffix == "weight" and self.kinds.get(module) is QuantKind.NVFP4:
                self._report_if_absent(module)
            self._write(name, tensor)
            self.account.loaded(name, name)

    def finish(self) -> None:
        """Close the account.

        Raises:
            CheckpointError: something is left over on either side.
        """
        self.input_scales.finish()
        logger.info("DeepSeek-V4 weights: %s", self.account.finish())

    def _write(
        self,
        name: str,
        tensor: torch.Tensor,
        default: Callable[[nn.Parameter, torch.Tensor], None] = default_weight_loader,
        *shard: int,
    ) -> None:
        parameter = self.parameters[name]
        if name.endswith(".sinks"):
            rank, heads = get_parallel().attn_tp_rank, parameter.shape[0]
            tensor = tensor[rank * heads : (rank + 1) * heads]
        getattr(parameter, "weight_loader", default)(parameter, tensor, *shard)

    def _load_expert(
        self, name: str, tensor: torch.Tensor, experts: str, index: str, part: str, suffix: str
    ) -> None:
        shard = _EXPERT_SHARD[part]
        target = f"{experts}.{'w2' if shard == 'w2' else 'w13'}_{suffix}"
        module = name.rpartition(".")[0]
        if suffix == "input_scale":
            self.input_scales.usable(module, tensor)
        elif suffix == "weight" and self.kinds[module] is QuantKind.NVFP4:
            self._report_if_absent(module)
        parameter: Any = self.parameters[target]
        parameter.weight_loader(parameter, tensor, target, shard, int(index))
        self.account.loaded(name, target)

    def _report_if_absent(self, module: str) -> None:
        """A module without input_scale in the checkpoint keeps NaN there and is reported."""
        if f"{module}.input_scale" not in self.tensors:
            self.input_scales.usable(module, None)

    def _collect(self, part: str, suffix: str, tensor: torch.Tensor) -> None:
        fused = self.fused[part]
        parts = self.waiting.setdefault(fused, {})
        parts.setdefault(part, {})[suffix] = tensor
        names = _part_names(fused)
        if all(self.wanted[name] == set(parts.get(name, ())) for name in names):
            self._load_fused(fused, self.waiting.pop(fused))

    def _load_fused(self, fused: str, parts: dict[str, dict[str, torch.Tensor]]) -> None:
        names = _part_names(fused)
        ordered = [parts[name] for name in names]
        if self.kinds[names[0]] is QuantKind.NVFP4:
            triples = [(p["weight"], p["weight_scale"], p["weight_scale_2"]) for p in ordered]
            for part, triple in zip(ordered, reconcile_outer_scales(triples, fused), strict=True):
                part["weight"], part["weight_scale"], part["weight_scale_2"] = triple
            for name, part in zip(names, ordered, strict=True):
                self.input_scales.usable(name, part.get("input_scale"))
                part.setdefault("input_scale", torch.tensor(float("nan"), dtype=torch.float32))
        for suffix in ordered[0]:
            target, tensors = f"{fused}.{suffix}", [part[suffix] for part in ordered]
            if fused.endswith("gate_up_proj"):
                for index, tensor in enumerate(tensors):
                    self._write(target, tensor, default_weight_loader, index)
            elif suffix in ("weight", "weight_scale"):
                self._write(target, torch.cat(tensors))
            else:
                self._write(target, torch.stack([t.reshape(()) for t in tensors]).max())
            for name in names:
                if f"{name}.{suffix}" in self.tensors:
                    self.account.loaded(f"{name}.{suffix}", target)


def _part_names(fused: str) -> list[str]:
    """Names of the checkpoint's modules that a fused module holds, in order."""
    parent, _, name = fused.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED_MODULES[name]]


def _fused_parts(parameters: Iterable[str]) -> dict[str, str]:
    """The fused module of each part."""
    modules = (name.rpartition(".")[0] for name in parameters)
    fused = {module for module in modules if module.rpartition(".")[2] in FUSED_MODULES}
    return {part: module for module in fused for part in _part_names(module)}


def _copy_expert_slices(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Experts that the checkpoint stores as one tensor [E, ...]."""
    parameter.data.copy_(tensor)

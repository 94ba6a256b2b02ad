"""In which precision a large prefill multiplies NVFP4 weights: decided in this file only.

FP8 has twice bfloat16's matrix rate. Activations are then rounded to e4m3 with a scale for each row
and widened weights to e4m3 (``kernels.reference.fp8``); decode and small batches stay in bfloat16.
It exists with cutedsl on sm_90.

``auto`` takes it there for a checkpoint that is made for quantised activations: ModelOpt's W4A4
rounds them to four bits, so that eight keep more than was meant to be kept. A weight-only
checkpoint stays in bfloat16. Answers are not bit for bit those of bfloat16.

A checkpoint is made so if every packed matrix has an ``input_scale``, the result of the calibration
of its activations. The tensors are asked, not the config, as about all quantisation
(``checkpoint.quant``): one with ``quant_algo`` NVFP4 may hold weight-only matrices.

Mean KL to transformers in float32, nats, small model: on one H200 1.0e-3 in bfloat16 and 2.3e-3 in
FP8, every golden answer in both (``tests/correctness/test_nvfp4_cache.py``). Emulated on a CPU, all
batches of more than 64 tokens: bfloat16 0.8e-3, experts alone in FP8 1.3e-3, all in FP8 2.7e-3, the
four bits that the checkpoint is made for 11.3e-3.
"""

from dataclasses import dataclass

from sglang_dsv4.envs import PREFILL, prefill_precision
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers.weight_kernels import WeightKernel, WeightKernels

AUTO, BF16, FP8, FP4 = "auto", "bf16", "fp8", "fp4"

_DEVICE = "sm_90"


@dataclass(frozen=True)
class Prefill:
    """The precision of the activations in large prefill batches, ``bf16``, ``fp8`` or ``fp4``."""

    precision: str
    reason: str

    @property
    def fp8(self) -> bool:
        """Whether large batches have another arithmetic than small ones."""
        return self.precision == FP8


def choose_prefill(kernels: WeightKernels, quantized_activations: bool) -> Prefill:
    """The precision for a device's kernels, the environment variable included.

    Args:
        quantized_activations: whether the checkpoint is made for them (``ModelSource``).

    Raises:
        UnsupportedError: FP8 was asked for where it does not exist.
    """
    asked, held = prefill_precision(), (kernels.linear, kernels.experts)
    exists = kernels.device == _DEVICE and held == (WeightKernel.CUTEDSL, WeightKernel.CUTEDSL)
    if asked == FP8 and not exists:
        raise UnsupportedError(
            f"{PREFILL.name}={FP8} was asked for with {held[0].value} linear layers and "
            f"{held[1].value} experts on {kernels.device}, wanted cutedsl on {_DEVICE}: unset it."
        )
    if WeightKernel.FLASHINFER in held:
        return Prefill(FP4, "as in small batches")
    if asked != AUTO:
        return Prefill(asked, f"{PREFILL.name} asks for it")
    if not exists:
        return Prefill(BF16, f"{FP8} exists with cutedsl on {_DEVICE}")
    if quantized_activations:
        return Prefill(FP8, "the checkpoint has an input_scale for every packed matrix")
    return Prefill(
        BF16, "the checkpoint is weight-only, not every packed matrix has an input_scale"
    )


def describe(prefill: Prefill) -> str:
    """For the start-up log."""
    return f"large prefill batches in {prefill.precision}: {prefill.reason}"

"""In which precision a large prefill multiplies NVFP4 weights on Hopper: bfloat16, or FP8 if asked.

FP8 has twice bfloat16's matrix rate. Activations are then rounded to e4m3 with a scale for each row
and widened weights to e4m3 (``kernels.reference.fp8``); decode and small batches stay in bfloat16.
ModelOpt's checkpoints are made for activations in four bits, so that eight keep more than was meant
to be kept; but answers are not bit for bit those of bfloat16.

The arithmetic emulated on a CPU, embedded small model, batches of more than 64 tokens in FP8: each
linear layer's cosine to bfloat16 0.9993 and more, each layer of experts' 0.9995; 18 of 18 golden
answers; mean KL to transformers in float32 2.6e-3 nats over 8,074 positions, 0.8e-3 in bfloat16.
The kernels are compiled and interpreted, not run.
"""

from sglang_dsv4.envs import PREFILL, prefill_precision
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers.weight_kernels import WeightKernel, WeightKernels

FP8 = "fp8"

_DEVICE = "sm_90"
_FORMS = (
    (WeightKernel.TRITON, WeightKernel.MARLIN),
    (WeightKernel.CUTEDSL, WeightKernel.CUTEDSL),
)


def fp8_prefill(kernels: WeightKernels) -> bool:
    """Whether large batches are multiplied in FP8 on the device of ``kernels``.

    Raises:
        UnsupportedError: it was asked for where it does not exist.
    """
    if prefill_precision() != FP8:
        return False
    held = (kernels.linear, kernels.experts)
    if kernels.device != _DEVICE or held not in _FORMS:
        raise UnsupportedError(
            f"{PREFILL.name}={FP8} was asked for with {held[0].value} linear layers and "
            f"{held[1].value} experts on {kernels.device}, wanted triton and marlin or cutedsl on "
            f"{_DEVICE}: unset it."
        )
    return True

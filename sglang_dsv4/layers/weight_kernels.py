"""How each kind of NVFP4 matrix is held and multiplied: by architecture, decided in this file only.

| architecture | linear | routed experts | o_a_proj (grouped) |
|---|---|---|---|
| CPU | dequant | dequant | dequant |
| sm_80 .. sm_90 | marlin | marlin | dequant |
| sm_100, sm_103 | flashinfer | flashinfer (TRT-LLM, routed) | dequant |
| sm_120, sm_121 | flashinfer | flashinfer (CUTLASS) | dequant |

marlin: W4A16, the 4-bit weight is widened to bfloat16 in registers (``layers.marlin``). flashinfer:
W4A4 on the FP4 tensor cores (``layers.flashinfer_fp4``). dequant: bfloat16 from load on; four times
the weight memory and traffic, hence, but for o_a_proj, on a GPU only when
``SGLANG_DSV4_NVFP4_WEIGHT_KERNEL`` asks.

Run on a GPU (one H200): marlin for the small model's linear layers and experts, in CUDA graphs and
out of them: cosines of 0.99997 and more to the dequantised weights, answers as expected. Not run:
flashinfer, marlin on other GPUs, dequant of linear layers and experts on a GPU.

ModelOpt leaves o_a_proj in bfloat16, a batched product; a packed one becomes that. Forced marlin
runs it as experts of Marlin's MoE kernel with a fixed routing: one launch, a quarter of the bytes
(V4-Flash, 8 groups of [1024, 4096]: 18.9 MB a layer against 67.1 MB). It was not seen right on a
GPU: the one run of a check that contains it ended in an illegal access of unknown origin.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from sglang_dsv4.envs import WEIGHT_KERNEL, weight_kernel
from sglang_dsv4.errors import UnsupportedError


class WeightKernel(Enum):
    """A way to hold and multiply NVFP4 weights; values as in the environment variable."""

    DEQUANT = "dequant"
    MARLIN = "marlin"
    FLASHINFER = "flashinfer"


@dataclass(frozen=True)
class WeightKernels:
    """The kernels of one device, and why.

    Attributes:
        device: ``cpu`` or the architecture, as ``sm_90``.
        experts_runner: value of SGLang's ``--moe-runner-backend`` that goes with ``experts``; None
            where no runner of SGLang's is involved.
    """

    device: str
    linear: WeightKernel
    experts: WeightKernel
    grouped: WeightKernel
    experts_runner: str | None
    reason: str


_MARLIN_FIRST, _MARLIN_LAST = (8, 0), (9, 0)
_TRTLLM = ((10, 0), (10, 3))
_CUTLASS = ((12, 0), (12, 1))


def weight_kernels(
    capability: tuple[int, int] | None, forced: WeightKernel | None = None
) -> WeightKernels:
    """The kernels of a device.

    Args:
        capability: CUDA compute capability; None on a CPU.
        forced: wanted instead of the table's choice.

    Raises:
        UnsupportedError: the device has no kernel, or not the forced one.
    """
    marlin, dequant, flashinfer = WeightKernel.MARLIN, WeightKernel.DEQUANT, WeightKernel.FLASHINFER
    if capability is None:
        if forced not in (None, dequant):
            raise UnsupportedError(
                f"{WEIGHT_KERNEL.name}={forced.value if forced else ''} was asked for on a CPU, "
                f"wanted dequant there: unset it."
            )
        reason = "a CPU has no 4-bit matrix units, so weights are widened once, at load"
        return WeightKernels("cpu", dequant, dequant, dequant, None, reason)
    device = f"sm_{capability[0]}{capability[1]}"
    blackwell = capability in _TRTLLM + _CUTLASS
    if not blackwell and not _MARLIN_FIRST <= capability <= _MARLIN_LAST:
        raise UnsupportedError(
            f"The GPU is {device}, for which no NVFP4 weight kernel is known, wanted sm_80 to "
            f"sm_90, sm_100, sm_103, sm_120 or sm_121: run on such a GPU, or with --device cpu."
        )
    why = f"{WEIGHT_KERNEL.name} asks for it"
    if forced is dequant:
        return WeightKernels(device, dequant, dequant, dequant, "triton", why)
    if forced is marlin or not blackwell:
        if forced is flashinfer:
            raise UnsupportedError(
                f"{WEIGHT_KERNEL.name}=flashinfer was asked for on {device}, which has no FP4 "
                f"tensor cores, wanted marlin or dequant: unset it."
            )
        if forced is None:
            why = f"{device} has no FP4 tensor cores: 4-bit weights, bfloat16 activations"
        return WeightKernels(device, marlin, marlin, forced or dequant, "marlin", why)
    if forced is None:
        why = f"{device} multiplies FP4 by FP4; o_a_proj is a bfloat16 product"
    runner = "flashinfer_trtllm_routed" if capability in _TRTLLM else "flashinfer_cutlass"
    return WeightKernels(device, flashinfer, flashinfer, dequant, runner, why)


def weight_kernels_of(device: torch.device) -> WeightKernels:
    """The kernels of ``device``, the environment variable included.

    Raises:
        UnsupportedError: the device has no kernel, or not the forced one.
    """
    name = weight_kernel()
    forced = WeightKernel(name) if name else None
    if device.type == "cpu":
        return weight_kernels(None, forced)
    if device.type != "cuda":
        raise UnsupportedError(
            f"NVFP4 weights are on {device.type}, wanted cuda or cpu: pass --device cpu."
        )
    return weight_kernels(torch.cuda.get_device_capability(device), forced)


def describe(kernels: WeightKernels) -> str:
    """One line for the start-up log."""
    runner = f" ({kernels.experts_runner})" if kernels.experts_runner else ""
    return (
        f"NVFP4 weights on {kernels.device}: linear {kernels.linear.value}, experts "
        f"{kernels.experts.value}{runner}, o_a_proj if packed {kernels.grouped.value}: "
        f"{kernels.reason}"
    )

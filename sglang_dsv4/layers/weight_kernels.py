"""How each kind of NVFP4 matrix is held and multiplied: by architecture, decided in this file only.

| architecture | linear | routed experts |
|---|---|---|
| CPU | dequant | dequant |
| sm_80 .. sm_89 | marlin | marlin |
| sm_90 | triton | marlin |
| sm_100, sm_103 | flashinfer | flashinfer (TRT-LLM, routed) |
| sm_120, sm_121 | flashinfer | flashinfer (CUTLASS) |

marlin: W4A16, the 4-bit weight is widened to bfloat16 in registers (``layers.marlin``). triton: the
same arithmetic by ``kernels.linear``; asked for by name it takes the linear layers only.
cutedsl: the same arithmetic for linear layers and experts by ``kernels.linear.skinny`` and
``kernels.experts``, on sm_90 and Blackwell, only when ``SGLANG_DSV4_NVFP4_WEIGHT_KERNEL`` asks.
flashinfer: W4A4 on the FP4 tensor cores (``layers.flashinfer_fp4``). dequant: bfloat16 from load
on; four times the weight memory and traffic, hence on a GPU only when
``SGLANG_DSV4_NVFP4_WEIGHT_KERNEL`` asks.

Run on a GPU (one H200): marlin in every linear and experts shape of V4-Flash and V4-Pro, whole and
of a rank of eight, cosines of 0.9999 and more to the dequantised weights; triton and marlin as in
the table in a server of the small model, answers as expected. Compiled and emulated, not run:
cutedsl. Not run: flashinfer, marlin on other GPUs, dequant of linear layers and experts on a GPU.

ModelOpt leaves o_a_proj in bfloat16, a batched product; a packed one becomes that on every device.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from sglang_dsv4.envs import WEIGHT_KERNEL, weight_kernel
from sglang_dsv4.errors import UnsupportedError

EXPERTS_SCRATCH = 800_000_000
"""Bytes into which ``layers.experts_prefill`` widens experts for a while."""


class WeightKernel(Enum):
    """A way to hold and multiply NVFP4 weights; values as in the environment variable."""

    DEQUANT = "dequant"
    MARLIN = "marlin"
    TRITON = "triton"
    CUTEDSL = "cutedsl"
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
    experts_runner: str | None
    reason: str

    def of(self, module: str) -> WeightKernel:
        """The kernel of a packed matrix, by its name in the checkpoint."""
        if module.endswith(".o_a_proj"):
            return WeightKernel.DEQUANT
        return self.experts if ".mlp.experts." in module else self.linear


_MARLIN_FIRST, _MARLIN_LAST = (8, 0), (9, 0)
_HOPPER = (9, 0)
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
    triton, cutedsl = WeightKernel.TRITON, WeightKernel.CUTEDSL
    if capability is None:
        if forced not in (None, dequant):
            raise UnsupportedError(
                f"{WEIGHT_KERNEL.name}={forced.value if forced else ''} was asked for on a CPU, "
                f"wanted dequant there: unset it."
            )
        reason = "a CPU has no 4-bit matrix units, so weights are widened once, at load"
        return WeightKernels("cpu", dequant, dequant, None, reason)
    device = f"sm_{capability[0]}{capability[1]}"
    blackwell = capability in _TRTLLM + _CUTLASS
    if not blackwell and not _MARLIN_FIRST <= capability <= _MARLIN_LAST:
        raise UnsupportedError(
            f"The GPU is {device}, for which no NVFP4 weight kernel is known, wanted sm_80 to "
            f"sm_90, sm_100, sm_103, sm_120 or sm_121: run on such a GPU, or with --device cpu."
        )
    why = f"{WEIGHT_KERNEL.name} asks for it"
    if forced is dequant:
        return WeightKernels(device, dequant, dequant, "triton", why)
    if forced is triton and capability != _HOPPER:
        raise UnsupportedError(
            f"{WEIGHT_KERNEL.name}=triton was asked for on {device}, for which that kernel is not "
            f"made, wanted sm_90: unset it."
        )
    if forced is cutedsl:
        if capability != _HOPPER and not blackwell:
            raise UnsupportedError(
                f"{WEIGHT_KERNEL.name}=cutedsl was asked for on {device}, for which that kernel is "
                f"not made, wanted sm_90 or Blackwell: unset it."
            )
        return WeightKernels(device, cutedsl, cutedsl, "marlin", why)
    if forced is marlin or not blackwell:
        if forced is flashinfer:
            raise UnsupportedError(
                f"{WEIGHT_KERNEL.name}=flashinfer was asked for on {device}, which has no FP4 "
                f"tensor cores, wanted marlin or dequant: unset it."
            )
        if forced is None:
            why = f"{device} has no FP4 tensor cores: 4-bit weights, bfloat16 activations"
        linear = triton if capability == _HOPPER and forced is not marlin else marlin
        return WeightKernels(device, linear, marlin, "marlin", why)
    if forced is None:
        why = f"{device} multiplies FP4 by FP4"
    runner = "flashinfer_trtllm_routed" if capability in _TRTLLM else "flashinfer_cutlass"
    return WeightKernels(device, flashinfer, flashinfer, runner, why)


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
        f"{kernels.experts.value}{runner}: {kernels.reason}"
    )

"""How each kind of NVFP4 matrix is held and multiplied: by architecture, decided in this file only.

| architecture | linear | routed experts |
|---|---|---|
| CPU | dequant | dequant |
| sm_80 .. sm_89 | marlin | marlin |
| sm_90 | cutedsl | cutedsl |
| sm_100, sm_103 | flashinfer | flashinfer (TRT-LLM, routed) |
| sm_120, sm_121 | flashinfer | flashinfer (CUTLASS) |

cutedsl: W4A16 on weights in records, widened to bfloat16 in registers (``kernels.linear.skinny``,
``kernels.experts``); a large batch takes dense weights, in FP8 where ``prefill_precision`` says so.
On Blackwell only when ``SGLANG_DSV4_NVFP4_WEIGHT_KERNEL`` asks. marlin: W4A16 by SGLang's kernels
(``layers.marlin``). flashinfer: W4A4 on the FP4 tensor cores (``layers.flashinfer_fp4``). dequant:
bfloat16 from load on; four times the weight memory and traffic, hence on a GPU only when
``SGLANG_DSV4_NVFP4_WEIGHT_KERNEL`` asks.

Run on a GPU (one H200): every linear shape of V4-Flash and V4-Pro, whole and of a rank of eight,
with cosines to the dequantised weights above 0.99999 on cutedsl and 0.9999 on marlin; experts too.
``tests/e2e`` passes on it, 43 of 43. Compiled and emulated, not run: cutedsl on Blackwell. Not run:
flashinfer, marlin on other GPUs, dequant on a GPU.

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
    CUTEDSL = "cutedsl"
    FLASHINFER = "flashinfer"


@dataclass(frozen=True)
class WeightKernels:
    """The kernels of one device, and why.

    Attributes:
        device: ``cpu`` or the architecture, as ``sm_90``.
        experts_runner: value of SGLang's ``--moe-runner-backend`` that goes with ``experts``; None
            on a CPU. With cutedsl it is marlin's, which is not called.
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
    cutedsl = WeightKernel.CUTEDSL
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
    if forced is cutedsl and capability != _HOPPER and not blackwell:
        raise UnsupportedError(
            f"{WEIGHT_KERNEL.name}=cutedsl was asked for on {device}, for which that kernel is "
            f"not made, wanted sm_90 or Blackwell: unset it."
        )
    if forced is flashinfer and not blackwell:
        raise UnsupportedError(
            f"{WEIGHT_KERNEL.name}=flashinfer was asked for on {device}, which has no FP4 "
            f"tensor cores, wanted another: unset it."
        )
    if forced in (cutedsl, marlin):
        return WeightKernels(device, forced, forced, "marlin", why)
    if not blackwell:
        kernel = cutedsl if capability == _HOPPER else marlin
        why = f"{device} has no FP4 tensor cores: 4-bit weights, bfloat16 activations"
        return WeightKernels(device, kernel, kernel, "marlin", why)
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
    """For the start-up log."""
    runner = f" ({kernels.experts_runner})" if kernels.experts is WeightKernel.FLASHINFER else ""
    return (
        f"NVFP4 weights on {kernels.device}: linear {kernels.linear.value}, experts "
        f"{kernels.experts.value}{runner}: {kernels.reason}"
    )

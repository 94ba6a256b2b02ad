"""What the kernels need to know of a GPU: its architecture name and its number of SMs."""

from functools import cache

import torch

from sglang_dsv4.errors import UnsupportedError

# Compute capability to the architecture that the kernels are compiled for. The "a" targets are
# those with the architecture's own instructions.
ARCHS: dict[tuple[int, int], str] = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
# Shared memory that one block may use, in bytes (CUDA C++ guide, compute capabilities).
SHARED_BYTES: dict[str, int] = {
    "sm_90a": 232448,
    "sm_100a": 232448,
    "sm_103a": 232448,
    "sm_120a": 101376,
    "sm_121a": 101376,
}


def arch_of(capability: tuple[int, int]) -> str:
    """Architecture name of a compute capability, as in ``(9, 0)`` -> ``"sm_90a"``.

    Raises:
        UnsupportedError: the kernels were never compiled for that capability.
    """
    arch = ARCHS.get(capability)
    if arch is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        raise UnsupportedError(
            f"The GPU has compute capability {capability[0]}.{capability[1]}, wanted one of "
            f"{known}: run on such a GPU, or on a CPU with --device cpu."
        )
    return arch


def current_arch() -> str:
    """Architecture name of the current CUDA device.

    Raises:
        UnsupportedError: there is no CUDA device, or the kernels do not know it.
    """
    _require_device()
    return _arch_of_device(torch.cuda.current_device())


@cache
def _require_device() -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "No CUDA device or driver was found, wanted one for the GPU kernels: install the "
            "NVIDIA driver, or run on a CPU with --device cpu."
        )


@cache
def _arch_of_device(index: int) -> str:
    return arch_of(torch.cuda.get_device_capability(index))


@cache
def num_sms(index: int) -> int:
    """Streaming multiprocessors of CUDA device ``index``."""
    return torch.cuda.get_device_properties(index).multi_processor_count

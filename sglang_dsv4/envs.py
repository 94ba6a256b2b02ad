"""Every environment variable that this plugin reads; stock SGLang owns the other SGLANG_DSV4_*."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from sglang_dsv4.errors import ConfigError

PREFIX = "SGLANG_DSV4_NVFP4_"

T = TypeVar("T")

WEIGHT_KERNELS = ("marlin", "cutedsl", "flashinfer", "dequant")
"""Ways to hold NVFP4 weights on a GPU (``layers.weight_kernels``)."""
ATTENTION_KERNELS = ("portable", "wide", "narrow")
"""Kernels of sparse attention on a GPU (``kernels.attention.plan``)."""
PREFILL_PRECISIONS = ("auto", "bf16", "fp8")
"""Precisions of large prefill batches (``layers.prefill_precision``)."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("0 or 1")


def _parse_str(text: str) -> str:
    return text


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word in names:
            return word
        raise ValueError(", ".join(names[:-1]) + f" or {names[-1]}")

    return parse


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One variable: its name, how its text is read, its value when unset, and what it does."""

    name: str
    parse: Callable[[str], T]
    default: T
    doc: str

    def get(self) -> T:
        """The value now.

        Raises:
            ConfigError: the text in the environment is not of the variable's type.
        """
        text = os.environ.get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(
                f"The environment variable {self.name} is {text!r}, wanted {error}: "
                f"correct or unset it."
            ) from error


REFERENCE_ON_GPU = EnvVar(
    PREFIX + "REFERENCE_ON_GPU",
    _parse_bool,
    False,
    "Run the plain-torch reference on a GPU for operations without a kernel there (slow).",
)
FAILURE_FILE = EnvVar(
    PREFIX + "FAILURE_FILE",
    _parse_str,
    "",
    "File to which a failing process writes its sentence; set by sglang_dsv4.launch_server.",
)
KERNEL_CACHE = EnvVar(
    PREFIX + "KERNEL_CACHE",
    _parse_str,
    "",
    "Folder of compiled GPU kernels; sglang_dsv4/kernels in the user's cache folder when unset.",
)
WEIGHT_KERNEL = EnvVar(
    PREFIX + "WEIGHT_KERNEL",
    _one_of(WEIGHT_KERNELS),
    "",
    "How NVFP4 weights run on a GPU: marlin, cutedsl (Hopper, and Blackwell, where it was compiled "
    "and emulated, not run), flashinfer, or dequant (bfloat16 from load on, four times the "
    "memory); the architecture decides when unset.",
)
ATTENTION_KERNEL = EnvVar(
    PREFIX + "ATTENTION_KERNEL",
    _one_of(ATTENTION_KERNELS),
    "",
    "Kernel of sparse attention on a GPU: portable (any), wide or narrow (Hopper); the fastest by "
    "estimate when unset.",
)
PREFILL = EnvVar(
    PREFIX + "PREFILL",
    _one_of(PREFILL_PRECISIONS),
    "auto",
    "Precision in which large prefill batches multiply NVFP4 weights: bf16, fp8 (cutedsl on "
    "Hopper; twice the matrix rate, activations rounded to e4m3), or auto: fp8 there for "
    "checkpoints that are made for quantised activations, else bf16.",
)

ALL: tuple[EnvVar, ...] = (
    REFERENCE_ON_GPU,
    FAILURE_FILE,
    KERNEL_CACHE,
    WEIGHT_KERNEL,
    ATTENTION_KERNEL,
    PREFILL,
)


def reference_on_gpu() -> bool:
    """Whether a GPU may run the plain-torch reference where it has no kernel."""
    return REFERENCE_ON_GPU.get()


def failure_file() -> Path | None:
    """Where a failing process leaves its sentence; None when nobody listens."""
    return Path(FAILURE_FILE.get()) if FAILURE_FILE.get() else None


def kernel_cache() -> Path:
    """Where compiled GPU kernels are kept across processes."""
    if KERNEL_CACHE.get():
        return Path(KERNEL_CACHE.get())
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang_dsv4" / "kernels"


def weight_kernel() -> str | None:
    """The forced way to hold NVFP4 weights on a GPU; None lets the architecture decide."""
    return WEIGHT_KERNEL.get() or None


def attention_kernel() -> str | None:
    """The forced kernel of sparse attention on a GPU; None lets the estimates decide."""
    return ATTENTION_KERNEL.get() or None


def prefill_precision() -> str:
    """The precision of large prefill batches, one of ``PREFILL_PRECISIONS``."""
    return PREFILL.get()

"""Triton kernels on a CPU: a second copy of their module, made while Triton interprets."""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
import torch


def interpreted(name: str, patch: pytest.MonkeyPatch, *helpers: str) -> ModuleType:
    """The module ``name`` once more, its ``triton.jit`` functions interpreted.

    So are those of ``helpers``, modules that it imports from, each after those that it imports
    itself; they stand under their own names until the test ends.
    """
    patch.setenv("TRITON_INTERPRET", "1")
    for helper in helpers:
        _copy(helper, helper, patch)
    return _copy(name, f"{name}_interpreted", patch)


def _copy(name: str, copy: str, patch: pytest.MonkeyPatch) -> ModuleType:
    source = importlib.util.find_spec(name).origin
    spec = importlib.util.spec_from_file_location(copy, source)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, copy, module)
    spec.loader.exec_module(module)
    return module


def convert_to_e4m3_as_torch(patch: pytest.MonkeyPatch) -> None:
    """float32 to e4m3 by torch: the interpreter's own conversion does not round to nearest.

    torch makes NaN of what is beyond 448, where a GPU saturates; our kernels convert nothing there.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    stock = InterpreterBuilder.create_fp_to_fp

    def convert(builder, source, wanted, rounding):
        if wanted.scalar != tl.float8e4nv or source.dtype.scalar != tl.float32:
            return stock(builder, source, wanted, rounding)
        values = torch.from_numpy(np.ascontiguousarray(source.data))
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return type(source)(codes, wanted.scalar)

    patch.setattr(InterpreterBuilder, "create_fp_to_fp", convert)


def round_to_bfloat16_as_torch(patch: pytest.MonkeyPatch) -> None:
    """float32 to bfloat16 by torch: the interpreter's own conversion cuts bits off."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    stock = InterpreterBuilder.cast_impl

    def convert(builder, source, wanted):
        if wanted.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return stock(builder, source, wanted)
        values = torch.from_numpy(np.ascontiguousarray(source.data))
        bits = values.bfloat16().view(torch.uint16).numpy()
        return type(source)(bits, wanted.scalar)

    patch.setattr(InterpreterBuilder, "cast_impl", convert)

"""Triton kernels on a CPU: a second copy of their module, made while Triton interprets."""

import importlib.util
import sys
from types import ModuleType

import pytest


def interpreted(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``name`` once more, its ``triton.jit`` functions interpreted."""
    patch.setenv("TRITON_INTERPRET", "1")
    copy = f"{name}_interpreted"
    source = importlib.util.find_spec(name).origin
    spec = importlib.util.spec_from_file_location(copy, source)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, copy, module)
    spec.loader.exec_module(module)
    return module

"""Compile cache of the CuTeDSL kernels: once per (arch, static shape), kept across processes.

A kernel file has one builder, decorated with `compiled_kernel`, whose first argument is the
architecture and whose other arguments are the static shape; it calls `compile_for` on fake tensors
and never launches. Calling the decorated builder returns the compiled function from memory, else
from an object file on disk, which is compiled and exported when it is not there. The files' folder
carries the fingerprint of every kernel source and of the versions that shape the binary, so an
edit or an upgrade never meets an old object. `cubin_of` compiles without cache, for SASS checks.
"""

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import cutlass
import tvm_ffi
from cutlass import cute
from cutlass.base_dsl.env_manager import get_prefix_dsl_libs
from cutlass.cute.runtime import make_fake_stream

from sglang_dsv4.cache import kv_layout
from sglang_dsv4.envs import kernel_cache

_FUNCTION = "launch"
_keep_folder: ContextVar[str | None] = ContextVar("keep_folder", default=None)


@functools.lru_cache(maxsize=1)
def fingerprint() -> str:
    """Hash of all kernel sources, the byte layout, and the versions that the binary depends on."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent
    sources = [p for p in sorted(root.rglob("*.py")) if "reference" not in p.parts]
    for source in (*sources, Path(kv_layout.__file__)):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = (cutlass.__version__, tvm_ffi.__version__, sys.version_info[:2])
    digest.update(repr(versions).encode())
    return digest.hexdigest()[:24]


@functools.lru_cache(maxsize=1)
def _load_runtime() -> None:
    """Make the launch symbols visible, so that exporting for another arch finds them."""
    for library in (get_prefix_dsl_libs("CUTE_DSL") or "").split(os.pathsep):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def compile_for(arch: str, host: Callable, *args: Any) -> Any:
    """Compile a ``@cute.jit`` host function on fake tensors, with torch's current stream last.

    Args: arch as in ``"sm_90a"``; host(*args, stream). The result is called with torch tensors and
    Python numbers in the order of args, without the stream.
    """
    _load_runtime()
    options = f"--gpu-arch {arch} --enable-tvm-ffi"
    keep = _keep_folder.get()
    if keep is not None:
        options += f" --keep-ptx --keep-cubin --dump-dir {keep}"
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(host, *args, stream, options=options)


def _object_path(builder: Callable, key: tuple) -> Path:
    name = f"{builder.__module__}.{builder.__qualname__}"
    digest = hashlib.sha256(repr((name, key)).encode()).hexdigest()[:24]
    return kernel_cache() / fingerprint() / f"{builder.__name__}-{key[0]}-{digest}.o"


def _export(compiled: Any, path: Path) -> None:
    """Write the object under a private name, then move it, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, private = tempfile.mkstemp(suffix=".o", dir=path.parent)
    os.close(handle)
    compiled.export_to_c(object_file_path=private, function_name=_FUNCTION)
    os.replace(private, path)


def compiled_kernel(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Cache of a builder(arch, *static) by its arguments, whose repr must tell them apart."""
    memory: dict[tuple, Any] = {}

    @functools.wraps(builder)
    def wrapper(*key: Any) -> Any:
        if key not in memory:
            path = _object_path(builder, key)
            if not path.is_file():
                _export(builder(*key), path)
            memory[key] = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]
        return memory[key]

    return wrapper


def cubin_of(builder: Callable[..., Any], *key: Any) -> bytes:
    """The cubin that a (decorated or plain) builder makes for ``key``; needs no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        token = _keep_folder.set(folder)
        try:
            compiled = getattr(builder, "__wrapped__", builder)(*key)
            return compiled.__cubin__
        finally:
            _keep_folder.reset(token)

"""Which implementation of each operation a device gets, and why: decided once, in this file.

``REFERENCE`` is the plain-torch semantics of every operation; a CPU runs it. A GPU runs kernels;
one whose architecture has none stops the start-up with a sentence, unless
``SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU`` asks for the slow reference there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch

from sglang_dsv4.envs import REFERENCE_ON_GPU, reference_on_gpu
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.reference import (
    compress,
    indexer,
    indexer_query,
    kv_store,
    mhc,
    norm_rope,
    sparse_attention,
)


@dataclass(frozen=True)
class Operations:
    """The operations of one device; each has the signature of its namesake in ``reference``."""

    kv_store: Callable
    compress_store: Callable
    q_norm_rope: Callable
    indexer_query: Callable
    indexer_topk: Callable
    sparse_attention: Callable
    hc_pre: Callable
    hc_post: Callable
    hc_post_pre: Callable
    hc_head: Callable


@dataclass(frozen=True)
class Choice:
    """An implementation and the reason for it, as the start-up log says it."""

    function: Callable
    why: str

    def line(self, operation: str) -> str:
        """One line for the log."""
        return f"{operation}: {self.function.__module__}.{self.function.__name__} ({self.why})"


REFERENCE = Operations(
    kv_store=kv_store.kv_store,
    compress_store=compress.compress_store,
    q_norm_rope=norm_rope.q_norm_rope,
    indexer_query=indexer_query.indexer_query,
    indexer_topk=indexer.indexer_topk,
    sparse_attention=sparse_attention.sparse_attention,
    hc_pre=mhc.hc_pre,
    hc_post=mhc.hc_post,
    hc_post_pre=mhc.hc_post_pre,
    hc_head=mhc.hc_head,
)
OPERATIONS = tuple(field.name for field in fields(Operations))


def choices_for(device: torch.device) -> Mapping[str, Choice]:
    """The choice for each of ``OPERATIONS`` on ``device``.

    Raises:
        UnsupportedError: the device is no CPU and no GPU that the kernels are compiled for.
    """
    if device.type == "cpu":
        return _reference("plain torch, the only one for a CPU")
    if reference_on_gpu():
        return _reference(f"plain torch, asked for by {REFERENCE_ON_GPU.name}")
    if device.type != "cuda":
        raise UnsupportedError(
            f"The device is {device.type}, wanted cpu or cuda: pass --device cpu, or set "
            f"{REFERENCE_ON_GPU.name}=1 for the slow reference."
        )
    return gpu_choices(current_arch())


def operations_for(device: torch.device) -> Operations:
    """The operations of ``device``; raises as ``choices_for``."""
    chosen = choices_for(device)
    return Operations(**{name: chosen[name].function for name in OPERATIONS})


def gpu_choices(arch: str) -> Mapping[str, Choice]:
    """The choices for a GPU architecture such as ``"sm_90a"``."""
    # CuTeDSL and Triton are imported here, since a CPU needs neither.
    from sglang_dsv4.kernels.attention import flashinfer_nvfp4
    from sglang_dsv4.kernels.attention import sparse_attention as attention
    from sglang_dsv4.kernels.compress import compress as gpu_compress
    from sglang_dsv4.kernels.indexer import indexer as gpu_indexer
    from sglang_dsv4.kernels.indexer import query
    from sglang_dsv4.kernels.kv_store import kv_store as gpu_kv_store
    from sglang_dsv4.kernels.mhc import mhc as gpu_mhc
    from sglang_dsv4.kernels.norm_rope import norm_rope as gpu_norm_rope

    ran = "run on an H200" if arch == "sm_90a" else "compiled for this architecture, not run on it"
    own = f"CuTeDSL, {ran}"
    reader = Choice(attention.sparse_attention, own)
    if arch.startswith(("sm_10", "sm_12")):
        why = "FlashInfer's cake reader, our CuTeDSL kernel where it refuses; not run"
        reader = Choice(flashinfer_nvfp4.sparse_attention, why)
    return {
        "kv_store": Choice(gpu_kv_store.kv_store, own),
        "compress_store": Choice(gpu_compress.compress_store, own),
        "q_norm_rope": Choice(gpu_norm_rope.q_norm_rope, own),
        "indexer_query": Choice(query.indexer_query, own),
        "indexer_topk": Choice(gpu_indexer.indexer_topk, own),
        "sparse_attention": reader,
        "hc_pre": Choice(gpu_mhc.hc_pre, own),
        "hc_post": Choice(gpu_mhc.hc_post, own),
        "hc_post_pre": Choice(gpu_mhc.hc_post_pre, own),
        "hc_head": Choice(gpu_mhc.hc_head, own),
    }


def _reference(why: str) -> Mapping[str, Choice]:
    return {name: Choice(getattr(REFERENCE, name), why) for name in OPERATIONS}

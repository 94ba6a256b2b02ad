"""Which implementation of each operation a device gets: decided once, at start-up, in this file.

``REFERENCE`` is the plain-torch semantics of every operation; a CPU runs it. A GPU runs only
operations that have a kernel for its architecture: what has none stops the start-up by name, unless
``SGLANG_DSV4_NVFP4_REFERENCE_ON_GPU`` asks for the reference there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dsv4.envs import REFERENCE_ON_GPU, reference_on_gpu
from sglang_dsv4.errors import UnsupportedError
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
    inverse_rope: Callable
    indexer_query: Callable
    indexer_topk: Callable
    sparse_attention: Callable
    hc_pre: Callable
    hc_post: Callable
    hc_head: Callable


REFERENCE = Operations(
    kv_store=kv_store.kv_store,
    compress_store=compress.compress_store,
    q_norm_rope=norm_rope.q_norm_rope,
    inverse_rope=norm_rope.inverse_rope,
    indexer_query=indexer_query.indexer_query,
    indexer_topk=indexer.indexer_topk,
    sparse_attention=sparse_attention.sparse_attention,
    hc_pre=mhc.hc_pre,
    hc_post=mhc.hc_post,
    hc_head=mhc.hc_head,
)

WITHOUT_KERNEL = ("indexer_query", "indexer_topk", "hc_pre", "hc_post", "hc_head")
"""Operations that exist for no GPU yet; the others have a kernel in ``kernels/<family>/``."""


def operations_for(device: torch.device) -> Operations:
    """The operations of ``device``.

    Raises:
        UnsupportedError: the device has no kernel for some operation.
    """
    if device.type == "cpu" or reference_on_gpu():
        return REFERENCE
    raise UnsupportedError(
        f"The device {device.type} has no kernel for {', '.join(WITHOUT_KERNEL)}, wanted one for "
        f"each operation: run on a CPU with --device cpu, or set "
        f"{REFERENCE_ON_GPU.name}=1 for the slow reference."
    )

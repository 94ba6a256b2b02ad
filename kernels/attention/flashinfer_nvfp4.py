"""Sparse attention on Blackwell by FlashInfer 0.7.2's readers of the NVFP4 record. Not run yet.

No sm_100 or sm_120 GPU was at hand: what calls FlashInfer is tested on a CPU against FlashInfer's
own argument checks and planners, and the byte layout against its headers; no kernel was launched.

    sm_100, sm_103   cake     `trtllm_batch_decode_sparse_mla_dsv4(backend="cake")`
    sm_120, sm_121   cake     `SparseMLASm120Wrapper(backend="cake")`
                     sparse   `SparseMLASm120Wrapper(backend="sparse")`, only when asked for by
                              SGLANG_DSV4_NVFP4_ATTENTION_KERNEL
    any              ours     our own CuTeDSL kernel, for what cake has no kernel for

One call takes both lists: FlashInfer's main cache is the window pool, its extra cache the
compressed one. Conventions, read in FlashInfer's sources:

- Outputs are not turned back: where a rotation is given, `inverse_rope` is one more launch, on an
  output that is rounded already. Our kernels turn it back before they round it.
- Records have no outer scale; a page is [page_size x 352 data | page_size x 32 scale] bytes.
- A slot is page * page_size + row, int32; a negative one, and places at or after the list's length,
  are masked. Other slots are not checked: they must lie in the pool.
- The sink is a natural logit of the denominator, one a head. The log-sum-exp is base 2 and
  includes the sink, so for the log-sum-exp of the keys alone the sink is applied here, afterwards.
- Values 0-447 of q [T, H, 512] bf16 are quantised to NVFP4 inside. cake rounds softmax weights and
  V to e4m3; sparse quantises both to NVFP4, in groups of 16 keys, and so drops a group whose
  largest weight is below 6 x 2^-10 of the row's largest. Our kernels round neither q nor V.
  Emulated on the embedded model, mean KL to the bfloat16 cache over 3404 positions: ours 0.0007,
  cake 0.0012, sparse 0.0023. This project's limit is 0.0015, so sparse is no default
  (tests/correctness/test_flashinfer_numerics.py).

CUDA graphs: plans depend on shapes alone. `cake` works in one buffer a device that is allocated
once and never moves; `sparse` keeps one scratch a captured shape. Each shape must run eagerly
before its capture, which SGLang's graph runner does, since FlashInfer compiles at the first call.

FlashInfer's NVFP4 writers (`nvfp4_quantize_append_sparse_mla_cache` on all of these
architectures, `cake_dsv4_nvfp4_rope_quantize_insert` on sm_120) are not used: they have no norm,
round the latent to bf16 before they quantise, multiply by a reciprocal scale where the format's
reference divides, and lose a NaN. `kernels/kv_store` and `kernels/compress` write the same layout
in one pass from the projection's output, on every architecture.
"""

import logging
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.envs import ATTENTION_KERNEL, attention_kernel
from sglang_dsv4.kernels.attention.flashinfer_readers import (
    DEFAULT,
    HEAD_DIM,
    READERS,
    CallShape,
    Operands,
    Reader,
)
from sglang_dsv4.kernels.hardware import current_arch, num_sms
from sglang_dsv4.kernels.norm_rope.norm_rope import inverse_rope

logger = logging.getLogger(__name__)

FLASHINFER = "0.7.2"


@dataclass(frozen=True)
class Route:
    """FlashInfer's reader for a call; or None, for our kernel, and why."""

    reader: Reader | None
    reason: str


def accepts(arch: str, shape: CallShape, sms: int) -> str | None:
    """None if FlashInfer serves the call on `arch`, else one clause saying why it does not.

    Args: arch as `hardware.ARCHS`; sms: streaming multiprocessors, on which its plans depend.
    """
    found = route(arch, shape, sms)
    return found.reason if found.reader is None else None


@lru_cache(maxsize=4096)
def route(arch: str, shape: CallShape, sms: int) -> Route:
    """cake, or the reader that the environment asks for, if it accepts the call."""
    readers = READERS.get(arch)
    if readers is None:
        return Route(None, f"FlashInfer has no NVFP4 reader for {arch}")
    name = attention_kernel() or DEFAULT
    if name not in readers:
        return Route(None, f"{ATTENTION_KERNEL.name} asks for {name}")
    refusal = _installation_fault() or readers[name].refusal(shape, sms)
    return Route(None, f"{name}: {refusal}") if refusal else Route(readers[name], "")


def start_up_line(arch: str, num_heads: int, index_topk: int, sms: int) -> str:
    """For the log: what attends in each kind of layer when 64 tokens are decoded.

    Args: num_heads: of a rank; index_topk: entries that a CSA layer attends to.
    """
    window = CallShape(64, num_heads, 128, 64)
    kinds = {
        "window": window,
        "CSA": replace(window, comp_width=index_topk, comp_page=64),
        "HCA at 128K tokens": replace(window, comp_width=1024, comp_page=2),
        "HCA at 1M tokens": replace(window, comp_width=8192, comp_page=2),
    }
    parts = []
    for kind, shape in kinds.items():
        found = route(arch, shape, sms)
        chosen = f"FlashInfer {found.reader.name}" if found.reader else "our kernel"
        parts.append(f"{kind}: {chosen}" + (f" ({found.reason})" if found.reason else ""))
    return f"Sparse attention on {arch}, {num_heads} heads a rank. " + ". ".join(parts) + "."


def sparse_attention(
    q: Tensor,
    window_slots: Tensor,
    window_pool: Tensor,
    window_layout: RecordLayout,
    comp_slots: Tensor | None,
    comp_pool: Tensor | None,
    comp_layout: RecordLayout | None,
    sinks: Tensor,
    softmax_scale: float,
    out_scale: float = 1.0,
    comp_lengths: Tensor | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of each query to the records that its lists name, by FlashInfer or our kernel.

    Args: as `reference.sparse_attention`; q bfloat16 [T, H, 512]; slots -1 or inside their pool,
    int32 (others are converted, a launch each); comp_lengths int32 [T] or None; with_lse: the
    log-sum-exp of the keys is wanted, which costs passes over the output: serving does not ask.
    Returns (out bfloat16 [T, H, 512]; lse float32 [T, H], natural, of the keys alone, or None
    where it was not asked for; our kernel always gives it).
    Raises UnsupportedError for a device, dtype, width or record format that no kernel reads.
    """
    if comp_slots is None or comp_slots.shape[1] == 0:
        comp_slots = comp_pool = comp_layout = comp_lengths = None
    reader = _reader_for(q, window_slots, window_layout, comp_slots, comp_layout)
    if reader is None:
        from sglang_dsv4.kernels.attention import sparse_attention as portable

        return portable.sparse_attention(
            q,
            window_slots,
            window_pool,
            window_layout,
            comp_slots,
            comp_pool,
            comp_layout,
            sinks,
            softmax_scale,
            out_scale,
            comp_lengths=comp_lengths,
            rotation=rotation,
        )
    logits = sinks.float().contiguous()
    operands = Operands(
        q=q.contiguous(),
        window_slots=_table(window_slots),
        window_pool=_pages(window_pool, window_layout),
        comp_slots=None if comp_slots is None else _table(comp_slots),
        comp_pool=None
        if comp_pool is None or comp_layout is None
        else _pages(comp_pool, comp_layout),
        comp_lengths=None if comp_lengths is None else _table(comp_lengths),
        sinks=None if with_lse else logits,
        softmax_scale=softmax_scale,
        out_scale=1.0 if with_lse else out_scale,
    )
    out, lse = reader.read(operands, with_lse)
    if lse is not None:
        out, lse = _apply_sinks(out, lse, logits, out_scale)
    return (out if rotation is None else inverse_rope(out, *rotation)), lse


def _apply_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor, out_scale: float
) -> tuple[Tensor, Tensor]:
    """out times the keys' share of the denominator, in place; -inf for a token without keys."""
    # FlashInfer marks such a token by -inf or by -1e30 in any base.
    lse = lse.masked_fill(lse < -1e29, -torch.inf)
    gain = torch.sigmoid(lse - sinks).mul_(out_scale).masked_fill_(lse == -torch.inf, 0.0)
    return out.mul_(gain.unsqueeze(-1)), lse


def _reader_for(
    q: Tensor,
    window_slots: Tensor,
    window_layout: RecordLayout,
    comp_slots: Tensor | None,
    comp_layout: RecordLayout | None,
) -> Reader | None:
    """FlashInfer's reader for the call; None for our kernel, which also says what none can read."""
    layouts = (window_layout,) if comp_layout is None else (window_layout, comp_layout)
    readable = all(
        layout.format is KVFormat.NVFP4 and (layout.nope_dim, layout.rope_dim) == (448, 64)
        for layout in layouts
    )
    width = window_slots.shape[1]
    if not readable or q.dtype is not torch.bfloat16 or q.shape[-1] != HEAD_DIM:
        return None
    if len(q) == 0 or width == 0:
        return None
    shape = CallShape(len(q), q.shape[1], width, window_layout.page_size)
    if comp_slots is not None and comp_layout is not None:
        shape = replace(shape, comp_width=comp_slots.shape[1], comp_page=comp_layout.page_size)
    found = route(current_arch(), shape, num_sms(q.device.index))
    if found.reader is None:
        _report(shape, found.reason)
    return found.reader


_reported: set[tuple[int, int]] = set()


def _report(shape: CallShape, reason: str) -> None:
    """Log once for each kind of layer that our kernel serves in FlashInfer's place, and why."""
    kind = (shape.num_heads, shape.comp_page)
    if kind not in _reported:
        _reported.add(kind)
        logger.info("FlashInfer does not serve this attention, our kernel does: %s", reason)


def _table(values: Tensor) -> Tensor:
    """Slots or lengths as contiguous int32."""
    return values.to(torch.int32).contiguous()


def _pages(pool: Tensor, layout: RecordLayout) -> Tensor:
    """A pool as FlashInfer's opaque [num_pages, page_size, 384]; the bytes stay where they are."""
    return pool.unflatten(1, (layout.page_size, layout.record_bytes))


@cache
def _installation_fault() -> str:
    """Why FlashInfer cannot be used at all; empty when it can."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return f"FlashInfer is not installed, wanted {FLASHINFER}"
    if found != FLASHINFER:
        return f"FlashInfer {found} is installed, wanted {FLASHINFER}"
    if find_spec("flashinfer_jit_cache") is None and not _compiler_exists():
        return "FlashInfer compiles its readers but found no nvcc, wanted one in CUDA_HOME"
    return ""


def _compiler_exists() -> bool:
    from flashinfer.jit.cpp_ext import get_cuda_path

    try:
        return (Path(get_cuda_path()) / "bin" / "nvcc").exists()
    except RuntimeError:
        return False

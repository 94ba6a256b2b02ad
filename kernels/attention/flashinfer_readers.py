"""FlashInfer 0.7.2's readers of the NVFP4 record: what each accepts, and how each is called.

`flashinfer_nvfp4` chooses among them; its docstring has their conventions. FlashInfer is imported
when it is first asked, since neither a CPU nor a Hopper GPU needs it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4.kernels.hardware import num_sms

HEAD_DIM = 512
SPARSE_HEADS = (16, 32, 64, 128)
"""Of `SparseMLASm120Wrapper`'s documentation; its 8-head instance is refused by the public API."""
WORKSPACE_BYTES = 64 << 20
"""Above every plan of `cake` on sm_100 (at most 40 MiB with 148 SMs, 128 heads, 12 tiles)."""
MAX_ELEMENTS = 1 << 31
"""FlashInfer's kernels index queries and outputs with 32 bits."""


@dataclass(frozen=True)
class CallShape:
    """What the choice of a reader depends on: widths are places of a list, pages are in records.

    comp_width 0 is a call without a compressed list.
    """

    num_tokens: int
    num_heads: int
    window_width: int
    window_page: int
    comp_width: int = 0
    comp_page: int = 0


@dataclass(frozen=True)
class Operands:
    """One call as FlashInfer takes it: all contiguous, on one device.

    q bfloat16 [T, H, 512]; pools uint8 [num_pages, page_size, 384]; slots int32 [T, K] and lengths
    int32 [T]; sinks float32 [H] or None; the three comp fields may be None.
    """

    q: Tensor
    window_slots: Tensor
    window_pool: Tensor
    comp_slots: Tensor | None
    comp_pool: Tensor | None
    comp_lengths: Tensor | None
    sinks: Tensor | None
    softmax_scale: float
    out_scale: float

    @property
    def shape(self) -> CallShape:
        """The call's shape."""
        tokens, heads = self.q.shape[:2]
        shape = CallShape(tokens, heads, self.window_slots.shape[1], self.window_pool.shape[1])
        if self.comp_slots is None or self.comp_pool is None:
            return shape
        width, page = self.comp_slots.shape[1], self.comp_pool.shape[1]
        return replace(shape, comp_width=width, comp_page=page)


@dataclass(frozen=True)
class Reader:
    """One backend.

    Attributes:
        name: as FlashInfer's `backend` argument.
        refusal: (shape, SMs) -> None, or one clause saying why the backend does not serve it.
        read: (operands, with_lse) -> (out [T, H, 512] times out_scale, lse float32 [T, H] natural,
            with the sink if there is one, or None).
    """

    name: str
    refusal: Callable[[CallShape, int], str | None]
    read: Callable[[Operands, bool], tuple[Tensor, Tensor | None]]


@cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch of one device, uint8; captured graphs keep its address, so it never moves."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _too_large(shape: CallShape, workspace: int) -> str | None:
    """The limits that all readers share; workspace: bytes that the plan needs."""
    elements = shape.num_tokens * shape.num_heads * HEAD_DIM
    if workspace > WORKSPACE_BYTES:
        return f"a workspace of {workspace} bytes, wanted at most {WORKSPACE_BYTES}"
    if elements >= MAX_ELEMENTS:
        return f"{shape.num_tokens} tokens have {elements} values, wanted below {MAX_ELEMENTS}"
    return None


def _sm100_workspace(shape: CallShape, sms: int) -> Any:
    """FlashInfer's own plan as offsets; ValueError for heads or widths that have no kernel."""
    from flashinfer.mla import cake_dsv4

    plan = cake_dsv4._nvfp4_plan(
        num_query_tokens=shape.num_tokens,
        num_heads=shape.num_heads,
        sparse_topk=shape.window_width,
        extra_topk=shape.comp_width,
        sm_count=sms,
    )
    return cake_dsv4.cake_dsv4_workspace_layout(
        shape.num_tokens, shape.num_heads, plan.num_splits, with_lse=True
    )


def _refusal_sm100(shape: CallShape, sms: int) -> str | None:
    """Heads 8, 16, 32, 64, 128; at most twelve tiles of 128 places over both lists."""
    pages = [page for page in (shape.window_page, shape.comp_page) if page]
    if any(page & (page - 1) for page in pages):
        return f"pages of {pages} records, wanted powers of two"
    try:
        return _too_large(shape, _sm100_workspace(shape, sms).total_bytes)
    except ValueError as error:
        return str(error)


def _read_sm100(x: Operands, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4

    out = torch.empty_like(x.q)
    workspace = _workspace(x.q.device)
    trtllm_batch_decode_sparse_mla_dsv4(
        x.q,
        x.window_pool,
        workspace,
        sparse_indices=x.window_slots,
        compressed_kv_cache=x.comp_pool,
        out=out,
        bmm1_scale=x.softmax_scale,
        bmm2_scale=x.out_scale,
        sinks=x.sinks,
        extra_sparse_indices=x.comp_slots,
        extra_sparse_topk_lens=x.comp_lengths,
        backend="cake",
        kv_cache_format="nvfp4",
    )
    if not with_lse:
        return out, None
    # The function does not return the base-2 log-sum-exp: it leaves it in the workspace.
    start, _ = _sm100_workspace(x.shape, num_sms(x.q.device.index)).lse
    lse = workspace[start : start + 4 * math.prod(x.q.shape[:2])].view(torch.float32)
    return out, lse.view(x.q.shape[:2]) * math.log(2)


def _refusal_sparse(shape: CallShape, sms: int) -> str | None:
    """Heads 16, 32, 64, 128; 128 or 512 window places in pages of 64; compressed pages 2 or 64."""
    from flashinfer.mla import supported_sparse_mla_sm120_configs

    config = supported_sparse_mla_sm120_configs(kv_cache_format="nvfp4")["dsv4"]
    heads = sorted(config.head_counts & set(SPARSE_HEADS))
    pages = sorted(config.extra_page_block_sizes)
    if shape.num_heads not in heads:
        return f"{shape.num_heads} heads, wanted one of {heads}"
    if shape.window_width not in config.topks:
        return f"{shape.window_width} window places, wanted one of {sorted(config.topks)}"
    if shape.window_page != config.page_block_size:
        return f"window pages of {shape.window_page}, wanted {config.page_block_size}"
    if shape.comp_width and shape.comp_page not in pages:
        return f"compressed pages of {shape.comp_page}, wanted one of {pages}"
    return _too_large(shape, 0)


def _cake_splits(shape: CallShape, sms: int) -> int:
    """Splits whose partial outputs the caller provides; 1 for the kernels that need none.

    Raises ValueError for more than 16 splits of 16 chunks of 64 places.
    """
    from flashinfer import mla

    keys = {
        "num_tokens": shape.num_tokens,
        "num_heads": shape.num_heads,
        "topk": shape.window_width,
        "extra_topk": shape.comp_width,
        "num_sms": sms,
    }
    if mla.cake_sparse_mla_sm120_dsv4_nvfp4_select_kernel(**keys) == "prefill":
        return 1
    tiles = mla.cake_sparse_mla_sm120_dsv4_nvfp4_plan_head_tiles(**keys)
    return mla.cake_sparse_mla_sm120_dsv4_nvfp4_plan_splits(**keys, head_tiles=tiles)[0]


def _split_sizes(shape: CallShape, splits: int) -> tuple[int, int]:
    """Bytes of the bf16 outputs and of the float32 log-sum-exps of all splits."""
    rows = shape.num_tokens * shape.num_heads * splits if splits > 1 else 0
    return 2 * HEAD_DIM * rows, 4 * rows


def _refusal_cake(shape: CallShape, sms: int) -> str | None:
    """Heads 8, 16, 32, 48, ... 128; lists of any length whose splits fit the workspace."""
    from flashinfer import mla

    heads = mla.cake_sparse_mla_sm120_dsv4_nvfp4_supported_heads()
    if shape.num_heads not in heads:
        return f"{shape.num_heads} heads, wanted one of {list(heads)}"
    try:
        return _too_large(shape, sum(_split_sizes(shape, _cake_splits(shape, sms))))
    except ValueError as error:
        return str(error)


def _cake_scratch(x: Operands) -> dict[str, Tensor]:
    """Where the splits go, in the buffer that never moves (FlashInfer's own one is replaced)."""
    splits = _cake_splits(x.shape, num_sms(x.q.device.index))
    if splits == 1:
        return {}
    sizes = _split_sizes(x.shape, splits)
    outs, sums = _workspace(x.q.device)[: sum(sizes)].split(sizes)
    rows = (*x.q.shape[:2], splits)
    return {
        "mid_out": outs.view(torch.bfloat16).view(*rows, HEAD_DIM),
        "mid_lse": sums.view(torch.float32).view(rows),
    }


@cache
def _wrapper(device: torch.device, backend: str) -> Any:
    from flashinfer.mla import SparseMLASm120Wrapper

    return SparseMLASm120Wrapper(kv_cache_format="nvfp4", device=device, backend=backend)


def _read_sm120(
    backend: str, x: Operands, with_lse: bool, scratch: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    out = torch.empty_like(x.q)
    lse = torch.empty(x.q.shape[:2], dtype=torch.float32, device=x.q.device)
    _wrapper(x.q.device, backend).run(
        x.q,
        x.window_pool,
        x.window_slots,
        out,
        x.softmax_scale,
        attn_sink=x.sinks,
        extra_kv_cache=x.comp_pool,
        extra_indices=x.comp_slots,
        extra_topk_length=x.comp_lengths,
        out_lse=lse,
        lse_scale=math.log(2),
        **scratch,
    )
    # A power of two, so the product is exact; these kernels have no such factor.
    out = out if x.out_scale == 1.0 else out.mul_(x.out_scale)
    return out, lse if with_lse else None


def _read_sparse(x: Operands, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    return _read_sm120("sparse", x, with_lse, {})


def _read_cake(x: Operands, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    return _read_sm120("cake", x, with_lse, _cake_scratch(x))


DEFAULT = "cake"
_SM100 = {"cake": Reader("cake", _refusal_sm100, _read_sm100)}
_SM120 = {
    "cake": Reader("cake", _refusal_cake, _read_cake),
    "sparse": Reader("sparse", _refusal_sparse, _read_sparse),
}
READERS: dict[str, dict[str, Reader]] = {
    "sm_100a": _SM100,
    "sm_103a": _SM100,
    "sm_120a": _SM120,
    "sm_121a": _SM120,
}
"""FlashInfer's readers on each architecture, by name."""

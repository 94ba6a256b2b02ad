"""Routed experts of large batches on sm_90, us from cold L2: every form, and the grouped products.

    python bench_experts_prefill.py [tokens ...]

V4-Flash's shapes with 64 experts, random weights and choices. ``few rows`` is the kernel that
multiplies from 4-bit weights (``kernels.experts``), ``FP8`` and ``bf16`` widen first. Then the FP8
products alone for the largest batch, in TFLOP/s, beside a dense product of cuBLAS (the roof),
torch's and DeepGEMM's grouped products; DeepGEMM's rows are padded to its blocks of 128.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "gpu"))

from timing import graph_time

from sglang_dsv4.kernels.experts.grouped import experts_decode
from sglang_dsv4.kernels.linear.records import COLUMNS, RECORD_BYTES, ROWS
from sglang_dsv4.layers import grouped_fp8
from sglang_dsv4.layers.cutedsl_experts import source
from sglang_dsv4.layers.expert_rows import sort_slots
from sglang_dsv4.layers.experts_prefill import products, products_fp8

EXPERTS, TOP_K, HIDDEN, INNER, LIMIT = 64, 6, 4096, 2048, 10.0
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEEP_GEMM_ROWS = 128


def random_records(out: int, width: int) -> torch.Tensor:
    """Random bytes as records: any codes, block scales of any finite value."""
    shape = (EXPERTS, out // ROWS, width // COLUMNS, RECORD_BYTES)
    return torch.randint(0, 126, shape, dtype=torch.uint8)


def forms(tokens: int, w13: torch.Tensor, w2: torch.Tensor, outer: torch.Tensor) -> list[float]:
    """Microseconds of the kernel for few rows, of FP8, and of bf16."""
    x = torch.randn(tokens, HIDDEN, dtype=BF16)
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
    routed = torch.rand(tokens, TOP_K)
    wide = [[source(w, outer, fp8) for w in (w13, w2)] for fp8 in (True, False)]
    calls: list[Callable] = [
        functools.partial(experts_decode, x, w13, w2, outer, outer, routed, ids, LIMIT),
        functools.partial(products_fp8, x, *wide[0], routed, ids, LIMIT),
        functools.partial(products, x, *wide[1], routed, ids, LIMIT),
    ]
    return [graph_time([call], 8) for call in calls]


def report(name: str, call: Callable, rows: int, out: int, width: int) -> None:
    """Print the time and rate of one product."""
    taken = graph_time([call], 8)
    rate = 2 * rows * out * width / taken / 1e6
    print(f"  {name:28s} {taken:8.1f} us {rate:7.0f} TFLOP/s", flush=True)


def roof() -> None:
    """A dense FP8 product."""
    a, b = torch.randn(8192, HIDDEN).to(FP8), torch.randn(8192, HIDDEN).to(FP8).t()
    one = torch.ones((), dtype=torch.float32)
    dense = functools.partial(torch._scaled_mm, a, b, one, one, out_dtype=BF16, use_fast_accum=True)
    report("cuBLAS, dense", dense, 8192, 8192, HIDDEN)


def grouped(tokens: int) -> None:
    """The two products, and the second by torch and DeepGEMM."""
    rows = tokens * TOP_K
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
    order = sort_slots(ids, EXPERTS)
    source_rows = order.slots // TOP_K
    factor = torch.ones(rows)
    x, hidden = torch.randn(tokens, HIDDEN).to(FP8), torch.empty(rows, INNER, dtype=BF16)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=BF16).to(FP8)
    call: Callable = functools.partial(
        grouped_fp8.gate_up, x, w13, order.starts, source_rows, factor, LIMIT, hidden
    )
    report("gate, up and SwiGLU", call, rows, 2 * INNER, HIDDEN)
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, dtype=BF16).to(FP8)
    y, out = torch.randn(rows, INNER).to(FP8), torch.empty(rows, HIDDEN, dtype=BF16)
    call = functools.partial(grouped_fp8.down, y, w2, order.starts, factor, out)
    report("down", call, rows, HIDDEN, INNER)
    by_torch = functools.partial(
        torch._scaled_grouped_mm,
        y,
        w2.transpose(-2, -1),
        factor,
        torch.ones(EXPERTS, HIDDEN),
        offs=order.starts[1:].contiguous(),
        out_dtype=BF16,
        use_fast_accum=True,
    )
    report("down, torch grouped", by_torch, rows, HIDDEN, INNER)
    deep_gemm_product(tokens)


def deep_gemm_product(tokens: int) -> None:
    """DeepGEMM's down projection of as many rows, each expert's padded."""
    import deep_gemm
    from deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor

    each = -(-tokens * TOP_K // (EXPERTS * DEEP_GEMM_ROWS)) * DEEP_GEMM_ROWS
    rows, block = each * EXPERTS, 128
    owners = torch.arange(EXPERTS, dtype=torch.int32).repeat_interleave(each)
    left = torch.randn(rows, INNER).to(FP8)
    right = torch.randn(EXPERTS, HIDDEN, INNER, dtype=BF16).to(FP8)
    scales = get_mn_major_tma_aligned_tensor(torch.ones(rows, INNER // block))
    out = torch.empty(rows, HIDDEN, dtype=BF16)
    call = functools.partial(
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous,
        (left, scales),
        (right, torch.ones(EXPERTS, HIDDEN // block, INNER // block)),
        out,
        owners,
    )
    report("down, DeepGEMM", call, rows, HIDDEN, INNER)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", nargs="*", type=int, default=[256, 512, 1024, 2048, 4096, 8192])
    tokens = parser.parse_args().tokens
    torch.manual_seed(0)
    with torch.no_grad(), torch.device("cuda"):
        w13, w2 = random_records(2 * INNER, HIDDEN), random_records(HIDDEN, INNER)
        outer = torch.full((EXPERTS,), 2.0**-12)
        print("tokens    few rows         FP8        bf16   (us)")
        for count in tokens:
            row = forms(count, w13, w2, outer)
            print(f"{count:6d}" + "".join(f"{taken:12.1f}" for taken in row), flush=True)
        roof()
        grouped(max(tokens))


if __name__ == "__main__":
    main()

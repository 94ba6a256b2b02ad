"""hc_pre, hc_post, hc_post_pre, hc_head and indexer_query beside a copy of as many bytes.

    python bench_mhc.py --out DIR [--quick]

Timing as in `timing`: graphs of several calls on different inputs that together exceed L2, L2
overwritten before each replay. Every call has its own fn, as every layer has. Bytes of hc_pre: the
streams once, the input, and fn once; of hc_post_pre: old streams, output, new streams, input, fn.
"pre+norm" and "post_pre" include the RMSNorm that follows. Rivals: stock SGLang's kernels where
sglang can be imported (they compile on first use), the reference in torch, and that under
torch.compile. A rival that fails is shown as "-", and the reason below the table.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import mhc_cases as cases
from timing import graph_time, memory_rate

from sglang_dsv4.kernels.indexer.query import indexer_query
from sglang_dsv4.kernels.mhc.mhc import hc_head, hc_post, hc_post_pre, hc_pre
from sglang_dsv4.kernels.reference import indexer_query as query_reference
from sglang_dsv4.kernels.reference import mhc as reference
from sglang_dsv4.kernels.reference.rope import build_rope_table

COLD_BYTES = 200 << 20


def copies_for(total_bytes):
    """Number of different inputs that together exceed L2."""
    return max(4, min(48, math.ceil(COLD_BYTES / total_bytes)))


def copy_time(total_bytes):
    """Microseconds of a copy that moves total_bytes, half read and half written."""
    size = max(512, total_bytes // 2 // 512 * 512)
    pairs = [
        [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for _ in range(copies_for(total_bytes))
    ]
    return graph_time([lambda p=p: p[1].copy_(p[0]) for p in pairs])


@functools.cache
def stock_module():
    """Stock SGLang's mHC, whose allocations ask a server's process groups that are not here."""
    from sglang.kernels.ops.layernorm import mhc

    mhc.use_symmetric_memory = lambda *args, **kwargs: contextlib.nullcontext()
    mhc.get_parallel = lambda: types.SimpleNamespace(tp_group=None)
    mhc.is_allocation_symmetric = lambda: True
    mhc.is_dsa_prefill_cp_interleave = lambda: False
    return mhc


def norm_arguments(norm):
    """Stock's keywords of the norm weight in a tuple that may be empty."""
    return {"norm_weight": norm[0], "norm_eps": cases.EPS} if norm else {}


def stock_pre(streams, fn, base, scale, iters, hc_eps, rms_eps, *norm):
    """Stock SGLang's hc_pre as its model calls it."""
    args = (streams, fn, scale, base, rms_eps, hc_eps, hc_eps, 2.0, iters)
    return stock_module().mhc_pre(*args, **norm_arguments(norm))


def stock_post(output, streams, post, comb):
    """Stock SGLang's hc_post."""
    return stock_module().mhc_post(output, streams, post.unsqueeze(-1), comb)


def stock_post_pre(output, streams, post, comb, fn, base, scale, iters, hc_eps, rms_eps, *norm):
    """Stock SGLang's hc_post with the next hc_pre."""
    args = (output, streams, post.unsqueeze(-1), comb, fn, scale, base)
    args = (*args, rms_eps, hc_eps, hc_eps, 2.0, iters)
    return stock_module().mhc_fused_post_pre(*args, **norm_arguments(norm))


def stock_head(streams, fn, base, scale, hc_eps, rms_eps):
    """Stock SGLang's hc_head."""
    from sglang.kernels.ops.layernorm.mhc_head import fused_hc_head

    return fused_hc_head(streams, fn, scale, base, rms_eps, hc_eps)


def mix_inputs(tokens, hidden, rows, norm=False):
    """(argument lists, bytes) of hc_pre or hc_head; norm: with a norm weight."""
    total = tokens * hidden * 10 + rows * hidden * 16 + tokens * (rows - 4) * 4
    arguments = []
    for _ in range(copies_for(total)):
        p = cases.parameters(hidden, rows, "cuda")
        streams = torch.randn(tokens, 4, hidden, device="cuda").bfloat16()
        iters = [cases.ITERS] if rows == 24 else []
        weight = [torch.rand(hidden, device="cuda").bfloat16()] if norm else []
        arguments.append([streams, p.fn, p.base, p.scale, *iters, cases.EPS, cases.EPS, *weight])
    return arguments, total


def post_inputs(tokens, hidden):
    """(argument lists, bytes) of hc_post."""
    total = tokens * (hidden * 18 + 80)
    arguments = []
    for _ in range(copies_for(total)):
        streams = torch.randn(tokens, 4, hidden, device="cuda").bfloat16()
        output = torch.randn(tokens, hidden, device="cuda").bfloat16()
        post, comb = torch.rand(tokens, 4, device="cuda"), torch.rand(tokens, 4, 4, device="cuda")
        arguments.append([output, streams, post, comb])
    return arguments, total


def both_inputs(tokens, hidden):
    """(argument lists, bytes) of hc_post_pre with the norm."""
    posts, total = post_inputs(tokens, hidden)
    total += tokens * (hidden * 2 + 80) + 24 * hidden * 16
    mixes, _ = mix_inputs(1, hidden, 24, norm=True)
    return [
        [*post, *mixes[i % len(mixes)][1:]] for i, post in enumerate(posts[: copies_for(total)])
    ], total


def query_inputs(tokens, heads):
    """(argument lists, bytes) of indexer_query."""
    total = tokens * (heads * 512 + 256 + 8)
    table = build_rope_table(8192, 160000.0).cuda()
    positions = torch.arange(tokens, device="cuda") % 8192
    return [
        [torch.randn(tokens, heads, 128, device="cuda").bfloat16(), positions, table]
        for _ in range(copies_for(total))
    ], total


def all_cases(quick):
    """Name, tokens, width, builder of inputs, operation, its reference, stock's or None."""
    for hidden in (4096, 7168):
        for tokens in (1, 16, 64, 4096) if quick else (1, 4, 16, 64, 128, 256, 512, 1024, 4096):
            pre = functools.partial(mix_inputs, tokens, hidden, 24)
            yield "hc_pre", tokens, hidden, pre, hc_pre, reference.hc_pre, stock_pre
            normed = functools.partial(mix_inputs, tokens, hidden, 24, True)
            yield "pre+norm", tokens, hidden, normed, hc_pre, reference.hc_pre, stock_pre
            post = functools.partial(post_inputs, tokens, hidden)
            yield "hc_post", tokens, hidden, post, hc_post, reference.hc_post, stock_post
            both, plain = functools.partial(both_inputs, tokens, hidden), reference.hc_post_pre
            yield "post_pre", tokens, hidden, both, hc_post_pre, plain, stock_post_pre
        for tokens in (16,) if quick else (1, 16, 256):
            head = functools.partial(mix_inputs, tokens, hidden, 4)
            yield "hc_head", tokens, hidden, head, hc_head, reference.hc_head, stock_head
    for tokens in (16, 4096) if quick else (1, 16, 64, 256, 4096):
        query = functools.partial(query_inputs, tokens, 64)
        plain = query_reference.indexer_query
        yield "indexer_query", tokens, 128, query, indexer_query, plain, None


def time_of(operation, arguments):
    """Microseconds of one call."""
    return graph_time([functools.partial(operation, *args) for args in arguments])


def rival_time(operation, arguments, failures):
    """As `time_of`, or None with the reason added to failures."""
    try:
        return time_of(operation, arguments)
    except Exception as error:
        failures.add(f"{operation.__name__}: {type(error).__name__}: {str(error)[:300]}")
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    roof, name = memory_rate() / 1e12, torch.cuda.get_device_name()
    has_stock = importlib.util.find_spec("sglang") is not None
    print(f"{name}: {roof:.2f} TB/s over 1 GiB; stock SGLang {'found' if has_stock else 'absent'}")
    print("op            tokens width      MB      us copy us % copy  eager compiled  stock (us)")
    rows, failures = [], set()
    for operation, tokens, width, build, ours, plain, stock in all_cases(options.quick):
        arguments, total = build()
        row = {"op": operation, "tokens": tokens, "width": width, "bytes": total}
        row["us"], row["copy_us"] = time_of(ours, arguments), copy_time(total)
        few = arguments[: max(4, len(arguments) // 8)]
        row["eager_us"] = time_of(plain, few)
        row["compiled_us"] = time_of(torch.compile(plain), few) if options.compile else None
        row["stock_us"] = rival_time(stock, arguments, failures) if has_stock and stock else None
        rows.append(row)
        others = [row["eager_us"], row["compiled_us"], row["stock_us"]]
        shown = " ".join("      -" if t is None else f"{t:>7.1f}" for t in others)
        share = 100 * row["copy_us"] / row["us"]
        print(
            f"{operation:<14}{tokens:>6}{width:>6}{total / 1e6:>8.2f}{row['us']:>8.2f}"
            f"{row['copy_us']:>8.2f}{share:>7.0f} {shown}",
            flush=True,
        )
        del arguments
    print("\n".join(sorted(failures)))
    report = {"device": name, "copy_tb_s": roof, "rows": rows, "failures": sorted(failures)}
    (options.out / "bench_mhc.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

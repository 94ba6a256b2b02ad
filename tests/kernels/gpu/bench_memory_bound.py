"""kv_store, norm_rope and compress against a copy of as many bytes.

    python bench_memory_bound.py --out DIR [--check] [--quick]

Every time is the median over replays of a CUDA graph that holds several calls on different inputs,
all of which together exceed L2; L2 is overwritten before each replay, so inputs come from memory.
The bound is a copy kernel (torch copy_) that reads and writes the same number of bytes in total,
measured the same way; the rate of a 1 GiB copy is printed beside it. --check first compares with
the reference and prints every failure. compress counts both of its launches.
"""

import argparse
import functools
import json
import math
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import memory_bound_cases as cases
from timing import graph_time, memory_rate

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels.compress.compress import compress_store
from sglang_dsv4.kernels.kv_store.kv_store import kv_store
from sglang_dsv4.kernels.norm_rope.norm_rope import inverse_rope, q_norm_rope

COLD_BYTES = 200 << 20
BF16 = torch.bfloat16
RECORDS = {
    "nvfp4-64": RecordLayout(KVFormat.NVFP4, 64),
    "nvfp4-2": RecordLayout(KVFormat.NVFP4, 2),
}
KEYS = IndexerLayout(KVFormat.NVFP4, 64)


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


def kv_store_case(tokens):
    """(calls, bytes that one call must move)."""
    layout = RECORDS["nvfp4-64"]
    table = cases.rope_table("cuda")
    total = tokens * (1024 + 256 + 16 + layout.record_bytes)
    weight = torch.rand(512, device="cuda").bfloat16()
    calls = []
    for _ in range(copies_for(total)):
        kv = torch.randn(tokens, 512, device="cuda").bfloat16()
        pool = torch.zeros(-(-tokens // 64), layout.page_bytes, dtype=torch.uint8, device="cuda")
        slots = torch.arange(tokens, device="cuda")
        positions = slots % cases.MAX_POSITION
        calls.append(
            functools.partial(
                kv_store, kv, weight, cases.EPS, positions, table, slots, pool, layout
            )
        )
    return calls, total


def norm_rope_case(tokens, inverse, heads=64):
    """(calls, bytes that one call must move)."""
    table, total = cases.rope_table("cuda"), tokens * (heads * 2048 + 256 + 8)
    positions = torch.arange(tokens, device="cuda") % cases.MAX_POSITION
    calls = []
    for _ in range(copies_for(total)):
        q = torch.randn(tokens, heads, 512, device="cuda", dtype=BF16)
        if inverse:
            calls.append(functools.partial(inverse_rope, q, positions, table))
        else:
            calls.append(functools.partial(q_norm_rope, q, positions, table, cases.EPS))
    return calls, total


def compress_case(lengths, prefixes, ratio, layout):
    """(calls, bytes that one call must move: projections, records, the state's rows)."""
    width, table = layout.head_dim, cases.rope_table("cuda", compressed=True)
    weight = torch.rand(width, device="cuda").bfloat16()
    calls, total, copies, built = [], 0, 1, 0
    while built < copies:
        batch = cases.Batch(ratio, lengths, prefixes, width, BF16, "cuda", seed=built)
        plan, windows = batch.plan, len(batch.plan.slots)
        if not built:
            series = batch.kv.shape[1]
            source = plan.source
            per_row = 2 * series // (2 if ratio == 4 else 1)
            from_batch = int(((source >= 0) & (source < len(batch.kv))).sum())
            from_state = int((source >= len(batch.kv)).sum())
            total = from_batch * per_row * 2 + from_state * per_row * 4
            total += windows * (layout.record_bytes + 256 + 16 + 8 * source.shape[1])
            total += len(plan.write_rows) * (2 * series * (2 + 4) + 24)
            total += batch.bias.numel() * 4
            copies = copies_for(total)
        pool = torch.zeros(
            windows // layout.page_size + 1, layout.page_bytes, dtype=torch.uint8, device="cuda"
        )
        calls.append(
            functools.partial(batch.run, compress_store, batch.state, pool, layout, weight, table)
        )
        built += 1
    return calls, total


def all_cases(quick):
    """Name, tokens, and a function that builds the calls."""
    for tokens in (256, 4096) if quick else (1, 64, 256, 1024, 4096, 16384):
        yield "kv_store", tokens, functools.partial(kv_store_case, tokens)
    for tokens in (64, 4096) if quick else (1, 16, 64, 256, 1024, 4096):
        for inverse in (False, True):
            name = "inverse_rope" if inverse else "q_norm_rope"
            yield name, tokens, functools.partial(norm_rope_case, tokens, inverse)
    targets = [
        ("compress C4", 4, RECORDS["nvfp4-64"]),
        ("compress C128", 128, RECORDS["nvfp4-2"]),
        ("compress keys", 4, KEYS),
    ]
    for name, ratio, layout in targets:
        for tokens in (4096,) if quick else (512, 4096, 8192):
            build = functools.partial(compress_case, [tokens], [0], ratio, layout)
            yield f"{name} prefill", tokens, build
        for requests in (256,) if quick else (1, 16, 64, 256):
            prefixes = [1000 + 37 * i for i in range(requests)]
            build = functools.partial(compress_case, [1] * requests, prefixes, ratio, layout)
            yield f"{name} decode", requests, build


def run_checks():
    """Every check once; prints what failed and returns how many did."""
    records = [RecordLayout(kv_format, size) for kv_format in KVFormat for size in (64, 2, 61)]
    keys = [IndexerLayout(kv_format, 64) for kv_format in KVFormat]
    checks = []
    for layout in records:
        for dtype in (BF16, torch.float32, torch.float16):
            checks.append((cases.check_kv_store, kv_store, layout, dtype, torch.float32, True))
        checks.append((cases.check_kv_store, kv_store, layout, BF16, BF16, False))
    for heads in (1, 8, 17, 64, 128):
        for exact in (True, False):
            checks.append((cases.check_norm_rope, q_norm_rope, heads, BF16, exact, False))
            checks.append((cases.check_norm_rope, inverse_rope, heads, BF16, exact, True))
    targets = [(4, layout) for layout in (records[0], records[3], *keys)]
    targets += [(128, layout) for layout in (records[1], records[4])]
    for ratio, layout in targets:
        for kind in cases.RAGGED:
            checks.append((cases.check_compress, compress_store, ratio, layout, kind, BF16, BF16))
        checks.append((cases.check_chunked_prefill, compress_store, ratio, layout, BF16))
    failures = 0
    for number, (check, op, *arguments) in enumerate(checks):
        label = f"{check.__name__} {op.__name__} {' '.join(str(a) for a in arguments)}"
        torch.manual_seed(number)
        try:
            different = check(op, "cuda", *arguments)
            torch.cuda.synchronize()
        except Exception:
            failures += 1
            print(f"FAILED {label}\n{traceback.format_exc(limit=2)}", flush=True)
        else:
            if different:
                print(f"ok {label}: {different:.2e} of the bytes beside the reference's")
    print(f"{len(checks) - failures} of {len(checks)} checks passed", flush=True)
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failures = run_checks() if options.check else 0
    roof = memory_rate() / 1e12
    name = torch.cuda.get_device_name()
    print(f"{name}: {roof:.2f} TB/s over 1 GiB; floor of an empty launch below")
    floor = copy_time(1024)
    print(f"512-byte copy: {floor:.2f} us")
    print("operation              tokens      MB       us  copy us  % of copy    TB/s  % of roof")
    rows = []
    for operation, tokens, build in all_cases(options.quick):
        calls, total = build()
        time, copied = graph_time(calls), copy_time(total)
        rows.append(
            {"op": operation, "tokens": tokens, "bytes": total, "us": time, "copy_us": copied}
        )
        rate = total / time / 1e6
        print(
            f"{operation:<22}{tokens:>7}{total / 1e6:>8.2f}{time:>9.2f}{copied:>9.2f}"
            f"{100 * copied / time:>11.0f}{rate:>8.2f}{100 * rate / roof:>11.0f}",
            flush=True,
        )
        del calls
    report = {"device": name, "copy_tb_s": roof, "small_copy_us": floor, "rows": rows}
    (options.out / "bench_memory_bound.json").write_text(json.dumps(report, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

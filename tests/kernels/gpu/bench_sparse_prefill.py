"""Sparse prefill: 4096 new tokens behind a long prefix, beside FlashMLA's FP8 kernel.

    python bench_sparse_prefill.py --out DIR

One request of PREFIX + QUERIES tokens; each query lists the last 128 tokens and 512 random ones of
the compressed entries that it sees (one for 4 tokens). The records are shared by many queries, so
most reads hit L2 and the products bound the time: the bound is flops / matmul rate of the same run.

The rival is the FP8 kernel of sparse decode with as many queries (64 or 128 heads, fewer are
padded): FlashMLA's prefill kernel `flash_mla_sparse_fwd` is tried once, and its answer printed.
The package that SGLang installs refuses it on anything but SM100f. A row that fails prints its
error and goes to "errors" of the JSON.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_sparse_attention import (
    flash_mla_caches,
    flash_mla_fp8,
    measure_roofs,
    random_bytes,
    rival_heads,
)
from sparse_attention_cases import describe_plan
from sparse_attention_inputs import SCALE
from timing import graph_time

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention.plan import plan_for
from sglang_dsv4.kernels.attention.sparse_attention import sparse_attention
from sglang_dsv4.kernels.hardware import current_arch, num_sms

PREFIX, QUERIES = 28672, 4096
WINDOW, TOPK, RATIO = 128, 512, 4
HEADS = (8, 16, 64, 128)


class Prefill:
    """Pools and lists of the request; the window pool holds the last QUERIES + WINDOW tokens."""

    def __init__(self):
        self.layout = RecordLayout(KVFormat.NVFP4, 64)
        self.sizes = (QUERIES + WINDOW, (PREFIX + QUERIES) // RATIO)
        self.pools = [
            random_bytes(-(-size // 64), self.layout.page_bytes) & 0x37 for size in self.sizes
        ]
        token = torch.arange(QUERIES, device="cuda")
        self.window = (token[:, None] + torch.arange(WINDOW, device="cuda")).int()
        visible = (PREFIX + token + 1) // RATIO
        draw = torch.rand(QUERIES, TOPK, device="cuda")
        self.chosen = (draw * visible[:, None]).int()

    def ours(self, q):
        sinks = torch.zeros(q.shape[1], device="cuda")
        call = partial(
            sparse_attention,
            q,
            self.window,
            self.pools[0],
            self.layout,
            self.chosen,
            self.pools[1],
            self.layout,
            sinks,
            SCALE,
        )
        return graph_time([call])

    def rival(self, q, caches):
        """FlashMLA FP8 on as many heads as it serves; None where it is not installed."""
        if caches is None:
            return None
        padded = q.new_zeros(QUERIES, rival_heads(q.shape[1]), 512)
        padded[:, : q.shape[1]] = q
        return graph_time([partial(flash_mla_fp8(padded, caches), self.window, self.chosen)])


def prefill_kernel_answer():
    """What FlashMLA's own prefill kernel says to one small call on this GPU."""
    try:
        import flash_mla

        q = torch.zeros(64, 64, 512, dtype=torch.bfloat16, device="cuda")
        keys = torch.zeros(1024, 1, 512, dtype=torch.bfloat16, device="cuda")
        indices = torch.zeros(64, 1, 512, dtype=torch.int32, device="cuda")
        flash_mla.flash_mla_sparse_fwd(q, keys, indices, SCALE)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "runs"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    roofs = measure_roofs()
    arch, sms = current_arch(), num_sms(torch.cuda.current_device())
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {roofs[0] / 1e12:.2f} TB/s, bf16 matmul {roofs[1] / 1e12:.0f} TFLOP/s")
    prefill = Prefill()
    caches = flash_mla_caches(prefill.sizes)
    print("prefill: 4096 queries\n   H   ours us   FP8 us  ratio % bound  plan")
    rows, errors = [], []
    for heads in HEADS:
        try:
            q = torch.randn(QUERIES, heads, 512, device="cuda").bfloat16()
            plan = plan_for(QUERIES, heads, (WINDOW + TOPK) // 64, sms, arch)
            row = {
                "heads": heads,
                "ours_us": prefill.ours(q),
                "flash_mla_us": prefill.rival(q, caches),
                "bound_us": 4 * QUERIES * (WINDOW + TOPK) * heads * 512 / roofs[1] * 1e6,
                "plan": describe_plan(plan),
            }
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            errors.append({"heads": heads, "error": message})
            print(f"{heads:>4}  failed: {message}", flush=True)
            continue
        rows.append(row)
        ours, theirs = row["ours_us"], row["flash_mla_us"]
        cells = f"{heads:>4}{ours:>10.1f}"
        cells += " " * 16 if theirs is None else f"{theirs:>9.1f}{theirs / ours:>7.2f}"
        print(f"{cells}{100 * row['bound_us'] / ours:>8.0f}  {row['plan']}", flush=True)
    answer = prefill_kernel_answer()
    print(f"flash_mla_sparse_fwd: {answer}")
    report = {
        "device": name,
        "copy": roofs[0],
        "matmul": roofs[1],
        "rows": rows,
        "errors": errors,
        "flash_mla_sparse_fwd": answer,
    }
    (options.out / "bench_sparse_prefill.json").write_text(json.dumps(report, indent=1))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

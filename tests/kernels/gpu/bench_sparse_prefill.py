"""Sparse prefill: 4096 new tokens behind a long prefix, beside FlashMLA's bf16 kernel.

    python bench_sparse_prefill.py --out DIR

One request of PREFIX + QUERIES tokens; each query lists the last 128 tokens and 512 random ones of
the compressed entries that it sees (one for 4 tokens). The records are shared by many queries, so
most reads hit L2 and the products bound the time: the bound is flops / matmul rate of the same run.

FlashMLA's kernel (`flash_mla_sparse_fwd`, 64 or 128 heads, fewer are padded) reads bf16 keys, which
an NVFP4 pool does not hold: every record that the queries may list must be dequantised to a bf16
buffer first. No kernel here does only that, so it is timed with the plain-torch `read_records`
in a CUDA graph ("dequant us"); "floor us" is what its bytes would take at the copy bandwidth. The
ratios count FlashMLA with the measured dequantisation and with its floor.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_sparse_attention import measure_roofs, random_bytes
from sparse_attention_cases import describe_plan
from sparse_attention_inputs import SCALE
from timing import graph_time

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention.plan import plan_for
from sglang_dsv4.kernels.attention.sparse_attention import sparse_attention
from sglang_dsv4.kernels.hardware import current_arch, num_sms
from sglang_dsv4.kernels.reference.kv_store import read_records

PREFIX, QUERIES = 28672, 4096
WINDOW, TOPK, RATIO = 128, 512, 4
HEADS = (8, 16, 64, 128)


class Prefill:
    """Pools and lists of the request; the window pool holds the last QUERIES + WINDOW tokens."""

    def __init__(self):
        self.layout = RecordLayout(KVFormat.NVFP4, 64)
        entries, latest = (PREFIX + QUERIES) // RATIO, QUERIES + WINDOW
        self.sizes = (latest, entries)
        self.pools = [
            random_bytes(-(-size // 64), self.layout.page_bytes) & 0x37 for size in self.sizes
        ]
        token = torch.arange(QUERIES, device="cuda")
        self.window = (token[:, None] + torch.arange(WINDOW, device="cuda")).int()
        visible = (PREFIX + token + 1) // RATIO
        draw = torch.rand(QUERIES, TOPK, device="cuda")
        self.chosen = (draw * visible[:, None]).int()

    def ours(self, q, sinks):
        return graph_time(
            [
                lambda: sparse_attention(
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
            ]
        )

    def dequantised(self):
        """bf16 [all records, 1, 512], window records first."""
        parts = [
            read_records(pool, torch.arange(size, device="cuda"), self.layout)
            for pool, size in zip(self.pools, self.sizes, strict=True)
        ]
        return torch.cat(parts).bfloat16().unsqueeze(1)

    def dequant_floor(self, copy_rate):
        return sum(self.sizes) * (384 + 1024) / copy_rate * 1e6

    def rival(self, q, sinks, keys):
        """FlashMLA's bf16 kernel on as many heads as it serves; None where it is not installed."""
        try:
            import flash_mla
        except ImportError as error:
            print(f"no FlashMLA: {error}")
            return None
        heads = 64 if q.shape[1] <= 64 else 128
        padded = q.new_zeros(QUERIES, heads, 512)
        padded[:, : q.shape[1]] = q
        indices = torch.cat((self.window, self.chosen + self.sizes[0]), dim=1).unsqueeze(1)
        sink = sinks.new_zeros(heads)
        return graph_time(
            [
                lambda: flash_mla.flash_mla_sparse_fwd(
                    padded, keys, indices, SCALE, attn_sink=sink, use_legacy=True
                )
            ]
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    roofs = measure_roofs()
    arch, sms = current_arch(), num_sms(torch.cuda.current_device())
    prefill = Prefill()
    keys = prefill.dequantised()
    dequant = graph_time([prefill.dequantised])
    floor = prefill.dequant_floor(roofs[0])
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {roofs[0] / 1e12:.2f} TB/s, bf16 matmul {roofs[1] / 1e12:.0f} TFLOP/s")
    print(f"dequantisation of {sum(prefill.sizes)} records: {dequant:.1f} us, floor {floor:.1f} us")
    print("   H   ours us  bf16 us  ratio  with floor % bound  plan")
    rows = []
    for heads in HEADS:
        q = torch.randn(QUERIES, heads, 512, device="cuda").bfloat16()
        sinks = torch.zeros(heads, device="cuda")
        plan = plan_for(QUERIES, heads, (WINDOW + TOPK) // 64, sms, arch)
        row = {
            "heads": heads,
            "ours_us": prefill.ours(q, sinks),
            "flash_mla_us": prefill.rival(q, sinks, keys),
            "dequant_us": dequant,
            "dequant_floor_us": floor,
            "bound_us": 4 * QUERIES * (WINDOW + TOPK) * heads * 512 / roofs[1] * 1e6,
            "plan": describe_plan(plan),
        }
        rows.append(row)
        ours, theirs = row["ours_us"], row["flash_mla_us"]
        cells = f"{heads:>4}{ours:>10.1f}"
        if theirs is not None:
            with_dequant, with_floor = (theirs + dequant) / ours, (theirs + floor) / ours
            cells += f"{theirs:>9.1f}{with_dequant:>7.2f}{with_floor:>12.2f}"
        print(f"{cells}{100 * row['bound_us'] / ours:>8.0f}  {row['plan']}", flush=True)
    report = {"device": name, "copy": roofs[0], "matmul": roofs[1], "rows": rows}
    (options.out / "bench_sparse_prefill.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

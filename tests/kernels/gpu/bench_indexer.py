"""The indexer against DeepGEMM's FP8 logits and against what one pass over its data costs.

    python bench_indexer.py --out DIR [--quick]

Decode: one token each of `batch` requests over `entries` compressed entries (a quarter of the
context). Prefill: the last 4096 tokens of one request. 64 heads, top-k 512. Every time is the
median over replays of a CUDA graph that holds several calls on different pages; L2 is overwritten
before each replay, so keys come from memory. The bound of the scores is the larger of bytes / copy
bandwidth and flops / bf16 matmul rate, both measured in the same run. DeepGEMM reads 132 bytes a
key and multiplies in FP8, at twice the rate of bf16; it does not select, so only scores compare.
Its plan of a decode batch, made once a forward for all layers, is timed apart ("plan us").
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

from timing import graph_time, memory_rate

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.kernels.indexer.indexer import indexer_scores, indexer_topk, select_topk

LAYOUT = IndexerLayout(KVFormat.NVFP4, 64)
HEADS, TOPK = 64, 512
COLD_BYTES = 160 << 20
PREFILL_TOKENS = 4096


def measure_roofs():
    """(bytes/s of an elementwise kernel, bf16 matmul flop/s) of this GPU, in this run."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    rate = 2 * 8192**3 / (graph_time([lambda: a @ a] * 4) * 1e-6)
    return memory_rate(), rate


class Workload:
    """Requests of one length, with enough copies of their keys to leave L2 cold."""

    def __init__(self, requests, entries, tokens_each):
        pages = entries // 64
        self.requests, self.entries, self.tokens = requests, entries, requests * tokens_each
        keys = requests * entries * LAYOUT.record_bytes
        self.copies = max(1, min(16, math.ceil(COLD_BYTES / keys)))
        if tokens_each > 1:
            self.copies = 1
        count = self.copies * requests * pages
        pool = torch.randint(0, 256, (count, LAYOUT.page_bytes), dtype=torch.uint8, device="cuda")
        pool[:, 64 * 64 :] = pool[:, 64 * 64 :] % 4 + 126
        self.pool = pool
        order = torch.randperm(count, device="cuda").int()
        self.tables = order.view(self.copies, requests, pages)
        self.q = torch.randn(self.tokens, HEADS, 128, device="cuda").bfloat16()
        self.weights = torch.randn(self.tokens, HEADS, device="cuda")
        self.rows = torch.arange(requests, device="cuda").repeat_interleave(tokens_each)
        back = torch.arange(tokens_each - 1, -1, -1, device="cuda")
        self.visible = (entries - back // 4).repeat(requests)
        rounds = min(self.copies, max(1, (1 << 30) // (self.tokens * entries * 4)))
        self.scores = torch.zeros(rounds, self.tokens, entries, device="cuda")
        self.slots = torch.zeros(self.tokens, TOPK, dtype=torch.int64, device="cuda")

    def time_scores(self):
        def call(i):
            indexer_scores(
                self.q,
                self.weights,
                self.pool,
                self.tables[i],
                self.rows,
                self.visible,
                TOPK,
                self.scores[i % len(self.scores)],
            )

        return graph_time([functools.partial(call, i) for i in range(self.copies)])

    def time_topk(self):
        def call(i):
            scores = self.scores[i % len(self.scores)]
            select_topk(scores, self.tables[i], self.rows, self.visible, self.slots)

        return graph_time([functools.partial(call, i) for i in range(self.copies)])

    def time_torch_topk(self):
        calls = [functools.partial(torch.topk, scores, TOPK) for scores in self.scores]
        return graph_time(calls)

    def time_both(self):
        def call(i):
            indexer_topk(
                self.q,
                self.weights,
                self.pool,
                LAYOUT,
                self.tables[i],
                self.rows,
                self.visible,
                TOPK,
            )

        return graph_time([functools.partial(call, i) for i in range(self.copies)])

    def bound(self, roofs):
        """Microseconds of the scores: the larger of bytes over bandwidth and flops over rate."""
        keys = self.requests * self.entries
        pairs = int(self.visible.sum())
        moved = keys * LAYOUT.record_bytes + pairs * 4 + self.q.nbytes
        return max(moved / roofs[0], 2 * pairs * HEADS * 128 / roofs[1]) * 1e6

    def topk_bound(self, roofs):
        """Microseconds of the top-k: its bytes over bandwidth."""
        return (int(self.visible.sum()) * 4 + self.slots.nbytes) / roofs[0] * 1e6

    def deep_gemm_decode(self, deep_gemm):
        """DeepGEMM's paged scores: calls on different pages, and its plan, made once a forward."""
        count = self.copies * self.requests * (self.entries // 64)
        cache = torch.zeros(count, 64, 1, 132, dtype=torch.uint8, device="cuda")
        # 64 keys of 128 e4m3 bytes, then 64 float32 scales.
        page = cache.view(count, 64 * 132)
        page[:, : 64 * 128].random_(0, 120)
        page[:, 64 * 128 :].view(torch.float32)[:] = 1.0
        q = self.q.view(self.tokens, 1, HEADS, 128).to(torch.float8_e4m3fn)
        lengths = torch.full((self.tokens, 1), self.entries, dtype=torch.int32, device="cuda")
        make_plan = functools.partial(
            deep_gemm.get_paged_mqa_logits_metadata, lengths, 64, deep_gemm.get_num_sms()
        )
        plan = make_plan()
        call = functools.partial(deep_gemm.fp8_paged_mqa_logits, q, cache, self.weights, lengths)

        def score(i):
            return call(self.tables[i], plan, self.entries, clean_logits=False)

        keys = page[self.tables[0, 0].long(), : 64 * 128].reshape(-1, 128)
        exact = (keys.view(torch.float8_e4m3fn).float() @ q[0, 0].float().mT).relu()
        exact = exact @ self.weights[0]
        error = (score(0)[0, : self.entries] - exact).abs().max() / exact.abs().max()
        if not error < 1e-2:
            raise RuntimeError(f"its scores are off by {float(error):.1e} of the largest")
        calls = [functools.partial(score, i) for i in range(self.copies)]
        return graph_time(calls), graph_time([make_plan])

    def deep_gemm_prefill(self, deep_gemm):
        """DeepGEMM's scores of contiguous keys, which need no plan."""
        keys = torch.randn(self.entries, 128, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.ones(self.entries, device="cuda")
        first = torch.zeros(self.tokens, dtype=torch.int32, device="cuda")
        q, last = self.q.to(torch.float8_e4m3fn), self.visible.int()
        call = functools.partial(
            deep_gemm.fp8_mqa_logits, q, (keys, scales), self.weights, first, last
        )
        return graph_time([functools.partial(call, clean_logits=False)]), 0.0

    def time_deep_gemm(self, deep_gemm):
        """(microseconds of DeepGEMM's scores of the same shape, of its plan)."""
        decode = self.requests == self.tokens
        return (self.deep_gemm_decode if decode else self.deep_gemm_prefill)(deep_gemm)


def import_deep_gemm():
    """The module, or None with the reason printed."""
    try:
        import deep_gemm
    except Exception as error:
        print(f"no DeepGEMM: {type(error).__name__}: {error}")
        return None
    return deep_gemm


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    roofs = measure_roofs()
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {roofs[0] / 1e12:.2f} TB/s, bf16 matmul {roofs[1] / 1e12:.0f} TFLOP/s")
    deep_gemm = import_deep_gemm()
    batches = (1, 16, 64, 128) if options.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    shapes = [(batch, entries, 1) for entries in (8192, 32768) for batch in batches]
    shapes.append((1, 8192, PREFILL_TOKENS))
    rows = []
    print(
        "   batch entries  scores us  % bound   top-k us  torch.topk  both us  DeepGEMM  ratio"
        "  plan us"
    )
    for requests, entries, tokens_each in shapes:
        work = Workload(requests, entries, tokens_each)
        row = {
            "requests": requests,
            "entries": entries,
            "tokens_each": tokens_each,
            "scores_us": work.time_scores(),
            "topk_us": work.time_topk(),
            "torch_topk_us": work.time_torch_topk(),
            "both_us": work.time_both(),
            "bound_us": work.bound(roofs),
            "topk_bound_us": work.topk_bound(roofs),
            "deep_gemm_us": None,
            "deep_gemm_plan_us": None,
        }
        if deep_gemm is not None:
            try:
                row["deep_gemm_us"], row["deep_gemm_plan_us"] = work.time_deep_gemm(deep_gemm)
            except Exception:
                print(f"DeepGEMM failed: {traceback.format_exc(limit=-1)[-600:]}")
                deep_gemm = None
        rows.append(row)
        rival = row["deep_gemm_us"]
        label = f"{requests}x{tokens_each}" if tokens_each > 1 else str(requests)
        print(
            f"{label:>8}{entries:>8}{row['scores_us']:>11.1f}"
            f"{100 * row['bound_us'] / row['scores_us']:>9.0f}{row['topk_us']:>11.1f}"
            f"{row['torch_topk_us']:>12.1f}{row['both_us']:>9.1f}"
            + (f"{rival:>10.1f}{rival / row['scores_us']:>7.2f}" if rival else "")
            + (f"{row['deep_gemm_plan_us']:>9.1f}" if rival else ""),
            flush=True,
        )
        del work
        torch.cuda.empty_cache()
    report = {"device": name, "copy": roofs[0], "matmul": roofs[1], "rows": rows}
    (options.out / "bench_indexer.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

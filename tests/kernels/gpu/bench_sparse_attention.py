"""Sparse decode against FlashMLA's FP8 kernel, and against what one pass over the bytes costs.

    python bench_sparse_attention.py --out DIR [--check] [--quick] [--sweep] [--heads H ...]

Every time is the median over replays of a CUDA graph that holds several calls on different lists;
L2 is overwritten before each replay, so records come from memory. FlashMLA (584-byte FP8 records,
legacy kernels) serves 64 or 128 heads only, so for fewer heads its time is that of 64. The bound
is the larger of bytes / copy bandwidth and flops / matmul rate, both measured in the same run.
--check first compares with the reference and prints every failure; --sweep times every kernel,
tile of heads and number of splits beside the chosen ones (SWEEP_SPLITS). A row that fails prints
its error and goes to "errors" of the JSON; the others are still timed.
"""

import argparse
import json
import math
import sys
import traceback
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import sparse_attention_cases as cases
from sparse_attention_inputs import SCALE, make_inputs
from timing import graph_time, memory_rate

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention.plan import IMPLEMENTATIONS, Plan, plan_for
from sglang_dsv4.kernels.attention.sparse_attention import sparse_attention
from sglang_dsv4.kernels.hardware import current_arch, num_sms

WINDOW = 128
COLD_BYTES = 160 << 20
POOL_TOKENS = 1 << 19
FP8_RECORD, FP8_PAGE = 584, 64
HEADS = (8, 16, 32, 64, 128)
BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 16, 64, 128, 256)
SWEEP_SPLITS = (1, 2, 3, 4, 5, 9, 18)


def measure_roofs():
    """(copy bytes/s, bf16 matmul flop/s) of this GPU, in this run."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    rate = 2 * 8192**3 / (graph_time([lambda: a @ a] * 4) * 1e-6)
    return memory_rate(), rate


def random_bytes(pages, size):
    return torch.randint(0, 256, (pages, size), dtype=torch.uint8, device="cuda")


class Workload:
    """Lists and pools of one (batch, heads, top-k), with enough copies to leave L2 cold."""

    def __init__(self, batch, heads, topk, pools):
        self.batch, self.heads, self.topk = batch, heads, topk
        listed = batch * (WINDOW + topk)
        self.copies = max(4, min(32, math.ceil(COLD_BYTES / (listed * 384))))
        self.window_pool, self.comp_pool = pools
        self.layout = RecordLayout(KVFormat.NVFP4, 64)
        tokens = POOL_TOKENS
        g = torch.Generator("cuda").manual_seed(batch * 7 + heads + topk)
        self.q = torch.randn(batch, heads, 512, device="cuda", generator=g).bfloat16()
        self.sinks = torch.zeros(heads, device="cuda")

        def draw(count):
            return torch.randint(0, tokens, (self.copies, batch, count), device="cuda", generator=g)

        self.window_slots, self.comp_slots = draw(WINDOW).int(), draw(topk).int()

    def ours(self, plan=None, repeats=20):
        return graph_time(
            [
                lambda i=i: sparse_attention(
                    self.q,
                    self.window_slots[i],
                    self.window_pool,
                    self.layout,
                    self.comp_slots[i],
                    self.comp_pool,
                    self.layout,
                    self.sinks,
                    SCALE,
                    plan=plan,
                )
                for i in range(self.copies)
            ],
            repeats,
        )

    def rival(self, caches):
        """FlashMLA FP8 with 64 heads, or 128 for more; None where it is not installed."""
        if caches is None:
            return None
        heads = rival_heads(self.heads)
        q = self.q.new_zeros(self.batch, heads, 512)
        q[:, : self.heads] = self.q
        call = flash_mla_fp8(q, caches)
        lists = zip(self.window_slots, self.comp_slots, strict=True)
        return graph_time([partial(call, window, comp) for window, comp in lists])

    def bound(self, roofs):
        """Microseconds: the larger of bytes over bandwidth and flops over rate."""
        keys = self.batch * (WINDOW + self.topk)
        moved = keys * 384 + 2 * self.batch * self.heads * 1024
        flops = 4 * keys * self.heads * 512
        return max(moved / roofs[0], flops / roofs[1]) * 1e6


def rival_heads(heads):
    """The heads that FlashMLA computes for so many: 64, or 128."""
    return 64 if heads <= 64 else 128


def flash_mla_fp8(q, caches):
    """Function of int32 window and compressed slots [T, K] that runs FlashMLA for q [T, H, 512]."""
    import flash_mla

    sinks = torch.zeros(q.shape[1], device="cuda")
    meta = flash_mla.get_mla_metadata()[0]

    def call(window, comp):
        return flash_mla.flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=caches[0],
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=meta,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=window.unsqueeze(1),
            attn_sink=sinks,
            extra_k_cache=caches[1],
            extra_indices_in_kvcache=comp.unsqueeze(1),
            use_legacy=True,
        )

    return call


def flash_mla_caches(sizes=(POOL_TOKENS, POOL_TOKENS)):
    """FP8 pools of so many records as FlashMLA reads them, or None with the reason printed."""
    try:
        import flash_mla  # noqa: F401
    except ImportError as error:
        print(f"no FlashMLA: {error}")
        return None
    page_bytes = math.ceil(FP8_RECORD * FP8_PAGE / 576) * 576
    caches = []
    for size in sizes:
        storage = random_bytes(math.ceil(size / FP8_PAGE), page_bytes) & 0x37
        view = storage[:, : FP8_PAGE * FP8_RECORD].view(-1, FP8_PAGE, 1, FP8_RECORD)
        caches.append(view)
    return caches


def run_checks():
    """Every case of the GPU tests; prints failures with their place, returns their number."""
    failures, passed = 0, 0

    def attempt(name, function):
        nonlocal failures, passed
        try:
            function()
            passed += 1
        except AssertionError as error:
            failures += 1
            print(f"FAIL {name}\n{error}", flush=True)
        except Exception:
            failures += 1
            print(f"ERROR {name}\n{traceback.format_exc(limit=4)}", flush=True)

    for page in (64, 2):
        for plan, heads in cases.head_tile_cases():
            for splits in (1, 3):
                split = replace(plan, splits=splits)
                name = f"each key alone, page {page}, {cases.describe_plan(split)}"
                call = partial(cases.check_each_key_alone, page, split, heads)
                attempt(name, call)
    for name, make, plan in (*cases.random_cases(), *cases.length_cases()):
        attempt(name, lambda make=make, plan=plan: cases.check(make(), plan))
    for name, inputs in cases.hostile_inputs():
        for plan in (None, *cases.each_plan(inputs.q.shape[1], (1, 2))):
            attempt(f"hostile: {name}, {plan}", partial(cases.check, inputs, plan))

    def repeats(heads, plan):
        inputs = make_inputs(64, heads, 128, 512, 64, seed=3)
        first = inputs.run(plan)[0]
        different = sum(not torch.equal(inputs.run(plan)[0], first) for _ in range(200))
        assert different == 0, f"{different} of 200 repeats differ"

    for heads in (16, 64):
        for plan in cases.each_plan(heads, (2,)):
            attempt(
                f"bitwise stability, {cases.describe_plan(plan)}", partial(repeats, heads, plan)
            )
    print(f"checks: {passed} passed, {failures} failed", flush=True)
    return failures


def sweep(work, tiles, sms, arch):
    """Microseconds by "kernel tile x splits", for the plans that a good choice could take."""
    times = {}
    for kernel, implementation in IMPLEMENTATIONS.items():
        if not implementation.takes(work.heads, arch):
            continue
        for tile in implementation.head_tiles(work.heads, arch):
            blocks = work.batch * math.ceil(work.heads / tile)
            counts = {math.ceil(tiles / math.ceil(tiles / wanted)) for wanted in SWEEP_SPLITS}
            for splits in sorted(counts):
                if splits == 1 or blocks * splits <= 8 * sms:
                    plan = Plan(kernel, tile, splits)
                    times[cases.describe_plan(plan)] = work.ours(plan, repeats=7)
    return times


def table_row(row):
    rival = row["flash_mla_us"]
    cells = f"{row['heads']:>4}{row['topk']:>6}{row['batch']:>6}{row['ours_us']:>9.1f}"
    cells += f"{rival:>9.1f}{rival / row['ours_us']:>7.2f}" if rival else " " * 16
    return cells + f"{100 * row['bound_us'] / row['ours_us']:>8.0f}  {row['plan']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--heads", type=int, nargs="+")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failures = run_checks() if options.check else 0
    roofs = measure_roofs()
    arch, sms = current_arch(), num_sms(torch.cuda.current_device())
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {roofs[0] / 1e12:.2f} TB/s, bf16 matmul {roofs[1] / 1e12:.0f} TFLOP/s")
    layout = RecordLayout(KVFormat.NVFP4, 64)
    # Random bytes but for the sign-free small scales: time does not depend on the values.
    pools = [random_bytes(POOL_TOKENS // 64, layout.page_bytes) & 0x37 for _ in range(2)]
    caches = flash_mla_caches()
    rivals, rows, errors = {}, [], []
    print("   H  topk batch  ours us   FP8 us  ratio % bound  plan")
    batches = QUICK_BATCHES if options.quick else BATCHES
    for topk, heads, batch in product((512, 1024), options.heads or HEADS, batches):
        tiles = math.ceil(WINDOW / 64) + math.ceil(topk / 64)
        try:
            work = Workload(batch, heads, topk, pools)
            key = (topk, rival_heads(heads), batch)
            if key not in rivals:
                rivals[key] = work.rival(caches)
            row = {
                "heads": heads,
                "topk": topk,
                "batch": batch,
                "ours_us": work.ours(),
                "flash_mla_us": rivals[key],
                "bound_us": work.bound(roofs),
                "plan": cases.describe_plan(plan_for(batch, heads, tiles, sms, arch)),
            }
            print(table_row(row), flush=True)
            if options.sweep:
                row["sweep"] = sweep(work, tiles, sms, arch)
                print("      " + " ".join(f"{k}:{v:.1f}" for k, v in row["sweep"].items()))
            rows.append(row)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            errors.append({"heads": heads, "topk": topk, "batch": batch, "error": message})
            print(f"{heads:>4}{topk:>6}{batch:>6}  failed: {message}", flush=True)
    report = {
        "device": name,
        "copy": roofs[0],
        "matmul": roofs[1],
        "rows": rows,
        "errors": errors,
    }
    (options.out / "bench_sparse_attention.json").write_text(json.dumps(report, indent=1))
    return 1 if failures or errors else 0


if __name__ == "__main__":
    sys.exit(main())

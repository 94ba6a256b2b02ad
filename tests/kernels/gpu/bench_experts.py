"""Routed experts on records: gate and up, and down, beside the time of their bytes.

    python bench_experts.py --out DIR [--experts 64 --width 4096 --inner 2048 --chosen 6]

Timing as in `timing`: one call a graph, L2 overwritten before each replay, medians. Experts are
drawn at random, distinct for each token. Forms: the plan's; the same tiles with activations read
from L1 (unstaged), and as a ring of chunks. Floor: bytes of the weights of the experts that were
hit and of the activations, at the rate of an elementwise kernel in the same run.
"""

import argparse
import functools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from timing import graph_time, memory_rate

from sglang_dsv4.kernels.experts import grouped
from sglang_dsv4.kernels.experts.shape import CHUNK, PLACES
from sglang_dsv4.kernels.hardware import current_arch, num_sms
from sglang_dsv4.kernels.linear.records import COLUMNS, RECORD_BYTES, ROWS

TOKENS = (1, 8, 16, 32, 64, 128, 256)


def random_records(experts, out, width):
    """uint8 [E, out / 16, width / 64, 576] of random codes, scales of 1."""
    size = (experts, out // ROWS, width // COLUMNS, RECORD_BYTES)
    records = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    records[..., RECORD_BYTES - ROWS * COLUMNS // 16 :] = 0x38
    return records


def unstaged(shape):
    """The same launch with activations from L1."""
    return replace(shape, staged=0)


def ring(shape):
    """A ring of chunks; None where there is none."""
    made = replace(shape, split=1, staged=PLACES * CHUNK)
    fits = made.can_go_round and made.goes_round
    return made if fits and grouped.resident_blocks(made, current_arch()) else None


def time_of(shape, x, records, outer, routed, lists, out):
    """Median microseconds; None without a shape."""
    if shape is None:
        return None
    call = functools.partial(grouped.launch, shape, x, records, outer, routed, lists, out, 10.0)
    return graph_time([call])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    for name, value in (("experts", 64), ("width", 4096), ("inner", 2048), ("chosen", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    experts, width, inner = options.experts, options.width, options.inner
    w13, w2 = random_records(experts, 2 * inner, width), random_records(experts, width, inner)
    outer = torch.full((experts,), 2.0**-8, device="cuda")
    roof, name = memory_rate(), torch.cuda.get_device_name()
    print(f"{name}: {roof / 1e12:.2f} TB/s over 1 GiB")
    print("launch  tokens tiles split staged  floor us   plan us unstaged us   ring us")
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, width, device="cuda").bfloat16()
        ids = torch.rand(tokens, experts, device="cuda").topk(options.chosen).indices.int()
        routed = torch.rand(tokens, options.chosen, device="cuda")
        sms = num_sms(x.device.index or 0)
        size = (tokens, options.chosen, experts, width, inner, sms, current_arch())
        plan = grouped.experts_plan(*size)
        lists = grouped.slot_lists(ids, plan.down.slots, experts)
        hidden = torch.randn(ids.numel(), inner, device="cuda").bfloat16()
        out = torch.empty(ids.numel(), width, device="cuda", dtype=torch.bfloat16)
        made = torch.empty_like(hidden)
        hit = ids.unique().numel()
        for label, shape, tensors in (
            ("gate_up", plan.gate_up, (x, w13, outer, routed, lists, made)),
            ("down", plan.down, (hidden, w2, outer, routed, lists, out)),
        ):
            total = hit * tensors[1][0].nbytes + tensors[0].nbytes + tensors[-1].nbytes
            row = {"launch": label, "tokens": tokens, "shape": asdict(shape), "bytes": total}
            row["floor_us"] = total / roof * 1e6
            for form, other in (
                ("plan", shape),
                ("unstaged", unstaged(shape) if shape.staged else None),
                ("ring", ring(shape) if shape.tiles > 1 else None),
            ):
                row[f"{form}_us"] = time_of(other, *tensors)
            rows.append(row)
            shown = [row[f"{form}_us"] for form in ("plan", "unstaged", "ring")]
            print(
                f"{label:<8}{tokens:>6}{shape.tiles:>6}{shape.split:>6}{shape.staged:>7}"
                f"{row['floor_us']:>10.1f}"
                + "".join("         -" if t is None else f"{t:>10.1f}" for t in shown),
                flush=True,
            )
    report = {"device": name, "bytes_s": roof, "rows": rows}
    (options.out / "bench_experts.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plots of the attention benchmarks from their JSON files; needs matplotlib, no GPU.

    python plot.py --results DIR --out DIR

Reads bench_sparse_attention.json and, where it is there, bench_sparse_prefill.json. Writes, for
each top-k, decode_time_k<k>.png (microseconds over batch, one panel for each number of heads,
beside FlashMLA) and decode_roof_k<k>.png (percent of the larger of the bounds of bytes and flops);
and prefill_time.png.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OURS, RIVAL = "#1f77b4", "#ff7f0e"


def values(rows, key):
    return [row[key] for row in rows]


def by_heads(rows, topk):
    """{heads: rows by ascending batch} of one top-k."""
    chosen = [row for row in rows if row["topk"] == topk]
    return {
        heads: sorted((row for row in chosen if row["heads"] == heads), key=lambda r: r["batch"])
        for heads in sorted({row["heads"] for row in chosen})
    }


def decode_time(groups, title, path):
    figure, axes = plt.subplots(
        1, len(groups), figsize=(3.1 * len(groups), 3.2), sharey=True, layout="constrained"
    )
    for axis, (heads, rows) in zip(axes, groups.items(), strict=True):
        batches = values(rows, "batch")
        if all(row["flash_mla_us"] for row in rows):
            label = "FlashMLA FP8" + (" (64 heads)" if heads < 64 else "")
            axis.plot(batches, values(rows, "flash_mla_us"), "s--", color=RIVAL, label=label)
        axis.plot(batches, values(rows, "ours_us"), "o-", color=OURS, label="NVFP4")
        axis.plot(batches, values(rows, "bound_us"), ":", color="0.5", label="bound")
        axis.set(xscale="log", yscale="log", xlabel="batch", title=f"{heads} heads")
        axis.set_xticks(batches, [str(batch) for batch in batches], fontsize=7)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("us")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def decode_roof(groups, title, path):
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for heads, rows in groups.items():
        share = [100 * row["bound_us"] / row["ours_us"] for row in rows]
        axis.plot(values(rows, "batch"), share, "o-", label=f"{heads} heads")
    batches = sorted({row["batch"] for rows in groups.values() for row in rows})
    axis.set(xscale="log", xlabel="batch", ylabel="% of bound", ylim=(0, 100))
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def prefill_time(report, path):
    """Bars for each number of heads: ours and FlashMLA's; dotted, what the products would take."""
    rows = report["rows"]
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    places = range(len(rows))
    left, right = [p - 0.2 for p in places], [p + 0.2 for p in places]
    axis.bar(left, values(rows, "ours_us"), 0.38, color=OURS, label="NVFP4")
    if all(row["flash_mla_us"] for row in rows):
        theirs = values(rows, "flash_mla_us")
        axis.bar(right, theirs, 0.38, color=RIVAL, label="FlashMLA FP8 (64 heads or 128)")
    axis.hlines(
        values(rows, "bound_us"), [p - 0.4 for p in places], [p + 0.4 for p in places], "0.4", ":"
    )
    axis.set_xticks(list(places), [f"{row['heads']} heads" for row in rows])
    axis.set(ylabel="us")
    axis.legend(fontsize=8)
    figure.suptitle(f"Sparse prefill, 4096 queries, 128 + 512 keys ({report['device']})")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = json.loads((options.results / "bench_sparse_attention.json").read_text())
    for topk in sorted({row["topk"] for row in report["rows"]}):
        groups = by_heads(report["rows"], topk)
        title = f"Sparse decode, window 128 + top-k {topk} ({report['device']})"
        decode_time(groups, title, options.out / f"decode_time_k{topk}.png")
        decode_roof(groups, title, options.out / f"decode_roof_k{topk}.png")
    prefill = options.results / "bench_sparse_prefill.json"
    if prefill.is_file():
        prefill_time(json.loads(prefill.read_text()), options.out / "prefill_time.png")


if __name__ == "__main__":
    main()

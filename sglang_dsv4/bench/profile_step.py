"""Table and picture of one decode step from a profiler's trace of a running server.

``python -m sglang_dsv4.bench.profile_step TRACE [--picture FILE.png]`` reads the file that SGLang
writes after ``POST /start_profile`` with ``{"num_steps": 20, "activities": ["CPU", "GPU"],
"with_stack": false}`` while requests decode. It prints, averaged over the steps of one batch size,
each kernel's launches, microseconds and share, the time in which the GPU had nothing to do, and
what made the host wait for the GPU: inside the forward pass, and on the same thread between two
passes, where SGLang's scheduler waits once a step for the tokens of the step before. Exit status:
0, with ``--no-sync`` 1 where the host waited for anything else, 2 after a sentence.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from sglang_dsv4.bench.step_trace import (
    FAMILIES,
    SCHEDULER_WAIT,
    Row,
    Step,
    decode_steps,
    family,
    read_trace,
    rows,
)
from sglang_dsv4.errors import Dsv4Error, UnsupportedError
from sglang_dsv4.failure import EXIT_STATUS

SHORT_US = 3.0
"""A kernel this short mostly waits for its launch and its memory latency."""

_COLOURS = ("#1f77b4", "#ff7f0e", "#d62728", "#2ca02c", "#7f7f7f", "#9467bd")


def table(found: Sequence[Row], top: int) -> str:
    """The ``top`` longest kernels as Markdown, and the rest in one line."""
    lines = ["| kernel | of | a step | us | share |", "|---|---|---:|---:|---:|"]
    shown, rest = found[:top], found[top:]
    if rest:
        shown = [
            *shown,
            Row(
                f"{len(rest)} others",
                "",
                sum(row.count for row in rest),
                sum(row.us for row in rest),
                sum(row.share for row in rest),
            ),
        ]
    for row in shown:
        lines.append(
            f"| {row.name} | {row.family} | {row.count:.4g} | {row.us:.1f} | {row.share:.1%} |"
        )
    return "\n".join(lines)


def families(found: Sequence[Row]) -> str:
    """Launches and time by whose kernels they are, as Markdown."""
    lines = ["| kernels of | a step | us | share |", "|---|---:|---:|---:|"]
    for title in FAMILIES:
        members = [row for row in found if row.family == title]
        if members:
            count, us = sum(row.count for row in members), sum(row.us for row in members)
            lines.append(
                f"| {title} | {count:.4g} | {us:.1f} | {sum(r.share for r in members):.1%} |"
            )
    return "\n".join(lines)


def summary(steps: Sequence[Step]) -> str:
    """Times of the step as a whole, its gaps, and what made the host wait."""
    median = statistics.median
    starts = [step.events[0].start for step in steps]
    period = median([b - a for a, b in pairwise(starts)] or [steps[0].span_us])
    busy, span = median(s.busy_us for s in steps), median(s.span_us for s in steps)
    launches = sum(len(s.events) for s in steps) / len(steps)
    short = sum(e.end - e.start < SHORT_US for s in steps for e in s.events) / len(steps)
    return "\n".join(
        (
            f"batch {steps[0].batch}, {len(steps)} steps: {period:.1f} us from step to step, "
            f"{span:.1f} us from the first kernel to the last, busy {busy:.1f} us, gaps "
            f"{span - busy:.1f} us",
            f"{launches:.4g} kernels and copies a step, {short:.4g} of them under {SHORT_US:g} us; "
            f"the forward pass takes the host {median(s.forward_us for s in steps):.0f} us",
            f"host waits inside the forward pass: {_listed([s.syncs for s in steps])}",
            f"host waits between passes: {_listed([s.waits for s in steps])}",
            f"of these all but the scheduler's one {SCHEDULER_WAIT} a step: "
            f"{_listed([s.avoidable for s in steps])}",
        )
    )


def _listed(calls: Sequence[Sequence[str]]) -> str:
    """Names with their number a step, or none."""
    counts = Counter(name for step in calls for name in step)
    return ", ".join(f"{name} {n / len(calls):.3g}" for name, n in counts.items()) or "none"


def draw(steps: Sequence[Step], found: Sequence[Row], path: Path, top: int = 20) -> None:
    """Write a PNG: the step's timeline by family, and the longest kernels as bars.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "matplotlib is not installed, wanted it for --picture: pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colour = dict(zip(FAMILIES, _COLOURS, strict=True))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 7.5), height_ratios=(1, 2.2), layout="constrained"
    )
    step = sorted(steps, key=lambda s: s.span_us)[len(steps) // 2]
    origin = step.events[0].start
    present = [title for title in FAMILIES if any(family(e.name) == title for e in step.events)]
    for place, title in enumerate(present):
        spans = [
            (e.start - origin, e.end - e.start) for e in step.events if family(e.name) == title
        ]
        above.broken_barh(spans, (place - 0.4, 0.8), color=colour[title])
    above.set_yticks(range(len(present)), present, fontsize=8)
    above.invert_yaxis()
    above.set(xlabel="us", title=f"one decode step, batch {step.batch}")
    shown = list(reversed(found[:top]))
    names = [f"{row.name} ({row.count:.3g})" for row in shown]
    below.barh(names, [row.us for row in shown], color=[colour[row.family] for row in shown])
    below.tick_params(axis="y", labelsize=7)
    below.set(xlabel="us a step (launches in brackets)")
    below.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and draw; the exit status is described above."""
    parser = argparse.ArgumentParser(prog="sglang_dsv4.bench.profile_step", description=__doc__)
    parser.add_argument("trace", type=Path, help="*.trace.json.gz")
    parser.add_argument("--batch", type=int, help="requests; default: the most frequent number")
    parser.add_argument("--top", type=int, default=30, help="kernels in the table")
    parser.add_argument("--picture", type=Path, help="PNG to write; needs matplotlib")
    parser.add_argument(
        "--no-sync", action="store_true", help="fail where the host waits needlessly"
    )
    args = parser.parse_args(argv)
    try:
        steps = decode_steps(read_trace(args.trace), args.batch)
        found = rows(steps)
        print(f"{summary(steps)}\n\n{families(found)}\n\n{table(found, args.top)}")
        if args.picture:
            draw(steps, found, args.picture)
    except Dsv4Error as error:
        print(error, file=sys.stderr)
        return EXIT_STATUS
    return 1 if args.no_sync and any(step.avoidable for step in steps) else 0


if __name__ == "__main__":
    sys.exit(main())

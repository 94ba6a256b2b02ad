"""Judges a benchmark run: our numbers over stock's, against the same ratios of a stored baseline.

Machines differ, and one machine differs from hour to hour; the ratio to a stock model measured in
the same minutes moves much less, so only ratios are compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sglang_dsv4.errors import ConfigError

FORMAT = 1

Values = Mapping[str, float]


@dataclass(frozen=True)
class Metric:
    """One measured quantity.

    Attributes:
        name: key in the files.
        title: heading in the table.
        higher_is_better: whether more is better.
        tolerance: how much worse than the baseline the ratio may be, as a factor above 1.
    """

    name: str
    title: str
    higher_is_better: bool
    tolerance: float


# Measured on a worst case, two cores with three times as many running processes: six runs of each
# workload on each side, and the ratio of any best of three to any other. Highest over lowest was
# 1.08 for CPU time, 1.94 for throughput, 2.2 for TTFT and 2.8 for TPOT. So CPU time is the sharp
# criterion; the times on the clock find what costs no CPU, such as lost batching or waiting.
METRICS = (
    Metric("throughput", "tokens/s", True, 2.0),
    Metric("ttft", "TTFT ms", False, 2.5),
    Metric("tpot", "TPOT ms", False, 3.0),
    Metric("cpu", "CPU ms/token", False, 1.2),
)


class Verdict(StrEnum):
    """What the comparison of one ratio says."""

    OK = "ok"
    REGRESSION = "REGRESSION"
    BETTER = "better"
    NO_BASELINE = "NO BASELINE"


@dataclass(frozen=True)
class Sides:
    """One workload: its bench_serving options, and each metric on our server and on stock's."""

    options: tuple[str, ...]
    ours: Values
    stock: Values

    def ratio(self, metric: Metric) -> float:
        """Ours over stock's."""
        return self.ours[metric.name] / self.stock[metric.name]


@dataclass(frozen=True)
class Run:
    """One benchmark run: its workloads by name, and where and how it was made."""

    workloads: Mapping[str, Sides]
    threads: int
    yardstick: str
    machine: str
    versions: Mapping[str, str]

    def save(self, path: Path, **more: Any) -> None:
        """Write it as JSON, with ``more`` fields that ``load`` passes over."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self), **more}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read what ``save`` wrote.

        Raises:
            ConfigError: the file is of another format or lacks a field.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise KeyError(f"format {data['format']}")
            return cls(
                workloads={
                    name: Sides(tuple(sides["options"]), sides["ours"], sides["stock"])
                    for name, sides in data["workloads"].items()
                },
                threads=data["threads"],
                yardstick=data["yardstick"],
                machine=data["machine"],
                versions=data["versions"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} is not a benchmark baseline of format {FORMAT} ({error}), wanted one: "
                f"write it anew with --update-baseline."
            ) from error


@dataclass(frozen=True)
class Row:
    """One metric of one workload; ``change`` is the factor by which the ratio became worse."""

    workload: str
    metric: Metric
    ours: float
    stock: float
    ratio: float
    baseline_ratio: float | None
    change: float | None
    verdict: Verdict


def compare(run: Run, baseline: Run | None) -> list[Row]:
    """A row for each workload and metric; a workload without a baseline is no pass.

    Raises:
        ConfigError: the baseline was made with another yardstick or other settings.
    """
    if baseline is not None:
        _check_comparable(run, baseline)
    rows = []
    for name, sides in run.workloads.items():
        base = baseline.workloads.get(name) if baseline else None
        for metric in METRICS:
            ratio = sides.ratio(metric)
            wanted = base.ratio(metric) if base else None
            change = None if wanted is None else _worse_by(metric, ratio, wanted)
            rows.append(
                Row(
                    name,
                    metric,
                    sides.ours[metric.name],
                    sides.stock[metric.name],
                    ratio,
                    wanted,
                    change,
                    _verdict(metric, change),
                )
            )
    return rows


def failed(rows: Sequence[Row]) -> bool:
    """Whether the run must not pass."""
    return any(row.verdict in (Verdict.REGRESSION, Verdict.NO_BASELINE) for row in rows)


def table(rows: Sequence[Row]) -> str:
    """The rows as text; ``worse by`` above 1 is slower than the baseline, the limit behind it."""
    head = ("workload", "metric", "ours", "stock", "ratio", "baseline", "worse by", "verdict")
    cells = [head]
    for row in rows:
        change = "-" if row.change is None else f"{row.change:.2f} (<{row.metric.tolerance:g})"
        base = "-" if row.baseline_ratio is None else f"{row.baseline_ratio:.3f}"
        numbers = (f"{row.ours:.1f}", f"{row.stock:.1f}", f"{row.ratio:.3f}", base, change)
        cells.append((row.workload, row.metric.title, *numbers, row.verdict.value))
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    left = (0, 1, len(head) - 1)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _worse_by(metric: Metric, ratio: float, baseline: float) -> float:
    return baseline / ratio if metric.higher_is_better else ratio / baseline


def _verdict(metric: Metric, change: float | None) -> Verdict:
    if change is None:
        return Verdict.NO_BASELINE
    # Written so that a NaN is no pass.
    if not change <= metric.tolerance:
        return Verdict.REGRESSION
    return Verdict.BETTER if change < 1 / metric.tolerance else Verdict.OK


def _check_comparable(run: Run, baseline: Run) -> None:
    found: list[tuple[str, object, object]] = [("threads", run.threads, baseline.threads)]
    found += [("yardstick", run.yardstick, baseline.yardstick)]
    found += [
        (f"options of {name}", sides.options, baseline.workloads[name].options)
        for name, sides in run.workloads.items()
        if name in baseline.workloads
    ]
    for what, now, then in found:
        if now != then:
            raise ConfigError(
                f"The baseline's {what} is {then}, wanted {now} as in this run: use the same, or "
                f"write the baseline anew with --update-baseline."
            )

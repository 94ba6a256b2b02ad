"""Benchmark the server on the embedded model, compare with the baseline, write JSON.

``python -m sglang_dsv4.bench`` (or ``bash launch/bench_serving.sh``, which installs first) starts
stock SGLang on a small model of its own, runs the workloads, stops it, and does the same with this
plugin's server. It exits 0 when no ratio is worse than the baseline's beyond its tolerance, 1 when
one is or has no baseline, 2 when it could not run.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from sglang_dsv4.bench.compare import Run, Sides, Values, compare, failed, table
from sglang_dsv4.bench.workloads import WORKLOADS, best, load_bench_serving, measure
from sglang_dsv4.bench.yardstick import (
    STOCK_ENV,
    STOCK_NAME,
    YARDSTICK,
    make_stock_model,
    stock_command,
)
from sglang_dsv4.demo.__main__ import MODEL_DIR, MODEL_NAME, server_command
from sglang_dsv4.demo.server import Progress, Server, ServerError, exit_on_signals, free_port
from sglang_dsv4.errors import Dsv4Error
from sglang_dsv4.failure import EXIT_STATUS

# The runs of each workload, by its name.
Runs = dict[str, list[Values]]

BASELINE = Path("launch/baselines/cpu.json")
RESULTS = Path("bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is described above."""
    args = _parse(argv)
    try:
        with exit_on_signals():
            return _run(args)
    except KeyboardInterrupt:
        print("\nInterrupted: the servers are stopped.")
        return 130
    except Dsv4Error as error:
        print(f"\n{error}", file=sys.stderr)
        return EXIT_STATUS


def _run(args: argparse.Namespace) -> int:
    """Measure, write the result (and the baseline), print the tables."""
    baseline = None
    if args.baseline.is_file() and not args.update_baseline:
        baseline = Run.load(args.baseline)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    args.results.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    run, runs = benchmark(args, progress)
    progress.finish("done")
    result = args.results / time.strftime("serving-%Y%m%d-%H%M%S.json")
    run.save(result, runs=runs)
    if args.update_baseline:
        run.save(args.baseline)
        baseline = run
    rows = compare(run, baseline)
    print(f"\nstock: {YARDSTICK}; {args.threads} thread(s) each\n{table(rows)}\n")
    print(f"result: {result}")
    if args.update_baseline:
        print(f"baseline: {args.baseline}, written from this run")
    elif baseline is None:
        print(f"{args.baseline} is missing: write it with --update-baseline.")
    return 1 if failed(rows) else 0


def benchmark(args: argparse.Namespace, progress: Progress) -> tuple[Run, dict[str, Runs]]:
    """Run all workloads on both servers, one server after the other.

    Returns:
        the best of each, and all single runs of "stock" and "ours".

    Raises:
        ServerError: a server or a workload failed.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sglang_dsv4-bench-") as folder:
        make_stock_model(Path(folder), MODEL_DIR)
        command = stock_command(Path(folder), port)
        server = Server(command, port, args.results / "stock.log", STOCK_ENV)
        stock = _on(server, STOCK_NAME, args, progress)
    port = free_port()
    server = Server(server_command(port), port, args.results / "ours.log")
    ours = _on(server, MODEL_NAME, args, progress)
    workloads = {
        w.name: Sides(w.options, best(ours[w.name]), best(stock[w.name])) for w in WORKLOADS
    }
    names = ("sglang", "torch", "transformers")
    run = Run(
        workloads,
        args.threads,
        YARDSTICK,
        f"{os.cpu_count()} cores, {_cpu_model()}",
        {name: version(name) for name in names},
    )
    return run, {"stock": stock, "ours": ours}


def _on(server: Server, model: str, args: argparse.Namespace, progress: Progress) -> Runs:
    """Start ``server``, run each workload ``args.repeats`` times, stop it."""
    with server:
        # Its imports take as long as the server's, so they go side by side.
        load_bench_serving()
        server.wait_ready(args.timeout, progress)
        measured: Runs = {workload.name: [] for workload in WORKLOADS}
        try:
            for workload in WORKLOADS:
                for index in range(args.repeats):
                    progress.update(f"{model}: workload {workload.name}, run {index + 1}")
                    values = measure(server, model, MODEL_DIR, workload)
                    measured[workload.name].append(values)
        except ServerError as error:
            raise ServerError(f"{error}\nThe server {server.evidence()}") from error
        return measured


def _cpu_model() -> str:
    """The name in /proc/cpuinfo, where there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch/bench_serving.sh", description=__doc__)
    parser.add_argument("--baseline", type=Path, default=BASELINE, help=f"default: {BASELINE}")
    parser.add_argument("--update-baseline", action="store_true", help="write it from this run")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder: {RESULTS}")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of a workload, the best counts"
    )
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of every server")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for a server to start"
    )
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.threads < 1:
        parser.error("--repeats >= 1 and --threads >= 1 are wanted")
    return args


if __name__ == "__main__":
    sys.exit(main())

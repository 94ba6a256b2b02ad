"""This server beside stock SGLang on one GPU: the same published shapes, random weights and data.

``python -m sglang_dsv4.bench.compare_stock`` (or ``bash launch/bench_serving.sh --compare-stock``)
writes a random NVFP4 checkpoint of a few layers, serves it with this plugin, then serves the same
shapes in stock SGLang's FP8 with dummy weights and without plugins, and runs SGLang's bench_serving
on both: random prompts with answers at several numbers of concurrent requests, and long prompts
with answers of two tokens, whose tokens/s are the prefill rate. The radix cache is off, since
random prompts would find nothing in it. Each workload runs twice and the second run counts, since
both servers compile some kernels when they meet a new shape.
It exits 0 when it could measure, 2 when it could not, after the table of this server where stock's
is what failed; it judges nothing.
"""

import argparse
import json
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_dsv4.bench.compare import Values
from sglang_dsv4.bench.published import reduced
from sglang_dsv4.bench.random_checkpoint import CONFIGS, write_random_checkpoint
from sglang_dsv4.bench.workloads import Workload, load_bench_serving, measure
from sglang_dsv4.bench.yardstick import STOCK_ENV
from sglang_dsv4.demo.__main__ import MODEL_DIR
from sglang_dsv4.demo.server import Progress, Server, exit_on_signals, free_port
from sglang_dsv4.errors import Dsv4Error
from sglang_dsv4.failure import EXIT_STATUS

SERVED_NAME = "random"
PREFILL_REQUESTS, PREFILL_CLIENTS = 64, 16
PREFILL_OUTPUT = 2
"""Two, since a time per output token needs two."""
TITLES = {"throughput": "tokens/s", "ttft": "median TTFT ms", "tpot": "median TPOT ms"}
# Its experts would be MXFP4 by default, which is not what its FP8 kernels are compared in. DeepGEMM
# would compile every batch size up to 16384 before the server answers; so it does when needed.
STOCK_FP8_ENV = STOCK_ENV | {
    "SGLANG_DSV4_FP4_EXPERTS": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}


@dataclass(frozen=True)
class Side:
    """One server's results: values of each workload by its name, and its token capacity."""

    values: Mapping[str, Values]
    capacity: int


def workloads(
    concurrencies: Sequence[int], input_len: int, output_len: int, prefill_len: int
) -> list[Workload]:
    """Random token ids: a workload for each number of concurrent requests, and one of prefill."""
    made = [
        _random(f"concurrency {clients}", _requests(clients), clients, input_len, output_len)
        for clients in concurrencies
    ]
    size = (PREFILL_REQUESTS, PREFILL_CLIENTS, prefill_len, PREFILL_OUTPUT)
    return [*made, _random(f"prefill of {prefill_len}", *size)]


def _requests(clients: int) -> int:
    """Eight rounds of each client, but 32 to 512 requests where that leaves each two at least."""
    return max(2 * clients, min(max(8 * clients, 32), 512))


def _random(name: str, requests: int, clients: int, input_len: int, output_len: int) -> Workload:
    options = (
        f"--dataset-name random-ids --random-input-len {input_len} --random-output-len "
        f"{output_len} --random-range-ratio 1.0 --num-prompts {requests} "
        f"--max-concurrency {clients}"
    )
    return Workload(name, requests, output_len, tuple(options.split()))


def serve_options(args: argparse.Namespace) -> list[str]:
    """Options that both servers get."""
    return [
        *("--served-model-name", SERVED_NAME),
        *("--context-length", str(args.context_length)),
        *("--mem-fraction-static", str(args.mem_fraction)),
        *("--max-running-requests", str(max(args.concurrency))),
        *("--cuda-graph-max-bs-decode", str(max(args.concurrency))),
        "--disable-radix-cache",
    ]


def ours(folder: Path, options: Sequence[str], port: int, log: Path) -> Server:
    """This plugin's server on the random checkpoint."""
    command = [sys.executable, "-m", "sglang_dsv4.launch_server", "--model-path", str(folder)]
    return Server([*command, *options, "--port", str(port)], port, log)


def stock(folder: Path, options: Sequence[str], port: int, log: Path) -> Server:
    """Stock SGLang on the same shapes in FP8; its weights are made at load."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder)]
    command += ["--load-format", "dummy", *options, "--port", str(port)]
    return Server(command, port, log, STOCK_FP8_ENV)


def run_side(server: Server, plan: Sequence[Workload], args: argparse.Namespace) -> Side:
    """Start a server, run the workloads, stop it.

    Raises:
        ServerError: it did not start, or a workload failed.
    """
    progress = Progress()
    with server:
        load_bench_serving()
        server.wait_ready(args.timeout, progress)
        capacity = token_capacity(server)
        values = {}
        for workload in plan:
            for turn in ("unmeasured", "measured"):
                progress.update(f"{workload.name}, {turn}")
                values[workload.name] = measure(server, SERVED_NAME, MODEL_DIR, workload)
        progress.finish("measured")
        return Side(values, capacity)


def token_capacity(server: Server) -> int:
    """Tokens of context that the server's pools hold, as SGLang reports them."""
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=30) as response:
        return int(json.load(response)["max_total_num_tokens"])


def render(plan: Sequence[Workload], left: Side, right: Side) -> str:
    """The two sides as a Markdown table; every ratio is ours over stock's."""
    lines = ["| workload | metric | ours | stock | ours / stock |", "|---|---|---:|---:|---:|"]
    for workload in plan:
        for name, title in TITLES.items():
            a, b = left.values[workload.name][name], right.values[workload.name][name]
            lines.append(f"| {workload.name} | {title} | {a:.1f} | {b:.1f} | {a / b:.2f} |")
    a, b = left.capacity, right.capacity
    lines.append(f"| | token capacity | {a} | {b} | {a / b:.2f} |")
    return "\n".join(lines)


def render_one(plan: Sequence[Workload], side: Side) -> str:
    """What one server measured as a Markdown table, for when the other could not be."""
    lines = ["| workload | metric | ours |", "|---|---|---:|"]
    for workload in plan:
        for name, title in TITLES.items():
            lines.append(f"| {workload.name} | {title} | {side.values[workload.name][name]:.1f} |")
    return "\n".join([*lines, f"| | token capacity | {side.capacity} |"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides and print the table; the exit status is described above."""
    args = _parse(argv)
    plan = workloads(args.concurrency, args.input_len, args.output_len, args.prefill_len)
    args.results.mkdir(parents=True, exist_ok=True)
    shapes = f"{args.shapes}, {args.layers} layers, {args.experts} experts"
    title = f"\n{shapes}, {args.input_len} tokens in, {args.output_len} out\n"
    left: Side | None = None
    try:
        with exit_on_signals(), tempfile.TemporaryDirectory(prefix="sglang_dsv4-stock-") as folder:
            config = reduced(CONFIGS[args.shapes], args.layers, args.experts)
            nvfp4 = Path(folder, "nvfp4")
            write_random_checkpoint(nvfp4, config, torch.device("cuda"))
            left = run_side(
                ours(nvfp4, serve_options(args), free_port(), args.results / "ours.log"), plan, args
            )
            shutil.rmtree(nvfp4)
            fp8 = Path(folder, "fp8")
            fp8.mkdir()
            (fp8 / "config.json").write_text(json.dumps(config), encoding="utf-8")
            for file in MODEL_DIR.glob("tokenizer*.json"):
                shutil.copy(file, fp8)
            right = run_side(
                stock(fp8, serve_options(args), free_port(), args.results / "stock.log"), plan, args
            )
    except Dsv4Error as error:
        if left is not None:
            print(title, render_one(plan, left), sep="\n")
        print(f"\n{error}", file=sys.stderr)
        return EXIT_STATUS
    print(title, render(plan, left, right), sep="\n")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang_dsv4.bench.compare_stock", description=__doc__)
    parser.add_argument("--shapes", choices=CONFIGS, default="flash")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument(
        "--prefill-len", type=int, default=8192, help="tokens of a prompt in the prefill workload"
    )
    parser.add_argument("--context-length", type=int, default=16384)
    parser.add_argument("--mem-fraction", type=float, default=0.5)
    parser.add_argument("--results", type=Path, default=Path("bench"), help="folder of the logs")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for a server to start"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

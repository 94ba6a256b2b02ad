"""The workloads, and one run of SGLang's own bench_serving for each.

bench_serving (``sglang.benchmark.serving``, in older releases ``sglang.bench_serving``) runs in
this process, since its imports take longer than a workload. Prompts are token ids, so that both
models get the same number of tokens, and the radix cache is flushed before each run: random data
then meets no cache at all, and the shared prefix is found only as often as the workload shares it.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil

from sglang_dsv4.bench.compare import METRICS, Values
from sglang_dsv4.demo.server import HOST, Server, ServerError

CLIENTS = 4


@dataclass(frozen=True)
class Workload:
    """Options of bench_serving, the number of its requests and of the tokens of each answer."""

    name: str
    requests: int
    output_len: int
    options: tuple[str, ...]

    @classmethod
    def of(cls, name: str, requests: int, output_len: int, options: str) -> "Workload":
        """A workload with ``options`` as on a command line, four requests at a time."""
        common = f"--num-prompts {requests} --max-concurrency {CLIENTS}"
        return cls(name, requests, output_len, tuple(f"{options} {common}".split()))


RANDOM = Workload.of(
    "random",
    requests=12,
    output_len=32,
    options="--dataset-name random-ids --random-input-len 256 --random-output-len 32 "
    "--random-range-ratio 1.0",
)
# The routing key keeps bench_serving from writing its prompts to the home directory.
SHARED_PREFIX = Workload.of(
    "shared-prefix",
    requests=12,
    output_len=16,
    options="--dataset-name generated-shared-prefix --gsp-send-routing-key --gsp-num-groups 2 "
    "--gsp-prompts-per-group 6 --gsp-system-prompt-len 1024 --gsp-question-len 64 "
    "--gsp-output-len 16",
)
WORKLOADS = (RANDOM, SHARED_PREFIX)


def measure(server: Server, model: str, tokenizer: Path, workload: Workload) -> Values:
    """Run one workload against ``server`` and return the value of each of METRICS.

    Args:
        server: a server that answers.
        model: the name under which it serves.
        tokenizer: directory of its tokenizer.
        workload: what to run.

    Raises:
        ServerError: a request failed, or no text came back.
    """
    serving = load_bench_serving()
    sampling = {
        "temperature": 0,
        "max_new_tokens": workload.output_len,
        "ignore_eos": True,
        # Times of a token that shows no text would not be taken.
        "skip_special_tokens": False,
    }
    argv = ["bench_serving", "--backend", "sglang", "--host", HOST, "--port", str(server.port)]
    argv += ["--model", str(tokenizer), "--served-model-name", model]
    argv += ["--tokenizer", str(tokenizer), "--tokenize-prompt"]
    argv += ["--extra-request-body", json.dumps({"sampling_params": sampling})]
    argv += ["--flush-cache", "--warmup-requests", "1", "--seed", "1", "--disable-tqdm"]
    argv += workload.options
    output = io.StringIO()
    before = cpu_seconds(server.pid)
    with tempfile.TemporaryDirectory(prefix="sglang_dsv4-bench-") as folder:
        result = Path(folder, "result.jsonl")
        try:
            with _arguments([*argv, "--output-file", str(result)]), _quiet(output):
                serving.cli_main()
        except (SystemExit, ValueError, OSError) as error:
            raise ServerError(
                f"bench_serving stopped in workload {workload.name} ({error}), wanted a result; "
                f"its output:\n{output.getvalue()[-2000:]}"
            ) from error
        values = json.loads(result.read_text(encoding="utf-8"))
    return extract(values, workload, cpu_seconds(server.pid) - before)


def extract(result: dict, workload: Workload, cpu: float) -> Values:
    """The metrics of one result of bench_serving.

    Args:
        result: its JSON.
        workload: what was run.
        cpu: CPU seconds that the server's processes took, bench_serving's warm-up included.

    Raises:
        ServerError: requests failed, or a time is missing because no text came back.
    """
    if result["completed"] != workload.requests:
        raise ServerError(
            f"Workload {workload.name} completed {result['completed']} requests, wanted "
            f"{workload.requests}: look into the server's log."
        )
    tokens = result["total_input_tokens"] + result["total_output_tokens"]
    values = {
        "throughput": result["total_throughput"],
        "ttft": result["median_ttft_ms"],
        "tpot": result["median_tpot_ms"],
        "cpu": 1000 * cpu / tokens,
    }
    missing = [metric.title for metric in METRICS if not values[metric.name] > 0]
    if missing:
        raise ServerError(
            f"Workload {workload.name} gave no {', '.join(missing)}, wanted a positive number: "
            f"the server sent no text."
        )
    return values


def best(runs: Sequence[Values]) -> Values:
    """Of each metric the best value; what other processes disturb only ever makes it worse."""
    return {
        metric.name: (max if metric.higher_is_better else min)(run[metric.name] for run in runs)
        for metric in METRICS
    }


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its living children have taken."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def load_bench_serving() -> ModuleType:
    """The module of bench_serving, whose import takes about ten seconds."""
    with _quiet(io.StringIO()):
        from sglang.benchmark import serving
    return serving


@contextlib.contextmanager
def _quiet(output: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield


@contextlib.contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    previous, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = previous

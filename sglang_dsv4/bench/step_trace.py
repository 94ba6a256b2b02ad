"""One decode step out of a torch profiler's trace of SGLang: its GPU work and its host syncs.

SGLang wraps each forward pass in a span ``step[DECODE bs=N]``. Everything that the scheduler's
thread launches from one such span's start to the next one's is that step, sampling and copies of
results included; what ran on the GPU is found by the correlation id of its launch, which all
kernels of a replayed CUDA graph share.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dsv4.errors import ConfigError

_SPAN = re.compile(r"step\[DECODE bs=(\d+)")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_SYNC = re.compile(
    r"cuda(Stream|Device|Event)Synchronize|cu(Stream|Ctx|Event)Synchronize|cudaMemcpy(2D)?|"
    r"cuMemcpy(DtoH|HtoD|DtoD)(_v2)?"
)
"""Calls that hold the host until the GPU is done."""
_PAGEABLE = re.compile(r"Memcpy DtoH \(Device -> Pageable\)")
"""A copy that holds the host although its call is asynchronous."""
SCHEDULER_WAIT = "cudaEventSynchronize"
"""SGLang's overlap scheduler waits once a step, between two passes: for the tokens that the step
before copied back (``copy_done.synchronize()``)."""


@dataclass(frozen=True)
class GpuEvent:
    """A kernel, copy or memset; times in microseconds of the trace's clock."""

    name: str
    start: float
    end: float
    stream: int


@dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
        events: its GPU work in order of start.
        syncs: calls inside the forward pass, on its thread, that make the host wait; in brackets
            the outermost operator that made the call.
        waits: the same on that thread between this pass's end and the next one's start.
        forward_us: host time of the forward pass.
    """

    batch: int
    events: tuple[GpuEvent, ...]
    syncs: tuple[str, ...]
    waits: tuple[str, ...]
    forward_us: float

    @property
    def avoidable(self) -> tuple[str, ...]:
        """All of ``syncs`` and ``waits`` but the scheduler's own one."""
        waits = list(self.waits)
        if SCHEDULER_WAIT in waits:
            waits.remove(SCHEDULER_WAIT)
        return (*self.syncs, *waits)

    @property
    def busy_us(self) -> float:
        """Time in which at least one kernel or copy ran."""
        return covered(self.events)

    @property
    def span_us(self) -> float:
        """From the first start to the last end."""
        return max(e.end for e in self.events) - self.events[0].start


def covered(events: Iterable[GpuEvent]) -> float:
    """Length of the union of the events' intervals; they come in order of start."""
    total, reached = 0.0, float("-inf")
    for event in events:
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace, plain or gzipped.

    Raises:
        ConfigError: the file holds no trace.
    """
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return json.loads(text)["traceEvents"]
    except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
        raise ConfigError(
            f"{path} holds no profiler trace ({error}), wanted the .trace.json.gz that SGLang's "
            f"/start_profile writes: profile again."
        ) from error


def decode_steps(trace: Sequence[Mapping[str, Any]], batch: int | None = None) -> list[Step]:
    """The decode steps of one batch size; the last span has no end and is left out.

    Args:
        trace: as ``read_trace`` returns it.
        batch: number of requests; None takes the most frequent one.

    Raises:
        ConfigError: fewer than two such steps, or one without GPU work, are in the trace.
    """
    complete = [event for event in trace if event.get("ph") == "X"]
    spans = sorted(
        (e for e in complete if e.get("cat") == "user_annotation" and _SPAN.match(e["name"])),
        key=lambda e: e["ts"],
    )
    sizes = [int(found[1]) for found in (_SPAN.match(e["name"]) for e in spans) if found]
    if batch is None and sizes:
        batch = Counter(sizes[:-1] or sizes).most_common(1)[0][0]
    wanted = [i for i, size in enumerate(sizes[:-1]) if size == batch]
    if not wanted:
        raise ConfigError(
            f"The trace has {len(spans)} decode steps and none of batch {batch} with a step after "
            f"it, wanted two or more: profile more steps (num_steps) while requests decode."
        )
    starts = [span["ts"] for span in spans]
    owner = _launch_owner(complete, starts)
    gpu: defaultdict[int, list[GpuEvent]] = defaultdict(list)
    for event in complete:
        correlation = _correlation(event)
        if event.get("cat") in _GPU and correlation in owner:
            gpu[owner[correlation]].append(_gpu_event(event))
    hosts = _waiting_calls(complete, spans, starts)
    steps = []
    for i in wanted:
        events = tuple(sorted(gpu[i], key=lambda e: (e.start, e.end)))
        if not events:
            raise ConfigError(
                "A decode step of the trace has no GPU work, wanted activities CPU and GPU: "
                "profile again with both."
            )
        syncs, waits = hosts[i]
        steps.append(Step(sizes[i], events, tuple(syncs), tuple(waits), float(spans[i]["dur"])))
    return steps


def _correlation(event: Mapping[str, Any]) -> int | None:
    return event.get("args", {}).get("correlation")


def _gpu_event(event: Mapping[str, Any]) -> GpuEvent:
    start, args = float(event["ts"]), event.get("args", {})
    return GpuEvent(event["name"], start, start + float(event["dur"]), int(args.get("stream", 0)))


def _launch_owner(events: Iterable[Mapping[str, Any]], starts: list[float]) -> dict[int, int]:
    """Step of each correlation id: that in which the runtime call was made."""
    owner = {}
    for event in events:
        correlation = _correlation(event)
        if event.get("cat") in _RUNTIME and correlation is not None:
            step = bisect_right(starts, event["ts"]) - 1
            if step >= 0:
                owner[correlation] = step
    return owner


def _waiting_calls(
    events: Iterable[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], starts: list[float]
) -> dict[int, tuple[list[str], list[str]]]:
    """(inside the forward pass, outside it) of each step, on the thread of its span."""
    events = list(events)
    pageable = {_correlation(e) for e in events if _PAGEABLE.match(e["name"])} - {None}
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    found: dict[int, tuple[list[str], list[str]]] = {i: ([], []) for i in range(len(spans))}
    for event in sorted(events, key=lambda e: e["ts"]):
        if event.get("cat") not in _RUNTIME:
            continue
        waiting = _SYNC.fullmatch(event["name"]) or _correlation(event) in pageable
        step = bisect_right(starts, event["ts"]) - 1
        if not waiting or step < 0 or event.get("tid") != spans[step].get("tid"):
            continue
        inside = event["ts"] < spans[step]["ts"] + spans[step]["dur"]
        around = [o for o in operators if o.get("tid") == event.get("tid") and _holds(o, event)]
        cause = f" ({min(around, key=lambda o: o['ts'])['name']})" if around else ""
        found[step][0 if inside else 1].append(event["name"] + cause)
    return found


def _holds(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]


_OURS = re.compile(r"sglang_dsv4\w*?([A-Z][A-Za-z0-9]*)_object_at")
_TORCH = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(\w+)")
_FAMILIES = (
    ("this project", re.compile(r"sglang_dsv4")),
    ("Marlin", re.compile(r"marlin", re.IGNORECASE)),
    ("torch", re.compile(r"at::native|at_cuda_detail|at::cuda")),
    ("matrix product", re.compile(r"gemm|gemv|nvjet|cublas|xmma|splitK", re.IGNORECASE)),
    ("copy, memset", re.compile(r"^Mem(cpy|set)")),
)
OTHER = "SGLang and libraries"
FAMILIES = (*(name for name, _ in _FAMILIES), OTHER)


def family(name: str) -> str:
    """Whose kernel it is, by its name."""
    return next((title for title, pattern in _FAMILIES if pattern.search(name)), OTHER)


def short_name(name: str) -> str:
    """A name that fits a table: the class of our kernels, torch's kernel and functor, no types."""
    ours = _OURS.search(name)
    if ours:
        return ours[1]
    if family(name) == "torch":
        return " ".join(list(dict.fromkeys(_TORCH.findall(name)))[:3]) or name[:60]
    plain = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    return re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2].strip()[:60] or name[:60]


@dataclass(frozen=True)
class Row:
    """One kernel name over all steps: launches and microseconds a step, share of the kernel sum."""

    name: str
    family: str
    count: float
    us: float
    share: float


def rows(steps: Sequence[Step]) -> list[Row]:
    """A row for each short name, the longest time first."""
    counts: Counter[tuple[str, str]] = Counter()
    times: defaultdict[tuple[str, str], float] = defaultdict(float)
    for step in steps:
        for event in step.events:
            key = (short_name(event.name), family(event.name))
            counts[key] += 1
            times[key] += event.end - event.start
    total, n = sum(times.values()), len(steps)
    found = [Row(*key, counts[key] / n, us / n, us / total) for key, us in times.items()]
    return sorted(found, key=lambda row: -row.us)

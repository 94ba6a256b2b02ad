"""How the benchmarks time: CUDA graphs, cold L2, medians; and the memory roof of the same run."""

import functools
import statistics

import torch


@functools.cache
def flush_buffer():
    """Larger than L2; writing it evicts everything else."""
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def graph_time(calls, repeats=20):
    """Median microseconds of one call; `calls` run in turn inside one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush_buffer().zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def memory_rate():
    """Bytes/s of an elementwise kernel over 1 GiB; a captured copy_ of this size is slower."""
    values = torch.zeros(1 << 28, device="cuda")
    out = torch.empty_like(values)
    call = functools.partial(torch.add, values, 1.0, out=out)
    return 2 * values.nbytes / (graph_time([call] * 4) * 1e-6)

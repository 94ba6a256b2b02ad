"""Time of the widening kernel beside a copy of as many bytes.

Run with ``pytest -m benchmarks tests/kernels/gpu/test_widen_speed.py``. Times are medians over
replays of a CUDA graph (``timing``), from cold L2: small weights are several different ones that
together exceed it. The copy reads and writes the same number of bytes in total. Nothing is asserted
about time.
"""

import functools
import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from timing import graph_time, memory_rate

from sglang_dsv4.kernels.linear.records import CODE_BYTES, RECORD_BYTES, record_grid
from sglang_dsv4.kernels.linear.widen import DIVISOR, widen

pytestmark = pytest.mark.benchmarks

COLD_BYTES = 200 << 20
SIZES = [
    (1, 4096, 4096),
    (1, 2048, 4096),
    (1, 4096, 1024),
    (1, 32768, 1024),
    (32, 4096, 4096),
    (32, 4096, 2048),
    (64, 4096, 4096),
    (64, 4096, 2048),
]


def random_records(count: int, rows: int, width: int) -> torch.Tensor:
    size = (count, *record_grid(rows, width), RECORD_BYTES)
    records = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    records[..., CODE_BYTES:] %= 127
    return records


def copy_time(total: int) -> float:
    """Microseconds of torch's copy_ that reads and writes ``total`` bytes, half each."""
    pairs = [
        [torch.empty(total // 2, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for _ in range(math.ceil(COLD_BYTES / total))
    ]
    return graph_time([functools.partial(target.copy_, source) for source, target in pairs])


def test_speed(capsys):
    lines = [f"{torch.cuda.get_device_name()}: {memory_rate() / 1e12:.2f} TB/s over 1 GiB"]
    lines.append("experts  rows  columns  to                   us  copy us  % of copy   TB/s")
    for count, rows, width in SIZES:
        for dtype in DIVISOR:
            down, across = record_grid(rows, width)
            total = count * (down * across * RECORD_BYTES + rows * width * dtype.itemsize)
            calls = []
            for _ in range(math.ceil(COLD_BYTES / total)):
                out = torch.empty(count, rows, width, dtype=dtype, device="cuda")
                calls.append(functools.partial(widen, random_records(count, rows, width), out))
            time, name = graph_time(calls), str(dtype).removeprefix("torch.")
            copied = copy_time(total)
            lines.append(
                f"{count:>7}{rows:>6}{width:>9}  {name:<16}{time:>8.1f}{copied:>9.1f}"
                f"{100 * copied / time:>11.0f}{total / time / 1e6:>7.2f}"
            )
    with capsys.disabled():
        print("", *lines, sep="\n")

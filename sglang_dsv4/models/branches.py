"""Branches of a layer that run beside each other in a decode step's CUDA graph.

A decode kernel is so short that its launch, its first reads and its last block are much of its
time; a second stream fills them. Branches exist while a graph is captured and only there: the graph
keeps the order of streams, and eager passes run in program order.

A tensor made in a branch may be used after ``join`` of that branch. Its memory goes back to the
branch's stream, whose next branch begins with a wait for the main stream, hence after that use.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branches:
    """A fixed number of side streams, shared by all layers; none on a CPU."""

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if on_gpu else []

    def _active(self) -> bool:
        return bool(self._streams) and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def beside(self, index: int) -> Iterator[None]:
        """What runs inside starts after all that was launched so far, and beside what follows."""
        if not self._active():
            yield
            return
        stream = self._streams[index]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self, *indices: int) -> None:
        """What follows starts after these branches; each must have been opened before."""
        if self._active():
            for index in indices:
                torch.cuda.current_stream().wait_stream(self._streams[index])

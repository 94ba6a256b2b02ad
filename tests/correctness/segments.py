"""Token-by-token decode of a long sequence, in a quarter of the steps."""

from collections.abc import Sequence

import torch
from harness import Runner
from torch import Tensor


def decode_in_segments(runner: Runner, ids: Sequence[int]) -> Tensor:
    """Logits of 4 n + 1 ids, f32[4 n + 1, V], each position but the first from a decode step.

    Four requests decode a quarter each, in one batch: one from the first token on, the others after
    a prefill. Window and compressor state reach back 128 tokens, so for n > 128 the later steps of
    each quarter read only what steps wrote, but for the compressed entries before.
    """
    length = len(ids) // 4
    starts = [1 + length * i for i in range(4)]
    requests = [runner.start(ids[:start]) for start in starts]
    first = runner.extend(list(zip(requests, starts, strict=True)))[0]
    steps = [runner.step(requests, [ids[start + i] for start in starts]) for i in range(length)]
    for request in requests:
        runner.finish(request)
    return torch.cat([first, *torch.stack(steps, dim=1)])

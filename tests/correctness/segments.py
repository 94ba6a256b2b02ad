"""Token-by-token decode of a long sequence, in a quarter of the steps."""

from collections.abc import Sequence

import torch
from harness import Runner
from torch import Tensor

SEGMENT = 256


def decode_in_segments(runner: Runner, ids: Sequence[int]) -> Tensor:
    """Logits of 4 * SEGMENT + 1 ids, each position but the first from a decode step.

    Four requests decode a quarter each, in one batch: one from the first token on, the others after
    a prefill. What a step reads of state and window was then written by decode steps, since
    windows reach back 128 tokens, but for the first 128 steps of the later three.
    """
    starts = [1 + SEGMENT * i for i in range(4)]
    requests = [runner.start(ids[:start]) for start in starts]
    first = runner.extend(list(zip(requests, starts, strict=True)))[0]
    steps = [runner.step(requests, [ids[start + i] for start in starts]) for i in range(SEGMENT)]
    for request in requests:
        runner.finish(request)
    return torch.cat([first, *torch.stack(steps, dim=1)])

"""The sum of routed and shared experts, as torch adds them up.

In float16: the interpreter truncates to bfloat16, where a GPU rounds.
"""

import pytest
import torch
from interpreted import interpreted


@pytest.mark.parametrize(("tokens", "count", "width"), [(1, 6, 64), (5, 6, 1024), (3, 8, 1030)])
def test_rounds_where_torch_does(tokens, count, width, monkeypatch):
    module = interpreted("sglang_dsv4.layers.expert_sum", monkeypatch)
    draw = torch.Generator().manual_seed(width)
    parts = torch.randn(tokens, count, width, generator=draw).half()
    shared = torch.randn(tokens, width, generator=draw).half()
    total = torch.zeros(tokens, width)
    for part in range(count):
        total += parts[:, part].float()
    wanted = (total.half().float() + shared.float()).half()
    assert torch.equal(module.expert_sum(parts, shared), wanted)


def test_no_tokens(monkeypatch):
    module = interpreted("sglang_dsv4.layers.expert_sum", monkeypatch)
    out = module.expert_sum(torch.empty(0, 6, 64).half(), torch.empty(0, 64).half())
    assert out.shape == (0, 64)

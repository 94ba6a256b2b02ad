"""Expert choice: the CPU path, and SGLang's GPU router in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.reference import router
from sglang_dsv4.layers import activation, routing

INTERPRETED = """
import torch
from sglang.kernels.ops.moe import moe_fused_gate as module
from sglang_dsv4.kernels.reference.router import route_topk
from sglang_dsv4.layers import routing

class Elsewhere:
    device = torch.device("cuda")
    def __init__(self, tensor):
        self.tensor = tensor

kernel = module.moe_fused_gate
module.moe_fused_gate = lambda logits, *args, **kwargs: kernel(logits.tensor, *args, **kwargs)
torch.manual_seed(0)
for experts, top_k, norm in ((16, 4, True), (16, 4, False), (256, 6, True), (384, 6, True)):
    logits, bias = torch.randn(3, experts) * 4, torch.randn(experts)
    logits[0] -= 60
    wanted = route_topk(logits, bias, top_k, norm, 1.5)
    found = routing.route_topk(Elsewhere(logits), bias, top_k, norm, 1.5)
    assert torch.equal(found[1].long(), wanted[1])
    # float32 e^x, log and square root are each good to some 2^-23.
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-7)
print("alike")
"""


def test_sglangs_gpu_router_is_the_reference():
    """Its Triton kernel, interpreted on the CPU with the arguments that we give it."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("alike"), done.stderr[-2000:]


def test_a_cpu_runs_the_reference():
    hidden, weight = torch.randn(5, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    logits = routing.router_logits(hidden, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T)
    bias, table = torch.randn(8), torch.randint(0, 8, (10, 3), dtype=torch.int32)
    tokens = torch.tensor([1, 9, 0, 0, 3])
    for found, wanted in (
        (
            routing.route_topk(logits, bias, 3, True, 2.0),
            router.route_topk(logits, bias, 3, True, 2.0),
        ),
        (
            routing.route_hash(logits, table, tokens, True, 2.0),
            router.route_hash(logits, table, tokens, True, 2.0),
        ),
    ):
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


def test_the_hash_kernels_scores_are_scaled(monkeypatch):
    from sglang.kernels.ops.moe import dsv4

    def kernel(router_logits, input_ids, tid2eid):
        return router.route_hash(router_logits.cpu(), tid2eid, input_ids, True, 1.0)

    monkeypatch.setattr(dsv4, "hash_topk", kernel)
    logits, table = torch.randn(3, 8), torch.randint(0, 8, (10, 3), dtype=torch.int32)
    tokens = torch.tensor([4, 4, 7])
    elsewhere = Elsewhere(logits)
    weights, ids = routing.route_hash(elsewhere, table, tokens, True, 2.5)
    wanted = router.route_hash(logits, table, tokens, True, 2.5)
    torch.testing.assert_close(weights, wanted[0])
    assert torch.equal(ids, wanted[1])
    with pytest.raises(UnsupportedError, match=r"norm_topk_prob is false .* on a GPU"):
        routing.route_hash(elsewhere, table, tokens, False, 2.5)


class Elsewhere:
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def cpu(self) -> torch.Tensor:
        return self.tensor


def test_swiglu_clamps_both_halves_in_their_own_way():
    gate_up = torch.tensor([[-20.0, 20.0, 3.0, -20.0, 20.0, 3.0]])
    gate, up = gate_up.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    torch.testing.assert_close(activation.swiglu(gate_up, 10.0), wanted)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(activation.swiglu(gate_up, None), wanted)

"""The grouped projection: batched product, and Marlin's tables of the fixed routing."""

from types import SimpleNamespace

import pytest
import torch
from conftest import nvfp4
from test_marlin import unpack_experts

from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.layers import marlin_grouped
from sglang_dsv4.layers.grouped_linear import grouped_matmul
from sglang_dsv4.layers.marlin import MarlinExperts
from sglang_dsv4.layers.marlin_grouped import RoutingCache, block_rows, group_routing

CPU = torch.device("cpu")


def test_each_group_has_its_own_block():
    x, weight = torch.randn(5, 3, 32), torch.randn(3 * 8, 32)
    wanted = torch.einsum("tgi,goi->tgo", x, weight.view(3, 8, 32)).flatten(1)
    torch.testing.assert_close(grouped_matmul(x, weight), wanted)
    strided = torch.randn(5, 6, 32)[:, ::2]
    wanted = torch.einsum("tgi,goi->tgo", strided, weight.view(3, 8, 32)).flatten(1)
    torch.testing.assert_close(grouped_matmul(strided, weight), wanted)


@pytest.mark.parametrize("groups", [1, 2, 8, 16])
@pytest.mark.parametrize("tokens", [1, 7, 8, 29, 57, 58, 64, 1000])
def test_each_row_goes_to_its_group_once(tokens, groups):
    """Marlin reads block b's rows up to the first that is not below tokens * groups."""
    routing = group_routing(tokens, groups, CPU)
    assert routing.counts.tolist() == [routing.rows.numel(), 0]
    blocks = routing.rows.view(-1, routing.block)
    assert len(blocks) == len(routing.groups)
    assert torch.equal(routing.groups, routing.groups.sort().values)
    seen = torch.zeros(tokens * groups, dtype=torch.int64)
    for rows, group in zip(blocks, routing.groups.tolist(), strict=True):
        valid = rows < tokens * groups
        assert valid[: valid.sum()].all()
        assert (rows[valid] % groups == group).all()
        seen[rows[valid]] += 1
    assert (seen == 1).all()
    assert routing.rows.dtype == routing.groups.dtype == routing.counts.dtype == torch.int32


def test_blocks_are_those_that_sglang_takes_for_as_many_rows_an_expert():
    # fused_marlin_moe: the first of 8, 16, 32, 48, 64 with rows / block < 0.9, else 64.
    sizes = {1: 8, 7: 8, 8: 16, 14: 16, 15: 32, 28: 32, 29: 48, 43: 48, 44: 64, 10_000: 64}
    assert {tokens: block_rows(tokens) for tokens in sizes} == sizes


def test_tables_are_kept_but_not_those_of_a_capture(monkeypatch):
    cache = RoutingCache(size=2)
    first = cache.get(4, 2, CPU)
    assert cache.get(4, 2, CPU) is first
    cache.get(5, 2, CPU)
    cache.get(4, 2, CPU)
    cache.get(6, 2, CPU)
    assert [key[0] for key in cache.tables] == [4, 6]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made = group_routing(9, 2, CPU)
    monkeypatch.setattr(marlin_grouped, "group_routing", lambda *_: made)
    cuda = torch.device("cuda")
    assert cache.get(9, 2, cuda) is made
    assert (9, 2, cuda) not in cache.tables


def layer_of(groups: int, rank: int, width: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """(layer as loaded, float32 weight [groups, rank, width])."""
    layer = torch.nn.Module()
    weight, scale = nvfp4(groups * rank, width)
    for name, value in (
        ("weight", weight),
        ("weight_scale", scale),
        ("weight_scale_2", torch.tensor([2.0**-11])),
        ("input_scale", torch.tensor([1.0])),
    ):
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    layer.o_lora_rank = rank
    dense = dequantize_weight(weight, scale, torch.tensor(2.0**-11))
    return layer, dense.unflatten(0, (groups, rank))


def test_groups_become_experts(marlin_repack, monkeypatch):
    monkeypatch.setattr(marlin_grouped, "marlin_make_workspace", lambda *_, **__: torch.zeros(4))
    layer, dense = layer_of(2, 128, 192)
    marlin_grouped.MarlinGroupedMethod().process_weights_after_loading(layer)
    packed = MarlinExperts(layer.weight.data, layer.weight_scale.data, layer.weight_scale_2.data)
    assert torch.equal(unpack_experts(packed), dense)
    assert not hasattr(layer, "input_scale")


def test_the_kernel_gets_what_it_wants(marlin_repack, monkeypatch):
    """One launch, checked against the kernel's signature and computed from what it was given."""
    import inspect

    from sglang.kernels.ops.moe import moe_wna16_marlin

    real = inspect.signature(moe_wna16_marlin.moe_wna16_marlin_gemm)

    def emulated(*args, **kwargs):
        call = SimpleNamespace(**real.bind(*args, **kwargs).arguments)
        assert call.a.shape == (call.size_m, call.size_k)
        assert call.a.is_contiguous()
        assert (call.top_k, call.mul_topk_weights, call.is_ep) == (1, False, False)
        assert not hasattr(call, "use_atomic_add")
        weight = unpack_experts(
            MarlinExperts(call.b_q_weight, call.b_scales, call.global_scale_or_none)
        )
        rows = call.sorted_token_ids.view(-1, call.moe_block_size)
        for block, expert in zip(rows, call.expert_ids.tolist(), strict=True):
            block = block[block < call.size_m].long()
            product = call.a[block].float() @ weight[expert].T
            call.c_or_none[block] = product.to(call.c_or_none.dtype)
        return call.c_or_none

    monkeypatch.setattr(moe_wna16_marlin, "moe_wna16_marlin_gemm", emulated)
    monkeypatch.setattr(marlin_grouped, "marlin_make_workspace", lambda *_, **__: torch.zeros(4))
    layer, dense = layer_of(2, 128, 192)
    method = marlin_grouped.MarlinGroupedMethod()
    method.process_weights_after_loading(layer)
    x = torch.randn(11, 2, 192).bfloat16()
    wanted = torch.einsum("tgi,goi->tgo", x.float(), dense).flatten(1)
    torch.testing.assert_close(method.apply(layer, x), wanted.bfloat16(), rtol=2**-8, atol=1e-3)

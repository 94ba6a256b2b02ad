"""The grouped projection: one batched product, of packed weights too."""

import torch
from conftest import nvfp4

from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.layers.grouped_linear import DequantGroupedMethod, grouped_matmul


def test_each_group_has_its_own_block():
    x, weight = torch.randn(5, 3, 32), torch.randn(3 * 8, 32)
    wanted = torch.einsum("tgi,goi->tgo", x, weight.view(3, 8, 32)).flatten(1)
    torch.testing.assert_close(grouped_matmul(x, weight), wanted)
    strided = torch.randn(5, 6, 32)[:, ::2]
    wanted = torch.einsum("tgi,goi->tgo", strided, weight.view(3, 8, 32)).flatten(1)
    torch.testing.assert_close(grouped_matmul(strided, weight), wanted)


def test_packed_groups_are_widened_at_load():
    layer = torch.nn.Module()
    weight, scale = nvfp4(2 * 8, 64)
    for name, value in (
        ("weight", weight),
        ("weight_scale", scale),
        ("weight_scale_2", torch.tensor([2.0**-11])),
        ("input_scale", torch.tensor([1.0])),
    ):
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    layer.params_dtype = torch.float32
    method = DequantGroupedMethod()
    method.process_weights_after_loading(layer)
    dense = dequantize_weight(weight, scale, torch.tensor(2.0**-11)).unflatten(0, (2, 8))
    x = torch.randn(11, 2, 64)
    wanted = torch.einsum("tgi,goi->tgo", x, dense).flatten(1)
    torch.testing.assert_close(method.apply(layer, x), wanted)
    assert not hasattr(layer, "weight_scale")

"""Repacking for Marlin: padding, order of nibbles and scales, one outer scale for gate and up."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import nvfp4, repack, tile_order
from sglang.srt.layers.quantization.marlin_utils import get_scale_perms

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight, unpack_nibbles
from sglang_dsv4.layers import marlin
from sglang_dsv4.layers.marlin import MarlinExperts, linear_padding, pack_experts
from sglang_dsv4.layers.nvfp4_moe import pad_experts, share_outer_scale

# (out, in) of every linear layer of the small model, V4-Flash and V4-Pro, on one GPU and a rank
# of 8: none is padded in its inputs, and only the small model's scorer in its outputs.
SHAPES = {
    "small": [(640, 256), (4096, 128), (256, 256), (1024, 256), (2048, 256), (512, 256),
              (1024, 128)],
    "flash": [(1536, 4096), (32768, 1024), (4096, 8192), (1024, 4096), (2048, 4096), (512, 4096),
              (8192, 1024), (64, 4096), (4096, 4096), (4096, 2048)],
    "flash / 8": [(4096, 1024), (4096, 1024), (512, 4096), (4096, 256)],
    "pro": [(2048, 7168), (65536, 1536), (7168, 16384), (1024, 7168), (2048, 7168), (512, 7168),
            (8192, 1536), (64, 7168), (6144, 7168), (7168, 3072)],
    "pro / 8": [(8192, 1536), (7168, 2048), (768, 7168), (7168, 384)],
}  # fmt: skip


def unpack(packed: torch.Tensor, width: int, out: int) -> torch.Tensor:
    """Codes [out, in] from Marlin's order, by undoing ``tile_order``."""
    nibbles = (packed[..., None] >> torch.arange(0, 32, 4) & 15).reshape(width // 16, -1, 1024)
    tiles = torch.empty_like(nibbles)
    tiles[..., tile_order()] = nibbles
    tiles = tiles.reshape(width // 16, out // 16, 16, 16).permute(0, 2, 1, 3)
    return tiles.reshape(width, out).T


def unpack_scale(packed: torch.Tensor, width: int, out: int) -> torch.Tensor:
    """Float32 block scales [out, in / 16] times 2^7: the bytes are float16 without its sign."""
    half = packed.view(torch.uint8).to(torch.int32) << 7
    values = half.to(torch.int16).view(torch.float16).float()
    values = values.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(width // 16, out)
    order = get_scale_perms()[0]
    rows = torch.empty_like(values).reshape(-1, len(order))
    rows[:, order] = values.reshape(-1, len(order))
    return rows.reshape(width // 16, out).T


def unpack_experts(packed: MarlinExperts) -> torch.Tensor:
    """Float32 [E, out, in] of Marlin's tables."""
    from sglang_dsv4.kernels.reference.nvfp4 import e2m1_decode

    width, out = packed.weight.shape[1] * 16, packed.weight.shape[2] // 2
    experts = []
    for weight, scale, outer in zip(*packed, strict=True):
        values = e2m1_decode(unpack(weight, width, out).to(torch.uint8))
        block = unpack_scale(scale, width, out).repeat_interleave(16, dim=1)
        experts.append(values * block * 2.0**-7 * (outer.float() * 2.0**-119))
    return torch.stack(experts)


@pytest.mark.parametrize("model", SHAPES)
def test_no_layer_of_the_models_copies_its_activations(model):
    for out, width in SHAPES[model]:
        assert linear_padding(out, width) == (out, width)


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ((8, 256), (64, 256)),
        ((192, 96), (192, 128)),
        ((40, 4176), (64, 4224)),
        ((128, 64), (128, 64)),
    ],
)
def test_other_shapes_are_padded_as_sglang_pads_them(marlin_repack, shape, padded):
    from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_nvfp4_layer_for_marlin

    assert linear_padding(*shape) == padded
    weight, scale = nvfp4(*shape)
    layer = SimpleNamespace(
        output_size_per_partition=shape[0],
        input_size_per_partition=shape[1],
        params_dtype=torch.bfloat16,
        weight=weight,
        weight_scale=scale,
        weight_global_scale=torch.tensor(2.0**-10),
    )
    prepare_nvfp4_layer_for_marlin(layer)
    assert (layer.weight.shape[1] // 2, layer.weight.shape[0] * 16) == padded
    codes = unpack(layer.weight.data, padded[1], padded[0])[: shape[0], : shape[1]]
    assert torch.equal(codes.to(torch.uint8), unpack_nibbles(weight))


def test_a_padded_input_is_logged(marlin_repack, caplog, monkeypatch):
    method = marlin.MarlinLinearMethod()
    monkeypatch.setattr(method.kernel, "process_weights_after_loading", lambda layer: None)
    for width in (96, 128):
        layer = SimpleNamespace(output_size_per_partition=192, input_size_per_partition=width)
        method.process_weights_after_loading(layer)
    assert [record.args for record in caplog.records] == [(96, 128)]


def test_the_emulated_repacking_is_sglangs(monkeypatch):
    """Our plain-torch repacking against SGLang's test utility, written for numpy."""
    # The utility imports a type's name from a package that wants a driver.
    fake = SimpleNamespace(ScalarType=object)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(scalar_type=fake))
    monkeypatch.setitem(sys.modules, "sgl_kernel.scalar_type", fake)
    from sglang.test.test_marlin_utils import get_weight_perm, marlin_weights

    codes = torch.randint(0, 16, (64, 128), dtype=torch.int32)
    words = (codes.reshape(8, 8, 128).long() << torch.arange(0, 32, 4)[None, :, None]).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    ours = repack(words, torch.empty(0), 64, 128, 4)
    assert torch.equal(ours, marlin_weights(codes, 64, 128, 4, get_weight_perm(4)))


def test_packed_experts_are_the_checkpoints(marlin_repack):
    weight, scale = nvfp4(3, 128, 192)
    scale_2 = torch.tensor([2.0**-9, 2.0**-13, 2.0**-20])
    packed = pack_experts(weight, scale, scale_2)
    assert packed.weight.shape == (3, 12, 256)
    assert packed.scale.shape == (3, 12, 128)
    wanted = dequantize_weight(weight, scale, scale_2)
    # Powers of two are exact in bfloat16, so all of it is.
    assert torch.equal(unpack_experts(packed), wanted)


def test_the_outer_scale_is_rounded_to_bfloat16(marlin_repack):
    weight, scale = nvfp4(1, 128, 64)
    scale_2 = torch.tensor([1.2345e-4])
    found = unpack_experts(pack_experts(weight, scale, scale_2))
    wanted = dequantize_weight(weight, scale, scale_2)
    assert not torch.equal(found, wanted)
    assert ((found - wanted).abs() <= wanted.abs() * 2.0**-8).all()


@pytest.mark.parametrize("shape", [(64, 64), (128, 96), (192, 128)])
def test_experts_that_do_not_fit_are_named(shape):
    weight, scale = nvfp4(2, *shape)
    with pytest.raises(UnsupportedError, match=rf"\[{shape[0]}, {shape[1]}\], wanted multiples"):
        pack_experts(weight, scale, torch.ones(2))


def test_gate_and_up_get_one_outer_scale():
    weight, scale = nvfp4(3, 64, 32)
    scale.copy_(torch.exp2(torch.randint(-3, 8, scale.shape).float()).to(scale.dtype))
    scale_2 = torch.tensor([[1.0, 1.0], [0.25, 1.0], [1.0, 2.0**-3]]) * 1e-4
    before = [
        dequantize_weight(w, s, outer)
        for w, s, outer in zip(weight.chunk(2, 1), scale.chunk(2, 1), scale_2.T, strict=True)
    ]
    shared, largest = share_outer_scale(scale, scale_2)
    # Scales are powers of two and stay above e4m3's 2^-9, so nothing is rounded.
    assert torch.equal(dequantize_weight(weight, shared, largest), torch.cat(before, dim=1))


@pytest.mark.parametrize(("inner", "padded"), [(64, 64), (96, 128), (16, 64)])
def test_narrow_experts_are_padded_with_zeros(inner, padded):
    layer = SimpleNamespace()
    for name, shape in (("w13", (2, 2 * inner, 64)), ("w2", (2, 128, inner))):
        weight, scale = nvfp4(*shape)
        setattr(layer, f"{name}_weight", torch.nn.Parameter(weight, requires_grad=False))
        setattr(layer, f"{name}_weight_scale", torch.nn.Parameter(scale, requires_grad=False))
    one = torch.ones(2)
    gate_up = dequantize_weight(layer.w13_weight, layer.w13_weight_scale, one)
    down = dequantize_weight(layer.w2_weight, layer.w2_weight_scale, one)
    pad_experts(layer, 64)
    wide = dequantize_weight(layer.w13_weight, layer.w13_weight_scale, one)
    assert wide.shape == (2, 2 * padded, 64)
    for old, new in zip(gate_up.chunk(2, 1), wide.chunk(2, 1), strict=True):
        assert torch.equal(new[:, :inner], old)
        assert not new[:, inner:].any()
    wide = dequantize_weight(layer.w2_weight, layer.w2_weight_scale, one)
    assert torch.equal(wide[..., :inner], down)
    assert not wide[..., inner:].any()


def test_experts_layers_hold_the_checkpoints_weights(marlin_repack):
    """The whole method: pad, share, repack, and leave no tensor of the checkpoint's layout."""
    method, layer = marlin.MarlinMoEMethod(), torch.nn.Module()
    method.create_weights(layer, 2, 128, 96, torch.bfloat16, weight_loader=None)
    assert layer.w13_weight.shape == (2, 192, 64)
    for name in ("w13", "w2"):
        parameter = getattr(layer, f"{name}_weight")
        weight, scale = nvfp4(2, parameter.shape[1], parameter.shape[2] * 2)
        parameter.data.copy_(weight)
        getattr(layer, f"{name}_weight_scale").data.copy_(scale)
    layer.w13_weight_scale_2.data.fill_(2.0**-10)
    layer.w2_weight_scale_2.data.fill_(2.0**-12)
    one = torch.ones(2)
    gate_up = dequantize_weight(layer.w13_weight, layer.w13_weight_scale, one * 2.0**-10)
    down = dequantize_weight(layer.w2_weight, layer.w2_weight_scale, one * 2.0**-12)
    method.process_weights_after_loading(layer)
    names = {f"{part}_{s}" for part in ("w13", "w2") for s in MarlinExperts._fields}
    names = {name.replace("_scale", "_weight_scale") for name in names}
    assert set(dict(layer.named_parameters())) == names
    packed = [
        unpack_experts(
            MarlinExperts(
                *(
                    getattr(layer, f"{p}_{s}").data
                    for s in ("weight", "weight_scale", "weight_scale_2")
                )
            )
        )
        for p in ("w13", "w2")
    ]
    assert torch.equal(packed[0].unflatten(1, (2, 128))[:, :, :96].flatten(1, 2), gate_up)
    assert torch.equal(packed[1][..., :96], down)

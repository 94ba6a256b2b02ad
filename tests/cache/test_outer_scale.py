"""The layer's power of two: exact, absent where it is not needed, and it saves small latents."""

import math

import pytest
import torch

from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.cache.outer_scale import outer_scale
from sglang_dsv4.kernels.reference.norm_rope import rms_norm
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_nvfp4, quantize_nvfp4


def weights(amplitude: float) -> torch.Tensor:
    """A norm's weight as trained ones look: near ``amplitude``, spread by a tenth."""
    return (amplitude * (1 + 0.1 * torch.randn(512))).bfloat16()


def relative_error(weight: torch.Tensor, scale: float) -> float:
    """Of 4-bit latents made by a norm with ``weight * scale``, after dividing by ``scale``."""
    latent = rms_norm(torch.randn(4096, 512), weight.float(), 1e-6)[:, :448]
    read = dequantize_nvfp4(*quantize_nvfp4(latent * scale)) / scale
    return ((read - latent).norm() / latent.norm()).item()


@pytest.mark.parametrize("amplitude", [0.5, 1.0, 5.0, 20.0])
def test_usual_latents_need_none(amplitude):
    assert outer_scale([weights(amplitude)], KVFormat.NVFP4) == 1.0


@pytest.mark.parametrize("amplitude", [1e-4, 0.001, 0.02, 0.1])
def test_small_latents_get_a_power_of_two(amplitude):
    scale = outer_scale([weights(amplitude)], KVFormat.NVFP4)
    assert scale > 1.0
    assert math.log2(scale) == int(math.log2(scale))


def test_bfloat16_records_need_none():
    assert outer_scale([weights(1e-4)], KVFormat.BFLOAT16) == 1.0


def test_the_largest_latent_never_saturates():
    """|w| sqrt(512) bounds an RMSNorm's output; 6 * 448 is the largest block."""
    small, large = weights(0.001), weights(100.0)
    scale = outer_scale([small, large], KVFormat.NVFP4)
    assert scale * large.float().abs().max().item() * math.sqrt(512) <= 6 * 448


def test_zero_weights_need_none():
    assert outer_scale([torch.zeros(512)], KVFormat.NVFP4) == 1.0


@pytest.mark.parametrize("factor", [0.02, 5.0])
def test_equal_relative_error_at_any_amplitude(factor):
    """Latents scaled by 0.02 and by 5 lose as much as those of amplitude 1.

    The error of a block depends on where amax / 6 falls between two e4m3 values (steps of 1/8), so
    that amplitudes which are no power of two apart differ a little: 3 % of the error is allowed.
    Without the factor, 0.02 loses 8 % more.
    """
    base = weights(1.0)
    scaled = (base.float() * factor).bfloat16()
    plain = relative_error(base, outer_scale([base], KVFormat.NVFP4))
    chosen = relative_error(scaled, outer_scale([scaled], KVFormat.NVFP4))
    assert chosen == pytest.approx(plain, rel=0.03)


def test_small_latents_lose_more_without_it():
    small = weights(0.02)
    scale = outer_scale([small], KVFormat.NVFP4)
    assert relative_error(small, 1.0) > 1.05 * relative_error(small, scale)

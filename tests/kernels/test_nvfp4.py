"""The NVFP4 codec, bit for bit against exact rational arithmetic."""

import math
from fractions import Fraction

import cases
import pytest
import torch

from sglang_dsv4.kernels.reference.nvfp4 import (
    decode_packed,
    dequantize_nvfp4,
    dequantize_weight,
    e2m1_decode,
    e2m1_encode,
    pack_nibbles,
    quantize_nvfp4,
    unpack_nibbles,
)


def scale_bytes(scale):
    return scale.contiguous().view(torch.uint8)


def test_encode_is_nearest_even_around_every_tie():
    ties = torch.tensor(cases.TIES)
    values = torch.cat(
        (
            ties,
            torch.nextafter(ties, torch.zeros(7)),
            torch.nextafter(ties, torch.full((7,), 9.0)),
            torch.tensor([0.0, 2.0**-149, 5.999999, 6.0, 7.0, 3.0e38]),
            torch.rand(500) * 8,
        )
    )
    expected = [cases.e2m1_code(Fraction(v), False) for v in values.tolist()]
    assert e2m1_encode(values).tolist() == expected
    assert e2m1_encode(-values).tolist() == [code | 8 for code in expected]
    # The ties by name: a rule that rounds half away or half down differs in three or four.
    assert e2m1_encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_encode_infinity_and_negative_zero():
    assert e2m1_encode(torch.tensor([math.inf, -math.inf, -0.0])).tolist() == [7, 15, 8]


def test_decode_gives_all_sixteen_values():
    decoded = e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert decoded.tolist() == [float(v) for v in cases.E2M1] + [-float(v) for v in cases.E2M1]
    assert torch.signbit(decoded[8])


def test_even_index_lies_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x8F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_packed_decode_agrees_for_every_byte():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    expected = e2m1_decode(unpack_nibbles(packed))
    assert torch.equal(decode_packed(packed).view(torch.int32), expected.view(torch.int32))


def test_dequantize_every_code_under_every_scale_byte():
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8)).expand(256, 8).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).view(torch.float8_e4m3fn)
    values = dequantize_nvfp4(packed, scale)
    magnitudes = cases.E2M1 + [-m for m in cases.E2M1]
    for byte in range(256):
        exact = cases.e4m3_value(byte)
        if exact is None:
            assert values[byte].isnan().all()
        else:
            assert values[byte].tolist() == [float(m * exact) for m in magnitudes]
    finite = values[~values.isnan()]
    assert torch.equal(finite.bfloat16().float(), finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_matches_exact_arithmetic(dtype):
    # Group maxima from below the smallest scale (6 x 2^-10), through its subnormals, to saturation.
    amplitude = torch.logspace(-4, 3.6, 200)[:, None]
    groups = (torch.randn(200, 16) * amplitude).to(dtype)
    packed, scale = quantize_nvfp4(groups)
    codes = unpack_nibbles(packed)
    for row in range(200):
        expected_codes, expected_byte = cases.slow_nvfp4_group(groups[row].tolist())
        assert scale_bytes(scale)[row].item() == expected_byte
        assert codes[row].tolist() == expected_codes


def test_quantize_exact_ties_under_every_scale():
    # amax = 6 x scale fixes the scale; the other values are ties times that scale, exactly.
    finite = torch.arange(1, 0x7F, dtype=torch.uint8)
    scales = finite.view(torch.float8_e4m3fn).float()[:, None]
    ties = torch.tensor(cases.TIES)
    row = torch.cat((torch.tensor([6.0]), ties, -ties, torch.tensor([-0.0])))
    packed, scale = quantize_nvfp4(scales * row)
    assert torch.equal(scale_bytes(scale)[:, 0], finite)
    up = [0, 2, 2, 4, 4, 6, 6]
    expected = torch.tensor([7, *up, *[code | 8 for code in up], 8], dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(packed), expected.expand(len(finite), 16))


def test_scale_ties_round_to_even():
    # amax / 6 halfway between neighbouring scales: 1.0625 -> 1.0, 1.1875 -> 1.25, and below the
    # smallest one 2^-10 -> 0.
    amax = torch.tensor([6 * 1.0625, 6 * 1.1875, 6 * 2.0**-10])
    _, scale = quantize_nvfp4(amax[:, None].expand(3, 16))
    assert scale.float().flatten().tolist() == [1.0, 1.25, 0.0]


def test_zero_and_tiny_groups_become_signed_zeros():
    groups = torch.tensor([0.0, -0.0, 1e-3, -1e-3] * 4).repeat(2, 1)
    groups[0, 2:] = 0.0
    packed, scale = quantize_nvfp4(groups)
    assert scale_bytes(scale).tolist() == [[0], [0]]
    assert unpack_nibbles(packed)[0].tolist() == [0, 8] + [0] * 14
    assert unpack_nibbles(packed)[1].tolist() == [0, 8, 0, 8] * 4


def test_nan_poisons_its_group_only():
    groups = torch.randn(3, 32)
    clean_packed, clean_scale = quantize_nvfp4(groups)
    groups[1, 5] = math.nan
    packed, scale = quantize_nvfp4(groups)
    assert scale_bytes(scale)[1, 0].item() == 0x7F
    assert packed[1, :8].tolist() == [0] * 8
    values = dequantize_nvfp4(packed, scale)
    assert values[1, :16].isnan().all()
    expected = dequantize_nvfp4(clean_packed, clean_scale)
    expected[1, :16] = math.nan
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_infinite_and_huge_values_saturate():
    groups = torch.ones(3, 16)
    groups[0, 0], groups[1, 3], groups[2, 7] = math.inf, -math.inf, 1e30
    packed, scale = quantize_nvfp4(groups)
    assert scale.float().flatten().tolist() == [448.0] * 3
    expected = torch.zeros(3, 16)
    expected[0, 0], expected[1, 3], expected[2, 7] = 2688.0, -2688.0, 2688.0
    assert torch.equal(dequantize_nvfp4(packed, scale), expected)


def test_agrees_with_the_stock_v41_codec_where_their_scales_do():
    from sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference import quantize_k_cache_v41_fp4

    # The stock codec has a lower bound of 2^-9 on the scale, so it must not bind here.
    x = torch.randn(1, 64, 512) * torch.logspace(-1, 2, 64)[:, None]
    page = quantize_k_cache_v41_fp4(x, page_bytes=64 * 288)[0]
    packed, scale = quantize_nvfp4(x[0])
    assert torch.equal(page[: 64 * 256].view(64, 256), packed)
    assert torch.equal(page[64 * 256 :].view(64, 32), scale_bytes(scale))


def test_reciprocal_product_differs_from_division_in_exact_ties_only():
    # FlashInfer's writer multiplies by 1 / scale. Over every bf16 and e4m3 significand, that moves
    # a few exact ties by one ulp; both neighbours are then equally near, so no error grows.
    x = torch.arange(128.0, 256.0)[:, None] * 2.0 ** torch.arange(-9.0, -4.0).repeat(128, 1)
    x = x.flatten()[:, None]
    scale = torch.arange(8.0, 16.0) / 8
    differ = e2m1_encode(x * (1 / scale)) != e2m1_encode(x / scale)
    quotient = (x / scale)[differ]
    assert 0 < differ.sum() < 10
    assert torch.isin(quotient, torch.tensor(cases.TIES)).all()


def relative_error(x, factor=1.0):
    packed, scale = quantize_nvfp4(x * factor)
    return ((dequantize_nvfp4(packed, scale) / factor - x).norm() / x.norm()).item()


def test_a_power_of_two_changes_nothing_inside_the_scale_range():
    x = torch.randn(64, 448)
    packed, scale = quantize_nvfp4(x)
    for power in (0.25, 4.0, 64.0):
        other_packed, other_scale = quantize_nvfp4(x * power)
        assert torch.equal(other_packed, packed)
        assert torch.equal(other_scale.float(), scale.float() * power)


def test_small_and_large_latents_have_equal_error_with_a_power_of_two_factor():
    latent = torch.randn(256, 448)
    small = relative_error(latent * 0.02, factor=64.0)
    large = relative_error(latent * 5, factor=0.25)
    # 0.02 x 64 = 1.28 and 5 / 4 = 1.25 differ only in where e4m3's 8 steps per octave fall: each
    # error averages 7168 groups, so they agree to about 1%. Without the factor the small latents'
    # scales are subnormal (amax / 6 near 0.006, step 2^-9) and the error grows by 8 to 9%.
    assert small == pytest.approx(large, rel=0.02)
    assert relative_error(latent * 0.02) > 1.06 * small


def test_weight_scale_2_shapes():
    packed = torch.randint(0, 256, (2, 4, 16), dtype=torch.uint8)
    scale = torch.rand(2, 4, 2).to(torch.float8_e4m3fn)
    outer = torch.tensor([0.5, 3.0])
    values = dequantize_weight(packed, scale, outer)
    for expert in range(2):
        expected = dequantize_nvfp4(packed[expert], scale[expert]) * outer[expert]
        # Two products in another order: two roundings of 2^-24.
        torch.testing.assert_close(values[expert], expected, rtol=2.0**-22, atol=0)
        for one in (outer[expert], outer[expert].view(1)):
            single = dequantize_weight(packed[expert], scale[expert], one)
            assert torch.equal(single, values[expert])


def test_empty_and_odd_shapes():
    packed, scale = quantize_nvfp4(torch.zeros(0, 448))
    assert packed.shape == (0, 224)
    assert scale.shape == (0, 28)
    assert dequantize_nvfp4(packed, scale).shape == (0, 448)
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_nvfp4(torch.zeros(2, 24))


def test_non_contiguous_input():
    x = torch.randn(5, 64)
    packed, scale = quantize_nvfp4(x)
    other_packed, other_scale = quantize_nvfp4(cases.strided(x))
    assert torch.equal(packed, other_packed)
    assert torch.equal(scale_bytes(scale), scale_bytes(other_scale))
    strided = dequantize_nvfp4(cases.strided(packed), scale)
    assert torch.equal(strided, dequantize_nvfp4(packed, scale))

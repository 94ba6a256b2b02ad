"""Latent records in a paged pool: bytes, hostile slots, and the fused store."""

import cases
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
)

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.reference.kv_store import (
    encode_records,
    kv_store,
    read_records,
    write_records,
)
from sglang_dsv4.kernels.reference.norm_rope import rms_norm
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sglang_dsv4.kernels.reference.rope import YarnParams, apply_rope_tail, build_rope_table

LAYOUTS = [RecordLayout(kv_format, size) for kv_format in KVFormat for size in (64, 2, 61)]
IDS = [layout.tag for layout in LAYOUTS]


def stored(latent, layout):
    """What the record format keeps of latents."""
    if layout.format is KVFormat.BFLOAT16:
        return latent.bfloat16().float()
    nope = dequantize_nvfp4(*quantize_nvfp4(latent[:, : layout.nope_dim]))
    return torch.cat((nope, latent[:, layout.nope_dim :].bfloat16().float()), dim=-1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_round_trip_in_a_pool_of_garbage(layout):
    pool = cases.garbage_pool(layout, num_pages=5, padding=48)
    slots = torch.randperm(5 * layout.page_size)[:7]
    latent = torch.randn(7, 512)
    write_records(latent, slots, pool, layout)
    assert torch.equal(read_records(pool, slots, layout), stored(latent, layout))
    order = torch.tensor([3, 3, 0, 6])
    assert torch.equal(read_records(pool, slots[order], layout), stored(latent, layout)[order])


def test_nvfp4_bytes_of_one_record():
    layout = RecordLayout(KVFormat.NVFP4, 64)
    pool = cases.garbage_pool(layout, num_pages=3)
    latent = torch.randn(1, 512)
    write_records(latent, torch.tensor([2 * 64 + 5]), pool, layout)
    data = pool[2, 5 * 352 : 6 * 352]
    scale = pool[2, 64 * 352 + 5 * 32 : 64 * 352 + 6 * 32]
    for group in range(28):
        codes, byte = cases.slow_nvfp4_group(latent[0, 16 * group : 16 * group + 16].tolist())
        assert scale[group].item() == byte
        pairs = [codes[i] | (codes[i + 1] << 4) for i in range(0, 16, 2)]
        assert data[8 * group : 8 * group + 8].tolist() == pairs
    assert scale[28:].tolist() == [0, 0, 0, 0]
    assert torch.equal(data[224:].clone().view(torch.bfloat16), latent[0, 448:].bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_only_the_named_rows_change(layout):
    pool = torch.randint(0, 256, (4, layout.page_bytes), dtype=torch.uint8)
    before = pool.clone()
    slot = 2 * layout.page_size + layout.page_size // 2
    slots = torch.tensor([slot, *cases.GARBAGE_SLOTS, 4 * layout.page_size])
    write_records(torch.randn(len(slots), 512), slots, pool, layout)
    row = slot % layout.page_size
    data, scale = layout.data_offset(row), layout.scale_offset(row)
    before[2, data : data + layout.data_bytes] = pool[2, data : data + layout.data_bytes]
    before[2, scale : scale + layout.scale_bytes] = pool[2, scale : scale + layout.scale_bytes]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_unused_slots_read_as_zeros(layout):
    pool = cases.garbage_pool(layout, num_pages=2)
    slots = torch.tensor([*cases.GARBAGE_SLOTS, 2 * layout.page_size])
    assert torch.equal(read_records(pool, slots, layout), torch.zeros(len(slots), 512))
    assert read_records(pool, torch.tensor([0]), layout).isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_nothing_to_do_and_strided_inputs(layout):
    pool = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    write_records(torch.zeros(0, 512), none, pool, layout)
    assert not pool.any()
    assert read_records(pool, none, layout).shape == (0, 512)
    latent, slots = torch.randn(3, 512), torch.tensor([3, 0, 1])
    write_records(cases.strided(latent), cases.strided(slots), pool, layout)
    assert torch.equal(read_records(pool, cases.strided(slots), layout), stored(latent, layout))
    assert torch.equal(read_records(pool, slots.int(), layout), stored(latent, layout))


def test_bf16_latents_encode_like_their_float32_values():
    layout = RecordLayout(KVFormat.NVFP4, 64)
    latent = torch.randn(4, 512).bfloat16()
    for left, right in zip(
        encode_records(latent, layout), encode_records(latent.float(), layout), strict=True
    ):
        assert torch.equal(left, right)


@pytest.mark.parametrize("rope_type", ["main", "compress"])
def test_kv_store_against_transformers(rope_type):
    config = cases.hf_config(head_dim=512)
    norm = cases.randomise(DeepseekV4RMSNorm(512, eps=1e-6))
    kv, positions = torch.randn(9, 512), torch.randint(0, 4000, (9,))
    yarn = YarnParams(16, 65536) if rope_type == "compress" else None
    table = build_rope_table(4096, 160000.0 if yarn else 10000.0, yarn=yarn)
    cos, sin = DeepseekV4RotaryEmbedding(config)(kv, positions[None], layer_type=rope_type)
    expected = apply_rotary_pos_emb(norm(kv)[None, None], cos, sin)[0, 0]

    layout = RecordLayout(KVFormat.BFLOAT16, 64)
    pool, slots = cases.garbage_pool(layout, 1), torch.arange(20, 29)
    kv_store(kv, norm.weight, 1e-6, positions, table, slots, pool, layout)
    # Both are float32 up to the last step, so only values on a bf16 boundary may go the other way.
    actual = read_records(pool, slots, layout)
    torch.testing.assert_close(actual, expected.bfloat16().float(), rtol=2.0**-7, atol=1e-6)
    assert (actual == expected.bfloat16().float()).float().mean() > 0.99


def test_kv_store_is_its_parts_and_the_factor_passes_through():
    layout = RecordLayout(KVFormat.NVFP4, 64)
    kv, weight = torch.randn(6, 512).bfloat16(), torch.rand(512) + 0.5
    positions, slots = torch.arange(6) * 100, torch.tensor([5, 4, -1, 9, 8, 63])
    table = build_rope_table(512, 10000.0)
    pool, parts = (cases.garbage_pool(layout, 1) for _ in range(2))
    kv_store(kv, weight, 1e-6, positions, table, slots, pool, layout)
    latent = apply_rope_tail(rms_norm(kv.float(), weight, 1e-6), positions, table)
    write_records(latent, slots, parts, layout)
    assert torch.equal(pool, parts)

    scaled = cases.garbage_pool(layout, 1)
    kv_store(kv, weight * 4, 1e-6, positions, table, slots, scaled, layout)
    assert torch.equal(read_records(scaled, slots, layout), read_records(pool, slots, layout) * 4)

"""Bytes per token against arithmetic done by hand and against SGLang's own configurator."""

from types import SimpleNamespace

import pytest
from synthetic import tiny_config

from sglang_dsv4.bench.published import FLASH, PRO
from sglang_dsv4.cache.capacity import CacheFormat, Capacity, StockFormat
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.config import from_config_dict

FLASH_DIMS = from_config_dict(FLASH)[0]


def close(value: float) -> object:
    # Sums of a few float64 products: 1e-12 relative is far above their rounding.
    return pytest.approx(value, rel=1e-12)


def test_flash_stock_fp8():
    """584-byte records; pages of 256, 64 and 2 rows padded to multiples of 576."""
    pools = Capacity(FLASH_DIMS, StockFormat.FP8).per_token()
    # 256 * 584 = 149504 -> 260 * 576 = 149760: 585 a row; 64 * 584 = 37376 -> 65 * 576: 585 a row;
    # 2 * 584 = 1168 -> 3 * 576 = 1728: 864 a row.
    assert pools.window == close(0.1 * 43 * 585)
    # 8 ring rows a 256-token page, 2 halves x (kv, gate) x (512 + 128) float32 in 21 layers.
    assert pools.states == close(0.1 * 21 * (8 / 256) * (4 * 640 * 4))
    assert pools.c4 == close(21 * 585 / 4)
    assert pools.indexer == close(21 * 132 / 4)
    assert pools.c128 == close(20 * 864 / 128)
    assert pools.total == close(2515.5 + 672 + 3071.25 + 693 + 135)
    assert round(pools.total) == 7087


def test_flash_nvfp4():
    pools = Capacity(FLASH_DIMS, KVFormat.NVFP4).per_token()
    assert pools.window == close(0.1 * 43 * 384)
    assert pools.states == close(672)
    assert pools.c4 == close(21 * 384 / 4)
    assert pools.indexer == close(21 * 68 / 4)
    assert pools.c128 == close(20 * 384 / 128)
    assert pools.total == close(1651.2 + 672 + 2016 + 357 + 60)
    assert pools.total == close(4756.2)
    stock = Capacity(FLASH_DIMS, StockFormat.FP8).per_token().total
    assert round(stock / pools.total, 2) == 1.49


def test_flash_bfloat16():
    pools = Capacity(FLASH_DIMS, KVFormat.BFLOAT16).per_token()
    assert pools.total == close(0.1 * 43 * 1024 + 672 + 21 * (1024 + 256) / 4 + 20 * 1024 / 128)


def test_pro_nvfp4():
    """61 layers: 30 CSA, 31 HCA."""
    pools = Capacity(from_config_dict(PRO)[0], KVFormat.NVFP4).per_token()
    states = 0.1 * 30 * 10240 / 32
    assert pools.total == close(0.1 * 61 * 384 + states + 30 * 452 / 4 + 31 * 3)


def test_swa_ratio_scales_window_and_states_only():
    one = Capacity(FLASH_DIMS, KVFormat.NVFP4, swa_ratio=0.1).per_token()
    two = Capacity(FLASH_DIMS, KVFormat.NVFP4, swa_ratio=0.2).per_token()
    assert (two.window, two.states) == (close(2 * one.window), close(2 * one.states))
    assert (two.c4, two.indexer, two.c128) == (one.c4, one.indexer, one.c128)


def test_speculative_rings_give_the_published_number():
    """584 unpadded with a ring of 16 is the 7705 of SGLang's MXFP4 KV proposal; ours pads 584."""
    pools = Capacity(FLASH_DIMS, StockFormat.FP8, c4_ring=16).per_token()
    padding = 0.1 * 43 + 21 / 4 + 20 * 280 / 128
    assert round(pools.total - padding) == 7705


def test_request_bytes():
    """257 slots of 128 rows, one more ring and a spare row, rounded to 128: 33152 rows of 4 KiB."""
    assert Capacity(FLASH_DIMS, KVFormat.NVFP4).request_bytes(256) == 33152 * 1024 * 4 * 20


def test_tokens_for():
    capacity = Capacity(FLASH_DIMS, KVFormat.NVFP4)
    page = 256 * 4756.2
    assert capacity.tokens_for(10 * page + 1) == 2560
    assert capacity.tokens_for(11 * page - 1) == 2560
    assert capacity.tokens_for(page - 1) == 0
    assert capacity.tokens_for(-1.0) == 0
    fixed = capacity.request_bytes(64)
    assert capacity.tokens_for(fixed + 10 * page + 1, 64) == 2560
    assert capacity.tokens_for(fixed - 1, 64) == 0


@pytest.mark.parametrize("config", [FLASH, PRO, tiny_config()], ids=["flash", "pro", "tiny"])
@pytest.mark.parametrize("cache_format", [StockFormat.FP8, KVFormat.NVFP4, KVFormat.BFLOAT16])
def test_equals_sglangs_configurator(
    monkeypatch: pytest.MonkeyPatch, config: dict, cache_format: CacheFormat
):
    """The pinned SGLang's rules, with our record and key sizes in place of its own."""
    import sglang.srt.mem_cache.deepseek_v4_memory_pool as pool
    import sglang.srt.model_executor.pool_configurator as configurator

    kernel = SimpleNamespace(dsv4_attn_backend="auto", enable_deepseek_v4_fp4_indexer=False)
    for module in (pool, configurator):
        monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    dims = from_config_dict(config)[0]
    ratios = [kind.ratio for kind in dims.layer_kinds]
    stock = object.__new__(configurator.DSV4PoolConfigurator)
    stock._unified = stock.encoder_replay = False
    stock.page_size, stock.attn_head_dim, stock.indexer_head_dim = 256, 512, 128
    stock.num_layers_total, stock.c4_shrink_factor = len(ratios), 1
    stock.ring_sizes = {ratio: pool.get_compress_state_ring_size(ratio) for ratio in (4, 128)}
    stock.swa_cap_tokens, stock.disaggregation_mode = None, "null"
    stock.swa_ratio = configurator.DSV4_DEFAULT_SWA_FULL_TOKENS_RATIO
    stock.indexer_bytes_per_token = pool.get_dsv4_indexer_bytes_per_token(128, False)
    stock.stage_owner_layers = pool.collect_sources_by_ratio(ratios, (), range(len(ratios)))
    if isinstance(cache_format, KVFormat):
        record, key = {"nvfp4": (384, 68), "bfloat16": (1024, 256)}[cache_format.value]
        monkeypatch.setattr(stock, "_get_paged_kv_bytes_per_token", lambda ratio=0: record)
        stock.indexer_bytes_per_token = key
    stock.bytes_per_swa_token = stock._get_bytes_per_swa_token()
    ours = Capacity(dims, cache_format)
    assert ours.per_token().total == close(stock._get_bytes_per_full_token())
    assert ours.request_bytes(256) == stock._get_c128_state_fixed_bytes(256)

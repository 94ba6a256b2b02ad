"""sglang/srt/mem_cache/kv_cache_configurator.py: our pool class in the place of stock's."""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache import kv_cache_configurator

from sglang_dsv4.cache.pool import Dsv4TokenToKVPool
from sglang_dsv4.model_source import serves
from sglang_dsv4.patches.patch import Patch


def around_build_pool(original: Callable, self: Any, **kwargs: Any) -> Any:
    """Run stock's builder, which sizes and wires the pool, with our subclass under its name."""
    if not serves(self.model_config.hf_config):
        return original(self, **kwargs)
    stock = kv_cache_configurator.DeepSeekV4TokenToKVPool
    kv_cache_configurator.DeepSeekV4TokenToKVPool = Dsv4TokenToKVPool
    try:
        pool = original(self, **kwargs)
    finally:
        kv_cache_configurator.DeepSeekV4TokenToKVPool = stock
    pool.log_capacity(kwargs["full_max_total_num_tokens"])
    return pool


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_dsv4_kv_pool",
        hook=around_build_pool,
        signature="(self, *, max_running_requests, full_max_total_num_tokens, "
        "swa_max_total_num_tokens, c4_max_total_num_tokens, c128_max_total_num_tokens, "
        "c4_state_pool_size, c128_state_pool_size, c4_state_dtype, c128_state_dtype, "
        "req_to_token_pool)",
        why="Stock names its DeepSeek-V4 pool class in the code and asks no registry.",
        remove_when="The platform hook get_kv_pool_cls covers the DeepSeek-V4 pool.",
    ),
)

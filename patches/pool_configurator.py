"""sglang/srt/model_executor/pool_configurator.py: bytes a token of our records, in the budget."""

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator

from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.cache.pool import WINDOW_PAGE, kv_format_of
from sglang_dsv4.model_source import serves
from sglang_dsv4.patches.patch import Patch


class Dsv4PoolConfigurator(DSV4PoolConfigurator):
    """Stock's sizing rules with the bytes of our records."""

    def __init__(self, kvc: Any) -> None:
        self._format = kv_format_of(kvc.kv_cache_dtype)
        super().__init__(kvc)

    def _get_paged_kv_bytes_per_token(self, compress_ratio: int = 0) -> float:
        # Pages carry no padding, so every pool's page size gives the same.
        return float(RecordLayout(self._format, WINDOW_PAGE).record_bytes)

    def _compressed_bytes_per_full_token(self, ratio: int) -> float:
        record = self._get_paged_kv_bytes_per_token(ratio) / ratio
        if ratio != 4:
            return record
        return record + IndexerLayout(self._format, self.page_size // ratio).record_bytes / ratio


def around_create(original: Callable, kvc: Any) -> Any:
    """Our configurator for what we serve."""
    if serves(kvc.model_config.hf_config) and kvc.is_hybrid_swa:
        return Dsv4PoolConfigurator(kvc)
    return original(kvc)


PATCHES = (
    Patch(
        target="sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        hook=around_create,
        signature="(kvc)",
        why="Stock budgets DeepSeek-V4 by its own record of 584 bytes and indexer key of 132.",
        remove_when="Stock asks the pool class for its bytes a token.",
    ),
)

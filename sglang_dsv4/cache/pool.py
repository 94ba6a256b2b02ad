"""The paged pools, as a subclass of SGLang's: the allocator, the radix tree and eviction know it.

SGLang's ``DeepSeekV4TokenToKVPool`` makes one pool for the sliding window, one for each compress
ratio and one for the indexer keys, plus the compressor states. Only the record in the first three
differs here (``kv_layout``); slots, page counts and states are SGLang's.
"""

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4IndexerPool,
    DeepSeekV4SingleKVPool,
    DeepSeekV4TokenToKVPool,
)
from sglang.srt.utils import ceil_div

from sglang_dsv4.cache.kv_layout import FORMAT_VERSION, IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.errors import UnsupportedError

logger = logging.getLogger(__name__)

WINDOW_PAGE = 64
"""Tokens a physical page of the window pool; a slot id means the same in pages of 64 and 256."""


def kv_format_of(dtype: torch.dtype) -> KVFormat:
    """The record format that SGLang's KV cache dtype stands for.

    Raises:
        UnsupportedError: neither NVFP4 nor bfloat16.
    """
    formats = {torch.float4_e2m1fn_x2: KVFormat.NVFP4, torch.bfloat16: KVFormat.BFLOAT16}
    if dtype not in formats:
        raise UnsupportedError(
            f"The KV cache dtype is {dtype}, wanted nvfp4 or bfloat16: pass --kv-cache-dtype nvfp4."
        )
    return formats[dtype]


@dataclass(frozen=True)
class PoolUsage:
    """One kind of buffer over all layers.

    Attributes:
        name: window, c4, c128, indexer or state.
        rows: slots of each layer (state: rows of all layers), reserved ones not counted.
        ratio: tokens of context a row stands for; 0 where rows do not grow with the context.
        nbytes: real size of the buffers.
    """

    name: str
    rows: int
    ratio: int
    nbytes: int

    def line(self, tokens: int) -> str:
        """One line for the log, for ``tokens`` tokens of context."""
        held = f", {self.rows * self.ratio} tokens" if self.ratio else ""
        rate = self.nbytes / tokens
        return f"{self.name}: {self.rows} rows{held}, {self.nbytes} bytes, {rate:.1f} bytes a token"


class RecordPool(DeepSeekV4SingleKVPool):
    """Pages of 512-wide latents, uint8 [pages, page bytes] a layer, laid out by ``layout``."""

    layout: RecordLayout

    def _create_buffers(self) -> None:
        self.layout = RecordLayout(kv_format_of(self.dtype), self.page_size)
        super()._create_buffers()

    def get_bytes_per_token(self) -> int:
        """Bytes of one record, scales included."""
        return self.layout.record_bytes

    def create_buffer(self, *, num_pages: int) -> torch.Tensor:
        """Zeroed pages of one layer: uint8 [num_pages, page bytes]."""
        self.kv_cache_total_dim = self.layout.record_bytes
        self.bytes_per_page_padded = self.layout.page_bytes
        return torch.zeros(num_pages, self.layout.page_bytes, dtype=torch.uint8, device=self.device)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Pages of one layer of this pool."""
        return self.kv_buffer[layer_id]


class IndexerKeyPool(DeepSeekV4IndexerPool):
    """Pages of indexer keys, uint8 [pages, page bytes] a layer, laid out by ``layout``."""

    layout: IndexerLayout

    def _create_buffer(self) -> None:
        self.layout = IndexerLayout(kv_format_of(self.dtype), self.page_size)
        # The page count follows the KV pool of the same ratio, one dummy logical page included.
        pages = ceil_div(self.size + self.global_page_size, self.page_size)
        memory_pool = (
            torch.cuda.use_mem_pool(self.custom_mem_pool) if self.custom_mem_pool else nullcontext()
        )
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), memory_pool:
            self.index_k_with_scale_buffer = [
                torch.zeros(pages, self.layout.page_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(self.layer_num)
            ]

    def get_bytes_per_token(self) -> int:
        """Bytes of one key, scales included."""
        return self.layout.record_bytes


class Dsv4TokenToKVPool(DeepSeekV4TokenToKVPool):
    """SGLang's DeepSeek-V4 pool with NVFP4 or bfloat16 records."""

    def _make_kv_pool(self, **kwargs: Any) -> RecordPool:
        kwargs.pop("cls", None)
        kwargs.pop("kv_layout", None)
        if kwargs["page_size"] > WINDOW_PAGE:
            kwargs["page_size"] = WINDOW_PAGE
        return super()._make_kv_pool(cls=RecordPool, **kwargs)

    def _make_indexer_pool(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        index_head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        force_fp4: bool = False,
        global_page_size: int | None = None,
        index_k_page8: bool = False,
    ) -> IndexerKeyPool:
        return IndexerKeyPool(
            size,
            page_size,
            dtype,
            index_head_dim,
            layer_num,
            device,
            enable_memory_saver,
            use_fp4_indexer=dtype == torch.float4_e2m1fn_x2,
            global_page_size=global_page_size,
        )

    def pd_kv_layout(self) -> str:
        """Tag of the bytes that leave the process; peers of disaggregated serving must share it."""
        return f"{FORMAT_VERSION}:{kv_format_of(self.dtype).value}"

    def window_records(self, layer_id: int) -> tuple[torch.Tensor, RecordLayout]:
        """Window pool of a layer and its layout."""
        self.wait_layer_transfer(layer_id)
        return self.get_swa_raw_buffer(layer_id), self.swa_kv_pool.layout

    def compressed_records(self, layer_id: int) -> tuple[torch.Tensor, RecordLayout]:
        """Compressed pool of a CSA or HCA layer and its layout."""
        self.wait_layer_transfer(layer_id)
        item = self.layer_mapping[layer_id]
        pool = item.compress_kv_pool
        return pool.kv_buffer[item.compress_layer_id], pool.layout

    def indexer_keys(self, layer_id: int) -> tuple[torch.Tensor, IndexerLayout]:
        """Indexer key pool of a CSA layer and its layout."""
        self.wait_layer_transfer(layer_id)
        item = self.layer_mapping[layer_id]
        pool = self.index_pools[item.compress_ratio]
        return pool.index_k_with_scale_buffer[item.compress_layer_id], pool.layout

    def compressor_state(self, layer_id: int) -> torch.Tensor:
        """State of a layer's compressor: float32 [rows, 2 * coff * 512]."""
        return self.get_attention_compress_states(layer_id).kv_score_buffer.kv_score

    def indexer_state(self, layer_id: int) -> torch.Tensor:
        """State of a layer's indexer compressor: float32 [rows, 2 * 2 * 128]."""
        return self.get_indexer_compress_states(layer_id).kv_score_buffer.kv_score

    def usage(self) -> list[PoolUsage]:
        """What each kind of buffer holds, from the buffers' real sizes, over all layers."""
        sizes = self.compressed_pool_configs
        usage = [PoolUsage("window", self.swa_size, 1, _nbytes(self.swa_kv_pool.kv_buffer))]
        for ratio, pool in self.kv_pools.items():
            usage.append(
                PoolUsage(f"c{ratio}", sizes[ratio].kv_size, ratio, _nbytes(pool.kv_buffer))
            )
        for ratio, pool in self.index_pools.items():
            keys = _nbytes(pool.index_k_with_scale_buffer)
            usage.append(PoolUsage("indexer", sizes[ratio].kv_size, ratio, keys))
        states = [*self.compress_state_pools, *self.indexer_compress_state_pools]
        buffers = [s.kv_score_buffer.kv_score for s in states if s is not None]
        return [*usage, PoolUsage("state", sum(len(b) for b in buffers), 0, _nbytes(buffers))]

    def log_capacity(self, tokens: int) -> None:
        """Log each pool's capacity and bytes for ``tokens`` tokens of context."""
        usage = self.usage()
        for pool in usage:
            logger.info("KV pool %s", pool.line(tokens))
        total = sum(pool.nbytes for pool in usage)
        logger.info(
            "KV pools (%s): %d tokens of context, %d bytes, %.1f bytes a token",
            kv_format_of(self.dtype).value,
            tokens,
            total,
            total / tokens,
        )


def _nbytes(buffers: Iterable[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)

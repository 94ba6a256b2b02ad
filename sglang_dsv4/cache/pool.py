"""The paged pools, as a subclass of SGLang's: the allocator, the radix tree and eviction know it.

SGLang's ``DeepSeekV4TokenToKVPool`` makes one pool for the sliding window, one for each compress
ratio and one for the indexer keys, plus the compressor states. Only the record in the first three
differs here (``kv_layout``); slots, page counts and states are SGLang's.
"""

import logging
from contextlib import nullcontext
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
        return torch.zeros(
            num_pages, self.layout.page_bytes, dtype=torch.uint8, device=self.device
        )

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

    def byte_sizes(self) -> dict[str, int]:
        """Real bytes of each kind of buffer, over all layers."""
        kv = self.kv_pools
        states = [*self.compress_state_pools, *self.indexer_compress_state_pools]
        return {
            "window": sum(buffer.nbytes for buffer in self.swa_kv_pool.kv_buffer),
            **{
                f"c{ratio}": sum(buffer.nbytes for buffer in pool.kv_buffer)
                for ratio, pool in kv.items()
            },
            "indexer": sum(
                buffer.nbytes
                for pool in self.index_pools.values()
                for buffer in pool.index_k_with_scale_buffer
            ),
            "state": sum(s.kv_score_buffer.kv_score.nbytes for s in states if s is not None),
        }

    def log_capacity(self, tokens: int) -> None:
        """Log what the pools hold: real bytes, bytes a token of context, tokens of context.

        Args:
            tokens: tokens of context that the full-attention allocator hands out.
        """
        sizes = self.byte_sizes()
        slots = {
            "window": self.swa_size,
            **{f"c{ratio}": config.kv_size for ratio, config in self.compressed_pool_configs.items()},
            "indexer": self.compressed_pool_configs[4].kv_size if 4 in self.kv_pools else 0,
        }
        for name, size in sizes.items():
            held = f", {slots[name]} slots" if name in slots else ""
            logger.info(
                "KV pool %s: %.2f MB%s, %.1f bytes a token of context",
                name,
                size / 1e6,
                held,
                size / tokens,
            )
        logger.info(
            "KV pools (%s): %.2f MB for %d tokens of context, %.1f bytes a token",
            kv_format_of(self.dtype).value,
            sum(sizes.values()) / 1e6,
            tokens,
            sum(sizes.values()) / tokens,
        )

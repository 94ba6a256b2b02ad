"""Bytes that one token costs in the paged pools, by the sizing rules of SGLang 0.5.23.

`DSV4PoolConfigurator` (model_executor/pool_configurator.py) counts, for each token of context,

    window      swa_ratio rows in every layer
    states      the float32 (kv, gate) rings of CSA compressors: c4_ring rows a window page, main
                compressor and indexer, priced with the window rows
    c4          1/4 row in every CSA layer;  indexer: 1/4 key in every CSA layer
    c128        1/128 row in every HCA layer

and, for each request, one ring of c128_ring rows of state in every HCA layer. Pages are those of a
256-token page: 256 rows in the window pool, 64 in C4, 2 in C128. The stock FP8 record of 584 bytes
pads a page to a multiple of 576 (the stride of its reader); our layouts are packed.

Example, V4-Flash (2 SWA, 21 CSA, 20 HCA layers), NVFP4: 0.1 * (43 * 384 + 21 * 8 / 256 * 10240)
+ 21 * (384 + 68) / 4 + 20 * 384 / 128 = 2323.2 + 2373 + 60 = 4756.2 bytes.
"""

from dataclasses import dataclass
from enum import StrEnum

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.config import LayerKind, ModelDims

_STOCK_RECORD = 584
_STOCK_PAGE_ALIGN = 576


class StockFormat(StrEnum):
    """The format of stock SGLang that ours is compared with."""

    FP8 = "fp8"


CacheFormat = KVFormat | StockFormat


@dataclass(frozen=True)
class PoolBytes:
    """Bytes per token of context, one entry a pool (sums over layers)."""

    window: float
    states: float
    c4: float
    indexer: float
    c128: float

    @property
    def total(self) -> float:
        """Bytes per token of context in all pools."""
        return self.window + self.states + self.c4 + self.indexer + self.c128


@dataclass(frozen=True)
class Capacity:
    """Pool sizes of one model on one GPU; the KV head is single, so every TP rank holds it all.

    `swa_ratio` is SGLang's `--swa-full-tokens-ratio`; ring sizes are those without speculation;
    `state_bytes` is the size of one state value (float32).
    """

    dims: ModelDims
    format: CacheFormat
    page_size: int = 256
    swa_ratio: float = 0.1
    c4_ring: int = 8
    c128_ring: int = 128
    state_bytes: int = 4

    def row_bytes(self, rows_per_page: int) -> float:
        """Bytes of one latent record in a page of that many rows, page padding included."""
        if isinstance(self.format, KVFormat):
            layout = RecordLayout(
                self.format, rows_per_page, self.dims.nope_head_dim, self.dims.qk_rope_head_dim
            )
            return layout.page_bytes / rows_per_page
        pages = -(-rows_per_page * _STOCK_RECORD // _STOCK_PAGE_ALIGN)
        return pages * _STOCK_PAGE_ALIGN / rows_per_page

    def key_bytes(self) -> float:
        """Bytes of one indexer key: 68 (NVFP4), 256 (bfloat16), 132 (stock FP8)."""
        width = self.dims.index_head_dim
        if isinstance(self.format, KVFormat):
            rows = self.page_size // LayerKind.CSA.ratio
            return IndexerLayout(self.format, rows, width).page_bytes / rows
        return width + width // 128 * 4

    def per_token(self) -> PoolBytes:
        """Bytes per token of context, by pool."""
        dims = self.dims
        csa, hca = LayerKind.CSA, LayerKind.HCA
        num_csa, num_hca = len(dims.layers_of(csa)), len(dims.layers_of(hca))
        state_row = 2 * csa.coff * (dims.head_dim + dims.index_head_dim) * self.state_bytes
        return PoolBytes(
            window=self.swa_ratio * dims.num_hidden_layers * self.row_bytes(self.page_size),
            states=self.swa_ratio * num_csa * self.c4_ring / self.page_size * state_row,
            c4=num_csa / csa.ratio * self.row_bytes(self.page_size // csa.ratio),
            indexer=num_csa / csa.ratio * self.key_bytes(),
            c128=num_hca / hca.ratio * self.row_bytes(self.page_size // hca.ratio),
        )

    def request_bytes(self, max_running_requests: int) -> int:
        """Bytes of the C128 state rings for that many requests and one spare slot, all layers."""
        ratio = LayerKind.HCA.ratio
        rows = (max_running_requests + 1) * self.c128_ring + self.c128_ring + 1
        rows = -(-rows // ratio) * ratio
        row = 2 * LayerKind.HCA.coff * self.dims.head_dim * self.state_bytes
        return rows * row * len(self.dims.layers_of(LayerKind.HCA))

    def tokens_for(self, num_bytes: float, max_running_requests: int = 0) -> int:
        """Tokens of context that fit in `num_bytes`, in whole pages; 0 if none does.

        `max_running_requests` > 0 first sets the per-request states aside.
        """
        fixed = self.request_bytes(max_running_requests) if max_running_requests else 0
        tokens = int(max(num_bytes - fixed, 0) / self.per_token().total)
        return tokens // self.page_size * self.page_size

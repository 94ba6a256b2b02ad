"""The attention backend ``dsv4_nvfp4``: SGLang's batch in, operations on the pools out.

A layer's pass through here is: ``store_window`` -> ``compress`` -> (CSA) ``select`` -> ``attend``.
Prefill and decode are the same operation on other slot lists (``metadata``).
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_dsv4.attention.metadata import (
    AttentionMetadata,
    BatchRows,
    EntryLists,
    build_metadata,
)
from sglang_dsv4.attention.warm_up import warm_up_kernels
from sglang_dsv4.cache.kv_layout import IndexerLayout, RecordLayout
from sglang_dsv4.cache.pool import Dsv4TokenToKVPool, kv_format_of
from sglang_dsv4.kernels.dispatch import choices_for, operations_for
from sglang_dsv4.kernels.reference.compress import CompressPlan

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

BACKEND_NAME = "dsv4_nvfp4"


class Dsv4AttentionBackend(AttentionBackend):
    """Window, compressed and indexer pools of DeepSeek-V4 behind four calls a layer."""

    forward_metadata: AttentionMetadata

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__()
        if not isinstance(runner.token_to_kv_pool, Dsv4TokenToKVPool):
            raise TypeError(
                f"The {BACKEND_NAME} backend got a {type(runner.token_to_kv_pool).__name__}, "
                f"wanted Dsv4TokenToKVPool: select another --attention-backend for this model."
            )
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.page_size = runner.page_size
        self.max_context = self.req_to_token_pool.req_to_token.shape[1]
        self.index_topk = runner.model.source.dims.index_topk
        self.on_gpu = runner.device == "cuda"
        self.ops = operations_for(torch.device(runner.device))

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Builds the slot lists of this forward pass, eagerly."""
        self._build(batch_rows(forward_batch))

    def init_forward_metadata_in_graph(self, forward_batch: "ForwardBatch") -> None:
        """Builds the slot lists of a decode batch inside a CUDA graph, which repeats it.

        The batch's tensors are the graph's static buffers; padding rows have slot 0.
        """
        if not self.on_gpu:
            self._build(decode_rows(forward_batch, self.max_context))
            return
        from sglang_dsv4.attention.fused_lists import ListShapes, decode_metadata

        pool = self.token_to_kv_pool
        self.forward_metadata = decode_metadata(
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.positions.long(),
            forward_batch.out_cache_loc,
            self.req_to_token_pool.req_to_token,
            pool.full_to_swa_index_mapping,
            ListShapes(
                self.page_size, pool.sliding_window, pool.get_ring_size(128), self.index_topk
            ),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to keep: a graph's metadata lives in the graph's own memory pool."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding row."""
        return 1

    def _build(self, rows: BatchRows) -> None:
        pool = self.token_to_kv_pool
        self.forward_metadata = build_metadata(
            rows,
            self.req_to_token_pool.req_to_token,
            pool.full_to_swa_index_mapping,
            page_size=self.page_size,
            sliding_window=pool.sliding_window,
            c128_ring=pool.get_ring_size(128),
        )

    def store_window(
        self,
        layer_id: int,
        kv: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rope_table: torch.Tensor,
    ) -> None:
        """Norm, rotate and write the window records of this pass; ``kv`` is [T, 512]."""
        pool, layout = self.token_to_kv_pool.window_records(layer_id)
        meta = self.forward_metadata
        self.ops.kv_store(
            kv, norm_weight, eps, meta.positions, rope_table, meta.window_out, pool, layout
        )

    def compress(
        self,
        layer_id: int,
        ratio: int,
        kv: torch.Tensor,
        gate: torch.Tensor,
        position_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rope_table: torch.Tensor,
    ) -> None:
        """Write the compressed records of the windows that close; kv, gate are [T, coff * 512]."""
        meta, pools = self.forward_metadata, self.token_to_kv_pool
        plan = meta.plan_c4 if ratio == 4 else meta.plan_c128
        state, records = pools.compressor_state(layer_id), pools.compressed_records(layer_id)
        self._compress(plan, state, records, kv, gate, position_bias, norm_weight, eps, rope_table)

    def compress_indexer_keys(
        self,
        layer_id: int,
        kv: torch.Tensor,
        gate: torch.Tensor,
        position_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rope_table: torch.Tensor,
    ) -> None:
        """Write the indexer keys of the windows that close; kv, gate are [T, 256]."""
        meta, pools = self.forward_metadata, self.token_to_kv_pool
        state, keys = pools.indexer_state(layer_id), pools.indexer_keys(layer_id)
        self._compress(
            meta.plan_c4, state, keys, kv, gate, position_bias, norm_weight, eps, rope_table
        )

    def _compress(
        self,
        plan: CompressPlan,
        state: torch.Tensor,
        entries: tuple[torch.Tensor, RecordLayout | IndexerLayout],
        kv: torch.Tensor,
        gate: torch.Tensor,
        position_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rope_table: torch.Tensor,
    ) -> None:
        pool, layout = entries
        self.ops.compress_store(
            kv,
            gate,
            position_bias,
            self.forward_metadata.positions,
            state,
            plan,
            norm_weight,
            eps,
            rope_table,
            pool,
            layout,
        )

    def indexer_query(self, q: torch.Tensor, rope_table: torch.Tensor) -> torch.Tensor:
        """Queries of the indexer, rotated and Hadamard-transformed: [T, index heads, 128]."""
        return self.ops.indexer_query(q, self.forward_metadata.positions, rope_table)

    def select(
        self, layer_id: int, q: torch.Tensor, weights: torch.Tensor, topk: int
    ) -> EntryLists:
        """Compressed entries that each token attends to in a CSA layer, at most ``topk``.

        Args:
            q: [T, index heads, 128], of ``indexer_query``.
            weights: float32 [T, index heads], scaled (paper eq. 16).
        """
        meta = self.forward_metadata
        pool, layout = self.token_to_kv_pool.indexer_keys(layer_id)
        slots = self.ops.indexer_topk(
            q, weights, pool, layout, meta.pages, meta.row_of_token, meta.c4_visible, topk
        )
        return EntryLists(slots, meta.csa_lengths(topk))

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        entries: EntryLists | None,
        sinks: torch.Tensor,
        softmax_scale: float,
        out_scale: float,
        rope_table: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of q [T, H, 512] to the window and the compressed entries: [T, H, 512].

        K is V, so V carries the rotation of its position; turning the sum back by the query's
        position leaves the contribution of each entry a function of the distance.
        """
        window_pool, window_layout = self.token_to_kv_pool.window_records(layer_id)
        slots, lengths, pool, layout = None, None, None, None
        if entries is not None:
            slots, lengths = entries.slots, entries.lengths
            pool, layout = self.token_to_kv_pool.compressed_records(layer_id)
        out, _ = self.ops.sparse_attention(
            q,
            self.forward_metadata.window_slots,
            window_pool,
            window_layout,
            slots,
            pool,
            layout,
            sinks,
            softmax_scale,
            out_scale,
            lengths,
            (self.forward_metadata.positions, rope_table),
        )
        return out


def batch_rows(forward_batch: "ForwardBatch") -> BatchRows:
    """The fields of SGLang's batch that the slot lists derive from; decode is an extend by one."""
    seq_lens = forward_batch.seq_lens.long()
    host_seq = _host_lengths(forward_batch.seq_lens_cpu, seq_lens)
    longest = max(host_seq, default=0)
    if forward_batch.forward_mode.is_decode_or_idle():
        return decode_rows(forward_batch, longest, [(length - 1, length) for length in host_seq])
    positions = forward_batch.positions.long()
    prefix_lens = forward_batch.extend_prefix_lens.long()
    host_prefix = _host_lengths(forward_batch.extend_prefix_lens_cpu, prefix_lens)
    return BatchRows(
        req_pool_indices=forward_batch.req_pool_indices.long(),
        prefix_lens=prefix_lens,
        seq_lens=seq_lens,
        positions=positions,
        out_cache_loc=forward_batch.out_cache_loc.long(),
        row_of_token=torch.repeat_interleave(
            torch.arange(len(seq_lens), device=seq_lens.device),
            seq_lens - prefix_lens,
            output_size=len(positions),
        ),
        max_seq_len=longest,
        host_spans=list(zip(host_prefix, host_seq, strict=True)),
    )


def decode_rows(
    forward_batch: "ForwardBatch",
    max_seq_len: int,
    host_spans: Sequence[tuple[int, int]] | None = None,
) -> BatchRows:
    """A decode batch; without spans its shapes depend on its number of requests alone."""
    seq_lens = forward_batch.seq_lens.long()
    return BatchRows(
        req_pool_indices=forward_batch.req_pool_indices.long(),
        prefix_lens=seq_lens - 1,
        seq_lens=seq_lens,
        positions=forward_batch.positions.long(),
        out_cache_loc=forward_batch.out_cache_loc.long(),
        row_of_token=torch.arange(len(seq_lens), device=seq_lens.device),
        max_seq_len=max_seq_len,
        host_spans=host_spans,
    )


def _host_lengths(host: torch.Tensor | list[int] | None, device: torch.Tensor) -> list[int]:
    """Lengths as numbers: the host's copy, or the device's where SGLang keeps none."""
    lengths = device if host is None else host
    return lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)


def create_backend(runner: "ModelRunner") -> Dsv4AttentionBackend:
    """Factory for SGLang's registry; the model's KV norms take the factor of the record format."""
    backend = Dsv4AttentionBackend(runner)
    runner.model.set_record_scales(kv_format_of(runner.token_to_kv_pool.dtype))
    if runner.device != "cpu":
        for name, choice in choices_for(torch.device(runner.device)).items():
            logger.info("GPU operation %s", choice.line(name))
        warm_up_kernels(runner, backend.ops)
    return backend


def register_backend() -> None:
    """Make ``--attention-backend dsv4_nvfp4`` selectable. Idempotent."""
    ATTENTION_BACKENDS[BACKEND_NAME] = create_backend
    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])

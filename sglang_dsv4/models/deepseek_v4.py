"""DeepSeek-V4 for SGLang: embed -> (mHC, attention, mHC, experts) per layer -> head.

Names are the checkpoint's (transformers' in-memory names). A token flows through ``Model.forward``
as four residual streams [T, 4, D]; each block sees their collapse [T, D].
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel, get_server_args
from torch import nn

from sglang_dsv4.attention.backend import Dsv4AttentionBackend
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.config import LayerKind, ModelDims
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.dispatch import Operations, operations_for
from sglang_dsv4.kernels.reference.rope import build_rope_table
from sglang_dsv4.layers import prefill_precision, weight_kernels
from sglang_dsv4.layers.quant_config import Dsv4QuantConfig
from sglang_dsv4.model_source import ModelSource, open_source
from sglang_dsv4.models.attention import Attention
from sglang_dsv4.models.branches import Branches
from sglang_dsv4.models.hyper_connection import HyperConnection, HyperHead, Pending
from sglang_dsv4.models.moe import MoE
from sglang_dsv4.models.weights import load_weights

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


class DecoderLayer(nn.Module):
    """One block: attention and experts, each between a collapse and an expansion of the streams."""

    def __init__(
        self,
        dims: ModelDims,
        layer_id: int,
        quant: Dsv4QuantConfig,
        ops: Operations,
        branches: Branches,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(dims, layer_id, quant, branches, f"{prefix}.self_attn")
        self.mlp = MoE(dims, layer_id, quant, branches, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.attn_hc = HyperConnection(dims, ops)
        self.ffn_hc = HyperConnection(dims, ops)

    def forward(
        self,
        pending: Pending,
        input_ids: torch.Tensor,
        rope_table: torch.Tensor,
        backend: Dsv4AttentionBackend,
    ) -> Pending:
        """Streams and the last layer's output -> streams and this layer's output."""
        streams, hidden, post, comb = self.attn_hc.enter(pending, self.input_layernorm)
        out = self.self_attn(hidden, rope_table, backend)
        pending = Pending(streams, out, post, comb)
        streams, hidden, post, comb = self.ffn_hc.enter(pending, self.post_attention_layernorm)
        return Pending(streams, self.mlp(hidden, input_ids), post, comb)


class Model(nn.Module):
    """Embedding, layers, last collapse and norm.

    Layers without compression rotate by theta 10000; those with CSA or HCA, by theta 160000 with
    YaRN, for queries, window records, compressed entries and indexer alike.
    """

    def __init__(
        self, dims: ModelDims, quant: Dsv4QuantConfig, ops: Operations, max_position: int
    ) -> None:
        super().__init__()
        self.dims, self.ops = dims, ops
        self.embed_tokens = VocabParallelEmbedding(dims.vocab_size, dims.hidden_size)
        branches = Branches(3, torch.empty(0).device)
        self.layers = nn.ModuleList(
            DecoderLayer(dims, layer_id, quant, ops, branches, f"model.layers.{layer_id}")
            for layer_id in range(dims.num_hidden_layers)
        )
        self.hc_head = HyperHead(dims, ops)
        self.norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        for name, theta, yarn in (
            ("rope_main", dims.rope_theta, None),
            ("rope_compress", dims.compress_rope_theta, dims.yarn),
        ):
            table = build_rope_table(max_position, theta, dims.qk_rope_head_dim, yarn)
            self.register_buffer(name, table, persistent=False)

    def forward(self, input_ids: torch.Tensor, backend: Dsv4AttentionBackend) -> torch.Tensor:
        """input_ids [T] -> normed hidden state [T, D]."""
        hidden = self.embed_tokens(input_ids)
        pending = Pending(hidden.unsqueeze(1).expand(-1, self.dims.hc_mult, -1).contiguous())
        for kind, layer in zip(self.dims.layer_kinds, self.layers, strict=True):
            table = self.rope_main if kind is LayerKind.SWA else self.rope_compress
            pending = layer(pending, input_ids, table, backend)
        return self.norm(self.hc_head(pending.mixed(self.ops)))


class DeepseekV4ForCausalLM(nn.Module):
    """What SGLang constructs for ``DeepseekV4ForCausalLM`` while this plugin is active.

    Args:
        config: SGLang's config of the checkpoint; dims and quantisation come from the tensors.
        quant_config: what SGLang made of ``quantization_config``; the tensors decide instead.
        prefix: unused, SGLang's calling convention.
    """

    def __init__(
        self,
        config: "PretrainedConfig",
        quant_config: "QuantizationConfig | None" = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if get_parallel().pp_size > 1:
            raise UnsupportedError(
                f"Pipeline parallelism of {get_parallel().pp_size} was asked for, wanted 1: "
                f"use --tp-size instead of --pp-size."
            )
        self.config = config
        self.source: ModelSource = open_source(config._name_or_path)
        dims = self.source.dims
        device = torch.empty(0).device
        kernels = weight_kernels.weight_kernels_of(device)
        prefill = prefill_precision.choose_prefill(kernels, self.source.quantized_activations)
        logger.info("%s; %s", weight_kernels.describe(kernels), prefill_precision.describe(prefill))
        self.quant_config = Dsv4QuantConfig(self.source.kinds, prefill.fp8)
        self.ops = operations_for(device)
        self.model = Model(dims, self.quant_config, self.ops, _max_position(dims))
        self.lm_head = ParallelLMHead(dims.vocab_size, dims.hidden_size)
        self.logits_processor = LogitsProcessor(config)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: "ForwardBatch",
    ) -> LogitsProcessorOutput:
        """Logits of the positions that SGLang wants; ``positions`` reach layers by the backend."""
        hidden = self.model(input_ids, get_attn_backend())
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load and account for every tensor of the checkpoint.

        Raises:
            CheckpointError: a tensor is unknown, missing or damaged, or a parameter is unwritten.
        """
        load_weights(self, self.source, weights)

    def set_record_scales(self, kv_format: KVFormat) -> None:
        """Choose each layer's power of two for the records (``cache.outer_scale``) and log them."""
        attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        scales = [attention.set_record_scale(kv_format) for attention in attentions]
        logger.info("KV records are %s; factor of each layer: %s", kv_format.value, _runs(scales))

    def get_attention_sliding_window_size(self) -> int:
        """Tokens of the sliding window, for SGLang's allocator."""
        return self.source.dims.sliding_window


def _max_position(dims: ModelDims) -> int:
    """Positions that the rotary tables cover: the server's context, else the model's."""
    return get_server_args().context_length or dims.max_position_embeddings


def _runs(values: list[float]) -> str:
    """Values as ``layer-range: value`` runs, e.g. ``0-42: 1``."""
    runs: list[tuple[int, int, float]] = []
    for index, value in enumerate(values):
        if runs and runs[-1][2] == value:
            runs[-1] = (runs[-1][0], index, value)
        else:
            runs.append((index, index, value))
    return ", ".join(f"{first}-{last}: {value:g}" for first, last, value in runs)

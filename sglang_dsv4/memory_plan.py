"""What one rank of a server needs of its GPU's memory, from the checkpoint's headers and options.

Static memory (`--mem-fraction-static` of the GPU's memory before the weights are loaded) holds the
weights, the rotary tables and the pools. The rest is for what comes and goes: a prefill chunk's
activations, and what CUDA, NCCL and graphs take. The pools' sizes are SGLang's (`cache.capacity`);
activations are counted from the shapes of the model's largest moments, the other overheads are
SGLang's own estimates (arg_groups/memory_hook.py). No GPU's real use was compared with them yet.
"""

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_dsv4.cache.capacity import Capacity
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.config import LayerKind, ModelDims
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers.weight_kernels import EXPERTS_SCRATCH, WeightKernel, WeightKernels
from sglang_dsv4.model_source import ModelSource

GIB = 1 << 30
MIB = 1 << 20
# Split over the tensor-parallel ranks; all else is held whole by every rank.
_SPLIT = re.compile(
    r"(self_attn\.(q_b_proj|o_a_proj|o_b_proj)"
    r"|mlp\.(shared_)?experts\.[\w.]+_proj|model\.embed_tokens|lm_head)(\.|$)"
)
# Projections that are served as one matrix, stacked along the output, with their parents.
_FUSED = re.compile(
    r"(self_attn\.(q_a|kv)_proj|(compressor|indexer)[\w.]*\.(kv|gate)_proj"
    r"|shared_experts\.(gate|up)_proj)$"
)
# Whose inputs are split over the ranks, not the outputs.
_ROW_PARALLEL = re.compile(r"(self_attn\.o_b_proj|mlp\.shared_experts\.down_proj)$")
BF16, FLOAT32 = 2, 4
# SGLang's choices for a GPU of at least 90 GiB (memory_hook.py, deepseek_v4_hook.py).
RUNNING_REQUESTS = 256
GRAPH_BATCH = 512
LARGE_GPU = 160 * GIB
CHUNKS = (8192, 16384)
STATIC_FRACTION = 0.88
# Scratch of the indexer and of attention: their own upper bounds.
KERNEL_SCRATCH = (256 + 64) * MIB


@dataclass(frozen=True)
class Options:
    """The options that memory depends on; None where SGLang or the model decides.

    Attributes:
        fraction: ``--mem-fraction-static``.
        chunk: ``--chunked-prefill-size``.
        graph_batch: ``--cuda-graph-max-bs-decode``.
    """

    tp_size: int = 1
    attn_dp_size: int = 1
    ep_size: int = 1
    pp_size: int = 1
    fraction: float | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    chunk: int | None = None
    graph_batch: int | None = None

    @classmethod
    def of(cls, asked: argparse.Namespace) -> "Options":
        """The fields of SGLang's parsed command line."""
        dp = asked.dp_size if asked.enable_dp_attention else 1
        return cls(
            tp_size=asked.tp_size,
            attn_dp_size=max(asked.attn_dp_size, dp),
            ep_size=asked.ep_size,
            pp_size=asked.pp_size,
            fraction=asked.mem_fraction_static,
            context_length=asked.context_length,
            max_total_tokens=asked.max_total_tokens,
            max_running_requests=asked.max_running_requests,
            chunk=asked.chunked_prefill_size,
            graph_batch=asked.cuda_graph_max_bs_decode,
        )


@dataclass(frozen=True)
class Plan:
    """Bytes a rank needs, by what for; tokens of context that its pools will hold."""

    static: Mapping[str, int]
    dynamic: Mapping[str, int]
    fraction: float
    gpu: int
    tokens: int

    @property
    def static_room(self) -> int:
        """Bytes that the static part may take."""
        return int(self.gpu * self.fraction)

    @property
    def dynamic_room(self) -> int:
        """Bytes that are left for the rest."""
        return self.gpu - self.static_room

    @property
    def needed(self) -> int:
        """Bytes of both parts."""
        return sum(self.static.values()) + sum(self.dynamic.values())

    def fault(self) -> str:
        """Which part has no room, as the first half of a sentence; empty when both fit."""
        static, dynamic = sum(self.static.values()), sum(self.dynamic.values())
        share = f"{self.fraction:g} of {self.gpu / GIB:.1f} GiB"
        if static > self.static_room:
            return (
                f"A rank has {self.static_room / GIB:.1f} GiB for its static memory ({share}), "
                f"wanted {static / GIB:.1f} ({listing(self.static)})"
            )
        if dynamic > self.dynamic_room:
            return (
                f"A rank has {self.dynamic_room / GIB:.1f} GiB beside its static memory ({share}), "
                f"wanted {dynamic / GIB:.1f} ({listing(self.dynamic)})"
            )
        return ""

    def wanted(self) -> str:
        """For the start-up table."""
        static, dynamic = sum(self.static.values()), sum(self.dynamic.values())
        return (
            f"{static / GIB:.1f} GiB static and {dynamic / GIB:.1f} beside; with "
            f"{self.fraction:g} static, {self.tokens} tokens of context"
        )


def weight_bytes(
    source: ModelSource, tp: int, kernels: WeightKernels | None = None
) -> tuple[int, int]:
    """Bytes of all tensors that are loaded, and of one rank's part.

    As ``kernels`` hold them: a dequantised matrix in bfloat16 and without scales. As stored in the
    checkpoint when None.
    """
    tensors = source.checkpoint.tensors
    packed = {
        name.removesuffix(".weight")
        for name, info in tensors.items()
        if info.dtype == "U8" and name.endswith(".weight")
    }
    whole = split = 0
    for name, info in tensors.items():
        module, size = name.rpartition(".")[0], info.nbytes
        if kernels and module in packed and kernels.of(module) is WeightKernel.DEQUANT:
            # A byte holds two values.
            size = 2 * BF16 * size if name.endswith(".weight") else 0
        if _SPLIT.search(name) and len(info.shape) > 1:
            split += size
        else:
            whole += size
    return whole + split, whole + -(-split // tp)


def linear_scratch(
    source: ModelSource, tp: int, kernels: WeightKernels, tokens: int, fp8: bool
) -> int:
    """Bytes of the widened weight of the NVFP4 linear layer of a rank that needs most.

    Only cutedsl widens: to bfloat16, in FP8 (``layers.prefill_precision``) so for middling batches.
    A batch of ``tokens`` takes a byte a value then, of the weight and of its rows of activations,
    and a float32 for each row of both.
    """
    if kernels.linear is not WeightKernel.CUTEDSL:
        return 0
    shapes: dict[str, tuple[int, int]] = {}
    for name, info in source.checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        plain = info.dtype != "U8" or module == name or ".mlp.experts." in name
        if plain or kernels.of(module) is not kernels.linear:
            continue
        rows, columns = info.shape[0], 2 * info.shape[1]
        if _ROW_PARALLEL.search(module):
            columns = -(-columns // tp)
        elif _SPLIT.search(name):
            rows = -(-rows // tp)
        parent = module.rpartition(".")[0] if _FUSED.search(module) else module
        shapes[parent] = (shapes.get(parent, (0, 0))[0] + rows, columns)
    return max((_widened(*shape, tokens, fp8) for shape in shapes.values()), default=0)


def _widened(rows: int, columns: int, tokens: int, fp8: bool) -> int:
    in_fp8 = (rows + tokens) * (columns + FLOAT32) if fp8 else 0
    return max(BF16 * rows * columns, in_fp8)


def rotary_bytes(dims: ModelDims, positions: int) -> int:
    """Bytes of the two float32 tables of that many positions, whole on every rank."""
    return 2 * positions * dims.qk_rope_head_dim * 4


def check_ranks(dims: ModelDims, options: Options) -> None:
    """Refuse what the model does not split.

    Raises:
        UnsupportedError: ranks that do not divide the model, or a kind of parallelism that it
            does not have.
    """
    for name, size in (
        ("--attn-dp-size", options.attn_dp_size),
        ("--ep-size", options.ep_size),
        ("--pp-size", options.pp_size),
    ):
        if size > 1:
            raise UnsupportedError(
                f"{name} is {size}, wanted 1: this model is split by --tp-size alone, and whole "
                f"replicas are made by --dp-size."
            )
    tp = options.tp_size
    parts = {
        "query heads": dims.num_attention_heads,
        "output groups": dims.o_groups,
        # NVFP4 kernels work in tiles of 128 rows of an expert.
        "tiles of 128 in an expert": dims.moe_intermediate_size // 128,
    }
    for what, count in parts.items():
        if count % tp and tp > 1:
            raise UnsupportedError(
                f"--tp-size is {tp}, wanted a divisor of the model's {count} {what}: use one of "
                f"{', '.join(str(n) for n in divisors(dims))}."
            )


def divisors(dims: ModelDims) -> list[int]:
    """The values of --tp-size that split the model."""
    counts = (dims.num_attention_heads, dims.o_groups, dims.moe_intermediate_size // 128)
    return [1, *(n for n in range(2, 65) if all(count % n == 0 for count in counts))]


def plan(
    source: ModelSource,
    kv_format: KVFormat,
    options: Options,
    gpu: int,
    kernels: WeightKernels,
    fp8: bool = False,
) -> Plan:
    """The memory of one rank.

    The pools must hold what was asked for: ``max_total_tokens``, else one request of
    ``context_length``, else one prefill chunk.

    Args:
        gpu: bytes of the GPU.
        kernels: the GPU's, which decide how the weights are held.
        fp8: large batches are multiplied in FP8 (``layers.prefill_precision``).
    """
    dims, tp = source.dims, options.tp_size
    fraction = STATIC_FRACTION if options.fraction is None else options.fraction
    requests = options.max_running_requests or RUNNING_REQUESTS
    context = options.context_length or dims.max_position_embeddings
    chunk = options.chunk if options.chunk and options.chunk > 0 else CHUNKS[gpu >= LARGE_GPU]
    capacity = Capacity(dims, kv_format)
    per_token = capacity.per_token().total
    wanted = options.max_total_tokens or options.context_length or chunk
    static = {
        "weights": weight_bytes(source, tp, kernels)[1],
        "rotary tables": rotary_bytes(dims, context),
        f"states of {requests} requests": capacity.request_bytes(requests),
    }
    left = gpu * fraction - sum(static.values())
    tokens = capacity.tokens_for(left)
    if options.max_total_tokens:
        tokens = min(tokens, options.max_total_tokens)
    return Plan(
        static={**static, f"{wanted} tokens of KV": int(wanted * per_token)},
        dynamic={
            f"a chunk of {chunk} tokens": activation_bytes(dims, chunk, context, tp),
            "kernel scratch": KERNEL_SCRATCH + linear_scratch(source, tp, kernels, chunk, fp8),
            "CUDA, NCCL, graphs": 512 * MIB
            + tp * GIB // 8
            + min(options.graph_batch or GRAPH_BATCH, requests) * 2 * MIB,
        },
        fraction=fraction,
        gpu=gpu,
        tokens=tokens,
    )


def activation_bytes(dims: ModelDims, tokens: int, context: int, tp: int) -> int:
    """Largest sum of the tensors that are alive at once while ``tokens`` tokens pass a layer.

    Four residual streams in and out, three hidden states; beside them either attention (query
    before and after RoPE, output before and after it, the slots of every HCA entry as int64 and
    int32) or the experts (routed inputs, gate and up, their product, a part widened). In FP8 the
    same bounds the experts: e4m3 rows are of what is never held as gate and up then, and a part
    widened has as many bytes.
    """
    heads = dims.num_attention_heads // tp
    entries = -(-context // LayerKind.HCA.ratio)
    attention = tokens * (4 * heads * dims.head_dim * BF16 + entries * (8 + 4))
    inner = 3 * dims.moe_intermediate_size // tp
    experts = tokens * dims.num_experts_per_tok * (dims.hidden_size + inner) * BF16
    widened = dims.n_routed_experts * dims.hidden_size * inner * BF16
    experts += min(EXPERTS_SCRATCH, widened)
    hidden = tokens * dims.hidden_size * BF16
    return 2 * dims.hc_mult * hidden + 3 * hidden + max(attention, experts)


def remedy(
    source: ModelSource,
    kv_format: KVFormat,
    options: Options,
    gpu: int,
    kernels: WeightKernels,
    fp8: bool = False,
) -> str:
    """What to change so that it fits: the share, the fewest ranks that hold it, smaller limits."""
    found = plan(source, kv_format, options, gpu, kernels, fp8)
    least = math.ceil(sum(found.static.values()) / gpu * 1000) / 1000
    most = math.floor((1 - sum(found.dynamic.values()) / gpu) * 1000) / 1000
    if least <= most:
        return f"pass --mem-fraction-static {min(max(STATIC_FRACTION, least), most):g}"
    for tp in divisors(source.dims):
        more = plan(source, kv_format, replace(options, tp_size=tp), gpu, kernels, fp8)
        if tp > options.tp_size and not more.fault():
            return f"use --tp-size {tp}"
    return (
        "use GPUs with more memory, or lower --context-length, --max-total-tokens, "
        "--max-running-requests or --chunked-prefill-size"
    )


def listing(parts: Mapping[str, int]) -> str:
    """``weights 76.56, rotary tables 0.50`` in GiB."""
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())

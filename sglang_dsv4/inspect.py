"""What a checkpoint is and what it needs, from its headers: `python -m sglang_dsv4.inspect DIR`."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_dsv4.cache.capacity import CacheFormat, Capacity, StockFormat
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.checkpoint.quant import SCALE_SUFFIXES
from sglang_dsv4.config import LayerKind
from sglang_dsv4.errors import CheckpointError, Dsv4Error
from sglang_dsv4.memory_plan import GIB, rotary_bytes, weight_bytes
from sglang_dsv4.model_source import ModelSource, open_source

FORMATS: tuple[CacheFormat, ...] = (KVFormat.NVFP4, KVFormat.BFLOAT16, StockFormat.FP8)
_LAYER_OR_EXPERT = re.compile(r"(?<=\.)\d+(?=\.)")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0, or 2 with one sentence on stderr for what cannot be served."""
    parser = argparse.ArgumentParser(prog="sglang_dsv4.inspect", description=__doc__)
    parser.add_argument("model_dir", help="checkpoint directory")
    parser.add_argument("--gpu-mem", type=float, default=141, help="memory of a GPU in GiB")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel ranks")
    parser.add_argument(
        "--mem-fraction", type=float, default=0.88, help="part of it for weights, tables and pools"
    )
    parser.add_argument(
        "--max-running-requests", type=int, default=256, help="requests with C128 state"
    )
    args = parser.parse_args(argv)
    if args.gpu_mem <= 0 or args.tp < 1 or not 0 < args.mem_fraction <= 1:
        parser.error("--gpu-mem > 0, --tp >= 1 and 0 < --mem-fraction <= 1 are wanted")
    if args.max_running_requests < 1:
        parser.error("--max-running-requests >= 1 is wanted")
    try:
        if not Path(args.model_dir).is_dir():
            raise CheckpointError(
                f"{args.model_dir} is not a directory, a checkpoint directory was wanted; correct "
                "the path."
            )
        source = open_source(args.model_dir)
    except (Dsv4Error, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    budget = args.gpu_mem * GIB * args.mem_fraction
    for section in (
        _layers(source),
        _quantisation(source),
        _skipped(source),
        _memory(source, args.tp, budget, args.max_running_requests),
    ):
        print(*section, "", sep="\n")
    return 0


def _layers(source: ModelSource) -> Iterator[str]:
    kinds = source.dims.layer_kinds
    yield f"layers: {len(kinds)}, hash-routed: {source.dims.num_hash_layers}"
    for kind in LayerKind:
        layers = source.dims.layers_of(kind)
        yield f"  {kind.name}, ratio {kind.ratio:>3}: {len(layers):>2} ({_runs(layers) or 'none'})"


def _runs(layers: Sequence[int]) -> str:
    """Layer numbers with equal steps folded: 0-1, 2-42 step 2."""
    parts: list[str] = []
    start = 0
    while start < len(layers):
        step = layers[start + 1] - layers[start] if start + 1 < len(layers) else 1
        end = start
        while end + 1 < len(layers) and layers[end + 1] - layers[end] == step:
            end += 1
        if end - start < 2 and step > 1:
            end = start
        first, last = layers[start], layers[end]
        suffix = f" step {step}" if step > 1 and end > start else ""
        parts.append(f"{first}-{last}{suffix}" if end > start else f"{first}")
        start = end + 1
    return ", ".join(parts)


def _quantisation(source: ModelSource) -> Iterator[str]:
    """Matrices by kind, scales included; layers and experts are folded into `*`."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for name, info in source.checkpoint.tensors.items():
        stem, _, suffix = name.rpartition(".")
        is_scale = suffix in SCALE_SUFFIXES
        module = stem if is_scale or suffix == "weight" else name
        row = ("norms, biases, tables, mixing", info.dtype.lower())
        if module in source.kinds:
            row = (_LAYER_OR_EXPERT.sub("*", module), source.kinds[module].value)
        count[row] += not is_scale
        size[row] += info.nbytes
    width = max(len(module) for module, _ in count)
    yield f"{'matrices':<{width}}  {'kind':<9} {'count':>7} {'MiB':>12}"
    for module, kind in sorted(count):
        row = (module, kind)
        yield f"{module:<{width}}  {kind:<9} {count[row]:>7} {size[row] / (1 << 20):>12.2f}"


def _skipped(source: ModelSource) -> Iterator[str]:
    skipped = source.checkpoint.skipped
    yield f"skipped keys: {len(skipped)}"
    for reason, number in Counter(skipped.values()).items():
        example = next(key for key, why in skipped.items() if why == reason)
        yield f"  {number}: {reason} (e.g. {example})"


def _memory(source: ModelSource, tp: int, budget: float, max_requests: int) -> Iterator[str]:
    total, rank = weight_bytes(source, tp)
    positions = source.dims.max_position_embeddings
    tables = rotary_bytes(source.dims, positions)
    left = budget - rank - tables
    yield f"weights as stored: {total / GIB:.2f} GiB, {rank / GIB:.2f} GiB a rank of {tp}"
    yield f"rotary tables of {positions} positions: {tables / GIB:.2f} GiB a rank"
    yield f"all static memory may take {budget / GIB:.2f} GiB a rank, the pools {left / GIB:.2f}"
    yield f"KV bytes per token (each rank holds them all); tokens with {max_requests} requests:"
    pools = ("window", "states", "c4", "indexer", "c128", "total")
    yield f"  {'format':<9}" + "".join(f"{pool:>9}" for pool in pools) + f"{'tokens':>13}"
    for cache_format in FORMATS:
        capacity = Capacity(source.dims, cache_format)
        per_token = capacity.per_token()
        values = "".join(f"{getattr(per_token, pool):>9.1f}" for pool in pools)
        tokens = capacity.tokens_for(left, max_requests)
        stock = " (stock SGLang)" if isinstance(cache_format, StockFormat) else ""
        yield f"  {cache_format.value:<9}{values}{tokens:>13}{stock}"


if __name__ == "__main__":
    sys.exit(main())

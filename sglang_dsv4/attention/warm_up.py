"""What the kernels' warm-up needs to know, read from a runner whose model and pools exist."""

from typing import TYPE_CHECKING

import torch

from sglang_dsv4.config import LayerKind, ModelDims
from sglang_dsv4.kernels.dispatch import Operations
from sglang_dsv4.kernels.warm_up import ServedShapes, warm_up

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def served_shapes(runner: "ModelRunner", dims: ModelDims) -> ServedShapes:
    """The shapes of this rank's operations."""
    pool = runner.token_to_kv_pool
    heads = runner.model.model.layers[0].self_attn.heads
    csa = next((i for i, kind in enumerate(dims.layer_kinds) if kind is LayerKind.CSA), None)
    hca = next((i for i, kind in enumerate(dims.layer_kinds) if kind is LayerKind.HCA), None)
    return ServedShapes(
        heads=heads,
        index_heads=dims.index_n_heads,
        index_topk=dims.index_topk,
        hidden=dims.hidden_size,
        streams=dims.hc_mult,
        sinkhorn_iters=dims.hc_sinkhorn_iters,
        sliding_window=dims.sliding_window,
        window=pool.window_records(0)[1],
        c4=None if csa is None else pool.compressed_records(csa)[1],
        c128=None if hca is None else pool.compressed_records(hca)[1],
        keys=None if csa is None else pool.indexer_keys(csa)[1],
    )


def warm_up_kernels(runner: "ModelRunner", ops: Operations) -> None:
    """Compile (or load) every kernel that the model will call on this rank's GPU."""
    shapes = served_shapes(runner, runner.model.source.dims)
    warm_up(ops, shapes, torch.device(runner.device))

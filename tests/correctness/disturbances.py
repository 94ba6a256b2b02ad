"""Mistakes that an implementation of the model can make, as patches of a live Runner."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Runner
from torch import Tensor

from sglang_dsv4.attention import backend as backend_module
from sglang_dsv4.attention.backend import Dsv4AttentionBackend
from sglang_dsv4.attention.metadata import AttentionMetadata, EntryLists
from sglang_dsv4.kernels.reference.rope import build_rope_table
from sglang_dsv4.kernels.reference.router import route_topk
from sglang_dsv4.models import moe

Patch = pytest.MonkeyPatch
DISTURBANCES: dict[str, Callable[[Runner, Patch], None]] = {}


def disturbance(function: Callable[[Runner, Patch], None]) -> Callable[[Runner, Patch], None]:
    """Enter a mistake into ``DISTURBANCES`` under its name."""
    DISTURBANCES[function.__name__] = function
    return function


def layers(runner: Runner) -> Any:
    return runner.model_runner.model.model.layers


def set_ops(runner: Runner, patch: Patch, **operations: Callable) -> None:
    """Replace operations of the attention backend and of the hyper-connections."""
    users = [runner.model_runner.attn_backend, runner.model_runner.model.model]
    users += [hc for layer in layers(runner) for hc in (layer.attn_hc, layer.ffn_hc)]
    for user in users:
        patch.setattr(user, "ops", replace(user.ops, **operations))


def set_all(objects: list[Any], patch: Patch, name: str, value: Any) -> None:
    for item in objects:
        patch.setattr(item, name, value)


def set_metadata(patch: Patch, change: Callable[[AttentionMetadata], AttentionMetadata]) -> None:
    build = backend_module.build_metadata
    patch.setattr(backend_module, "build_metadata", lambda *a, **k: change(build(*a, **k)))


def hide_compressed(runner: Runner, patch: Patch, layer_ids: tuple[int, ...]) -> None:
    attend = Dsv4AttentionBackend.attend

    def blind(self, layer_id: int, q: Tensor, entries: EntryLists, *args: Any) -> Tensor:
        if layer_id in layer_ids:
            entries = replace(entries, lengths=torch.zeros_like(entries.lengths))
        return attend(self, layer_id, q, entries, *args)

    patch.setattr(Dsv4AttentionBackend, "attend", blind)


def select_recent(runner: Runner, patch: Patch, chosen_layer: int) -> None:
    select = Dsv4AttentionBackend.select

    def recent(self, layer_id: int, q: Tensor, weights: Tensor, topk: int) -> EntryLists:
        if layer_id != chosen_layer:
            return select(self, layer_id, q, weights, topk)
        meta = self.forward_metadata
        per_page = meta.page_size // 4
        entry = (meta.c4_visible[:, None] - 1 - torch.arange(topk)).clamp(min=0)
        pages = meta.pages.long()[meta.row_of_token[:, None], entry // per_page]
        return EntryLists(pages * per_page + entry % per_page, meta.csa_lengths(topk))

    patch.setattr(Dsv4AttentionBackend, "select", recent)


@disturbance
def hca_entries_hidden_in_layer_0(runner: Runner, patch: Patch) -> None:
    hide_compressed(runner, patch, (0,))


@disturbance
def hca_entries_hidden(runner: Runner, patch: Patch) -> None:
    hide_compressed(runner, patch, (0, 1, 3))


@disturbance
def hca_entries_hidden_in_layer_3(runner: Runner, patch: Patch) -> None:
    hide_compressed(runner, patch, (3,))


@disturbance
def csa_entries_hidden_in_layer_2(runner: Runner, patch: Patch) -> None:
    hide_compressed(runner, patch, (2,))


@disturbance
def csa_entries_hidden_in_layer_4(runner: Runner, patch: Patch) -> None:
    hide_compressed(runner, patch, (4,))


@disturbance
def indexer_of_layer_2_takes_the_most_recent(runner: Runner, patch: Patch) -> None:
    select_recent(runner, patch, 2)


@disturbance
def indexer_of_layer_4_takes_the_most_recent(runner: Runner, patch: Patch) -> None:
    select_recent(runner, patch, 4)


@disturbance
def indexer_queries_not_rotated(runner: Runner, patch: Patch) -> None:
    query = runner.model_runner.attn_backend.ops.indexer_query
    set_ops(runner, patch, indexer_query=lambda q, p, table: query(q, torch.zeros_like(p), table))


@disturbance
def indexer_queries_without_hadamard(runner: Runner, patch: Patch) -> None:
    """Keys have it, so the products would be of vectors in two bases."""
    set_ops(runner, patch, indexer_query=lambda q, positions, table: q)


@disturbance
def no_sinks(runner: Runner, patch: Patch) -> None:
    for layer in layers(runner):
        patch.setattr(layer.self_attn.sinks, "data", torch.full((8,), -torch.inf))


@disturbance
def sinks_of_zero(runner: Runner, patch: Patch) -> None:
    for layer in layers(runner):
        patch.setattr(layer.self_attn.sinks, "data", torch.zeros(8))


def set_table(runner: Runner, patch: Patch, name: str, theta: float, yarn: Any) -> None:
    tables = runner.model_runner.model.model._buffers
    patch.setitem(tables, name, build_rope_table(len(tables[name]), theta, 64, yarn))


@disturbance
def compress_table_in_the_window_only_layer(runner: Runner, patch: Patch) -> None:
    dims = runner.model_runner.model.model.dims
    set_table(runner, patch, "rope_main", dims.compress_rope_theta, dims.yarn)


@disturbance
def main_table_in_compressed_layers(runner: Runner, patch: Patch) -> None:
    dims = runner.model_runner.model.model.dims
    set_table(runner, patch, "rope_compress", dims.rope_theta, None)


@disturbance
def no_yarn(runner: Runner, patch: Patch) -> None:
    dims = runner.model_runner.model.model.dims
    set_table(runner, patch, "rope_compress", dims.compress_rope_theta, None)


@disturbance
def yarn_factor_in_the_softmax_scale(runner: Runner, patch: Patch) -> None:
    for layer in layers(runner):
        scale = layer.self_attn.softmax_scale
        patch.setattr(layer.self_attn, "softmax_scale", scale * 1.277**2)


@disturbance
def no_inverse_rope(runner: Runner, patch: Patch) -> None:
    attention = runner.model_runner.attn_backend.ops.sparse_attention
    set_ops(runner, patch, sparse_attention=lambda *args: attention(*args[:-1], rotation=None))


@disturbance
def no_query_norm(runner: Runner, patch: Patch) -> None:
    norm = runner.model_runner.attn_backend.ops.q_norm_rope
    set_ops(runner, patch, q_norm_rope=lambda q, p, table, eps: norm(q, p, table, 1.0))


@disturbance
def window_of_127(runner: Runner, patch: Patch) -> None:
    set_metadata(patch, lambda meta: replace(meta, window_slots=meta.window_slots[:, 1:]))


@disturbance
def entries_visible_one_token_late(runner: Runner, patch: Patch) -> None:
    set_metadata(patch, lambda meta: replace(meta, c4_visible=(meta.positions // 4).int()))


@disturbance
def hca_entry_visible_before_it_is_whole(runner: Runner, patch: Patch) -> None:
    """Queries see the entry of the window of 128 that they are in."""
    set_metadata(patch, lambda meta: replace(meta, c128_visible=meta.c128_visible + 1))


def set_compress(runner: Runner, patch: Patch, change: Callable) -> None:
    """``change(plan, kv, gate, bias)`` returns the four that the compressor gets instead."""
    store = runner.model_runner.attn_backend.ops.compress_store

    def changed(kv, gate, bias, positions, state, plan, *args) -> None:
        plan, kv, gate, bias = change(plan, kv, gate, bias)
        store(kv, gate, bias, positions, state, plan, *args)

    set_ops(runner, patch, compress_store=changed)


@disturbance
def overlap_halves_swapped(runner: Runner, patch: Patch) -> None:
    def change(plan, *tensors):
        if plan.ratio == 4:
            tensors = tuple(torch.cat(x.chunk(2, -1)[::-1], dim=-1) for x in tensors)
        return plan, *tensors

    set_compress(runner, patch, change)


@disturbance
def no_overlap(runner: Runner, patch: Patch) -> None:
    def change(plan, *tensors):
        if plan.ratio == 4:
            source = plan.source.clone()
            source[:, :4] = -1
            plan = replace(plan, source=source)
        return plan, *tensors

    set_compress(runner, patch, change)


@disturbance
def no_position_bias(runner: Runner, patch: Patch) -> None:
    set_compress(runner, patch, lambda plan, kv, gate, bias: (plan, kv, gate, 0 * bias))


@disturbance
def entries_rotated_at_their_last_token(runner: Runner, patch: Patch) -> None:
    def change(plan, *tensors):
        return replace(plan, positions=plan.positions + plan.ratio - 1), *tensors

    set_compress(runner, patch, change)


@disturbance
def mixing_matrix_transposed(runner: Runner, patch: Patch) -> None:
    ops = layers(runner)[0].attn_hc.ops

    def transposed(operation):
        return lambda y, x, weight, comb, *rest: operation(y, x, weight, comb.mT, *rest)

    operations = {name: transposed(getattr(ops, name)) for name in ("hc_post", "hc_post_pre")}
    set_ops(runner, patch, **operations)


@disturbance
def ten_sinkhorn_rounds(runner: Runner, patch: Patch) -> None:
    connections = [hc for layer in layers(runner) for hc in (layer.attn_hc, layer.ffn_hc)]
    set_all(connections, patch, "sinkhorn_iters", 10)


@disturbance
def hash_layer_routed_by_score(runner: Runner, patch: Patch) -> None:
    def by_score(logits, tid2eid, input_ids, norm, scaling):
        return route_topk(logits, torch.zeros(logits.shape[1]), tid2eid.shape[1], norm, scaling)

    patch.setattr(moe, "route_hash", by_score)


@disturbance
def no_correction_bias(runner: Runner, patch: Patch) -> None:
    for layer in layers(runner)[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        patch.setattr(bias, "data", torch.zeros_like(bias))


@disturbance
def shared_expert_not_clamped(runner: Runner, patch: Patch) -> None:
    set_all([layer.mlp.shared_experts for layer in layers(runner)], patch, "limit", None)


@disturbance
def routed_experts_not_clamped(runner: Runner, patch: Patch) -> None:
    configs = [layer.mlp.experts.quant_method.moe_runner_config for layer in layers(runner)]
    set_all(configs, patch, "swiglu_limit", None)

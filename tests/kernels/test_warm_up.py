"""The warm-up calls every operation, with arguments that each takes."""

import logging
from dataclasses import fields, replace
from inspect import signature

import pytest
import torch

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels import warm_up
from sglang_dsv4.kernels.attention import sparse_attention
from sglang_dsv4.kernels.dispatch import REFERENCE, Operations

NVFP4 = KVFormat.NVFP4
SHAPES = warm_up.ServedShapes(
    heads=4,
    index_heads=4,
    index_topk=64,
    hidden=64,
    streams=4,
    sinkhorn_iters=20,
    sliding_window=128,
    window=RecordLayout(NVFP4, 64),
    c4=RecordLayout(NVFP4, 64),
    c128=RecordLayout(NVFP4, 2),
    keys=IndexerLayout(NVFP4, 64),
)


def counted(calls: dict[str, int]) -> Operations:
    """The reference operations, each counting its calls."""

    def wrap(name: str, function):
        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            if name == "sparse_attention":
                # As the server calls it, so that the kernels are those that it takes.
                assert len(args) == len(signature(function).parameters)
                positions, table = args[-1]
                assert positions.dtype is torch.int64 and table.dtype is torch.float32
            return function(*args)

        return call

    names = [field.name for field in fields(Operations)]
    return Operations(**{name: wrap(name, getattr(REFERENCE, name)) for name in names})


def test_every_operation_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(warm_up, "TOKENS", (1, 3))
    calls: dict[str, int] = {}
    with caplog.at_level(logging.INFO):
        warm_up.warm_up(counted(calls), SHAPES, torch.device("cpu"))
    assert set(calls) == {field.name for field in fields(Operations)}
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("GPU kernels 1/8: mHC ready in ")
    assert lines[-1].startswith("GPU kernels ready in ")


def test_a_default_dtype_of_bfloat16_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """SGLang loads a model under one."""
    monkeypatch.setattr(warm_up, "TOKENS", (1,))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        warm_up.warm_up(counted({}), SHAPES, torch.device("cpu"))
        unused = sparse_attention._unused.__wrapped__(torch.device("cpu"))
    finally:
        torch.set_default_dtype(default)
    assert [getattr(unused, field.name).dtype for field in fields(unused)] == [
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float32,
        torch.float32,
    ]


def test_a_model_without_compression_warms_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm_up, "TOKENS", (1,))
    calls: dict[str, int] = {}
    shapes = replace(SHAPES, c4=None, c128=None, keys=None)
    warm_up.warm_up(counted(calls), shapes, torch.device("cpu"))
    assert not {"compress_store", "indexer_topk", "indexer_query"} & set(calls)
    assert calls["sparse_attention"] == 1

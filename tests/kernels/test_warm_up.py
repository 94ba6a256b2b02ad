"""The warm-up calls every operation, with arguments that each takes."""

import logging
from dataclasses import fields, replace

import pytest
import torch

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels import warm_up
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
        def call(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

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


def test_a_model_without_compression_warms_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm_up, "TOKENS", (1,))
    calls: dict[str, int] = {}
    shapes = replace(SHAPES, c4=None, c128=None, keys=None)
    warm_up.warm_up(counted(calls), shapes, torch.device("cpu"))
    assert not {"compress_store", "indexer_topk", "indexer_query"} & set(calls)
    assert calls["sparse_attention"] == 1

"""A random checkpoint is one that the loader's own checks accept, with weights of sane size."""

import json

import pytest
import torch
from safetensors.torch import load_file

from sglang_dsv4.bench import compare_stock, random_checkpoint
from sglang_dsv4.bench.compare_stock import Side, render, workloads
from sglang_dsv4.bench.published import FLASH, PRO, reduced
from sglang_dsv4.checkpoint.quant import QuantKind
from sglang_dsv4.demo.server import ServerError
from sglang_dsv4.errors import ConfigError
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight
from sglang_dsv4.model_source import open_source

SMALL = FLASH | {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "vocab_size": 512,
}


def test_it_can_be_opened_and_has_unit_gain(tmp_path):
    config = reduced(SMALL, layers=4, experts=8)
    folder = tmp_path / "model"
    random_checkpoint.write_random_checkpoint(folder, config, torch.device("cpu"))
    source = open_source(folder)
    assert source is not None
    assert [kind.ratio for kind in source.dims.layer_kinds] == [0, 0, 4, 128]
    layer = load_file(folder / "model-00002.safetensors")
    prefix = "model.layers.2.self_attn.q_b_proj"
    weight = dequantize_weight(
        layer[f"{prefix}.weight"],
        layer[f"{prefix}.weight_scale"],
        layer[f"{prefix}.weight_scale_2"],
    )
    # 8 * 512 * 128 values of variance 1 / 128: the sample's root mean square is within 1 percent.
    assert weight.square().mean().sqrt().item() == pytest.approx(128**-0.5, rel=0.01)
    table = load_file(folder / "model-00000.safetensors")["model.layers.0.mlp.gate.tid2eid"]
    assert all(len(set(row)) == 6 for row in table.tolist())
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_algo"]
    assert QuantKind.NVFP4 in set(source.kinds.values())


@pytest.mark.parametrize(("layers", "experts"), [(0, 64), (44, 64), (4, 5), (4, 257)])
def test_impossible_reductions_are_refused(layers, experts):
    with pytest.raises(ConfigError, match="were asked for, wanted"):
        reduced(FLASH, layers, experts)


def test_reduced_configs_keep_the_order_of_layers():
    assert reduced(PRO, 4, 384)["compress_ratios"] == [128, 128, 4, 128]
    assert reduced(FLASH, 8, 64)["num_hash_layers"] == 3


def test_requests_of_many_clients():
    plan = workloads([64, 65, 256, 300], input_len=8, output_len=4, prefill_len=24)
    assert [w.requests for w in plan[:-1]] == [512, 512, 512, 600]


def test_table_of_a_comparison():
    plan = workloads([1, 32], input_len=8, output_len=4, prefill_len=24)
    assert [w.requests for w in plan] == [32, 256, 64]
    assert [w.output_len for w in plan] == [4, 4, 2]
    assert " ".join(plan[2].options).startswith("--dataset-name random-ids --random-input-len 24 ")
    values = {"throughput": 10.0, "ttft": 4.0, "tpot": 2.0, "cpu": 1.0}
    twice = {name: 2 * value for name, value in values.items()}
    left = Side({w.name: twice for w in plan}, 300)
    right = Side({w.name: values for w in plan}, 200)
    lines = render(plan, left, right).splitlines()
    assert "| concurrency 1 | tokens/s | 20.0 | 10.0 | 2.00 |" in lines
    assert lines[-1] == "| | token capacity | 300 | 200 | 1.50 |"


def test_what_this_server_measured_outlives_a_stock_that_fails(monkeypatch, tmp_path, capsys):
    """An hour of measuring is not lost to the other side; without this side there is no table."""
    values = {"throughput": 10.0, "ttft": 4.0, "tpot": 2.0, "cpu": 1.0}
    outcomes = []

    def run_side(server, plan, args):
        if outcomes.pop(0):
            return Side({w.name: values for w in plan}, 300)
        raise ServerError("The server did not start within 1 s: see its log.")

    monkeypatch.setattr(compare_stock, "run_side", run_side)
    monkeypatch.setattr(
        compare_stock, "write_random_checkpoint", lambda folder, *_: folder.mkdir(parents=True)
    )
    options = ["--concurrency", "1", "--results", str(tmp_path)]
    outcomes[:] = [True, False]
    assert compare_stock.main(options) == 2
    found = capsys.readouterr()
    assert "| concurrency 1 | tokens/s | 10.0 |\n" in found.out
    assert found.out.endswith("| | token capacity | 300 |\n")
    assert found.err.strip() == "The server did not start within 1 s: see its log."
    outcomes[:] = [False]
    assert compare_stock.main(options) == 2
    assert capsys.readouterr().out == ""

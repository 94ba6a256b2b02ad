"""FP4 indexer keys, bit for bit against exact arithmetic and against stock SGLang's kernel."""

import math
import os
import subprocess
import sys

import cases
import pytest
import torch

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.kernels.reference.indexer_key import (
    dequantize_fp4_ue8m0,
    quantize_fp4_ue8m0,
    read_indexer_keys,
    write_indexer_keys,
)
from sglang_dsv4.kernels.reference.nvfp4 import unpack_nibbles

LAYOUTS = [IndexerLayout(kv_format, size) for kv_format in KVFormat for size in (64, 61)]
IDS = [layout.tag for layout in LAYOUTS]


# The kernel's file imports one name of SGLang, which the kernel does not use; a stand-in saves the
# import of the whole package.
STOCK_SCRIPT = """
import importlib.util, pathlib, sys, types
import torch
root = pathlib.Path(importlib.util.find_spec("sglang").origin).parent
for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["sglang.srt.runtime_context"].get_platform = None
spec = importlib.util.spec_from_file_location(
    "stock", root / "kernels/ops/quantization/fp4_indexer_quant.py"
)
stock = importlib.util.module_from_spec(spec)
sys.modules["stock"] = stock
spec.loader.exec_module(stock)
x = torch.load("x.pt")
packed = torch.zeros(len(x), 64, dtype=torch.uint8)
scale = torch.zeros(len(x), dtype=torch.int32)
stock._quantize_fp4_indexer_kernel[(len(x),)](
    x, packed, scale, BLOCK_N=128, GROUP_N=32, RNE=True
)
torch.save((packed, scale), "out.pt")
"""


def test_quantize_matches_exact_arithmetic():
    x = torch.randn(60, 128) * torch.logspace(-6, 5, 60)[:, None]
    # Exact powers of two and their neighbours as amax / 6, ties below them, negative zeros.
    x[0, :32] = torch.tensor([6.0, *cases.TIES, *(-t for t in cases.TIES), -0.0, -0.1] + [0.0] * 15)
    x[1, :32], x[2, :32], x[3] = 6.0, torch.nextafter(torch.tensor(6.0), torch.tensor(7.0)), 0.0
    packed, scale = quantize_fp4_ue8m0(x)
    codes = unpack_nibbles(packed)
    for row in range(60):
        for group in range(4):
            part = slice(32 * group, 32 * group + 32)
            expected_codes, expected_scale = cases.slow_fp4_group(x[row, part].tolist())
            assert scale[row, group].item() == expected_scale
            assert codes[row, part].tolist() == expected_codes


def test_quantize_is_stock_sglangs_kernel(tmp_path):
    """Stock's Triton kernel with rne=True, run by Triton's interpreter in its own process."""
    x = torch.randn(32, 128) * torch.logspace(-6, 5, 32)[:, None]
    x[0], x[1, :32] = 0.0, torch.tensor([6.0, *cases.TIES] * 4)
    x[2] = -x[1]
    torch.save(x, tmp_path / "x.pt")
    (tmp_path / "run.py").write_text(STOCK_SCRIPT)
    subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )
    stock_packed, stock_scale = torch.load(tmp_path / "out.pt")
    packed, scale = quantize_fp4_ue8m0(x)
    assert torch.equal(packed, stock_packed)
    assert torch.equal(scale.view(torch.int32).flatten(), stock_scale)


def test_every_scale_byte_decodes():
    packed = torch.full((256, 64), 0x22, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 4)
    values = dequantize_fp4_ue8m0(packed, scale)
    expected = torch.tensor([math.ldexp(1.0, byte - 127) for byte in range(255)])
    assert torch.equal(values[:255], expected[:, None].expand(255, 128))
    assert values[255].isnan().all()


def test_nan_and_infinity():
    x = torch.ones(2, 128)
    x[0, 3], x[1, 40] = math.nan, -math.inf
    packed, scale = quantize_fp4_ue8m0(x)
    assert scale.tolist() == [[255, 125, 125, 125], [125, 254, 125, 125]]
    values = dequantize_fp4_ue8m0(packed, scale)
    assert values[0, :32].isnan().all()
    assert torch.equal(values[0, 32:], torch.ones(96))
    assert values[1, 40].item() == -math.inf


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_pool_round_trip_and_hostile_slots(layout):
    pool = cases.garbage_pool(layout, num_pages=3, padding=12)
    slots = torch.tensor([5, *cases.GARBAGE_SLOTS, 2 * layout.page_size + 1, 3 * layout.page_size])
    keys = torch.randn(len(slots), 128)
    before = pool.clone()
    write_indexer_keys(cases.strided(keys), cases.strided(slots), pool, layout)
    assert (pool != before).sum() <= 2 * layout.record_bytes
    expected = keys.bfloat16().float()
    if layout.format is KVFormat.NVFP4:
        expected = cases.round_fp4(keys)
    valid = torch.isin(slots, torch.tensor([5, 2 * layout.page_size + 1]))
    actual = read_indexer_keys(pool, slots, layout)
    assert torch.equal(actual, expected.masked_fill(~valid[:, None], 0.0))
    assert read_indexer_keys(pool, slots[:0], layout).shape == (0, 128)


def test_fp4_page_is_payload_then_scales():
    layout = IndexerLayout(KVFormat.NVFP4, 64)
    pool = cases.garbage_pool(layout, num_pages=2)
    key = torch.randn(1, 128)
    write_indexer_keys(key, torch.tensor([64 + 7]), pool, layout)
    packed, scale = quantize_fp4_ue8m0(key)
    assert torch.equal(pool[1, 7 * 64 : 8 * 64], packed[0])
    assert torch.equal(pool[1, 64 * 64 + 7 * 4 : 64 * 64 + 8 * 4], scale[0])

"""kv_store on the GPU against the plain-torch reference."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import memory_bound_cases as cases

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.kv_store.kv_store import kv_store

LAYOUTS = [RecordLayout(kv_format, size) for kv_format in KVFormat for size in (64, 2, 61)]
IDS = [layout.tag for layout in LAYOUTS]
# More than this share of bytes beside the reference's means another rounding, not another order:
# a value is within 2^-18 of one of 14 boundaries about once in 10^4.
MAX_DIFFERENT = 1e-3


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_bit_for_bit_where_the_sum_is_exact(layout, dtype, weight_dtype):
    cases.check_kv_store(kv_store, "cuda", layout, dtype, weight_dtype, exact=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_hostile_rows(layout):
    different = cases.check_kv_store(
        kv_store, "cuda", layout, torch.bfloat16, torch.float32, exact=False
    )
    assert different < MAX_DIFFERENT


@pytest.mark.parametrize("count", [1, 2, 3, 127, 4096])
def test_token_counts(count):
    layout = RecordLayout(KVFormat.NVFP4, 64)
    cases.check_kv_store(
        kv_store, "cuda", layout, torch.bfloat16, torch.bfloat16, exact=True, count=count
    )


def test_nothing_to_do_and_refusals():
    layout = RecordLayout(KVFormat.NVFP4, 64)
    pool = torch.zeros(2, layout.page_bytes, dtype=torch.uint8, device="cuda")
    weight, table = torch.ones(512, device="cuda"), cases.rope_table("cuda")
    index = torch.zeros(0, dtype=torch.int64, device="cuda")
    none = torch.zeros(0, 512, device="cuda")
    kv_store(none, weight, cases.EPS, index, table, index, pool, layout)
    assert not pool.any()
    with pytest.raises(UnsupportedError, match="512"):
        narrow = RecordLayout(KVFormat.NVFP4, 64, nope_dim=64)
        kv_store(none[:, :128], weight, cases.EPS, index, table, index, pool, narrow)
    with pytest.raises(ValueError, match="aligned"):
        shifted = torch.zeros(2 * layout.page_bytes + 4, dtype=torch.uint8, device="cuda")[4:]
        kv_store(none, weight, cases.EPS, index, table, index, shifted.view(2, -1), layout)


@pytest.mark.slow
def test_thousand_repeats_are_bitwise_equal():
    layout = RecordLayout(KVFormat.NVFP4, 64)
    kv, table = cases.hostile_rows(4096, torch.bfloat16, "cuda"), cases.rope_table("cuda")
    weight = cases.norm_weights(torch.bfloat16, "cuda", False)
    positions = torch.arange(4096, device="cuda")
    first = torch.zeros(64, layout.page_bytes, dtype=torch.uint8, device="cuda")
    kv_store(kv, weight, cases.EPS, positions, table, positions, first, layout)
    for _ in range(1000):
        pool = torch.zeros_like(first)
        kv_store(kv, weight, cases.EPS, positions, table, positions, pool, layout)
        assert torch.equal(pool, first)

"""compress_store on the GPU against the plain-torch reference."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import memory_bound_cases as cases

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.compress.compress import compress_store

TARGETS = [
    (4, RecordLayout(KVFormat.NVFP4, 64)),
    (4, RecordLayout(KVFormat.BFLOAT16, 64)),
    (128, RecordLayout(KVFormat.NVFP4, 2)),
    (128, RecordLayout(KVFormat.BFLOAT16, 2)),
    (4, IndexerLayout(KVFormat.NVFP4, 64)),
    (4, IndexerLayout(KVFormat.BFLOAT16, 64)),
]
IDS = [f"ratio{ratio}-{layout.tag}" for ratio, layout in TARGETS]
# A window's channel is off by about 2^-20 of its row, and bytes are that close to one of 14
# boundaries once in some thousands.
MAX_DIFFERENT = 5e-3


@pytest.mark.parametrize("kind", cases.RAGGED)
@pytest.mark.parametrize(("ratio", "layout"), TARGETS, ids=IDS)
def test_ragged_batches(ratio, layout, kind):
    different = cases.check_compress(
        compress_store, "cuda", ratio, layout, kind, torch.bfloat16, torch.bfloat16
    )
    assert different < MAX_DIFFERENT


@pytest.mark.parametrize(("ratio", "layout"), TARGETS, ids=IDS)
def test_padding_and_float32(ratio, layout):
    different = cases.check_compress(
        compress_store, "cuda", ratio, layout, "chunks", torch.float32, torch.float32, padding=5
    )
    assert different < MAX_DIFFERENT


@pytest.mark.parametrize(("ratio", "layout"), TARGETS, ids=IDS)
def test_chunks_leave_the_bytes_of_the_whole(ratio, layout):
    cases.check_chunked_prefill(compress_store, "cuda", ratio, layout, torch.bfloat16)


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize(
    ("lengths", "prefixes"),
    [
        ([1] * 256, [1000 + 37 * i for i in range(256)]),
        ([1] * 40, [128 * i + 127 for i in range(40)]),
        ([1] * 3, [127, 3, 256]),
        ([4096], [0]),
        ([700, 5, 1, 130, 257], [0] * 5),
    ],
    ids=["decode", "decode-close", "decode-few", "prefill", "prefills"],
)
@pytest.mark.parametrize(("ratio", "layout"), TARGETS, ids=IDS)
def test_one_launch_and_two_leave_the_same_bytes(ratio, layout, lengths, prefixes, padding):
    cases.check_one_launch(compress_store, "cuda", ratio, layout, lengths, prefixes, padding)


def test_nothing_to_do_and_refusals():
    layout = RecordLayout(KVFormat.NVFP4, 64)
    batch = cases.Batch(4, [3], [4], 512, torch.bfloat16, "cuda")
    pool = torch.zeros(1, layout.page_bytes, dtype=torch.uint8, device="cuda")
    weight, table = torch.ones(512, device="cuda"), cases.rope_table("cuda")
    batch.run(compress_store, batch.state, pool, layout, weight, table)
    assert not pool.any()
    with pytest.raises(UnsupportedError, match="ratio"):
        wide = RecordLayout(KVFormat.NVFP4, 64, nope_dim=64)
        batch.run(compress_store, batch.state, pool, wide, weight, table)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        batch.gate = batch.gate.float()
        batch.run(compress_store, batch.state, pool, layout, weight, table)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["72x4+24x3", "104x3+24x2"])
@pytest.mark.parametrize(("ratio", "layout"), TARGETS[::2], ids=IDS[::2])
def test_two_thousand_repeats_are_bitwise_equal(ratio, layout, kind):
    width = layout.head_dim
    batch = cases.Batch(ratio, *cases.ragged(kind, ratio), width, torch.bfloat16, "cuda")
    weight, table = torch.ones(width, device="cuda"), cases.rope_table("cuda", compressed=True)
    size = (len(batch.plan.slots) // layout.page_size + 1, layout.page_bytes)
    first, first_state = torch.zeros(size, dtype=torch.uint8, device="cuda"), batch.state.clone()
    batch.run(compress_store, first_state, first, layout, weight, table)
    # NaN bytes of rows that no request owns compare as integers.
    wanted = first_state.view(torch.int32)
    for _ in range(2000):
        pool, state = torch.zeros_like(first), batch.state.clone()
        batch.run(compress_store, state, pool, layout, weight, table)
        assert torch.equal(pool, first) and torch.equal(state.view(torch.int32), wanted)

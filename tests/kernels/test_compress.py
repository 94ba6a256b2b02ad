"""Compressors of CSA and HCA against transformers, whole and in chunks, and their stores."""

import cases
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
)

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels.reference.compress import CompressPlan, compress, compress_store
from sglang_dsv4.kernels.reference.hadamard import hadamard_transform
from sglang_dsv4.kernels.reference.indexer_key import read_indexer_keys
from sglang_dsv4.kernels.reference.kv_store import read_records
from sglang_dsv4.kernels.reference.norm_rope import rms_norm
from sglang_dsv4.kernels.reference.rope import YarnParams, apply_rope_tail, build_rope_table

# Sums of at most 128 products and a norm in float32, values of order 1: 1e-5 is some 80 ulps.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
TABLE = build_rope_table(1024, 160000.0, yarn=YarnParams(16, 65536))


def plan_of(ratio, start, stop, state_rows):
    """Plan of one request's tokens start..stop-1; token p waits in state row p % state_rows."""
    num_tokens, coff = stop - start, 2 if ratio == 4 else 1

    def row(position):
        if position < 0:
            return -1
        return position - start if position >= start else num_tokens + position % state_rows

    windows = [w for w in range(stop // ratio) if w * ratio + ratio > start]
    firsts = [w * ratio for w in windows]
    source = [[row(p) for p in range(f - (coff - 1) * ratio, f + ratio)] for f in firsts]
    kept = range(max(start, stop - state_rows), stop)
    return CompressPlan(
        ratio=ratio,
        source=torch.tensor(source, dtype=torch.int64).view(len(windows), coff * ratio),
        positions=torch.tensor(firsts, dtype=torch.int64),
        slots=torch.tensor(windows, dtype=torch.int64),
        write_rows=torch.tensor([p - start for p in kept], dtype=torch.int64),
        write_locs=torch.tensor([p % state_rows for p in kept], dtype=torch.int64),
    )


def compressor(ratio):
    """A transformers compressor; the two series of CSA differ in scale, so a swap shows."""
    make = DeepseekV4CSACompressor if ratio == 4 else DeepseekV4HCACompressor
    module = cases.randomise(make(cases.hf_config()))
    with torch.no_grad():
        if ratio == 4:
            module.kv_proj.weight[module.head_dim :] *= 3
    return module


def projections(module, hidden):
    with torch.no_grad():
        return module.kv_proj(hidden), module.gate_proj(hidden)


def hf_entries(module, hidden):
    """Entries of a whole sequence, with norm and rotation: [windows, head_dim]."""
    positions = torch.arange(len(hidden))[None]
    residual = torch.zeros(1, len(hidden), 16)
    with torch.no_grad():
        return module(hidden[None], residual, positions, None, 0)[0][0, 0]


def finish(module, entries, positions):
    return apply_rope_tail(rms_norm(entries, module.kv_norm.weight, 1e-6), positions, TABLE)


def in_chunks(module, hidden, ratio, cuts, dtype=torch.float32):
    """Entries formed over consecutive batches that share the state."""
    width = module.position_bias.shape[1]
    state_rows = 2 * ratio
    state = torch.full((state_rows, 2 * width), float("nan"))
    kv, gate = (x.to(dtype) for x in projections(module, hidden))
    entries, firsts = [torch.zeros(0, module.head_dim)], [torch.zeros(0, dtype=torch.int64)]
    for start, stop in zip([0, *cuts], [*cuts, len(hidden)], strict=True):
        plan = plan_of(ratio, start, stop, state_rows)
        positions = torch.arange(start, stop)
        bias = module.position_bias.detach()
        entries.append(compress(kv[start:stop], gate[start:stop], bias, positions, state, plan))
        firsts.append(plan.positions)
    return torch.cat(entries), torch.cat(firsts)


@pytest.mark.parametrize("length", [*cases.LENGTHS, 7, 8, 9])
@pytest.mark.parametrize("ratio", [4, 128])
def test_whole_sequence_is_transformers(ratio, length):
    module, hidden = compressor(ratio), torch.randn(length, 32)
    entries, firsts = in_chunks(module, hidden, ratio, [])
    assert firsts.tolist() == [ratio * w for w in range(length // ratio)]
    expected = hf_entries(module, hidden)
    torch.testing.assert_close(finish(module, entries, firsts), expected, **TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 5, 64, 127, 128, 129])
@pytest.mark.parametrize("ratio", [4, 128])
def test_chunks_give_what_the_whole_gives(ratio, chunk):
    module, hidden = compressor(ratio), torch.randn(261, 32)
    entries, firsts = in_chunks(module, hidden, ratio, list(range(chunk, 261, chunk)))
    expected = hf_entries(module, hidden)
    torch.testing.assert_close(finish(module, entries, firsts), expected, **TOLERANCE)


def test_bf16_projections_enter_as_their_float32_values():
    module, hidden = compressor(4), torch.randn(40, 32)
    narrow, _ = in_chunks(module, hidden, 4, [13], dtype=torch.bfloat16)
    assert narrow.dtype is torch.float32
    kv, gate = (x.bfloat16().float() for x in projections(module, hidden))
    plan, state = plan_of(4, 0, 40, 8), torch.zeros(8, 512)
    wide = compress(kv, gate, module.position_bias.detach(), torch.arange(40), state, plan)
    torch.testing.assert_close(narrow, wide, **TOLERANCE)


def test_the_state_is_read_before_it_is_written():
    kv, gate, bias = torch.randn(4, 6), torch.randn(4, 6), torch.zeros(4, 6)
    state = torch.randn(4, 12)
    plan = CompressPlan(
        ratio=4,
        source=torch.tensor([[4, 5, 6, 7, 0, 1, 2, 3]]),
        positions=torch.tensor([4]),
        slots=torch.tensor([1]),
        write_rows=torch.arange(4),
        write_locs=torch.arange(4),
    )
    old = state.clone()
    entry = compress(kv, gate, bias, torch.arange(4, 8), state, plan)
    values = torch.cat((old[:, :3], kv[:, 3:]))
    weights = torch.cat((old[:, 6:9], gate[:, 3:])).softmax(dim=0)
    torch.testing.assert_close(entry, (values * weights).sum(0, keepdim=True), **TOLERANCE)
    assert torch.equal(state, torch.cat((kv, gate), dim=-1))


def test_padding_windows_and_rows_are_harmless():
    kv, gate = torch.randn(3, 256), torch.randn(3, 256)
    bias = torch.randn(4, 256)
    state = torch.full((2, 512), float("nan"))
    plan = CompressPlan(
        ratio=4,
        source=torch.full((2, 8), -1),
        positions=torch.zeros(2, dtype=torch.int64),
        slots=torch.tensor([-1, -1]),
        write_rows=torch.tensor([2, 0]),
        write_locs=torch.tensor([1, -1]),
    )
    positions = torch.tensor([6, 7, 9])
    entries = compress(cases.strided(kv), gate, bias, positions, state, plan)
    assert torch.equal(entries, torch.zeros(2, 128))
    assert torch.equal(state[1], torch.cat((kv[2], gate[2] + bias[9 % 4])))
    assert state[0].isnan().all()
    layout = RecordLayout(KVFormat.NVFP4, 2, nope_dim=64)
    pool = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    compress_store(
        kv, gate, bias, positions, state, plan, torch.ones(128), 1e-6, TABLE, pool, layout
    )
    assert not pool.any()


def test_rows_outside_batch_or_state_are_padding():
    # A CUDA graph has as many rows as tokens, whatever is written.
    kv, gate, bias = torch.randn(3, 256), torch.randn(3, 256), torch.randn(4, 256)
    positions, state = torch.tensor([4, 5, 6]), torch.full((8, 512), float("nan"))
    far = 2**40
    plan = CompressPlan(
        ratio=4,
        source=torch.tensor([[-1] * 4 + [3 + 7, 0, 1, 2], [-1] * 8]),
        positions=torch.tensor([0, 0]),
        slots=torch.tensor([1, -1]),
        write_rows=torch.tensor([1, -1, 3, far, 0, 2, -far, 0]),
        write_locs=torch.tensor([4, 5, 6, 0, 8, -1, 1, far]),
    )
    state[7] = 0.0
    entries = compress(kv, gate, bias, positions, state, plan)
    # The state row, then the batch: gate 0 with value 0, and three biased gates.
    gates = torch.cat((torch.zeros(1, 128), (gate + bias[positions % 4])[:, 128:]))
    values = torch.cat((torch.zeros(1, 128), kv[:, 128:]))
    torch.testing.assert_close(entries[0], (gates.softmax(0) * values).sum(0), **TOLERANCE)
    assert torch.equal(entries[1], torch.zeros(128))
    assert torch.equal(state[4], torch.cat((kv[1], gate[1] + bias[1])))
    assert torch.equal(state[7], torch.zeros(512))
    assert state[[0, 1, 2, 3, 5, 6]].isnan().all()


def test_nothing_to_do():
    none = torch.zeros(0, 256)
    plan = plan_of(4, 0, 0, 8)
    state = torch.zeros(8, 512)
    bias, positions = torch.zeros(4, 256), torch.zeros(0, dtype=torch.int64)
    assert compress(none, none, bias, positions, state, plan).shape == (0, 128)


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("ratio", [4, 128])
def test_store_writes_finished_records(ratio, kv_format):
    module, hidden = compressor(ratio), torch.randn(300, 32)
    layout = RecordLayout(kv_format, 2, nope_dim=64)
    pool = cases.garbage_pool(layout, num_pages=40)
    kv, gate = projections(module, hidden)
    state = torch.zeros(2 * ratio, 2 * kv.shape[1])
    plan = plan_of(ratio, 0, 300, 2 * ratio)
    bias, weight = module.position_bias.detach(), module.kv_norm.weight.detach()
    compress_store(
        kv, gate, bias, torch.arange(300), state, plan, weight, 1e-6, TABLE, pool, layout
    )
    expected = hf_entries(module, hidden)
    actual = read_records(pool, plan.slots, layout)
    assert len(actual) == 300 // ratio
    # e2m1 under its group's scale: half a step is 1 / 6 of amax (5 -> 4 or 6), and the scale's own
    # rounding adds 1 / 16; bf16 keeps 2^-9 of each value.
    groups, wanted = (x.unflatten(-1, (-1, 16)) for x in (actual, expected))
    amax = wanted.abs().amax(dim=-1, keepdim=True)
    limit = wanted.abs() * 2.0**-8
    if kv_format is KVFormat.NVFP4:
        limit[:, :4] = amax[:, :4] * (1 / 6 + 1 / 16)
    assert ((groups - wanted).abs() <= limit + 1e-5).all()


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_store_writes_indexer_keys(kv_format):
    module = compressor(4).indexer
    hidden = torch.randn(50, 32)
    layout = IndexerLayout(kv_format, 8)
    pool = cases.garbage_pool(layout, num_pages=2)
    kv, gate = projections(module, hidden)
    plan, state = plan_of(4, 0, 50, 8), torch.zeros(8, 512)
    bias, weight = module.position_bias.detach(), module.kv_norm.weight.detach()
    compress_store(kv, gate, bias, torch.arange(50), state, plan, weight, 1e-6, TABLE, pool, layout)
    entries = compress(kv, gate, bias, torch.arange(50), torch.zeros(8, 512), plan)
    rotated = apply_rope_tail(rms_norm(entries, weight, 1e-6), plan.positions, TABLE)
    keys = hadamard_transform(rotated)
    expected = cases.round_fp4(keys) if kv_format is KVFormat.NVFP4 else keys.bfloat16().float()
    assert torch.equal(read_indexer_keys(pool, plan.slots, layout), expected)

"""What FlashInfer's NVFP4 readers cost in accuracy, emulated: why `cake` is the default.

Both quantise the query to NVFP4 for the tensor cores. cake then rounds softmax weights and values
to e4m3; sparse quantises both to NVFP4 in groups of 16 keys of a 64-key chunk (FlashInfer 0.7.2,
kernels/dsv4_nvfp4/decode.cuh and csrc/cake_dsv4). No kernel of FlashInfer runs here.
"""

import dataclasses
from collections.abc import Callable, Iterator

import oracle
import pytest
import torch
from comparison import golden_ids, kl
from harness import Runner
from test_nvfp4_cache import MAX_MEAN_KL
from torch import Tensor

from sglang_dsv4.kernels import dispatch
from sglang_dsv4.kernels.reference.kv_store import read_records
from sglang_dsv4.kernels.reference.norm_rope import inverse_rope
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sglang_dsv4.kernels.reference.paged import valid_slots

pytestmark = pytest.mark.e2e

NAMES = [p["name"] for p in oracle.question_prompts() if p["prompt_len"] < 700]
NOPE, CHUNK, BLOCK = 448, 64, 32


def nvfp4(x: Tensor) -> Tensor:
    """x rounded to NVFP4 in groups of 16 along the last axis."""
    return dequantize_nvfp4(*quantize_nvfp4(x))


def e4m3(x: Tensor) -> Tensor:
    """x rounded to e4m3."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def cake_output(weights: Tensor, scores: Tensor, records: Tensor) -> Tensor:
    """Weights [B, H, K] times values, the NoPE part in e4m3."""
    nope = torch.bmm(e4m3(weights), e4m3(records[..., :NOPE]))
    return torch.cat((nope, torch.bmm(weights, records[..., NOPE:])), dim=-1)


def sparse_output(weights: Tensor, scores: Tensor, records: Tensor) -> Tensor:
    """The NoPE part in NVFP4 along the keys; weights relative to the largest score so far."""
    running = scores.unflatten(-1, (-1, CHUNK)).amax(-1).cummax(-1)[0]
    last = running[..., -1:].masked_fill(running[..., -1:] == -torch.inf, 0.0)
    factor = (running - last).exp().clamp(min=1e-30).unsqueeze(-1)
    chunks = weights.unflatten(-1, (-1, CHUNK)) / factor
    rounded = (nvfp4(chunks.bfloat16().float()) * factor).flatten(-2)
    values = nvfp4(records[..., :NOPE].mT.contiguous()).mT
    return torch.cat((torch.bmm(rounded, values), torch.bmm(weights, records[..., NOPE:])), dim=-1)


def emulated(output: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable:
    """A namesake of `reference.sparse_attention` with a reader's roundings."""

    def sparse_attention(
        q,
        window,
        pool,
        layout,
        comp,
        comp_pool,
        comp_layout,
        sinks,
        scale,
        out_scale=1.0,
        lengths=None,
        rotation=None,
    ):
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2])
        for start in range(0, len(q), BLOCK):
            rows = slice(start, start + BLOCK)
            lists = [(window[rows], pool, layout)]
            if comp is not None and comp.shape[1]:
                listed = comp[rows].long()
                if lengths is not None:
                    place = torch.arange(listed.shape[1])
                    listed = listed.masked_fill(place >= lengths[rows, None], -1)
                lists.append((listed, comp_pool, comp_layout))
            records, listed = zip(*(padded(*each) for each in lists), strict=True)
            keys, valid = torch.cat(records, dim=1), torch.cat(listed, dim=1)[:, None]
            query = torch.cat((nvfp4(q[rows, :, :NOPE].float()), q[rows, :, NOPE:].float()), dim=-1)
            scores = (torch.bmm(query, keys.mT) * scale).masked_fill(~valid, -torch.inf)
            peak = scores.amax(dim=-1, keepdim=True)
            weights = (scores - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
            total = weights.sum(dim=-1)
            lse[rows] = total.log() + peak.squeeze(-1)
            gain = torch.sigmoid(lse[rows] - sinks.float()) * (out_scale / total)
            summed = output(weights, scores, keys)
            out[rows] = (summed * gain.masked_fill(total == 0, 0.0).unsqueeze(-1)).to(q.dtype)
        return (out if rotation is None else inverse_rope(out, *rotation)), lse

    return sparse_attention


def padded(slots: Tensor, pool: Tensor, layout) -> tuple[Tensor, Tensor]:
    """(records [B, K, 512], which of them are listed [B, K]), K filled up to whole chunks."""
    slots = torch.nn.functional.pad(slots.long(), (0, -slots.shape[1] % CHUNK), value=-1)
    valid = valid_slots(pool, slots, layout.page_size)
    records = read_records(pool, slots.masked_fill(~valid, -1).flatten(), layout)
    return records.view(*slots.shape, -1), valid


@pytest.fixture(scope="module")
def bfloat16_cache() -> Iterator[dict[str, Tensor]]:
    with Runner(kv_cache_dtype="bfloat16") as runner:
        logits = {name: runner.prefill(golden_ids(name)) for name in NAMES}
    yield logits


def mean_kl(monkeypatch, bfloat16_cache, output, names) -> float:
    """Mean over all positions, with the emulated reader on the NVFP4 cache."""
    operations = dataclasses.replace(dispatch.REFERENCE, sparse_attention=emulated(output))
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "operations_for", lambda device: operations)
        patched.setattr("sglang_dsv4.attention.backend.operations_for", lambda device: operations)
        with Runner(kv_cache_dtype="nvfp4") as runner:
            found = [kl(bfloat16_cache[name], runner.prefill(golden_ids(name))) for name in names]
    positions = torch.cat(found)
    print(f"{output.__name__}: mean KL {positions.mean():.2e} over {len(positions)} positions")
    return float(positions.mean())


def test_cake_stays_within_the_limit(monkeypatch, bfloat16_cache):
    assert mean_kl(monkeypatch, bfloat16_cache, cake_output, NAMES) <= MAX_MEAN_KL["bf16"]


def test_sparse_does_not(monkeypatch, bfloat16_cache):
    """When this fails, `sparse` may become a default. Half of the prompts: rounding V is slow."""
    assert mean_kl(monkeypatch, bfloat16_cache, sparse_output, NAMES[::2]) > MAX_MEAN_KL["bf16"]

"""indexer_query on the GPU against the plain-torch reference, bit for bit."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.indexer.query import indexer_query
from sglang_dsv4.kernels.reference import indexer_query as reference
from sglang_dsv4.kernels.reference.rope import YarnParams, build_rope_table

MAX_POSITION = 8192


def table():
    return build_rope_table(MAX_POSITION, 160000.0, yarn=YarnParams(16, 65536)).cuda()


def check(q, positions):
    """The operation equals the reference, NaN for NaN and with the signs of zeros."""
    found = indexer_query(q, positions, table())
    wanted = reference.indexer_query(q, positions, table())
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.nan_to_num(0.0), wanted.nan_to_num(0.0))
    assert torch.equal(torch.signbit(found)[~nan], torch.signbit(wanted)[~nan])


def positions_of(tokens, dtype=torch.int64):
    return torch.randint(0, MAX_POSITION, (tokens,), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [1, 3, 8, 64])
@pytest.mark.parametrize("tokens", [0, 1, 3, 5, 127, 128, 129, 257])
def test_bit_for_bit(tokens, heads, dtype):
    q = torch.randn(tokens, heads, 128, device="cuda") * 3
    check(q.to(dtype), positions_of(tokens))


def test_hostile_values():
    q = torch.randn(130, 8, 128, device="cuda")
    q[0::9] *= 1e30
    q[1::9] *= 1e-30
    q[2::9] = 0.0
    q[3::9] = -0.0
    q[4::9, 1, 7] = torch.inf
    q[5::9, 2, 100] = torch.nan
    check(q.bfloat16(), positions_of(130, torch.int32))


def test_strided_heads_and_tokens():
    wide = torch.randn(33, 12, 384, device="cuda").bfloat16()
    check(wide[:, 2:10, 128:256], positions_of(33))
    check(wide.transpose(0, 1)[:, :, 256:], positions_of(12))
    check(wide[..., 1:129], positions_of(33))


def test_refuses_other_widths():
    with pytest.raises(UnsupportedError, match="128"):
        indexer_query(torch.zeros(1, 1, 64, device="cuda"), positions_of(1), table())


@pytest.mark.slow
def test_thousand_repeats_are_bitwise_equal():
    q, positions = torch.randn(64, 64, 128, device="cuda").bfloat16(), positions_of(64)
    first = indexer_query(q, positions, table())
    for _ in range(1000):
        assert torch.equal(indexer_query(q, positions, table()), first)

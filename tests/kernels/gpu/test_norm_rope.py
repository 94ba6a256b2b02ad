"""q_norm_rope and inverse_rope on the GPU against the plain-torch reference."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import memory_bound_cases as cases

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.norm_rope.norm_rope import inverse_rope, q_norm_rope

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 17, 64, 128])
def test_norm_bit_for_bit_where_the_sum_is_exact(heads, dtype):
    cases.check_norm_rope(q_norm_rope, "cuda", heads, dtype, exact=True, inverse=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [8, 64])
def test_norm_of_hostile_rows(heads, dtype):
    different = cases.check_norm_rope(q_norm_rope, "cuda", heads, dtype, exact=False, inverse=False)
    # A 16-bit rounding boundary lies within 2^-18 of a value about once in a hundred.
    assert dtype is torch.float32 or different < 0.02


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 8, 64])
def test_inverse_rope_bit_for_bit(heads, dtype, exact):
    cases.check_norm_rope(inverse_rope, "cuda", heads, dtype, exact=exact, inverse=True)


def test_nothing_to_do_and_refusals():
    none = torch.zeros(0, 8, 512, dtype=torch.bfloat16, device="cuda")
    index = torch.zeros(0, dtype=torch.int64, device="cuda")
    table = cases.rope_table("cuda")
    assert q_norm_rope(none, index, table, cases.EPS).shape == (0, 8, 512)
    with pytest.raises(UnsupportedError, match="512"):
        q_norm_rope(none[..., :256], index, table, cases.EPS)


@pytest.mark.slow
def test_thousand_repeats_are_bitwise_equal():
    q = torch.randn(64, 64, 512, device="cuda").bfloat16()
    positions, table = torch.arange(64, device="cuda"), cases.rope_table("cuda")
    first = q_norm_rope(q, positions, table, cases.EPS)
    for _ in range(1000):
        assert torch.equal(q_norm_rope(q, positions, table, cases.EPS), first)

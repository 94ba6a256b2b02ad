"""Hadamard transform."""

import pytest
import torch

from sglang_dsv4.kernels.reference.hadamard import hadamard_transform


@pytest.mark.parametrize("n", [1, 2, 8, 128])
def test_sylvester_matrix(n):
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(3, 2, n)
    # n additions in float32 on values of size n^0.5 at most a few: 1e-5 holds by a wide margin.
    torch.testing.assert_close(hadamard_transform(x), x @ matrix / n**0.5, rtol=1e-5, atol=1e-5)


def test_orthonormal_and_exact_on_a_unit_vector():
    x = torch.randn(4, 128)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x, rtol=1e-5, atol=1e-5)
    unit = torch.eye(4)[1]
    assert hadamard_transform(unit).tolist() == [0.5, -0.5, 0.5, -0.5]


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="power of two"):
        hadamard_transform(torch.zeros(2, 12))

"""The widening kernel on a GPU against torch: every bit, and nothing written elsewhere."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from sglang_dsv4.kernels.linear import widen
from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
SIZES = [(1, 16), (17, 80), (35, 2112), (100, 208), (64, 128), (512, 4096), (2064, 4176)]


def weights(count: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes and all scales from 0 to 448."""
    draw = torch.Generator("cuda").manual_seed(rows)
    size = (count, rows, width // 2)
    weight = torch.randint(0, 256, size, generator=draw, device="cuda", dtype=torch.uint8)
    size = (count, rows, width // 16)
    scale = torch.randint(0, 127, size, generator=draw, device="cuda", dtype=torch.uint8)
    return weight, scale.view(torch.float8_e4m3fn)


def exact_values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 values without a tensor scale."""
    return dequantize_weight(weight, scale, torch.ones((), device="cuda"))


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found.view(BITS[found.dtype]), wanted.view(BITS[wanted.dtype]))


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("dtype", widen.DIVISOR)
def test_every_bit(dtype, rows, width, count):
    """40 of the largest give each warp several rows of records, few of the small ones one."""
    weight, scale = weights(count + 2, rows, width)
    records = pack_records(weight, scale)
    memory = torch.full((count + 2, rows, width), 0x55, dtype=torch.uint8, device="cuda")
    memory = memory.repeat_interleave(dtype.itemsize, -1).view(dtype)
    before = memory.clone()
    widen.widen(records, memory[1:-1], 1)
    wanted = exact_values(weight[1:-1], scale[1:-1]) / widen.DIVISOR[dtype]
    assert_same_bits(memory[1:-1], wanted.to(dtype))
    assert_same_bits(memory[0], before[0])
    assert_same_bits(memory[-1], before[-1])


def test_under_a_default_dtype_of_bfloat16():
    weight, scale = weights(1, 16, 64)
    out = torch.empty(1, 16, 64, dtype=torch.bfloat16, device="cuda")
    torch.set_default_dtype(torch.bfloat16)
    try:
        widen.widen(pack_records(weight, scale), out)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(out, (exact_values(weight, scale) / 128).bfloat16())

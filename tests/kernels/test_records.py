"""Records: the layout that the docstring of ``records`` gives, and its inverse."""

import pytest
import torch

from sglang_dsv4.errors import CheckpointError
from sglang_dsv4.kernels.linear import records
from sglang_dsv4.kernels.linear.records import pack_records, unpack_records
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight, e2m1_decode


def random_weight(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes and all scales from 0 to 448."""
    generator = torch.Generator().manual_seed(seed)
    *lead, rows, columns = shape
    size = (*lead, rows, columns // 2)
    weight = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    size = (*lead, rows, columns // 16)
    scale = torch.randint(0, 127, size, dtype=torch.uint8, generator=generator)
    return weight, scale.view(torch.float8_e4m3fn)


def bf16(bits: int) -> float:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).item()


def value_of(record: list[int], row: int, column: int) -> float:
    """One value of a record, word for word as the docstring says, in Python integers."""
    g, high_row = row % 8, row // 8
    t, s, c = column // 16, column % 16 // 4, column % 4
    lane = 4 * g + t
    word = int.from_bytes(bytes(record[16 * lane + 4 * s : 16 * lane + 4 * s + 4]), "little")
    mask = 0x81C081C0
    registers = (
        word & mask,
        (word >> 3 | word << 29) & mask,
        (word >> 6 | word << 26) & mask,
        ((word & 0x001B001B) * 0x4108) & mask,
    )
    register = registers[2 * (c // 2) + high_row]
    code = bf16(register >> 16 * (c % 2) & 0xFFFF) * 2.0**126
    # A bf16 with the byte's exponent and mantissa is its value times 2^-120.
    return code * bf16(record[512 + 2 * lane + high_row] << 4) * 2.0**120


@pytest.mark.parametrize("rows, columns", [(16, 64), (32, 192)])
def test_every_value_of_a_record_is_where_the_layout_says(rows: int, columns: int) -> None:
    weight, scale = random_weight(rows, columns)
    packed = pack_records(weight, scale)
    assert packed.shape == (rows // 16, columns // 64, 576)
    expected = dequantize_weight(weight, scale, torch.ones(()))
    for row in range(rows):
        for column in range(columns):
            record = packed[row // 16, column // 64].tolist()
            assert value_of(record, row % 16, column % 64) == expected[row, column]


def test_every_code_survives_in_every_place() -> None:
    """All registers, halves and steps meet all sixteen codes, the sign of zero too."""
    row = torch.arange(16 * 64).view(16, 64)
    for turn in range(16):
        codes = ((row + row // 16 + turn) % 16).to(torch.uint8)
        weight = codes[:, 0::2] | codes[:, 1::2] << 4
        scale = torch.ones(16, 4).to(torch.float8_e4m3fn)
        record = pack_records(weight, scale)[0, 0].tolist()
        expected = e2m1_decode(codes)
        for i in range(16):
            found = torch.tensor([value_of(record, i, j) for j in range(64)])
            assert torch.equal(found, expected[i])
            assert torch.equal(found.signbit(), expected[i].signbit())


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
@pytest.mark.parametrize("rows, columns", [(1, 16), (15, 48), (16, 64), (17, 80), (100, 1040)])
def test_unpacking_gives_the_checkpoint_order_again(
    rows: int, columns: int, lead: tuple[int, ...]
) -> None:
    weight, scale = random_weight(*lead, rows, columns)
    packed = pack_records(weight, scale)
    assert packed.shape == (*lead, -(-rows // 16), -(-columns // 64), 576)
    again, scale_again = unpack_records(packed, rows, columns)
    assert torch.equal(again, weight)
    assert torch.equal(scale_again.view(torch.uint8), scale.view(torch.uint8))


def test_missing_rows_and_columns_are_zero() -> None:
    weight, scale = random_weight(17, 80)
    padded, padded_scale = unpack_records(pack_records(weight, scale), 32, 128)
    assert not padded[17:].any() and not padded[:, 40:].any()
    assert not padded_scale.view(torch.uint8)[17:].any()
    assert not padded_scale.view(torch.uint8)[:, 5:].any()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = random_weight(2, 100, 80)
    whole = pack_records(weight, scale)
    monkeypatch.setattr(records, "_CHUNK", 2000)
    assert len(list(records._chunks(100, 80))) > 1
    assert torch.equal(pack_records(weight, scale), whole)
    assert torch.equal(unpack_records(whole, 100, 80)[0], weight)


def test_non_contiguous_weights_are_packed() -> None:
    weight, scale = random_weight(32, 128)
    sliced = pack_records(weight[::2, 8:24], scale[::2, 1:3])
    assert torch.equal(sliced, pack_records(weight[::2, 8:24].clone(), scale[::2, 1:3].clone()))


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0x81])
def test_negative_and_nan_scales_are_refused(byte: int) -> None:
    weight, scale = random_weight(2, 16, 64)
    scale.view(torch.uint8)[1, 7, 2] = byte
    with pytest.raises(CheckpointError, match="negative or NaN block scale in weight 1"):
        pack_records(weight, scale)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight, scale = random_weight(16, 64)
    with pytest.raises(CheckpointError, match="one scale"):
        pack_records(weight, scale[:, :3])

"""The widening kernel's own source, lane by lane on the CPU, against the reference weight."""

import numpy as np
import pytest
import torch
from records_emulation import RecordDevice, RecordInstructions

from sglang_dsv4.kernels.linear import widen
from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.reference.fp8 import widen_weight
from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

CODES = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def emulate(dtype, records, rows, width, tiles=1):
    """Widened matrices [n, rows, width]; what lies behind them must stay as it was."""
    device = RecordDevice(1 << 22)
    names = device.load(widen)
    kinds = {2: np.uint16, 1: np.uint8}
    kind = kinds[dtype.itemsize]
    packed = device.tensor(records.numpy())
    out = device.tensor(np.full((len(records) + 1, rows, width), 0x55, kind))
    matrices, down, across = records.shape[:3]
    warps = -(-down // tiles) * -(-across // widen.RECORDS)
    device.launch(
        lambda: names["Widen"](dtype).kernel(packed, out, np.int32(tiles)),
        (-(-warps // widen.WARPS), matrices, 1),
        widen.THREADS,
        0,
    )
    bits = out.read()
    assert (bits[-1] == 0x55).all()
    integers = torch.from_numpy(bits[:-1].astype(np.int32)).to(CODES[dtype])
    return integers.view(dtype)


def weights(count, rows, width):
    generator = torch.Generator().manual_seed(rows + width)
    weight = torch.randint(0, 256, (count, rows, width // 2), generator=generator)
    scale = torch.randint(0, 127, (count, rows, width // 16), generator=generator)
    return weight.to(torch.uint8), scale.to(torch.uint8).view(torch.float8_e4m3fn)


def assert_same_bits(found, wanted):
    """The sign of zero too."""
    assert torch.equal(found.view(CODES[found.dtype]), wanted.view(CODES[wanted.dtype]))


SIZES = [(1, 1, 16), (1, 17, 80), (2, 35, 2112), (3, 100, 208), (1, 128, 128)]


@pytest.mark.parametrize("tiles", [1, 3, 4])
@pytest.mark.parametrize(("count", "rows", "width"), SIZES)
def test_values_over_128_are_exact(count, rows, width, tiles):
    weight, scale = weights(count, rows, width)
    found = emulate(torch.bfloat16, pack_records(weight, scale), rows, width, tiles)
    wanted = torch.stack(
        [dequantize_weight(w, s, torch.tensor(2.0**-7)) for w, s in zip(weight, scale, strict=True)]
    )
    assert_same_bits(found, wanted.bfloat16())


@pytest.mark.parametrize("tiles", [1, 3, 4])
@pytest.mark.parametrize(("count", "rows", "width"), [(2, 16, 64), *SIZES])
def test_e4m3_is_rounded_once(count, rows, width, tiles):
    weight, scale = weights(count, rows, width)
    found = emulate(torch.float8_e4m3fn, pack_records(weight, scale), rows, width, tiles)
    assert_same_bits(found, widen_weight(weight, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_each_store_fills_four_lines(dtype, monkeypatch):
    stores = []
    store = RecordInstructions.store_u32x4_if

    def recorded(self, condition, address, values):
        if not np.any(condition):
            return
        assert np.all(condition)
        stores.append(np.unique(address // widen.LINE, return_counts=True)[1])
        store(self, condition, address, values)

    monkeypatch.setattr(RecordInstructions, "store_u32x4_if", recorded)
    weight, scale = weights(1, 32, 256)
    emulate(dtype, pack_records(weight, scale), 32, 256, 2)
    assert len(stores) == 32 * 256 * dtype.itemsize // 512
    assert all(lines.tolist() == [8] * 4 for lines in stores)


def test_rows_of_a_warp():
    """Small weights are spread over all multiprocessors; large ones are read ahead."""
    assert widen.row_tiles(1, 1, 1, 132) == 1
    assert widen.row_tiles(1, 256, 64, 132) == 1
    assert widen.row_tiles(1, 512, 64, 132) == 3
    assert widen.row_tiles(64, 256, 64, 132) == widen.MOST_TILES

"""The solo kernel's own source, lane by lane on the CPU, against the reference."""

from functools import partial

import attention_emulation
import numpy as np
import pytest
from attention_emulation import check_source, list_shape
from warp_emulator import GROUP, LANES, QUAD, Device, Instructions, full

from sglang_dsv4.kernels.attention import solo


class SoloInstructions(Instructions):
    """What only the solo kernel uses: predicated loads, matrix stores."""

    def fma(self, a, b, c):
        return (full(a, np.float64) * b + c).astype(np.float32)

    def _load_if(self, condition, address, old, dtype):
        condition = full(condition, bool)
        loaded = self.device.memory.load(np.where(condition, address, 256), len(old), dtype)
        pairs = zip(loaded, old, strict=True)
        return tuple(np.where(condition, v, full(o, np.uint32)).astype(np.uint32) for v, o in pairs)

    def load_record_x4_if(self, condition, address, old):
        return self._load_if(condition, address, old, np.uint32)

    def load_record_u16_if(self, condition, address, old):
        return self._load_if(condition, address, [old], np.uint16)[0]

    def load_record_u8_if(self, condition, address, old):
        return self._load_if(condition, address, [old], np.uint8)[0]

    def shared_store_f32x4(self, address, *values):
        self.shared.store(address, values, np.float32)

    def _store_matrices(self, address, values, transposed):
        for i, value in enumerate(values):
            matrix = np.zeros((8, 8), np.uint16)
            for e in range(2):
                half = ((full(value, np.uint32) >> np.uint32(16 * e)) & 0xFFFF).astype(np.uint16)
                matrix[GROUP, 2 * QUAD + e] = half
            rows = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32)
            at = full(address, np.int32)[8 * i : 8 * i + 8]
            # The eight lanes that name this matrix's rows; the others store nothing.
            lanes = np.resize(at, 32)
            words = [np.resize(rows[:, c], 32) for c in range(4)]
            self.shared.store(lanes, words, np.uint32, LANES < 8)

    def stmatrix_x4(self, address, *values):
        self._store_matrices(address, values, False)

    def stmatrix_x2_trans(self, address, *values):
        self._store_matrices(address, values, True)


class SoloDevice(Device):
    def _replacements(self):
        instructions = SoloInstructions(self)
        return {**super()._replacements(), **dict.fromkeys(("ptx", "solo"), instructions)}


def emulate(q, lists, lengths, pools, layouts, sinks, scale, out_scale, rotation, splits):
    """(out, lse) of the kernel's source."""
    shape = solo.SoloShape(list_shape(layouts, lengths, rotation))
    return attention_emulation.emulate(
        SoloDevice(1 << 24),
        solo,
        lambda names: names["SoloAttention"](shape),
        *(q, lists, lengths, pools, sinks, scale, out_scale, rotation, solo.HEADS, splits),
        solo.shared_bytes(),
    )


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("heads", "splits", "window", "comp", "comp_page", "lengths", "sharp"),
    [
        (16, 1, 70, 130, 64, None, 1),
        (5, 1, 64, 65, 2, (65, 3), 1),
        (12, 2, 33, 100, 64, None, 1),
        # Warps without any key.
        (8, 1, 10, 0, 2, None, 1),
        # Scores that move the origin more than once.
        (7, 1, 64, 190, 2, None, 60),
        # Five splits of 2, 1 and 3 tiles; of no tile at all.
        (8, 5, 40, 200, 64, (64, -7), 1),
        (3, 3, 0, 70, 64, (0, 70), 1),
        (3, 1, 0, 70, 64, (0, 69), 1),
    ],
)
def test_kernel_source(heads, splits, window, comp, comp_page, lengths, sharp, rotated):
    emulated = partial(emulate, splits=splits)
    check_source(emulated, heads, window, comp, comp_page, lengths, sharp, rotated=rotated)

"""The narrow Hopper kernel's own source, lane by lane on the CPU, against the reference."""

from functools import partial

import attention_emulation
import numpy as np
import pytest
from attention_emulation import check_source, list_shape
from warp_emulator import GROUP, LANES, QUAD, Device, Instructions, bf16_to_f32, full

from sglang_dsv4.kernels.attention.hopper import narrow


class HopperInstructions(Instructions):
    """Warpgroup products as what each warp computes at once: its 16 rows, with all of B.

    A matrix in shared memory is read as the PTX manual describes the 128-byte swizzle: bits 4-6 of
    an address are turned by its bits 7-9; 1024 bytes from eight rows to the next.
    """

    def fma(self, a, b, c):
        return (full(a, np.float64) * b + c).astype(np.float32)

    def load_record_x4(self, address):
        return self.global_load_x4(address)

    def load_record_x2(self, address):
        return self.global_load_x2(address)

    def barrier_any(self, number, threads, condition):
        local = self.device.local
        votes = vars(local.barrier).setdefault("votes", {})
        votes[local.warp] = bool(np.any(condition))
        local.barrier.wait(timeout=60)
        result = np.int32(any(votes.values()))
        local.barrier.wait(timeout=60)
        return result

    def fence_async(self):
        pass

    def wgmma_wait(self, sums, pending):
        return list(sums)

    def wgmma_wait_only(self, pending):
        pass

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

    def stmatrix_trans(self, address, values):
        self._store_matrices(address, values, True)

    def descriptor_low(self, address):
        return ((address >> 4) & 0x3FFF) | (1 << 16)

    def _operand(self, low, offset, rows, columns):
        """[rows, columns] bf16 of a descriptor, 8 rows every 1024 bytes, 128 bytes a row."""
        start = (int(np.unique(low).item()) & 0x3FFF) * 16 + offset
        r, c = np.arange(rows)[:, None], np.arange(columns)[None]
        at = start + r // 8 * 1024 + r % 8 * 128 + c * 2
        at = at ^ ((at >> 7 & 7) << 4)
        raw = self.shared.bytes
        return bf16_to_f32(raw[at].astype(np.uint32) | (raw[at + 1].astype(np.uint32) << 8))

    def _add(self, sums, rows, cols):
        """sums of [16, 16] x [n, 16]^T in a warp's accumulators."""
        product = (rows.astype(np.float64) @ cols.astype(np.float64).T).astype(np.float32)
        out = []
        for i, value in enumerate(sums):
            row, col = GROUP + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * QUAD + i % 2
            out.append(full(value, np.float32) + product[row, col])
        return out

    def wgmma_registers(self, sums, a, b, steps):
        for i, step in enumerate(steps):
            rows = np.zeros((16, 16), np.float32)
            for r in range(4):
                for e in range(2):
                    word = full(a[4 * i + r], np.uint32) >> np.uint32(16 * e)
                    at = GROUP + 8 * (r % 2), 2 * QUAD + e + 8 * (r // 2)
                    rows[at] = bf16_to_f32(word & 0xFFFF)
            sums = self._add(sums, rows, self._operand(b, step, 2 * len(sums), 16))
        return sums

    def wgmma_transposed(self, sums, a, b, rows, steps):
        each = len(sums) // len(rows)
        sums, first = list(sums), 16 * self.device.local.warp
        for step_a, step_b in steps:
            cols = self._operand(b, step_b, 2 * each, 16)
            for i, row in enumerate(rows):
                block = self._operand(a, row + step_a, 16, 64).T[first : first + 16]
                part = slice(i * each, (i + 1) * each)
                sums[part] = self._add(sums[part], block, cols)
        return sums


class HopperDevice(Device):
    def _replacements(self):
        instructions = HopperInstructions(self)
        names = ("ptx", "narrow", "hopper")
        return {**super()._replacements(), **dict.fromkeys(names, instructions)}


def emulate(
    q, lists, lengths, pools, layouts, sinks, scale, out_scale, rotation, head_tile, splits
):
    """(out, lse) of the kernel's source."""
    shape = narrow.NarrowShape(head_tile, list_shape(layouts, lengths, rotation))
    return attention_emulation.emulate(
        HopperDevice(1 << 24),
        narrow,
        lambda names: names["NarrowAttention"](shape),
        *(q, lists, lengths, pools, sinks, scale, out_scale, rotation, head_tile, splits),
        narrow.shared_bytes(head_tile),
    )


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_tile", "splits", "window", "comp", "comp_page", "lengths", "sharp"),
    [
        (16, 16, 1, 70, 130, 64, None, 1),
        (5, 16, 1, 64, 65, 2, (65, 3), 1),
        (20, 16, 2, 33, 100, 64, None, 1),
        # Scores that move the origin more than once.
        (9, 16, 1, 64, 190, 2, None, 60),
        # Five splits of 2, 1 and 3 tiles; of no tile at all.
        (8, 16, 5, 40, 200, 64, (64, -7), 1),
        (3, 16, 3, 0, 70, 64, (0, 70), 1),
        (3, 16, 1, 0, 70, 64, (0, 69), 1),
    ],
)
def test_kernel_source(heads, head_tile, splits, window, comp, comp_page, lengths, sharp, rotated):
    emulated = partial(emulate, head_tile=head_tile, splits=splits)
    check_source(emulated, heads, window, comp, comp_page, lengths, sharp, rotated=rotated)

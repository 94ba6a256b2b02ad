"""Kernels on records on the emulated device: bulk copies, mbarriers and decoding, lane by lane.

A bulk copy overwrites its target with 0xFF, which is NaN as a scale, when it is asked for, and
brings its bytes when its barrier is waited for: what is read too early or overwritten too early is
seen. Copies that nobody waits for are refused.
"""

import threading
import types

import numpy as np
import torch
from warp_emulator import (
    LANES,
    Device,
    Instructions,
    bf16_to_f32,
    f32_to_bf16,
    full,
    uniform,
)

# Seconds until a barrier counts as never completed.
PATIENCE = 60


class Barrier:
    """An mbarrier: arrivals of a phase, how many lack, phases completed, copies not yet seen."""

    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.phase, self.copies = 0, []

    def arrive(self, changed):
        """The copies of a phase count as arrived with its last arrival."""
        with changed:
            self.missing -= 1
            if self.missing == 0:
                self.missing, self.phase = self.arrivals, self.phase + 1
                changed.notify_all()


class RecordInstructions(Instructions):
    """The functions of `kernels.linear.decode` on lanes."""

    def _rotate(self, word, by):
        return (word >> np.uint32(by)) | (word << np.uint32(32 - by))

    def spread_codes(self, word):
        word, mask = full(word, np.uint32), np.uint32(0x81C081C0)
        product = (word & np.uint32(0x001B001B)) * np.uint32(0x4108)
        turned = (word, self._rotate(word, 3), self._rotate(word, 6), product)
        return tuple(value & mask for value in turned)

    def spread_scales(self, pair):
        both = (full(pair, np.uint32) * np.uint32(0x1010)) & np.uint32(0x07F007F0)
        for factor in (0x7B807B80, 0x7B007B00):
            both = self.mul_bf16x2(both, np.uint32(factor))
        return self.prmt(both, both, 0x1010), self.prmt(both, both, 0x3232)

    def shared_load_u16(self, address):
        return self.shared.load(address, 1, np.uint16)[0].astype(np.uint32)

    def shared_load_u32(self, address):
        """Of one address: a number that can be branched on."""
        return uniform(self.shared.load(address, 1, np.uint32)[0])

    def barriers_init(self, condition, address, number, arrivals):
        if not uniform(condition):
            return
        for i in range(number):
            at = int(uniform(address)) + 8 * i
            self.shared.check(at, 8)
            assert at not in self.barriers
            self.barriers[at] = Barrier(arrivals)

    @property
    def barriers(self):
        """Of this block, by address."""
        return self.device.barriers.setdefault(id(self.shared), (self.shared, {}))[1]

    def _copy(self, state, target, source, size):
        target, source = int(uniform(target)), int(uniform(source))
        assert size > 0 and size % 16 == 0 and target % 16 == 0 and source % 16 == 0
        assert source >= 256 and source + size <= len(self.device.memory.bytes)
        assert target >= 256 and target + size <= len(self.shared.bytes)
        self.shared.bytes[target : target + size] = 0xFF
        state.copies.append((target, self.device.memory.bytes[source : source + size].copy()))

    def copy_bytes(self, condition, barrier, shared, sources, size):
        if not uniform(condition):
            return
        state = self.barriers[int(uniform(barrier))]
        assert not state.copies, "the place is in use"
        for target, source in zip(shared, sources, strict=True):
            self._copy(state, target, source, int(uniform(size)))
        state.arrive(self.device.changed)

    def arrive_with_bytes(self, condition, barrier, shared, source, size):
        state = self.barriers[int(uniform(barrier))]
        with self.device.changed:
            if uniform(condition):
                self._copy(state, shared, source, int(uniform(size)))
            state.arrive(self.device.changed)

    def barrier_wait(self, address, parity):
        state = self.barriers[int(uniform(address))]
        with self.device.changed:
            done = lambda: state.phase % 2 != uniform(parity)  # noqa: E731
            assert self.device.changed.wait_for(done, PATIENCE), "a phase is never completed"
            assert state.copies or state.arrivals > 1, "that phase has been waited for"
            for target, data in state.copies:
                self.shared.bytes[target : target + len(data)] = data
            state.copies.clear()

    def shared_zero_x4_if(self, condition, address):
        address = np.where(condition, address, 1024)
        self.shared.store(address, [np.uint32(0)] * 4, np.uint32, condition)

    def _store_where(self, condition, address, values, dtype):
        """Lanes that store nothing may have any address."""
        condition, address = full(condition, bool), full(address, np.int64)
        if condition.any():
            chosen = np.where(condition, address, address[condition][0])
            self.device.memory.store(chosen, values, dtype, condition)

    def store_f32x4_if(self, condition, address, *values):
        self._store_where(condition, address, values, np.float32)

    def store_bf16x4(self, known, aligned, address, values):
        known = full(known, np.int32)
        bits = [f32_to_bf16(full(v, np.float32)).astype(np.uint16) for v in values]
        whole = (known >= 4) & full(aligned, bool)
        self._store_where(whole, address, bits, np.uint16)
        for i in range(4):
            self._store_where((known > i) & ~whole, address + 2 * i, [bits[i]], np.uint16)

    def load_written_f32x4(self, address):
        return self.device.memory.load(address, 4, np.float32)

    def store_u32x4_if(self, condition, address, values):
        self._store_where(condition, address, values, np.uint32)

    def load_codes_if(self, condition, codes, scales, old):
        condition = full(condition, bool)
        loaded = []
        for address, count, kind in ((codes, len(old) - 1, np.uint32), (scales, 1, np.uint16)):
            chosen = np.where(condition, address, 256)
            loaded += self.device.memory.load(chosen, count, kind)
        return tuple(
            np.where(condition, new, full(before, np.uint32)).astype(np.uint32)
            for new, before in zip(loaded, old, strict=True)
        )

    def bf16x2_to_f32x2(self, pair):
        pair = full(pair, np.uint32)
        return tuple(bf16_to_f32(half) for half in (pair & 0xFFFF, pair >> 16))

    def pack_e4m3x4(self, *values):
        bytes_ = [
            torch.from_numpy(full(v, np.float32).copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
            for v in values
        ]
        stacked = torch.stack([b.view(torch.uint8) for b in bytes_], dim=1).contiguous()
        return stacked.numpy().view(np.uint32)[:, 0]

    def arrive_if(self, condition, counter, number, flag):
        if not np.any(condition):
            return
        assert np.count_nonzero(full(condition, bool)) == 1
        counter = uniform(counter)
        count = uniform(self.device.memory.load(counter, 1, np.int32)[0]) + 1
        last = count == uniform(number)
        self.device.memory.store(counter, [0 if last else count], np.int32, LANES == 0)
        self.shared.store(flag, [np.uint32(last)], np.uint32, LANES == 0)


class RecordDevice(Device):
    """Runs kernels of `kernels.linear` and others that stream records."""

    emulated = "sglang_dsv4.kernels.linear"

    def _arch(self):
        return types.SimpleNamespace(
            **vars(super()._arch()),
            lane_idx=lambda: LANES,
            griddepcontrol_wait=lambda: None,
            griddepcontrol_launch_dependents=lambda: None,
        )

    def _replacements(self):
        names = super()._replacements()
        names["ptx"] = names["decode"] = RecordInstructions(self)
        names["cutlass"].range = lambda *a, unroll=1: range(*(int(x) for x in a))
        return names

    def launch(self, body, grid, threads, shared_size):
        """As the base class; copies that nobody waits for are refused."""
        self.barriers, self.changed = {}, threading.Condition(threading.RLock())
        super().launch(body, grid, threads, shared_size)
        for _, barriers in self.barriers.values():
            assert not any(barrier.copies for barrier in barriers.values()), "not waited for"

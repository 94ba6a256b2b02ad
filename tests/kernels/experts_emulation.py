"""Runs the experts' kernel source on the emulated device: both launches, over given lists."""

import threading
import time

import numpy as np
import torch
from records_emulation import RecordDevice, RecordInstructions
from warp_emulator import full, uniform

from sglang_dsv4.kernels.experts import product
from sglang_dsv4.kernels.experts.product import Numbers, Operands
from sglang_dsv4.kernels.experts.shape import THREADS, Shape, shared_bytes

PATIENCE = 60


class ExpertInstructions(RecordInstructions):
    """The functions of `kernels.experts.ptx`, and those of `kernels.linear.decode`, on lanes."""

    def _load_if(self, condition, address, count, dtype, other):
        condition = full(condition, bool)
        loaded = self.device.memory.load(np.where(condition, address, 256), count, dtype)
        return tuple(np.where(condition, value, full(other, dtype)) for value in loaded)

    def load_i32_if(self, condition, address, other):
        return self._load_if(condition, address, 1, np.int32, other)[0]

    def load_f32_if(self, condition, address):
        return self._load_if(condition, address, 1, np.float32, 0)[0]

    def shared_load_u32(self, address):
        return self.shared.load(address, 1, np.uint32)[0]

    def store_u32_if(self, condition, address, a):
        self._store_where(condition, address, [a], np.uint32)

    def store_zeros_if(self, condition, address):
        self._store_where(condition, address, [np.uint32(0)] * 4, np.uint32)

    def divide(self, a, b):
        return full(a, np.float32) / full(b, np.float32)

    def count_bits(self, x):
        """Of one number: one that tells where a lane reads."""
        return np.uint32(int(x).bit_count())

    def arrive_with_bytes(self, condition, barrier, shared, source, size):
        """A place is taken anew only when what was there before has been waited for."""
        state = self.barriers[int(uniform(barrier))]
        with self.device.changed:
            if not state.copies:
                state.begun = state.phase
            assert state.begun == state.phase, "the place is in use"
            super().arrive_with_bytes(condition, barrier, shared, source, size)

    def barrier_wait(self, address, parity):
        """Of a phase of which no copy is under way; slow warps come late."""
        if self.device.local.warp in self.device.slow:
            time.sleep(0.002)
        state = self.barriers[int(uniform(address))]
        with self.device.changed:
            done = lambda: state.phase % 2 != uniform(parity)  # noqa: E731
            assert self.device.changed.wait_for(done, PATIENCE), "a phase is never completed"
            assert not state.copies or getattr(state, "begun", -1) < state.phase
            super().barrier_wait(address, parity)

    def named_barrier(self, number, threads):
        key = id(self.shared), int(number)
        with self.device.changed:
            made = threading.Barrier(threads // 32)
            barrier = self.device.named.setdefault(key, (self.shared, made))[1]
        barrier.wait(PATIENCE)


class ExpertDevice(RecordDevice):
    """Runs kernels of `kernels.experts`."""

    emulated = "sglang_dsv4.kernels.experts"
    slow = ()

    def _replacements(self):
        names = super()._replacements()
        names["ptx"] = names["decode"] = names["own"] = ExpertInstructions(self)
        return names

    def launch(self, body, grid, threads, shared_size):
        self.named = {}
        super().launch(body, grid, threads, shared_size)


def emulate(shape: Shape, x, records, outer, routed, lists, rows, limit, sms, per_sm, slow=()):
    """bfloat16 [rows, outputs] of one launch; what is not written is NaN. slow: warps."""
    device = ExpertDevice(1 << 24)
    device.slow = slow
    names = device.load(product)
    put = device.tensor
    # First in memory: records before the first expert's are out of bounds. Behind lies NaN.
    placed = put(records.numpy().ravel())
    put(np.full(256, 0xFF, np.uint8))
    others = {
        "outer": put(outer.numpy()),
        "routed": put(routed.flatten().numpy()),
        **dict(
            zip(("rows", "owners", "counts"), (put(part.numpy()) for part in lists), strict=True)
        ),
        "out": put(np.full((rows, shape.outputs), 0x7FC0, np.uint16)),
    }
    # Last in memory: rows beyond the last are out of bounds.
    operands = Operands(put(x.view(torch.int16).numpy()), placed, **others)
    end = int(operands.x.iterator.address) + x.numel() * 2
    device.memory.bytes = device.memory.bytes[:end]
    numbers = Numbers(np.int32(rows), np.int32(sms * per_sm), np.int32(sms), np.float32(limit))
    device.launch(
        lambda: names["GroupedProduct"](shape, "sm_90a").kernel(operands, numbers),
        (sms * per_sm, 1, 1),
        THREADS,
        shared_bytes(shape),
    )
    bits = torch.from_numpy(operands.out.read().astype(np.int32)).to(torch.int16)
    return bits.view(torch.bfloat16)


def compiled(arch, shape):
    """What `compile_product` would give, emulated: takes torch tensors, writes ``out``."""

    def call(operands, numbers):
        lists = (operands.rows, operands.owners, operands.counts)
        made = emulate(
            shape,
            *(operands.x, operands.records, operands.outer, operands.routed, lists),
            *(numbers.slots, numbers.limit, numbers.sms, numbers.blocks // numbers.sms),
        )
        operands.out.copy_(made)

    return call

"""The CPU emulator with the instructions of the indexer kernels; blocks run without a cluster."""

import threading

import numpy as np
from warp_emulator import GROUP, LANES, QUAD, Device, Instructions, bf16_to_f32, full


class IndexerInstructions(Instructions):
    """The functions of `kernels.indexer.instructions` on lanes."""

    def shared_load_u8(self, address):
        return self.shared.load(address, 1, np.uint8)[0].astype(np.uint32)

    def shared_store_u32_if(self, condition, address, a):
        self.shared.store(address, [a], np.uint32, full(condition, bool))

    def shared_store_f32_if(self, condition, address, a):
        self.shared.store(address, [a], np.float32, full(condition, bool))

    def shared_store_x4_if(self, condition, address, *values):
        chosen = full(condition, bool)
        self.shared.store(np.where(chosen, address, 1024), values, np.uint32, chosen)

    def shared_count_if(self, condition, address):
        """Warps are threads, so one at a time counts."""
        chosen = full(address, np.int32)[full(condition, bool)]
        with self.device.counting:
            for at in chosen.tolist():
                self.shared.bytes[at : at + 4].view(np.uint32)[0] += 1

    def copy_async_16_if(self, condition, shared, address):
        chosen = full(condition, bool)
        safe = np.where(chosen, full(address, np.int64), np.int64(256))
        values = self.device.memory.load(safe, 4, np.uint32)
        self.device.local.pending.append((np.array(full(shared, np.int32)), values, chosen))

    def global_load_i32_if(self, condition, address):
        chosen = full(condition, bool)
        loaded = self.device.memory.load(np.where(chosen, address, 256), 1, np.int32)[0]
        return np.where(chosen, loaded, np.int32(0))

    def pin(self, x):
        return x

    def global_store_i64_if(self, condition, address, a):
        self.device.memory.store(address, [a], np.int64, full(condition, bool))

    def shuffle_xor_u32(self, x, mask):
        return full(x, np.uint32)[LANES ^ mask]

    def shuffle_up(self, x, distance):
        moved = full(x, np.uint32)[np.maximum(LANES - distance, 0)]
        return np.where(distance <= LANES, moved, np.uint32(0))

    def max_u16x2(self, a, b):
        halves = [np.stack([full(v, np.uint32) & 0xFFFF, full(v, np.uint32) >> 16]) for v in (a, b)]
        low, high = np.maximum(*halves)
        return (low | (high << np.uint32(16))).astype(np.uint32)

    def float_of(self, bits):
        return np.array(full(bits, np.uint32)).view(np.float32)

    def twice_relu(self, x):
        return full(x, np.float32) + np.abs(full(x, np.float32))

    def multiply_add_wide(self, a, b, c):
        return full(c, np.int64) + full(a, np.uint32).astype(np.int64) * full(b, np.uint32)

    def fence_async(self):
        pass

    def wgmma_wait(self, sums, a, pending):
        return sums

    def wgmma_start(self, a, b, columns, step):
        """This warp's 16 rows; the descriptor's strides are in 16 bytes, without swizzle."""
        b = int(full(b, np.int64)[0])
        start = (b & 0x3FFF) << 4
        along_k, along_n = ((b >> 16) & 0x3FFF) << 4, ((b >> 32) & 0x3FFF) << 4
        total = np.zeros((16, columns), np.float64)
        for i in range(len(a) // 4):
            rows = np.zeros((16, 16), np.float64)
            for r in range(4):
                for h in range(2):
                    bits = (full(a[4 * i + r], np.uint32) >> np.uint32(16 * h)) & 0xFFFF
                    rows[GROUP + 8 * (r % 2), 2 * QUAD + h + 8 * (r // 2)] = bf16_to_f32(bits)
            cols = np.zeros((16, columns), np.float64)
            for n in range(columns):
                for k in (0, 8):
                    at = start + i * step + k // 8 * along_k + n // 8 * along_n + n % 8 * 16
                    bits = self.shared.bytes[at : at + 16].view(np.uint16)
                    cols[k : k + 8, n] = bf16_to_f32(bits)
            total += rows @ cols
        out = []
        for i in range(columns // 2):
            column = 8 * (i // 4) + 2 * QUAD + i % 2
            out.append(total[GROUP + 8 * (i % 4 // 2), column].astype(np.float32))
        return tuple(out)


class IndexerDevice(Device):
    """Runs kernels of every family; copies take effect where their condition held."""

    emulated = "sglang_dsv4.kernels."

    def __init__(self, size):
        super().__init__(size)
        self.counting = threading.Lock()

    def _arch(self):
        arch, local = super()._arch(), self.local

        def wait(_):
            for shared, values, chosen in local.pending:
                local.shared.store(shared, values, np.uint32, chosen)
            local.pending.clear()

        arch.cp_async_wait_group = wait
        arch.griddepcontrol_wait = arch.griddepcontrol_launch_dependents = lambda: None
        return arch

    def _replacements(self):
        instructions = IndexerInstructions(self)
        return {**super()._replacements(), "ptx": instructions, "extra": instructions}

"""Runs the source of a CuTeDSL kernel on the CPU, one numpy vector of 32 lanes for each warp.

The undecorated Python of a kernel class is executed with its globals replaced: DSL integers become
numpy arrays of the same width, PTX instructions become their definitions on lanes (the fragment
maps of the PTX manual), warps become threads that meet at a barrier. A run-time condition that
differs between the lanes of a warp is refused. What is proved is the mapping of lanes, registers,
addresses and barriers, not the compiler's work.
"""

import dataclasses
import importlib.util
import sys
import threading
import types

import numpy as np

LANES = np.arange(32, dtype=np.int32)
GROUP, QUAD = LANES // 4, LANES % 4


def bf16_to_f32(bits):
    return (np.asarray(bits, np.uint32) << 16).astype(np.uint32).view(np.float32)


def f32_to_bf16(x):
    """Round to nearest even; NaN stays NaN."""
    bits = np.atleast_1d(np.asarray(x, np.float32)).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)
    return np.where(np.isnan(bits.view(np.float32)), np.uint32(0x7FC0), rounded)


def full(x, dtype):
    return np.broadcast_to(np.asarray(x, dtype), (32,))


def uniform(x):
    """The one value that all lanes hold."""
    x = np.asarray(x)
    assert (x == x.flat[0]).all(), x
    return x.flat[0]


def fresh(module):
    """The module executed anew: compiling a kernel replaces the code of its functions."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


class Number:
    """Stands for a DSL number type: calling it converts."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.inf = np.float32(np.inf)

    def __call__(self, x):
        return np.asarray(x).astype(self.dtype)[()]


class Memory:
    """Byte-addressed memory; every access is checked against the bounds and its alignment."""

    def __init__(self, size):
        self.bytes = np.zeros(size, np.uint8)
        self.top = 256

    def place(self, array):
        """Copy an array in; returns its address."""
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        at = self.top
        self.bytes[at : at + raw.size] = raw
        self.top = (at + raw.size + 255) // 256 * 256
        return at

    def check(self, address, size):
        address = np.atleast_1d(np.asarray(address)).astype(np.int64)
        assert (address >= 256).all() and (address + size <= len(self.bytes)).all(), address
        assert (address % size == 0).all(), (address, size)
        return np.broadcast_to(address, (32,)) if address.size == 1 else address

    def load(self, address, count, dtype):
        """count elements of each lane: [count] arrays of 32."""
        size = count * np.dtype(dtype).itemsize
        at = self.check(address, size)[:, None] + np.arange(size)
        values = np.ascontiguousarray(self.bytes[at]).view(dtype)
        return tuple(values[:, i].copy() for i in range(count))

    def store(self, address, values, dtype, mask=True):
        values = np.stack([full(v, dtype) for v in values], axis=1)
        raw = np.ascontiguousarray(values).view(np.uint8)
        at = self.check(address, raw.shape[1])[:, None] + np.arange(raw.shape[1])
        chosen = np.broadcast_to(np.asarray(mask), (32,))
        self.bytes[at[chosen]] = raw[chosen]


class Pointer:
    def __init__(self, address):
        self.address = address

    def toint(self):
        return self.address


class FakeTensor:
    """What a kernel reads of a tensor argument: address, shape, strides in elements."""

    def __init__(self, memory, array):
        self.iterator = Pointer(np.int64(memory.place(array)))
        self.shape = tuple(np.int32(n) for n in array.shape)
        self.stride = tuple(np.int64(s // array.itemsize) for s in array.strides)
        self.array, self.memory = array, memory

    def read(self):
        at = int(self.iterator.address)
        raw = self.memory.bytes[at : at + self.array.nbytes]
        return raw.view(self.array.dtype).reshape(self.array.shape).copy()


class Instructions:
    """The functions of `kernels.attention.instructions` on lanes."""

    def __init__(self, device):
        self.device = device

    @property
    def shared(self):
        return self.device.local.shared

    def mma_bf16(self, a, b, c):
        rows, cols, out = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), []
        for r in range(4):
            for h in range(2):
                value = bf16_to_f32((full(a[r], np.uint32) >> np.uint32(16 * h)) & 0xFFFF)
                rows[GROUP + 8 * (r % 2), 2 * QUAD + h + 8 * (r // 2)] = value
        for r in range(2):
            for h in range(2):
                value = bf16_to_f32((full(b[r], np.uint32) >> np.uint32(16 * h)) & 0xFFFF)
                cols[2 * QUAD + h + 8 * r, GROUP] = value
        product = (rows.astype(np.float64) @ cols.astype(np.float64)).astype(np.float32)
        for i in range(4):
            out.append(full(c[i], np.float32) + product[GROUP + 8 * (i // 2), 2 * QUAD + i % 2])
        return tuple(out)

    def _matrices(self, address):
        words = self.shared.load(address, 4, np.uint32)
        halves = np.stack(words, axis=1).view(np.uint16)
        return halves.reshape(4, 8, 8)

    def ldmatrix_x4(self, address):
        m = self._matrices(address)
        return tuple(
            m[i][GROUP, 2 * QUAD].astype(np.uint32)
            | (m[i][GROUP, 2 * QUAD + 1].astype(np.uint32) << 16)
            for i in range(4)
        )

    def ldmatrix_x4_trans(self, address):
        m = self._matrices(address)
        return tuple(
            m[i][2 * QUAD, GROUP].astype(np.uint32)
            | (m[i][2 * QUAD + 1, GROUP].astype(np.uint32) << 16)
            for i in range(4)
        )

    def shared_store_x4(self, address, *values):
        self.shared.store(address, values, np.uint32)

    def shared_store_u32(self, address, a):
        self.shared.store(address, [a], np.uint32)

    def shared_store_f32(self, address, a):
        self.shared.store(address, [a], np.float32)

    def shared_store_f32x2(self, address, a, b):
        self.shared.store(address, [a, b], np.float32)

    def shared_load_f32(self, address):
        return self.shared.load(address, 1, np.float32)[0]

    def shared_load_f32x2(self, address):
        return self.shared.load(address, 2, np.float32)

    def shared_load_f32x4(self, address):
        return self.shared.load(address, 4, np.float32)

    def shared_load_u32(self, address):
        return self.shared.load(address, 1, np.uint32)[0]

    def shared_load_u32x4(self, address):
        return self.shared.load(address, 4, np.uint32)

    def count_bits(self, x):
        return np.bitwise_count(full(x, np.uint32)).astype(np.uint32)

    def global_load_u32x4_if(self, condition, address):
        chosen = full(condition, bool)
        loaded = self.device.memory.load(np.where(chosen, address, 256), 4, np.uint32)
        return tuple(np.where(chosen, value, np.uint32(0)) for value in loaded)

    def global_load_x4(self, address):
        return self.device.memory.load(address, 4, np.uint32)

    def global_load_x2(self, address):
        return self.device.memory.load(address, 2, np.uint32)

    def global_load_x2_if(self, condition, address, a, b):
        condition = full(condition, bool)
        loaded = self.device.memory.load(np.where(condition, address, 256), 2, np.uint32)
        pairs = zip(loaded, (a, b), strict=True)
        return tuple(np.where(condition, value, full(old, np.uint32)) for value, old in pairs)

    def global_load_u16(self, address):
        return self.device.memory.load(address, 1, np.uint16)[0].astype(np.uint32)

    def global_load_i32(self, address):
        return self.device.memory.load(address, 1, np.int32)[0]

    def global_load_i64(self, address):
        return self.device.memory.load(address, 1, np.int64)[0]

    def global_load_f32(self, address):
        return self.device.memory.load(address, 1, np.float32)[0]

    def global_load_f32x2(self, address):
        return self.device.memory.load(address, 2, np.float32)

    def global_load_f32x4(self, address):
        return self.device.memory.load(address, 4, np.float32)

    def global_load_f32x4_unless(self, condition, address):
        condition = full(condition, bool)
        loaded = self.device.memory.load(np.where(condition, 256, address), 4, np.float32)
        return tuple(np.where(condition, np.float32(0), value) for value in loaded)

    def global_store_u32x4(self, address, *values):
        self.device.memory.store(address, values, np.uint32)

    def global_store_u32x2(self, address, *values):
        self.device.memory.store(address, values, np.uint32)

    def global_store_f32x4(self, address, *values):
        self.device.memory.store(address, values, np.float32)

    def global_store_f32(self, address, a):
        self.device.memory.store(address, [a], np.float32)

    def global_store_f32_if(self, condition, address, a):
        self.device.memory.store(address, [a], np.float32, condition)

    def copy_async_16(self, shared, address, size):
        """Takes effect at the warp's next wait."""
        loaded = self.device.memory.load(address, 4, np.uint32)
        values = [np.where(full(size, np.int32) == 16, v, np.uint32(0)) for v in loaded]
        self.device.local.pending.append((np.array(full(shared, np.int32)), values))

    def opaque(self, x):
        return x

    def mul_bf16x2(self, a, b):
        out = np.zeros(32, np.uint32)
        for h in range(2):
            x = bf16_to_f32((full(a, np.uint32) >> np.uint32(16 * h)) & 0xFFFF).astype(np.float64)
            y = bf16_to_f32((full(b, np.uint32) >> np.uint32(16 * h)) & 0xFFFF).astype(np.float64)
            out |= f32_to_bf16((x * y).astype(np.float32)).astype(np.uint32) << np.uint32(16 * h)
        return out

    def pack_bf16x2(self, low, high):
        return f32_to_bf16(full(low, np.float32)) | (
            f32_to_bf16(full(high, np.float32)) << np.uint32(16)
        )

    def prmt(self, a, b, selector):
        both = full(a, np.uint64) | (full(b, np.uint64) << np.uint64(32))
        out = np.zeros(32, np.uint32)
        for i in range(4):
            digit = (full(selector, np.uint64) >> np.uint64(4 * i)) & np.uint64(7)
            byte = (both >> (np.uint64(8) * digit)) & np.uint64(0xFF)
            out |= byte.astype(np.uint32) << np.uint32(8 * i)
        return out

    def e4m3x2_to_f32x2(self, pair):
        out = []
        for i in range(2):
            byte = (full(pair, np.uint32) >> np.uint32(8 * i)) & 0xFF
            exponent, mantissa = (byte >> 3) & 15, byte & 7
            power = 2.0 ** (np.maximum(exponent, 1).astype(np.float64) - 7)
            value = (mantissa / 8 + (exponent > 0)) * power
            value = np.where((byte & 0x7F) == 0x7F, np.nan, value)
            out.append(np.where(byte & 0x80, -value, value).astype(np.float32))
        return tuple(out)

    def exp2(self, x):
        return np.exp2(full(x, np.float32))

    def log2(self, x):
        return np.log2(full(x, np.float32))

    def maximum(self, a, b):
        return np.fmax(full(a, np.float32), full(b, np.float32))

    def shuffle_xor(self, x, mask):
        return full(x, np.float32)[LANES ^ mask]

    def shuffle_index(self, x, source):
        x = np.asarray(x)
        return full(x, x.dtype)[full(source, np.int32) & 31]

    def any_lane(self, condition):
        return np.any(condition)

    def ballot(self, condition):
        bits = full(condition, np.uint32) << np.arange(32, dtype=np.uint32)
        return np.uint32(np.bitwise_or.reduce(bits))


class Device:
    """One GPU: global memory, and a launcher of blocks whose warps are threads.

    Imports from modules whose names begin with ``emulated`` run on it too.
    """

    emulated = "sglang_dsv4.kernels.attention"

    def __init__(self, size):
        self.memory = Memory(size)
        self.local = threading.local()
        self.loaded = {}

    def tensor(self, array):
        return FakeTensor(self.memory, array)

    def _arch(self):
        local = self.local

        def wait(_):
            for shared, values in local.pending:
                local.shared.store(shared, values, np.uint32)
            local.pending.clear()

        return types.SimpleNamespace(
            thread_idx=lambda: (local.warp * 32 + LANES, 0, 0),
            block_idx=lambda: local.block,
            grid_dim=lambda: local.grid,
            warp_idx=lambda: np.int32(local.warp),
            make_warp_uniform=uniform,
            sync_threads=lambda: local.barrier.wait(timeout=60),
            sync_warp=lambda: None,
            cp_async_commit_group=lambda: None,
            cp_async_wait_group=wait,
        )

    def _replacements(self):
        allocator = types.SimpleNamespace(allocate=lambda size, align: Pointer(np.int32(1024)))
        return {
            "Int32": Number(np.int32),
            "Int64": Number(np.int64),
            "Uint32": Number(np.uint32),
            "Float32": Number(np.float32),
            "ptx": Instructions(self),
            "choose": lambda c, a, b: np.where(c, a, b)[()],
            "cute": types.SimpleNamespace(
                arch=self._arch(), make_rmem_tensor=lambda n, kind: [None] * n
            ),
            "cutlass": types.SimpleNamespace(
                range=lambda *a: range(*(int(x) for x in a)),
                range_constexpr=range,
                const_expr=bool,
                min=np.minimum,
                max=np.maximum,
                memory=types.SimpleNamespace(SmemAllocator=lambda: allocator),
            ),
        }

    def fresh(self, module):
        """The module executed anew."""
        return fresh(module)

    def _plain(self, function, namespace):
        source = getattr(function, "__wrapped__", function)
        return types.FunctionType(
            source.__code__, namespace, source.__name__, source.__defaults__, source.__closure__
        )

    def _rebound(self, value, namespace):
        """A function, or a class with its methods, that reads its globals from a namespace."""
        if isinstance(value, types.FunctionType):
            return self._plain(value, namespace)
        if dataclasses.is_dataclass(value) or issubclass(value, tuple):
            return value
        methods = {
            name: self._plain(member, namespace)
            for name, member in vars(value).items()
            if isinstance(member, types.FunctionType)
        }
        return type(value.__name__, (value,), methods)

    def load(self, module):
        """The module's names, with its functions and classes, and those that it imports from
        other modules of kernels, running on this device."""
        if module.__name__ not in self.loaded:
            copy = self.fresh(module)
            namespace = self.loaded[module.__name__] = {**vars(copy), **self._replacements()}
            for name, value in vars(copy).items():
                home = getattr(value, "__module__", None) or ""
                is_code = isinstance(value, types.FunctionType | type)
                if name in self._replacements() or not is_code or home not in sys.modules:
                    continue
                if home == module.__name__:
                    namespace[name] = self._rebound(value, namespace)
                elif home.startswith(self.emulated):
                    namespace[name] = self.load(sys.modules[home])[name]
        return self.loaded[module.__name__]

    def launch(self, body, grid, threads, shared_size):
        """Run body() for every warp of every block; the first exception of any warp is raised."""
        for index in np.ndindex(*grid):
            self._run_block(body, tuple(np.int32(i) for i in index), grid, threads, shared_size)

    def _run_block(self, body, block, grid, threads, shared_size):
        shared = Memory(1024 + shared_size)
        shared.bytes[:] = 0xFF
        warps = threads // 32
        barrier = threading.Barrier(warps)
        failures = []

        def run(warp):
            local = self.local
            local.warp, local.block, local.shared = warp, block, shared
            local.grid = tuple(np.int32(n) for n in grid)
            local.barrier, local.pending = barrier, []
            try:
                with np.errstate(all="ignore"):
                    body()
            except threading.BrokenBarrierError:
                return
            except BaseException as error:
                failures.append(error)
                barrier.abort()

        workers = [threading.Thread(target=run, args=(w,)) for w in range(warps)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]

"""Blocks with mbarriers, named barriers and warpgroup products, for `warp_emulator`.

Conditions that differ between the lanes of a warp are run with the other lanes masked out. What a
product reads is compared when it is waited for with what it was when the product was asked for, so
that a place given back too early is seen. Threads pause at random at barriers.
"""

import ast
import random
import sys
import threading
import time
import types

import numpy as np
from warp_emulator import GROUP, LANES, QUAD, Device, Instructions, Memory, bf16_to_f32, full

# Seconds until a barrier counts as never completed.
PATIENCE = 120


class _Branches(ast.NodeTransformer):
    """Turns `if` into loops that run once, or not, with the lanes that take the branch."""

    def __init__(self):
        self.count = 0

    def visit_If(self, node):
        self.generic_visit(node)
        self.count += 1
        name = f"_test{self.count}"

        def once(taken, body):
            call = ast.Call(
                ast.Name("_taking", ast.Load()),
                [ast.Name(name, ast.Load()), ast.Constant(taken)],
                [],
            )
            return ast.For(ast.Name("_", ast.Store()), call, body, [])

        made = [ast.Assign([ast.Name(name, ast.Store())], node.test), once(True, node.body)]
        if node.orelse:
            made.append(once(False, node.orelse))
        return [ast.fix_missing_locations(ast.copy_location(n, node)) for n in made]


class _Barrier:
    """A barrier with phases: arrivals that the phase still lacks."""

    def __init__(self, count):
        self.count = self.pending = count
        self.phase = 0

    def arrive(self, number):
        assert number <= self.pending
        self.pending -= number
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase + 1


class _Block:
    """What the warps of a block share."""

    def __init__(self, warps):
        self.changed = threading.Condition()
        self.barriers, self.named = {}, {}
        self.all = threading.Barrier(warps)
        self.failures = []

    def arrive(self, barrier, number):
        with self.changed:
            turn = barrier.phase
            barrier.arrive(number)
            self.changed.notify_all()
        return turn

    def wait(self, condition):
        with self.changed:
            done = self.changed.wait_for(lambda: self.failures or condition(), PATIENCE)
            if self.failures:
                raise threading.BrokenBarrierError
            assert done, "a barrier is never completed"

    def fail(self, error):
        with self.changed:
            self.failures.append(error)
            self.all.abort()
            self.changed.notify_all()


class HopperInstructions(Instructions):
    """The functions of `kernels.attention.hopper.ptx` on lanes."""

    def shuffle_xor(self, x, mask):
        x = np.asarray(x)
        return full(x, x.dtype)[LANES ^ mask]

    def fence_async(self):
        pass

    def barrier_init_fence(self):
        pass

    def prefetch_l2(self, address):
        self.device.memory.check(address, 1)

    def _at(self, address):
        return int(np.unique(np.asarray(address)).item())

    def _lanes(self):
        return int(np.count_nonzero(full(self.device.active(), bool)))

    @property
    def block(self):
        return self.device.local.shares

    def barrier_init(self, address, count):
        assert self._lanes() == 1
        self.block.barriers[self._at(address)] = _Barrier(count)

    def barrier_arrive(self, address):
        self.block.arrive(self.block.barriers[self._at(address)], self._lanes())

    def barrier_wait(self, address, parity):
        self.device.pause()
        barrier, parity = self.block.barriers[self._at(address)], self._at(parity)
        self.block.wait(lambda: barrier.phase & 1 != parity)

    def _named(self, number, threads):
        with self.block.changed:
            barrier = self.block.named.setdefault(number, _Barrier(threads // 32))
        assert barrier.count == threads // 32
        return barrier, self.block.arrive(barrier, 1)

    def named_barrier(self, number, threads):
        self.device.pause()
        barrier, turn = self._named(number, threads)
        self.block.wait(lambda: barrier.phase != turn)

    def named_barrier_arrive(self, number, threads):
        self._named(number, threads)

    def shared_store_u16(self, address, a):
        self.shared.store(address, [full(a, np.uint32) & 0xFFFF], np.uint16)

    def shared_load_u32x2(self, address):
        return self.shared.load(address, 2, np.uint32)

    def stmatrix_x4(self, address, *values):
        for i, value in enumerate(values):
            matrix = np.zeros((8, 8), np.uint16)
            for e in range(2):
                matrix[GROUP, 2 * QUAD + e] = (full(value, np.uint32) >> np.uint32(16 * e)) & 0xFFFF
            rows = matrix.view(np.uint32)
            at = np.resize(full(address, np.int32)[8 * i : 8 * i + 8], 32)
            words = [np.resize(rows[:, c], 32) for c in range(4)]
            self.shared.store(at, words, np.uint32, LANES < 8)

    def descriptor_k_major(self, address):
        return self._at(address), None

    def descriptor_mn_major(self, address, block_step):
        return self._at(address), block_step

    def _operand(self, descriptor, offset, rows, first=0):
        """Rows [first, first + rows) of an operand, 16 values each; a row is an M or N index.

        The 128-byte swizzle turns bits 4-6 of an address by its bits 7-9.
        """
        start, block_step = descriptor
        r, k = first + np.arange(rows)[:, None], np.arange(16)[None]
        if block_step is None:
            at = r // 8 * 1024 + r % 8 * 128 + k * 2
        else:
            at = r // 64 * block_step + k // 8 * 1024 + k % 8 * 128 + r % 64 * 2
        at = at + start + offset
        at = at ^ ((at >> 7 & 7) << 4)
        bits = self.shared.bytes.view(np.uint16)[at // 2]
        self.device.local.reads.append((at // 2, bits))
        return bf16_to_f32(bits)

    def _add(self, sums, rows, cols):
        product = (rows.astype(np.float64) @ cols.astype(np.float64).T).astype(np.float32)
        return [
            full(value, np.float32)
            + product[GROUP + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * QUAD + i % 2]
            for i, value in enumerate(sums)
        ]

    def _products(self, sums, b, steps, parts, rows_of):
        sums = [np.float32(0)] * sums if isinstance(sums, int) else list(sums)
        for i, step in enumerate(steps):
            rows, start = rows_of(i), 0
            for size, part_step in parts or ((len(sums), 0),):
                cols = self._operand(b, step + part_step, 2 * size)
                sums[start : start + size] = self._add(sums[start : start + size], rows, cols)
                start += size
        local = self.device.local
        local.groups.append(local.reads)
        local.reads = []
        return sums

    def wgmma_ss(self, sums, a, b, steps, trans_b, parts=()):
        assert (b[1] is not None) == bool(trans_b)
        first = 16 * (self.device.local.warp % 4)

        def rows_of(i):
            return self._operand(a, steps[i][0], 16, first)

        return self._products(sums, b, [step for _, step in steps], parts, rows_of)

    def wgmma_rs(self, sums, a, b, steps, trans_b, parts=()):
        assert (b[1] is not None) == bool(trans_b)

        def rows_of(i):
            rows = np.zeros((16, 16), np.float32)
            for r in range(4):
                for e in range(2):
                    word = full(a[4 * i + r], np.uint32) >> np.uint32(16 * e)
                    at = GROUP + 8 * (r % 2), 2 * QUAD + e + 8 * (r // 2)
                    rows[at] = bf16_to_f32(word & 0xFFFF)
            return rows

        return self._products(sums, b, steps, parts, rows_of)

    def wgmma_wait(self, sums, pending):
        groups, now = self.device.local.groups, self.shared.bytes.view(np.uint16)
        self.device.pause()
        while len(groups) > pending:
            for at, bits in groups.pop(0):
                assert (now[at] == bits).all(), "shared memory changed under a product"
        return list(sums)


class _MaskedMemory(Memory):
    """Stores only for the active lanes of the warp that stores."""

    def __init__(self, size, device):
        super().__init__(size)
        self.device = device

    def store(self, address, values, dtype, mask=True):
        super().store(address, values, dtype, np.asarray(mask) & self.device.active())


class HopperDevice(Device):
    """A GPU whose kernels use the instructions of Hopper; the seed is of the pauses."""

    def __init__(self, size, seed=0):
        super().__init__(size)
        self.memory = _MaskedMemory(size, self)
        self.random = random.Random(seed)

    def active(self):
        return getattr(self.local, "mask", np.bool_(True))

    def pause(self):
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 2e-3)

    def _taking(self, test, taken):
        """One turn with the lanes whose test is `taken`, none if there is none."""
        lanes = np.asarray(test, bool) == taken
        if lanes.all() or not lanes.any():
            return [None] * int(lanes.all())
        return self._masked(lanes)

    def _masked(self, lanes):
        outer = self.active()
        self.local.mask = outer & lanes
        yield None
        self.local.mask = outer

    def _arch(self):
        arch = super()._arch()
        for name in ("griddepcontrol_wait", "griddepcontrol_launch_dependents"):
            setattr(arch, name, lambda: None)
        for name in ("setmaxregister_increase", "setmaxregister_decrease"):
            setattr(arch, name, lambda count: None)
        return arch

    def _replacements(self):
        instructions = HopperInstructions(self)
        names = dict.fromkeys(("ptx", "hopper"), instructions)
        return {**super()._replacements(), **names, "_taking": self._taking}

    def fresh(self, module):
        """The module executed anew, its branches taken lane by lane."""
        with open(module.__file__) as source:
            tree = _Branches().visit(ast.parse(source.read()))
        copy = types.ModuleType(module.__name__)
        copy.__file__, copy._taking = module.__file__, self._taking
        exec(compile(tree, module.__file__, "exec"), vars(copy))
        return copy

    def load(self, module):
        """As the base class; modules that a module imports run on this device, too."""
        known = module.__name__ in self.loaded
        names = super().load(module)
        for name, value in [] if known else list(names.items()):
            if isinstance(value, types.ModuleType) and value.__name__.startswith(self.emulated):
                names[name] = types.SimpleNamespace(**self.load(value))
        return names

    def _rebound(self, value, namespace):
        made = super()._rebound(value, namespace)
        if made is value or isinstance(value, types.FunctionType):
            return made
        # Methods of a base class in another module read that module's names.
        for base in value.__mro__[1:]:
            if base.__module__.startswith(self.emulated):
                home = self.load(sys.modules[base.__module__])[base.__name__]
                for name, member in vars(home).items():
                    if isinstance(member, types.FunctionType) and name not in vars(made):
                        setattr(made, name, member)
        return made

    def _run_block(self, body, block, grid, threads, shared_size):
        shared, shares = _MaskedMemory(1024 + shared_size, self), _Block(threads // 32)
        shared.bytes[:] = 0xFF

        def run(warp):
            local = self.local
            local.warp, local.block, local.shares, local.shared = warp, block, shares, shared
            local.grid = tuple(np.int32(n) for n in grid)
            local.barrier, local.pending = shares.all, []
            local.groups, local.reads, local.mask = [], [], np.bool_(True)
            try:
                with np.errstate(all="ignore"):
                    body()
                assert not local.groups, "a product is never waited for"
            except threading.BrokenBarrierError:
                return
            except BaseException as error:
                shares.fail(error)

        workers = [threading.Thread(target=run, args=(w,)) for w in range(threads // 32)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if shares.failures:
            raise shares.failures[0]
        for barrier in (*shares.barriers.values(), *shares.named.values()):
            assert barrier.pending == barrier.count, "a phase is left open"

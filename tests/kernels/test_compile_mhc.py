"""Hyper-connection and indexer-query kernels: SASS for every architecture, fragments on the CPU.

The products' source runs here on numpy lanes with PTX instructions replaced by their definitions,
so the mapping of columns to registers, chunks and shared slots is checked without a GPU.
"""

import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from test_compile_memory_bound import instructions, tool
from warp_emulator import LANES, Memory, fresh

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import mhc_cases as cases

from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.indexer.query import compile_indexer_query
from sglang_dsv4.kernels.jit import cubin_of
from sglang_dsv4.kernels.mhc import gates, project
from sglang_dsv4.kernels.mhc.boundary import compile_boundary
from sglang_dsv4.kernels.mhc.expand import compile_expand
from sglang_dsv4.kernels.mhc.finish import Finish, compile_finish
from sglang_dsv4.kernels.mhc.mhc import many_shape
from sglang_dsv4.kernels.mhc.project import compile_few, compile_many
from sglang_dsv4.kernels.reference import mhc as reference

ARCHS = ("sm_90a", "sm_100a", "sm_120a")
BF16, F32 = torch.bfloat16, torch.float32
# Name: (builder, static arguments, least 16-byte loads, stores and copies to shared, products).
KERNELS = {
    "few": (compile_few, (4096, 24), 32, 1, 0, 96),
    "few-head": (compile_few, (7168, 4), 16, 1, 0, 32),
    "many": (compile_many, (4096, 24, 8, 1, 2, 2), 0, 0, 55, 96),
    "many-small": (compile_many, (7168, 24, 4, 1, 2, 1), 0, 0, 70, 96),
    "boundary": (compile_boundary, (7168,), 44, 9, 0, 96),
    "finish": (compile_finish, (4096, 24, 128, 1, False, False, False), 8, 5, 0, 0),
    "finish-norm": (compile_finish, (7168, 24, 448, 2, True, True, False), 14, 6, 0, 0),
    "finish-head": (compile_finish, (4096, 4, 128, 1, False, False, False), 8, 1, 0, 0),
    "finish-many": (compile_finish, (7168, 24, 128, 1, False, False, True), 12, 5, 0, 0),
    "post": (compile_expand, (4096,), 5, 4, 0, 0),
    "query": (compile_indexer_query, (BF16, 64), 8, 4, 0, 0),
    "query-f32": (compile_indexer_query, (F32, 8), 12, 8, 0, 0),
}
# Some differ too little from their neighbours to be compiled three times.
SOME_ARCHS = {"few-head": 1, "finish-head": 1, "query-f32": 1}
CASES = [(name, arch) for name in KERNELS for arch in ARCHS[: SOME_ARCHS.get(name, 3)]]


def stack_bytes(cubin, folder):
    """Bytes of local memory of each kernel in a cubin."""
    path = folder / "usage.cubin"
    path.write_bytes(cubin)
    command = [tool("cuobjdump"), "-res-usage", str(path)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(n) for n in re.findall(r"STACK:(\d+)", shown.stdout + shown.stderr)]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_compiles_and_is_what_it_claims(name, arch, tmp_path):
    builder, static, loads, stores, copies, products = KERNELS[name]
    cubin = cubin_of(builder, arch, *static)
    found = instructions(cubin, tmp_path)
    assert not [op for op in found if op.startswith(("LDL", "STL"))]
    assert max(stack_bytes(cubin, tmp_path)) == 0
    assert not [op for op in found if re.match(r"D(ADD|MUL|FMA|SETP)|F2F\.\w*64", op)]
    wide = [op for op in found if ".128" in op]
    assert sum(op.startswith("LDG.") for op in wide) >= loads, wide
    assert sum(op.startswith("STG") for op in wide) >= stores, wide
    assert sum(op.startswith("LDGSTS") for op in wide) == copies, wide
    assert sum(op.startswith("HMMA.1688.F32.TF32") for op in found) == products
    assert not [op for op in found if re.match(r"(LDG|STG)\.E\.U?[SU]?(8|16)\b", op)]


@pytest.mark.parametrize(("name", "early"), [("few", 24), ("finish", 4), ("boundary", 24)])
def test_what_older_kernels_wrote_is_loaded_before_the_wait(name, early, tmp_path):
    builder, static, *_ = KERNELS[name]
    found = instructions(cubin_of(builder, "sm_90a", *static), tmp_path)
    before = found[: found.index("ACQBULK")]
    assert sum(op.startswith("LDG.E.128") for op in before) == early
    if name != "finish":
        # Of the streams nothing is multiplied before all of it is asked for.
        products = [op.startswith("HMMA") for op in found].index(True)
        assert not [op for op in found[products:] if op.startswith("LDG")]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_ring_fits(arch):
    shape = many_shape(arch)
    kernel = project.ProjectMany(4096, 24, shape.warps, shape.row_tiles, shape.ahead, 1)
    # Of an SM's shared memory, the system keeps 1 KB a block.
    per_block = shape.ahead * kernel.slot_bytes + 1024
    assert shape.resident * per_block <= SHARED_BYTES[arch] + 1024
    assert shape.ahead >= 2


@pytest.mark.parametrize("hidden", [32, 96, 256, 4096, 7168, 8192, 16384])
@pytest.mark.parametrize("rows", [4, 24])
def test_finish_covers_the_width_and_the_groups(rows, hidden):
    kernel = Finish(hidden, rows, 128, 1, False, False, False)
    assert kernel.slices * kernel.threads * 8 >= hidden
    assert kernel.threads >= kernel.sets * kernel.quads and kernel.threads <= 1024
    assert kernel.sets * 4 >= kernel.groups


class Word(np.ndarray):
    """32 lanes of uint32 that can be reinterpreted as DSL values can."""

    def bitcast(self, kind):
        return np.asarray(self).view(kind)


def words(x):
    """A lane vector as Word."""
    return np.ascontiguousarray(x).view(np.uint32).view(Word)


def mma_tf32(a, b, c):
    """The instruction's definition: 13 low bits of the operands are cut off, sums are float32."""
    cut = [(np.asarray(x) & np.uint32(0xFFFFE000)).view(np.float32).astype(float) for x in (*a, *b)]
    group, quad = np.arange(32) // 4, np.arange(32) % 4
    rows, columns = np.zeros((16, 8)), np.zeros((8, 8))
    for r in range(4):
        rows[group + 8 * (r % 2), quad + 4 * (r // 2)] = cut[r]
    for r in range(2):
        columns[quad + 4 * r, group] = cut[4 + r]
    product = rows @ columns
    return [
        (product[group + 8 * (r // 2), 2 * quad + r % 2] + c[r]).astype(np.float32)
        for r in range(4)
    ]


class Registers(list):
    """What a kernel makes with make_rmem_tensor."""

    def fill(self, value):
        self[:] = [np.full(32, value, np.float32) for _ in self]


class Lanes:
    """Warps of one block: memory and the functions that the products' source calls."""

    def __init__(self, streams, fn):
        self.memory, self.shared = Memory(streams.nbytes + fn.nbytes + 8192), Memory(1 << 18)
        self.tensors = {}
        for name, array in (("streams", streams), ("fn", fn)):
            self.tensors[name] = types.SimpleNamespace(
                at=self.memory.place(array), item=array.itemsize, stride=array.shape[-1] * 4
            )
        self.tensors["streams"].count = len(streams)
        self.pending = []
        source, parts = fresh(project), fresh(gates)
        math = types.SimpleNamespace(
            word_of=words,
            float_of=lambda w: np.asarray(w).view("f4"),
            float_at=lambda registers, i: registers[i],
            floats_of=lambda registers, start, n: list(registers[start : start + n]),
            lane_sum=lambda x, n: np.repeat(x.reshape(-1, n).sum(1), n).astype(np.float32),
            select=np.where,
            rows_in=lambda tensor: tensor.count,
            stride_of=lambda tensor: tensor.stride,
            address_of=lambda tensor, at: tensor.at + np.asarray(at) * tensor.item,
            load_words_if=lambda wanted, at, empty: list(self.load(wanted, at)),
        )
        parts.__dict__.update(cm=math, Uint32=np.uint32)
        cute = types.SimpleNamespace(
            arch=types.SimpleNamespace(cp_async_commit_group=lambda: None),
            make_rmem_tensor=lambda layout, kind: Registers([None] * layout),
            make_layout=lambda n: n,
        )
        self.source = source
        source.__dict__.update(
            cm=math,
            Int32=np.int32,
            Int64=np.int64,
            Uint32=np.uint32,
            Float32=np.float32,
            mma_tf32=mma_tf32,
            copy_async_16=self.copy,
            global_load_f32x4=lambda at: self.memory.load(at, 4, np.float32),
            shared_load_f32x4=lambda at: self.shared.load(at, 4, np.float32),
            cute=cute,
            cutlass=types.SimpleNamespace(range=lambda n, unroll: range(n)),
            range_constexpr=range,
            bf16_words=lambda word: [words(x) for x in parts.bf16_words(word)],
            tf32_parts=parts.tf32_parts,
        )
        self.tf32_parts = parts.tf32_parts

    def load(self, wanted, at):
        found = self.memory.load(np.where(wanted, at, 256), 4, np.uint32)
        return [words(np.where(wanted, x, np.uint32(0))) for x in found]

    def copy(self, shared, address, size):
        """A size of 0 gives zeros."""
        found = self.memory.load(np.where(size == 0, 256, address), 4, np.uint32)
        self.shared.store(shared, [np.where(size == 0, 0, x) for x in found], np.uint32)


def inputs(tokens, hidden):
    """(streams as bits [T, 4, hidden], their values, fn)."""
    rng = np.random.default_rng(0)
    fn = rng.standard_normal((24, 4 * hidden)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((tokens, 4, hidden)).astype(np.float32)).bfloat16()
    return x.view(torch.int16).numpy().view(np.uint16), x.double().numpy(), fn


def assert_sums(found, values, fn, chunk, first):
    """A chunk's sums of 16 tokens: products, then sums of squares, of lanes as m16n8k8 has them."""
    columns = np.arange(chunk * 32, chunk * 32 + 32)
    rows = np.minimum(np.arange(first, first + 16), len(values) - 1)
    part = values[rows][:, :, columns]
    weights = fn.astype(np.float64).reshape(24, 4, -1)[:, :, columns]
    products = np.einsum("tic,nic->tn", part, weights)
    group, quad = LANES // 4, LANES % 4
    for tile in range(3):
        for r in range(4):
            wanted = products[group + 8 * (r // 2), 8 * tile + 2 * quad + r % 2]
            # About 60 additions in float32 of sums of 128 products.
            assert np.abs(found[4 * tile + r] - wanted).max() < 60 * 2.0**-24 * 60
    for half in range(2):
        wanted = np.square(part[group + 8 * half]).sum((1, 2))
        np.testing.assert_allclose(found[12 + half], wanted, rtol=2.0**-18)


def test_few_multiply_a_chunk():
    hidden, tokens, chunk, first = 256, 21, 5, 16
    bits, values, fn = inputs(tokens, hidden)
    lanes = Lanes(bits, fn)
    kernel = lanes.source.ProjectFew(hidden, 24)
    starts = kernel.row_addresses(lanes.tensors["streams"], np.int32(first), LANES)
    loaded = kernel.load(lanes.tensors["streams"], starts, np.int32(chunk), np.full(32, True))
    pieces = kernel.load_fn(lanes.tensors["fn"], np.int32(chunk), LANES)
    sums, squares = kernel.fresh_sums()
    for i in range(4):
        for half in range(2):
            kernel.add_half(loaded[i], half, kernel.split(pieces[i][half]), sums, squares)
    quads = [np.repeat(square.reshape(8, 4).sum(1), 4) for square in squares]
    assert_sums([x for tile in sums for x in tile] + quads, values, fn, chunk, first)


@pytest.mark.parametrize(("warps", "row_tiles"), [(4, 1), (8, 1), (4, 2)])
def test_many_multiply_a_chunk_from_the_ring(warps, row_tiles):
    hidden, tokens, chunk = 160, 16 * row_tiles * warps - 5, 4
    bits, values, fn = inputs(tokens, hidden)
    lanes = Lanes(bits, fn)
    kernel = lanes.source.ProjectMany(hidden, 24, warps, row_tiles, 2, 1)
    ring = lanes.shared.place(np.full(kernel.slot_bytes, 0xFF, np.uint8))
    mine = []
    for warp in range(warps):
        source, place = kernel.source(lanes.tensors["fn"], warp * 32 + LANES)
        kernel.fetch(source, ring + place, np.int32(chunk), np.int32(5))
        rows = []
        for m in range(row_tiles):
            first = np.int32((warp * row_tiles + m) * 16)
            rows += kernel.row_addresses(lanes.tensors["streams"], first, LANES)
        mine.append(kernel.own_slot(ring, warp, LANES))
        kernel.fetch_streams(rows, mine[-1], np.int32(chunk), np.int32(5))
    reads = [ring + read for read in kernel.reads(LANES)]
    chunk_sums = lanes.source.ProjectMany.chunk_sums.__wrapped__
    for warp in range(warps):
        found = chunk_sums(kernel, reads, mine[warp])
        for m in range(row_tiles):
            part = found[14 * m : 14 * m + 14]
            assert_sums(part, values, fn, chunk, (warp * row_tiles + m) * 16)


def test_a_chunk_that_does_not_exist_adds_zeros():
    bits, _, fn = inputs(16, 160)
    lanes = Lanes(bits, fn)
    kernel = lanes.source.ProjectMany(160, 24, 4, 1, 2, 1)
    ring = lanes.shared.place(np.full(kernel.slot_bytes, 0xFF, np.uint8))
    for warp in range(4):
        source, place = kernel.source(lanes.tensors["fn"], warp * 32 + LANES)
        kernel.fetch(source, ring + place, np.int32(5), np.int32(5))
    rows = kernel.row_addresses(lanes.tensors["streams"], np.int32(0), LANES)
    mine = kernel.own_slot(ring, 0, LANES)
    kernel.fetch_streams(rows, mine, np.int32(5), np.int32(5))
    chunk_sums = lanes.source.ProjectMany.chunk_sums.__wrapped__
    found = chunk_sums(kernel, [ring + read for read in kernel.reads(LANES)], mine)
    assert not np.any(np.stack(found))


def test_two_parts_hold_a_float_to_21_bits():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    # Exponents whose second part is still normal.
    bits = (bits & 0x807FFFFF) | (rng.integers(40, 254, 4096, dtype=np.uint32) << 23)
    value = bits.view(np.float32)
    parts = Lanes(np.zeros((1, 4, 32), np.uint16), np.zeros((1, 128), np.float32)).tf32_parts(value)
    kept = sum((np.asarray(p) & np.uint32(0xFFFFE000)).view("f4").astype(float) for p in parts)
    lost = (value.astype(float) - kept) / value
    assert (lost >= 0).all() and lost.max() < 2.0**-21


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 32), (1, 256), (40, 256), (13, 4096)])
def test_the_checks_accept_the_reference(tokens, hidden):
    torch.manual_seed(tokens)
    streams = cases.random_streams(tokens, hidden, "cpu")
    cases.check_pre(reference.hc_pre, streams, cases.parameters(hidden, 24, "cpu"))
    cases.check_head(reference.hc_head, streams, cases.parameters(hidden, 4, "cpu"))
    output = torch.randn(tokens, hidden).bfloat16()
    cases.check_post(reference.hc_post, output, cases.strided(streams))
    weight = (torch.rand(hidden) + 0.5).bfloat16()
    cases.check_norm(reference.hc_pre, streams, cases.parameters(hidden, 24, "cpu"), weight)
    operations = (reference.hc_post, reference.hc_pre, reference.hc_post_pre)
    cases.check_post_pre(operations, output, streams, cases.parameters(hidden, 24, "cpu"), weight)


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 11])
def test_the_checks_refuse_a_rounded_fn(bits):
    torch.manual_seed(0)

    def coarse(streams, fn, *rest):
        mantissa, exponent = torch.frexp(fn)
        rounded = torch.ldexp((mantissa * 2.0**bits).round() * 2.0**-bits, exponent)
        return reference.hc_pre(streams, rounded, *rest)

    streams = cases.random_streams(40, 256, "cpu")
    with pytest.raises(AssertionError, match="of the bound"):
        cases.check_pre(coarse, streams, cases.parameters(256, 24, "cpu"))


@torch.no_grad()
def test_the_checks_refuse_a_norm_of_unrounded_values_and_another_order():
    torch.manual_seed(0)
    p, weight = cases.parameters(256, 24, "cpu"), torch.ones(256).bfloat16()
    streams = torch.randn(40, 4, 256).bfloat16()

    def unrounded(streams, *args):
        found = reference.hc_pre(streams, *args[:6])
        if len(args) == 6:
            return found
        wide = reference.hc_pre(streams.float(), *args)[0]
        return wide.bfloat16(), *found[1:]

    with pytest.raises(AssertionError, match="of the bound"):
        cases.check_norm(unrounded, streams, p, weight)

    def swapped(output, streams, post, comb, *args):
        return reference.hc_post_pre(output, streams, post, comb.mT, *args)

    operations = (reference.hc_post, reference.hc_pre, swapped)
    with pytest.raises(AssertionError, match="differs"):
        cases.check_post_pre(operations, streams[:, 0], streams, p, weight)


@torch.no_grad()
def test_comb_moves_by_at_most_four_times_its_logits():
    torch.manual_seed(0)
    p = cases.parameters(256, 24, "cpu")
    logits, _ = cases.exact_logits(cases.random_streams(200, 256, "cpu"), p)
    logits = logits[:, 8:].unflatten(1, (4, 4))
    plain = cases.sinkhorn(logits, cases.ITERS, cases.EPS)
    for _ in range(50):
        step = 1e-6 * torch.randint(-1, 2, logits.shape).double()
        moved = cases.sinkhorn(logits + step, cases.ITERS, cases.EPS)
        assert ((moved / plain - 1).abs().amax() / 1e-6) < 4

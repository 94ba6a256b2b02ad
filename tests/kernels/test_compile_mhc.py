"""Hyper-connection and indexer-query kernels: SASS for every architecture, fragments on the CPU.

The products' source runs here on numpy lanes with PTX instructions replaced by their definitions,
so the mapping of columns to registers, stages and shared slots is checked without a GPU.
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
from warp_emulator import Memory, fresh

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import mhc_cases as cases

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.indexer.query import compile_indexer_query
from sglang_dsv4.kernels.jit import cubin_of
from sglang_dsv4.kernels.mhc import collapse, gates
from sglang_dsv4.kernels.mhc.collapse import Shape, compile_collapse, shape_of
from sglang_dsv4.kernels.mhc.expand import compile_expand
from sglang_dsv4.kernels.reference import mhc as reference

ARCHS = ("sm_90a", "sm_100a", "sm_120a")
BF16, F32 = torch.bfloat16, torch.float32
# Name: (builder, static arguments, least 16-byte loads, stores and copies to shared, products).
KERNELS = {
    "pre-few": (compile_collapse, (shape_of(4096), 24, 1, True), 8, 2, 24, 96),
    "pre-many": (compile_collapse, (shape_of(4096), 24, 2, False), 16, 4, 24, 192),
    "pre-pro": (compile_collapse, (shape_of(7168), 24, 1, True), 16, 4, 48, 192),
    "pre-tiny": (compile_collapse, (shape_of(256), 24, 1, True), 8, 2, 24, 96),
    "head": (compile_collapse, (shape_of(4096), 4, 1, True), 8, 2, 4, 32),
    "post": (compile_expand, (4096,), 5, 4, 0, 0),
    "query": (compile_indexer_query, (BF16, 64), 8, 4, 0, 0),
    "query-f32": (compile_indexer_query, (F32, 8), 12, 8, 0, 0),
}
# Architectures of a kernel where they are not all: two row tiles do not fit in sm_120a's shared
# memory, and some differ too little from their neighbours to be compiled three times.
SOME_ARCHS = {"pre-many": 2, "pre-tiny": 1, "head": 1, "query-f32": 1}
CASES = [(name, arch) for name in KERNELS for arch in ARCHS[: SOME_ARCHS.get(name, 3)]]
# Width 7168 holds 64 stream values of a thread's 128 registers; a few addresses and values wait in
# local memory, once for each cluster.
STACK_BYTES = {"pre-pro": 192}


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
    if name not in STACK_BYTES:
        assert not [op for op in found if op.startswith(("LDL", "STL"))]
    assert max(stack_bytes(cubin, tmp_path)) <= STACK_BYTES.get(name, 0)
    assert not [op for op in found if re.match(r"D(ADD|MUL|FMA|SETP)|F2F\.\w*64", op)]
    wide = [op for op in found if ".128" in op]
    assert sum(op.startswith("LDG.") for op in wide) >= loads, wide
    assert sum(op.startswith("STG") for op in wide) >= stores, wide
    assert sum(op.startswith("LDGSTS") for op in wide) == copies, wide
    assert sum(op.startswith("HMMA.1688.F32.TF32") for op in found) == products
    assert not [op for op in found if re.match(r"(LDG|STG)\.E\.U?[SU]?(8|16)\b", op)]


@pytest.mark.parametrize("hidden", [32, 96, 256, 1024, 2048, 4096, 5120, 7168, 8192])
def test_a_shape_covers_the_width(hidden):
    shape = shape_of(hidden)
    assert shape.blocks * shape.warps * shape.chunks * 32 == hidden
    assert shape.warps <= 16


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("hidden", [256, 4096, 5120, 7168, 8192])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_the_ring_holds_a_step(tokens, hidden, arch):
    shape = shape_of(hidden)
    row_tiles = shape.row_tiles(tokens, arch)
    kernel = collapse.Collapse(shape, 24, row_tiles, True, SHARED_BYTES[arch])
    # All column tiles of one stream's 32 columns are waited for together.
    assert kernel.ahead >= kernel.tiles == 3
    assert row_tiles == 1 or tokens > 256


@pytest.mark.parametrize("hidden", [40, 8224, 11 * 1024])
def test_other_widths_are_refused(hidden):
    with pytest.raises(UnsupportedError, match=str(hidden)):
        shape_of(hidden)


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


class Lanes:
    """One warp of one block: its memory and the functions that the products' source calls."""

    def __init__(self, shape, row_tiles, fn, shared_bytes=232448):
        self.memory, self.shared = Memory(fn.nbytes + 4096), Memory(1 << 18)
        fn_address = self.memory.place(fn)
        self.ring = self.shared.place(np.full(1 << 17, 0xFF, np.uint8))
        self.pending = []
        source, parts = fresh(collapse), fresh(gates)
        math = types.SimpleNamespace(word_of=words, float_of=lambda w: np.asarray(w).view("f4"))
        parts.__dict__.update(cm=math, Uint32=np.uint32)
        arch = types.SimpleNamespace(
            cp_async_commit_group=lambda: None,
            cp_async_wait_group=self.wait,
            sync_warp=lambda: None,
        )
        source.__dict__.update(
            cm=math,
            Int32=np.int32,
            Int64=np.int64,
            Float32=np.float32,
            address=lambda tensor: fn_address,
            mma_tf32=mma_tf32,
            copy_async_16=self.copy,
            shared_load_f32x4=lambda at: self.shared.load(at, 4, np.float32),
            cute=types.SimpleNamespace(arch=arch),
            bf16_words=lambda word: [words(x) for x in parts.bf16_words(word)],
            tf32_parts=parts.tf32_parts,
        )
        self.tf32_parts = parts.tf32_parts
        self.kernel = source.Collapse(shape, 24, row_tiles, True, shared_bytes)

    def copy(self, shared, address, size):
        """Not visible before the group is waited for."""
        self.pending.append((shared, self.memory.load(address, 4, np.uint32)))

    def wait(self, allowed):
        """Every stage is one group of two copies."""
        while len(self.pending) > 2 * allowed:
            shared, values = self.pending.pop(0)
            self.shared.store(shared, values, np.uint32)


@pytest.mark.parametrize(
    ("shape", "row_tiles", "slots"),
    [(Shape(512, 2, 2), 2, 5), (Shape(512, 2, 2), 1, 3), (Shape(256, 8, 1), 1, 12)],
)
def test_fragments_give_the_products_of_a_warp(shape, row_tiles, slots):
    rng = np.random.default_rng(0)
    hidden, rank, warp = shape.hidden, shape.blocks - 1, shape.warps - 1
    fn = rng.standard_normal((24, 4 * hidden)).astype(np.float32)
    x = rng.standard_normal((16 * row_tiles, 4, hidden)).astype(np.float32)
    x = torch.from_numpy(x).bfloat16()
    bits = x.view(torch.int16).numpy().view(np.uint16)
    lanes = Lanes(shape, row_tiles, fn)
    lanes.kernel.ahead = slots
    lane = np.arange(32)
    first = rank * shape.columns + warp * shape.chunks * 32
    column = first + lane % 4 * 8
    values = []
    for half in range(2 * row_tiles):
        at = column[:, None] + np.arange(8)
        rows = [bits[lane // 4 + 8 * half, i] for i in range(4)]
        chunks = []
        for chunk in range(shape.chunks):
            taken = [np.take_along_axis(row, at + 32 * chunk, 1) for row in rows]
            chunks.append([[words(t[:, k : k + 2]).ravel() for k in (0, 2, 4, 6)] for t in taken])
        values.append(chunks)
    source, place = lanes.kernel.copies(None, lanes.ring, rank, warp, lane)
    for number in range(lanes.kernel.ahead):
        lanes.kernel.fetch(number, source, place)
    reads = lanes.kernel.reads(lanes.ring, warp, lane)
    sums, squares = lanes.kernel.multiply(values, source, place, reads)
    owned = np.arange(first, first + shape.chunks * 32)
    part = x.double().numpy()[:, :, owned]
    products = np.einsum("tic,nic->tn", part, fn.astype(np.float64).reshape(24, 4, -1)[:, :, owned])
    for m in range(row_tiles):
        for tile in range(3):
            for r in range(4):
                row, column = lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2
                wanted = products[16 * m + row, 8 * tile + column]
                # About 100 additions in float32 of sums of at most 256 products.
                assert np.abs(sums[m][tile][r] - wanted).max() < 100 * 2.0**-24 * 60
    for half in range(2 * row_tiles):
        quads = squares[half].reshape(8, 4).sum(1)
        wanted = np.square(part[8 * half : 8 * half + 8]).sum((1, 2))
        np.testing.assert_allclose(quads, wanted, rtol=2.0**-18)


def test_two_parts_hold_a_float_to_21_bits():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    # Exponents whose second part is still normal.
    bits = (bits & 0x807FFFFF) | (rng.integers(40, 254, 4096, dtype=np.uint32) << 23)
    value = bits.view(np.float32)
    parts = Lanes(Shape(256, 8, 1), 1, np.zeros((1, 1), np.float32)).tf32_parts(value)
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

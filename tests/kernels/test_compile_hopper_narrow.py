"""The narrow Hopper kernel compiles without a GPU, to the instructions that it claims."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.kernels.attention.hopper.narrow import (
    BLOCKS_PER_SM,
    HEAD_TILES,
    NarrowShape,
    compile_narrow,
    shared_bytes,
)
from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.jit import cubin_of

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# An SM of sm_90 has 228 KB of shared memory, of which each block costs 1 KB more than it asks for.
SM_SHARED, RESERVED = 228 * 1024, 1024


def disassemble(shape, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin_of(compile_narrow, "sm_90a", shape))
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("head_tile", HEAD_TILES)
def test_instructions(head_tile, rotated, tmp_path):
    sass = disassemble(NarrowShape(head_tile, ListShape(64, 2, 8, True, rotated)), tmp_path)
    # 512 dims by 16 a product for the scores; 8 blocks of 64 dims x 64 keys by 16 for the values.
    products = re.findall(rf"HGMMA\.64x{head_tile}x16\.F32\.BF16 R\d+, (R\d+|gdesc)", sass)
    assert len(products) == 64
    assert sum(first == "gdesc" for first in products) == 32
    # Eight groups of products for the scores and one or two for the values, none waited for alone:
    # ptxas puts a wait behind each product where it cannot tell their registers apart.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) <= 10
    # The tile is stored as it lies in registers, a quarter of an atom at a time.
    assert len(re.findall(r"STSM\.16\.M88\.4", sass)) == 32
    # Of a thread's two keys: scales, NoPE words, RoPE; for the first tile and inside the loop.
    assert len(re.findall(r"LDG\.E\.NA\.128", sass)) == 2 * 2 * (2 + 3 + 2)
    assert len(re.findall(r"LDG\.E\.NA\.64", sass)) == 2 * 2
    assert len(re.findall(r"HMUL2\.BF16", sass)) >= 2 * 14 * 4
    assert len(re.findall(r"BAR\.RED\.OR", sass)) == 1
    assert not re.search(r"\b(LDL|STL)\b", sass)


@pytest.mark.parametrize("slot_bytes", [4, 8])
def test_without_lengths(slot_bytes):
    assert cubin_of(compile_narrow, "sm_90a", NarrowShape(16, ListShape(64, 64, slot_bytes)))


@pytest.mark.parametrize("head_tile", HEAD_TILES)
def test_blocks_share_an_sm(head_tile):
    assert BLOCKS_PER_SM[head_tile] * (shared_bytes(head_tile) + RESERVED) <= SM_SHARED

"""Sparse attention compiles without a GPU, to the instructions that it claims."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.envs import ATTENTION_KERNEL
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.attention.plan import (
    IMPLEMENTATIONS,
    Kernel,
    kernels_for,
    plan_for,
    plans,
)
from sglang_dsv4.kernels.attention.portable import Shape, compile_sparse_attention, shared_bytes
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import cubin_of

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# Loads and stores of registers in local memory, by tile of heads, as ptxas 13.4 leaves them where
# two blocks share an SM (128 registers) or the tile is large. An SM of sm_120a holds one block.
SPILLS_ALLOWED = {8: 19, 16: 33, 32: 17}


def disassemble(arch, head_tile, rotated, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(
        cubin_of(
            compile_sparse_attention, arch, Shape(head_tile, ListShape(64, 2, 8, True, rotated))
        )
    )
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("head_tile", [8, 16, 32])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_instructions(arch, head_tile, rotated, tmp_path):
    if shared_bytes(head_tile) + 1024 > SHARED_BYTES[arch]:
        pytest.skip(f"{arch} has too little shared memory for {head_tile} heads")
    sass = disassemble(arch, head_tile, rotated, tmp_path)
    # One product of each kind for every dim of the tile: QK has 8 steps for 4 keys groups and
    # rows of 16 heads (RoPE's four are a second branch), PV 4 x 4 for blocks of 8 heads.
    rows, blocks = max(1, head_tile // 16), head_tile // 8
    assert len(re.findall(r"HMMA\.16816\.F32\.BF16", sass)) == 4 * 12 * rows + 16 * blocks
    assert len(re.findall(r"LDSM\.16\.MT88\.4", sass)) == 16
    assert "LDGSTS.E.BYPASS" in sass and re.search(r"STS\.128", sass)
    assert re.search(r"HMUL2\.BF16", sass)
    spills = len(re.findall(r"\b(LDL|STL)\b", sass))
    assert spills <= (0 if arch == "sm_120a" else SPILLS_ALLOWED[head_tile])


def test_head_tiles_fit_the_device():
    tiles = IMPLEMENTATIONS[Kernel.PORTABLE].head_tiles
    assert tiles(1, "sm_90a") == [8] and tiles(9, "sm_90a") == [8, 16]
    assert tiles(128, "sm_90a") == [8, 16, 32] and tiles(128, "sm_120a") == [8, 16]


def test_kernels_of_an_architecture(monkeypatch):
    assert kernels_for(16, "sm_100a") == [Kernel.PORTABLE]
    assert kernels_for(16, "sm_90a") == [Kernel.PORTABLE, Kernel.NARROW]
    assert kernels_for(64, "sm_90a") == [Kernel.PORTABLE, Kernel.WIDE, Kernel.NARROW]
    monkeypatch.setenv(ATTENTION_KERNEL.name, "wide")
    assert kernels_for(64, "sm_90a") == [Kernel.WIDE]
    with pytest.raises(UnsupportedError, match="16 heads on sm_90a"):
        kernels_for(16, "sm_90a")
    with pytest.raises(UnsupportedError, match="wanted portable"):
        plan_for(1, 64, 10, 148, "sm_100a")


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("tiles", [1, 2, 10, 18])
def test_plan_leaves_no_split_empty(tokens, tiles, heads):
    plan = plan_for(tokens, heads, tiles, 132, "sm_90a")
    share = -(-tiles // plan.splits)
    assert (plan.splits - 1) * share < tiles
    assert tokens < 4096 or plan.splits == 1
    assert plan in plans(heads, tiles, "sm_90a", tuple(kernels_for(heads, "sm_90a")))

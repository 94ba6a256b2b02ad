"""Sparse attention compiles without a GPU, to the instructions that it claims."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.kernels.attention.portable import Shape, compile_sparse_attention, shared_bytes
from sglang_dsv4.kernels.attention.sparse_attention import head_tile_for, plan_for
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import cubin_of

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# The registers that ptxas may keep in local memory: outside the products, a few per tile.
SPILLS_ALLOWED = 32


def disassemble(arch, head_tile, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin_of(compile_sparse_attention, arch, Shape(head_tile, 64, 2, 8)))
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("head_tile", [8, 16, 32])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_instructions(arch, head_tile, tmp_path):
    if shared_bytes(head_tile) + 1024 > SHARED_BYTES[arch]:
        pytest.skip(f"{arch} has too little shared memory for {head_tile} heads")
    sass = disassemble(arch, head_tile, tmp_path)
    # One product of each kind for every dim of the tile: QK has 8 steps for 4 keys groups and
    # rows of 16 heads (RoPE's four are a second branch), PV 4 x 4 for blocks of 8 heads.
    rows, blocks = max(1, head_tile // 16), head_tile // 8
    assert len(re.findall(r"HMMA\.16816\.F32\.BF16", sass)) == 4 * 12 * rows + 16 * blocks
    assert len(re.findall(r"LDSM\.16\.MT88\.4", sass)) == 16
    assert "LDGSTS.E.BYPASS" in sass and re.search(r"STS\.128", sass)
    assert re.search(r"HMUL2\.BF16", sass)
    assert len(re.findall(r"\b(LDL|STL)\b", sass)) <= SPILLS_ALLOWED


def test_head_tile_fits_the_device():
    assert head_tile_for(1, "sm_90a") == 8 and head_tile_for(9, "sm_90a") == 16
    assert head_tile_for(128, "sm_90a") == 32 and head_tile_for(128, "sm_120a") == 16


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("tiles", [1, 2, 10, 18])
def test_plan_leaves_no_split_empty(tokens, tiles):
    plan = plan_for(tokens, 16, tiles, 132, "sm_90a")
    share = -(-tiles // plan.splits)
    assert (plan.splits - 1) * share < tiles
    assert tokens < 256 or plan.splits == 1

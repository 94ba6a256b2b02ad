"""The solo kernel compiles without a GPU, to the instructions that it claims."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.attention.solo import (
    BLOCKS_PER_SM,
    SoloShape,
    compile_solo,
    shared_bytes,
)
from sglang_dsv4.kernels.jit import cubin_of

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# Loads and stores of registers in local memory inside the loop, by bytes of a slot and whether the
# output is turned back, as ptxas 13.4 leaves them beside 128 accumulators: with 4 one or two values
# that the loop does not change are read back.
SPILLS_ALLOWED = {(4, False): (1, 0), (4, True): (2, 0), (8, False): (11, 2), (8, True): (11, 2)}
# An SM of sm_90 has 228 KB of shared memory, of which each block costs 1 KB more than it asks for.
SM_SHARED, RESERVED = 228 * 1024, 1024


def disassemble(slot_bytes, lengths, rotated, folder):
    path = folder / "kernel.cubin"
    shape = SoloShape(ListShape(64, 64, slot_bytes, lengths, rotated))
    path.write_bytes(cubin_of(compile_solo, "sm_90a", shape))
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def hot_loop(sass):
    """The lines from the loop's first label to the branch back after its last product."""
    lines = sass.splitlines()
    products = [i for i, line in enumerate(lines) if "HMMA.16816.F32.BF16" in line]
    labels = {
        line[: line.index(":")]: i for i, line in enumerate(lines) if line.startswith(".L_x_")
    }
    for end in range(products[-1], len(lines)):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", lines[end])
        if jump and labels[jump[1]] < products[0]:
            return lines[labels[jump[1]] : end]
    raise AssertionError("no loop around the products")


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("slot_bytes", "lengths"), [(4, True), (8, False), (8, True)])
def test_instructions(slot_bytes, lengths, rotated, tmp_path):
    sass = disassemble(slot_bytes, lengths, rotated, tmp_path)
    loop = "\n".join(hot_loop(sass))
    # 512 dims by 16 for the scores of 16 keys; 32 tiles of 16 dims for the values.
    assert len(re.findall(r"HMMA\.16816\.F32\.BF16", loop)) == 32 + 32
    # Keys are stored as they lie in registers and read back across; Q is read two steps at once.
    assert len(re.findall(r"STSM\.16\.M88\.4", loop)) == 32
    assert len(re.findall(r"LDSM\.16\.MT88\.4", loop)) == 32
    assert len(re.findall(r"LDSM\.16\.M88\.4", loop)) == 16 + 1
    # Of a thread's two keys: NoPE words and RoPE, all 16 bytes but for the last 64 dims.
    assert len(re.findall(r"LDG\.E\.NA\.128", loop)) == 2 * (3 + 2)
    assert len(re.findall(r"LDG\.E\.NA\.64", loop)) == 2
    # Warps do not wait for each other.
    assert not re.search(r"\bBAR\b|MEMBAR", loop)
    spilled = len(re.findall(r"\bLDL\b", loop)), len(re.findall(r"\bSTL\b", loop))
    allowed = SPILLS_ALLOWED[slot_bytes, rotated]
    assert all(n <= most for n, most in zip(spilled, allowed, strict=True))


def test_blocks_share_an_sm():
    assert BLOCKS_PER_SM * (shared_bytes() + RESERVED) <= SM_SHARED

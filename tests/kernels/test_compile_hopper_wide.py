"""The wide Hopper kernel compiles without a GPU, to the instructions and registers it claims."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dsv4.kernels.attention.hopper.wide import REGISTERS, WideAttention, compile_wide
from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import cubin_of

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))


triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def disassemble(cubin, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("slot_bytes, has_lengths", [(8, False), (4, True)])
def test_instructions(slot_bytes, has_lengths, tmp_path):
    lists = ListShape(64, 2, slot_bytes, has_lengths)
    sass = disassemble(cubin_of(compile_wide, "sm_90a", lists), tmp_path)
    # QK: 512 dims in steps of 16; PV: 64 keys in steps of 16 for each half of the output.
    assert len(re.findall(r"HGMMA\.64x64x16\.F32\.BF16", sass)) == 32
    assert len(re.findall(r"HGMMA\.64x256x16\.F32\.BF16", sass)) == 8
    # One fence before each of the four groups: ptxas adds more when it serialises products.
    assert len(re.findall(r"WARPGROUP\.ARRIVE", sass)) == 4
    assert not re.findall(r"\b(LDL|STL)\b", sass)
    # Records: 7 NoPE, 2 scale and 4 RoPE loads, ahead of the loop and in it; Q: 16 by each group.
    assert len(re.findall(r"LDG\.E\.128\.CONSTANT", sass)) == 2 * 13 + 2 * 16
    assert len(re.findall(r"STS\.128", sass)) == 32 + 2 * 16
    assert len(re.findall(r"HMUL2\.BF16|HFMA2\.MMA\.BF16", sass)) >= 4 * 28
    limits = {int(n, 16) for n in re.findall(r"USETMAXREG\S* (?:UP0, )?(0x\w+)", sass)}
    assert limits == set(REGISTERS)


def test_registers_and_shared_memory_fit():
    assert sum(REGISTERS) * 128 <= 1 << 16 and all(n % 8 == 0 for n in REGISTERS)
    kernel = WideAttention(ListShape(64, 64, 8))
    assert kernel.shared_bytes + 1024 <= SHARED_BYTES["sm_90a"]

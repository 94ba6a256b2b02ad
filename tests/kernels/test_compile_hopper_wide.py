"""The wide Hopper kernel compiles without a GPU, to the instructions and registers it claims."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.kernels.attention.hopper.wide import REGISTERS, WideAttention, compile_wide
from sglang_dsv4.kernels.attention.lists import ListShape
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import cubin_of

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\.F32\.BF16 R(\d+), (?:R(\d+), )?gdesc")


def disassemble(cubin, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def touched_under_way(sass):
    """Instructions that use accumulators, or write other operands, of products under way.

    The tile loops have no branch inside between a product and the wait for it but waits on
    mbarriers, so the order of the listing is that of execution.
    """
    groups, group, found = [], [], []
    for line in sass.splitlines():
        product, wait = PRODUCT.search(line), re.search(r"DEPBAR\.LE gsb0, 0x(\d+)", line)
        if product:
            size, sums, left = (int(n) if n else None for n in product.groups())
            operands = set() if left is None else set(range(left, left + 4))
            group.append((set(range(sums, sums + size // 2)), operands))
            if "gsb0" in line:
                groups, group = [*groups, group], []
        elif wait:
            pending = int(wait[1])
            groups = groups[len(groups) - pending :] if pending else []
        elif "*/" in line:
            text = line.split("*/", 1)[1]
            registers = [int(n) for n in re.findall(r"\bR(\d+)\b", text)]
            stores = re.match(r"\s*(@!?P\d )?\s*ST", text)
            for sums, operands in (pair for some in (*groups, group) for pair in some):
                written = registers and not stores and registers[0] in operands
                if written or sums & set(registers):
                    found.append(text.strip())
    return found


@pytest.mark.parametrize(
    "slot_bytes, has_lengths, rotated", [(8, False, False), (4, True, True), (8, True, True)]
)
def test_instructions(slot_bytes, has_lengths, rotated, tmp_path):
    lists = ListShape(64, 2, slot_bytes, has_lengths, rotated)
    sass = disassemble(cubin_of(compile_wide, "sm_90a", lists), tmp_path)
    # The first tile's scores and the next one's in the loop, 512 dims in steps of 16 each.
    assert len(re.findall(r"HGMMA\.64x64x16\.F32\.BF16", sass)) == 2 * 32
    # 64 keys in steps of 16, two times 128 dims: left in the loop and for the last tile, right.
    assert len(re.findall(r"HGMMA\.64x128x16\.F32\.BF16", sass)) == 3 * 8
    # One fence before each group, three for scores: ptxas adds more when it serialises products.
    assert len(re.findall(r"WARPGROUP\.ARRIVE", sass)) == 2 * 3 + 3
    assert touched_under_way(sass) == []
    assert not re.findall(r"\b(LDL|STL)\b", sass)
    # Records: 7 NoPE and 4 RoPE loads, ahead of the loop and in it; Q: 16 by each consumer group.
    assert len(re.findall(r"LDG\.E\.128\.CONSTANT", sass)) == 2 * 11 + 2 * 16
    # L2: slots and eight sectors of Q by each group, for the first item and the next one.
    assert len(re.findall(r"CCTL\.E\.PF2", sass)) == 2 * 2 * 9
    assert len(re.findall(r"STS\.128", sass)) == 32 + 2 * 16
    assert len(re.findall(r"HMUL2\.BF16|HFMA2\.MMA\.BF16", sass)) >= 4 * 28
    limits = {int(n, 16) for n in re.findall(r"USETMAXREG\S* (?:UP0, )?(0x\w+)", sass)}
    assert limits == set(REGISTERS)


def test_registers_and_shared_memory_fit():
    assert sum(REGISTERS) * 128 <= 1 << 16 and all(n % 8 == 0 for n in REGISTERS)
    kernel = WideAttention(ListShape(64, 64, 8))
    assert kernel.shared_bytes + 1024 <= SHARED_BYTES["sm_90a"]

"""The widening kernel compiles without a GPU, to the instructions that it claims."""

import re

import pytest
import torch
from test_compile_skinny import ARCHS, REGISTERS, count, disassemble

from sglang_dsv4.kernels.linear.widen import BLOCKS, THREADS, compile_widen

# Issue slots of the loop for each record on sm_90a (ptxas 13.4).
BUDGETS = {torch.bfloat16: 84, torch.float8_e4m3fn: 151}


def loop_of(lines: list[str]) -> list[str]:
    """Instructions from the label that the loop's branch goes back to."""
    label = re.search(r"BRA `\((\.L_x_\d+)\)", "".join(x for x in lines if "BRA `" in x))[1]
    first = lines.index(f"{label}:")
    last = next(i for i, x in enumerate(lines) if f"BRA `({label})" in x)
    assert first < last
    return lines[first + 1 : last + 1]


@pytest.mark.parametrize("dtype", BUDGETS)
def test_main_loop(dtype, tmp_path):
    lines, registers = disassemble(compile_widen, "sm_90a", dtype, tmp_path)
    loop = loop_of(lines)
    stores = 8 // (4 // dtype.itemsize) * 2
    assert count(loop, "STG.E.128") == stores
    assert count(loop, "LDG") == stores and count(loop, "LDG.E.NA.U16") == stores // 2
    # Pairs of values, and twice the scales' two.
    assert count(loop, "MUL2.BF16") + count(loop, "HFMA2.MMA.BF16") == 2 * 16 + stores
    assert len(loop) <= 2 * BUDGETS[dtype], len(loop) / 2
    assert registers * THREADS * BLOCKS <= REGISTERS


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", BUDGETS)
def test_no_register_is_spilled(dtype, arch, tmp_path):
    lines, _ = disassemble(compile_widen, arch, dtype, tmp_path)
    assert count(lines, "STG.E.128")
    assert not count(lines, "LDL") and not count(lines, "STL")

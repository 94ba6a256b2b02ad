"""The kernels on records compile without a GPU, to the instructions that they claim."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import cubin_of
from sglang_dsv4.kernels.linear.skinny import compile_skinny
from sglang_dsv4.kernels.linear.skinny_plan import (
    RESERVED_BYTES,
    STAGED_STAGES,
    THREADS,
    SkinnyShape,
    skinny_plan,
)
from sglang_dsv4.kernels.linear.stream import StreamShape

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm and cuobjdump")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHS = ("sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536

# (row tiles, token tiles, staged columns, row warps, blocks of an SM) -> issue slots of the loop
# for each record on sm_90a, copies, barriers and addresses included, as ptxas 13.4 makes them.
BUDGETS = {
    (1, 1, 0, 1, 4): 76,
    (2, 1, 0, 1, 2): 74,
    (1, 2, 0, 1, 2): 93,
    (2, 2, 0, 1, 2): 82,
    (2, 4, 512, 8, 1): 90,
    (2, 8, 1024, 8, 1): 115,
}


def tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassemble(builder, arch: str, shape, folder: Path) -> tuple[list[str], int]:
    """Instructions and labels, and registers of a thread."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin_of(builder, arch, shape))
    lines = tool("nvdisasm", "-c", str(path)).splitlines()
    usage = tool("cuobjdump", "-res-usage", str(path))
    kept = [x for x in lines if re.match(r"\s+/\*[0-9a-f]{4,5}\*/|\.L_x_\d+:", x)]
    return kept, int(re.search(r"REG:(\d+)", usage)[1])


def main_loop(lines: list[str]) -> list[str]:
    """Instructions between a branch back and its label: of loops, that with the most products."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    best: list[str] = []
    for end, line in enumerate(lines):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        body = lines[labels[jump[1]] : end + 1] if jump and labels[jump[1]] < end else []
        if "STG" not in "".join(body) and count(body, "HMMA") > count(best, "HMMA"):
            best = body
    return [line for line in best if not line.startswith(".L_x_")]


def count(lines: list[str], what: str) -> int:
    return sum(what in line for line in lines)


def shape_of(key: tuple, ragged: bool = False, shared: bool = False) -> SkinnyShape:
    row_tiles, token_tiles, staged, row_warps, blocks = key
    stages = STAGED_STAGES if staged else 4
    stream = StreamShape(row_tiles, token_tiles, ragged, staged, stages)
    return SkinnyShape(stream, row_warps, shared, blocks)


@pytest.mark.parametrize("key", BUDGETS)
def test_main_loop(key, tmp_path):
    row_tiles, token_tiles, staged, _, _ = key
    lines, _ = disassemble(compile_skinny, "sm_90a", shape_of(key), tmp_path)
    loop = main_loop(lines)
    records = count(loop, "LDS.U16")
    assert records % (2 * row_tiles) == 0
    assert count(loop, "HMMA.16816.F32.BF16") == 4 * token_tiles * records
    # Pairs of values, and twice the scales' two.
    assert count(loop, "HMUL2.BF16") == (16 + 2) * records
    # A word: five masks, two turns, one product. A scale pair: a product, a mask, two copies.
    assert count(loop, "SHF.R.W.U32") == 8 * records
    tokens = 2 * token_tiles * records // row_tiles
    assert count(loop, "LDS.128") == records + (tokens if staged else 0)
    assert count(loop, "LDG.E.128") == (0 if staged else tokens)
    # The kernel before may still write the tokens when this one begins.
    assert not count(loop, "CONSTANT")
    # One copy for two records of a row; no barrier of the block.
    assert count(loop, "UBLKCP.S.G") == records // 2
    assert not count(loop, "BAR.") and not count(loop, "MEMBAR")
    assert len(loop) <= BUDGETS[key] * records, len(loop) / records


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("key", BUDGETS)
def test_no_register_is_spilled(key, ragged, shared, tmp_path):
    lines, registers = disassemble(
        compile_skinny, "sm_90a", shape_of(key, ragged, shared), tmp_path
    )
    assert not count(lines, "LDL") and not count(lines, "STL")
    assert registers * THREADS * key[-1] <= REGISTERS


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_planned_launches_compile(arch, tokens, tmp_path):
    plan = skinny_plan(tokens, 96, 65, 4112, 132, arch)
    lines, _ = disassemble(compile_skinny, arch, plan.shape, tmp_path)
    assert count(lines, "HMMA.16816.F32.BF16") and count(lines, "UBLKCP")
    assert not count(lines, "LDL") and not count(lines, "STL")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tokens", [1, 5, 9, 16, 17, 24, 40, 64])
@pytest.mark.parametrize(
    ("rows", "width"), [(16, 16), (1536, 4096), (32768, 1024), (7168, 16384), (1, 1040)]
)
def test_plans_fit(rows, width, tokens, arch):
    down, across = -(-rows // 16), -(-width // 64)
    plan = skinny_plan(tokens, down, across, width, 132, arch)
    stream = plan.shape.stream
    used = plan.shape.blocks * (plan.shape.shared_bytes + RESERVED_BYTES)
    assert used <= SHARED_BYTES[arch] + RESERVED_BYTES
    assert 8 * stream.token_tiles >= tokens
    assert plan.shape.shared == (plan.splits > 1)
    assert stream.ragged == (width % 128 != 0)
    if rows == 32768 and not stream.staged:
        assert plan.shape.row_warps > 1
    if stream.staged:
        batches = -(-across // 2)
        assert -(-batches // plan.splits) * 128 <= stream.staged

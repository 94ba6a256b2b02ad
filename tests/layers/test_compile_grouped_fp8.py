"""Both grouped FP8 products compile for sm_90a without a GPU, to the instructions they claim."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from cutlass import cute
from quack.epilogue import frontend
from quack.gemm_runtime import host

from sglang_dsv4.layers import grouped_fp8

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm and cuobjdump")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def plans(monkeypatch, tmp_path):
    """What would be launched; compiled for an H200, without quack's caches."""
    compiled, stock = [], cute.compile

    def compile_for_hopper(*args, options):
        options += f" --gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}"
        return stock(*args, options=options)

    monkeypatch.setattr(cute, "compile", compile_for_hopper)
    monkeypatch.setattr(frontend, "get_device_capacity", lambda device: (9, 0))
    monkeypatch.setattr(host, "get_max_active_clusters", lambda size: 132 // size)
    monkeypatch.setattr(host, "_compile_gemm_epi", host._compile_gemm_epi.__wrapped__)
    monkeypatch.setattr(frontend, "run_gemm_epi_plan", lambda plan, *_, **__: compiled.append(plan))
    for product in (grouped_fp8._gated, grouped_fp8._scaled):
        monkeypatch.setattr(product, "_plan_cache", {})
    return compiled


def tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def gate_up(tokens: int = 64, width: int = 512, inner: int = 256, parts: int = 4) -> None:
    rows = 6 * tokens
    grouped_fp8.gate_up(
        torch.zeros(tokens, width).to(E4M3),
        torch.zeros(parts, 2 * inner, width).to(E4M3),
        torch.zeros(parts + 1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows),
        10.0,
        torch.zeros(rows, inner, dtype=torch.bfloat16),
    )


def down(tokens: int = 64, width: int = 512, inner: int = 256, parts: int = 4) -> None:
    rows = 6 * tokens
    grouped_fp8.down(
        torch.zeros(rows, inner).to(E4M3),
        torch.zeros(parts, width, inner).to(E4M3),
        torch.zeros(parts + 1, dtype=torch.int32),
        torch.zeros(rows),
        torch.zeros(rows, width, dtype=torch.bfloat16),
    )


def main_loop(lines: list[str]) -> list[str]:
    """Instructions between a branch back and its label: the shortest such with a product."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    found = []
    for end, line in enumerate(lines):
        jump = re.search(r"BRA(?:\.\w+)* `\((\.L_x_\d+)\)", line)
        if jump and labels[jump[1]] < end:
            body = lines[labels[jump[1]] : end + 1]
            if any("QGMMA" in x for x in body):
                found.append(body)
    return min(found, key=len)


def count(lines: list[str], what: str) -> int:
    return sum(bool(re.search(what, line)) for line in lines)


@pytest.mark.parametrize("product", [gate_up, down])
def test_instructions(product, plans, tmp_path):
    product()
    (plan,) = plans
    path = tmp_path / "kernel.cubin"
    path.write_bytes(plan.compiled_fn.__cubin__)
    lines = tool("nvdisasm", "-c", str(path)).splitlines()
    lines = [x for x in lines if re.match(r"\s+/\*[0-9a-f]{4,5}\*/|\.L_x_\d+:", x)]
    assert not count(lines, r"\b(?:LDL|STL)\b")
    usage = tool("cuobjdump", "-res-usage", str(path))
    assert "STACK:0 " in usage and "LOCAL:0 " in usage
    # Two groups of four warps with products and one with loads.
    assert int(re.search(r"REG:(\d+)", usage)[1]) * 3 * 128 <= 65536
    columns = {gate_up: grouped_fp8.GATE_UP_COLUMNS, down: grouped_fp8.DOWN_COLUMNS}[product]
    instruction = rf"QGMMA\.64x{columns}x32\.F32\.E4M3\.E4M3"
    assert count(lines, "GMMA") == count(lines, instruction)
    # 128 columns of the operands, then a sum of each of a thread's values in float32.
    loop = main_loop(lines)
    assert count(loop, instruction) == 4
    assert count(loop, r"\bFADD\b") == columns // 2
    # The rows of x one by one: whole stages, then the last, which may be half a stage and is
    # filled with zeros beyond the width (the predicate at the end).
    copies = [x for x in lines if "LDGSTS.E.BYPASS.128" in x]
    rows = grouped_fp8.TILE_ROWS // 16
    assert len(copies) == (2 * rows if product is gate_up else 0)
    assert count(copies, r"\], P\d ;") == len(copies) // 2
    # One SwiGLU for two of a thread's sums.
    assert count(lines, r"MUFU\.EX2") == (columns // 4 if product is gate_up else 0)
    assert count(lines, "UTMASTG") and count(lines, "UTMALDG")


@pytest.mark.parametrize("product", [gate_up, down])
def test_one_kernel_for_all_shapes(product, plans, monkeypatch):
    """What is compiled depends on no size, so that a prefill of a new length does not wait."""
    keys = set()

    def build(*args, **names):
        keys.add((args, *sorted(names.items())))

    monkeypatch.setattr(host, "_compile_gemm_epi", build)
    for shape in ((64, 512, 256, 4), (1, 7168, 384, 1), (129, 64, 64, 3), (8192, 4096, 16, 2)):
        product(*shape)
    assert len(plans) == 4 and len(keys) == 1


def test_starts_are_moved_to_an_aligned_address():
    starts = torch.arange(8, dtype=torch.int32)
    for first in range(8):
        found = grouped_fp8._aligned(starts[first:])
        assert found.data_ptr() % 16 == 0 and torch.equal(found, starts[first:])
        assert (found.data_ptr() == starts[first:].data_ptr()) == (first % 4 == 0)

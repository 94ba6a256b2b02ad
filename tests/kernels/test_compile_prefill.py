"""Triton kernels of a large prefill compile for sm_90 without a GPU."""

import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dsv4.kernels.linear import fp8_rows
from sglang_dsv4.layers import expert_products

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
QUANTIZE = ["*bf16", "*fp8e4nv", "*fp32", "i32", "i32"]
MULTIPLY = ["*fp32", "*fp32", "*i32", "*i32", "*i32", "*bf16", *["i32"] * 5, "fp32"]
# What torch allocates and every published width is a multiple of 16; a number of tokens is not.
ANY = {"first", "last", "slots"}


def disassemble(kernel, types, constants, warps, folder, stages=3):
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, types + ["constexpr"] * len(constants), strict=True)),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names[: len(types)])
            if name not in ANY and types[i][0] in "*i"
        },
    )
    binary = triton.compile(
        source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "num_stages": stages}
    )
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("block", [1024, 4096, 16384])
def test_rows_to_e4m3(block, tmp_path):
    sass = disassemble(fp8_rows._quantize, QUANTIZE, {"BLOCK": block}, fp8_rows._WARPS, tmp_path)
    assert "E4M3" in sass
    values = block // (fp8_rows._WARPS * 32)
    assert ("LDG.E.128" if values >= 8 else "LDG.E.64") in sass
    assert "LDL" not in sass and "STL" not in sass


@pytest.mark.parametrize("gated", [True, False])
def test_products_of_experts(gated, tmp_path):
    columns, depth = 128 if gated else 256, expert_products._DEPTH
    types = ["*bf16", f"tensordesc<bf16[{columns},{depth}]>", *MULTIPLY]
    constants = {"UNDO": 2.0**7, "GATED": gated, "TOP_K": 6, "PROGRAMS": 132}
    constants |= {"ROWS": expert_products.BLOCK_ROWS, "COLUMNS": columns, "DEPTH": depth}
    constants |= {"GROUP": expert_products._GROUP}
    sass = disassemble(expert_products._multiply, types, constants, 8, tmp_path, stages=4)
    assert f"HGMMA.64x{columns}x16.F32.BF16" in sass
    assert "UTMALDG.2D" in sass and "LDGSTS" in sass
    assert "LDL" not in sass and "STL" not in sass

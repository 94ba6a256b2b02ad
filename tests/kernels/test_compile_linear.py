"""The linear kernels compile for sm_90 without a GPU, to the instructions that they claim."""

import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dsv4.kernels.linear import linear

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
FEW = ["*bf16", "*u8", "*fp8e4nv", "*fp32", "*bf16", "*fp32", "*i32", *["i32"] * 5]
WIDEN = ["*u8", "*fp8e4nv", "*fp32", "*bf16", "i32", "i32"]
# What torch allocates and every published width is a multiple of 16; a number of tokens is not.
ANY = {"tokens", "blocks"}


def disassemble(kernel, types, constants, warps, folder):
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, types + ["constexpr"] * len(constants), strict=True)),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names[: len(types)])
            if name not in ANY
        },
    )
    binary = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize(("rows", "splits"), [(64, 8), (128, 1)])
def test_few_tokens(rows, splits, tokens, tmp_path):
    constants = {"SPLITS": splits, "ROWS": rows, "TOKENS": tokens}
    constants |= {"STAGES": linear.STAGES, "INTERPRETED": False}
    warps = linear.TALL_WARPS if rows == 128 else 4
    sass = disassemble(linear._few, FEW, constants, warps, tmp_path)
    assert "HGMMA.64x" in sass and ".F32.BF16" in sass
    assert "LDGSTS" in sass, "loads are not in flight"
    # A pair of values costs one multiplication; conversions of e2m1 are bit moves.
    pairs = rows * 128 // 2 // (warps * 32)
    assert sass.count("HMUL2.BF16") + sass.count("HFMA2.BF16") <= 1.25 * pairs
    assert "LDL" not in sass and "STL" not in sass


def test_widening(tmp_path):
    constants = {"ROWS": linear._WIDEN_ROWS, "INTERPRETED": False}
    sass = disassemble(linear._widen, WIDEN, constants, 4, tmp_path)
    assert "LDL" not in sass and "STL" not in sass

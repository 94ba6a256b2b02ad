"""The experts' kernel compiles without a GPU, to the instructions that it claims."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.kernels.experts.product import compile_product
from sglang_dsv4.kernels.experts.shape import Shape, resident_blocks, with_staging
from sglang_dsv4.kernels.jit import cubin_of

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# V4-Flash, V4-Pro of a rank of eight, and shapes with a partial stage.
SHAPES = [
    Shape(True, 2048, 4096, 6, 1, 8),
    Shape(True, 2048, 4096, 6, 2, 1),
    Shape(True, 384, 7168, 6, 4, 1),
    Shape(True, 64, 192, 2, 1, 2),
    Shape(False, 4096, 2048, 6, 1, 2),
    Shape(False, 7168, 384, 6, 2, 1),
    Shape(False, 4096, 2048, 6, 4, 1),
]


# All columns staged, with whole and partial chunks, and the ring, with one and two thread blocks.
STAGED = [
    Shape(True, 2048, 4096, 6, 2, 1, 4096),
    Shape(True, 2048, 4096, 6, 4, 1, 1024),
    Shape(True, 2048, 4096, 6, 2, 1, 1024),
    Shape(True, 64, 192, 2, 2, 2, 192),
    Shape(False, 4096, 2048, 6, 2, 1, 2048),
    Shape(False, 4096, 2048, 6, 4, 1, 2048),
]


@pytest.mark.parametrize("shape", SHAPES + STAGED, ids=str)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_instructions(arch, shape, tmp_path):
    if not resident_blocks(shape, arch):
        pytest.skip("takes more shared memory than there is")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin_of(compile_product, arch, shape))
    command = [str(NVDISASM), "-c", str(path)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not re.findall(r"\b(?:LDL|STL)\b", sass)
    # The loop may be unrolled: whole stages of four steps, two row tiles and the token tiles.
    products = len(re.findall(r"HMMA\.16816\.F32\.BF16", sass))
    assert products and products % (8 * shape.tiles) == 0
    records = products // (8 * shape.tiles)
    # Staged activations: of each record, and of an item's first.
    staged = 2 * shape.tiles * (records + 1) if shape.staged else 0
    found = len(re.findall(r"LDS\.128", sass)) - 2 * records
    assert found >= staged if shape.staged else found == 0
    # Two multiplications bring two scales to their power, 16 apply them, for each row tile.
    assert len(re.findall(r"HMUL2\.BF16|HFMA2\.BF16", sass)) == 2 * records * 18
    assert "UBLKCP" in sass and bool(re.search(r"LDG\.E\.128", sass)) == (not shape.staged)
    # Weights go through no register before they are needed.
    assert not re.search(r"LDG\.E\.128\.CONSTANT", sass)


def test_two_blocks_share_a_hopper():
    assert [resident_blocks(shape, "sm_90a") for shape in SHAPES] == [2, 2, 1, 2, 2, 2, 1]
    assert [resident_blocks(shape, "sm_90a") for shape in STAGED] == [1, 1, 2, 2, 1, 1]


def test_what_is_staged():
    plain = [Shape(True, 2048, 4096, 6, tiles, 1) for tiles in (2, 4)]
    assert [with_staging(shape, "sm_90a").staged for shape in plain] == [4096, 1024]
    assert [with_staging(shape, "sm_120a").staged for shape in plain] == [0, 0]
    assert with_staging(Shape(True, 2048, 4096, 6, 4, 2), "sm_90a").staged == 0
    assert with_staging(Shape(False, 4096, 2048, 6, 4, 2), "sm_90a").staged == 2048

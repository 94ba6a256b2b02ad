"""The indexer kernels compile without a GPU, to the instructions that they claim."""

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.indexer.indexer import (
    MAX_WORKSPACE_BYTES,
    round_tokens,
    score_blocks,
    score_shape,
    topk_shape,
    workspace_bytes,
)
from sglang_dsv4.kernels.indexer.scores import ScoreShape, compile_scores, shared_bytes
from sglang_dsv4.kernels.indexer.topk import TopkShape, compile_topk
from sglang_dsv4.kernels.jit import cubin_of

triton = pytest.importorskip("triton", reason="its wheel carries nvdisasm")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
SPILL = re.compile(r"\b(LDL|STL)\b")
ARCHS = ["sm_90a", "sm_100a", "sm_120a"]


def disassemble(builder, arch, shape, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin_of(builder, arch, shape))
    command = [str(NVDISASM), "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_scores_instructions(arch, heads, tmp_path):
    shape = score_shape(4096, 1, heads, 8, arch)
    sass = disassemble(compile_scores, arch, shape, tmp_path)
    assert not SPILL.search(sass)
    # 128 dims are eight products of 16, of all heads at once or of eight heads each; the compiler
    # may unroll the loop over tokens.
    if arch == "sm_90a":
        count = len(re.findall(rf"HGMMA\.64x{heads}x16\.F32\.BF16", sass))
        assert count and count % 8 == 0
    else:
        count = len(re.findall(r"HMMA\.16816\.F32\.BF16", sass))
        assert count and count % heads == 0
        assert len(re.findall(r"LDSM\.16\.M88\.4", sass)) == count // 2
    assert "LDGSTS.E.BYPASS.LTC128B.128" in sass and "LDS.128" in sass
    # Eight words of eight values a thread, two values in each product.
    assert len(re.findall(r"HMUL2\.BF16", sass)) == 32


def test_overlapped_products_are_under_way_together(tmp_path):
    shape = score_shape(128, 128, 64, 8, "sm_90a")
    assert shape.overlapped
    sass = disassemble(compile_scores, "sm_90a", shape, tmp_path)
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)
    # Of a group of four pages, three are waited for while the next one's products run; the last,
    # and the pages left over, are waited for alone.
    assert waits == ["0x1"] * 3 + ["0x0"] * 2
    # The schedule of a block may keep numbers in local memory; the loops over pages do not.
    assert not SPILL.search(sass, sass.index("HGMMA"), sass.rindex("HGMMA"))


@pytest.mark.parametrize(
    ("threads", "chunk", "cluster"), [(1024, 8192, 1), (1024, 32768, 8), (256, 8192, 1)]
)
@pytest.mark.parametrize("arch", ARCHS)
def test_topk_instructions(arch, threads, chunk, cluster, tmp_path):
    shape = TopkShape(threads, chunk, cluster, 8)
    if shape.shared_bytes + 1024 > SHARED_BYTES[arch]:
        pytest.skip(f"{arch} has too little shared memory for {chunk} entries")
    sass = disassemble(compile_topk, arch, shape, tmp_path)
    assert not SPILL.search(sass)
    # It waits for the scores by itself (programmatic dependent launch).
    assert "ACQBULK" in sass
    # Equal digits of a warp are counted by one addition.
    assert "ATOMS.POPC.INC.32" in sass
    assert ("UCGABAR_ARV" in sass) == (cluster > 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_shapes_fit_the_device(arch):
    for heads in (1, 8, 9, 64):
        for tokens, requests in ((1, 1), (128, 128), (6, 3), (4096, 1)):
            shape = score_shape(tokens, requests, heads, 8, arch)
            assert shape.heads % 8 == 0 and 0 <= shape.heads - heads < 8
            assert shared_bytes(shape) + 1024 <= SHARED_BYTES[arch]
            assert shape.tokens == 1 or shape.tokens < 2 * tokens / requests
    assert score_shape(4096, 1, 64, 8, "sm_90a") == ScoreShape(64, 8, 8, True)
    assert score_shape(128, 128, 64, 8, "sm_100a") == ScoreShape(64, 1, 8, False)


def test_workspace_is_bounded():
    for tokens in (1, 128, 4096, 10**6):
        for pages in (1, 128, 512, 4096):
            size = workspace_bytes(tokens, pages)
            assert size <= MAX_WORKSPACE_BYTES and 1 <= round_tokens(tokens, pages) <= tokens
    assert workspace_bytes(128, 128) == 128 * 8192 * 4
    # One row of scores is the least.
    assert round_tokens(5, 1 << 21) == 1


def test_topk_shapes():
    def sizes(tokens, pages, arch="sm_90a"):
        shape = topk_shape(tokens, pages, 8, arch, 132)
        assert shape.shared_bytes + 1024 <= SHARED_BYTES[arch]
        return shape.threads, shape.chunk, shape.cluster

    assert sizes(1, 128) == sizes(132, 128) == (1024, 8192, 1)
    assert sizes(1, 129) == (1024, 8192, 2) and sizes(16, 512) == (1024, 8192, 4)
    assert sizes(17, 512) == (1024, 16384, 2) and sizes(67, 512) == (1024, 32768, 1)
    assert sizes(1, 4096) == sizes(8, 4096) == (1024, 32768, 8)
    assert sizes(1, 4096, "sm_120a") == (1024, 16384, 8)
    assert sizes(132, 4096) == (1024, 32768, 1)
    assert sizes(133, 4096) == sizes(4096, 1) == (256, 8192, 1)


def test_score_blocks():
    assert [score_blocks(n, 132) for n in (0, 1, 100, 132, 133, 4096)] == [132] * 6
    assert [score_blocks(n, 132) for n in (16, 64, 128)] == [128] * 3

"""kv_store, norm_rope and compress compile for every architecture; their e2m1 codes are right."""

import re
import shutil
import subprocess
from pathlib import Path

import cutlass
import pytest
import torch
from cutlass import Float32, cute
from cutlass.cute.runtime import from_dlpack

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.compress import compile_tail, compile_windows
from sglang_dsv4.kernels.jit import cubin_of
from sglang_dsv4.kernels.kv_store.kv_store import compile_kv_store
from sglang_dsv4.kernels.norm_rope.norm_rope import compile_norm_rope
from sglang_dsv4.kernels.reference.nvfp4 import e2m1_encode, unpack_nibbles

ARCHS = ("sm_90a", "sm_100a", "sm_120a")
BF16, F32 = torch.bfloat16, torch.float32
RECORD, PAIRS = RecordLayout(KVFormat.NVFP4, 64), RecordLayout(KVFormat.NVFP4, 2)
WIDE, KEYS = RecordLayout(KVFormat.BFLOAT16, 64), IndexerLayout(KVFormat.NVFP4, 64)
WIDE_KEYS = IndexerLayout(KVFormat.BFLOAT16, 64)
# Name: (builder, static arguments, bytes of a vector, least loads of it, least stores of it).
# A window's thread owns four channels: vectors of 8 bytes of bf16, 16 of float32.
KERNELS = {
    "kv_store": (compile_kv_store, (BF16, BF16, RECORD), 16, 8, 3),
    "kv_store-f32-bf16": (compile_kv_store, (F32, F32, WIDE), 16, 12, 2),
    "q_norm_rope": (compile_norm_rope, (BF16, 64, True, False), 16, 6, 4),
    "inverse_rope": (compile_norm_rope, (BF16, 64, False, True), 16, 6, 4),
    "q_norm_rope-1": (compile_norm_rope, (BF16, 1, True, False), 16, 4, 2),
    "c4": (compile_windows, (4, BF16, BF16, RECORD, True), 8, 64, 1),
    "c4-alone": (compile_windows, (4, BF16, BF16, RECORD, False), 8, 64, 1),
    "c4-bf16": (compile_windows, (4, BF16, BF16, WIDE, True), 8, 64, 1),
    "c128": (compile_windows, (128, BF16, BF16, PAIRS, True), 8, 36, 1),
    "c128-alone": (compile_windows, (128, BF16, BF16, PAIRS, False), 8, 36, 1),
    "c128-f32": (compile_windows, (128, F32, F32, PAIRS, True), 16, 16, 4),
    "keys": (compile_windows, (4, BF16, BF16, KEYS, True), 8, 64, 0),
    "keys-bf16": (compile_windows, (4, BF16, BF16, WIDE_KEYS, True), 8, 64, 1),
    "c4-f32": (compile_windows, (4, F32, F32, RECORD, True), 16, 16, 4),
    "tail-c4": (compile_tail, (4, BF16, BF16, RECORD), 16, 4, 4),
    "tail-keys": (compile_tail, (4, BF16, BF16, KEYS), 16, 4, 4),
    "tail-c128": (compile_tail, (128, F32, F32, PAIRS), 16, 6, 4),
}


def tool(name):
    """A disassembler of the triton wheel, or of the PATH; skips where there is none."""
    try:
        import triton

        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        if bundled.is_file():
            return str(bundled)
    except ImportError:
        pass
    return shutil.which(name) or pytest.skip(f"no {name} in the triton wheel or on the PATH")


def instructions(cubin, folder):
    """Opcodes of the kernel, such as LDG.E.128.CONSTANT."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [tool("nvdisasm"), "-c", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.M)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", list(KERNELS))
def test_compiles_and_is_what_it_claims(name, arch, tmp_path):
    builder, static, size, loads, stores = KERNELS[name]
    found = instructions(cubin_of(builder, arch, *static), tmp_path)
    assert len(found) > 50
    spills = [op for op in found if op.startswith(("LDL", "STL"))]
    assert not spills
    # An FP64 instruction would be a Python float that was not meant to be one.
    assert not [op for op in found if re.match(r"D(ADD|MUL|FMA|SETP)|F2F\.\w*64", op)]
    wide = [op for op in found if re.search(rf"\.{8 * size}\b", op)]
    assert sum(op.startswith("LDG") for op in wide) >= loads, wide
    assert sum(op.startswith("STG") for op in wide) >= stores, wide
    # Reads without conversion would be byte-wise fallbacks of an unaligned pointer.
    assert not [op for op in found if re.match(r"(LDG|STG)\.E\.U?[SU]?(8|16)\b", op)]


@cute.jit
def encode_rows(
    values: cute.Tensor,
    scales: cute.Tensor,
    reciprocals: cute.Tensor,
    words: cute.Tensor,
    keep: cutlass.Constexpr,
):
    """Words of rows of 8 values under one scale each, on the host."""
    for row in range(cute.size(scales)):
        inverse = cm.split_inverse(scales[row], reciprocals[row])
        words[row] = cm.e2m1_word([values[row, i] for i in range(8)], inverse, keep)


def host_codes(values, scales, keep, reciprocal_error=0.0):
    """Codes [n, 8] by the device helper, run by CuTeDSL on the CPU."""
    words = torch.zeros(len(scales), dtype=torch.int32)
    reciprocals = (1.0 / scales) * (1.0 + reciprocal_error)
    tensors = (values, scales, reciprocals, words.view(torch.uint32))
    encode_rows(*[from_dlpack(x.contiguous()) for x in tensors], keep)
    return unpack_nibbles(words.view(torch.uint8).view(-1, 4))


def boundary_values(scale):
    """Every midpoint times a scale with its neighbours three floats away on either side, signed."""
    edges = torch.tensor(cm.E2M1_MIDPOINTS) * scale
    bits = edges.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    values = bits.clamp(min=0).view(torch.float32).flatten()
    special = torch.tensor([0.0, 1e-45, 1e-30, 6.0 * scale, 7.0 * scale, 1e38, torch.inf])
    values = torch.cat((values, special))
    return torch.cat((values, -values))


# 0, an ulp of the instruction either way, and the most that `split_inverse` allows.
@pytest.mark.parametrize("error", [0.0, 2.0**-23, -(2.0**-23), 2.0**-22, -(2.0**-22)])
def test_codes_without_division_are_the_codes_of_the_quotient(error):
    # All positive finite e4m3 scales, subnormal ones included, at and around every boundary.
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.stack([boundary_values(scale.item()) for scale in scales])
    noise = torch.randn(len(scales), 400) * scales[:, None] * 3
    values = torch.cat((values, noise), dim=1)
    values = values[:, : values.shape[1] // 8 * 8]
    wanted = e2m1_encode(values / scales[:, None])
    repeated = scales.repeat_interleave(values.shape[1] // 8)
    found = host_codes(values.reshape(-1, 8), repeated, True, error).view_as(wanted)
    bad = (found != wanted).nonzero()
    assert not len(bad), [
        (values[i, j].item(), scales[i].item(), found[i, j].item(), wanted[i, j].item())
        for i, j in bad[:5].tolist()
    ]


def test_scale_zero_keeps_signs_only():
    values = torch.tensor([[0.0, -0.0, 1e-9, -1e-9, 1e-3, -1e-3, 0.1, -0.1]])
    assert host_codes(values, torch.zeros(1), True).tolist() == [[0, 8] * 4]


def test_indexer_codes_lose_the_sign_of_zero():
    values = torch.tensor([[-0.0, -0.2, -0.25, -0.26, 0.2, -0.75, -5.0, -5.1]])
    assert host_codes(values, torch.ones(1), False).tolist() == [[0, 0, 0, 9, 0, 10, 14, 15]]


@cute.jit
def sixths(values: cute.Tensor, out: cute.Tensor):
    """cute_math.sixth on the host, without the bound above."""
    for i in range(cute.size(values)):
        out[i] = cm.corrected_sixth(values[i])


def test_a_sixth_is_the_correctly_rounded_quotient():
    exponents = torch.arange(-100, 21).float().exp2()
    values = (torch.rand(121, 4000) + 1.0) * exponents[:, None]
    values = torch.cat((values, exponents[:, None] * torch.tensor([1.0, 1.5, 1.75, 1.125])), dim=1)
    out = torch.zeros(values.numel())
    sixths(from_dlpack(values.flatten()), from_dlpack(out))
    assert torch.equal(out, values.flatten() / 6.0)


@cute.jit
def absolute_values(values: cute.Tensor, out: cute.Tensor):
    """cute_math.absolute on the host."""
    for i in range(cute.size(values)):
        out[i] = cm.absolute(Float32(values[i]))


def test_absolute_clears_the_sign_of_everything():
    values = torch.tensor([-0.0, -1.5, -torch.inf, -torch.nan, 2.0])
    out = torch.zeros(5)
    absolute_values(from_dlpack(values), from_dlpack(out))
    assert not torch.signbit(out).any()
    assert torch.equal(out.nan_to_num(-1.0, 9.0), torch.tensor([0.0, 1.5, 9.0, -1.0, 2.0]))

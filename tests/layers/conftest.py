"""Stand-ins for what a GPU would bring: Marlin's repacking and the widening of records."""

import numpy as np
import pytest
import torch


def repack(weight: torch.Tensor, order: torch.Tensor, width: int, out: int, bits: int):
    """Marlin's order of 4-bit weights, written down from its definition (tiles of 16 x 64).

    Args: weight int32 [width / 8, out], eight rows in an element, the first in the low nibble.
    Returns int32 [width / 16, 2 out].
    """
    assert bits == 4
    assert order.numel() == 0
    shifts = torch.arange(0, 32, 4)
    codes = (weight[:, None, :] >> shifts[None, :, None] & 15).reshape(width, out)
    tiles = codes.reshape(width // 16, 16, out // 16, 16).permute(0, 2, 1, 3)
    tiles = tiles.reshape(width // 16, out // 64, 1024)[..., tile_order()]
    eights = tiles.reshape(width // 16, -1, 8).to(torch.int64)
    words = (eights << shifts).sum(-1)
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))


def tile_order() -> torch.Tensor:
    """Position in a 16 x 64 tile (four 16 x 16 ones) of each nibble, in storage order.

    A thread of an m16n8k16 product holds rows 2 (t % 4) + {0, 1, 8, 9} of columns t / 4 and
    t / 4 + 8; the nibbles of a word alternate so that two are widened at once.
    """
    order = []
    for thread in range(32):
        rows = [2 * (thread % 4) + r for r in (0, 1, 8, 9)]
        own = [16 * row + thread // 4 + 8 * half for half in (0, 1) for row in rows]
        for tile in range(4):
            order += [256 * tile + own[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    return torch.tensor(order)


@pytest.fixture
def marlin_repack(monkeypatch):
    """``gptq_marlin_repack`` without a GPU, wherever our code and SGLang's look it up."""
    from sglang.kernels.ops.quantization import gptq_marlin_repack as module
    from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4

    def called(b_q_weight, perm, size_k, size_n, num_bits):
        return repack(b_q_weight, perm, size_k, size_n, num_bits)

    monkeypatch.setattr(module, "gptq_marlin_repack", called)
    monkeypatch.setattr(marlin_utils_fp4, "gptq_marlin_repack", called, raising=False)
    monkeypatch.setattr(
        marlin_utils_fp4, "marlin_make_workspace", lambda *_: torch.zeros(4, dtype=torch.int)
    )
    monkeypatch.setattr(
        marlin_utils, "marlin_make_workspace", lambda *_, **__: torch.zeros(4, dtype=torch.int)
    )


def widen_records(records: torch.Tensor, out: torch.Tensor, first: int = 0) -> None:
    """``widen`` in plain torch."""
    from sglang_dsv4.kernels.linear.records import unpack_records
    from sglang_dsv4.kernels.linear.widen import DIVISOR
    from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

    codes = unpack_records(records[first : first + len(out)], *out.shape[1:])
    factor = torch.full((len(out),), 1.0 / DIVISOR[out.dtype])
    out.copy_(dequantize_weight(*codes, factor).to(out.dtype))


def nvfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (weight uint8 [..., out, in / 2], weight_scale e4m3 [..., out, in / 16])."""
    *front, out, width = shape
    weight = torch.randint(0, 256, (*front, out, width // 2), dtype=torch.uint8)
    scale = torch.exp2(torch.rand(*front, out, width // 16) * 17 - 8.8).to(torch.float8_e4m3fn)
    return weight, scale

"""NVFP4 weights in "records", the order in which the kernels for few tokens read them.

A record is 16 weight rows x 64 columns in 576 bytes: 512 of codes, then 64 of scales. A weight
[out, in] is uint8 [ceil(out / 16), ceil(in / 64), 576]; missing rows and columns are zero codes
with zero scales. Same number of bytes as ModelOpt's order, and each record is one contiguous copy.

Lane l = 4 g + t of a warp is lane (g, t) of the left operand of mma.m16n8k16. Its bytes:

- codes, bytes 16 l .. 16 l + 15: four little-endian 32-bit words, word s for matrix step s. Its
  columns are 16 t + 4 s + c, c = 0..3: registers a0 (row g) and a1 (row g + 8) hold c = 0, 1, and
  a2 (row g), a3 (row g + 8) hold c = 2, 3; the even c is in the low half of the register. So a lane
  meets one scale block of 16 columns in a record, and its part of an activation row is contiguous.
- scales, bytes 512 + 2 l and 513 + 2 l: e4m3 of block t of row g and of row g + 8.

A register of the operand is two bf16, each with the code's sign in bit 15 and its magnitude in bits
8 to 6, which reads as the code's value times 2^-126. With M = 0x81C081C0, a word w gives

    a0 = w & M
    a1 = rotate_right(w, 3) & M
    a2 = rotate_right(w, 6) & M
    a3 = ((w & 0x001B001B) * 0x4108) & M

The product is three left shifts (3, 8, 14) whose bits do not meet, so that nothing carries. Bits of
half e of a word, from bit 15 to bit 0 (sN, mN: sign and magnitude of aN of that half; s1 and s2 are
those of the other half): s0 m2 m2 m2 m1 m1 m1 m0 m0 m0 s2 m3[1] m3[0] s1 s3 m3[2].

Scales of a checkpoint are neither negative nor NaN; the kernels count on it, so packing refuses
them.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dsv4.errors import CheckpointError

ROWS = 16
COLUMNS = 64
CODE_BYTES = 512
RECORD_BYTES = 576

_LARGEST_SCALE = 0x7E
_CHUNK = 1 << 23
"""Codes that are reordered at a time; a code takes about 8 bytes while they are."""


def record_grid(out_features: int, in_features: int) -> tuple[int, int]:
    """Records (down, across) of a weight [out_features, in_features]."""
    return -(-out_features // ROWS), -(-in_features // COLUMNS)


def _table(device: torch.device) -> Tensor:
    """int32 [register, half, code]: the bits of a word that a code of that register sets."""
    magnitude = ((6, 7, 8), (9, 10, 11), (12, 13, 14), (3, 4, 0))
    sign = (15, 18, 21, 1)
    rows = []
    for register in range(4):
        for half in range(2):
            bits = [b + 16 * half for b in magnitude[register]]
            bits.append((sign[register] + 16 * half) % 32)
            words = [sum(1 << b for i, b in enumerate(bits) if c >> i & 1) for c in range(16)]
            rows.append([w - (1 << 32) if w >> 31 else w for w in words])
    return torch.tensor(rows, dtype=torch.int32, device=device).view(4, 2, 16)


def _chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, whole records each."""
    step = max(1, _CHUNK // (ROWS * columns)) * ROWS
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def _pack(weight: Tensor, scale: Tensor, out: Tensor, table: Tensor) -> None:
    """uint8 [n, in / 2] and [n, in / 16] -> out [n / 16, C, 576], n and in padded here."""
    down, across = out.shape[:2]
    missing_rows = down * ROWS - weight.shape[0]
    weight = F.pad(weight, (0, across * COLUMNS // 2 - weight.shape[1], 0, missing_rows))
    scale = F.pad(scale, (0, across * 4 - scale.shape[1], 0, missing_rows))
    # [down, across, g, t, s, pair of columns, row half], a byte holds both columns of a pair
    codes = weight.view(down, 2, 8, across, 4, 4, 2).permute(0, 3, 2, 4, 5, 6, 1)
    codes = codes.to(torch.int32)
    words = torch.zeros(codes.shape[:5], dtype=torch.int32, device=weight.device)
    for register in range(4):
        both = codes[..., register // 2, register % 2]
        words |= table[register, 0][both & 15] | table[register, 1][both >> 4]
    out[..., :CODE_BYTES] = words.view(torch.uint8).view(down, across, CODE_BYTES)
    scales = scale.view(down, 2, 8, across, 4).permute(0, 3, 2, 4, 1)
    out[..., CODE_BYTES:] = scales.reshape(down, across, RECORD_BYTES - CODE_BYTES)


def _unpack(records: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C, 576] -> uint8 [16 R, 32 C] codes and [16 R, 4 C] scales."""
    down, across = records.shape[:2]
    words = records[..., :CODE_BYTES].contiguous().view(torch.int32)
    words = words.view(down, across, 8, 4, 4)
    shape = (*words.shape, 2, 2)
    codes = torch.zeros(shape, dtype=torch.uint8, device=records.device)
    for register in range(4):
        place = codes[..., register // 2, register % 2]
        for half in range(2):
            for i in range(4):
                mask = table[register, half, 1 << i]
                place |= ((words & mask) != 0).to(torch.uint8) << (4 * half + i)
    weight = codes.permute(0, 6, 2, 1, 3, 4, 5).reshape(down * ROWS, across * COLUMNS // 2)
    scales = records[..., CODE_BYTES:].view(down, across, 8, 4, 2).permute(0, 4, 2, 1, 3)
    return weight, scales.reshape(down * ROWS, across * 4)


def pack_records(weight: Tensor, scale: Tensor) -> Tensor:
    """Reorder a weight, or the weights of experts, into records.

    Args:
        weight: uint8 [..., out, in / 2] as ModelOpt packs it, the even column in the low nibble;
            in a multiple of 16.
        scale: float8_e4m3fn [..., out, in / 16].

    Returns:
        uint8 [..., ceil(out / 16), ceil(in / 64), 576].

    Raises:
        CheckpointError: a scale is negative or NaN, or the shapes do not fit each other.
    """
    if weight.shape[:-1] != scale.shape[:-1] or weight.shape[-1] != scale.shape[-1] * 8:
        raise CheckpointError(
            f"found weight {tuple(weight.shape)} with scale {tuple(scale.shape)}, wanted one scale "
            f"for 8 bytes of each row: check that both tensors belong to one layer"
        )
    scale = scale.view(torch.uint8)
    lead, (rows, half) = weight.shape[:-2], weight.shape[-2:]
    down, across = record_grid(rows, 2 * half)
    out = torch.empty((*lead, down, across, RECORD_BYTES), dtype=torch.uint8, device=weight.device)
    flat = out.view(-1, down, across, RECORD_BYTES)
    weight, scale = weight.reshape(-1, rows, half), scale.reshape(-1, rows, half // 8)
    table = _table(weight.device)
    for matrix in range(len(flat)):
        if bool((scale[matrix] > _LARGEST_SCALE).any()):
            raise CheckpointError(
                f"found a negative or NaN block scale in weight {matrix} of a tensor of shape "
                f"{tuple(weight.shape)}, wanted scales from 0 to 448: quantize that weight again"
            )
        for first, last in _chunks(rows, 2 * half):
            target = flat[matrix, first // ROWS : -(-last // ROWS)]
            _pack(weight[matrix, first:last], scale[matrix, first:last], target, table)
    return out


def unpack_records(records: Tensor, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """ModelOpt's order again: the inverse of ``pack_records``.

    Args:
        records: uint8 [..., R, C, 576].
        out_features, in_features: the weight's shape; at most 16 R and 64 C.

    Returns:
        (uint8 [..., out, in / 2], float8_e4m3fn [..., out, in / 16]).
    """
    lead, (down, across) = records.shape[:-3], records.shape[-3:-1]
    flat = records.reshape(-1, down, across, RECORD_BYTES)
    table = _table(records.device)
    count, half = len(flat), in_features // 2
    weight = torch.empty((count, out_features, half), dtype=torch.uint8, device=records.device)
    scale = torch.empty((count, out_features, half // 8), dtype=torch.uint8, device=records.device)
    for matrix in range(count):
        for first, last in _chunks(out_features, in_features):
            part = flat[matrix, first // ROWS : -(-last // ROWS)]
            codes, scales = _unpack(part, table)
            weight[matrix, first:last] = codes[: last - first, :half]
            scale[matrix, first:last] = scales[: last - first, : half // 8]
    shape = (*lead, out_features)
    return weight.view(*shape, half), scale.view(*shape, half // 8).view(torch.float8_e4m3fn)

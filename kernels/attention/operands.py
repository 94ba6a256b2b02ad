"""What a launch of sparse attention takes, the same for every implementation."""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor

from sglang_dsv4.kernels.operands import fake_compact

HEAD_DIM = 512
ROPE_DIM = 64


class Operands(NamedTuple):
    """The tensors; `sparse_attention` describes them.

    comp_lengths int32 [T] is read only by kernels compiled with lengths, positions int64 [T] and
    table float32 [max_position, 64] only by those that turn their output back (`rotation`);
    part_out float32 [splits T H, 512] and part_lse float32 [splits T H] are scratch, unused with
    one split.
    """

    q: Any
    window_slots: Any
    comp_slots: Any
    comp_lengths: Any
    window_pool: Any
    comp_pool: Any
    sinks: Any
    positions: Any
    table: Any
    out: Any
    lse: Any
    part_out: Any
    part_lse: Any


class Numbers(NamedTuple):
    """Run-time numbers: places in each list, blocks that share a token, softmax_scale x log2(e)."""

    num_window: Any
    num_comp: Any
    splits: Any
    scale_log2: Any
    out_scale: Any


def fake_operands(slot_bytes: int) -> Operands:
    """Fake tensors to compile for, with slots of 4 or 8 bytes; every size is symbolic."""
    tokens, heads = cute.sym_int64(), cute.sym_int64()
    slot = Int64 if slot_bytes == 8 else Int32

    def strided(dtype: Any, rank: int, align: int, unit: int = 1) -> Any:
        """[..., last contiguous], every other stride a multiple of `unit`."""
        sizes = tuple(cute.sym_int64() for _ in range(rank))
        strides: Any = (*(cute.sym_int64(divisibility=unit) for _ in range(rank - 1)), 1)
        return make_fake_tensor(dtype, sizes, strides, assumed_align=align)

    return Operands(
        q=strided(BFloat16, 3, 16, 8),
        window_slots=strided(slot, 2, slot_bytes),
        comp_slots=strided(slot, 2, slot_bytes),
        comp_lengths=fake_compact(Int32, (cute.sym_int64(),), 4),
        window_pool=strided(cutlass.Uint8, 2, 16, 16),
        comp_pool=strided(cutlass.Uint8, 2, 16, 16),
        sinks=fake_compact(Float32, (cute.sym_int64(),), 4),
        positions=fake_compact(Int64, (cute.sym_int64(),), 8),
        table=strided(Float32, 2, 16, 4),
        out=fake_compact(BFloat16, (tokens, heads, HEAD_DIM), 16),
        lse=fake_compact(Float32, (tokens, heads), 4),
        part_out=fake_compact(Float32, (cute.sym_int64(), HEAD_DIM), 16),
        part_lse=fake_compact(Float32, (cute.sym_int64(),), 4),
    )


def fake_numbers() -> Numbers:
    """Numbers to compile for; their values do not matter."""
    return Numbers(Int32(0), Int32(0), Int32(1), Float32(1.0), Float32(1.0))

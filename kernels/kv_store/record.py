"""Device side of a latent record: weighted norm, RoPE, encode, and insert into a paged pool.

A record is 512 / count consecutive lanes, each with `count` = 4 or 16 consecutive values, from a
lane whose number is a multiple of 32: a scale group (16 / count lanes) and the four scale bytes of
a word never cross a warp. Callers load everything a record needs before they use any of it, so that
one wait covers all loads but the RoPE row, whose address comes from a load.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from sglang_dsv4.cache.kv_layout import NVFP4_GROUP, KVFormat, RecordLayout
from sglang_dsv4.kernels import cute_math as cm

ROPE_DIM = 64


def is_stored(slot: Int64, pool: cute.Tensor, page_size: int) -> Any:
    """Whether a slot names a row of the pool."""
    return (slot >= Int64(0)) & (slot < cm.rows_in(pool) * page_size)


def load_rotation(
    table: cute.Tensor, position: Int64, rope_lane: Int32, count: int, stored: Any
) -> tuple[list[Float32], list[Float32]]:
    """cos and sin of the count / 2 pairs of a lane; zeros, and no access, for a negative lane."""
    wanted = stored & (rope_lane >= 0)
    first = position * cm.stride_of(table) + rope_lane * (count // 2)
    parts = []
    for start in (first, first + ROPE_DIM // 2):
        values: list[Float32] = []
        for begin in range(0, count // 2, 4):
            empty = [Uint32(0)] * min(4, count // 2)
            words = cm.load_words_if(wanted, cm.address_of(table, start + begin), empty, True)
            values += [cm.float_of(word) for word in words]
        parts.append(values)
    return parts[0], parts[1]


@cute.jit
def rotate_tail(
    values: cute.Tensor,
    count: cutlass.Constexpr,
    cos: list[Float32],
    sin: list[Float32],
    rope_lane: Int32,
) -> None:
    """RoPE of one lane's `count` values in place; a negative lane keeps its own."""
    if rope_lane >= 0:
        rotated = cm.rotate_pairs(cm.floats_of(values, 0, count), cos, sin, inverse=False)
        for i in range_constexpr(count):
            values[i] = rotated[i]


def normalised(
    values: Sequence[Float32], weight: Sequence[Float32], mean: Float32, eps: Float32
) -> cute.Tensor:
    """values * (mean + eps)^-0.5 * weight in registers, with the rounding of the reference."""
    factor = cm.rsqrt(cm.add_rn(mean, eps))
    out = cute.make_rmem_tensor(cute.make_layout(len(values)), Float32)
    for i, (value, scale) in enumerate(zip(values, weight, strict=True)):
        out[i] = cm.mul_rn(cm.mul_rn(value, factor), scale)
    return out


class RecordWriter:
    """Rotation, encoding and insert of one layout's records, `count` values a lane."""

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self.layout, self.count = layout, count
        self.nvfp4 = layout.format is KVFormat.NVFP4
        self.lanes = layout.head_dim // count
        self.first_rope_lane = layout.nope_dim // count
        self.group_lanes = NVFP4_GROUP // count

    @cute.jit
    def insert(
        self, latent: cute.Tensor, pool: cute.Tensor, slot: Int64, index: Int32, writes: Any
    ) -> None:
        """Encode a lane's values and write them to a slot of the pool.

        All lanes of a warp must take part, those that do not write as well.
        """
        place = Int32(slot)
        base = Int64(place // self.layout.page_size) * cm.stride_of(pool)
        row = place % self.layout.page_size
        data = base + row * self.layout.data_bytes
        values = cm.floats_of(latent, 0, self.count)
        if const_expr(self.nvfp4):
            self.insert_nvfp4(values, pool, base, row, data, index, writes)
        else:
            if writes:
                self.store_bf16(values, pool, data + index * (2 * self.count))

    @cute.jit
    def store_bf16(self, values: list[Float32], pool: cute.Tensor, offset: Int64) -> None:
        """A lane's values as bf16 at a byte offset."""
        pairs = [cm.bf16_pair(values[i], values[i + 1]) for i in range(0, self.count, 2)]
        target = cm.element_pointer(pool, offset, min(16, 2 * self.count))
        cm.store_vector(cm.words_of(target), pairs)

    @cute.jit
    def insert_nvfp4(
        self,
        values: list[Float32],
        pool: cute.Tensor,
        base: Int64,
        row: Int32,
        data: Int64,
        index: Int32,
        writes: Any,
    ) -> None:
        """Codes and scales of NoPE lanes, bf16 of RoPE lanes, zeros after the scales.

        An even lane stores its neighbour's codes with its own: 16 bytes or 4.
        """
        amax = cm.absolute_max(values)
        distance = 1
        while distance < self.group_lanes:
            amax = cm.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, distance))
            distance *= 2
        words, byte = cm.nvfp4_encode(values, amax)
        others = [cute.arch.shuffle_sync_bfly(word, 1) for word in words]
        if const_expr(self.count == 4):
            words, others = [words[0] | (others[0] << 16)], []
        group = index // self.group_lanes
        is_nope = index < self.first_rope_lane
        scales = cm.select(is_nope, byte, Uint32(0)) << (group % 4 * 8)
        for step in (1, 2):
            scales = scales | cute.arch.shuffle_sync_bfly(scales, step * self.group_lanes)
        if writes:
            if is_nope:
                if index % 2 == 0:
                    codes = data + index * (self.count // 2)
                    target = cm.element_pointer(pool, codes, 4 * len([*words, *others]))
                    cm.store_vector(cm.words_of(target), [*words, *others])
            else:
                rope = (index - self.first_rope_lane) * (2 * self.count)
                self.store_bf16(values, pool, data + self.layout.nope_bytes + rope)
            if index % (4 * self.group_lanes) == 0:
                offset = base + self.layout.scale_offset(0) + row * self.layout.scale_bytes
                target = cm.element_pointer(pool, offset + group, 4)
                cm.store_vector(cm.words_of(target), [scales])

"""Device side of a finished indexer key: Hadamard, encode, paged insert.

`kv_store.record` does the same for a latent record.

One warp a key, LANE = 4 consecutive channels a lane.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, const_expr, cute

from sglang_dsv4.cache.kv_layout import INDEXER_GROUP, IndexerLayout, KVFormat
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.candidates import LANE
from sglang_dsv4.kernels.compress.operands import ROPE_DIM, pool_align

_GROUP_LANES = INDEXER_GROUP // LANE


class KeyWriter:
    """Transform, encoding and insert of one layout's keys."""

    def __init__(self, layout: IndexerLayout) -> None:
        self.layout = layout
        self.quantised = layout.format is KVFormat.NVFP4
        self.align = pool_align(layout)
        self.first_rope_lane = (layout.head_dim - ROPE_DIM) // LANE

    @cute.jit
    def insert(
        self, key: cute.Tensor, pool: cute.Tensor, slot: Int64, lane: Int32, writes: Any
    ) -> None:
        """Write a rotated key to a slot of the pool; all lanes must take part."""
        place = Int32(slot)
        base = Int64(place // self.layout.page_size) * cm.stride_of(pool)
        row = place % self.layout.page_size
        values = hadamard(cm.floats_of(key, 0, LANE), lane, self.layout.head_dim)
        data = base + row * self.layout.data_bytes
        if const_expr(self.quantised):
            scale = base + self.layout.scale_offset(0) + row * self.layout.scale_bytes
            self.store_fp4(values, pool, data, scale, lane, writes)
        else:
            if writes:
                pairs = [cm.bf16_pair(values[i], values[i + 1]) for i in range(0, LANE, 2)]
                target = cm.element_pointer(pool, data + lane * (2 * LANE), 2 * LANE)
                cm.store_vector(cm.words_of(target), pairs)

    @cute.jit
    def store_fp4(
        self,
        values: list[Float32],
        pool: cute.Tensor,
        data: Int64,
        scale: Int64,
        lane: Int32,
        writes: Any,
    ) -> None:
        """e2m1 codes, two lanes a word, and the four UE8M0 scales of the key."""
        amax = cm.absolute_max(values)
        for distance in (1, 2, 4):
            amax = cm.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        word, byte = cm.fp4_encode(values, amax)
        word = word | (cute.arch.shuffle_sync_bfly(word, 1) << 16)
        scales = byte << (lane // _GROUP_LANES * 8)
        for distance in (_GROUP_LANES, 2 * _GROUP_LANES):
            scales = scales | cute.arch.shuffle_sync_bfly(scales, distance)
        if writes:
            if lane % 2 == 0:
                target = cm.element_pointer(pool, data + lane * (LANE // 2), 4)
                cm.store_vector(cm.words_of(target), [word])
            if lane == 0:
                cm.store_vector(cm.words_of(cm.element_pointer(pool, scale, 4)), [scales])


def hadamard(values: list[Float32], lane: Int32, width: int) -> list[Float32]:
    """Orthonormal Hadamard transform of `width` channels, with the reference's order of sums."""
    span = 1
    while span < LANE:
        mixed = list(values)
        for i in range(LANE):
            if i & span == 0:
                mixed[i] = cm.add_rn(values[i], values[i + span])
                mixed[i + span] = cm.sub_rn(values[i], values[i + span])
        values, span = mixed, 2 * span
    distance = 1
    while distance < width // LANE:
        is_high = (lane // distance) % 2 != 0
        mixed = []
        for value in values:
            other = cute.arch.shuffle_sync_bfly(value, distance)
            # low + high in the low lane, low - high in the high one.
            mixed.append(cm.add_rn(other, cm.select(is_high, -value, value)))
        values, distance = mixed, 2 * distance
    return [cm.mul_rn(value, Float32(width**-0.5)) for value in values]

"""Device side of a finished window: weighted RMSNorm, RoPE, Hadamard, encode, paged insert.

A lane owns LANE = 8 consecutive channels; consecutive lanes own consecutive channels, from a lane
whose number is a multiple of 8 (16 for indexer keys), so a scale group (2 lanes of a record, 4 of
an indexer key) and the four scale bytes of a word never cross a warp.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.compress.candidates import LANE
from sglang_dsv4.kernels.operands import VECTOR_BYTES

ROPE_DIM = 64
_PAIRS = LANE // 2


class Finish:
    """Norm to insert for one layout; the mean square comes from the caller's lanes."""

    def __init__(self, layout: RecordLayout | IndexerLayout) -> None:
        self.layout = layout
        self.indexer = isinstance(layout, IndexerLayout)
        self.quantised = layout.format is KVFormat.NVFP4
        # An indexer key has no part of its own for rotated values.
        self.nope_bytes = 0 if isinstance(layout, IndexerLayout) else layout.nope_bytes
        self.width = layout.head_dim
        self.first_rope_lane = (self.width - ROPE_DIM) // LANE
        self.pool_align = 4 if self.indexer and self.quantised else VECTOR_BYTES

    @cute.jit
    def apply(
        self,
        means: list[Float32],
        square_sum: Float32,
        norm_weight: cute.Tensor,
        eps: Float32,
        table: cute.Tensor,
        position: Int64,
        pool: cute.Tensor,
        slot: Int64,
        channel_lane: Int32,
        writes: Any,
    ) -> None:
        """Finish LANE channels of one window.

        square_sum: sum of the squares of all its channels; channel_lane: channel // LANE;
        writes: whether this lane stores (all lanes of the warp take part in the exchanges).
        """
        entry = cute.make_rmem_tensor(cute.make_layout(LANE), Float32)
        weight = cm.load_float(
            cm.element_pointer(norm_weight, channel_lane * LANE, VECTOR_BYTES), LANE
        )
        factor = cm.rsqrt(cm.add_rn(square_sum * Float32(1.0 / self.width), eps))
        for i in range_constexpr(LANE):
            entry[i] = cm.mul_rn(cm.mul_rn(means[i], factor), weight[i])
        if channel_lane >= self.first_rope_lane:
            self.rotate(entry, table, position, channel_lane - self.first_rope_lane)
        values = cm.floats_of(entry, 0, LANE)
        index = Int32(slot)
        base = Int64(index // self.layout.page_size) * cm.stride_of(pool)
        row = index % self.layout.page_size
        data = base + row * self.layout.data_bytes
        scale = base + self.layout.scale_offset(0) + row * self.layout.scale_bytes
        if const_expr(self.indexer):
            values = _hadamard(values, channel_lane, self.width)
        if const_expr(not self.quantised):
            if writes:
                self.store_bf16(values, pool, data + channel_lane * (2 * LANE))
        elif const_expr(self.indexer):
            self.store_key(values, pool, data, scale, channel_lane, writes)
        else:
            self.store_record(values, pool, data, scale, channel_lane, writes)

    @cute.jit
    def rotate(
        self, entry: cute.Tensor, table: cute.Tensor, position: Int64, rope_lane: Int32
    ) -> None:
        """RoPE of one lane's four pairs, in place."""
        offset = position * cm.stride_of(table) + rope_lane * _PAIRS
        cos = cm.load_float(cm.element_pointer(table, offset, VECTOR_BYTES), _PAIRS)
        offset = offset + ROPE_DIM // 2
        sin = cm.load_float(cm.element_pointer(table, offset, VECTOR_BYTES), _PAIRS)
        rotated = cm.rotate_pairs(cm.floats_of(entry, 0, LANE), cos, sin, inverse=False)
        for i in range_constexpr(LANE):
            entry[i] = rotated[i]

    @cute.jit
    def store_bf16(self, values: list[Float32], pool: cute.Tensor, offset: Int64) -> None:
        """LANE values as bf16 at a byte offset."""
        pairs = [cm.bf16_pair(values[2 * i], values[2 * i + 1]) for i in range(_PAIRS)]
        target = cm.element_pointer(pool, offset, VECTOR_BYTES)
        cm.store_vector(cm.words_of(target), pairs)

    @cute.jit
    def store_record(
        self,
        values: list[Float32],
        pool: cute.Tensor,
        data: Int64,
        scale: Int64,
        channel_lane: Int32,
        writes: Any,
    ) -> None:
        """NVFP4 codes and scales of NoPE lanes, bf16 of RoPE lanes, zeros after the scales."""
        amax = cm.absolute_max(values)
        amax = cm.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, 1))
        words, byte = cm.nvfp4_encode(values, amax)
        counts = (channel_lane < self.first_rope_lane) & (channel_lane % 2 == 0)
        scales = cm.select(counts, byte, Uint32(0)) << (channel_lane % 8 * 4)
        for distance in (2, 4):
            scales = scales | cute.arch.shuffle_sync_bfly(scales, distance)
        if writes:
            if channel_lane < self.first_rope_lane:
                target = cm.element_pointer(pool, data + channel_lane * (LANE // 2), 4)
                cm.store_vector(cm.words_of(target), words)
            else:
                rope = (channel_lane - self.first_rope_lane) * (2 * LANE)
                self.store_bf16(values, pool, data + self.nope_bytes + rope)
            if channel_lane % 8 == 0:
                target = cm.element_pointer(pool, scale + channel_lane // 2, 4)
                cm.store_vector(cm.words_of(target), [scales])

    @cute.jit
    def store_key(
        self,
        values: list[Float32],
        pool: cute.Tensor,
        data: Int64,
        scale: Int64,
        channel_lane: Int32,
        writes: Any,
    ) -> None:
        """e2m1 codes and UE8M0 scales of an indexer key; zeros have no sign."""
        amax = cm.absolute_max(values)
        for distance in (1, 2):
            amax = cm.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        exponent = cm.ue8m0_exponent(amax)
        # 2 / scale instead of 1 / scale: the inverse of 2^127 would be subnormal.
        inverse = (Uint32(255 << 23) - (Uint32(exponent) << 23)).bitcast(Float32)
        bounds = [Float32(2.0 * midpoint) for midpoint in cm.E2M1_MIDPOINTS]
        scaled = [cm.mul_rn(value, inverse) for value in values]
        poisoned = amax != amax
        word = cm.e2m1_word(scaled, bounds, keep_negative_zero=False)
        word = cm.select(poisoned, Uint32(0), word)
        byte = cm.select(poisoned, Uint32(255), Uint32(exponent))
        scales = cm.select(channel_lane % 4 == 0, byte, Uint32(0)) << (channel_lane % 16 * 2)
        for distance in (4, 8):
            scales = scales | cute.arch.shuffle_sync_bfly(scales, distance)
        if writes:
            target = cm.element_pointer(pool, data + channel_lane * (LANE // 2), 4)
            cm.store_vector(cm.words_of(target), [word])
            if channel_lane == 0:
                cm.store_vector(cm.words_of(cm.element_pointer(pool, scale, 4)), [scales])


def _hadamard(values: list[Float32], channel_lane: Int32, width: int) -> list[Float32]:
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
        is_high = (channel_lane // distance) % 2 != 0
        mixed = []
        for value in values:
            other = cute.arch.shuffle_sync_bfly(value, distance)
            # low + high in the low lane, low - high in the high one.
            mixed.append(cm.add_rn(other, cm.select(is_high, -value, value)))
        values, distance = mixed, 2 * distance
    return [cm.mul_rn(value, Float32(width**-0.5)) for value in values]

"""kv_store on a GPU: RMSNorm, RoPE, encode and paged insert of one latent per token, in one pass.

One warp a token; lane l holds values 16 l .. 16 l + 15, which is one NVFP4 scale group (lanes 0-27)
or eight RoPE pairs (lanes 28-31), so a group's maximum needs no exchange between lanes. An even
lane takes its neighbour's 8 code bytes and stores 16; four scale bytes meet in one lane.

Roofline, NVFP4 record, bf16 kv, a token: reads 1024 B of kv, 256 B of the RoPE table and 16 B of
indices, writes 384 B; the 1-2 KB of norm weights stay in L1. 1680 B, so 4096 tokens are 6.9 MB.
480 instructions a warp, 30 for each 16 bytes of kv, are 0.06 G thread instructions at 4096 tokens,
the same order as the memory time. All loads are issued before the first is waited for, but the
table's row, whose address is one of them.
The launch is programmatic: its blocks are there when the kernel before it ends. Every block waits
for that end before it reads or writes memory.
Measured on an H200, 2026-12-02 (BENCHMARKS.md): 256 tokens 1.9 us, 4096 tokens 4.3 us, 101% and 82%
of a copy of as many bytes (1.9 and 3.6 us). Variants of the same run, 4096 tokens: 5.0 us with an
ordinary launch, 5.2 us with the table's row asked for after the sum of squares, 2.8 us with the
loads alone, 1.9 us with blocks that do nothing; 7.5 us before loads were in this order and e2m1
took 14 instructions a value. So about a third is arithmetic and stores that the loads do not hide.

Bits. All steps but one have the reference's rounding (`cute_math`), so the record is the
reference's bit for bit whenever the mean square is. The sum of 512 squares is taken in another
order: its relative difference is at most (16 + 5) * 2^-24 on either side, the factor
(mean + eps)^-0.5 halves that, so latents agree to 2^-19 and only a value that close to a rounding
boundary of its code or of its group's scale may take the neighbouring one.
"""

from typing import Any

import torch
from cutlass import Float32, Int64, cute
from torch import Tensor

from sglang_dsv4.cache.kv_layout import RecordLayout
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.kv_store.record import (
    RecordWriter,
    is_stored,
    load_rotation,
    normalised,
    rotate_tail,
)
from sglang_dsv4.kernels.operands import (
    VECTOR_BYTES,
    aligned_rows,
    fake_rows,
    fake_vector,
    index_vector,
    require_rows,
)

HEAD_DIM = 512
LANE = 16
WARPS = 4
# At most 64 registers a thread: 4096 tokens are 1024 blocks, which fit one wave of 132 SMs.
BLOCKS_PER_SM = 8
# No shared memory: all of it is L1. Unset, the compiler asks a driver for the number.
SHARED_PERCENT = 0


class KvStore:
    """The kernel for one record layout."""

    def __init__(self, layout: RecordLayout) -> None:
        self.layout = layout
        self.writer = RecordWriter(layout, LANE)

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        norm_weight: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        slots: cute.Tensor,
        pool: cute.Tensor,
        eps: Float32,
        stream: Any,
    ) -> None:
        """Launch one warp a token."""
        blocks = (cute.size(slots) + WARPS - 1) // WARPS
        self.kernel(kv, norm_weight, positions, table, slots, pool, eps).launch(
            grid=[blocks, 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=SHARED_PERCENT,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        kv: cute.Tensor,
        norm_weight: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        slots: cute.Tensor,
        pool: cute.Tensor,
        eps: Float32,
    ) -> None:
        """One token a warp."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        token = block * WARPS + thread // 32
        if token < cute.size(slots):
            slot = cm.load_integers(cm.address_of(slots, token), 1)[0]
            position = cm.load_integers(cm.address_of(positions, token), 1)[0]
            offset = Int64(token) * cm.stride_of(kv) + lane * LANE
            row = cm.load_values(kv, offset, LANE)
            scales = cm.load_values(norm_weight, lane * LANE, LANE)
            # A padding token does the same work up to the stores: nothing branches on its slot.
            stored = is_stored(slot, pool, self.layout.page_size)
            rope_lane = lane - self.writer.first_rope_lane
            cos, sin = load_rotation(table, position, rope_lane, LANE, stored)
            values = cm.floats_in(row, kv.element_type)
            mean = cm.lane_sum(cm.sum_of_squares(values), 32) * Float32(1.0 / HEAD_DIM)
            # Or the row of the table would be asked for after the sum.
            zero = cm.hidden_zero(eps)
            mean = cm.after_loads(mean, [*cos[::4], *sin[::4], *scales[::4]], zero)
            weight = cm.floats_in(scales, norm_weight.element_type)
            latent = normalised(values, weight, mean, eps)
            rotate_tail(latent, LANE, cos, sin, rope_lane)
            self.writer.insert(latent, pool, slot, lane, stored)


@compiled_kernel
def compile_kv_store(
    arch: str, kv_dtype: torch.dtype, weight_dtype: torch.dtype, layout: RecordLayout
) -> Any:
    """Compile for one architecture, input types and record layout; needs no GPU."""
    return compile_for(
        arch,
        KvStore(layout),
        fake_rows(kv_dtype, HEAD_DIM),
        fake_vector(weight_dtype, HEAD_DIM),
        fake_vector(torch.int64),
        fake_rows(torch.float32, layout.rope_dim),
        fake_vector(torch.int64),
        fake_rows(torch.uint8, layout.page_bytes),
        Float32(0.0),
    )


def kv_store(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    pool: Tensor,
    layout: RecordLayout,
) -> None:
    """Weighted RMSNorm, RoPE of the last values, encode and insert: one token's window KV.

    Args: kv bfloat16, float16 or float32 [T, 512], rows may be a slice of a wider projection;
    norm_weight of such a type [512]; positions integer [T]; table float32 [max_position, 64];
    slots integer [T], one outside the pool (-1) is skipped, none may repeat; pool uint8
    [num_pages, >= page_bytes], pages 16-byte aligned. As `reference.kv_store.kv_store`.

    Raises UnsupportedError for another width, ValueError for a pool that is not aligned.
    """
    check_record_layout(layout, kv.shape[-1])
    require_rows(pool, VECTOR_BYTES)
    if kv.shape[0] == 0:
        return
    kernel = compile_kv_store(current_arch(), kv.dtype, norm_weight.dtype, layout)
    kernel(
        aligned_rows(kv),
        norm_weight,
        index_vector(positions),
        table,
        index_vector(slots),
        pool[:, : layout.page_bytes],
        eps,
    )


def check_record_layout(layout: RecordLayout, width: int) -> None:
    """Raises UnsupportedError unless records are 512 wide, NoPE and RoPE in whole lanes."""
    if layout.head_dim != HEAD_DIM or width != HEAD_DIM or layout.nope_dim % (2 * LANE):
        raise UnsupportedError(
            f"Found latents of {width} values and a record of {layout.nope_dim} + "
            f"{layout.rope_dim}, wanted 512 values with NoPE in multiples of {2 * LANE}: use the "
            f"reference for other widths."
        )

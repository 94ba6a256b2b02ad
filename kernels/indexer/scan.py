"""Sums over the threads of a block, in the order of the threads."""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import choose
from sglang_dsv4.kernels.indexer import instructions as extra


def warp_scan(value: Uint32) -> Uint32:
    """Inclusive prefix sum over the lanes of a warp."""
    for step in range(5):
        value = value + extra.shuffle_up(value, 1 << step)
    return value


@cute.jit
def block_scan(value: Uint32, memory: Int32, threads: cutlass.Constexpr) -> Any:
    """(sum of the threads before this one, sum of all); every thread of the block takes part.

    memory: shared address of 128 bytes, free again when this returns; threads: at most 1024.
    """
    tid, _, _ = cute.arch.thread_idx()
    lane, warp, warps = tid & 31, tid >> 5, threads // 32
    inclusive = warp_scan(value)
    extra.shared_store_u32_if(lane == 31, memory + warp * 4, inclusive)
    cute.arch.sync_threads()
    present = lane < warps
    of_warp = ptx.shared_load_u32(memory + choose(present, lane, Int32(0)) * 4)
    sums = warp_scan(choose(present, of_warp, Uint32(0)))
    before = ptx.shuffle_index(sums, choose(warp > 0, warp - 1, Int32(0)))
    total = ptx.shuffle_index(sums, Int32(warps - 1))
    cute.arch.sync_threads()
    return choose(warp > 0, before, Uint32(0)) + inclusive - value, total

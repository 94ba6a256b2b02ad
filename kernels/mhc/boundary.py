"""hc_post of one block and the projection of the next block's hc_pre in one launch (few tokens).

As `ProjectFew`, but a warp makes the new streams of its columns from the old ones and the block's
output, stores them, and multiplies what it has stored.
"""

from typing import Any

import torch
from cutlass import Int32, Int64, Uint32, cute, range_constexpr

from sglang_dsv4.kernels import cute_math as cm
from sglang_dsv4.kernels.attention.instructions import global_store_u32x4
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.mhc.gates import STREAMS
from sglang_dsv4.kernels.mhc.operands import (
    CHUNK,
    CHUNKS,
    PRE_ROWS,
    fake_compact,
    fake_streams,
    sums_pitch,
)
from sglang_dsv4.kernels.mhc.project import TILE_ROWS, ProjectFew
from sglang_dsv4.kernels.operands import fake_rows


class Boundary(ProjectFew):
    """A block is one group of 16 tokens."""

    @cute.jit
    def __call__(
        self,
        output: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        fn: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch over groups and tiles of tokens."""
        tiles = (Int32(cm.rows_in(streams)) + TILE_ROWS - 1) // TILE_ROWS
        self.kernel(output, streams, post, comb, fn, out, partial).launch(
            grid=[self.groups, tiles, 1], block=[32 * CHUNKS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        output: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        fn: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
    ) -> None:
        """A warp is one chunk."""
        thread, _, _ = cute.arch.thread_idx()
        group, tile, _ = cute.arch.block_idx()
        lane, warp = thread % 32, thread // 32
        first, count = tile * TILE_ROWS, Int32(cm.rows_in(streams))
        chunk = group * CHUNKS + warp
        exists = chunk < self.chunks
        chunk = cm.select(exists, chunk, Int32(0))
        shared = self.shared_sums()
        pieces = self.load_fn(fn, chunk, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        old = self.load(streams, self.row_addresses(streams, first, lane), chunk, exists)
        tokens = [first + lane // 4 + 8 * half for half in range(2)]
        rows = [cm.select(token < count, token, count - 1) for token in tokens]
        column = chunk * CHUNK + lane % 4 * 8
        added, gains, mixes = [], [], []
        for row in rows:
            at = Int64(row) * cm.stride_of(output) + column
            added.append(cm.load_words_if(exists, cm.address_of(output, at), [Uint32(0)] * 4))
            gains.append(cm.load_words(cm.address_of(post, Int64(row) * STREAMS), STREAMS))
            at = cm.address_of(comb, Int64(row) * STREAMS * STREAMS)
            mixes.append(cm.load_words(at, STREAMS * STREAMS))
        others = [words[0] for words in (*added, *gains)]
        others += [word for words in mixes for word in words[::4]]
        words = self.expand(self.together(old, others, count), added, gains, mixes)
        for half in range_constexpr(2):
            if (tokens[half] < count) & exists:
                for j in range_constexpr(STREAMS):
                    at = Int64(tokens[half]) * (STREAMS * self.hidden) + (column + j * self.hidden)
                    global_store_u32x4(cm.address_of(out, at), *words[j][half])
        self.finish(words, pieces, shared, partial, group, first, count, thread)

    def expand(
        self, old: list[Any], added: list[Any], gains: list[Any], mixes: list[Any]
    ) -> list[list[list[Any]]]:
        """New streams' words [stream][half], with the additions of `expand.Expand`."""
        words: list[list[list[Any]]] = [[[], []] for _ in range(STREAMS)]
        for half in range(2):
            for j in range(STREAMS):
                gain = cm.float_of(gains[half][j])
                for k in range(4):
                    pair = [gain * value for value in cm.bf16_values(added[half][k])]
                    for i in range(STREAMS):
                        weight = cm.float_of(mixes[half][STREAMS * i + j])
                        values = cm.bf16_values(old[i][half][k])
                        pair = [a + weight * b for a, b in zip(pair, values, strict=True)]
                    words[j][half].append(cm.bf16_pair(*pair))
        return words


@compiled_kernel
def compile_boundary(arch: str, hidden: int) -> Any:
    """Compile for one width; needs no GPU."""
    f32, bf16 = torch.float32, torch.bfloat16
    return compile_for(
        arch,
        Boundary(hidden, PRE_ROWS),
        fake_rows(bf16, hidden),
        fake_streams(hidden),
        fake_compact(f32, STREAMS),
        fake_compact(f32, STREAMS, STREAMS),
        fake_compact(f32, STREAMS * hidden),
        fake_compact(bf16, STREAMS, hidden),
        fake_compact(f32, sums_pitch(PRE_ROWS)),
    )

"""Exact top-k of the indexer's scores, as slots in ascending order of entry, CuTeDSL.

A block serves one row, or a cluster of blocks a long one. Each block takes a contiguous range of
the row's entries, as many as fit in shared memory, and what is beyond in chunks read again from L2.
Scores become unsigned keys of the same order (NaN and -inf lowest, -0 equal to 0); the k-th largest
key is found by its digits of 11, 11 and 10 bits: a histogram in shared memory (the cluster's is the
first block's, to which the others add), and a sum over its bins from the top. Where two digits
single out topk keys, the third is left out. Then each warp counts its share of the entries above
that key and equal to it, and with the counts before it gives each entry above, and the first equal
ones, their places: the result is deterministic, and equal scores go by entry. The kernel is set up
while the scores are still computed (programmatic dependent launch).

Roofline, per row: 4 bytes an entry read once where shared memory holds the row (four or five times
beyond), 8 bytes a selected slot written. With so few bytes the time is that of about 12 block
barriers and of the loads and shared atomics between them.

Measured on an H200, 2026-12-02, topk 512, of random scores: 1, 64, 128 and 512 rows of 8192 take
7.0, 8.6, 9.7 and 23.9 us (8.8, 9.7, 10.9 and 29.5 with all three digits, page numbers read where
entries are placed, and three blocks an SM instead of four for many rows); rows of 32768: one on
four blocks 11.5 us (15.1), 16 on four each 14.3 (16.1), 64 on two each 18.2 (23.1), 128 on one
each 25.0 (26.1). torch.topk takes 56, 72 and 82 us for 1, 64 and 128 rows of 8192.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.indexer import instructions as extra
from sglang_dsv4.kernels.indexer.scan import block_scan
from sglang_dsv4.kernels.indexer.scores import PAGE
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel

# (lowest bit, bins) of each digit of a key, the highest first.
DIGITS = ((21, 2048), (10, 2048), (0, 1024))
HISTOGRAM = 2048 * 4
# The third digit, seldom needed, counts where the first one did.
HISTOGRAMS = 2
# Entries that a warp places at once, in units of 32.
GROUP = 4

MINUS_INFINITY = 0xFF800000
INFINITY_BITS = 0x7F800000
SIGN_BIT = 0x80000000


@dataclass(frozen=True)
class TopkShape:
    """Static shape: threads, entries a block holds, blocks that share a row, bytes of an index."""

    threads: int
    chunk: int
    cluster: int
    index_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Keys, histograms, numbers of the keys' pages, what threads pass around."""
        return self.chunk * 4 + HISTOGRAMS * HISTOGRAM + self.chunk // PAGE * 4 + 256


class TopkOperands(NamedTuple):
    """The tensors; `indexer` describes them. scores float32 [T, 64 P]; slots int64 [T, topk]."""

    scores: Any
    key_pages: Any
    row_of_token: Any
    visible: Any
    slots: Any


def ordered(bits: Uint32) -> Uint32:
    """A float32's bits as an unsigned number of the same order; NaN as -inf, -0 as 0; never 0."""
    bits = choose((bits & Uint32(0x7FFFFFFF)) > Uint32(INFINITY_BITS), Uint32(MINUS_INFINITY), bits)
    bits = choose(bits == Uint32(SIGN_BIT), Uint32(0), bits)
    negative = (bits & Uint32(SIGN_BIT)) != Uint32(0)
    return bits ^ choose(negative, Uint32(0xFFFFFFFF), Uint32(SIGN_BIT))


class SelectTopk:
    """The kernel for one static shape."""

    def __init__(self, shape: TopkShape) -> None:
        self.shape = shape
        self.threads, self.chunk = shape.threads, shape.chunk
        self.cluster = shape.cluster

    @cute.jit
    def __call__(self, operands: TopkOperands, stream: Any) -> None:
        """Launch a cluster for each row."""
        tokens = Int32(operands.slots.shape[0])
        self.kernel(operands).launch(
            grid=[tokens * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: TopkOperands) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self.tid, self.lane = tid, tid & 31
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.below = (Uint32(1) << Uint32(self.lane)) - Uint32(1)
        token = block // self.cluster
        self.rank = block - token * self.cluster

        memory = cutlass.memory.SmemAllocator()
        base = memory.allocate(self.shape.shared_bytes, 128).toint()
        self.keys = base
        self.histograms = base + self.chunk * 4
        self.pages = self.histograms + HISTOGRAMS * HISTOGRAM
        self.sums = self.pages + self.chunk // PAGE * 4
        self.found = self.sums + 128
        self.totals = self.sums + 144
        for number in cutlass.range_constexpr(HISTOGRAMS):
            self.clear(number)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        topk = Int32(operands.slots.shape[1])
        num_pages = Int32(operands.key_pages.shape[1])
        limit = Int64(num_pages) * PAGE
        seen = self.load_index(operands.visible, token)
        seen = choose(seen > Int64(0), choose(seen < limit, seen, limit), Int64(0))
        length = cute.arch.make_warp_uniform(Int32(seen))
        row = self.load_index(operands.row_of_token, token)
        table = address(operands.key_pages) + row * operands.key_pages.stride[0] * 4
        out = address(operands.slots) + Int64(token) * operands.slots.stride[0] * 8
        scores = address(operands.scores) + Int64(token) * operands.scores.stride[0] * 4
        if length <= topk:
            for at in cutlass.range(self.rank * self.threads, topk, self.cluster * self.threads):
                place = at + tid
                present = place < length
                entry = choose(present, place, Int32(0))
                number = ptx.global_load_i32(table + Int64(entry >> 6) * 4)
                slot = choose(present, self.slot(number, entry), Int64(-1))
                extra.global_store_i64_if(place < topk, out + Int64(place) * 8, slot)
        else:
            self.select(scores, table, out, length, topk)

    def load_index(self, vector: Any, at: Int32) -> Int64:
        """Element of an int32 or int64 vector."""
        size = self.shape.index_bytes
        place = address(vector) + Int64(at) * size
        return Int64(ptx.global_load_i64(place) if size == 8 else ptx.global_load_i32(place))

    def slot(self, page: Int32, entry: Int32) -> Int64:
        """Slot of an entry of the page of that number."""
        return Int64(page) * PAGE + Int64(entry & (PAGE - 1))

    @cute.jit
    def clear(self, number: cutlass.Constexpr) -> None:
        """Zero a histogram."""
        for i in cutlass.range_constexpr(HISTOGRAM // (self.threads * 8)):
            place = self.histograms + number * HISTOGRAM + (i * self.threads + self.tid) * 8
            ptx.shared_store_f32x2(place, Float32(0.0), Float32(0.0))

    @cute.jit
    def select(self, scores: Int64, table: Int64, out: Int64, length: Int32, topk: Int32) -> None:
        """The topk largest of more than topk entries."""
        unit = 4 * self.threads
        share = unit * self.cluster
        span = (length + (share - 1)) // share * unit
        start = self.rank * span
        end = cutlass.min(length, start + span)
        several = span > self.chunk
        row = (scores, table, start, end, several)
        if cutlass.const_expr(self.cluster > 1):
            extra.cluster_arrive()
        self.load_keys(row, start)
        cute.arch.sync_threads()

        prefix, need, inside = Uint32(0), Uint32(topk), Uint32(0)
        for digit in cutlass.range_constexpr(len(DIGITS) - 1):
            self.count_digit(row, digit, prefix)
            value, above, inside = self.find_digit(digit, need)
            prefix = prefix * Uint32(DIGITS[digit][1]) + value
            need = need - above
        # All that begin with prefix are selected: the k-th key is the lowest that may begin so.
        kth = prefix * Uint32(DIGITS[-1][1]) - Uint32(1)
        tied = Uint32(0)
        if inside != need:
            last = len(DIGITS) - 1
            self.clear(last % HISTOGRAMS)
            if cutlass.const_expr(self.cluster > 1):
                extra.cluster_arrive()
            cute.arch.sync_threads()
            self.count_digit(row, last, prefix)
            value, above, inside = self.find_digit(last, need)
            kth = prefix * Uint32(DIGITS[-1][1]) + value
            tied = need - above

        higher, equal, packed = Uint32(0), Uint32(0), Uint32(0)
        if cutlass.const_expr(self.cluster > 1):
            for at in cutlass.range(start, end, self.chunk):
                packed, total = self.rank_chunk(row, at, kth)
                higher, equal = higher + (total & Uint32(0xFFFF)), equal + (total >> 16)
            ptx.shared_store_u32(self.totals, higher)
            ptx.shared_store_u32(self.totals + 4, equal)
            extra.cluster_arrive()
            extra.cluster_wait()
            higher, equal = Uint32(0), Uint32(0)
            for peer in cutlass.range_constexpr(self.cluster - 1):
                earlier = peer < self.rank
                theirs = extra.cluster_load_u32(self.totals, peer)
                higher = higher + choose(earlier, theirs, Uint32(0))
                theirs = extra.cluster_load_u32(self.totals + 4, peer)
                equal = equal + choose(earlier, theirs, Uint32(0))
            extra.cluster_arrive()

        targets = (out, kth, tied)
        if cutlass.const_expr(self.cluster > 1):
            if several:
                self.place_chunks(row, targets, higher, equal)
            else:
                rank, tie = higher + (packed & Uint32(0xFFFF)), equal + (packed >> 16)
                self.write_chosen(start, end, targets, rank, tie)
            extra.cluster_wait()
        else:
            self.place_chunks(row, targets, higher, equal)

    @cute.jit
    def place_chunks(self, row: Any, targets: Any, higher: Uint32, equal: Uint32) -> None:
        """Store the selected entries of all chunks; `higher` and `equal` ones are before them."""
        _, _, start, end, _ = row
        for at in cutlass.range(start, end, self.chunk):
            before, total = self.rank_chunk(row, at, targets[1])
            rank, tie = higher + (before & Uint32(0xFFFF)), equal + (before >> 16)
            self.write_chosen(at, end, targets, rank, tie)
            higher, equal = higher + (total & Uint32(0xFFFF)), equal + (total >> 16)

    @cute.jit
    def rank_chunk(self, row: Any, at: Int32, kth: Uint32) -> Any:
        """Keys of a chunk above the k-th, and equal ones times 2^16: before this warp's, and all.

        A chunk has fewer than 2^16 of each kind.
        """
        self.reload_keys(row, at)
        higher, equal = self.count_chosen(at, row[3], kth)
        return block_scan(self.of_warp(higher | (equal << 16)), self.sums, self.threads)

    def of_warp(self, value: Uint32) -> Uint32:
        """A warp's number as the summand of its last lane, so that the sum before all is alike."""
        return choose(self.lane == 31, value, Uint32(0))

    @cute.jit
    def reload_keys(self, row: Any, at: Int32) -> None:
        """Load a chunk where the block has several; otherwise its only one is there."""
        if row[4]:
            cute.arch.sync_threads()
            self.load_keys(row, at)
            cute.arch.sync_threads()

    @cute.jit
    def load_keys(self, row: Any, at: Int32) -> None:
        """Keys of entries at.. to shared memory, up to a multiple of 4 x threads; 0 beyond end.

        And the numbers of their pages.
        """
        scores, table, _, end, _ = row
        last = cutlass.min(end - at, self.chunk)
        for first in cutlass.range(0, (last + (PAGE - 1)) // PAGE, self.threads):
            page = first + self.tid
            present = page * PAGE < last
            number = extra.global_load_i32_if(present, table + Int64(at // PAGE + page) * 4)
            place = self.pages + choose(present, page, Int32(0)) * 4
            extra.shared_store_u32_if(present, place, Uint32(number))
        for first in cutlass.range(0, last, 16 * self.threads):
            loaded = []
            for i in cutlass.range_constexpr(4):
                entry = first + (i * self.threads + self.tid) * 4
                place = scores + Int64(at + entry) * 4
                loaded += [ptx.global_load_u32x4_if(entry < last, place)]
            for i in cutlass.range_constexpr(4):
                entry = first + (i * self.threads + self.tid) * 4
                keys = [
                    choose(entry + j < last, ordered(bits), Uint32(0))
                    for j, bits in enumerate(loaded[i])
                ]
                extra.shared_store_x4_if(entry < self.chunk, self.keys + entry * 4, *keys)

    @cute.jit
    def count_digit(self, row: Any, digit: cutlass.Constexpr, prefix: Uint32) -> None:
        """Count the keys that begin with prefix by their next digit; every block of the cluster."""
        _, _, start, end, _ = row
        for at in cutlass.range(start, end, self.chunk):
            self.reload_keys(row, at)
            last = cutlass.min(end - at, self.chunk)
            for first in cutlass.range(0, last, 4 * self.threads):
                for key in ptx.shared_load_u32x4(self.keys + (first + self.tid * 4) * 4):
                    self.count_key(key, digit, prefix)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster > 1):
            if cutlass.const_expr(digit != 1):
                extra.cluster_wait()
            self.add_to_first(digit)
            extra.cluster_arrive()
            extra.cluster_wait()

    def histogram(self, digit: int) -> Any:
        """Shared address of a digit's histogram."""
        return self.histograms + digit % HISTOGRAMS * HISTOGRAM

    def count_key(self, key: Uint32, digit: int, prefix: Uint32) -> None:
        """Count a key, unless it is 0 or does not begin with prefix."""
        shift, bins = DIGITS[digit]
        wanted = key != Uint32(0)
        if digit > 0:
            wanted = (key >> DIGITS[digit - 1][0]) == prefix
        number = Int32((key >> shift) & Uint32(bins - 1))
        extra.shared_count_if(wanted, self.histogram(digit) + number * 4)

    @cute.jit
    def add_to_first(self, digit: cutlass.Constexpr) -> None:
        """Add this block's histogram to that of the cluster's first block."""
        for i in cutlass.range_constexpr(DIGITS[digit][1] // self.threads):
            place = self.histogram(digit) + (i * self.threads + self.tid) * 4
            count = ptx.shared_load_u32(place)
            away = (self.rank > 0) & (count > Uint32(0))
            extra.cluster_add_if(away, place, Int32(0), count)

    def load_bins(self, place: Int32, count: int) -> list[Uint32]:
        """The histogram's `count` bins from a place on."""
        if self.cluster > 1:
            return [extra.cluster_load_u32(place + 4 * i, Int32(0)) for i in range(count)]
        if count % 4:
            return [ptx.shared_load_u32(place + 4 * i) for i in range(count)]
        wide = [ptx.shared_load_u32x4(place + 16 * i) for i in range(count // 4)]
        return [value for four in wide for value in four]

    @cute.jit
    def find_digit(self, digit: cutlass.Constexpr, need: Uint32) -> Any:
        """(digit of the need-th largest key, keys with a larger one, keys with this one)."""
        bins = DIGITS[digit][1]
        each = bins // self.threads
        lowest = bins - each * (self.tid + 1)
        counts = self.load_bins(self.histogram(digit) + lowest * 4, each)
        mine = counts[0]
        for i in cutlass.range_constexpr(1, each):
            mine = mine + counts[i]
        above, _ = block_scan(mine, self.sums, self.threads)
        for i in cutlass.range_constexpr(each - 1, -1, -1):
            hit = (above < need) & (need <= above + counts[i])
            extra.shared_store_u32_if(hit, self.found, Uint32(lowest + i))
            extra.shared_store_u32_if(hit, self.found + 4, above)
            extra.shared_store_u32_if(hit, self.found + 8, counts[i])
            above = above + counts[i]
        cute.arch.sync_threads()
        of_all = [Int32(ptx.shared_load_u32(self.found + 4 * i)) for i in range(3)]
        return tuple(Uint32(cute.arch.make_warp_uniform(number)) for number in of_all)

    def warp_range(self, at: Any, end: Int32) -> Any:
        """This warp's share of a chunk: first and last place, multiples of GROUP x 32 entries."""
        unit = GROUP * self.threads
        units = (cutlass.min(end - at, self.chunk) + (unit - 1)) // unit
        return self.warp * units * (GROUP * 32), (self.warp + 1) * units * (GROUP * 32)

    @cute.jit
    def count_chosen(self, at: Any, end: Int32, kth: Uint32) -> Any:
        """Keys of this warp's share of a chunk above the k-th one, and equal to it."""
        higher, equal = Uint32(0), Uint32(0)
        first, last = self.warp_range(at, end)
        for place in cutlass.range(first, last, GROUP * 32):
            for key in self.group_keys(place):
                higher = higher + ptx.count_bits(ptx.ballot(key > kth))
                equal = equal + ptx.count_bits(ptx.ballot(key == kth))
        return higher, equal

    def group_keys(self, place: Any) -> list[Uint32]:
        """Keys of the entries place + 32 i + lane of the chunk."""
        start = self.keys + (place + self.lane) * 4
        return [ptx.shared_load_u32(start + 128 * i) for i in range(GROUP)]

    @cute.jit
    def write_chosen(
        self, at: Any, end: Int32, targets: Any, higher: Uint32, equal: Uint32
    ) -> None:
        """Store the slots of this warp's selected entries; `higher` and `equal` ones are before."""
        first, last = self.warp_range(at, end)
        for place in cutlass.range(first, last, GROUP * 32):
            higher, equal = self.write_group(place, targets, higher, equal)

    def write_group(self, place: Any, targets: Any, higher: Uint32, equal: Uint32) -> Any:
        """Store the selected ones of GROUP x 32 entries; returns the counts with theirs."""
        out, kth, tied = targets
        for i, key in enumerate(self.group_keys(place)):
            entry = place + 32 * i + self.lane
            page = Int32(ptx.shared_load_u32(self.pages + (entry >> 6) * 4))
            above, same = key > kth, key == kth
            of_above, of_same = ptx.ballot(above), ptx.ballot(same)
            rank = higher + ptx.count_bits(of_above & self.below)
            tie = equal + ptx.count_bits(of_same & self.below)
            taken = choose(tie < tied, tie, tied)
            chosen = above | (same & (tie < tied))
            extra.global_store_i64_if(chosen, out + Int64(rank + taken) * 8, self.slot(page, entry))
            higher = higher + ptx.count_bits(of_above)
            equal = equal + ptx.count_bits(of_same)
        return higher, equal


@compiled_kernel
def compile_topk(arch: str, shape: TopkShape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""
    index = Int64 if shape.index_bytes == 8 else Int32

    def rows(dtype: Any) -> Any:
        stride = (cute.sym_int64(), 1)
        sizes = (cute.sym_int64(), cute.sym_int64())
        return make_fake_tensor(dtype, sizes, stride, assumed_align=dtype.width // 8)

    def vector(dtype: Any) -> Any:
        return make_fake_compact_tensor(dtype, (cute.sym_int64(),), assumed_align=dtype.width // 8)

    operands = TopkOperands(
        scores=make_fake_tensor(
            Float32,
            (cute.sym_int64(), cute.sym_int64()),
            (cute.sym_int64(divisibility=4), 1),
            assumed_align=16,
        ),
        key_pages=rows(Int32),
        row_of_token=vector(index),
        visible=vector(index),
        slots=rows(Int64),
    )
    return compile_for(arch, SelectTopk(shape), operands)

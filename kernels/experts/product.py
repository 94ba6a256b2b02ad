"""One grouped product of routed experts on records (`kernels.linear.records`), mma.sync m16n8k16.

A block of slots is 8, 16 or 32 of one expert's slots (token * k + choice), in tiles of 8. A warp
has two row tiles of 16 weight rows, which meet the same activations: of gate and up the same rows,
so that their SwiGLU is made where the sums are; of the down projection two neighbours. `split`
warps, a team, share the columns and add their sums in order: the same bits every time.

An item is a block of slots and the row tiles of a thread block's teams. Thread blocks are as many
as the GPU holds, each with a contiguous range of items: its rows of activations stay in L1, and the
ring of weights goes on from one item to the next. Blocks of slots of one expert take turns in each
row tile, so that all but the first find its weights in L2; where a block of slots stays in shared
memory, all its items are in turn.

- Weights: each warp has a ring of its own in shared memory, filled by bulk copies that its first
  lane asks for, and waited for on its own barriers.
- Activations: a lane's part of a row of 64 columns is contiguous (see `records`), two 16-byte loads
  from L1 or global memory to registers, or from shared memory where all warps stage them there
  (`staging`). As soon as half a record is multiplied, the same half of the next record takes its
  registers; at the end of an item that of the next item's rows, unless they are staged. There is
  one block-wide barrier when staging begins and one for each further block that stays.
- What the next item needs of the lists is loaded an item ahead, what tells its block two ahead.

The gate and up launch waits for the kernel before it at once, as that makes the lists. The down
launch begins while gate and up end: the lists are older than those, so it reads them and asks for
its first weights, and waits only then. It reads the lists past L1, since nothing is promised about
what L1 holds before that wait.

SASS of the loop for each record (sm_90a, ptxas 13.4): 75 instructions with one token tile, 81 to 87
with two, 97 to 103 with four; staged whole 82 with two, 92 with four; by a ring 111 and 136, of
which what gives back and asks for a chunk runs at every second stage only. Run on an H200.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.combine import LOG2_E
from sglang_dsv4.kernels.attention.instructions import address, choose
from sglang_dsv4.kernels.experts import ptx as own
from sglang_dsv4.kernels.experts.shape import (
    PLACES,
    RECORDS,
    RESERVED_BYTES,
    RING_BYTES,
    STAGE_BYTES,
    STAGES,
    STAGES_OF_CHUNK,
    SUM_ROW,
    THREADS,
    TILE_BYTES,
    TOKENS,
    WARPS,
    Shape,
    resident_blocks,
    shared_bytes,
)
from sglang_dsv4.kernels.experts.staging import Staging
from sglang_dsv4.kernels.hardware import SHARED_BYTES
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.linear import decode
from sglang_dsv4.kernels.linear.records import CODE_BYTES, COLUMNS, RECORD_BYTES, ROWS
from sglang_dsv4.kernels.linear.stream import UNDO


class Operands(NamedTuple):
    """Tensors of a launch.

    x: bfloat16 [T, inputs] if gated, else [T * k, inputs]; records: uint8 [n] of all experts;
    outer: float32 [E]; routed: float32 [T * k]; rows: int32, slots by block; owners: int32, expert
    of each block, ascending, -1 first; counts: int32 [2], slots of all blocks and the number of
    blocks of expert -1; out: bfloat16 [T * k, outputs].
    """

    x: Any
    records: Any
    outer: Any
    routed: Any
    rows: Any
    owners: Any
    counts: Any
    out: Any


class Numbers(NamedTuple):
    """slots: T * k; blocks: of the grid; sms: multiprocessors; limit: of SwiGLU's operands."""

    slots: Any
    blocks: Any
    sms: Any
    limit: Any


# Places of what changes from stage to stage.
_FRONT_ITEM, _FRONT_STAGE, _FRONT_SLOT, _HELD, _SLOT, _PARITY = range(6)


class GroupedProduct:
    """The kernel for one static shape on one architecture."""

    def __init__(self, shape: Shape, arch: str) -> None:
        self.shape = shape
        self.across = shape.inputs // COLUMNS
        self.tall = shape.pairs * 2
        # Whether all warps have the same number of records, whole stages.
        self.even = self.across % (shape.split * RECORDS) == 0
        self.sum_bytes = 2 * SUM_ROW * 4 * shape.slots
        self.staging = Staging(shape)
        # All columns of a block of slots are staged, so its items are in turn.
        self.stays = shape.staged == shape.inputs
        self.resident = resident_blocks(shape, arch)
        block, sm = shared_bytes(shape) + RESERVED_BYTES, SHARED_BYTES[arch] + RESERVED_BYTES
        # What the blocks leave of shared memory (in percent) is L1.
        self.carveout = -(-100 * self.resident * block // sm)

    @cute.jit
    def __call__(self, operands: Operands, numbers: Numbers, stream: Any) -> None:
        """Launch, with programmatic serialization."""
        self.kernel(operands, numbers).launch(
            grid=[numbers.blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=self.carveout,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, numbers: Numbers) -> None:
        """See the module docstring."""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.operands, self.numbers = operands, numbers
        self.tid = tid
        self.find_lane()
        self.part, self.team = warp % self.shape.split, warp // self.shape.split
        self.take_columns()
        base = cutlass.memory.SmemAllocator().allocate(shared_bytes(self.shape), 128).toint()
        self.ring = base + warp * RING_BYTES
        self.sums_at = base + WARPS * RING_BYTES + warp * self.sum_bytes
        self.team_sums = self.sums_at - self.part * self.sum_bytes
        notes = base + WARPS * (RING_BYTES + self.sum_bytes)
        self.notes = notes + warp * (8 * self.shape.slots)
        self.arrived = notes + WARPS * (8 * self.shape.slots) + warp * (8 * STAGES)
        decode.barriers_init(True, self.arrived, STAGES, 1)
        cute.arch.sync_warp()
        if cutlass.const_expr(self.shape.staged):
            staged = notes + WARPS * (8 * self.shape.slots + 8 * STAGES)
            self.staging.start(staged, warp, self.lane, self.first_record)
            cute.arch.sync_threads()
        if cutlass.const_expr(self.shape.gated):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.find_share(block)

        front = cute.make_rmem_tensor(6, Int32)
        owners = cute.make_rmem_tensor(1, Int32)
        sources = cute.make_rmem_tensor(4, Int64)
        experts = cute.make_rmem_tensor(2, Int32)
        slots = cute.make_rmem_tensor(self.shape.tiles, Int32)
        targets = cute.make_rmem_tensor(2, Int32)
        for i in cutlass.range_constexpr(6):
            front[i] = Int32(0)
        front[_FRONT_ITEM] = self.first
        for i in cutlass.range_constexpr(2):
            sources[i] = Int64(0)
            experts[i], targets[i] = Int32(0), Int32(0)
        self.look(self.first, owners)
        self.locate(self.first, owners, sources, experts, slots, targets)
        self.look(self.first + 1, owners)
        for _ in cutlass.range_constexpr(STAGES):
            self.ask(self.first - 1, front, sources)
        if cutlass.const_expr(not self.shape.gated):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.clear(block)
        self.work(front, owners, sources, experts, slots, targets)

    def find_lane(self) -> None:
        """The lane, and which of its tokens and columns are its own."""
        self.lane = self.tid & 31
        self.group, self.quad = self.lane >> 2, self.lane & 3

    def take_columns(self) -> None:
        """This warp's records of a row tile."""
        split = self.shape.split
        if self.even:
            self.count: Any = self.across // split
            self.first_record = self.part * self.count
        else:
            self.first_record = self.across * self.part // split
            self.count = self.across * (self.part + 1) // split - self.first_record
        self.stages = (self.count + RECORDS - 1) // RECORDS

    def find_share(self, block: Int32) -> None:
        """This thread block's items; blocks of a multiprocessor are neighbours."""
        counts = address(self.operands.counts)
        padded = self.uniform(own.load_i32_if(True, counts, Int32(0)))
        self.idle = self.uniform(own.load_i32_if(True, counts + 4, Int32(0)))
        self.blocks = padded // self.shape.slots - self.idle
        per_sm = self.numbers.blocks // self.numbers.sms
        rank = block % self.numbers.sms * per_sm + block // self.numbers.sms
        items = self.blocks * self.shape.groups
        self.first = rank * items // self.numbers.blocks
        self.last = (rank + 1) * items // self.numbers.blocks

    def uniform(self, x: Any) -> Int32:
        """A number that all lanes hold."""
        return cute.arch.make_warp_uniform(x)

    def window(self, item: Int32) -> Int32:
        """First of the 32 blocks of slots among which is that of an item."""
        return item // self.shape.groups & -32

    def look(self, item: Int32, owners: Any) -> None:
        """Start the load of the experts of the 32 blocks around an item's; -1 beyond the last."""
        item = cutlass.max(cutlass.min(item, self.last - 1), Int32(0))
        block = self.window(item) + self.lane
        at = address(self.operands.owners) + Int64(self.idle + block) * 4
        owners[0] = own.load_i32_if(block < self.blocks, at, Int32(-1))

    def locate(
        self, item: Int32, owners: Any, sources: Any, experts: Any, slots: Any, targets: Any
    ) -> None:
        """Place 1 of everything for an item: its expert, weights, slots and pair of row tiles.

        Blocks of one expert within the window are items in turn, unless a block stays.
        """
        item = cutlass.max(cutlass.min(item, self.last - 1), Int32(0))
        window, groups = self.window(item), Int32(self.shape.groups)
        expert = self.uniform(ptx.shuffle_index(owners[0], item // groups - window))
        if self.stays:
            block, group = item // groups, item % groups
        else:
            same = self.uniform(ptx.ballot(owners[0] == expert))
            begin = window + Int32(ptx.count_bits((same & (Uint32(0) - same)) - Uint32(1)))
            turns = Int32(ptx.count_bits(same))
            local = item - begin * groups
            block, group = begin + local % turns, local // turns
        pair = group * (WARPS // self.shape.split) + self.team
        # A team without a row tile of its own repeats the last one's.
        pair = cutlass.min(pair, Int32(self.shape.pairs - 1))
        experts[1], targets[1] = expert, pair
        for m in range(2):
            tile = pair + m * self.shape.pairs if self.shape.gated else 2 * pair + m
            row = Int64(expert) * self.tall + Int64(tile)
            record = row * self.across + Int64(self.first_record)
            sources[2 + m] = address(self.operands.records) + record * RECORD_BYTES
        for n in range(self.shape.tiles):
            row = (self.idle + block) * self.shape.slots + n * TOKENS + self.group
            at = address(self.operands.rows) + Int64(row) * 4
            slots[n] = own.load_i32_if(self.first < self.last, at, self.numbers.slots)

    @cute.jit
    def ask(self, item: Int32, front: Any, sources: Any) -> None:
        """Ask for the next stage of this item or the one after, if the ring has room."""
        mine = (front[_FRONT_ITEM] <= item + 1) & (front[_FRONT_ITEM] < self.last)
        if mine & (front[_HELD] < STAGES):
            stage, slot = front[_FRONT_STAGE], front[_FRONT_SLOT]
            size = Int32(RECORDS) * RECORD_BYTES
            if cutlass.const_expr(not self.even):
                size = cutlass.min(self.count - stage * RECORDS, Int32(RECORDS)) * RECORD_BYTES
            ahead = front[_FRONT_ITEM] > item
            place = self.ring + slot * STAGE_BYTES
            offset = Int64(stage) * TILE_BYTES
            starts = [choose(ahead, sources[2 + m], sources[m]) + offset for m in range(2)]
            targets = [place + m * TILE_BYTES for m in range(2)]
            decode.copy_bytes(True, self.arrived + 8 * slot, targets, starts, size)
            front[_HELD] = front[_HELD] + 1
            front[_FRONT_SLOT] = choose(slot == STAGES - 1, Int32(0), slot + 1)
            ended = stage + 1 == self.stages
            front[_FRONT_STAGE] = choose(ended, Int32(0), stage + 1)
            front[_FRONT_ITEM] = choose(ended, front[_FRONT_ITEM] + 1, front[_FRONT_ITEM])

    @cute.jit
    def work(
        self, front: Any, owners: Any, sources: Any, experts: Any, slots: Any, targets: Any
    ) -> None:
        """The thread block's items."""
        tiles = self.shape.tiles
        rows = cute.make_rmem_tensor(tiles, Int64)
        weights = cute.make_rmem_tensor(tiles, Float32)
        fragments = cute.make_rmem_tensor(8 * tiles, Uint32)
        sums = cute.make_rmem_tensor(8 * tiles, Float32)
        fill = cute.make_rmem_tensor(1, Int32)
        at = cute.make_rmem_tensor(1, Int32)
        fill[0], at[0] = Int32(0), Int32(0)
        self.weigh(slots, weights)
        if cutlass.const_expr(self.shape.staged):
            self.find_rows(slots, rows)
            if self.first < self.last:
                self.staging.copy_first(rows)
        else:
            self.turn_to(slots, rows)
            for half in cutlass.range_constexpr(2):
                self.fetch(half, rows, at, fragments)
        for number in cutlass.range(self.first, self.last, 1):
            item = Int32(number)
            self.note(slots, weights)
            for i in cutlass.range_constexpr(2):
                sources[i] = sources[2 + i]
            experts[0], targets[0] = experts[1], targets[1]
            self.locate(item + 1, owners, sources, experts, slots, targets)
            self.look(item + 2, owners)
            outer_at = address(self.operands.outer) + Int64(experts[0]) * 4
            outer = ptx.global_load_f32(outer_at) * Float32(UNDO)
            for i in cutlass.range_constexpr(8 * tiles):
                sums[i] = Float32(0.0)
            for _ in cutlass.range(0, STAGES, 1):
                self.ask(item, front, sources)
            if cutlass.const_expr(self.shape.staged):
                self.staging.begin(fill, at)
                for half in cutlass.range_constexpr(2):
                    self.fetch(half, rows, at, fragments)
            # As a number that the compiler does not know, so that it does not unroll.
            for stage in cutlass.range(0, ptx.opaque(Int32(self.stages)), 1):
                ptx.barrier_wait(self.arrived + 8 * front[_SLOT], front[_PARITY])
                place = self.ring + front[_SLOT] * STAGE_BYTES
                for r in cutlass.range_constexpr(RECORDS):
                    k = Int32(stage) * RECORDS + r
                    record = place + r * RECORD_BYTES
                    if cutlass.const_expr(self.even):
                        self.multiply(record, k, r, slots, rows, weights, fill, at, fragments, sums)
                    else:
                        if k < self.count:
                            self.multiply(
                                record, k, r, slots, rows, weights, fill, at, fragments, sums
                            )
                cute.arch.sync_warp()
                ended = front[_SLOT] == STAGES - 1
                front[_PARITY] = choose(ended, front[_PARITY] ^ 1, front[_PARITY])
                front[_SLOT] = choose(ended, Int32(0), front[_SLOT] + 1)
                front[_HELD] = front[_HELD] - 1
                self.ask(item, front, sources)
                if cutlass.const_expr(self.shape.goes_round):
                    self.turn_round(item, Int32(stage), slots, rows, fill)
            if cutlass.const_expr(self.shape.staged):
                self.weigh(slots, weights)
            if cutlass.const_expr(self.stays):
                self.replace_staged(item, slots, rows, fill)
            self.finish(targets[0], outer, sums)

    def find_rows(self, slots: Any, rows: Any) -> None:
        """Where the rows are that this warp stages."""
        self.staging.find_rows(self.operands.x, slots, self.numbers.slots, rows)

    @cute.jit
    def replace_staged(self, item: Int32, slots: Any, rows: Any, fill: Any) -> None:
        """Stage the next item's block, if it is another, when all warps are through with this."""
        if (item + 1 < self.last) & ((item + 1) % Int32(self.shape.groups) == 0):
            self.find_rows(slots, rows)
            cute.arch.sync_threads()
            self.staging.copy_first(rows)
            fill[0] = fill[0] + 1

    @cute.jit
    def turn_round(self, item: Int32, stage: Int32, slots: Any, rows: Any, fill: Any) -> None:
        """Where a chunk ends, give it back and ask for one ahead, of this item or the next."""
        if (stage + 1) % STAGES_OF_CHUNK == 0:
            self.staging.give_back(fill)
            chunks = Int32(self.shape.chunks)
            ahead = stage // STAGES_OF_CHUNK + (PLACES - 1)
            if ahead == chunks:
                self.find_rows(slots, rows)
            if (ahead < chunks) | (item + 1 < self.last):
                self.staging.refill(fill, choose(ahead < chunks, ahead, ahead - chunks), rows)
            fill[0] = fill[0] + 1

    def note(self, slots: Any, weights: Any) -> None:
        """An item's slots and their weights to shared memory."""
        # The warp has read those of the item before.
        cute.arch.sync_warp()
        for n in range(self.shape.tiles):
            at = self.notes + (n * TOKENS + self.group) * 8
            ptx.shared_store_u32(at, Uint32(slots[n]))
            ptx.shared_store_f32(at + 4, weights[n])

    def weigh(self, slots: Any, weights: Any) -> None:
        """The router's weights of the next item's slots."""
        for n in range(self.shape.tiles):
            weights[n] = Float32(1.0)
            if not self.shape.gated:
                at = address(self.operands.routed) + Int64(slots[n]) * 4
                weights[n] = own.load_f32_if(slots[n] < self.numbers.slots, at)

    def turn_to(self, slots: Any, rows: Any) -> None:
        """This lane's rows of activations in the next item, where they are not staged.

        A row is the address of its next columns. Without a slot it is that of the block's first
        one, which there always is: nothing of it reaches the sums of others.
        """
        head = ptx.shuffle_index(slots[0], self.quad)
        head = cutlass.min(head, self.numbers.slots - 1)
        for n in range(self.shape.tiles):
            slot = choose(slots[n] < self.numbers.slots, slots[n], head)
            row = slot // self.shape.chosen if self.shape.gated else slot
            column = self.first_record * COLUMNS + self.quad * 16
            at = Int64(row) * self.shape.inputs + Int64(column)
            rows[n] = address(self.operands.x) + at * 2

    def fetch(self, half: int, rows: Any, at: Any, fragments: Any) -> None:
        """Half of a record's columns of every token tile."""
        if self.shape.staged:
            self.staging.load(half, at, fragments)
            return
        for n in range(self.shape.tiles):
            found = decode.global_load_x4(rows[n] + 16 * half)
            for i in range(4):
                fragments[8 * n + 4 * half + i] = found[i]

    @cute.jit
    def multiply(
        self,
        place: Int32,
        k: Int32,
        r: int,
        slots: Any,
        rows: Any,
        weights: Any,
        fill: Any,
        at: Any,
        fragments: Any,
        sums: Any,
    ) -> None:
        """A record of both row tiles with all token tiles; fetch the columns of the next one."""
        words, scales = [], []
        for m in cutlass.range_constexpr(2):
            tile = place + m * TILE_BYTES
            words.append(ptx.shared_load_u32x4(tile + self.lane * 16))
            pair = decode.shared_load_u16(tile + CODE_BYTES + self.lane * 2)
            scales.append(decode.spread_scales(pair))
        if cutlass.const_expr(self.shape.staged):
            self.staging.advance(k, r, self.count, self.even, fill, at)
        else:
            if k + 1 == self.count:
                self.weigh(slots, weights)
                self.turn_to(slots, rows)
            else:
                for n in cutlass.range_constexpr(self.shape.tiles):
                    rows[n] = rows[n] + COLUMNS * 2
        for half in cutlass.range_constexpr(2):
            for m in cutlass.range_constexpr(2):
                for step in cutlass.range_constexpr(2):
                    codes = decode.spread_codes(words[m][2 * half + step])
                    a = [ptx.mul_bf16x2(codes[i], scales[m][i % 2]) for i in range(4)]
                    for n in cutlass.range_constexpr(self.shape.tiles):
                        own_sums, b = 4 * (2 * n + m), 8 * n + 4 * half + 2 * step
                        total = [sums[own_sums + c] for c in range(4)]
                        total = ptx.mma_bf16(a, [fragments[b], fragments[b + 1]], total)
                        for c in cutlass.range_constexpr(4):
                            sums[own_sums + c] = total[c]
            self.fetch(half, rows, at, fragments)

    def meet(self) -> None:
        """Wait for the team's other warps."""
        if self.shape.split == 1:
            cute.arch.sync_warp()
        else:
            own.named_barrier(1 + self.team, 32 * self.shape.split)

    @cute.jit
    def finish(self, pair: Int32, outer: Float32, sums: Any) -> None:
        """Add the team's sums in order and write the result of an item."""
        block = self.shape.slots
        # The warps have read what they wrote here for the item before.
        self.meet()
        for n in cutlass.range_constexpr(self.shape.tiles):
            for m in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(4):
                    token = n * TOKENS + 2 * self.quad + c % 2
                    place = (m * block + token) * SUM_ROW + self.group + 8 * (c // 2)
                    ptx.shared_store_f32(self.sums_at + place * 4, sums[4 * (2 * n + m) + c])
        self.meet()
        # A unit is two neighbouring rows of one slot's result.
        per_slot = ROWS // 2 if self.shape.gated else ROWS
        units, threads = block * per_slot, 32 * self.shape.split
        for step in cutlass.range_constexpr(-(-units // threads)):
            unit = step * threads + self.part * 32 + self.lane
            token = cutlass.min(unit // per_slot, Int32(block - 1))
            row = unit % per_slot * 2
            slot = Int32(ptx.shared_load_u32(self.notes + token * 8))
            weight = ptx.shared_load_f32(self.notes + token * 8 + 4)
            factor = outer * weight
            if cutlass.const_expr(self.shape.gated):
                gate, up = self.total(0, token, row), self.total(1, token, row)
                pair_of = [
                    self.swiglu(g * factor, u * factor) for g, u in zip(gate, up, strict=True)
                ]
            else:
                pair_of = [v * factor for v in self.total(row // ROWS, token, row % ROWS)]
            column = pair * (2 * per_slot) + row
            at = address(self.operands.out) + (Int64(slot) * self.shape.outputs + column) * 2
            inside = (slot < self.numbers.slots) & (unit < units)
            own.store_u32_if(inside, at, ptx.pack_bf16x2(*pair_of))

    def total(self, m: Any, token: Int32, row: Int32) -> list[Float32]:
        """Sums of two rows of row tile m for a token over the team's warps."""
        place = self.team_sums + ((m * self.shape.slots + token) * SUM_ROW + row) * 4
        total = list(ptx.shared_load_f32x2(place))
        for part in range(1, self.shape.split):
            found = ptx.shared_load_f32x2(place + part * self.sum_bytes)
            total = [a + b for a, b in zip(total, found, strict=True)]
        return total

    def swiglu(self, gate: Float32, up: Float32) -> Float32:
        """silu(min(gate, limit)) * clamp(up, -limit, limit); a NaN stays one."""
        limit = self.numbers.limit
        gate = choose(gate > limit, limit, gate)
        up = choose(up > limit, limit, choose(up < -limit, -limit, up))
        below = Float32(1.0) + ptx.exp2(gate * Float32(-LOG2_E))
        return own.divide(gate, below) * up

    @cute.jit
    def clear(self, block: Int32) -> None:
        """Zeros for the slots without an expert."""
        rows = self.idle * self.shape.slots
        steps = cutlass.max(rows - block + self.numbers.blocks - 1, Int32(0)) // self.numbers.blocks
        for step in cutlass.range(0, steps, 1):
            at = address(self.operands.rows) + Int64(block + Int32(step) * self.numbers.blocks) * 4
            slot = self.uniform(own.load_i32_if(True, at, Int32(0)))
            if slot < self.numbers.slots:
                row = address(self.operands.out) + Int64(slot) * (self.shape.outputs * 2)
                for i in cutlass.range_constexpr(-(-self.shape.outputs // (8 * THREADS))):
                    piece = i * THREADS + self.tid
                    own.store_zeros_if(piece < self.shape.outputs // 8, row + Int64(piece) * 16)


@compiled_kernel
def compile_product(arch: str, shape: Shape) -> Any:
    """Compile for an architecture and a static shape, from fake tensors; needs no GPU."""

    def rows(width: int) -> Any:
        size = (cute.sym_int32(), width)
        return make_fake_compact_tensor(BFloat16, size, stride_order=(1, 0), assumed_align=16)

    def vector(dtype: Any, align: int = 4) -> Any:
        return make_fake_compact_tensor(dtype, (cute.sym_int64(),), assumed_align=align)

    operands = Operands(
        x=rows(shape.inputs),
        records=vector(Uint8, 16),
        outer=vector(Float32),
        routed=vector(Float32),
        rows=vector(Int32),
        owners=vector(Int32),
        counts=vector(Int32),
        out=rows(shape.outputs),
    )
    numbers = Numbers(Int32(1), Int32(1), Int32(1), Float32(1.0))
    return compile_for(arch, GroupedProduct(shape, arch), operands, numbers)

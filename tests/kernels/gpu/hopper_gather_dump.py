"""A kernel that runs the Hopper gather alone and copies every filled buffer to global memory."""

import cutlass
import torch
from cutlass import Int32, Int64, Uint8, cute
from cutlass import memory as cutlass_memory
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from sglang_dsv4.kernels.attention import instructions as ptx
from sglang_dsv4.kernels.attention.hopper import gather as g
from sglang_dsv4.kernels.attention.hopper import ptx as hopper
from sglang_dsv4.kernels.attention.instructions import address
from sglang_dsv4.kernels.attention.lists import TokenLists
from sglang_dsv4.kernels.attention.operands import Numbers, Operands
from sglang_dsv4.kernels.jit import compile_for, compiled_kernel
from sglang_dsv4.kernels.reference.kv_store import read_records

DUMP_BYTES = g.BUFFER_BYTES + 16


class GatherDump:
    """Block (token, split): a warpgroup that copies, then the producer."""

    def __init__(self, config):
        self.config = config
        self.gather = g.Gather(config)

    @cute.jit
    def __call__(
        self,
        window_slots,
        comp_slots,
        window_pool,
        comp_pool,
        comp_lengths,
        out,
        num_window: Int32,
        num_comp: Int32,
        splits: Int32,
        stream,
    ):
        self.kernel(
            window_slots, comp_slots, window_pool, comp_pool, comp_lengths, out,
            num_window, num_comp,
        ).launch(
            grid=[out.shape[0], splits, 1],
            block=[128 + self.config.threads, 1, 1],
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        window_slots,
        comp_slots,
        window_pool,
        comp_pool,
        comp_lengths,
        out,
        num_window: Int32,
        num_comp: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        token, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        size = self.config.buffers * g.BUFFER_BYTES
        keys = cutlass_memory.SmemAllocator().allocate(size + 512, 1024).toint()
        masks = keys + size
        barriers = masks + 64
        if tid == 0:
            self.gather.init_barriers(barriers, (128, 128))
            hopper.barrier_init_fence()
        cute.arch.sync_threads()
        operands = Operands(
            window_slots=window_slots,
            comp_slots=comp_slots,
            comp_lengths=comp_lengths,
            window_pool=window_pool,
            comp_pool=comp_pool,
            **dict.fromkeys(("q", "sinks", "out", "lse", "part_out", "part_lse")),
        )
        numbers = Numbers(num_window, num_comp, splits, None, None)
        lists = TokenLists(self.config.lists, operands, numbers, token)
        first, last = lists.share(split, splits)
        if tid < 128:
            for tile in range(first, last):
                buffer, parity = self.gather.place(tile - first)
                target = address(out) + Int64(token) * out.stride[0] + Int64(tile) * DUMP_BYTES
                for half in cutlass.range_constexpr(2):
                    hopper.barrier_wait(self.gather.full(barriers, buffer, half), parity)
                    start = keys + buffer * g.BUFFER_BYTES + half * g.HALF_BYTES
                    for i in cutlass.range_constexpr(16):
                        at = (i * 128 + tid) * 16
                        words = ptx.shared_load_f32x4(start + at)
                        ptx.global_store_f32x4(target + half * g.HALF_BYTES + Int64(at), *words)
                    if half == 0 and tid == 0:
                        low, high = hopper.shared_load_u32x2(masks + buffer * g.MASK_BYTES)
                        zero = Int32(0)
                        ptx.global_store_u32x4(target + g.BUFFER_BYTES, low, high, zero, zero)
                    hopper.barrier_arrive(self.gather.empty(barriers, buffer, half))
        else:
            self.gather.produce(tid - 128, lists, first, last, keys, masks, barriers)


@compiled_kernel
def compile_gather_dump(arch, config):
    """The kernel for a static shape, from fake tensors."""
    slot = Int64 if config.lists.slot_bytes == 8 else Int32

    def tensor(dtype, rank, align, unit=1):
        sizes = tuple(cute.sym_int64() for _ in range(rank))
        strides = (*(cute.sym_int64(divisibility=unit) for _ in range(rank - 1)), 1)
        return make_fake_tensor(dtype, sizes, strides, assumed_align=align)

    return compile_for(
        arch,
        GatherDump(config),
        tensor(slot, 2, config.lists.slot_bytes),
        tensor(slot, 2, config.lists.slot_bytes),
        tensor(Uint8, 2, 16, 16),
        tensor(Uint8, 2, 16, 16),
        make_fake_compact_tensor(Int32, (cute.sym_int64(),), assumed_align=4),
        tensor(Uint8, 3, 16, 16),
        Int32(0),
        Int32(0),
        Int32(1),
    )


def dump(inputs, config, splits=1, lengths=None):
    """(tiles bf16 [T, tiles, 64, 512] in the natural order of dims, masks bool [T, tiles, 64])."""
    tokens, num_window = inputs.window_slots.shape
    num_comp = inputs.comp_slots.shape[1]
    tiles = -(-num_window // 64) + -(-num_comp // 64)
    out = torch.full((tokens, tiles, DUMP_BYTES), 0xFF, dtype=torch.uint8, device="cuda")
    dummy = torch.zeros(1, dtype=torch.int32, device="cuda")
    compile_gather_dump("sm_90a", config)(
        inputs.window_slots, inputs.comp_slots, inputs.window_pool, inputs.comp_pool,
        dummy if lengths is None else lengths, out, num_window, num_comp, splits,
    )  # fmt: skip
    torch.cuda.synchronize()
    bits = out[..., g.BUFFER_BYTES : g.BUFFER_BYTES + 8]
    masks = (bits[..., None] >> torch.arange(8, device="cuda", dtype=torch.uint8)) & 1
    units = out[..., : g.BUFFER_BYTES].contiguous().view(torch.bfloat16)
    units = units.view(tokens, tiles, 8, 64, 8, 8)
    row, unit = torch.arange(64, device="cuda"), torch.arange(8, device="cuda")
    turned = unit[None] ^ (row[:, None] & 7)
    units = units[:, :, :, row[:, None], turned]
    natural = units.clone()
    order = torch.tensor([3, 7, 2, 6, 1, 5, 0, 4], device="cuda")
    natural[:, :, :7, :, :, order] = units[:, :, :7] * 256
    return natural.permute(0, 1, 3, 2, 4, 5).reshape(tokens, tiles, 64, 512), masks.flatten(-2) != 0


def wanted(inputs, lengths=None):
    """What `dump` must give, from the reference's decoder; tiles beyond a length are undefined."""
    values, listed = [], []
    pairs = [
        (inputs.window_slots, inputs.window_pool, inputs.window_layout),
        (inputs.comp_slots, inputs.comp_pool, inputs.comp_layout),
    ]
    for index, (slots, pool, layout) in enumerate(pairs):
        tokens, count = slots.shape
        padded = torch.full((tokens, -(-count // 64) * 64), -1, device="cuda", dtype=torch.int64)
        padded[:, :count] = slots.long()
        if index == 1 and lengths is not None:
            place = torch.arange(padded.shape[1], device="cuda")
            padded = padded.masked_fill(place >= lengths[:, None], -1)
        inside = (padded >= 0) & (padded < len(pool) * layout.page_size)
        padded = padded.masked_fill(~inside, -1)
        records = read_records(pool, padded.flatten(), layout).view(tokens, -1, 64, 512)
        records = torch.where(inside.view(tokens, -1, 64, 1), records, 0.0)
        values.append(records.bfloat16())
        listed.append(inside.view(tokens, -1, 64))
    return torch.cat(values, 1), torch.cat(listed, 1)

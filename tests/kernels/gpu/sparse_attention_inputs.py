"""Random inputs of sparse attention on a GPU, and what the reference makes of them."""

from dataclasses import dataclass

import torch

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.kernels.attention.sparse_attention import sparse_attention
from sglang_dsv4.kernels.reference import sparse_attention as reference
from sglang_dsv4.kernels.reference.kv_store import read_records, write_records
from sglang_dsv4.kernels.reference.rope import build_rope_table

SCALE = 512**-0.5
MAX_POSITION = 1 << 16


@dataclass
class Inputs:
    """Arguments of one call, in the order of the operation's signature."""

    q: torch.Tensor
    window_slots: torch.Tensor
    window_pool: torch.Tensor
    window_layout: RecordLayout
    comp_slots: torch.Tensor | None
    comp_pool: torch.Tensor | None
    comp_layout: RecordLayout | None
    sinks: torch.Tensor
    scale: float = SCALE
    out_scale: float = 1.0
    comp_lengths: torch.Tensor | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, plan=None):
        return sparse_attention(
            self.q,
            self.window_slots,
            self.window_pool,
            self.window_layout,
            self.comp_slots,
            self.comp_pool,
            self.comp_layout,
            self.sinks,
            self.scale,
            self.out_scale,
            self.comp_lengths,
            self.rotation,
            plan,
        )

    def lists(self, token):
        """(slots, pool, layout) of the token's lists, the compressed one up to its length."""
        yield self.window_slots[token], self.window_pool, self.window_layout
        if self.comp_slots is not None:
            slots = self.comp_slots[token]
            if self.comp_lengths is not None:
                slots = slots[: max(0, int(self.comp_lengths[token]))]
            yield slots, self.comp_pool, self.comp_layout

    def expected(self):
        """(out, lse, bound of out, bound of lse): the reference in float32 and its distance.

        Each weight is rounded to bf16 (2^-9 relative; 2^-8 leaves room for the approximate
        exponential and the order of sums), so out may differ by 2^-8 sum(w |v|) times the gain;
        out itself is rounded to bf16 once, 2^-9 relative. Turned back, a value has the differences
        of its pair's two, times |cos| and |sin|; the float32 roundings of the turn, 2^-23 of them,
        are small beside the 2^-8. A score is a sum of 512 products in
        float32: 2^-19 of the sum of their magnitudes leaves 32 roundings.
        """
        args = [
            self.window_slots,
            self.window_pool,
            self.window_layout,
            self.comp_slots,
            self.comp_pool,
            self.comp_layout,
            self.sinks,
            self.scale,
            self.out_scale,
            self.comp_lengths,
            self.rotation,
        ]
        out, lse = reference.sparse_attention(self.q.float(), *args)
        spread, drift = torch.zeros_like(out), torch.zeros_like(lse)
        for token in range(len(self.q)):
            gain = torch.sigmoid(lse[token] - self.sinks) * abs(self.out_scale)
            for slots, pool, layout in self.lists(token):
                inside = (slots >= 0) & (slots < len(pool) * layout.page_size)
                records = read_records(pool, slots[inside], layout)
                if len(records) == 0:
                    continue
                query = self.q[token].float()
                weights = (query @ records.T * self.scale - lse[token, :, None]).exp()
                spread[token] += gain[:, None] * (weights @ records.abs())
                size = (query.abs() @ records.abs().T).amax(dim=1) * self.scale
                drift[token] = torch.maximum(drift[token], size.nan_to_num())
        if self.rotation is not None:
            positions, table = self.rotation
            cos, sin = table[positions.long()].abs()[:, None].chunk(2, dim=-1)
            even, odd = spread[..., 448::2], spread[..., 449::2]
            pairs = torch.stack((even * cos + odd * sin, odd * cos + even * sin), dim=-1)
            spread[..., 448:] = pairs.flatten(-2)
        bound = (spread.nan_to_num() + out.abs().nan_to_num()) * 2**-8 + 1e-6
        return out, lse, bound, drift * 2**-19 + 1e-5


def make_pool(layout, pages, generator, amplitude=2.0, extra=0):
    """Random records in every row; `extra` unused bytes at the end of each page."""
    storage = torch.randint(
        0, 256, (pages, layout.page_bytes + extra), generator=generator, device="cuda"
    ).to(torch.uint8)
    rows = pages * layout.page_size
    latent = torch.randn(rows, 512, generator=generator, device="cuda") * amplitude
    write_records(latent, torch.arange(rows, device="cuda"), storage, layout)
    return storage


def make_inputs(
    tokens,
    heads,
    window=128,
    comp=512,
    comp_page=64,
    seed=0,
    slot_dtype=torch.int64,
    empty=0.1,
    extra=0,
    pages=40,
    rotated=False,
):
    """Random records, queries, lists with a share of unused slots, sinks, and a rotation."""
    g = torch.Generator("cuda").manual_seed(seed)
    layouts = [RecordLayout(KVFormat.NVFP4, size) for size in (64, comp_page)]
    counts = [pages, pages * 64 // comp_page]
    pools = [make_pool(lay, n, g, extra=extra) for lay, n in zip(layouts, counts, strict=True)]
    lists = []
    for pool, layout, length in zip(pools, layouts, (window, comp), strict=True):
        slots = torch.randint(
            0, len(pool) * layout.page_size, (tokens, length), generator=g, device="cuda"
        )
        drop = torch.rand(slots.shape, generator=g, device="cuda") < empty
        lists.append(slots.masked_fill(drop, -1).to(slot_dtype))
    q = torch.randn(tokens, heads, 512, generator=g, device="cuda").bfloat16()
    sinks = torch.randn(heads, generator=g, device="cuda")
    return Inputs(
        q,
        lists[0],
        pools[0],
        layouts[0],
        lists[1],
        pools[1],
        layouts[1],
        sinks,
        rotation=make_rotation(tokens, g) if rotated else None,
    )


def make_rotation(tokens, generator):
    """Positions in no order, and their table."""
    positions = torch.randint(0, MAX_POSITION, (tokens,), generator=generator, device="cuda")
    return positions, build_rope_table(MAX_POSITION, 1e4).cuda()

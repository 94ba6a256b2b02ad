"""Inputs and checks of kv_store, norm_rope and compress; the benchmark runs them without pytest.

Every check takes the operation under test and a device, so that the checks themselves are tested on
a CPU with the reference in place of the kernel. A failed check raises AssertionError with the first
mismatches: which row, which channel, what was found, what was wanted, and the latent behind it.

The expected latents are computed by the reference's float32 steps on the device; they are encoded
on the CPU, since torch divides by a scalar on a GPU with a reciprocal, which moves exact ties.
"""

import dataclasses
import random

import torch
from record_checks import (
    assert_encodes,
    assert_only_rows_changed,
    assert_same_bytes,
    describe,
)

from sglang_dsv4.cache.kv_layout import IndexerLayout
from sglang_dsv4.kernels.reference import compress as reference
from sglang_dsv4.kernels.reference.hadamard import hadamard_transform
from sglang_dsv4.kernels.reference.kv_store import write_records
from sglang_dsv4.kernels.reference.norm_rope import inverse_rope, q_norm_rope, rms_norm
from sglang_dsv4.kernels.reference.paged import read_rows
from sglang_dsv4.kernels.reference.rope import YarnParams, apply_rope_tail, build_rope_table

EPS = 1e-6
MAX_POSITION = 8192
GARBAGE_SLOTS = (-1, -(2**63), -2, 2**40, 2**63 - 1)
# Relative error of a latent from the order of the sum of 512 squares: (16 + 5) * 2^-24 for either
# order, halved by the square root, and two roundings: below 2^-19; twice that.
NORM_ERROR = 2.0**-18
# Relative to a row's largest value, of a window: exp2 and its argument (|gate - peak| <= 20, 24
# bits) add 2^-19 to each weight, a sum of n weights another n * 2^-24, and a mean of 128 values
# can be ten times smaller than they are.
WINDOW_ERROR = 2.0**-14


def rope_table(device, compressed=False):
    yarn = YarnParams(16, 65536) if compressed else None
    theta = 160000.0 if compressed else 10000.0
    return build_rope_table(MAX_POSITION, theta, yarn=yarn).to(device)


def garbage_pool(layout, num_pages, device, padding=0):
    """Random bytes, pages `padding` bytes apart."""
    size = (num_pages, layout.page_bytes + padding)
    whole = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    return whole[:, : layout.page_bytes]


def integer_rows(count, dtype, device):
    """Rows whose sum of squares is exact in float32 in any order: integers times a power of two.

    Some rows are all zeros, some have negative zeros.
    """
    limit = 127 if dtype is not torch.float16 else 31
    rows = torch.randint(-limit, limit + 1, (count, 512)).float()
    low, high = (-20, 20) if dtype is not torch.float16 else (-4, 4)
    rows *= 2.0 ** torch.randint(low, high, (count, 1)).float()
    rows[torch.rand(count, 512) < 0.05] = -0.0
    rows[3::17] = 0.0
    return rows.to(dtype).to(device)


def hostile_rows(count, dtype, device):
    """Random rows with huge, tiny, infinite and NaN ones among them."""
    rows = torch.randn(count, 512)
    rows[0::9] *= 1e4
    rows[1::9] *= 1e-6
    if dtype is not torch.float16:
        rows[2::27] *= 1e18
        rows[5::27] *= 1e-30
    rows[7::27, 100] = torch.nan
    rows[8::27, 500] = torch.inf
    rows[4::27] = 0.0
    return rows.to(dtype).to(device)


def norm_weights(dtype, device, hostile):
    """Weights around one, or spread so that scales are subnormal, saturated and all between."""
    weight = torch.rand(512) + 0.5
    if hostile:
        weight = weight * 2.0 ** (torch.rand(512) * 4 - 2)
        factors = torch.tensor([1e-5, 1e-3, 0.02, 1.0, 5.0, 1e3, 1e5, 0.0])
        weight = (weight.view(-1, 16) * factors.repeat(4)[:, None]).flatten()
    return weight.to(dtype).to(device)


def kv_slots(count, pool, layout, device):
    """Distinct slots of the pool, every seventh replaced by one outside it."""
    slots = torch.randperm(pool.shape[0] * layout.page_size)[:count]
    outside = torch.tensor([*GARBAGE_SLOTS, pool.shape[0] * layout.page_size])
    slots[::7] = outside[torch.arange(len(slots[::7])) % len(outside)]
    return slots.to(device)


def check_kv_store(op, device, layout, dtype, weight_dtype, exact, count=1001):
    """kv_store on integer rows (bit for bit) or on hostile rows (within the norm's rounding)."""
    pages = -(-2 * count // layout.page_size)
    pool = garbage_pool(layout, pages, device, padding=48)
    before = pool.clone()
    wide = torch.zeros(count, 1024 + 512, dtype=dtype, device=device)
    kv = wide[:, 1024:]
    kv.copy_((integer_rows if exact else hostile_rows)(count, dtype, device))
    weight = norm_weights(weight_dtype, device, exact)
    positions = torch.randint(0, MAX_POSITION, (count,), device=device)
    table, slots = rope_table(device), kv_slots(count, pool, layout, device)
    op(kv, weight, EPS, positions, table, slots, pool, layout)

    latent = apply_rope_tail(rms_norm(kv.float(), weight, EPS), positions, table).cpu()
    what = f"kv_store {layout.tag} {dtype} weight {weight_dtype} exact={exact}"
    if exact:
        wanted = before.cpu()
        write_records(latent, slots.cpu(), wanted, layout)
        report_record_mismatch(pool.cpu(), wanted, slots.cpu(), latent, layout, what)
        return 0.0
    assert_only_rows_changed(pool, before, slots, layout, what)
    # RoPE mixes two values, so its error is relative to the larger one of the row.
    tolerance = latent.abs() * NORM_ERROR
    peak = latent[:, layout.nope_dim :].abs().amax(1, keepdim=True)
    tolerance[:, layout.nope_dim :] = peak * NORM_ERROR
    return assert_encodes(pool, slots, latent, tolerance, layout, what)


def report_record_mismatch(pool, wanted, slots, latent, layout, what):
    """Bitwise comparison, told by the parts of a record; NaN of bf16 may have any payload."""
    found_parts, wanted_parts = (read_rows(p, slots, layout) for p in (pool, wanted))
    valid = found_parts[2]
    names = ("data", "scales")
    for name, found, want in zip(names, found_parts, wanted_parts, strict=False):
        behind = latent[valid] if name == "scales" else None
        assert_same_bytes(found[valid], want[valid], f"{what}: {name}", behind)
    assert_same_bytes(pool, wanted, f"{what}: bytes outside the named rows")


def check_norm_rope(op, device, heads, dtype, exact, inverse, tokens=129):
    """q_norm_rope or inverse_rope on strided heads; bit for bit where the sum is exact."""
    make = integer_rows if exact else hostile_rows
    wide = torch.zeros(tokens, heads, 1024, dtype=dtype, device=device)
    x = wide[..., 512:]
    x.copy_(make(tokens * heads, dtype, device).view(tokens, heads, 512))
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device)
    table = rope_table(device)
    before = x.clone()
    found = op(x, positions, table) if inverse else op(x, positions, table, EPS)
    assert torch.equal(x.nan_to_num(), before.nan_to_num()), "the operand changed"
    wanted = inverse_rope(x, positions, table) if inverse else q_norm_rope(x, positions, table, EPS)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    found, wanted = (y.float().cpu().flatten(0, 1) for y in (found, wanted))
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    same &= (torch.signbit(found) == torch.signbit(wanted)) | found.isnan()
    what = f"norm_rope H={heads} {dtype} exact={exact} inverse={inverse}"
    if exact or inverse:
        assert same.all(), f"{what}: {describe(~same, found, wanted)}"
        return 0.0
    ulp = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}[dtype]
    # One ulp of the type where the float32 value straddles a rounding boundary.
    peak = wanted.abs().nan_to_num().amax(1, keepdim=True)
    near = (found - wanted).abs() <= wanted.abs() * ulp + peak * NORM_ERROR
    bad = ~(same | near)
    assert not bad.any(), f"{what}: {describe(bad, found, wanted)}"
    return (~same).float().mean().item()


class Batch:
    """A ragged batch for one ratio: lengths of new tokens, prefixes, projections, plan, state."""

    def __init__(self, ratio, lengths, prefixes, width, dtype, device, seed=0):
        self.ratio, self.device = ratio, device
        ring = 8 if ratio == 4 else 128
        tokens = sum(lengths)
        source, positions, slots, rows, locs, all_positions = [], [], [], [], [], []
        start = 0
        for request, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            for position in range(prefix, prefix + length):
                row = start + position - prefix
                all_positions.append(position)
                if position >= prefix + length - ring:
                    rows.append(row)
                    locs.append(request * ring + position % ring)
                if position % ratio != ratio - 1:
                    continue
                wanted = range(position - (8 if ratio == 4 else ratio) + 1, position + 1)
                source.append(
                    [
                        -1
                        if p < 0
                        else start + p - prefix
                        if p >= prefix
                        else tokens + request * ring + p % ring
                        for p in wanted
                    ]
                )
                positions.append(position - ratio + 1)
                slots.append(len(slots))
            start += length
        generator = torch.Generator().manual_seed(seed)
        series = width * (2 if ratio == 4 else 1)
        # kv and gate are the halves of one projection, as in the model.
        both = torch.randn(tokens, 2 * series, generator=generator)
        both[:, series:] *= 3.0
        self.kv, self.gate = both.to(dtype).to(device).chunk(2, dim=-1)
        self.bias = torch.randn(ratio, series, generator=generator).to(device)
        # Rows are spare at the end, so that a wrong row index reads NaN instead of faulting.
        state = torch.full((len(lengths) * ring + 3, 2 * series), torch.nan)
        state[: len(lengths) * ring] = torch.randn(
            len(lengths) * ring, 2 * series, generator=generator
        )
        self.state = state.to(device)
        order = list(range(len(slots)))
        random.Random(seed).shuffle(order)
        kinds = 2 * 4 if ratio == 4 else ratio
        self.plan = reference.CompressPlan(
            ratio=ratio,
            source=torch.tensor(source, dtype=torch.int64).view(-1, kinds).to(device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.tensor(order, dtype=torch.int64, device=device),
            write_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            write_locs=torch.tensor(locs, dtype=torch.int64, device=device),
            disjoint=all(p == 0 or n == 1 for n, p in zip(lengths, prefixes, strict=True)),
        )
        self.positions = torch.tensor(all_positions, dtype=torch.int64, device=device)

    def pad(self, windows, rows):
        """Padding windows and rows, as a CUDA graph of a larger batch has."""
        plan, device = self.plan, self.device
        none = torch.full((windows,), -1, dtype=torch.int64, device=device)

        def outside(count, size, phase):
            """-1, a place inside and one just outside in turn: never both inside."""
            turn = torch.arange(count, device=device) + phase
            return torch.tensor([-1, 0, size], device=device)[turn % 3]

        self.plan = dataclasses.replace(
            plan,
            source=torch.cat((plan.source, none[:, None].expand(-1, plan.source.shape[1]))),
            positions=torch.cat((plan.positions, none * 0)),
            slots=torch.cat((plan.slots, none)),
            write_rows=torch.cat((plan.write_rows, outside(rows, len(self.kv), 1))),
            write_locs=torch.cat((plan.write_locs, outside(rows, len(self.state), 0))),
        )
        return self

    def run(self, op, state, pool, layout, weight, table):
        op(
            self.kv,
            self.gate,
            self.bias,
            self.positions,
            state,
            self.plan,
            weight,
            EPS,
            table,
            pool,
            layout,
        )


def ragged(kind, ratio):
    """(lengths, prefixes) of a named batch."""
    lengths = {
        "72x4+24x3": [4] * 72 + [3] * 24,
        "104x3+24x2": [3] * 104 + [2] * 24,
        "decode": [1] * 256,
        "prefill": [4096],
        "chunks": [517, 1, 130, 64, 3, 1025],
        "first": [ratio, ratio - 1, ratio + 1, 2 * ratio, 5],
    }[kind]
    generator = random.Random(7)
    prefixes = [generator.randrange(0, 700) for _ in lengths]
    if kind in ("prefill", "first"):
        prefixes = [0] * len(lengths)
    if kind in ("72x4+24x3", "104x3+24x2", "decode") and ratio == 128:
        # Without this almost no request would close a window.
        prefixes = [128 * generator.randrange(1, 5) - generator.randrange(1, 5) for _ in lengths]
    return lengths, prefixes


RAGGED = ("72x4+24x3", "104x3+24x2", "decode", "prefill", "chunks", "first")


def check_compress(op, device, ratio, layout, kind, dtype, weight_dtype, padding=0):
    """compress_store on a ragged batch: records within rounding, the state bit for bit."""
    width = layout.head_dim
    batch = Batch(ratio, *ragged(kind, ratio), width, dtype, device)
    if padding:
        batch.pad(padding, padding)
    windows = batch.plan.slots.numel()
    pool = garbage_pool(layout, windows // layout.page_size + 2, device)
    before, state = pool.clone(), batch.state.clone()
    weight = (torch.rand(width) + 0.5).to(weight_dtype).to(device)
    table = rope_table(device, compressed=True)
    batch.run(op, state, pool, layout, weight, table)

    wanted_state = batch.state.clone()
    entries = reference.compress(
        batch.kv, batch.gate, batch.bias, batch.positions, wanted_state, batch.plan
    )
    latent = apply_rope_tail(rms_norm(entries, weight, EPS), batch.plan.positions, table)
    what = f"compress ratio {ratio} {layout.tag} {kind} {dtype}"
    if isinstance(layout, IndexerLayout):
        latent = hadamard_transform(latent)
    found, wanted = (s.view(torch.int32).cpu() for s in (state, wanted_state))
    bad = found != wanted
    assert not bad.any(), f"{what}: state: {describe(bad, state.cpu(), wanted_state.cpu())}"
    if not (batch.plan.slots >= 0).any():
        assert_same_bytes(pool, before, f"{what}: pool without windows")
        return 0.0
    assert_only_rows_changed(pool, before, batch.plan.slots, layout, what)
    latent = latent.cpu()
    tolerance = (latent.abs().amax(1, keepdim=True) * WINDOW_ERROR).expand_as(latent)
    return assert_encodes(pool, batch.plan.slots, latent, tolerance, layout, what)


def check_one_launch(op, device, ratio, layout, lengths, prefixes, padding):
    """A disjoint plan leaves the same bytes as one whose rows are written after the windows."""
    batch = Batch(ratio, lengths, prefixes, layout.head_dim, torch.bfloat16, device)
    assert batch.plan.disjoint
    batch.pad(padding, padding)
    # Padding among the windows and the rows too.
    batch.plan.slots[2::5] = -1
    batch.plan.write_locs[1::7] = -1
    weight = torch.rand(layout.head_dim, device=device) + 0.5
    table = rope_table(device, compressed=True)
    pool = garbage_pool(layout, len(batch.plan.slots) // layout.page_size + 1, device)
    pools, states = [pool, pool.clone()], [batch.state, batch.state.clone()]
    for disjoint in (False, True):
        batch.plan = dataclasses.replace(batch.plan, disjoint=disjoint)
        batch.run(op, states[disjoint], pools[disjoint], layout, weight, table)
    what = f"one launch, ratio {ratio} {layout.tag}"
    assert_same_bytes(pools[1], pools[0], f"{what}: pool")
    found, wanted = (s.view(torch.int32).cpu() for s in reversed(states))
    assert torch.equal(found, wanted), f"{what}: state differs"


def check_chunked_prefill(op, device, ratio, layout, dtype, cut=1301, length=2048):
    """A prompt in two passes leaves the same bytes as in one: the state loses nothing."""
    width = layout.head_dim
    whole = Batch(ratio, [length], [0], width, dtype, device)
    first = Batch(ratio, [cut], [0], width, dtype, device)
    second = Batch(ratio, [length - cut], [cut], width, dtype, device)
    done = 0
    for batch in (first, second, whole):
        start = 0 if batch is whole else done
        done = start + len(batch.plan.slots)
        batch.plan.slots.copy_(torch.arange(start, done))
    weight = torch.rand(width, device=device) + 0.5
    table = rope_table(device, compressed=True)
    pools = [garbage_pool(layout, length // ratio // layout.page_size + 1, device)]
    pools.append(pools[0].clone())
    states = [torch.full_like(whole.state, torch.nan) for _ in range(2)]
    whole.run(op, states[0], pools[0], layout, weight, table)
    for part, rows in ((first, slice(0, cut)), (second, slice(cut, length))):
        part.kv, part.gate, part.bias = whole.kv[rows], whole.gate[rows], whole.bias
        part.run(op, states[1], pools[1], layout, weight, table)
    what = f"chunked prefill ratio {ratio} {layout.tag}"
    assert_same_bytes(pools[1], pools[0], f"{what}: pool")
    found, wanted = (s.view(torch.int32).cpu() for s in reversed(states))
    assert torch.equal(found, wanted), f"{what}: state differs"

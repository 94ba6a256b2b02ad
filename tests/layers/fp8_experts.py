"""Routed experts of e4m3 operands in float64, and how far off a kernel may be; hostile choices.

Both halves begin with what a kernel really has: the second with the bfloat16 SwiGLU that the kernel
wrote. So a bound holds for each value, and no rounding of one half hides in the other's.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from slot_lists import align
from torch import Tensor

from sglang_dsv4.kernels.linear.records import pack_records
from sglang_dsv4.kernels.reference.fp8 import WEIGHT_SHIFT, quantize_rows, widen_weight
from sglang_dsv4.layers import cutedsl_experts, grouped_fp8

HALF_STEP = 1.01 * 2.0**-8
"""Of a value: half of bfloat16's largest step, and the second order."""
SWIGLU = 2.0**-16
"""Of a value: exp2 and reciprocal of a GPU. Arguments to 2^6 are off by 2^-17."""


class Matrix(NamedTuple):
    """NVFP4 of each expert: uint8 [E, N, n / 2], e4m3 [E, N, n / 16] and float32 [E]."""

    weight: Tensor
    scale: Tensor
    outer: Tensor


def random_matrix(experts: int, out: int, width: int) -> Matrix:
    """Random codes and block scales from the smallest to 2^8; products of about 1."""
    weight = torch.randint(0, 256, (experts, out, width // 2), dtype=torch.uint8)
    scale = torch.exp2(torch.rand(experts, out, width // 16) * 17 - 8.8).to(torch.float8_e4m3fn)
    # e2m1 has a root mean square of 2.9, the scales of 70.
    return Matrix(weight, scale, (1 + torch.rand(experts)) * width**-0.5 / 200)


class Near(NamedTuple):
    """float64 values, and how far a right result may be from each."""

    value: Tensor
    bound: Tensor


def choices(kind: str, tokens: int, top_k: int, experts: int) -> Tensor:
    """int32 [tokens, top_k]. Expert 2 has no rows; of three tokens or more one has no expert.

    Args: kind: "any"; "one", the last; "ends", the first and the last; "none".
    """
    ids = torch.rand(tokens, experts).topk(top_k).indices
    ids[ids == 2] = 1
    if kind == "one":
        ids[:] = experts - 1
    if kind == "ends":
        ids = torch.where(ids > experts // 2, experts - 1, 0)
    if kind == "none":
        ids[:] = -1
    if tokens > 2:
        ids[tokens // 2] = -1
        ids[-1, 0] = -1
    return ids.int()


def activations(tokens: int, width: int) -> Tensor:
    """bfloat16 [tokens, width]; where there are enough, rows of zeros, huge and tiny ones."""
    x = torch.randn(tokens, width).bfloat16()
    if tokens > 8:
        x[1] = 0
        x[3] *= 2.0**20
        x[5] *= 2.0**-20
        x[7] = -0.0
    return x


def align_in_any_order(ids: Tensor, block: int, experts: int, **options: bool) -> tuple:
    """SGLang's lists for blocks of one row: its kernel counts an expert's slots by atomics."""
    assert block == 1
    rows, owners, counts = align(ids, block, experts, **options)
    used = owners[: ids.numel()]
    for expert in used.unique():
        own = (used == expert).nonzero().flatten()
        rows[own] = rows[own[torch.randperm(len(own))]]
    return rows, owners, counts


def poison_allocations(patch: pytest.MonkeyPatch) -> None:
    """New float tensors are full of NaN, new integers the largest, until they are written."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: object, **options: object) -> Tensor:
            out = make(*args, **options)
            floating = out.dtype.is_floating_point
            return out.fill_(float("nan") if floating else torch.iinfo(out.dtype).max)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        patch.setattr(owner, name, poisoned(getattr(owner, name)))


def _operand(rows: Tensor) -> Tensor:
    values, scale = quantize_rows(rows)
    return values.double() * scale.double()[:, None]


def _products(rows: Tensor, matrix: Matrix, experts: Tensor) -> tuple[Tensor, Tensor]:
    """weight[experts[s]] @ rows[s] [S, N], and that of the magnitudes; zeros where it is -1."""
    out = rows.new_zeros(len(rows), matrix.weight.shape[1], dtype=torch.float64)
    terms, rows = out.clone(), _operand(rows)
    for expert in experts.unique().tolist():
        if expert >= 0:
            own = experts == expert
            dense = widen_weight(matrix.weight[expert], matrix.scale[expert]).double().T
            dense = dense * (matrix.outer[expert].double() / WEIGHT_SHIFT)
            out[own], terms[own] = rows[own] @ dense, rows[own].abs() @ dense.abs()
    return out, terms


def _silu_error(low: Tensor, value: Tensor, high: Tensor) -> Tensor:
    """Of silu(value) where the argument is between low and high. Its slope is 1.1 at most; left of
    its minimum, -1.278, it falls."""
    silu = torch.nn.functional.silu
    steepest = 1.1 * torch.maximum(high - value, value - low)
    return torch.where(high < -1.28, silu(low) - silu(high), steepest)


def hidden_near(x: Tensor, matrix: Matrix, ids: Tensor, limit: float | None, sums: float) -> Near:
    """Clamped SwiGLU of each slot [T k, I]. ``sums``: error of a sum, of its magnitudes' sum."""
    rows = x.repeat_interleave(ids.shape[1], 0)
    value, terms = _products(rows, matrix, ids.flatten())
    most = float("inf") if limit is None else limit
    # The factor of the sums is rounded three times.
    error = terms * (sums + 3 * 2.0**-24)
    gate, up = (part.clamp(max=most) for part in value.chunk(2, dim=1))
    low, high = ((value + sign * error).clamp(max=most) for sign in (-1, 1))
    up = up.clamp(min=-most)
    off = torch.maximum(
        *(side.chunk(2, 1)[1].clamp(min=-most).sub(up).abs() for side in (low, high))
    )
    silu = torch.nn.functional.silu(gate)
    gate_off = _silu_error(low.chunk(2, 1)[0], gate, high.chunk(2, 1)[0])
    result = silu * up
    error = gate_off * (up.abs() + off) + silu.abs() * off
    rounded = HALF_STEP + SWIGLU
    # A sigmoid below float32's smallest, of a gate of -88 or less, is lost.
    lost = 2.0**-119 * (1 + up.abs())
    return Near(result, error * (1 + rounded) + result.abs() * rounded + lost)


def total_near(hidden: Tensor, matrix: Matrix, routed: Tensor, ids: Tensor, sums: float) -> Near:
    """The sum [T, D] of a token's weighted experts. ``hidden`` bfloat16 [T k, I], of each slot."""
    value, terms = _products(hidden, matrix, ids.flatten())
    weight = routed.flatten().double()[:, None]
    parts = (value * weight).unflatten(0, ids.shape)
    errors = (terms * weight * (sums + 4 * 2.0**-24)).unflatten(0, ids.shape)
    # Each part is rounded to bfloat16, and so is their sum, made in float32.
    sizes = (parts.abs() + errors).sum(1)
    errors = errors.sum(1) + sizes * (HALF_STEP + ids.shape[1] * 2.0**-24)
    total = parts.sum(1)
    return Near(total, errors + (total.abs() + errors) * HALF_STEP + 2.0**-126)


def assert_near(found: Tensor, wanted: Near) -> None:
    """Each value is within its bound; NaN never is."""
    error = (found.double() - wanted.value).abs()
    good = error <= wanted.bound
    assert good.all(), (error / wanted.bound)[~good].max()


class Layer:
    """``products_fp8`` of random experts, and what its last call went through.

    Attributes:
        parts: the experts of each grouped product of gate and up.
    """

    def __init__(
        self, module: ModuleType, patch: pytest.MonkeyPatch, shape: tuple[int, int, int]
    ) -> None:
        """Args: shape: (E, D, I)."""
        experts, width, inner = shape
        self.module, self.parts = module, []
        self.matrices = (
            random_matrix(experts, 2 * inner, width),
            random_matrix(experts, width, inner),
        )
        self.sources = [
            cutedsl_experts.source(pack_records(m.weight, m.scale), m.outer, fp8=True)
            for m in self.matrices
        ]
        sort, product = module.sort_slots, grouped_fp8.gate_up

        def ordered(*args: object) -> object:
            self.order = sort(*args)
            return self.order

        def gated(x: Tensor, weight: Tensor, *args: object) -> None:
            product(x, weight, *args)
            self.hidden = args[-1]
            self.parts.append(len(weight))

        patch.setattr(module, "sort_slots", ordered)
        patch.setattr(grouped_fp8, "gate_up", gated)

    def __call__(self, x: Tensor, routed: Tensor, ids: Tensor, limit: float | None) -> Tensor:
        self.parts = []
        return self.module.products_fp8(x, *self.sources, routed, ids, limit)

    def check(
        self,
        found: Tensor,
        x: Tensor,
        routed: Tensor,
        ids: Tensor,
        limit: float | None,
        sums: float,
        rows: slice | Tensor = slice(None),
    ) -> None:
        """Both halves of the last call, of some tokens. ``sums`` as for ``hidden_near``."""
        place = torch.empty_like(self.order.slots).long()
        place[self.order.slots.long()] = torch.arange(len(place), device=place.device)
        hidden = self.hidden[place.view(ids.shape)[rows].flatten()]
        found, x, routed, ids = found[rows], x[rows], routed[rows], ids[rows]
        owned = ids.flatten() >= 0
        near = hidden_near(x, self.matrices[0], ids, limit, sums)
        assert_near(hidden[owned], Near(*(part[owned] for part in near)))
        hidden[~owned] = 0
        assert_near(found, total_near(hidden, self.matrices[1], routed, ids, sums))
        assert not found[(ids < 0).all(1) | (x == 0).all(1)].any()

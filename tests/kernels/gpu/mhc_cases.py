"""Inputs, float64 results and error bounds of the hyper-connection operations.

Every check takes the operations under test and a device, so that the checks are themselves tested
on a CPU with the reference. Bounds, for values v of float64 and f of the operation:

Products. A chain of n additions in float32 (n of 32 for each chunk of columns, 4 of a group, 4 of
groups and up to 16 of those) errs by 2^-22 of the partial sum each, if the tensor core truncates;
partial sums of products of random signs stay below 3 sqrt(sum (x w)^2) =: 3 s. So
|dz| <= 56 * 3 * 2^-22 r s < 2^-14 r s, with r the RMS factor, if all errors had one sign; they do
not, and 2^-15 r s is used. fn rounded to TF32
would give 2^-12 r s, rounded to bf16 2^-9 r s: both fail.

Weights. Sigmoid has slope 1/4 at most, and its own error is 2^-21. A change of comb's logits by e
moves its entries by at most 4 e relatively on such inputs (tested on the CPU), and each of 39
normalisations adds 2^-22. Sums: one rounding to bf16, 2^-8 relatively, and the weights' errors.
"""

from dataclasses import dataclass
from typing import Any

import torch

EPS = 1e-6
ITERS = 20
HALF_ULP = 2.0**-8


@dataclass(frozen=True)
class Parameters:
    """fn, base and scale of one connection (24 rows) or head (4 rows)."""

    fn: Any
    base: Any
    scale: Any


def parameters(hidden, rows, device, spread=1.0):
    """Random weights that give projections of standard deviation `spread`."""
    fn = torch.randn(rows, 4 * hidden, device=device) * (spread / (4 * hidden) ** 0.5)
    base = torch.randn(rows, device=device)
    scale = torch.rand(3 if rows == 24 else 1, device=device) + 0.5
    return Parameters(fn, base, scale)


def random_streams(tokens, hidden, device):
    """Rows of very different sizes, streams of different sizes in each, and rows of zeros."""
    streams = torch.randn(tokens, 4, hidden, device=device) * torch.rand(
        tokens, 4, 1, device=device
    )
    for start, size in ((1, 1e4), (2, 1e-6), (4, 1e15), (6, 1e-30), (9, 0.0)):
        streams[start::11] *= size
    return streams.bfloat16()


def strided(streams):
    """The same values, tokens and streams farther apart than they are long."""
    tokens, n, hidden = streams.shape
    wide = torch.full(
        (tokens, n + 1, hidden + 64), torch.nan, dtype=streams.dtype, device=streams.device
    )
    wide[:, 1:, 64:] = streams
    return wide[:, 1:, 64:]


def sinkhorn(logits, iters, eps):
    """Doubly stochastic [T, 4, 4] of logits, in their dtype."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def exact_logits(streams, p, rms_eps=EPS):
    """Float64 logits [T, rows] before the sigmoid or softmax, and the bound of their error."""
    x = streams.double().flatten(1)
    fn = p.fn.double()
    factor = torch.rsqrt(x.square().mean(1, keepdim=True) + rms_eps)
    rows = len(fn)
    spread = [1] if rows == 4 else [4, 4, 16]
    scale = torch.repeat_interleave(p.scale.double(), torch.tensor(spread, device=fn.device))
    z = x @ fn.mT * factor
    error = 2.0**-15 * (x.square() @ fn.square().mT).sqrt() * factor * scale.abs()
    return z * scale + p.base.double(), error


def collapsed(streams, weights, errors):
    """Float64 weighted sum of the streams and the bound of its error."""
    wide = streams.double()
    value = (weights[..., None] * wide).sum(1)
    bound = (errors[..., None] * wide.abs()).sum(1) + value.abs() * HALF_ULP
    # Below the smallest normal bf16 a rounding is absolute.
    return value, bound * 1.01 + 2.0**-133


def assert_within(name, found, value, bound):
    """Check |found - value| <= bound; prints the worst places. Returns the largest share of it."""
    share = ((found.double() - value).abs() / bound).nan_to_num(torch.inf)
    worst = share.flatten(1).amax(1)
    bad = (worst > 1).nonzero().flatten().tolist()
    assert not bad, (
        f"{name}: rows {bad[:8]} of {len(worst)}, {worst[bad[:8]].tolist()} of the bound"
    )
    return worst.amax().item() if len(worst) else 0.0


def check_pre(hc_pre, streams, p, rows=None):
    """hc_pre of the given rows (all without) against float64; returns shares of the bounds."""
    out, post, comb = hc_pre(streams, p.fn, p.base, p.scale, ITERS, EPS, EPS)
    tokens, _, hidden = streams.shape
    assert out.shape == (tokens, hidden) and out.dtype == streams.dtype
    assert post.shape == (tokens, 4) and post.dtype == torch.float32
    assert comb.shape == (tokens, 4, 4) and comb.dtype == torch.float32
    if rows is not None:
        streams, out, post, comb = (x[rows] for x in (streams, out, post, comb))
    logits, error = exact_logits(streams, p)
    weights = torch.sigmoid(logits[:, :8])
    gate_error = error[:, :8] / 4 + 2.0**-21
    value, bound = collapsed(streams, weights[:, :4] + EPS, gate_error[:, :4])
    shares = [assert_within("input", out, value, bound)]
    shares.append(assert_within("post", post, 2 * weights[:, 4:], 2 * gate_error[:, 4:]))
    wanted = sinkhorn(logits[:, 8:].unflatten(1, (4, 4)), ITERS, EPS)
    relative = 4 * error[:, 8:].amax(1)[:, None, None] + 39 * 2.0**-22
    shares.append(assert_within("comb", comb, wanted, wanted * relative + 2.0**-30))
    return shares


def check_head(hc_head, streams, p):
    """hc_head against float64."""
    out = hc_head(streams, p.fn, p.base, p.scale, EPS, EPS)
    assert out.shape == (len(streams), streams.shape[2]) and out.dtype == streams.dtype
    logits, error = exact_logits(streams, p)
    value, bound = collapsed(streams, torch.sigmoid(logits) + EPS, error / 4 + 2.0**-21)
    return [assert_within("head", out, value, bound)]


def check_post(hc_post, output, streams):
    """hc_post against float64, with a comb that is far from symmetric."""
    tokens = len(streams)
    post = torch.rand(tokens, 4, device=streams.device) * 2
    comb = torch.softmax(torch.randn(tokens, 4, 4, device=streams.device) * 2, -1)
    out = hc_post(output, streams, post, comb)
    assert out.shape == streams.shape and out.dtype == streams.dtype
    added = post.double()[..., None] * output.double()[:, None]
    mixed = torch.einsum("tij,tid->tjd", comb.double(), streams.double())
    size = added.abs() + torch.einsum("tij,tid->tjd", comb.double(), streams.double().abs())
    value = added + mixed
    # Four additions and five products in float32, then one rounding.
    bound = value.abs() * HALF_ULP * 1.01 + size * 2.0**-21 + 2.0**-133
    return [assert_within("streams", out, value, bound)]


def check_norm(hc_pre, streams, p, weight):
    """With a norm weight hc_pre gives the RMSNorm of what it gives without, and the same gates."""
    args = (p.fn, p.base, p.scale, ITERS, EPS, EPS)
    plain, normed = hc_pre(streams, *args), hc_pre(streams, *args, weight)
    for left, right in zip(plain[1:], normed[1:], strict=True):
        assert torch.equal(left, right), "the norm changes post or comb"
    wide = plain[0].double()
    value = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    # One rounding to bf16; the sum of squares and three products in float32 err by below 2^-18.
    bound = value.abs() * (HALF_ULP + 2.0**-16) + 2.0**-133
    return [assert_within("norm", normed[0], value, bound)]


def check_post_pre(operations, output, streams, p, weight):
    """hc_post_pre has the bits of hc_post, then hc_pre. operations: (hc_post, hc_pre, hc_post_pre).

    Returns the new streams.
    """
    hc_post, hc_pre, hc_post_pre = operations
    tokens, device = len(streams), streams.device
    post = torch.rand(tokens, 4, device=device) * 2
    comb = torch.softmax(torch.randn(tokens, 4, 4, device=device) * 2, -1)
    args = (p.fn, p.base, p.scale, ITERS, EPS, EPS, weight)
    new = hc_post(output, streams, post, comb)
    found = hc_post_pre(output, streams, post, comb, *args)
    names = ("streams", "input", "post", "comb")
    for name, left, right in zip(names, (new, *hc_pre(new, *args)), found, strict=True):
        assert torch.equal(left, right), f"{name} differs from the two operations'"
    return new


def check_rows_alone(hc_pre, streams, p):
    """A row has the same bits alone as in the batch, whatever the other rows hold."""
    together = hc_pre(streams, p.fn, p.base, p.scale, ITERS, EPS, EPS)
    poisoned = streams.clone()
    poisoned[1::2] = torch.nan
    beside_nan = hc_pre(poisoned, p.fn, p.base, p.scale, ITERS, EPS, EPS)
    for left, right in zip(together, beside_nan, strict=True):
        assert torch.equal(left[::2], right[::2]), "NaN rows reach others"
        assert right[1::2].isnan().all() or not len(right[1::2]), "a NaN row has numbers"
    for row in {0, len(streams) // 2, len(streams) - 1}:
        alone = hc_pre(streams[row : row + 1], p.fn, p.base, p.scale, ITERS, EPS, EPS)
        for left, right in zip(together, alone, strict=True):
            assert torch.equal(left[row : row + 1], right), f"row {row} differs alone"

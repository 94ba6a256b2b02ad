"""The indexer on the GPU against the plain-torch reference."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import indexer_cases as cases

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.kernels.hardware import current_arch
from sglang_dsv4.kernels.indexer import indexer
from sglang_dsv4.kernels.indexer.scores import ScoreShape, compile_scores
from sglang_dsv4.kernels.indexer.topk import TopkShape, compile_topk
from sglang_dsv4.kernels.reference.indexer import entry_slots
from sglang_dsv4.kernels.reference.indexer import select_topk as reference_select


@pytest.mark.parametrize("case", list(cases.hostile_inputs()), ids=lambda c: c[0])
def test_hostile(case):
    _, inputs, topk, exact = case
    (cases.check_exact if exact else cases.check_close)(inputs, topk)


@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [8, 24, 64])
def test_every_kernel_gives_the_same_bits(heads, tokens, wgmma):
    if wgmma and current_arch() != "sm_90a":
        pytest.skip("wgmma is sm_90's")
    rows = [0] * 11 + [1] * 5
    # Long enough for a block to have several groups of pages whose products overlap.
    long = [3900 - 300 * i for i in range(6)]
    visible = [*long, *cases.spread(3900, 5), *cases.spread(300, 5)]
    inputs = cases.make_inputs([3900, 300], visible, rows, heads, seed=heads)
    scores = torch.full((16, inputs.key_pages.shape[1] * 64), torch.nan, device="cuda")
    operands = (inputs.q, inputs.weights, inputs.pool, inputs.key_pages, inputs.row_of_token)
    compile_scores(current_arch(), ScoreShape(heads, tokens, 8, wgmma))(
        (*operands, inputs.visible, scores), 60, 7
    )
    alone = torch.full_like(scores, torch.nan)
    compile_scores(current_arch(), ScoreShape(heads, 1, 8, wgmma))(
        (*operands, inputs.visible, alone), 60, 132
    )
    for token, seen in enumerate(visible):
        if seen > 60:
            exact, sizes = cases.exact_scores(inputs, token)
            error = (scores[token, :seen] - exact).abs()
            assert (error <= sizes * cases.SCORE_ERROR).all(), (token, error.max())
            assert torch.equal(scores[token, :seen], alone[token, :seen]), token


@pytest.mark.parametrize(
    "shape",
    [
        (1024, 8192, 1),
        (1024, 32768, 1),
        (256, 8192, 1),
        (1024, 8192, 2),
        (1024, 16384, 2),
        (1024, 8192, 4),
        (1024, 32768, 8),
    ],
)
@pytest.mark.parametrize("length", [64, 8192, 8256, 20032, 262144])
def test_topk_of_any_floats(length, shape):
    generator = torch.Generator("cuda").manual_seed(length)
    scores = torch.randn(6, length, device="cuda", generator=generator)
    scores[1] = torch.randint(0, 2**31 - 1, (length,), device="cuda").int().view(torch.float32)
    scores[2] = torch.randint(-2, 3, (length,), device="cuda", generator=generator)
    scores[3] = 0.0
    scores[3, ::2] = -0.0
    scores[4, ::2], scores[4, 1::5], scores[4, 2::7] = torch.nan, torch.inf, -torch.inf
    pages = length // 64
    key_pages = torch.randperm(2 * pages, device="cuda").view(2, pages).int()
    row = torch.tensor([0, 1, 0, 1, 0, 1], device="cuda")
    visible = torch.tensor([length, length, length - 1, length, length, 38], device="cuda")
    for topk in (1, 37, 50, 1024):
        found = torch.full((6, topk), -7, device="cuda")
        operands = (scores, key_pages, row, visible, found)
        compile_topk(current_arch(), TopkShape(*shape, 8))(operands)
        mask = torch.arange(length, device="cuda") < visible[:, None]
        wanted = reference_select(scores, mask, topk)
        slots = entry_slots(key_pages, length, 64)[row].gather(1, wanted.clamp(min=0))
        assert torch.equal(found, slots.masked_fill(wanted < 0, -1)), topk


def test_rounds_of_tokens(monkeypatch):
    inputs = cases.make_inputs([900], cases.spread(900, 33), [0] * 33, 16, exact=True, seed=3)
    row = inputs.key_pages.shape[1] * 64 * 4
    monkeypatch.setattr(indexer, "MAX_WORKSPACE_BYTES", 5 * row)
    assert indexer.workspace_bytes(33, inputs.key_pages.shape[1]) == 5 * row
    cases.check_exact(inputs, 60)


def test_narrow_and_wide_indices_and_no_tokens():
    inputs = cases.make_inputs([900, 80], [900, 80], [0, 1], 16, exact=True, seed=4)
    inputs.visible, inputs.row_of_token = inputs.visible.int(), inputs.row_of_token.int()
    cases.check_exact(inputs, 60)
    inputs.visible = inputs.visible.long() + 2**40
    inputs.visible[1] = 80
    inputs.key_pages = inputs.key_pages[:, :14].contiguous()
    cases.check_exact(inputs, 60)
    none = cases.make_inputs([80], [], [], 16)
    none.row_of_token, none.visible = none.row_of_token.long(), none.visible.long()
    assert none.run(5).shape == (0, 5)
    empty = cases.make_inputs([80], [0], [0], 16)
    empty.key_pages = empty.key_pages[:, :0]
    assert (empty.run(5) == -1).all()


def test_graph_replays_on_changed_inputs():
    inputs = cases.make_inputs([900, 3000], [900, 3000], [0, 1], 64, exact=True, seed=1)
    inputs.run(512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = inputs.run(512)
    for seed, visible in enumerate(([0, 513], [900, 100], [512, 3000], [600, 2048])):
        other = cases.make_inputs([900, 3000], visible, [0, 1], 64, exact=True, seed=seed + 2)
        for name in ("q", "weights", "pool", "key_pages", "visible"):
            getattr(inputs, name).copy_(getattr(other, name))
        graph.replay()
        assert torch.equal(found, cases.reference_topk(*inputs.arguments(), 512)), visible


def test_refusals():
    inputs = cases.make_inputs([80], [80], [0], 16)
    with pytest.raises(UnsupportedError, match="bfloat16 with 1 to 64"):
        indexer.indexer_topk(inputs.q.float(), *inputs.arguments()[1:], 5)
    layout = IndexerLayout(KVFormat.BFLOAT16, 64)
    arguments = list(inputs.arguments())
    arguments[3] = layout
    with pytest.raises(UnsupportedError, match="nvfp4"):
        indexer.indexer_topk(*arguments, 5)
    with pytest.raises(UnsupportedError, match="index_topk"):
        inputs.run(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "tokens"), [([8192] * 16, 16), ([3000], 64), ([20000] * 2, 2), ([1500] * 140, 140)]
)
def test_thousand_repeats_are_bitwise_equal(lengths, tokens):
    visible = [lengths[0] - i for i in range(tokens)]
    rows = list(range(tokens)) if len(lengths) > 1 else [0] * tokens
    inputs = cases.make_inputs(lengths, visible, rows, 64, seed=2)
    q, weights, pool, _, key_pages, row_of_token, seen = inputs.arguments()

    def score():
        scores = torch.zeros(tokens, key_pages.shape[1] * 64, device="cuda")
        indexer.indexer_scores(q, weights, pool, key_pages, row_of_token, seen, 512, scores)
        mask = torch.arange(scores.shape[1], device="cuda") < seen[:, None]
        return scores.masked_fill(~mask, 0.0).view(torch.int32)

    first, first_scores = inputs.run(512), score()
    assert first_scores.count_nonzero() > 0
    for _ in range(1000):
        assert torch.equal(inputs.run(512), first)
        assert torch.equal(score(), first_scores)

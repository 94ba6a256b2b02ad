"""The oracle reproduces the reference values of golden.json, made by an independent run."""

import math

import numpy as np
import oracle
import pytest
import torch

QUESTIONS = oracle.question_prompts()
WITH_LOGITS = [prompt for prompt in QUESTIONS if "top8_fp32" in prompt["nvfp4_weights"]]
EOS = 1


@pytest.fixture(autouse=True)
def one_thread():
    """Spinning OpenMP threads of parallel test workers would wait for each other's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_e4m3_table_equals_torch():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(oracle.e4m3_table(), values.numpy())


def test_dequantise_nvfp4_by_hand():
    weight = np.zeros((1, 16), dtype=np.uint8)
    weight[0, :3] = [0x21, 0xF9, 0x08]
    scale = np.array([[0x38, 0x01]], dtype=np.uint8)  # 1.0 and the smallest subnormal, 2^-9
    weight[0, 8] = 0x07
    decoded = oracle.dequantise_nvfp4(weight, scale, np.array(0.5, dtype=np.float32))
    wanted = torch.zeros(1, 32)
    # codes 1, 2 = 0.5, 1.0; 9, 15 = -0.5, -6; 8, 0 = -0, 0; all times 0.5
    wanted[0, :6] = torch.tensor([0.25, 0.5, -0.25, -3.0, -0.0, 0.0])
    wanted[0, 16] = 6 * 2.0**-9 * 0.5
    torch.testing.assert_close(decoded, wanted, rtol=0, atol=0)
    assert math.copysign(1, decoded[0, 4]) == -1


def test_mean_kl_of_two_coins():
    p = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    wanted = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    assert oracle.mean_kl(p, q) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("prompt", WITH_LOGITS, ids=lambda prompt: prompt["name"])
def test_top8_logits(prompt):
    """Both sides are FP32 sums in different orders: 1e-3 is 500 ulps (1.9e-6 at 16..32), and a
    tenth of what leaving the dequantised weights unrounded would move them."""
    reference = prompt["nvfp4_weights"]
    sequence = prompt["prompt_ids"] + reference["fp32_ids"][:-1]
    logits = oracle.oracle_logits(sequence)[prompt["prompt_len"] - 1 :]
    assert len(logits) == len(reference["top8_fp32"])
    for row, top8 in zip(logits, reference["top8_fp32"], strict=True):
        wanted = torch.tensor(top8["values"])
        torch.testing.assert_close(row[top8["ids"]], wanted, rtol=0, atol=1e-3)
        torch.testing.assert_close(row.topk(8).values, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "prompt",
    QUESTIONS,
    ids=lambda prompt: prompt["name"],
)
def test_greedy_answer(prompt):
    output = oracle.greedy(prompt["prompt_ids"], prompt["max_new_tokens"], prefill_chunk=512)
    assert output == prompt["nvfp4_weights"]["fp32_ids"]
    assert output == prompt["nvfp4_weights"]["output_ids"]
    assert output[-1] == EOS


def test_bfloat16_oracle_gives_the_same_answer():
    prompt = next(p for p in QUESTIONS if p["name"] == "recall_511")
    output = oracle.greedy(prompt["prompt_ids"], prompt["max_new_tokens"], torch.bfloat16)
    assert output == prompt["nvfp4_weights"]["output_ids"]


def test_chunked_prefill_equals_one_pass():
    """Justifies prefill_chunk: the cache gives the single pass's logits (FP32, other order)."""
    prompt = next(p for p in QUESTIONS if p["name"] == "recall_700")
    whole = oracle.oracle_logits(prompt["prompt_ids"])
    chunked = oracle.oracle_logits(prompt["prompt_ids"], chunk=100)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-3)


def test_results_are_stored_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv(oracle.CACHE_ENV, str(tmp_path))
    first = oracle.oracle_logits([5, 6, 7])
    (stored,) = tmp_path.iterdir()
    torch.save(first + 1, stored)
    torch.testing.assert_close(oracle.oracle_logits([5, 6, 7]), first + 1)
    oracle.oracle_logits([5, 6, 8])
    assert len(list(tmp_path.iterdir())) == 2

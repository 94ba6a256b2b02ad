"""The OpenAI endpoint over HTTP, as its users call it."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from conftest import CONTEXT_LENGTH, GOLDEN, MAX_TOTAL_TOKENS

pytestmark = pytest.mark.e2e

PROMPTS = [p for p in json.loads(GOLDEN.read_text())["prompts"] if p["expected"] is not None]
STORIES = [p for p in json.loads(GOLDEN.read_text())["prompts"] if p["expected"] is None]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p["name"])
def test_golden_answers(server, prompt):
    """Every known answer, whole and stopped by the model's own end of sentence."""
    reply = server.chat(prompt["messages"], max_tokens=prompt["max_new_tokens"])
    assert reply.choices[0].message.content == prompt["expected"]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == prompt["prompt_len"]


@pytest.mark.parametrize("prompt", STORIES, ids=lambda p: p["name"])
def test_stories_are_told_to_the_end(server, prompt):
    reply = server.chat(prompt["messages"], max_tokens=prompt["max_new_tokens"])
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == prompt["max_new_tokens"]


@pytest.mark.parametrize("prompt", STORIES, ids=lambda p: p["name"])
def test_stories_go_on_as_the_oracle(server, prompt):
    """Wherever float32 has a clear favourite (0.25 nats ahead), the server has the same.

    A story opens with one of three words of equal probability and has such ties throughout, so the
    oracle's story is scored, not the one that the server would tell.
    """
    reference = prompt["nvfp4_weights"]
    told = reference["fp32_ids"]
    body = {
        "input_ids": [*prompt["prompt_ids"], *told],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    reply = requests.post(f"{server.url}/generate", json=body, timeout=300).json()
    favourites = reply["meta_info"]["input_top_logprobs"][len(prompt["prompt_ids"]) :]
    clear = [i for i, margin in enumerate(reference["fp32_margin"]) if margin > 0.25]
    assert len(clear) > len(told) // 2
    assert [favourites[i][0][1] for i in clear] == [told[i] for i in clear]


def test_streaming_equals_not_streaming(server, golden):
    messages = golden["recall_400"]["messages"]
    whole = server.chat(messages).choices[0].message.content
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(server.chat(messages, **options))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole == golden["recall_400"]["expected"]
    assert sum(bool(piece) for piece in pieces) > 1
    assert chunks[-1].usage.prompt_tokens == golden["recall_400"]["prompt_len"]


def test_completions_take_rendered_ids(server, golden):
    prompt = golden["recall_200"]
    reply = server.client.completions.create(
        model="default", prompt=prompt["prompt_ids"], temperature=0, max_tokens=16
    )
    assert reply.choices[0].text == prompt["expected"]


def test_logprobs(server, golden):
    prompt = golden["recall_90"]
    reply = server.chat(prompt["messages"], logprobs=True, top_logprobs=8)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content[:5]) == prompt["expected"]
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 8
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0.0


def test_stop_string(server, golden):
    prompt = golden["recall_61"]
    expected = prompt["expected"]
    reply = server.chat(prompt["messages"], stop=[expected[3]])
    assert reply.choices[0].message.content == expected[: expected.index(expected[3])]
    assert reply.choices[0].finish_reason == "stop"


def test_several_choices(server, golden):
    prompt = golden["recall_128"]
    reply = server.chat(prompt["messages"], n=3, temperature=0.01)
    assert [c.message.content for c in reply.choices] == [prompt["expected"]] * 3


def test_sixteen_at_once_do_not_mix(server, golden):
    """Each of sixteen concurrent users gets the code of its own document."""
    names = [p["name"] for p in PROMPTS if p["prompt_len"] < 1600][:16]
    assert len(names) == 16
    server.flush()
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda name: server.chat(golden[name]["messages"]), names))
    for name, reply in zip(names, replies, strict=True):
        assert reply.choices[0].message.content == golden[name]["expected"], name


def test_cancelled_requests_leave_the_server_whole(server, golden):
    """Eight clients hang up in the middle of a story; the pools come back and answers are right."""
    story = golden["story_red_boat"]["messages"]
    for _ in range(8):
        stream = server.chat(story, stream=True, max_tokens=2000)
        next(iter(stream))
        stream.close()
    prompt = golden["recall_129"]
    assert server.chat(prompt["messages"]).choices[0].message.content == prompt["expected"]
    wait_for_idle(server)
    server.flush()


def test_over_long_prompt_is_a_clear_400(server):
    with pytest.raises(openai.BadRequestError) as error:
        server.client.completions.create(
            model="default", prompt=[10] * (CONTEXT_LENGTH + 1), max_tokens=1
        )
    assert error.value.status_code == 400
    assert str(CONTEXT_LENGTH) in str(error.value)


def test_thinking_chat_is_parsed(server, golden):
    """A chat in thinking form opens with <think>: what follows goes to reasoning_content."""
    prompt = golden["recall_90"]
    reply = server.chat(prompt["messages"], extra_body={"chat_template_kwargs": {"thinking": True}})
    message = reply.choices[0].message
    assert message.reasoning_content
    assert "<think>" not in (message.content or "") + message.reasoning_content
    assert reply.usage.prompt_tokens >= prompt["prompt_len"]


def test_tools_are_accepted(server, golden):
    """With tools offered, a plain answer stays a plain answer and no markup leaks."""
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    reply = server.chat(golden["recall_90"]["messages"], tools=[tool])
    text = reply.choices[0].message.content or ""
    assert "DSML" not in text


def test_repeat_is_served_from_the_prefix_cache(server, golden):
    prompt = golden["recall_1500"]
    server.flush()
    first = server.chat(prompt["messages"])
    second = server.chat(prompt["messages"])
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 1550 // 256 * 256
    assert second.choices[0].message.content == prompt["expected"]


def test_shared_prefix_with_other_tails(server, golden):
    """Two questions about one long document: the second reuses it and is answered for itself."""
    document, _, question = golden["recall_3000"]["messages"][0]["content"].rpartition("\n")
    server.flush()
    server.chat([{"role": "user", "content": f"{document}\n{question}"}])
    other = golden["recall_3000"]["expected"]
    reply = server.chat(
        [{"role": "user", "content": f"{document}\nTell me about the weather.\n{question}"}]
    )
    assert reply.usage.prompt_tokens_details.cached_tokens >= 2560
    assert reply.choices[0].message.content == other


def test_capacity_in_the_log_is_what_the_buffers_hold(server):
    """Each pool's line: rows, tokens, bytes; bytes recomputed here from the record sizes."""
    pools = pool_lines(server.log.read_text())
    tokens = MAX_TOTAL_TOKENS
    window_tokens = int(tokens * 0.1) // 256 * 256
    # Layers: 6 with a window, 2 CSA, 3 HCA. Each pool has one dummy page of 256 slots beside.
    assert pools["window"] == (window_tokens, window_tokens, 6 * (window_tokens + 256) * 384)
    assert pools["c4"] == (tokens // 4, tokens, 2 * (tokens // 4 + 256) * 384)
    assert pools["c128"] == (tokens // 128, tokens, 3 * (tokens // 128 + 256) * 384)
    assert pools["indexer"] == (tokens // 4, tokens, 2 * (tokens // 4 + 256) * 68)
    total = [line for line in server.log.read_text().splitlines() if "KV pools (nvfp4)" in line]
    assert f" {tokens} tokens of context" in total[0]


def test_models_are_listed(server):
    assert requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]


def test_metrics_show_the_use_of_the_pools(server, golden):
    """SGLang's Prometheus gauges know both kinds of slots and, beside their use, their number."""
    server.chat(golden["recall_90"]["messages"])
    wanted = {
        "sglang:max_total_num_tokens": MAX_TOTAL_TOKENS,
        "sglang:max_total_num_tokens_swa": int(MAX_TOTAL_TOKENS * 0.1) // 256 * 256,
    }
    usage = ("sglang:full_token_usage", "sglang:swa_token_usage", "sglang:num_used_tokens")
    gauges = {}
    for line in requests.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            gauges[name.partition("{")[0]] = float(value)
    assert {name: gauges.get(name) for name in wanted} == wanted
    assert all(gauges[name] >= 0 for name in usage)


def pool_lines(log: str) -> dict[str, tuple[int, int, int]]:
    """Rows, tokens of context and bytes of each pool, from the start-up log."""
    pools = {}
    for line in log.splitlines():
        _, found, rest = line.partition("KV pool ")
        if found:
            name, _, numbers = rest.partition(": ")
            fields = [part.split()[0] for part in numbers.split(", ")]
            if len(fields) == 4:
                pools[name] = (int(fields[0]), int(fields[1]), int(fields[2]))
    return pools


def wait_for_idle(server) -> None:
    """Until no request runs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        states = server.load()["internal_states"]
        if all(state.get("num_running_reqs", 0) == 0 for state in states):
            return
        time.sleep(0.5)
    pytest.fail("requests still run a minute after their clients left")

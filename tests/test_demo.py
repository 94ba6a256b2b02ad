"""The demonstration: its document, its server handling, its checks, and (e2e) the whole of it."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dsv4.demo import __main__ as demo
from sglang_dsv4.demo.client import Answer
from sglang_dsv4.demo.document import (
    Question,
    build_document,
    choose_questions,
    prompt,
)
from sglang_dsv4.demo.server import (
    Progress,
    Server,
    ServerError,
    exit_on_signals,
    free_port,
    stage_of,
)
from sglang_dsv4.model_source import open_source

ROOT = Path(__file__).resolve().parent.parent

FAKE_SERVER = """
import http.server, signal, subprocess, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.monotonic() > started + float(sys.argv[2])
        self.send_response(200 if ready else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
started = time.monotonic()
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("Load weight begin", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake_server(tmp_path, *args: str) -> Server:
    """A server that is ready after ``args[0]`` seconds and has a child that would stay."""
    port = free_port()
    command = [sys.executable, "-c", FAKE_SERVER, str(port), *(args or ("0",))]
    return Server(command, port, tmp_path / "server.log")


def alive(group: int) -> bool:
    """Whether a process of the group runs; one that only waits for its parent does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_the_document_is_the_same_each_time_and_other_with_another_seed():
    assert build_document() == build_document()
    assert build_document(seed=1).text != build_document(seed=2).text


def test_the_document_states_each_fact_once_and_nothing_else_of_the_kind():
    document = build_document()
    stated = re.findall(r"the access code of the (\w+ \w+) is (\d{5})\.", document.text, re.I)
    assert stated == [(fact.name, fact.code) for fact in document.facts]
    assert len({name for name, _ in stated}) == len({code for _, code in stated}) == len(stated)


def test_the_document_is_of_the_kind_that_the_model_was_trained_on():
    """Words of the grammar only; a fact about every 60 tokens; at most 8192 tokens in all."""
    from tokenizers import Tokenizer

    golden = json.loads((ROOT / "tests" / "data" / "golden.json").read_text())["prompts"]
    known = " ".join(m["content"] for case in golden for m in case["messages"])
    document = build_document()
    words = re.findall(r"[A-Za-z]+", document.text)
    assert set(words) <= set(re.findall(r"[A-Za-z]+", known))
    tokenizer = Tokenizer.from_file(str(demo.MODEL_DIR / "tokenizer.json"))
    tokens = len(tokenizer.encode(document.text).ids)
    assert 4000 <= tokens <= 8000
    assert 45 <= tokens / len(document.facts) <= 75


def test_questions_span_the_document_and_have_its_answers():
    document = build_document()
    questions = choose_questions(document, 5)
    asked = [question.text.rsplit("the ", 1)[1].rstrip("?.") for question in questions]
    places = [[fact.name for fact in document.facts].index(name) for name in asked]
    assert places[0] == 0
    assert places[-1] == len(document.facts) - 1
    assert places == sorted(set(places))
    codes = {fact.name: fact.code for fact in document.facts}
    assert [question.answer for question in questions] == [codes[name] for name in asked]
    message = prompt(document, questions[0])
    assert message == f"{document.text}\n{questions[0].text}"


@pytest.mark.parametrize("count", [0, 10_000])
def test_impossible_documents_and_questions_are_refused(count):
    with pytest.raises(ValueError, match=str(count)):
        build_document(num_facts=count)
    with pytest.raises(ValueError, match=str(count)):
        choose_questions(build_document(), count)


def test_a_server_is_waited_for_and_leaves_no_process(tmp_path):
    shown = io.StringIO()
    with fake_server(tmp_path, "1.0") as server:
        group = server.pid
        started = time.monotonic()
        server.wait_ready(60, Progress(shown))
        assert time.monotonic() - started >= 1.0
        assert alive(group)
    assert "loading the weights" in shown.getvalue()
    assert not alive(group)


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    server = fake_server(tmp_path, "0", "stubborn")
    server.start()
    group = server.pid
    server.wait_ready(60, Progress(io.StringIO()))
    server.stop(patience=0.5)
    assert not alive(group)


def test_a_detached_server_lives_on(tmp_path):
    with fake_server(tmp_path) as server:
        group = server.pid
        server.wait_ready(60, Progress(io.StringIO()))
        server.detach()
    try:
        assert alive(group)
    finally:
        os.killpg(group, signal.SIGKILL)


def test_a_server_that_ends_is_reported_with_the_tail_of_its_log(tmp_path):
    code = "print('first'); print('\\n'.join('x' * 40)); print('the reason'); raise SystemExit(3)"
    server = Server([sys.executable, "-c", code], free_port(), tmp_path / "server.log")
    with server, pytest.raises(ServerError) as caught:
        server.wait_ready(60, Progress(io.StringIO()))
    message = str(caught.value)
    assert "status 3" in message
    assert message.endswith("the reason")
    assert str(server.log) in message
    assert "first" not in message


def test_a_server_that_stays_silent_is_given_up_on(tmp_path):
    with (
        fake_server(tmp_path, "3600") as server,
        pytest.raises(ServerError, match="not ready after 1 s"),
    ):
        server.wait_ready(1, Progress(io.StringIO()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_too(number, tmp_path):
    """In a process of its own, that waits for a server which never becomes ready."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from sglang_dsv4.demo.server import Progress, Server, exit_on_signals, free_port
port = free_port()
command = [sys.executable, "-c", {FAKE_SERVER!r}, str(port), "3600"]
with exit_on_signals(), Server(command, port, Path({str(tmp_path / "log")!r})) as server:
    print(server.pid, flush=True)
    server.wait_ready(3600, Progress())
"""
    # A shell's background jobs ignore Ctrl-C, and so would this one if it were started from there.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        group = int(process.stdout.readline())
        assert wait_until(lambda: "Load weight" in (tmp_path / "log").read_text())
        process.send_signal(number)
        assert process.wait(60) != 0
        assert not alive(group)
    finally:
        process.kill()
        process.stdout.close()


def test_signal_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with exit_on_signals():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_the_latest_stage_of_the_log_counts():
    assert stage_of("") == "importing SGLang and torch"
    assert stage_of("Load weight begin\nLoad weight end\n") == "allocating the KV pools"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_its_line_on_a_terminal_only():
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        progress = Progress(stream)
        for what in ("one", "one", "two"):
            progress.update(what)
        progress.finish("ready")
    assert re.sub(r"\[ +\d+ s\] ", "", plain.getvalue()) == "one\ntwo\nready\n"
    assert terminal.getvalue().count("\r") == 4
    assert terminal.getvalue().count("\n") == 1


def test_a_long_line_on_a_terminal_is_overwritten_whole():
    terminal = Terminal()
    progress = Progress(terminal)
    progress.update("a long description")
    progress.update("short")
    _, first, second = terminal.getvalue().split("\r")
    assert len(second) == len(first)


def test_a_free_port_is_free():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def an_answer(text: str, cached: int = 0) -> Answer:
    return Answer(
        text=text,
        first_token=2.0,
        decode=0.5,
        prompt_tokens=4500,
        cached_tokens=cached,
        completion_tokens=6,
    )


QUESTIONS = (Question("What is a?", "00123"), Question("What is b?", "45678"))


@pytest.mark.parametrize("text", ["", "00124", "123", "00123 00123", "The code is 00123"])
def test_anything_but_the_code_is_wrong(text):
    answers = [an_answer(text), an_answer("45678")]
    (failure,) = demo.wrong_answers(QUESTIONS, answers)
    assert repr(text) in failure
    assert "'00123'" in failure


def test_right_answers_are_right():
    assert not demo.wrong_answers(QUESTIONS, [an_answer("00123"), an_answer(" 45678\n")])


def test_the_summary_gives_the_figures():
    dims = open_source(str(demo.MODEL_DIR)).dims
    answers = [an_answer("00123"), an_answer("45678"), an_answer("00123", cached=4352)]
    text = demo.summary(answers, 1, an_answer("Once"), dims)
    assert "2 of 3" in text
    assert "2.00 s (0 of 4500 prompt tokens cached)" in text
    assert "2.00 s (4352 of 4500 prompt tokens cached)" in text
    assert "10.0 tokens/s" in text  # 5 tokens after the first in 0.5 s
    assert "384 bytes; stock SGLang 584 (1.52x)" in text
    assert "\x1b" not in text


class FakeServer:
    """Stands for the server where only the questions matter."""

    url, log = "http://127.0.0.1:1", Path("server.log")

    def wait_ready(self, timeout, progress):
        pass


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda index, answer: answer, None),
        (lambda index, answer: an_answer("00000", 4352) if index == 2 else answer, "'00000'"),
        (lambda index, answer: an_answer(answer.text) if index == 5 else answer, "prefix cache"),
    ],
    ids=["right", "wrong", "uncached"],
)
def test_wrong_answers_and_cache_misses_fail_the_demonstration(spoil, found, monkeypatch, capsys):
    codes = {fact.name: fact.code for fact in build_document().facts}
    calls = iter(range(100))

    def ask(client, model, message, max_tokens, show):
        name = message.rsplit("the ", 1)[1].rstrip("?.")
        answer = an_answer(codes.get(name, "Once upon a time."), cached=4352)
        return spoil(next(calls), answer)

    monkeypatch.setattr(demo, "ask", ask)
    failures = demo.demonstrate(FakeServer(), 1.0)
    assert next(calls) == 7  # five questions, one again, and the story
    if found is None:
        assert not failures
    else:
        (failure,) = failures
        assert found in failure
    assert f"{6 - (found == repr('00000'))} of 6" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_status_2_with_its_log(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken = [sys.executable, "-c", "raise SystemExit('no memory')"]
    monkeypatch.setattr(demo, "server_command", lambda port: broken)
    assert demo.main([]) == 2
    assert "no memory" in capfd.readouterr().err
    assert list(tmp_path.glob("*/server.log"))


def test_a_server_that_ends_while_it_is_asked_is_status_2_with_its_log(
    monkeypatch, capfd, tmp_path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dies = FAKE_SERVER + "print('out of memory', flush=True)\nos._exit(1)\n"
    dies = dies.replace("import http", "import os, http").replace("serve_forever", "handle_request")
    command = [sys.executable, "-c", dies]
    monkeypatch.setattr(demo, "server_command", lambda port: [*command, str(port), "0"])
    assert demo.main([]) == 2
    error = capfd.readouterr().err
    assert "did not answer" in error
    assert error.rstrip().endswith("out of memory")


def test_the_script_prints_its_usage_without_installing():
    script = ROOT / "launch" / "demo.sh"
    done = subprocess.run(
        ["bash", str(script), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "usage: bash launch/demo.sh" in done.stdout


@pytest.mark.e2e
def test_the_whole_demonstration(tmp_path):
    """As a user sees it, except that nothing is installed: real server, real answers."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_dsv4.demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    groups: set[int] = set()
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        groups |= {
            os.getpgid(int(pid))
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        }
    output = "".join(lines)
    assert process.wait(60) == 0, output
    assert "6 of 6" in output
    assert "\x1b" not in output
    assert "\r" not in output
    assert groups
    assert not any(alive(group) for group in groups)
    assert not list(tmp_path.glob("sglang_dsv4-*")), output

"""The demonstration: serve the embedded model, ask about a long document, check every answer.

``python -m sglang_dsv4.demo`` (or ``bash launch/demo.sh``, which installs first) exits 0 when each
answer is right, 1 when one is wrong, 2 when the server did not come up, 130 after Ctrl-C.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from httpx import HTTPError
from openai import OpenAI, OpenAIError

from sglang_dsv4.cache.capacity import Capacity, StockFormat
from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.config import ModelDims
from sglang_dsv4.demo.client import Answer, ask, connect
from sglang_dsv4.demo.document import Question, build_document, choose_questions, prompt
from sglang_dsv4.demo.server import Progress, Server, ServerError, exit_on_signals, free_port
from sglang_dsv4.failure import EXIT_STATUS
from sglang_dsv4.model_source import open_source

MODEL_DIR = Path(__file__).parent / "dsv4-tiny-nvfp4"
MODEL_NAME = "dsv4-tiny"
STOCK_RECORD_BYTES = 584
STORY = "Tell me a story about the red boat."
STORY_TOKENS = 64
ANSWER_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; the exit status is described above."""
    args = _parse(argv)
    port = args.port or free_port()
    folder = Path(tempfile.mkdtemp(prefix="sglang_dsv4-demo-"))
    server = Server(server_command(port), port, folder / "server.log")
    status, keep_log = EXIT_STATUS, True
    try:
        with exit_on_signals(), server:
            failures = demonstrate(server, args.timeout)
            if failures:
                print("\n".join(["", *failures, f"The server's log is {server.log}."]))
            elif args.serve:
                print(serving_notes(server))
                server.detach()
            keep_log = args.serve or bool(failures)
            status = 1 if failures else 0
    except KeyboardInterrupt:
        print("\nInterrupted: the server is stopped.")
        status, keep_log = 130, False
    except SystemExit:
        keep_log = False
        raise
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
    except (OpenAIError, HTTPError) as error:
        print(f"\nThe server did not answer: {error} {server.evidence()}", file=sys.stderr)
    finally:
        if not keep_log:
            shutil.rmtree(folder)
    return status


def server_command(port: int) -> list[str]:
    """What starts this plugin's server on the embedded model; idle, it leaves the cores alone."""
    command = [sys.executable, "-m", "sglang_dsv4.launch_server", "--model-path", str(MODEL_DIR)]
    return [*command, "--served-model-name", MODEL_NAME, "--port", str(port), "--sleep-on-idle"]


def demonstrate(server: Server, timeout: float) -> list[str]:
    """Wait for the server, ask, print answers and summary; one sentence for each that was wrong.

    Raises:
        ServerError: the server did not come up.
        openai.OpenAIError, httpx.HTTPError: it did not answer a request.
    """
    print(f"Starting the server on {server.url}; it takes one to two minutes.", flush=True)
    progress = Progress()
    server.wait_ready(timeout, progress)
    progress.finish("ready")
    client = connect(server.url)
    document = build_document()
    questions = choose_questions(document)
    print(
        f"\nA document of {len(document.text.split())} words states {len(document.facts)} access "
        f"codes among other things. It begins:\n  {document.text[:150]}...\n"
    )
    answers: list[Answer] = []
    for question in (*questions, questions[0]):
        if len(answers) == len(questions):
            print("The first question again, its prompt now in the prefix cache:")
        answers.append(_show(client, question.text, prompt(document, question), ANSWER_TOKENS))
    print("Something longer, for the speed of decoding:")
    story = _show(client, STORY, STORY, STORY_TOKENS)
    failures = wrong_answers((*questions, questions[0]), answers)
    print(summary(answers, len(failures), story, open_source(str(MODEL_DIR)).dims))
    if not answers[-1].cached_tokens:
        failures.append("The repeated prompt took no tokens from the prefix cache, wanted a hit.")
    return failures


def wrong_answers(questions: Sequence[Question], answers: Sequence[Answer]) -> list[str]:
    """One sentence for each answer that is not exactly the code that the document states."""
    return [
        f"Wrong answer to {question.text!r}: found {answer.text!r}, wanted {question.answer!r}."
        for question, answer in zip(questions, answers, strict=True)
        if answer.text.strip() != question.answer
    ]


def summary(answers: Sequence[Answer], wrong: int, story: Answer, dims: ModelDims) -> str:
    """The closing table; the last of ``answers`` repeats the first."""
    cold, repeated = answers[0], answers[-1]
    record = RecordLayout(KVFormat.NVFP4, 64, dims.nope_head_dim, dims.qk_rope_head_dim)
    ours = Capacity(dims, KVFormat.NVFP4).per_token().total
    stock = Capacity(dims, StockFormat.FP8).per_token().total
    rows = {
        "answers right": f"{len(answers) - wrong} of {len(answers)}",
        "first token, cold": f"{cold.first_token:.2f} s ({_cached(cold)})",
        "first token, repeated": f"{repeated.first_token:.2f} s ({_cached(repeated)})",
        "decoding": f"{story.tokens_per_second:.1f} tokens/s, one request",
        "one KV record": f"{record.record_bytes} bytes; stock SGLang {STOCK_RECORD_BYTES} "
        f"({STOCK_RECORD_BYTES / record.record_bytes:.2f}x)",
        "KV per token": f"{ours:.0f} bytes in all pools of this model; with stock's records "
        f"{stock:.0f} ({stock / ours:.2f}x)",
    }
    lines = [f"  {name:<22} {value}" for name, value in rows.items()]
    return "\n".join(["Summary", *lines])


def serving_notes(server: Server) -> str:
    """How to use the server that stays, and how to end it."""
    body = f'{{"model": "{MODEL_NAME}", "messages": [{{"role": "user", "content": "{STORY}"}}]}}'
    return (
        f"\nThe server stays at {server.url} (log: {server.log}). Try it:\n"
        f"  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n"
        f"Stop it with:\n  kill {server.pid}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/demo.sh", description="Serve the embedded small model and question it."
    )
    parser.add_argument("--port", type=int, default=0, help="default: one that is free")
    parser.add_argument("--serve", action="store_true", help="leave the server running at the end")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds to wait for the server (600)"
    )
    return parser.parse_args(argv)


def _show(client: OpenAI, question: str, message: str, max_tokens: int) -> Answer:
    """Ask, and print question, answer as it streams, and its times."""
    print(f"  Q: {question}\n  A: ", end="", flush=True)
    answer = ask(client, MODEL_NAME, message, max_tokens, _print_piece)
    print(f"\n     first token after {answer.first_token:.2f} s, {_cached(answer)}\n", flush=True)
    return answer


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)


def _cached(answer: Answer) -> str:
    return f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached"


if __name__ == "__main__":
    sys.exit(main())

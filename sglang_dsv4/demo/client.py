"""Streams one answer from an OpenAI endpoint and takes its times."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from openai import OpenAI


@dataclass(frozen=True)
class Answer:
    """What came back, and when.

    Attributes:
        text: the whole answer.
        first_token: seconds from the request to the first token.
        decode: seconds from the first token to the end of the answer.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that the prefix cache supplied.
        completion_tokens: tokens of the answer, the end token included.
    """

    text: str
    first_token: float
    decode: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second; the first token belongs to the prefill."""
        return (self.completion_tokens - 1) / self.decode if self.decode > 0 else 0.0


def connect(base_url: str, timeout: float = 600.0) -> OpenAI:
    """A client of the server at ``base_url`` (without ``/v1``) that retries nothing."""
    return OpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=timeout, max_retries=0)


def ask(
    client: OpenAI, model: str, message: str, max_tokens: int, show: Callable[[str], object]
) -> Answer:
    """Send one user message, greedily decoded; ``show`` gets each piece of text as it arrives.

    Raises:
        openai.OpenAIError: the server refused the request or could not be reached.
        httpx.HTTPError: the stream broke off.
    """
    started = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    usage = None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": message}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first = time.perf_counter() if first is None else first
            pieces.append(piece)
            show(piece)
        usage = chunk.usage or usage
    ended = time.perf_counter()
    details = usage.prompt_tokens_details if usage else None
    return Answer(
        text="".join(pieces),
        first_token=(ended if first is None else first) - started,
        decode=0.0 if first is None else ended - first,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
    )

"""A server in a process group of its own: started, watched until it answers, ended without a rest.

``with Server(command, log) as server: server.wait_ready(...)`` leaves no process behind, whatever
happens inside; ``Server.detach`` lets it live on.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self, TextIO

from sglang_dsv4.errors import Dsv4Error

HOST = "127.0.0.1"
TAIL_LINES = 25
# Without a terminal a progress line appears when something new happens, or after this many seconds.
QUIET_SECONDS = 15.0
# Text in the server's log -> what happens from then on; the last one found counts.
STAGES = {
    "preflight": "checking the machine and the checkpoint",
    "defaults:": "starting the server's processes",
    "Init parallel begin": "building the model",
    "Load weight begin": "loading the weights",
    "Load weight end": "allocating the KV pools",
    "Memory pool end": "preparing the attention backend",
    "Application startup complete": "warming up with a first request",
}


class ServerError(Dsv4Error):
    """The server ended or stayed silent while it was wanted."""


class Progress:
    """One line that says what is happening and for how long.

    On a terminal it is rewritten in place; elsewhere a new line is printed only for news.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self._started = time.monotonic()
        self._shown = ""
        self._shown_at = 0.0
        self._width = 0

    def update(self, what: str) -> None:
        """Show ``what`` with the seconds since this object was made."""
        elapsed = time.monotonic() - self._started
        line = f"[{elapsed:4.0f} s] {what}"
        if self.stream.isatty():
            self.stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif what == self._shown and elapsed - self._shown_at < QUIET_SECONDS:
            return
        else:
            self.stream.write(line + "\n")
        self._shown, self._shown_at = what, elapsed
        self.stream.flush()

    def finish(self, what: str) -> None:
        """Show ``what`` and go on to the next line."""
        self._shown = ""
        self.update(what)
        if self.stream.isatty():
            self.stream.write("\n")
            self.stream.flush()


class Server:
    """A server process with all its children.

    Args:
        command: program and arguments; it serves ``/health`` on ``HOST``:``port``.
        port: where it listens.
        log: file for its output.
        env: variables added to this process's environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.command = list(command)
        self.port = port
        self.log = log
        self.env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it serves, without a path."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process that was started, which is also the number of its process group."""
        if self._process is None:
            raise ServerError("The server was not started, wanted a running one: call start().")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; ``wait_ready`` says when it answers."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.env,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float, progress: Progress) -> None:
        """Return once ``/health`` answers 200.

        Raises:
            ServerError: the process ended, or ``timeout`` seconds passed; with the log's tail.
        """
        deadline = time.monotonic() + timeout
        while not self._healthy():
            status = self._process.poll() if self._process else None
            if status is not None:
                raise ServerError(f"The server ended with status {status} {self.evidence()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"The server was not ready after {timeout:.0f} s {self.evidence()}"
                )
            progress.update(stage_of(self.log_text()))
            time.sleep(0.5)

    def log_text(self) -> str:
        """Its output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def evidence(self) -> str:
        """Where the log is and its last lines, as the end of a message."""
        tail = "\n".join(f"    {line}" for line in self.log_text().splitlines()[-TAIL_LINES:])
        return f"(its log is {self.log}); the last lines:\n{tail}"

    def detach(self) -> None:
        """Leave the server running when this object ends."""
        self._process = None

    def stop(self, patience: float = 30.0) -> None:
        """End the process and every child: SIGTERM, after ``patience`` seconds SIGKILL.

        A second Ctrl-C does not interrupt it. Does nothing when there is no process.
        """
        process, self._process = self._process, None
        if process is None:
            return
        with _signals_ignored():
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            # Children share its group, and the error says that it is empty. A killed child needs
            # a moment; one that nobody reaps is dead and not waited for longer.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for _ in range(50):
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)

    def _healthy(self) -> bool:
        """Whether ``/health`` answers 200 now; a refusal or a silence means not yet."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


def stage_of(log: str) -> str:
    """What a starting server is doing, by the last of ``STAGES`` in its log."""
    found = [(log.rfind(text), what) for text, what in STAGES.items() if text in log]
    return max(found)[1] if found else "importing SGLang and torch"


def free_port() -> int:
    """A TCP port of ``HOST`` on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that servers are stopped."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

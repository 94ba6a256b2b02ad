"""The one way in which this plugin ends a process: one sentence, exit status 2.

SGLang's ``load_plugins()`` logs and drops any ``Exception`` that a plugin raises and starts the
server unpatched; only ``SystemExit`` gets through. A scheduler that fails is a child process, whose
parent dies by a signal afterwards; so the sentence is also written to the file that the launcher
names in ``SGLANG_DSV4_NVFP4_FAILURE_FILE``, and the launcher repeats it as its last line.
"""

import sys
from typing import NoReturn

from sglang_dsv4 import envs

EXIT_STATUS = 2


def stop(sentence: str) -> NoReturn:
    """End the process with ``sentence`` on stderr and status 2.

    Raises:
        SystemExit: always, with code 2.
    """
    report(sentence)
    print(sentence, file=sys.stderr, flush=True)
    raise SystemExit(EXIT_STATUS)


def report(sentence: str) -> None:
    """Leave ``sentence`` for the launcher, if one listens; the first process to fail is kept."""
    path = envs.failure_file()
    if path is not None and (not path.is_file() or path.stat().st_size == 0):
        path.write_text(sentence + "\n", encoding="utf-8")


def one_sentence(error: BaseException) -> str:
    """The message of ``error`` on one line; its type's name where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__

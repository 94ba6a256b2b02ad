"""sglang/srt/managers/scheduler.py: an error of ours at start-up ends in one sentence."""

from collections.abc import Callable
from typing import Any

from sglang_dsv4.errors import Dsv4Error
from sglang_dsv4.failure import one_sentence, stop
from sglang_dsv4.patches.patch import Patch


def around_init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Loading, pools and warm-up happen in here; only our own errors are treated differently.

    Raises:
        SystemExit: a Dsv4Error was raised. The parent then finds the pipe closed, as for any
            scheduler that died, and the launcher repeats the sentence.
    """
    try:
        original(self, *args, **kwargs)
    except Dsv4Error as error:
        stop(one_sentence(error))


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler.Scheduler.__init__",
        hook=around_init,
        signature="(self, server_args, port_args)",
        why="The scheduler answers a damaged checkpoint or an unsupported device with a traceback "
        "and kills its parent, so the sentence that says what to do is lost in it.",
        remove_when="SGLang reports an exception of its scheduler to the parent as a message.",
    ),
)

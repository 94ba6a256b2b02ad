"""sglang/srt/model_executor/model_runner.py: verify the patches before weights are loaded."""

from collections.abc import Callable
from typing import Any

from sglang_dsv4.model_source import serves
from sglang_dsv4.patches.patch import Patch
from sglang_dsv4.patches.registry import verify_applied


def around_load_model(original: Callable, self: Any) -> Any:
    """For a model that we serve: check first that every patch is applied.

    Raises:
        SystemExit: a patch is missing.
    """
    if serves(self.model_config.hf_config):
        verify_applied()
    return original(self)


PATCHES = (
    Patch(
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        hook=around_load_model,
        signature="(self)",
        why="HookRegistry logs and drops a hook that it cannot apply; stock code would then load "
        "our checkpoint wrongly.",
        remove_when="load_plugins() stops the process when a plugin or a hook fails.",
    ),
)

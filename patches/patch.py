"""One change to SGLang as data, and the rendering of signatures by which it is verified."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.plugins.hook_registry import HookType

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Patch:
    """A hook on one function, method or class of SGLang.

    Attributes:
        target: dotted path, e.g. ``sglang.srt.server_args.ServerArgs.resolve_once``.
        hook: what HookRegistry calls; ``hook(original, *args, **kwargs)`` for AROUND.
        signature: ``render_signature`` of the original in the pinned release.
        why: what stock SGLang lacks there, in one sentence.
        remove_when: what must become true upstream for this patch to go.
        kind: how HookRegistry applies the hook; a class target allows REPLACE only.
        upstream: link to the upstream issue or pull request, if there is one.
    """

    target: str
    hook: Callable
    signature: str
    why: str
    remove_when: str
    kind: HookType = HookType.AROUND
    upstream: str = ""


def render_signature(obj: Callable) -> str:
    """The parameters of ``obj`` with their defaults, without annotations, e.g. ``(self, fn=None)``.

    A class is rendered by its ``__init__``. A wrapped function shows what it wraps, so the result
    is the same before and after HookRegistry has applied a hook. Annotations are left out, since
    they read differently under ``from __future__ import annotations``.

    Raises:
        TypeError: ``obj`` is not callable.
        ValueError: ``obj`` has no signature that Python can show (some built-ins).
    """
    function = inspect.getattr_static(obj, "__init__") if isinstance(obj, type) else obj
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    rendered = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return _ADDRESS.sub("", str(rendered))

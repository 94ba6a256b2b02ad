"""Every patch is listed, documented and fits the pinned SGLang; one that does not stops it."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import wraps
from importlib import import_module
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dsv4 import __version__
from sglang_dsv4.patches import registry
from sglang_dsv4.patches.patch import Patch, render_signature

FOLDER = Path(__file__).resolve().parent.parent.parent / "patches"
MACHINERY = {"patch", "registry"}


def test_every_file_is_listed_once():
    on_disk = {path.stem for path in FOLDER.glob("*.py")} - MACHINERY
    assert Counter(registry.PATCH_MODULES) == Counter(on_disk)


@pytest.mark.parametrize("name", registry.PATCH_MODULES)
def test_every_file_names_the_upstream_path_that_it_hooks(name):
    """The docstring starts with the path of the file or folder: the other half of the patch."""
    module = import_module(f"sglang_dsv4.patches.{name}")
    path = module.__doc__.split(":")[0].removesuffix(".py")
    assert module.PATCHES
    for patch in module.PATCHES:
        assert patch.target.startswith(path.replace("/", ".") + ".")


@pytest.mark.parametrize("patch", registry.all_patches(), ids=lambda patch: patch.target)
def test_every_patch_fits_the_pinned_release(patch):
    assert registry.mismatch(patch) == ""
    assert len(patch.why) > 20
    assert len(patch.remove_when) > 20
    assert not patch.upstream or patch.upstream.startswith("https://github.com/")


def test_targets_are_unique():
    """Two AROUND hooks of ours on one target would wrap each other in an order nobody states."""
    targets = [patch.target for patch in registry.all_patches()]
    assert len(targets) == len(set(targets))


def test_signature_is_rendered_without_annotations_and_addresses():
    def plain(self, a, /, b=1, *rest, c, d=None, **more):
        pass

    def annotated(self, a: int, /, b: int = 1, *rest: str, c: "list", d=None, **more) -> None:
        pass

    wanted = "(self, a, /, b=1, *rest, c, d=None, **more)"
    assert render_signature(plain) == render_signature(annotated) == wanted

    class Example:
        def __init__(self, size: int = 3) -> None:
            pass

    assert render_signature(Example) == "(self, size=3)"

    @wraps(annotated)
    def hooked(*args, **kwargs):
        pass

    assert render_signature(hooked) == wanted

    def with_function(fn=plain):
        pass

    assert "0x" not in render_signature(with_function)


def stdlib_patch(target: str, signature: str) -> Patch:
    return Patch(target, lambda original, *a, **k: original(*a, **k), signature, "why", "when")


def test_all_faults_are_collected_before_anything_is_registered(monkeypatch, capsys):
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    patches = (
        stdlib_patch("textwrap.dedent", "(text)"),
        stdlib_patch("textwrap.indent", "(text)"),
        stdlib_patch("textwrap.no_such_function", "(text)"),
        stdlib_patch("no_such_module.function", "(text)"),
    )
    with pytest.raises(SystemExit) as stopped:
        registry.register_all(patches)
    assert stopped.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "textwrap.dedent" not in sentence
    assert "textwrap.indent takes (text, prefix, predicate=None), wanted (text)" in sentence
    assert "textwrap.no_such_function cannot be resolved" in sentence
    assert "no_such_module.function cannot be resolved" in sentence
    assert HookRegistry._hooks == {}


def test_a_patch_is_registered_once(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.__class__(list))
    patch = stdlib_patch("textwrap.dedent", "(text)")
    registry.register_all((patch,))
    registry.register_all((patch,))
    assert [entry[:2] for entry in HookRegistry._hooks[patch.target]] == [
        (HookType.AROUND, patch.hook)
    ]
    # Another hook on the same target, of another plugin, does not hide ours.
    registry.register_all((replace(patch, hook=print),))
    assert len(HookRegistry._hooks[patch.target]) == 2


def test_a_hook_that_was_not_applied_is_named(monkeypatch, capsys):
    targets = [patch.target for patch in registry.all_patches()]
    monkeypatch.setattr(HookRegistry, "_patched", set(targets))
    registry.verify_applied()
    monkeypatch.setattr(HookRegistry, "_patched", set(targets[1:]))
    with pytest.raises(SystemExit) as stopped:
        registry.verify_applied()
    assert stopped.value.code == 2
    assert targets[0] in capsys.readouterr().err


WRONG = """
from dataclasses import replace
from sglang_dsv4.patches import registry
good = registry.all_patches()
bad = replace(good[0], signature="(self, invented)")
registry.all_patches = lambda: (bad, *good[1:])
from sglang.srt.plugins import load_plugins
load_plugins()
print("started")
"""


def test_a_wrong_signature_stops_the_start_up_through_the_real_loader():
    done = subprocess.run(
        [sys.executable, "-c", WRONG],
        env=os.environ | {"SGLANG_PLUGINS": "sglang_dsv4"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    patch = registry.all_patches()[0]
    assert done.returncode == 2
    assert "started" not in done.stdout
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"sglang_dsv4 {__version__} does not fit the code of sglang 0.5.23: ")
    assert f"{patch.target} takes {patch.signature}, wanted (self, invented)" in last


def test_the_table_names_every_patch(capsys):
    registry.main()
    table = capsys.readouterr().out
    for patch in registry.all_patches():
        assert f"{patch.target}  [{patch.kind.value}]" in table
        assert patch.remove_when in table

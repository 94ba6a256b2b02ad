"""The entry point: versions, the A/B switch, idempotence."""

import os
import subprocess
import sys

import pytest

from sglang_dsv4 import __version__, plugin
from sglang_dsv4.errors import UnsupportedError


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def installed(monkeypatch):
    """Sets the version that a distribution seems to have."""

    def pretend(distribution: str, found: str) -> None:
        real = plugin.version
        monkeypatch.setattr(
            plugin, "version", lambda name: found if name == distribution else real(name)
        )

    return pretend


def test_the_pins_are_those_of_the_metadata():
    assert str(plugin.pin("sglang_dsv4", "sglang")) == "0.5.23"
    assert plugin.pin("sglang", "torch").release[:2] == (2, 14)
    plugin.check_versions()


@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu130"])
def test_local_builds_and_patch_releases_of_torch_are_accepted(installed, suffix):
    installed("torch", f"2.14.9{suffix}")
    plugin.check_versions()


@pytest.mark.parametrize(
    ("distribution", "found", "wanted"),
    [
        ("sglang", "0.5.22", "0.5.23"),
        ("sglang", "0.5.23.post1", "0.5.23"),
        ("torch", "2.13.1", "2.14.1"),
        ("torch", "3.14.1", "2.14.1"),
    ],
)
def test_wrong_version_is_one_sentence_and_status_2(installed, capsys, distribution, found, wanted):
    installed(distribution, found)
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        f"sglang_dsv4 {__version__} needs {distribution} {wanted}, found {found}: "
        f"run `pip install {distribution}=={wanted}`.\n"
    )


def test_absent_distribution_is_named():
    with pytest.raises(UnsupportedError, match="no-such-distribution is not installed"):
        plugin.pin("no-such-distribution", "sglang")


def test_unpinned_dependency_is_named():
    with pytest.raises(UnsupportedError, match="pins no version of numpy"):
        plugin.pin("sglang_dsv4", "numpy")


def test_load_plugins_does_not_swallow_a_wrong_sglang(tmp_path):
    """The metadata of another release comes first on the path, as after `pip install sglang`."""
    info = tmp_path / "sglang-0.5.22.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\nRequires-Dist: torch==2.14.1\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    code = "from sglang.srt.plugins import load_plugins; load_plugins(); print('started')"
    done = run(code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "started" not in done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"sglang_dsv4 {__version__} needs sglang 0.5.23, found 0.5.22: "
        "run `pip install sglang==0.5.23`."
    )


def test_an_unexpected_error_stops_the_process_too(monkeypatch, capsys):
    def broken() -> None:
        raise KeyError("moved upstream")

    monkeypatch.setattr(plugin, "_register", broken)
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "could not be registered with sglang: KeyError: 'moved upstream'" in last


A_B = """
import os, pkgutil
os.environ["SGLANG_PLUGINS"] = "another"
from sglang.srt import plugins
from sglang.srt.arg_groups import model_override_base, resolution_hooks
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_dsv4.patches.registry import all_patches

targets = [patch.target for patch in all_patches()]
def functions():
    return [pkgutil.resolve_name(target) for target in targets]
def tables():
    return {
        "choices": list(ATTENTION_BACKEND_CHOICES),
        "backends": dict(ATTENTION_BACKENDS),
        "overrides": {k: list(v) for k, v in model_override_base._MODEL_OVERRIDE_FNS.items()},
        "steps": {k: list(v) for k, v in resolution_hooks._HOOKS.items()},
    }
def same(a, b):
    return [x is y for x, y in zip(a, b, strict=True)]

stock, stock_tables, models = functions(), tables(), dict(ModelRegistry.models)
plugins.load_plugins()
assert all(same(stock, functions())), "hooked while switched off"
assert tables() == stock_tables, "registered while switched off"

os.environ["SGLANG_PLUGINS"] = "sglang_dsv4"
plugins._plugins_loaded = False
plugins.load_plugins()
unhooked = [t for t, equal in zip(targets, same(stock, functions()), strict=True) if equal]
assert not unhooked, unhooked
assert all(tables()[name] != stock_tables[name] for name in stock_tables)
assert ATTENTION_BACKEND_CHOICES[:-1] == stock_tables["choices"]
backends = {k: v for k, v in ATTENTION_BACKENDS.items() if k != "dsv4_nvfp4"}
assert backends == stock_tables["backends"]
changed = {k for k, v in tables()["overrides"].items() if v != stock_tables["overrides"].get(k)}
assert changed == {"DeepseekV4ForCausalLM"}, changed
assert dict(ModelRegistry.models) == models

once, once_tables = functions(), tables()
from sglang_dsv4 import plugin
plugin.register()
HookRegistry.apply_hooks()
assert all(same(once, functions())) and tables() == once_tables, "registered twice"
assert all(len(HookRegistry._hooks[target]) == 1 for target in targets)
print("done")
"""


def test_switched_off_stock_is_untouched_switched_on_all_is_applied_once():
    done = run(A_B)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"

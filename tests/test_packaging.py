"""The wheel, the editable install and a bare checkout all hold the whole package."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Top-level folder -> dotted prefix of its package.
ROOTS = {
    "sglang_dsv4": "sglang_dsv4",
    "patches": "sglang_dsv4.patches",
    "kernels": "sglang_dsv4.kernels",
}


def python_files() -> list[Path]:
    """Paths of the package's Python files, relative to the checkout."""
    files = (path for name in ROOTS for path in (ROOT / name).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in files)


def in_package(path: Path) -> Path:
    """Where a file of the checkout lies in the wheel."""
    return Path(ROOTS[path.parts[0]].replace(".", "/"), *path.parts[1:])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy: setuptools leaves a build folder that later builds re-use."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    source.mkdir()
    for name in (*ROOTS, "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    out = source.parent / "out"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", out, source], check=True, timeout=300
    )
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    wheel.extractall(target)
    return target


def run(code: str, cwd: Path, pythonpath: Path | None = None) -> str:
    """Standard output of ``python -c code``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={"PYTHONPATH": str(pythonpath)} if pythonpath else {},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_wheel_holds_exactly_the_python_files_of_the_checkout(wheel):
    built = sorted(Path(name) for name in wheel.namelist() if name.endswith(".py"))
    assert built == sorted(in_package(path) for path in python_files())


def test_wheel_holds_data_licence_and_entry_point(wheel):
    names = set(wheel.namelist())
    model = ROOT / "sglang_dsv4" / "demo" / "dsv4-tiny-nvfp4"
    wanted = {path.relative_to(ROOT).as_posix() for path in model.iterdir()}
    assert "sglang_dsv4/demo/dsv4-tiny-nvfp4/model.safetensors" in wanted
    assert wanted | {"sglang_dsv4/py.typed"} <= names
    for name in wanted:
        assert wheel.getinfo(name).file_size == (ROOT / name).stat().st_size
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "[sglang.srt.plugins]\nsglang_dsv4 = sglang_dsv4.plugin:register" in entry_points
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: sglang==" in metadata


def test_listed_packages_are_the_folders_with_python_files():
    """A folder missing from the list would be left out of the wheel without a word."""
    folders = {in_package(path).parent for path in python_files()}
    on_disk = {".".join(folder.parts) for folder in folders}
    # A namespace root may hold only sub-packages; setuptools needs it all the same.
    on_disk |= set(ROOTS.values())
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == on_disk
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {v: k for k, v in ROOTS.items()}


def test_init_files_are_where_they_must_be_and_nowhere_else():
    """patches/ and kernels/ have none: SGLang imports another distribution called kernels."""
    with_init = {path.parent for path in python_files() if path.name == "__init__.py"}
    folders = {path.parent for path in python_files()} | {Path(name) for name in ROOTS}
    assert folders - with_init == {Path("patches"), Path("kernels")}


def test_sglang_is_pinned_exactly_and_transitive_pins_are_left_to_it():
    pins = [d for d in PYPROJECT["project"]["dependencies"] if d.startswith("sglang")]
    assert len(pins) == 1
    assert pins[0].startswith("sglang==")
    assert "*" not in pins[0]
    assert not any(d.startswith("torch") for d in PYPROJECT["project"]["dependencies"])


def test_entry_point_of_the_installed_distribution_loads():
    points = importlib.metadata.entry_points(group="sglang.srt.plugins", name="sglang_dsv4")
    (point,) = points
    from sglang_dsv4.plugin import register

    assert point.load() is register


FIND = """
from importlib.util import find_spec
for name in ("sglang_dsv4.plugin", "sglang_dsv4.patches.registry",
             "sglang_dsv4.kernels.reference.nvfp4"):
    print(find_spec(name).origin)
"""


@pytest.mark.parametrize("where", ["checkout", "elsewhere"])
def test_installed_package_is_found(where, tmp_path):
    cwd = ROOT if where == "checkout" else tmp_path
    origins = [Path(line) for line in run(FIND, cwd).splitlines()]
    assert all(origin.is_file() for origin in origins)


@pytest.mark.parametrize("where", ["checkout", "elsewhere"])
def test_unpacked_wheel_is_found(where, unpacked, tmp_path):
    """In the checkout its own package wins over the wheel, whole and unmixed."""
    cwd, home = (ROOT, ROOT) if where == "checkout" else (tmp_path, unpacked)
    origins = [Path(line) for line in run(FIND, cwd, unpacked).splitlines()]
    assert all(origin.is_relative_to(home) for origin in origins)
    assert all(origin.is_file() for origin in origins)


def test_the_other_distribution_called_kernels_is_still_imported_from_the_checkout():
    owner = importlib.metadata.distribution("kernels")
    wanted = Path(owner.locate_file("kernels/__init__.py")).resolve()
    found = run("from importlib.util import find_spec; print(find_spec('kernels').origin)", ROOT)
    assert Path(found).resolve() == wanted

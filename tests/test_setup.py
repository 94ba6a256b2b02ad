"""launch/setup.sh and test_gpu.sh before they install anything: what they refuse, in a sentence."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KIB_PER_GB = 1_000_000


def setup(tools: Path, venv: Path, purpose: str = "run") -> subprocess.CompletedProcess[str]:
    """Run it with ``tools`` first in PATH."""
    path = f"{tools}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "setup.sh"), purpose],
        env={**os.environ, "PATH": path, "VENV": str(venv), "PYTHON": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of stand-ins for programs; its python3 makes a venv whose pip only says so."""
    folder = tmp_path / "tools"
    folder.mkdir()
    write(
        folder / "python3",
        'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi\n'
        'if [ "$2" = pip ]; then echo installed; fi\n',
    )
    return folder


def write(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}", encoding="utf-8")
    path.chmod(0o755)


def disk(tools: Path, free_gb: float, held_gb: float = 0) -> None:
    """Let ``df`` and ``du`` report these sizes."""
    free, held = int(free_gb * KIB_PER_GB), int(held_gb * KIB_PER_GB)
    write(tools / "df", f'echo Filesystem; echo "disk 1 1 {free} 1% /"\n')
    write(tools / "du", f'printf "{held}\\tfolder\\n"\n')


def test_a_disk_without_room_is_refused_before_anything_is_installed(tools, tmp_path):
    disk(tools, 12)
    found = setup(tools, tmp_path / "venv")
    assert found.returncode == 2 and "installed" not in found.stdout
    assert found.stderr.strip() == (
        f"The disk of {tmp_path}/venv has 12 GB free, wanted 13: free some, or name a folder on "
        f"another disk with VENV=/path/to/folder."
    )


@pytest.mark.parametrize(("free_gb", "held_gb"), [(13, 0), (5, 10.8)])
def test_room_counts_what_an_earlier_attempt_left(tools, tmp_path, free_gb, held_gb):
    disk(tools, free_gb, held_gb)
    found = setup(tools, tmp_path / "venv")
    assert found.returncode == 0, found.stderr
    assert "installed" in found.stdout


def test_an_installed_environment_is_left_alone(tools, tmp_path):
    disk(tools, 13)
    assert setup(tools, tmp_path / "venv").returncode == 0
    disk(tools, 0)
    again = setup(tools, tmp_path / "venv")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_an_unknown_purpose_is_refused(tools, tmp_path):
    found = setup(tools, tmp_path / "venv", "all")
    assert found.returncode == 2
    assert "takes 'run' or 'test', found 'all'" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--soak", "0"], "--soak is '0', wanted a positive whole number."),
        (["--jobs"], "--jobs is '', wanted a positive whole number."),
        (
            ["--quick"],
            "launch/test_gpu.sh takes --soak, --jobs and suites (kernels repeats weights cache "
            "served shapes), found '--quick'.",
        ),
        ([], "No NVIDIA GPU was found, wanted one: run it on a machine with one."),
    ],
)
def test_the_gpu_tests_refuse_in_a_sentence(tools, arguments, said):
    write(tools / "nvidia-smi", "exit 1\n")
    found = subprocess.run(
        ["bash", str(ROOT / "launch" / "test_gpu.sh"), *arguments],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout, found.stderr.strip()) == (2, "", said)

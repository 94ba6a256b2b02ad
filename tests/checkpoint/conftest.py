"""The small model's tensors, read once, and a place for damaged copies that is removed at once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import tiny_tensors
from torch import Tensor


@pytest.fixture(scope="session")
def tiny() -> dict[str, Tensor]:
    return tiny_tensors()


@pytest.fixture
def copy_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model", ignore_errors=True)

"""What the README states about bytes, files, commands and variables is so."""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest

from sglang_dsv4 import envs
from sglang_dsv4.cache.kv_layout import NVFP4_GROUP, IndexerLayout, KVFormat, RecordLayout
from sglang_dsv4.cache.pool import WINDOW_PAGE
from sglang_dsv4.launch_server import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sglang_dsv4"
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAYOUT = RecordLayout(KVFormat.NVFP4, 64)


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    section = re.split(rf"^#+ {re.escape(heading)}$", README, flags=re.MULTILINE)[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE).group().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_record_table_is_the_layout():
    found = [(part, *map(int, span.split(".."))) for part, span, _ in rows("The KV record")]
    nope, data = LAYOUT.nope_bytes, LAYOUT.data_bytes
    wanted = [
        ("data", 0, nope - 1),
        ("data", nope, data - 1),
        ("scale", 0, LAYOUT.num_scales - 1),
        ("scale", LAYOUT.num_scales, LAYOUT.scale_bytes - 1),
    ]
    assert found == wanted
    contents = [content for *_, content in rows("The KV record")]
    assert contents[0].startswith(f"{LAYOUT.nope_dim} NoPE values, e2m1")
    assert contents[1] == f"{LAYOUT.rope_dim} RoPE values, bf16"
    assert contents[2] == f"{LAYOUT.num_scales} block scales, e4m3, one for {NVFP4_GROUP} values"


def test_the_sizes_in_the_text_are_the_layouts():
    text = " ".join(README.split())
    sizes = f"{LAYOUT.data_bytes} + {LAYOUT.scale_bytes} = {LAYOUT.record_bytes} bytes"
    assert sizes in text
    assert f"{LAYOUT.record_bytes} bytes a KV record" in text
    assert f"P is {WINDOW_PAGE} for the window pool" in text
    key = IndexerLayout(KVFormat.NVFP4, 64).record_bytes
    assert f"Indexer keys take {key} bytes" in text
    wide = RecordLayout(KVFormat.BFLOAT16, 64).record_bytes
    assert f"`bfloat16`, {wide} bytes a record" in text


def test_the_options_are_those_that_the_launcher_sets():
    listed = dict(row[:2] for row in rows("Options") if row[1].strip("`") != "on a CPU only")
    words = [*OPTIONS, "--"]
    wanted = {}
    for option, value in itertools.pairwise(words):
        if option.startswith("--"):
            wanted[f"`{option}`"] = "on" if value.startswith("--") else f"`{value}`"
    assert listed == wanted


def test_the_prefix_of_the_variables_is_theirs():
    assert f"`{envs.PREFIX}`" in README
    assert all(variable.name.startswith(envs.PREFIX) for variable in envs.ALL)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"-m (sglang_dsv4[\w.]*)", README))))
def test_each_module_that_is_run_exists(module):
    assert importlib.util.find_spec(module) is not None


def test_each_path_exists():
    """A path in backticks is relative to the checkout or, in the flow table, to the package."""
    paths = re.findall(r"`([\w./]+/[\w./]*|\w+\.py)`", README) + re.findall(
        r"bash (launch/\S+\.sh)", README
    )
    places = [(ROOT / path, PACKAGE / path) for path in paths]
    missing = [above for above, inside in places if not above.exists() and not inside.exists()]
    assert len(paths) > 20
    assert not missing


def test_it_stays_short():
    assert len(README.splitlines()) <= 200

"""Environment variables: names, types, defaults, and the sentence about a wrong value."""

from pathlib import Path

import pytest

from sglang_dsv4 import envs, failure
from sglang_dsv4.errors import ConfigError


def test_names_have_our_prefix_and_are_documented():
    assert len({variable.name for variable in envs.ALL}) == len(envs.ALL)
    for variable in envs.ALL:
        assert variable.name.startswith("SGLANG_DSV4_NVFP4_")
        assert len(variable.doc) > 20
    declared = {value for value in vars(envs).values() if isinstance(value, envs.EnvVar)}
    assert declared == set(envs.ALL)


@pytest.mark.parametrize(
    ("text", "value"),
    [(None, False), ("", False), ("0", False), ("no", False), ("1", True), (" True ", True)],
)
def test_reference_on_gpu(monkeypatch, text, value):
    monkeypatch.delenv(envs.REFERENCE_ON_GPU.name, raising=False)
    if text is not None:
        monkeypatch.setenv(envs.REFERENCE_ON_GPU.name, text)
    assert envs.reference_on_gpu() is value


def test_a_wrong_value_is_named(monkeypatch):
    monkeypatch.setenv(envs.REFERENCE_ON_GPU.name, "maybe")
    wanted = "REFERENCE_ON_GPU is 'maybe', wanted 0 or 1: correct or unset it"
    with pytest.raises(ConfigError, match=wanted):
        envs.reference_on_gpu()


def test_the_first_sentence_is_kept_for_the_launcher(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(envs.FAILURE_FILE.name, str(tmp_path / "sentence"))
    assert envs.failure_file() == tmp_path / "sentence"
    for sentence in ("The first.", "The second."):
        with pytest.raises(SystemExit) as stopped:
            failure.stop(sentence)
        assert stopped.value.code == 2
    assert (tmp_path / "sentence").read_text(encoding="utf-8") == "The first.\n"
    assert capsys.readouterr().err == "The first.\nThe second.\n"


def test_nobody_listens_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv(envs.FAILURE_FILE.name, raising=False)
    monkeypatch.chdir(tmp_path)
    failure.report("Lost.")
    assert envs.failure_file() is None
    assert list(Path(tmp_path).iterdir()) == []


def test_a_message_becomes_one_line():
    assert failure.one_sentence(ValueError("two\n lines")) == "two lines"
    assert failure.one_sentence(ValueError()) == "ValueError"

"""A load is complete only if nothing is left on either side."""

import pytest

from sglang_dsv4.checkpoint.account import Account
from sglang_dsv4.errors import CheckpointError


def account() -> Account:
    return Account(["q.weight", "kv.weight", "q.input_scale"], ["q_kv.weight", "table"])


def test_complete_load():
    load = account()
    load.loaded("q.weight", "q_kv.weight")
    load.loaded("kv.weight", "q_kv.weight")
    load.skip("q.input_scale", "weight-only kernel")
    load.derived("table")
    assert load.finish() == "2 tensors into 2 parameters; 1 skipped: weight-only kernel"
    assert load.skipped == {"q.input_scale": "weight-only kernel"}


def test_nothing_loaded():
    with pytest.raises(CheckpointError) as caught:
        account().finish()
    message = str(caught.value)
    assert (
        "3 tensors were neither loaded nor skipped (q.weight, kv.weight, q.input_scale)" in message
    )
    assert "2 parameters were not written (q_kv.weight, table)" in message


def test_one_tensor_left():
    load = account()
    load.loaded("q.weight", "q_kv.weight")
    load.skip("q.input_scale", "x")
    load.derived("table")
    with pytest.raises(
        CheckpointError, match=r"incomplete: 1 tensors .*\(kv\.weight\), a complete"
    ):
        load.finish()


def test_one_parameter_left():
    load = account()
    for tensor in ("q.weight", "kv.weight", "q.input_scale"):
        load.loaded(tensor, "q_kv.weight")
    with pytest.raises(
        CheckpointError, match=r"incomplete: 1 parameters were not written \(table\)"
    ):
        load.finish()


def test_long_lists_are_cut():
    load = Account([f"t{i}" for i in range(20)], [])
    with pytest.raises(CheckpointError, match=r"20 tensors .*\(t0, .*, t7 and 12 more\)"):
        load.finish()


@pytest.mark.parametrize("wrong", [("ghost", "table"), ("q.weight", "ghost")])
def test_names_that_do_not_exist(wrong: tuple[str, str]):
    with pytest.raises(CheckpointError, match="ghost"):
        account().loaded(*wrong)
    with pytest.raises(CheckpointError, match="ghost"):
        account().skip("ghost", "x")
    with pytest.raises(CheckpointError, match="ghost"):
        account().derived("ghost")

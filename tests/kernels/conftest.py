"""One thread, and memory that shows itself when it is read before it is written."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """`torch.empty` and `torch.empty_like` return NaN, or the largest byte, in kernel tests."""

    def poison(make):
        def wrapped(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype.is_floating_point:
                return tensor.fill_(float("nan"))
            return tensor.fill_(torch.iinfo(tensor.dtype).max) if tensor.dtype.itemsize else tensor

        return wrapped

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))

"""Every test draws its random numbers from a seed of its own name."""

import random
import zlib

import pytest
import torch


@pytest.fixture(autouse=True)
def seed(request):
    """Seeds `random` and torch from the node id, so a test gives the same numbers alone or not."""
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    torch.manual_seed(value)

"""What the tests of the network leave behind."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _forget_graphs():
    """torch gives up on a function that was compiled for many networks in one process."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()

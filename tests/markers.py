"""Conditions of tests in several places."""

import pytest
import torch

same_initial_weights = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="torch 2.8 draws other initial weights from a seed"
)

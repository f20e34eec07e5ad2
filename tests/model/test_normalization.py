"""RMSNorm against torch's and timm's."""

import pytest
import timm.layers
import torch
from torch import nn

from vit.model.normalization import RMSNorm

DIM = 32


@pytest.mark.parametrize("reference", [nn.RMSNorm(DIM, eps=1e-6), timm.layers.RmsNorm(DIM)])
def test_rmsnorm_equals_torch_and_timm(reference, tokens):
    norm = RMSNorm(DIM)
    nn.init.normal_(norm.weight)
    reference.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(tokens), reference(tokens))


def test_rmsnorm_keeps_the_type_and_computes_in_float32():
    norm = RMSNorm(2)
    large = torch.tensor([3e4, 4e4], dtype=torch.float16)  # its square has no float16
    assert norm(large).dtype == torch.float16
    torch.testing.assert_close(norm(large), torch.tensor([0.8485, 1.1312], dtype=torch.float16))

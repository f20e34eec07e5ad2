"""Attention in the few operators that engines of exported graphs know best."""

from torch import Tensor

from vit.model.attention import masked, mixed


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """As `vit.model.attention.attend`, for what torch.onnx writes: it makes a dozen operators of
    torch's own function, which hide from quantisation that keys are only turned."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return mixed(masked(scores, mask).softmax(dim=-1), value, dropout=dropout)

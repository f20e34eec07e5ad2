"""Where a network looks: attention that remembers its weights."""

from torch import Tensor
from torch.nn import functional as F

from vit.model.attention import attention_weights


class Recorder:
    """Attends by the formula and keeps the weights, one entry a call, in `maps`."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As `attend`; keeps (batch, heads, tokens, memory_tokens)."""
        self.maps.append(attention_weights(query, key, mask=mask))
        return F.dropout(self.maps[-1], dropout, training=dropout > 0) @ value

"""Joint embedding: an encoder with a projector, which maps features of views to embeddings.

    z = W3 GELU(LN(W2 GELU(LN(W1 features))))
    y_k = cosine of z and prototype k, with prototypes

LayerNorm instead of the paper's batch normalisation: an embedding does not depend on the other
images of a batch, so processes and micro-batches agree.

Source: Balestriero and LeCun, "LeJEPA", section 6, arXiv:2511.08544;
Caron et al., DINO, section 3.1 (prototypes), arXiv:2104.14294.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import ModelConfig
from vit.model.grouped_linear import autocast_device
from vit.model.moe import add_up_routing, collect_routing
from vit.model.vision_transformer import VisionTransformer


class ProjectionHead(nn.Module):
    """Two hidden layers and a linear one, and with `prototypes` cosines with that many vectors.

    Args:
        dim: Width of the features.
        hidden_dim: Width of the hidden layers.
        out_dim: Width of the embeddings.
        prototypes: Number of vectors that an embedding is compared with; 0 returns the embedding.
    """

    def __init__(self, dim: int, *, hidden_dim: int, out_dim: int, prototypes: int = 0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.norm1 = nn.LayerNorm(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.norm2 = nn.LayerNorm(hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, out_dim)
        self.act = nn.GELU()
        self.prototypes: nn.Linear | None = None
        if prototypes:
            self.prototypes = nn.Linear(out_dim, prototypes, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, dim) -> (batch, out_dim), or (batch, prototypes)"""
        hidden = self.act(self.norm1(self.fc1(features)))
        embeddings: Tensor = self.fc3(self.act(self.norm2(self.fc2(hidden))))
        if self.prototypes is None:
            return embeddings
        # in bfloat16, cosines near 1 are multiples of 0.004
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        with torch.autocast(autocast_device(features), enabled=False):
            units = F.normalize(embeddings.to(dtype), dim=-1)
            return F.linear(units, F.normalize(self.prototypes.weight.to(dtype), dim=1))


class JointEmbedding(VisionTransformer):
    """An encoder without a head, and a ProjectionHead that only pretraining uses.

    The encoder's parameters have the names that they have in a VisionTransformer; the projector's
    start with `projector.`.

    Args:
        projector: The projector.
    """

    def __init__(self, config: ModelConfig, projector: ProjectionHead) -> None:
        super().__init__(config)
        self.projector = projector

    def forward(  # type: ignore[override]
        self, images: Tensor | Sequence[Tensor]
    ) -> Tensor | list[Tensor]:
        """Features of images, (batch, pooled_dim), or embeddings of several batches of views.

        Args:
            images: (batch, channels, height, width), or a sequence of such batches.

        Returns:
            Of a sequence, the embeddings of each batch, (batch, out_dim).
        """
        if isinstance(images, Tensor):
            return super().forward(images)
        embeddings, passes = [], []
        for each in images:
            embeddings.append(self.projector(self.features(each)))
            if len(images) > 1:
                passes.append(collect_routing(self))
        add_up_routing(self, passes)
        return embeddings

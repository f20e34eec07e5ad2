"""VisionTransformer: images in, one logit per class out.

    z0 = [class token; registers; patches E] + positions
    z  = block_depth( ... block_1(z0))
    logits = norm(pool(z)) W + b        (the norm comes before class-token pooling)

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", section 3.1, arXiv:2010.11929;
registers: Darcet et al., arXiv:2309.16588. Parameter names and shapes are timm's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vit.model.blocks import Block
from vit.model.patches import PatchEmbedding
from vit.model.positions import LearnedPositions, NoPositions


class VisionTransformer(nn.Module):
    """Classifies images of any size that is a multiple of the patch.

    Args:
        patch_embed: Makes the patch tokens.
        positions: Adds the places of tokens.
        blocks: The encoder, in order.
        pool: Reduces tokens to one vector.
        norm: Normalises all tokens after the last block.
        fc_norm: Normalises the pooled vector.
        dim: Width of a token.
        num_classes: Width of the output.
        class_token: Whether a class token comes first.
        registers: Registers that follow it.
        dropout: Probability of dropping an embedded activation during training.
    """

    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    pos_embed: Tensor | None

    def __init__(
        self,
        *,
        patch_embed: PatchEmbedding,
        positions: LearnedPositions | NoPositions,
        blocks: Sequence[Block],
        pool: nn.Module,
        norm: nn.Module,
        fc_norm: nn.Module,
        dim: int,
        num_classes: int,
        class_token: bool = True,
        registers: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_features = dim
        self.num_prefix_tokens = int(class_token) + registers
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, registers, dim)) if registers else None
        table = positions.table()
        if isinstance(table, nn.Parameter):
            self.pos_embed = table
        else:
            self.register_buffer("pos_embed", table)
        self.patch_embed = patch_embed
        self.positions = positions
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm
        self.pool = pool
        self.fc_norm = fc_norm
        self.head = nn.Linear(dim, num_classes)

    @property
    def num_classes(self) -> int:
        """Width of the output."""
        return self.head.out_features

    def embed(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> tokens before the first block, (batch, tokens, dim)

        Raises:
            ValueError: Height or width is not a multiple of the patch size.
        """
        patches = self.patch_embed(images)
        prefix = [
            token.expand(patches.shape[0], -1, -1)
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        tokens = torch.cat([*prefix, patches], dim=1)
        grid = self.patch_embed.grid(images)
        placed: Tensor = self.pos_drop(self.positions(tokens, self.pos_embed, grid))
        return placed

    def forward_features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> tokens after the last norm, (batch, tokens, dim)"""
        tokens: Tensor = self.norm(self.blocks(self.embed(images)))
        return tokens

    def forward_head(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, dim) -> logits (batch, classes)"""
        logits: Tensor = self.head(self.fc_norm(self.pool(tokens)))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)"""
        return self.forward_head(self.forward_features(images))

    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """Attention weights of every block, each (batch, heads, tokens, tokens).

        Row i says where token i looks; the prefix tokens come first, then the patches by rows.
        """
        tokens, maps = self.embed(images), []
        for block in self.blocks:
            assert isinstance(block, Block)
            maps.append(block.attention_map(tokens))
            tokens = block(tokens)
        return maps

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the head by one of zeros for `num_classes` classes."""
        like = self.head.weight
        self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

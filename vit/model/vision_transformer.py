"""VisionTransformer: images in, one logit per class out.

    z0 = [class token; registers; patches E] + positions
    z  = block_depth( ... block_1(z0))
    logits = norm(pool(z)) W + b        (the norm comes before class-token pooling)

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", section 3.1, arXiv:2010.11929;
registers: Darcet et al., arXiv:2309.16588. Parameter names and shapes are timm's.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from vit.model.attention import Attend, AttentionContext, attend
from vit.model.attention_maps import Recorder
from vit.model.blocks import Block
from vit.model.patch_embed import ImageEmbedding
from vit.model.position_embedding import LearnedPositions, NoPositions
from vit.model.rotary_embedding import NoRotation, RotaryPositions
from vit.model.sequence_packing import check_packable, pack, same_sizes, unpack


class VisionTransformer(nn.Module):
    """Classifies images of any size that is a multiple of the patch.

    Args:
        patch_embed: Makes the patch tokens.
        positions: Adds the places of tokens.
        rotary: Makes the rotation by which queries and keys know them.
        patch_drop: Leaves out patches during training.
        norm_pre: Normalises all tokens before the first block.
        blocks: The encoder, in order.
        repeats: Times that all blocks are applied, one round after the other.
        norm: Normalises all tokens after the last block.
        pool: Reduces tokens to one vector.
        fc_norm: Normalises the pooled vector.
        dim: Width of a token.
        pooled_dim: Width of the pooled vector.
        num_classes: Width of the output; 0 gives the pooled vector itself.
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
        patch_embed: ImageEmbedding,
        positions: LearnedPositions | NoPositions,
        rotary: RotaryPositions | NoRotation,
        patch_drop: nn.Module,
        norm_pre: nn.Module,
        blocks: Sequence[Block],
        norm: nn.Module,
        pool: nn.Module,
        fc_norm: nn.Module,
        dim: int,
        pooled_dim: int,
        num_classes: int,
        class_token: bool = True,
        registers: int = 0,
        repeats: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_features = pooled_dim
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
        self.rotary = rotary
        self.pos_drop = nn.Dropout(dropout)
        self.patch_drop = patch_drop
        self.norm_pre = norm_pre
        self.blocks = nn.ModuleList(blocks)
        self.repeats = repeats
        self.norm = norm
        self.attn_pool = pool  # by timm's name, which is that of the one pooling with weights
        self.fc_norm = fc_norm
        self.head = nn.Linear(pooled_dim, num_classes) if num_classes else nn.Identity()

    @property
    def num_classes(self) -> int:
        """Width of the output; 0 without a head."""
        return self.head.out_features if isinstance(self.head, nn.Linear) else 0

    def embed(self, images: Tensor) -> tuple[Tensor, AttentionContext]:
        """Tokens before the first block, (batch, tokens, dim), and their places.

        Args:
            images: (batch, channels, height, width).

        Raises:
            ValueError: Height or width is not a multiple of the patch size.
        """
        patches, grid = self.patch_embed(images)
        prefix = [
            token.expand(patches.shape[0], -1, -1)
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        tokens = torch.cat([*prefix, patches], dim=1)
        placed = self.pos_drop(self.positions(tokens, self.pos_embed, grid))
        kept, places = self.patch_drop(placed, AttentionContext(grid, self.rotary(grid, tokens)))
        return self.norm_pre(kept), places

    def encode(self, images: Tensor, *, attend: Attend = attend) -> tuple[Tensor, AttentionContext]:
        """Tokens after the last norm, (batch, tokens, dim), and their places.

        Args:
            images: (batch, channels, height, width).
            attend: How attention mixes the values.
        """
        tokens, places = self.embed(images)
        return self.transform(tokens, places._replace(attend=attend))

    def transform(
        self, tokens: Tensor, places: AttentionContext
    ) -> tuple[Tensor, AttentionContext]:
        """Tokens as `embed` makes them -> after the last norm, (batch, tokens, dim), and places."""
        for block in [*self.blocks] * self.repeats:
            tokens, places = block(tokens, places)
        return self.norm(tokens), places

    def forward_features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> tokens after the last norm, (batch, tokens, dim)"""
        return self.encode(images)[0]

    def pool(self, tokens: Tensor, places: AttentionContext) -> Tensor:
        """Tokens as `encode` makes them -> what the head reads, (batch, pooled_dim)"""
        pooled: Tensor = self.fc_norm(self.attn_pool(tokens, places))
        return pooled

    def features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> what the head reads, (batch, pooled_dim)"""
        return self.pool(*self.encode(images))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)"""
        logits: Tensor = self.head(self.features(images))
        return logits

    def features_packed(self, images: Sequence[Tensor]) -> Tensor:
        """What the head reads of images of any sizes and aspects, in one pass over all tokens.

        Rows equal those of each image by itself; see vit/model/sequence_packing.py.

        Args:
            images: Each (channels, height, width), whole patches.

        Returns:
            (images, pooled_dim), in their order.

        Raises:
            ConfigError: A part of the network would mix images that lie in one row.
            ValueError: An image cannot be cut into whole patches.
        """
        check_packable(self)
        groups = same_sizes(images)
        embedded = [self.embed(torch.stack([images[i] for i in group])) for group in groups]
        row, _ = self.transform(*pack(embedded))
        batches = zip(unpack(row, embedded), embedded, strict=True)
        pooled = torch.cat([self.pool(own, places) for own, (_, places) in batches])
        order = [*chain(*groups)]
        return pooled[sorted(range(len(order)), key=order.__getitem__)]

    def forward_packed(self, images: Sequence[Tensor]) -> Tensor:
        """As `features_packed`, up to the logits, (images, classes)."""
        logits: Tensor = self.head(self.features_packed(images))
        return logits

    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """Attention weights of every block, each (batch, heads, tokens, tokens).

        Row i says where token i looks; the prefix tokens come first, then the patches by rows.
        """
        recorder = Recorder()
        self.encode(images, attend=recorder)
        return [*recorder.maps]

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the head by one of zeros for `num_classes` classes, or with 0 by none."""
        if num_classes == 0:
            self.head = nn.Identity()
            return
        like = self.patch_embed.proj.weight
        self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

"""VisionTransformer: images to class logits.

    z0 = [class token; registers; patches E] + positions
    z  = block_depth( ... block_1(z0))
    logits = norm(pool(z)) W + b        (the norm comes before class-token pooling)

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", section 3.1, arXiv:2010.11929;
registers: Darcet et al., arXiv:2309.16588. Parameter names and shapes are timm's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.errors import ConfigError
from vit.model.attention import (
    AttentionContext,
    AttentionFunction,
    AttentionRecorder,
    dot_product_attention,
)
from vit.model.layers import POOLINGS, POSITIONS, STEMS, build_block, build_rotary
from vit.model.normalization import build_norm
from vit.model.patch_dropout import PatchDropout
from vit.model.pooling import NoPooling
from vit.model.position_embedding import Grid
from vit.model.sequence_packing import (
    check_packable,
    cut_images,
    group_by_size,
    pack,
    unpack,
)


class VisionTransformer(nn.Module):
    """Classifies images of any size that is a multiple of the patch size.

    Its weights are uninitialised; `create_model` initialises them.
    """

    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    pos_embed: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, prefix, last_norm = config.dim, config.num_prefix_tokens, config.last_norm
        self.num_prefix_tokens = prefix
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        registers = config.registers
        self.reg_token = nn.Parameter(torch.zeros(1, registers, dim)) if registers else None
        positions = POSITIONS[config.position](config)
        table = None if positions is None else positions.table()
        if isinstance(table, nn.Parameter):
            self.pos_embed = table
        else:
            self.register_buffer("pos_embed", table)
        self.patch_embed = STEMS[config.stem](config)
        self.positions = positions
        self.rotary = build_rotary(config)
        self.pos_drop = nn.Dropout(config.dropout)
        self.patch_drop = PatchDropout(config.patch_dropout, prefix=prefix)
        self.norm_pre = build_norm(config) if config.norm_pre else nn.Identity()
        self.blocks = nn.ModuleList(build_block(config, index) for index in range(config.depth))
        self.repeats = config.repeat_blocks
        self.norm = build_norm(config) if last_norm == "tokens" else nn.Identity()
        self.attn_pool = POOLINGS[config.pooling](config)  # timm's name
        width = self.num_features = config.pooled_dim
        self.fc_norm = build_norm(config, width) if last_norm == "pooled" else nn.Identity()
        self.head = nn.Linear(width, config.num_classes) if config.num_classes else nn.Identity()

    @property
    def num_classes(self) -> int:
        """Width of the output; 0 without a head."""
        return self.head.out_features if isinstance(self.head, nn.Linear) else 0

    def embed(self, images: Tensor) -> tuple[Tensor, AttentionContext]:
        """Tokens before the first block, (batch, tokens, dim), and their context.

        Args:
            images: (batch, channels, height, width).

        Raises:
            ValueError: Height or width is not a multiple of the patch size.
        """
        return self.embed_patches(*self.patch_embed(images))

    def embed_patches(self, patches: Tensor, grid: Grid) -> tuple[Tensor, AttentionContext]:
        """`embed` of patches that are embedded already, (batch, rows * cols, dim)."""
        prefix = [
            token.expand(patches.shape[0], -1, -1)
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        tokens = torch.cat([*prefix, patches], dim=1)
        rope = None if self.rotary is None else self.rotary(grid, tokens)
        if self.positions is not None:
            tokens = self.positions(tokens, self.pos_embed, grid)
        tokens, context = self.patch_drop(self.pos_drop(tokens), AttentionContext(grid, rope))
        return self.norm_pre(tokens), context

    def encode(
        self, images: Tensor, *, attention_fn: AttentionFunction = dot_product_attention
    ) -> tuple[Tensor, AttentionContext]:
        """Tokens after the last norm, (batch, tokens, dim), and their context.

        Args:
            images: (batch, channels, height, width).
            attention_fn: Implementation of attention.
        """
        tokens, context = self.embed(images)
        return self.forward_blocks(tokens, context.replace(attention_fn=attention_fn))

    def forward_blocks(
        self, tokens: Tensor, context: AttentionContext
    ) -> tuple[Tensor, AttentionContext]:
        """Output of `embed` -> tokens after the last norm, (batch, tokens, dim), and context."""
        for block in [*self.blocks] * self.repeats:
            tokens, context = block(tokens, context)
        return self.norm(tokens), context

    def forward_features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> tokens after the last norm, (batch, tokens, dim)"""
        return self.encode(images)[0]

    def pool(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """Output of `encode` -> input of the head, (batch, pooled_dim)"""
        pooled: Tensor = self.fc_norm(self.attn_pool(tokens, context))
        return pooled

    def forward_head(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """Output of `encode` -> logits, (batch, classes)"""
        logits: Tensor = self.head(self.pool(tokens, context))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> input of the head, (batch, pooled_dim)"""
        return self.pool(*self.encode(images))

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)

        Args:
            sizes: (height, width) of each image, if `cut_images` cuts them out of `images`.
        """
        if sizes:
            return self.forward_packed(cut_images(images, sizes))
        logits: Tensor = self.head(self.features(images))
        return logits

    def encode_packed(
        self, images: Sequence[Tensor]
    ) -> list[tuple[list[int], Tensor, AttentionContext]]:
        """`encode` of images of any sizes and aspect ratios, in one forward pass.

        The result for an image equals that of the image by itself; see sequence_packing.py.

        Args:
            images: Each (channels, height, width), whole patches.

        Returns:
            Of each size the indices of its images, their tokens, (batch, tokens, dim), and context.

        Raises:
            ConfigError: A part of the encoder mixes images of one packed sequence.
        """
        check_packable(self)
        groups = group_by_size(images)
        batches = [torch.stack([images[i] for i in group]) for group in groups]
        embedded = [self.embed_patches(*each) for each in self.patch_embed.embed_sizes(batches)]
        row, _ = self.forward_blocks(*pack(embedded))
        contexts = (context for _, context in embedded)
        return [*zip(groups, unpack(row, embedded), contexts, strict=True)]

    def features_packed(self, images: Sequence[Tensor]) -> Tensor:
        """`features` of the images of `encode_packed`, (images, pooled_dim), in order."""
        if isinstance(self.attn_pool, NoPooling):
            raise ConfigError(
                "pooling=none: there is no one vector an image; use encode_packed, or of a "
                "captioner encode_images_packed"
            )
        batches = self.encode_packed(images)
        pooled = torch.cat([self.pool(tokens, context) for _, tokens, context in batches])
        order = torch.tensor([index for indices, _, _ in batches for index in indices])
        return pooled[order.argsort().to(pooled.device)]

    def forward_packed(self, images: Sequence[Tensor]) -> Tensor:
        """Logits of images of any sizes and aspect ratios, (images, classes)."""
        logits: Tensor = self.head(self.features_packed(images))
        return logits

    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """Attention weights of every block, each (batch, heads, tokens, tokens).

        Row i has the weights of query token i; prefix tokens come first, then patches row by row.
        """
        recorder = AttentionRecorder()
        self.encode(images, attention_fn=recorder)
        return [*recorder.maps]

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the head by a zero-initialised one for `num_classes` classes; 0 removes it."""
        if num_classes == 0:
            self.head = nn.Identity()
            return
        like = self.patch_embed.proj.weight
        self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

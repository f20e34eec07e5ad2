"""Captions: ours with a cache and without, beside transformers with the same decoder weights.

A ViT and a decoder with cross-attention, beside transformers' VisionEncoderDecoderModel of ViT and
GPT-2 with the same sizes. Always the likeliest word, a fixed number of them, and no end; ours has
their log probability too. `decoder alone` starts from the tokens of the image.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace as Sizes
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from benchmarks.timing import Comparison, Run
from vit.config import DecoderConfig, ModelConfig
from vit.generation.generate import generate
from vit.generation.generation_config import Search
from vit.model.build import build_captioner
from vit.model.captioner import CachedDecoder, Captioner, use_column_major_weights

BEGIN, NEVER, EPS = 1, -1, 1e-5
SIZES = {
    "224 px": Sizes(
        dim=192, heads=3, depth=12, blocks=4, image_size=224, patch_size=16, vocab_size=8000,
        tokens=30,
    ),
    "configs/shapes_caption.yaml": Sizes(
        dim=96, heads=4, depth=3, blocks=3, image_size=64, patch_size=8, vocab_size=329, tokens=12
    ),
}  # fmt: skip
Writer = Callable[[Tensor], Tensor]


def ours(args: Sizes) -> Captioner:
    """Our encoder and decoder, untrained."""
    encoder = ModelConfig(
        dim=args.dim, depth=args.depth, num_heads=args.heads, num_classes=0, pooling="none",
        image_size=args.image_size, patch_size=args.patch_size, norm_eps=EPS,
    )  # fmt: skip
    decoder = DecoderConfig(
        decoder_depth=args.blocks,
        decoder_activation="gelu_tanh",
        vocab_size=args.vocab_size,
        caption_tokens=args.tokens + 1,
    )
    model = build_captioner(encoder, decoder).eval()
    # so that words differ; at 1 the logits are so far apart that exp takes 20 times as long
    torch.nn.init.normal_(model.decoder.token_embed.weight, std=0.1)
    return model


def theirs(args: Sizes) -> VisionEncoderDecoderModel:
    """The same sizes in transformers."""
    encoder = ViTModel(
        ViTConfig(
            hidden_size=args.dim, num_hidden_layers=args.depth, num_attention_heads=args.heads,
            intermediate_size=4 * args.dim, image_size=args.image_size, patch_size=args.patch_size,
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    decoder = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=args.vocab_size, n_positions=args.tokens + 1, n_embd=args.dim,
            n_layer=args.blocks, n_head=args.heads, add_cross_attention=True,
            bos_token_id=BEGIN, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    return VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()


def copy_decoder(model: Captioner, other: VisionEncoderDecoderModel) -> None:
    """Our decoder's weights into theirs."""
    mine: Any = model.decoder
    body: Any = other.decoder.transformer
    body.wte.weight.data.copy_(mine.token_embed.weight)
    body.wpe.weight.data.copy_(mine.positions.pos_embed)
    body.ln_f.load_state_dict(mine.norm.state_dict())
    for block, layer in zip(mine.blocks, body.h, strict=True):
        looking = layer.crossattention
        layer.ln_1.load_state_dict(block.norm1.state_dict())
        layer.ln_2.load_state_dict(block.norm2.state_dict())
        layer.ln_cross_attn.load_state_dict(block.norm_cross.state_dict())
        pairs = (
            (block.attn.qkv, layer.attn.c_attn),
            (block.attn.proj, layer.attn.c_proj),
            (block.cross_attn.q, looking.q_attn),
            (block.cross_attn.kv, looking.c_attn),
            (block.cross_attn.proj, looking.c_proj),
            (block.mlp.fc1, layer.mlp.c_fc),
            (block.mlp.fc2, layer.mlp.c_proj),
        )
        for linear, convolution in pairs:
            convolution.weight.data.copy_(linear.weight.T)
            convolution.bias.data.copy_(linear.bias)


def cached(model: Captioner, memory: Tensor, tokens: int) -> Tensor:
    """Each word is read once, (batch, 1 + tokens)."""
    written = generate(
        CachedDecoder(model.decoder, model.decoder.init_cache(memory)),
        rows=len(memory),
        begin=BEGIN,
        end=NEVER,
        search=Search(min_tokens=0, max_tokens=tokens),
    )
    return torch.tensor([[BEGIN, *best.ids] for best, *_ in written])


def uncached(model: Captioner, memory: Tensor, tokens: int) -> Tensor:
    """All words so far are read again for each new one, (batch, 1 + tokens)."""
    words = torch.full((len(memory), 1), BEGIN)
    for _ in range(tokens):
        following = CachedDecoder(model.decoder, model.decoder.init_cache(memory))(words)
        words = torch.cat([words, following.argmax(-1, keepdim=True)], dim=1)
    return words


def generated(model: VisionEncoderDecoderModel, tokens: int, **inputs: object) -> Tensor:
    """What transformers' generate writes, (batch, 1 + tokens)."""
    words: Tensor = model.generate(
        **inputs, do_sample=False, num_beams=1, use_cache=True, decoder_start_token_id=BEGIN,
        max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return words


def writers(
    model: Captioner, other: VisionEncoderDecoderModel, tokens: int
) -> dict[str, dict[str, Writer]]:
    """The three ways, from an image and from its tokens."""

    def beside(memory: Tensor) -> Tensor:
        return generated(other, tokens, encoder_outputs=BaseModelOutput(last_hidden_state=memory))

    return {
        "image to words": {
            "transformers": lambda images: generated(other, tokens, pixel_values=images),
            "ours, cache": lambda images: cached(model, model.encode_images(images)[1], tokens),
            "ours, no cache": lambda images: uncached(
                model, model.encode_images(images)[1], tokens
            ),
        },
        "decoder alone": {
            "transformers": beside,
            "ours, cache": lambda memory: cached(model, memory, tokens),
            "ours, no cache": lambda memory: uncached(model, memory, tokens),
        },
    }


def captioning(options: argparse.Namespace) -> Iterator[Comparison]:
    """Greedy captions of a batch."""
    logging.set_verbosity_error()
    for name, sizes in SIZES.items():
        model, other = ours(sizes), theirs(sizes)
        copy_decoder(model, other)
        use_column_major_weights(model.decoder)
        for batch in options.batch_size or (1, 16):
            with torch.inference_mode():
                images = torch.randn(batch, 3, sizes.image_size, sizes.image_size)
                starts = {"image to words": images, "decoder alone": model.encode_images(images)[1]}
            for start, ways in writers(model, other, sizes.tokens).items():
                if start == "decoder alone":
                    with torch.inference_mode():
                        written = [write(starts[start]) for write in ways.values()]
                    assert all(torch.equal(one, written[0]) for one in written), "other words"

                def ready(write: Writer, given: Tensor) -> Run:
                    return torch.inference_mode()(lambda: write(given))

                yield Comparison(
                    title=f"Captions, {name}, batch {batch}, {start}",
                    ways={way: partial(ready, write, starts[start]) for way, write in ways.items()},
                    count=batch * sizes.tokens,
                    unit="tokens",
                )

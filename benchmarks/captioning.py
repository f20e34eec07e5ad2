r"""How fast captions are written: ours with a cache, ours without, and the same in transformers.

    python benchmarks/captioning.py [--dim 192] [--blocks 4] [--batch-sizes 1 16] [--rounds 9]
    python benchmarks/captioning.py --dim 96 --heads 4 --depth 3 --blocks 3 --image-size 64 \
        --patch-size 8 --vocab-size 329 --tokens 12        configs/shapes_caption.yaml

A ViT of 12 blocks (224 px, patches of 16), or as told, and a decoder with cross-attention, beside
transformers' VisionEncoderDecoderModel of ViT and GPT-2 with the same sizes; the decoder's weights
are the same,
so all write the same words. Always the likeliest word, `--tokens` of them, and no end; ours tells
their log probability too. On one thread, by the processor's time; the ways take turns within a
round, so that a busy machine disturbs all alike: a ratio is the median over rounds. `decoder alone`
starts from the tokens of the image.
"""

import argparse
import statistics
import time
from collections.abc import Callable

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

from vit.config import DecoderConfig, ModelConfig
from vit.generation.generate import generate
from vit.generation.generation_config import Search
from vit.model.build import build_captioner
from vit.model.captioner import CachedDecoder, Captioner, use_column_major_weights

BEGIN, NEVER, EPS = 1, -1, 1e-5
Writer = Callable[[Tensor], Tensor]


def ours(args: argparse.Namespace) -> Captioner:
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


def theirs(args: argparse.Namespace) -> VisionEncoderDecoderModel:
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
    mine, body = model.decoder, other.decoder.transformer
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


def seconds(write: Writer, inputs: Tensor) -> float:
    began = time.process_time()
    write(inputs)
    return time.process_time() - began


@torch.inference_mode()
def compare(ways: dict[str, Writer], inputs: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one that does not count."""
    for write in ways.values():
        write(inputs)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        names = [*ways]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(seconds(ways[name], inputs))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--depth", type=int, default=12, help="blocks of the encoder")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the decoder")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    model, other = ours(args), theirs(args)
    copy_decoder(model, other)
    use_column_major_weights(model.decoder)
    print(f"one thread, torch {torch.__version__}, dim {args.dim}, {args.blocks} decoder blocks\n")
    print("| from | batch | way | tokens/s | beside transformers |")
    print("|---|---|---|---|---|")
    for size in args.batch_sizes:
        with torch.inference_mode():
            images = torch.randn(size, 3, args.image_size, args.image_size)
            starts = {"image to words": images, "decoder alone": model.encode_images(images)[1]}
        for start, ways in writers(model, other, args.tokens).items():
            if start == "decoder alone":
                with torch.inference_mode():
                    said = [write(starts[start]) for write in ways.values()]
                assert all(torch.equal(words, said[0]) for words in said), "they write differently"
            taken = compare(ways, starts[start], args.rounds)
            for name, times in taken.items():
                pairs = zip(taken["transformers"], times, strict=True)
                ratio = statistics.median(theirs / mine for theirs, mine in pairs)
                rate = size * args.tokens / statistics.median(times)
                print(f"| {start} | {size} | {name} | {rate:,.0f} | {ratio:.2f}x |", flush=True)


if __name__ == "__main__":
    main()

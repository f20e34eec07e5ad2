"""Captioner as two stateless ONNX graphs: the image encoder and one decoding step.

    memory_key, memory_value = encoder(images)
    logits, present          = decoder(ids, past, memory_key, memory_value)

The `present` of a step is the `past` of the next one (the KV cache). The first step has an empty
past and the begin-of-sequence token as `ids`.
"""

import json
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError
from vit.export.classifier_graph import random_inputs
from vit.export.onnx_tracing import Part
from vit.model.captioner import CachedDecoder, Captioner
from vit.model.decoder import TextDecoder
from vit.model.kv_cache import KVCache, LayerCache
from vit.version import __version__
from vit.weights.safetensors_io import digest
from vit.weights.saved_model import LoadedRun

MIN_TOKENS = 5  # torch traces lengths of 2 or more, and takes one that must be 2 for fixed
PAST_AXES = {1: "batch", 3: "past"}
PRESENT_AXES = {1: "batch", 3: "past_and_new"}
MEMORY_AXES = {1: "batch"}


class ImageEncoder(nn.Module):
    """Resized images to the cross-attention keys and values of each decoder block."""

    def __init__(self, model: Captioner, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model, self.preprocessing = model, preprocessing

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Bytes (batch, height, width, 3) -> keys and values, and probabilities if any

        Keys and values are (layers, batch, kv_heads, tokens, head_dim), probabilities (batch,
        classes).
        """
        floats = self.preprocessing.normalise(images.permute(0, 3, 1, 2))
        tokens, context = self.model.encode(floats)
        memory = stack_layers(
            [layer.memory_kv for layer in self.model.decoder.init_cache(tokens).layers]
        )
        if not self.model.num_classes:
            return memory
        return (*memory, self.model.forward_head(tokens, context).softmax(dim=1))


class DecodingStep(nn.Module):
    """One step of a decoder, with the KV cache as input and output."""

    def __init__(self, decoder: TextDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        ids: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        memory_key: Tensor,
        memory_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the token after the last id, and keys and values of all tokens.

        Args:
            ids: (batch, new), int64.
            past_key, past_value: Earlier tokens, (layers, batch, kv_heads, past, head_dim).
            memory_key, memory_value: The image, (layers, batch, kv_heads, tokens, head_dim).

        Returns:
            (batch, vocab), and two of (layers, batch, kv_heads, past + new, head_dim).
        """
        image = zip(memory_key, memory_value, strict=True)
        words = zip(past_key, past_value, strict=True)
        layers = [LayerCache(*pair) for pair in zip(image, words, strict=True)]
        logits = CachedDecoder(self.decoder, KVCache(layers, past_key.shape[3]))(ids)
        return (logits, *stack_layers([layer.token_kv for layer in layers]))


def stack_layers(pairs: list[tuple[Tensor, Tensor] | None]) -> tuple[Tensor, Tensor]:
    """Stack the keys and the values of all layers along a new first axis."""
    keys, values = zip(*(pair for pair in pairs if pair is not None), strict=True)
    return torch.stack(keys), torch.stack(values)


def parts_of(run: LoadedRun) -> tuple[Part, Part]:
    """Encoder and decoder of a captioner."""
    model = run.model
    assert isinstance(model, Captioner), "a run with a tokenizer has a captioner"
    if model.decoder.max_length < MIN_TOKENS:
        raise ConfigError(
            f"caption_tokens={model.decoder.max_length}: the exporter needs at least "
            f"{MIN_TOKENS}; train with longer captions"
        )
    memory = {"memory_key": MEMORY_AXES, "memory_value": MEMORY_AXES}
    past = {"past_key": PAST_AXES, "past_value": PAST_AXES}
    present = {"present_key": PRESENT_AXES, "present_value": PRESENT_AXES}
    encoder = Part(
        name="encoder",
        module=ImageEncoder(model, run.preprocessing).eval(),
        inputs={"images": {0: "batch"}},
        outputs=memory | ({"probabilities": {0: "batch"}} if model.num_classes else {}),
        examples=[(torch.from_numpy(images),) for images in random_inputs(run.preprocessing)],
    )
    decoder = Part(
        name="decoder",
        module=DecodingStep(model.decoder).eval(),
        inputs={"ids": {0: "batch", 1: "new"}, **past, **memory},
        outputs={"logits": {0: "batch"}, **present},
        examples=[*_example_steps(model.decoder, encoder)],
    )
    return encoder, decoder


def metadata_of(run: LoadedRun, source: str) -> dict[str, dict[str, str]]:
    """Metadata of both graphs, by name.

    Both have `pair`, a digest of weights and tokenizer: graphs of two exports are not mixed.
    """
    assert isinstance(run.model, Captioner), "a run with a tokenizer has a captioner"
    assert run.tokenizer is not None
    tokenizer = {"tokenizer": run.tokenizer.to_json()}
    both = {
        "preprocessing": json.dumps(run.preprocessing.to_dict()),
        "classes": json.dumps(list(run.classes), ensure_ascii=False),
        "begin": str(run.tokenizer.begin),
        "end": str(run.tokenizer.end),
        "pad": str(run.tokenizer.pad),
        "max_tokens": str(run.model.decoder.max_new_tokens),
        **({} if run.license is None else {"license": run.license}),
        "vit_version": __version__,
        "source_run": source,
    }
    both["pair"] = digest(run.model.state_dict(), {**both, **tokenizer})
    return {
        "encoder": {**both, "graph": "encoder"},
        "decoder": {**both, **tokenizer, "graph": "decoder"},
    }


@torch.no_grad()
def _example_steps(decoder: TextDecoder, encoder: Part) -> Iterator[tuple[Tensor, ...]]:
    """Inputs of steps with pasts of several lengths, from none to the longest."""
    most, vocab = decoder.max_length, decoder.token_embed.num_embeddings
    lengths = ((2, min(5, most - 2)), (1, 0), (1, most - 1), (most, 0), (1, 1), (2, most - 2))
    for number, (new, past) in enumerate(lengths):
        random = torch.Generator().manual_seed(number)
        (images,) = encoder.examples[number % len(encoder.examples)]
        key, value, *_ = encoder.module(images)
        ids = torch.randint(vocab, (len(images), past + new), generator=random)
        nothing = key[..., :0, :]
        step = (nothing, nothing)
        if past:
            _, *step = DecodingStep(decoder)(ids[:, :past], nothing, nothing, key, value)
        yield (ids[:, past:], *step, key, value)

"""The words of captions: their tokenizer, and what it says of the network and of the data."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator

from vit.config import Config
from vit.config.decoder_config import TRAINED
from vit.data.captions.caption_ids import MOST_TOKENS, CaptionIds
from vit.data.captions.tokenizer import Kind, Tokenizer, open_tokenizer, train_tokenizer
from vit.data.dataset_types import Sample, Splits
from vit.errors import ConfigError, DataError
from vit.text import plural
from vit.training.collectives import on_main
from vit.weights.saved_model import read_tokenizer

Notify = Callable[[str], None]


def complete_words(
    config: Config,
    splits: Splits,
    accelerator: Accelerator,
    begun: Path | None,
    known: Tokenizer | None,
    notify: Notify,
) -> tuple[Config, Splits]:
    """Settings and data with a tokenizer, and without captions that are too long.

    Args:
        config: Settings of a training on captions.
        splits: The images and their captions.
        accelerator: The devices; one process makes the tokenizer for all.
        begun: Folder of the run that is resumed, which has its own.
        known: Of the weights that are trained on, where they write captions.
        say: Told what is left out.

    Raises:
        ConfigError: `vocab_size` or `caption_tokens` does not fit.
        DataError: The tokenizer cannot be read, or no caption is short enough.
    """
    tokenizer = make_tokenizer(config, splits, accelerator, begun, known)
    captions = [caption for sample in splits.train for caption in sample.captions]
    tell_unknown(tokenizer, captions, notify)
    asked = config.decoder.vocab_size
    if asked is not None and tokenizer.size > asked:
        raise ConfigError(f"vocab_size={asked}: the tokenizer has {tokenizer.size}; leave it out")
    most = config.decoder.caption_tokens
    if most is None:
        most = CaptionIds([captions], tokenizer, MOST_TOKENS).longest_kept or MOST_TOKENS
    train, on_train = short_enough(splits.train, tokenizer, most)
    val, on_val = short_enough(splits.val, tokenizer, most)
    if on_train or on_val:
        notify(
            f"note: left out {plural(on_train, 'training caption')} and {on_val:,} of validation "
            f"that are longer than caption_tokens={most}"
        )
    if not train or not val or 2 * on_train > len(captions):
        raise DataError(
            f"caption_tokens={most}: {on_train:,} of {len(captions):,} training captions are "
            "longer; use a larger --caption-tokens"
        )
    words = dataclasses.replace(config.decoder, vocab_size=tokenizer.size, caption_tokens=most)
    return dataclasses.replace(config, decoder=words), dataclasses.replace(
        splits, train=train, val=val, tokenizer=tokenizer
    )


def tell_unknown(tokenizer: Tokenizer, captions: Sequence[str], notify: Notify) -> None:
    """Say how many captions have words that the tokenizer leaves out."""
    unknown = tokenizer.count_unknown(captions)
    if unknown:
        notify(
            f"note: {plural(unknown, 'training caption')} with words that the tokenizer does not "
            "know; --tokenizer bpe knows all"
        )


def make_tokenizer(
    config: Config,
    splits: Splits,
    accelerator: Accelerator,
    begun: Path | None,
    known: Tokenizer | None,
) -> Tokenizer:
    """The tokenizer of a run, by one process for all; arguments are those of `complete_words`.

    Raises:
        DataError: It cannot be read.
        ConfigError: `vocab_size` is too small.
    """

    def make() -> str:
        if begun is not None:
            return read_tokenizer(begun).to_json()
        if known is not None:
            return known.to_json()
        if config.decoder.tokenizer not in TRAINED:
            return open_tokenizer(config.decoder.tokenizer).to_json()
        captions = (caption for sample in splits.train for caption in sample.captions)
        kind: Kind = "bpe" if config.decoder.tokenizer == "bpe" else "wordpiece"
        return train_tokenizer(captions, kind=kind, vocab_size=config.decoder.vocab_size).to_json()

    return Tokenizer.from_json(on_main(accelerator, make))


def short_enough(
    samples: tuple[Sample, ...], tokenizer: Tokenizer, most: int
) -> tuple[tuple[Sample, ...], int]:
    """The samples with a caption of at most `most` tokens, and how many captions are longer."""
    ids = CaptionIds([sample.captions for sample in samples], tokenizer, most)
    return tuple(s for place, s in enumerate(samples) if ids.count(place)), ids.too_long


def words_line(config: Config, splits: Splits) -> str:
    """What is said of the captions before the first step."""
    captions = sum(len(sample.captions) for sample in splits.train)
    return (
        f"{captions:,} captions of at most {config.decoder.caption_tokens} tokens, out of "
        f"{config.decoder.vocab_size:,} tokens"
    )

"""Tokenizer of a captioning run: trained or loaded once, and the captions it leaves out."""

import dataclasses
from pathlib import Path

from accelerate import Accelerator

from vit.config import Config
from vit.config.setting_layers import with_settings
from vit.data.captions.caption_ids import DEFAULT_MAX_TOKENS, CaptionIds
from vit.data.captions.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from vit.data.dataset_types import Sample, Splits
from vit.errors import ConfigError, DataError
from vit.text import Notify, plural
from vit.training.distributed.collectives import on_main
from vit.weights.saved_model import read_tokenizer


def prepare_captions(
    config: Config,
    splits: Splits,
    accelerator: Accelerator,
    resumed: Path | None,
    pretrained: Tokenizer | None,
    notify: Notify,
) -> tuple[Config, Splits]:
    """Complete settings and splits with a tokenizer, and drop captions that are too long."""
    tokenizer = make_tokenizer(config, splits, accelerator, resumed, pretrained)
    captions = [caption for sample in splits.train for caption in sample.captions]
    if unknown := tokenizer.count_unknown(captions):
        notify(
            f"note: {plural(unknown, 'training caption')} with words that the tokenizer does not "
            "know; --tokenizer bpe knows all"
        )
    requested = config.decoder.vocab_size
    if requested is not None and tokenizer.size > requested:
        raise ConfigError(
            f"vocab_size={requested}: the tokenizer has {tokenizer.size}; leave it out"
        )
    most = config.decoder.caption_tokens
    if most is None:
        most = (
            CaptionIds([captions], tokenizer, DEFAULT_MAX_TOKENS).longest_kept or DEFAULT_MAX_TOKENS
        )
    train, on_train = drop_long_captions(splits.train, tokenizer, most)
    val, on_val = drop_long_captions(splits.val, tokenizer, most)
    test, _ = drop_long_captions(splits.test, tokenizer, most)
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
    config = with_settings(config, vocab_size=tokenizer.size, caption_tokens=most)
    splits = dataclasses.replace(splits, train=train, val=val, test=test, tokenizer=tokenizer)
    return config, splits


def make_tokenizer(
    config: Config,
    splits: Splits,
    accelerator: Accelerator,
    resumed: Path | None,
    pretrained: Tokenizer | None,
) -> Tokenizer:
    """Load or train the tokenizer of a run in one process; arguments as for `prepare_captions`."""

    def make() -> str:
        if resumed is not None:
            return read_tokenizer(resumed).to_json()
        if pretrained is not None:
            return pretrained.to_json()
        if config.decoder.tokenizer != "bpe":
            return open_tokenizer(config.decoder.tokenizer).to_json()
        captions = (caption for sample in splits.train for caption in sample.captions)
        return train_tokenizer(captions, vocab_size=config.decoder.vocab_size).to_json()

    return Tokenizer.from_json(on_main(accelerator, make))


def drop_long_captions(
    samples: tuple[Sample, ...], tokenizer: Tokenizer, most: int
) -> tuple[tuple[Sample, ...], int]:
    """Samples with a caption of at most `most` tokens, and the number of longer captions."""
    ids = CaptionIds([sample.captions for sample in samples], tokenizer, most)
    return tuple(s for place, s in enumerate(samples) if ids.count(place)), ids.too_long

"""Opens the dataset, leaves out unreadable images, and completes the settings that it decides."""

import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil, lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from vit.config import Config, DataConfig, ModelConfig
from vit.config.setting_layers import with_settings
from vit.config.settings import refuse
from vit.data.auto_augment import THREE_JITTER
from vit.data.captions.caption_ids import DEFAULT_MAX_TOKENS, CaptionIds
from vit.data.captions.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from vit.data.checks.scenes import find_groups
from vit.data.dataset_types import ImageRecord, Sample, Splits, labels_of
from vit.data.image_io import StoredValues, check_header, set_max_pixels
from vit.data.image_tiles import TileGrid, open_tiles
from vit.data.instrument_images import UnusableFile
from vit.data.intensity_range import measure_channels, measure_intensity_range
from vit.data.preprocessing import spec_from_config
from vit.data.sampler import fitting_batch_size
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.dataset_warnings import MAX_COMPARED, undecodable_error
from vit.data.sources.open_dataset import Listing, locate_in_lists, open_splits, read_source
from vit.data.sources.scene_groups import FoundGroups, GroupFinder, given_groups, recorded_groups
from vit.data.sources.train_val_split import Fold
from vit.errors import BadImage, ConfigError, DataError
from vit.paths import is_group_list
from vit.process_resources import usable_cores
from vit.tasks.task import get_task
from vit.text import Notify, join_names, plural, printable
from vit.training.distributed.collectives import on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.finetune.finetune_settings import (
    complete_for_added_classes,
    run_of,
    seen_images_note,
)
from vit.weights.formats.pretrained import Pretrained
from vit.weights.saved_model import read_tokenizer

THREADS = 8
"""Where the disk is what takes time; where reading takes the processor's, more are slower."""
CHUNK = 256
SCENES_SHARE = 0.1
"""Largest share of the time of a training that the search for scenes may take."""
WAITING_SHARE = 0.5
"""Share of the time of a chunk without the processor from which on threads read the others."""

FOR_TILES: dict[str, tuple[Any, str]] = {
    "resize": ("squash", "each tile is resized"),
    "crop_share": (1.0, "each tile is seen as a whole"),
    "cache": ("none", "tiles are read from their files"),
    "mixup": (0.0, "bags are not mixed"),
    "cutmix": (0.0, "bags are not mixed"),
    "channel_order": ((), "tiles are RGB of 8 bits"),
    "axes": ("", "the first page is read"),
    "compile": (False, "images have different numbers of tiles"),
    "probe_first": (False, "there is no probe of bags"),
    "teacher": (None, "there is no teacher of bags"),
}
"""The only value of a setting with tiles, and why."""
FOR_FEATURES: dict[str, Any] = {"auto_augment": "none", "min_crop": 1.0, "start_image_size": None}
FOR_FEATURES |= dict.fromkeys(("hflip", "vflip", "rotate", "translate", "color_jitter"), 0.0)
FOR_FEATURES |= dict.fromkeys(("erase", "dropout", "attention_dropout", "drop_path"), 0.0)
FOR_FEATURES |= {"patch_dropout": 0.0, "patch_sizes": ()}
"""Settings with which a frozen encoder always has the same features of a tile."""


class HeaderScan(NamedTuple):
    """What the headers of images show, in the order of the images."""

    bad: list[BadImage]
    stored: dict[str, StoredValues]
    """Of the images of instruments what they hold, by path."""


def prepare_data(
    config: Config,
    accelerator: Accelerator,
    notify: Notify,
    resumed: Path | None = None,
    tokenizer: Tokenizer | None = None,
    listing: Listing | None = None,
    source: Pretrained | None = None,
) -> tuple[Config, Splits, dict[str, str]]:
    """Open the data, and complete the settings that they decide; returns settings, images and the
    unreadable images with the reason."""
    groups = group_finder(config, accelerator, resumed)
    try:
        splits = open_data(config, listing, find_groups=groups)
    except DataError as failure:
        if resumed is None or os.path.exists(config.data.data):
            raise
        hint = "if it moved, give it: vit train DATA --resume --out RUN, vit report RUN DATA"
        raise DataError(f"{failure}; {hint}") from None
    config, splits = get_task(config.training.task).check_data(config, splits, notify)
    config = complete_for_data(config, splits, notify)
    error = undecodable_error(splits.classes) if config.model.num_classes else ""
    if error and resumed is None:
        raise DataError(f"{config.data.data}: {error}")
    if source is not None:
        config = complete_for_added_classes(
            config, source, splits.classes, len(splits.train), notify
        )
    if (
        config.chosen("val_share")
        and not splits.made
        and config.data.val_share != DataConfig.val_share
    ):
        unused = f"val_share={config.data.val_share} is not used"
        notify(f"note: {unused}: the data have their own validation images")
    scan = scan_images(splits, config, accelerator, notify)
    splits = exclude_images(splits, scan.bad)
    for note in splits.notes:
        notify(f"note: {note}")
    if source is not None and (weights := config.finetune.weights):
        seen = seen_images_note(weights, splits, source.classes)
        if seen is not None:
            notify(seen)
    if resumed is None:  # the run began with its own range, or without one
        config = complete_channels(config, splits, scan.stored, accelerator, notify)
    if config.training.captions:
        config, splits = prepare_captions(config, splits, accelerator, resumed, tokenizer, notify)
    config = fit_batch_size(config, len(splits.train), accelerator.num_processes, notify)
    config = count_epochs(config, len(splits.train))
    batch_size, images = config.data.batch_size, len(splits.train)
    probing = config.finetune.method == "probe"  # which uses each image once
    once = config.augment.repeats == 1 and config.training.balance != "sampler"
    if once and not probing and (lost := images % batch_size / images) > 0.1:
        notify(
            f"note: each epoch leaves out {lost:.0%} of the images, others every time, since "
            f"batch_size={batch_size} does not divide {images}; a smaller -b leaves out fewer"
        )
    return config, splits, {image.path: image.reason for image in scan.bad}


def group_finder(config: Config, accelerator: Accelerator, resumed: Path | None) -> GroupFinder:
    """Returns what finds the groups of images: the main process, or the record of a resumed run."""
    file = config.data.group if is_group_list(config.data.group) else None
    if resumed is not None:
        recorded = recorded_groups(resumed)
        return recorded if file is None else lambda *data: recorded(*data).named(file)
    given = None if file is None else given_groups(file)
    if (
        given is None
        and config.finetune.weights is not None
        and (before := run_of(config.finetune.weights))
    ):
        run, old = before
        same = os.path.realpath(old.data.data) == os.path.realpath(config.data.data)
        if same and not old.training.pretrains:
            return recorded_groups(run)  # what it held out stays unseen
    limit = config.training.seconds
    seconds = None if limit is None else limit * SCENES_SHARE

    def find(records: Sequence[ImageRecord], root: Path) -> FoundGroups:
        named = FoundGroups() if given is None else given(records, root)
        # too large to read twice, or no score
        unread = config.data.tiles or config.training.pretrains or len(records) > MAX_COMPARED
        if unread or named.sources:
            return named
        found = on_main(accelerator, lambda: find_groups(records, root, seconds=seconds))
        return found if given is None else named._replace(backgrounds=found.backgrounds)

    return find


def group_lines(config: Config, listing: Listing) -> list[str]:
    """Lines about the scenes and sources that a training of listed images finds, if it looks."""
    records = [*itertools.chain.from_iterable(listing.index.splits.values())]
    if not listing.spec.finds_groups:
        return []
    found = group_finder(config, make_accelerator(config.run), None)(records, listing.index.root)
    return [*found.notes, *filter(None, [str(found)])]


def list_data(config: Config) -> Listing:
    """List the files of a classification dataset, for `open_data`."""
    spec = training_spec(config)
    return Listing(spec, read_source(spec))


def training_spec(config: Config) -> DatasetSpec:
    """What the training reads: with a teacher, images without a label too."""
    spec = get_task(config.training.task).dataset_spec(config)
    teacher = config.distillation.teacher is not None
    return dataclasses.replace(spec, unlabelled=teacher)


def open_data(
    config: Config,
    listing: Listing | None = None,
    *,
    compare: bool = True,
    find_groups: GroupFinder | None = None,
) -> Splits:
    """Open the images, with their classes, captions, or both."""
    data, training = config.data, config.training
    check_channels(config.model.channels, config.data.value_type)
    set_max_pixels(data.max_pixels)
    if data.folds is not None and data.fold is None:
        raise ConfigError(
            f"folds={data.folds}: a run trains one fold; set --fold (1..N), or train all of them "
            "with vit.cross_validate"
        )
    return open_splits(
        training_spec(config),
        val_share=data.val_share,
        seed=training.seed,
        fold=None if data.folds is None else Fold(data.fold or 1, data.folds),
        listing=listing,
        compare=compare,
        find_groups=find_groups,
    )


def check_channels(channels: int, value_type: str | None = None) -> None:
    """Refuse a number of channels that the data has not decided."""
    if channels != 3 and value_type is None:
        raise ConfigError(
            f"channels={channels}: the data decide it, 3 for images of 8 bits; leave --in-chans "
            "out (--channels 0,1 chooses channels of images of instruments)"
        )


def complete_for_data(config: Config, splits: Splits, notify: Notify = lambda _: None) -> Config:
    """Set the size of the head, and what else of the network the task decides."""
    task = get_task(config.training.task)
    found = len(task.output_names(splits))
    stated = config.model.num_classes
    if stated != found and config.chosen("num_classes"):
        raise ConfigError(
            f"num_classes={stated}: the data has {found} classes; leave it out and it is taken "
            "from the data"
        )
    if stated not in (found, ModelConfig.num_classes):
        notify(f"note: {found} classes instead of num_classes={stated} of the settings file")
    config = complete_for_tiles(task.complete(config))
    return with_settings(config, num_classes=found)


def complete_for_tiles(config: Config) -> Config:
    """Set what bags of tiles need, and refuse what they do not have; no change without `tiles`."""
    if not config.data.tiles:
        return config
    for name, (value, why) in FOR_TILES.items():
        if config.chosen(name) and config.get(name) not in (value, None):
            refuse(name, config.get(name), f"does not work with tiles: {why}")
    if config.finetune.method == "probe":
        config.finetune.refuse("method", "there is no probe of bags; use full or linear")
    settings = {name: value for name, (value, _) in FOR_TILES.items()}
    if not config.chosen("min_crop"):  # a crop may miss what shows the class
        settings["min_crop"] = 1.0
    if config.finetune.method == "linear" and not config.chosen("time"):  # which steps fill
        settings |= {n: v for n, v in FOR_FEATURES.items() if v != () and not config.chosen(n)}
    pooling = config.model.tile_pooling or "attention"
    return with_settings(config, **settings, tile_pooling=pooling)


def encodes_tiles_once(config: Config) -> bool:
    """Whether the encoder has the same features of the tiles in each epoch."""
    frozen = config.finetune.method == "linear" and config.model.feedforward != "moe"
    same = all(config.get(name) == value for name, value in FOR_FEATURES.items())
    return bool(config.data.tiles) and frozen and same


def complete_channels(
    config: Config,
    splits: Splits,
    stored: Mapping[str, StoredValues],
    accelerator: Accelerator,
    notify: Notify,
) -> Config:
    """Set how the values of images of instruments are read, measured on the training images.

    Images of 1 or 3 channels become RGB of 8 bits by one `intensity_range`, unless the user chose
    channels, or pixels have no value; of others the network takes all channels with their full
    depth. What only validation images have is measured on those.
    """
    order, axes = config.data.channel_order, config.data.axes
    if not stored:
        if order or axes:
            given = f"--channels {','.join(order)}" if order else f"--axes {axes}"
            if not config.chosen("channel_order" if order else "axes"):
                raise DataError(f"{given} of the weights: the images are RGB of 8 bits")
            raise ConfigError(f"{given}: the images are RGB of 8 bits; leave it out")
        return config
    for taken in sorted({one.axes for one in stored.values()} - {""}):
        notify(f"note: the axis {taken} of the TIFFs is their channels")
    trained = {sample.path for sample in splits.train}
    paths = [path for path in stored if path in trained] or list(stored)
    if not takes_channels(config, stored.values()):
        deep = [path for path in paths if stored[path].dtype != "uint8"]
        if config.data.intensity_range is not None or not deep:
            return config
        found = on_main(accelerator, lambda: measure_intensity_range(deep, notify))
        return with_settings(config, intensity_range=found)
    every = [sample.path for sample in (*splits.train, *splits.val, *splits.test)]
    check_same_channels(every, stored)
    refuse_for_channels(config)
    if config.origins.get("channel_ranges") in ("data", "weights"):  # of another fold, or of them
        check_fit(config.data, stored)
        settings: dict[str, Any] = {"channels": len(config.data.channel_order)}
    else:
        measure = partial(measure_channels, config.data, paths, stored, notify)
        settings = on_main(accelerator, measure)
    settings |= {name: getattr(DataConfig, name) for name in ("mean", "std")}  # not of weights
    if config.augment.auto_augment != "none":  # of the task
        jitter = config.augment.color_jitter or THREE_JITTER
        settings |= {"auto_augment": "none", "color_jitter": jitter}
    return with_settings(config, **settings)


def takes_channels(config: Config, stored: Iterable[StoredValues]) -> bool:
    """Whether the network takes channels of images of instruments in full depth, and no RGB."""
    chosen = bool(config.data.channel_order or config.data.axes)
    return chosen or any(one.nodata is not None or one.channels not in (1, 3) for one in stored)


def check_same_channels(paths: Sequence[str], stored: Mapping[str, StoredValues]) -> None:
    """Refuse images of different numbers of channels, and name two of them."""
    first = next(path for path in paths if path in stored)
    number = plural(stored[first].channels, "channel")
    for path in paths:
        found = stored.get(path)
        if found is None or found.channels != stored[first].channels:
            other = "is RGB of 8 bits" if found is None else f"has {found.channels}"
            raise DataError(f"{first} has {number} and {path} {other}: take one kind")


def check_fit(data: DataConfig, stored: Mapping[str, StoredValues]) -> None:
    """Refuse images that do not hold the channels of `data`, which were measured on others."""
    spec = spec_from_config(data)
    assert spec is not None
    remedy = "convert such files, or choose other channels by --channels"
    for path, one in stored.items():
        try:
            spec.check_file(one.channels, one.dtype)
            spec.order_of(one.names)
        except UnusableFile as error:
            raise DataError(f"{path}: {error}, which comes from the weights: {remedy}") from None


def refuse_for_channels(config: Config) -> None:
    """Refuse what needs colours of 8 bits."""
    if config.data.cache == "device" and config.run.precision == "tf32":
        config.data.refuse("cache", "TF32 would round the values of channels; use --cache ram")
    for name in ("mean", "std"):
        usual = getattr(DataConfig, name)  # a plan's file has it
        if config.chosen(name) and getattr(config.data, name) != usual:
            config.data.refuse(name, "each channel has its own, which is measured; leave it out")
    if config.augment.auto_augment != "none" and config.chosen("auto_augment"):
        config.augment.refuse(
            "auto_augment", "it varies colours; --color-jitter 0.3 varies any channels"
        )


def scan_images(
    splits: Splits, config: Config, accelerator: Accelerator, notify: Notify
) -> HeaderScan:
    """Read the headers of all images in the main process, to find unreadable and deep ones; of
    images by tiles, all tiles."""
    samples, axes = [*splits.train, *splits.val, *splits.test], config.data.axes
    grid = TileGrid.from_config(config.data)
    scan = on_main(
        accelerator,
        lambda: scan_headers(samples, axes) if grid is None else scan_tiles(samples, grid, notify),
    )
    bad = scan.bad
    if bad and config.data.on_bad_image == "stop":
        more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
        where = locate_in_lists(get_task(config.training.task).dataset_spec(config), [bad[0].path])
        line = f" ({where[bad[0].path]})" if where else ""
        remedy = "correct the list, " if where else "mend or delete, "
        if any(flag in bad[0].reason for flag in ("--max-pixels", "--tiles", "--axes")):  # is good
            remedy = ""
        raise BadImage(
            bad[0].path,
            f"{bad[0].reason}{line}{more}; {remedy}or leave such files out with "
            "--on-bad-image skip",
        )
    return scan


def count_epochs(config: Config, images: int) -> Config:
    """Set `epochs` from `steps`, if that is given."""
    training = config.training
    if training.steps is None:
        return config
    epoch_steps = training.epoch_steps or images // config.data.batch_size
    epochs = ceil(training.steps / epoch_steps)
    if config.chosen("epochs") and training.epochs != epochs:
        raise ConfigError(
            f"epochs={training.epochs}: steps={training.steps} make {epochs} epochs of "
            f"{epoch_steps} steps; leave one of them out (--steps none)"
        )
    return with_settings(config, epochs=epochs)


def fit_batch_size(config: Config, images: int, processes: int, notify: Notify) -> Config:
    """Reduce `batch_size` to at most the number of training images."""
    data, parts = config.data, processes * config.data.micro_batches
    unit = 2 * parts if parts > 1 and config.augment.mixes else parts
    # a reduced batch is a multiple of the micro-batches and of repeated augmentation
    batch_size = fitting_batch_size(images, data.batch_size, lcm(unit, config.augment.repeats))
    if batch_size % unit and not batch_size % parts:
        raise ConfigError(
            f"batch_size={batch_size} is {batch_size // parts} images in each of {parts} parts, "
            f"and MixUp and CutMix mix pairs: choose a multiple of {unit}"
        )
    if batch_size != data.batch_size:
        notify(
            f"note: only {images} training images, fewer than batch_size={data.batch_size}: "
            f"using batch_size={batch_size}"
        )
    return with_settings(config, batch_size=batch_size)


def scan_headers(samples: Sequence[Sample], axes: str = "") -> HeaderScan:
    """Check the headers of `samples`, from where a disk or network is slow in THREADS threads."""
    chunks = iter([samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)])
    scans = []
    for chunk in chunks:
        began, busy = time.perf_counter(), time.thread_time()
        scans.append(_check_chunk(chunk, axes))
        waited = time.perf_counter() - began - (time.thread_time() - busy)
        if waited > WAITING_SHARE * (time.perf_counter() - began):
            break
    with ThreadPoolExecutor(THREADS) as pool:
        scans += pool.map(lambda chunk: _check_chunk(chunk, axes), chunks)
    bad = [image for scan in scans for image in scan.bad]
    return HeaderScan(bad, {path: one for scan in scans for path, one in scan.stored.items()})


def scan_tiles(samples: Sequence[Sample], grid: TileGrid, notify: Notify) -> HeaderScan:
    """Find the tiles that are no background, which loader processes then know."""

    def look(sample: Sample) -> tuple[int, int] | BadImage:
        try:
            image = open_tiles(sample.path, grid)
            return len(image.numbers()), prod(image.shape)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)

    with ThreadPoolExecutor(usable_cores()) as pool:
        found = [*pool.map(look, samples)]
    counts = [one for one in found if not isinstance(one, BadImage)]
    kept, every = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    most = max(counts, default=(0, 0))[0]
    notify(
        f"note: {kept:,} tiles of {plural(len(counts), 'image')}, at most {most:,} of one; "
        f"{every - kept:,} of nearly one colour are left out as background"
    )
    return HeaderScan([one for one in found if isinstance(one, BadImage)], {})


def exclude_images(splits: Splits, bad: Sequence[BadImage]) -> Splits:
    """`splits` without the images in `bad`, which a note names."""
    if not bad:
        return splits
    names = join_names(bad, limit=3)
    paths = {image.path for image in bad}
    train, val, test = (
        tuple(sample for sample in part if sample.path not in paths)
        for part in (splits.train, splits.val, splits.test)
    )
    present = {label for sample in train for label in labels_of(sample)}
    missing = [printable(name) for label, name in enumerate(splits.classes) if label not in present]
    if missing:
        raise DataError(f"no training image of class {join_names(missing)} can be read: {names}")
    if not val:
        raise DataError(f"no validation image can be read: {names}")
    notes = (*splits.notes, f"left out {plural(len(bad), 'image')} that cannot be read: {names}")
    return dataclasses.replace(splits, train=train, val=val, test=test, notes=notes)


def _check_chunk(samples: Sequence[Sample], axes: str) -> HeaderScan:
    found = HeaderScan([], {})
    for sample in samples:
        try:
            if (stored := check_header(sample.path, axes)) is not None:
                found.stored[sample.path] = stored
        except BadImage as bad:
            # without the traceback, which holds memory
            found.bad.append(BadImage(bad.path, bad.reason))
    return found


def prepare_captions(
    config: Config,
    splits: Splits,
    accelerator: Accelerator,
    resumed: Path | None,
    pretrained: Tokenizer | None,
    notify: Notify,
) -> tuple[Config, Splits]:
    """Complete settings and splits with a tokenizer, and drop captions that are too long."""
    captions = [caption for sample in splits.train for caption in sample.captions]

    def load_or_train() -> str:
        if resumed is not None:
            return read_tokenizer(resumed).to_json()
        if pretrained is not None:
            return pretrained.to_json()
        if config.decoder.tokenizer != "bpe":
            return open_tokenizer(config.decoder.tokenizer).to_json()
        return train_tokenizer(captions, vocab_size=config.decoder.vocab_size).to_json()

    tokenizer = Tokenizer.from_json(on_main(accelerator, load_or_train))
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


def drop_long_captions(
    samples: tuple[Sample, ...], tokenizer: Tokenizer, most: int
) -> tuple[tuple[Sample, ...], int]:
    """Samples with a caption of at most `most` tokens, and the number of longer captions."""
    ids = CaptionIds([sample.captions for sample in samples], tokenizer, most)
    return tuple(s for place, s in enumerate(samples) if ids.count(place)), ids.too_long

"""Opens a dataset of any source as samples with class indices, for training or evaluation.

A reader of `READERS` indexes the images and their class names. The rest is common to all sources:
classes are matched by name with those of the training split, validation images are held out where
the source has none, and notes list what was left out or looks wrong.
"""

import dataclasses
import glob
import itertools
import math
import os
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vit.class_tree import SEPARATOR, ClassTree, by_last_name
from vit.config.data_config import BY_NUMBER
from vit.data.dataset_types import (
    NO_LABEL,
    DatasetIndex,
    ImageGroups,
    ImageRecord,
    ImagesByClass,
    Sample,
    Splits,
)
from vit.data.image_archives import is_inside, relative
from vit.data.sources import builtin_datasets
from vit.data.sources.dataset_problem import skip_or_raise
from vit.data.sources.dataset_spec import (
    LAYOUT,
    TEST,
    VAL_NAMES,
    DatasetSpec,
    named_source,
    resolve_folder,
    validation_split,
)
from vit.data.sources.dataset_warnings import (
    MAX_COMPARED,
    class_problems,
    copies_of,
    equal_files,
    equal_notes,
)
from vit.data.sources.file_walk import IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES, FolderWalker
from vit.data.sources.huggingface_datasets import read_dataset
from vit.data.sources.image_folder import read_folder
from vit.data.sources.image_list import images_in, lines_of, read_lists, text_columns
from vit.data.sources.image_sources import new_images, shared_notes, with_copies
from vit.data.sources.label_review import apply_review
from vit.data.sources.list_files import has_caption_lists, is_list
from vit.data.sources.list_formats import has_captions
from vit.data.sources.number_columns import split_cell
from vit.data.sources.scene_groups import FoundGroups, GroupFinder
from vit.data.sources.split_file import HeldOutSplit
from vit.data.sources.tar_shards import (
    list_shard_images,
    read_shards,
    shard_files,
    shards_in_folder,
)
from vit.data.sources.taxonomy_file import read_taxonomy
from vit.data.sources.train_val_split import (
    Fold,
    groups_of_records,
    name_copies,
    split_train_val,
)
from vit.errors import ConfigError, DataError
from vit.text import join_names, nearest, plural, printable

READERS: dict[str, Callable[[DatasetSpec], DatasetIndex]] = {
    "hub": read_dataset,
    "shards": read_shards,
    "list": read_lists,
    "folder": read_folder,
}
"""By source; the last also reads built-in sets, and refuses what is not there."""
OF_LISTS = ("weight_column", "allow_outside", "images", "image_column", "label_column")
"""Settings of lists only; a table of the hub has columns too."""


def _read(source: str, spec: DatasetSpec) -> DatasetIndex:
    """Index the images of a source of this kind, of the splits that are needed."""
    refused = {"list": (), "hub": OF_LISTS[:3]}.get(source, OF_LISTS)
    for name in (*refused, "numbers") if source != "list" else ():
        if (value := getattr(spec, name)) not in (None, False, ()):
            text = f"{name}={value!r}" if name != "numbers" else f"target={','.join(value)}"
            raise ConfigError(
                f"{text}: {spec.data} is not a list; leave it out, or give a list "
                "(.csv, .jsonl, .xlsx)"
            )
    index = READERS[source](spec)
    if source not in ("hub", "shards"):
        return index
    splits = {name: index.splits[name] for name in spec.select_splits(index.splits)}
    return dataclasses.replace(index, splits=splits, split_kind="split")


def source_of(data: str, *, captions: bool = False, numbers: tuple[str, ...] = ()) -> str:
    is_folder = os.path.isdir(data)
    if captions and is_folder and has_caption_lists(data):
        return "list"
    source = "shards" if is_folder and shards_in_folder(data) else named_source(data)
    if source in ("", "list"):
        source = "list" if captions or is_list(data, numbers) else "folder"
    return source


def has_image_column(data: str) -> bool:
    """Whether `data` is read as a list, or as a table of the Hugging Face Hub."""
    return source_of(data) in ("list", "hub")


def is_folder_source(data: str) -> bool:
    """Whether `data` is read as an image folder, or is the name of a built-in dataset."""
    return source_of(data) == "folder"


def check_source_exists(data: str) -> None:
    """Check the name of a source, before other work is done."""
    if is_folder_source(data):
        resolve_folder(data)


def refuse_captions(data: str) -> None:
    if os.path.isfile(data) and is_folder_source(data) and has_captions(data):
        raise DataError(f"{data} is a list of captions: learn them with --task caption")


def image_groups(spec: DatasetSpec, paths: Sequence[str]) -> list[str] | None:
    """The group of each image of `spec` by its path, empty if it has none; None without groups,
    and where no two images are of one scene."""
    if spec.group is None and not spec.groups.scenes:
        return None
    index = read_source(spec)
    if spec.group is None:
        names = [spec.groups.scenes.get(relative(path, index.root), "") for path in paths]
        named = [*filter(None, names)]
        return names if len({*named}) < len(named) else None
    records = [*itertools.chain.from_iterable(index.splits.values())]
    names = groups_of_records(records, index, spec.group)
    found = {record.path: name for record, name in zip(records, names, strict=True)}
    return [found.get(path, "") for path in paths]


GROUP = "group"
"""What tells sources apart where a user names the groups."""


class ImageSources(NamedTuple):
    """The sources of some images; `image_sources`."""

    names: list[str]
    """Empty of an image whose source is not known."""
    new: list[bool]
    """Whether no training image is of its source."""


def image_sources(spec: DatasetSpec, paths: Sequence[str]) -> ImageSources | None:
    """The sources of images of `spec` by their paths; None if none is of a new source.

    Groups that a user named are sources, all of them new: none was trained on.
    """
    if spec.group is not None:
        names = image_groups(spec, paths) or []
        return ImageSources(
            [f"{GROUP}: {name}" if name else "" for name in names], [*map(bool, names)]
        )
    if not spec.groups.new:
        return None
    root = read_source(spec).root
    own = [relative(path, root) for path in paths]
    sources = [spec.groups.new.get(name) or spec.groups.sources.get(name, "") for name in own]
    return ImageSources(sources, [name in spec.groups.new for name in own])


def read_source(spec: DatasetSpec) -> DatasetIndex:
    """Index the images of any source, with what lists beside it leave out and label."""
    index = apply_review(*read_whole_source(spec))
    return _with_paths(index, spec) if spec.nested and spec.labels else index


def _with_paths(index: DatasetIndex, spec: DatasetSpec) -> DatasetIndex:
    """`index` with classes that are paths: those of the tree `spec.taxonomy`, or its own."""
    tree = {} if spec.taxonomy is None else read_taxonomy(spec.taxonomy)
    nodes, places = {*tree.values()}, dict[str, list[str]]()
    splits: dict[str, list[ImageRecord]] = {}

    def is_node(name: str) -> bool:
        return name in nodes if tree else all(part.strip() for part in name.split(SEPARATOR))

    for split, records in index.splits.items():
        splits[split] = []
        for record in records:
            labels = tuple(tree.get(name, name) for name in record.labels)
            if all(map(is_node, labels)):
                splits[split].append(record._replace(labels=labels))
            for name in itertools.filterfalse(is_node, labels):
                places.setdefault(name, []).append(record.path)
    lines = locate_in_lists(spec, {paths[0] for paths in places.values()}) if places else {}
    for name, (first, *more) in places.items():
        why = "has an empty level; name it"
        if tree:
            why = f"is no node of {spec.taxonomy}; correct it, or add it{nearest(name, tree)}"
        error = DataError(printable(f"{lines.get(first, first)}: the class {name!r} {why}"))
        skip_or_raise(spec.problems, "bad_label", error, first, *more)
    return dataclasses.replace(index, splits=splits)


def read_whole_source(spec: DatasetSpec) -> tuple[DatasetIndex, DatasetSpec]:
    """Index all images of any source; and the specification for `apply_review`."""
    source = source_of(spec.data, captions=spec.captions, numbers=spec.numbers)
    if spec.target not in (spec.numbers, (spec.label_column,)):
        found = "captions" if spec.captions else "classes"
        raise ConfigError(
            f"target={','.join(spec.target)}: {found} are read here, and no numbers; leave it out"
            + (", or name the column of classes with --label-column" if spec.labels else "")
        )
    if not spec.captions:
        refuse_captions(spec.data)
    if spec.caption_column is not None and not spec.captions:
        raise ConfigError(
            f"caption_column={spec.caption_column!r}: captions are not read here; leave it out, or "
            "learn them with --task caption"
        )
    if spec.label_list is not None:
        if spec.captions or spec.numbers:
            found = "captions" if spec.captions else "numbers"
            raise ConfigError(
                f"labels={spec.label_list}: a list of classes, and {found} are learned "
                "here; leave it out"
            )
        index = _read(source, _unlabelled_source(spec))
    else:
        read = _with_or_without_labels if spec.optional_labels else _read
        index = read(source, spec)
    if index.multilabel and spec.multilabel is False:
        raise DataError(
            f"{spec.data}: images with several classes, or none; --task multilabel learns them"
        )
    index = dataclasses.replace(index, multilabel=index.multilabel or bool(spec.multilabel))
    # the column of images is that of a table of images, else of the list of labels
    own_column = spec.label_list is not None and has_image_column(spec.data)
    return index, dataclasses.replace(spec, image_column=None) if own_column else spec


def _unlabelled_source(spec: DatasetSpec) -> DatasetSpec:
    """The source of the images of `spec.label_list`, whose own labels are not read.

    The column of labels is then that of the list, and so is the column of images, unless the source
    has one.
    """
    return dataclasses.replace(
        spec,
        labels=False,
        image_column=spec.image_column if has_image_column(spec.data) else None,
        label_column=None,
        target=(),
        optional_labels=False,
        multilabel=None,
        # a split without a labelled image does not count: others are then held out, so all are read
        all_splits=spec.all_splits or spec.split is not None,
    )


def _with_or_without_labels(source: str, spec: DatasetSpec) -> DatasetIndex:
    """The index with classes if every image has exactly one of several; else without any."""
    plain = dataclasses.replace(spec, labels=False, optional_labels=False)
    try:
        index = _read(source, spec)
    except DataError:
        return _read(source, plain)
    classes = {
        name: {label for record in records for label in record.labels}
        for name, records in index.splits.items()
    }
    trained = classes.get("train", classes.get("", set()))
    suits = not index.multilabel and all(labels <= trained for labels in classes.values())
    return index if suits and len(trained) > 1 else _read(source, plain)


@dataclass(frozen=True)
class Listing:
    """The index of a dataset with its specification; `vit plan` and the training share one."""

    spec: DatasetSpec
    index: DatasetIndex


def open_splits(
    data: str | DatasetSpec,
    *,
    val_share: float,
    seed: int,
    fold: Fold | None = None,
    listing: Listing | None = None,
    compare: bool = True,
    find_groups: GroupFinder | None = None,
) -> Splits:
    """Open the training and validation images of a dataset; without validation images, the share
    `val_share` of each class is held out, and no scene is divided."""
    spec = DatasetSpec(data) if isinstance(data, str) else data
    reusable = listing is not None and listing.spec == spec
    index = listing.index if listing is not None and reusable else read_source(spec)
    images = index.train
    if not images:
        lists = join_names(filter(None, (spec.label_list, spec.exclude)))
        named = join_names(filter(None, index.locations))
        end = f"{lists and ' after reading '}{lists}{named and ', but for '}{named}"
        raise DataError(f"{spec.data} has no images for train{end}; give some")
    classes = tuple(sorted({label for record in images for label in record.labels}))
    if spec.order:
        classes = _ordered(classes, index, spec)
    if spec.labels and not spec.optional_labels and len(classes) < 1 + (not index.multilabel):
        names = join_names(classes)
        problem = f"only one class ({names}), nothing to classify" if names else "no classes"
        raise DataError(f"{index.root}: {problem}; add images of others")
    if index.target_classes:
        spec = dataclasses.replace(spec, choices=_target_classes(index))
    notes = [*index.notes]
    own = validation_split(index.splits)
    held_out = own is None or fold is not None
    others = index.splits.get(own or TEST, []) if fold is None else []
    identical, found = None, FoundGroups()
    records = [*images, *others]
    if compare:
        by_path = {record.path: record for record in records}
        identical = equal_files(by_path) if len(by_path) <= MAX_COMPARED else None
        if find_groups is not None and spec.finds_groups:
            found = find_groups([*by_path.values()], index.root).divisible(records)
    copies = name_copies([*(identical or ()), *found.scenes], index.root)
    exclusive = bool(classes) and not (index.multilabel or index.target_classes or index.unlabelled)
    exclusive = exclusive and not (spec.order or spec.captions)  # of which top-1 is not the score
    sources = with_copies(found.sources, copies) if exclusive else {}
    train, val, more = split_train_val(
        index,
        spec,
        val_share=val_share,
        seed=seed,
        fold=fold,
        copies=copies,
        sources=sources,
        grouped=found.given,
    )
    notes += [*more, *found.notes]
    if found.given and found.sources and not exclusive:
        notes.append("sources are for images with one class each: they are not used")
    if others:
        where = index.locations[own or TEST]
        others, more = _relabel(others, classes, index, where, owner="train")
        notes += [*more, *_leakage_notes(images, others, index.root)]
    val, test = (val, others) if held_out else (others, [])
    new = found.new
    if new is None and exclusive:
        trained, unseen = ([record.path for record in part] for part in (train, val))
        new = new_images(trained, unseen, sources, found.backgrounds)
    if test:
        notes.append(f"{plural(len(test), 'test image')} kept for the end")
    if not val:
        reason = ": each class has one image or group, or copies" if held_out and classes else ""
        raise DataError(f"{spec.data}: no images left to validate on{reason}; add some")
    total = len(train) if index.multilabel else None
    if classes:
        counts = {name: len(paths) for name, paths in _by_class(train, classes).items()}
        notes += [text for _, text in class_problems(classes, counts, total)]
    if compare:
        seen, measured = (images, test) if test else (train, val)
        parts = _by_labels(seen), _by_labels(measured)
        learned_paths, measured_paths = ([one.path for one in part] for part in (seen, measured))
        notes += equal_notes(*parts, str(index.root), identical)
        notes += found.leak_notes(learned_paths, measured_paths)
        if own and not held_out:
            notes += shared_notes(learned_paths, measured_paths, sources)
    unlike = _unlike_validation(index, spec, train, [*val, *test], compare=compare)
    if unlike:
        notes.append(f"{plural(len(unlike), 'image')} without a label: the teacher labels them")
    if left_out := len(index.unlabelled) - len(unlike):
        notes.append(
            f"{plural(left_out, 'image')} without a label left out: copies of validation images, "
            "or of their groups"
        )
    unlabelled = _samples(unlike, classes, index, spec)
    learned = _samples(train, classes, index, spec, weighted=True)
    if spec.weight_column is not None and not any(sample.weight for sample in learned):
        raise DataError(f"weight_column={spec.weight_column}: all training images weigh 0")
    return Splits(
        classes=classes,
        train=(*learned, *unlabelled),
        val=_samples(val, classes, index, spec),
        notes=tuple(dict.fromkeys(notes)),
        made=held_out,
        root=index.root,
        multilabel=index.multilabel,
        unlabelled=frozenset(sample.path for sample in unlabelled),
        test=_samples(test, classes, index, spec),
        targets=spec.numbers,
        units=index.units,
        target_classes=spec.choices,
        groups=ImageGroups(
            *(
                {relative(path, index.root): name for path, name in named.items()}
                for named in (
                    name_copies(found.scenes, index.root),
                    sources,
                    new or {},
                )
            )
        ),
    )


def _ordered(classes: Sequence[str], index: DatasetIndex, spec: DatasetSpec) -> tuple[str, ...]:
    """`classes` in the order that `spec` gives, which names them all, or as numbers."""
    order, records = spec.order, [*itertools.chain.from_iterable(index.splits.values())]
    given = f"order={','.join(order)}"
    why = f"not in {given}; correct it, or add it"
    if order == (BY_NUMBER,):
        cells = {name: split_cell(name, is_table=True).number for name in classes}
        texts = {name: text for name, text in cells.items() if isinstance(text, str)}
        numbers = {name: float(text.replace(",", ".")) for name, text in texts.items()}
        order, records = tuple(sorted(numbers, key=numbers.__getitem__)), index.train
        why = f"no number; give all grades in their order: --order {','.join(classes)}"
        if same := [(a, b) for a, b in itertools.pairwise(order) if numbers[a] == numbers[b]]:
            raise DataError(f"grades {join_names(same[0])} are one number; write it in one way")
    for record in records:
        for name in record.labels:
            if name not in order:
                where = locate_in_lists(spec, [record.path]).get(record.path, record.path)
                hint = nearest(name, order)
                raise DataError(f"{printable(where)}: the grade {name!r} is {why}{hint}")
    if absent := [name for name in order if name not in classes]:
        raise DataError(
            f"{given}: no training image is {join_names(absent)}; leave it out, or add some"
        )
    return order


def _unlike_validation(
    index: DatasetIndex,
    spec: DatasetSpec,
    train: Sequence[ImageRecord],
    val: Sequence[ImageRecord],
    *,
    compare: bool,
) -> list[ImageRecord]:
    """Images without a label that are neither copies of validation images nor of their groups."""
    others, held_out = index.unlabelled, len(val)
    if others and spec.group is not None:
        # training images too, so that an expression need not match the others
        groups = groups_of_records([*val, *others, *train], index, spec.group)
        validating = {*groups[:held_out]} - {""}
        own = groups[held_out : held_out + len(others)]
        pairs = zip(others, own, strict=True)
        others = [record for record, group in pairs if group not in validating]
    if others and compare:
        copies = copies_of([one.path for one in val], [one.path for one in others])
        others = [record for record in others if record.path not in copies]
    return others


def with_target_kind(spec: DatasetSpec) -> DatasetSpec:
    """`spec` that reads the columns `target` as numbers or as classes, unless it says which."""
    if not spec.target or spec.captions or spec.target in (spec.numbers, (spec.label_column,)):
        return spec
    texts = text_targets(spec)
    if texts and len(spec.target) == 1:
        return dataclasses.replace(spec, label_column=spec.target[0])
    return dataclasses.replace(spec, labels=False, texts=tuple(texts))


def open_eval_split(
    data: str | DatasetSpec,
    *,
    split: str,
    classes: Sequence[str],
    held_out: HeldOutSplit | None = None,
    unshared_classes: Collection[str] = (),
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Open one split for evaluation; labels are indices into `classes`; returns samples and notes.

    Images of `unshared_classes`, in NFC, which not all models have, are left out with a note.
    """
    spec = DatasetSpec(data) if isinstance(data, str) else data
    index = read_source(dataclasses.replace(spec, split=split))
    classes = () if spec.numbers else classes
    candidates: tuple[str, ...] = (*VAL_NAMES, TEST) if split == "val" else (split,)
    if spec.captions and split == "train":
        candidates = ("train", "")
    name = next((name for name in candidates if name in index.splits), None)
    match = None
    if held_out is not None and split == "val" and name in (None, TEST):
        match = held_out.find([record.path for record in index.train], index.root)
        name = None if match.paths else name
    use_held_out = name is None
    available = index.locations.keys() - {""}
    if name is None and (split != "val" or available - {"train", "test"}):
        others = available - {"train"} if spec.captions else available
        single = "all images in one split"
        if spec.captions or index.split_kind == "folder":
            single = "one list of all images" if spec.captions else "class folders only"
        names = join_names(index.locations) if others else single
        hint = "" if available or spec.captions else "; leave the split out for held-out images"
        raise DataError(
            f"{index.locations.get('') or index.root}: no {split} "
            f"{index.split_kind}; it has {names}{hint}"
        )
    name = name or ("train" if "train" in index.splits else "")
    notes = [*index.notes]
    records: Sequence[ImageRecord] = index.splits[name]
    if use_held_out:
        taken = f"took all {len(records):,} images"
        if match is not None:
            taken = match.describe(len(records))
            rest = len(records) - len(match.paths)
            if rest and 0 < len(match.paths) < match.recorded:
                taken += f"; not measured: {plural(rest, 'other image')} of these data"
            records = [one for one in records if one.path in match.paths] or records
        notes = [f"no validation {index.split_kind}: {taken}", *notes]
    elif name != split:
        notes.append(f"measured on {name}" + ("/" if index.split_kind == "folder" else ""))
    location = index.locations[name]
    if unshared_classes:
        records, left_out = _without_classes(records, unshared_classes, location)
        notes += left_out
    shared = tuple(one for one in classes if _normalised(one) not in unshared_classes)
    below: list[ImageRecord] = []
    if spec.nested:
        records, below = _below_known_nodes(records, shared)
    records, more = _relabel(records, shared, index, location, owner="the model")
    if not records and not below:
        raise DataError(f"{location}: no images; {LAYOUT}")
    samples = _samples(records, tuple(classes), index, spec)
    if below:
        names = join_names(dict.fromkeys(one.labels[0] for one in below))
        images = plural(len(below), "image")
        more.append(f"{images} of classes that the model lacks count in its tree only: {names}")
        samples += tuple(Sample(one.path, NO_LABEL, node=one.labels[0]) for one in below)
    return samples, tuple(notes + more)


def _below_known_nodes(
    records: Sequence[ImageRecord], classes: Sequence[str]
) -> tuple[list[ImageRecord], list[ImageRecord]]:
    """The records, with plain names as paths; and those of other classes in the same tree."""
    tree, known = ClassTree(classes), {*map(_normalised, classes)}
    last = by_last_name(classes)
    found: tuple[list[ImageRecord], list[ImageRecord]] = [], []
    for record in records:
        name = record.labels[0]
        path = name if _normalised(name) in known else last.get(name, name)
        is_new = _normalised(path) not in known and bool(tree.known(path))
        found[is_new].append(record._replace(labels=(path,)))
    return found


def _without_classes(
    records: Sequence[ImageRecord], classes: Collection[str], location: str
) -> tuple[list[ImageRecord], list[str]]:
    """The records of other classes, and a note if there are some of `classes`."""
    unshared = {*classes}
    others = [one for one in records if unshared.isdisjoint(map(_normalised, one.labels))]
    if len(others) == len(records):
        return others, []
    names = dict.fromkeys(name for one in records for name in one.labels)
    listed = join_names(name for name in names if _normalised(name) in unshared)
    if not others:
        raise DataError(
            f"{location}: only images of classes that one of the models does not have ({listed}); "
            "give images of classes that all have"
        )
    images = plural(len(records) - len(others), "image")
    return others, [f"{images} left out, of classes that only some models have: {listed}"]


def text_targets(spec: DatasetSpec) -> dict[str, bool]:
    """The columns of `spec.target` of a list that have texts, which are classes, and whether all
    are paths."""
    spec = dataclasses.replace(spec, labels=False, captions=False, label_column=None)
    if source_of(spec.data, numbers=spec.numbers) != "list":
        read_source(spec)  # refuses it
    return text_columns(spec)


def locate_in_lists(spec: DatasetSpec, paths: Collection[str]) -> dict[str, str]:
    """Image path -> `LIST, line N`, for the images that a list names."""
    if source_of(spec.data, captions=spec.captions, numbers=spec.numbers) != "list":
        return {}
    return lines_of(spec if spec.label_list is None else _unlabelled_source(spec), paths)


def align_classes(names: Iterable[str], classes: Sequence[str]) -> dict[str, str]:
    """`names` -> those of `classes`, equal after Unicode normalisation (NFC); without others."""
    known = {_normalised(name): name for name in classes} | {name: name for name in classes}
    found = {name: known.get(name, known.get(_normalised(name))) for name in names}
    return {name: target for name, target in found.items() if target is not None}


def _normalised(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _relabel(
    records: Sequence[ImageRecord],
    classes: Sequence[str],
    index: DatasetIndex,
    location: str,
    *,
    owner: str,
) -> tuple[list[ImageRecord], list[str]]:
    """`records` with the class names in `classes`, and notes for the user."""
    names = dict.fromkeys(label for record in records for label in record.labels)
    targets = align_classes(names, classes)
    notes = [
        f"{location}/{printable(name)} is class {target!a}, in other Unicode"
        for name, target in targets.items()
        if target != name
    ]
    if unknown := [name for name in names if name not in targets]:
        remedy = f"rename or remove {'the folders' if index.split_kind == 'folder' else 'them'}"
        raise DataError(
            f"{location} has classes that {owner} does not have: {join_names(unknown)}"
            f"{nearest(unknown[0], classes)}; {remedy}"
        )
    if any(name != target for name, target in targets.items()):
        records = [r._replace(labels=tuple(targets[name] for name in r.labels)) for r in records]
    images = _by_class(records, classes)
    if missing := [printable(name) for name, paths in images.items() if not paths]:
        notes.append(f"{location} has no images of class {join_names(missing)}")
    return [*records], notes


def _leakage_notes(
    train: Sequence[ImageRecord], val: Sequence[ImageRecord], root: Path
) -> list[str]:
    """A note about images that are in both splits."""
    train_paths = {record.path for record in train}
    shared = [record.path for record in val if record.path in train_paths]
    if shared and len(shared) == len(val):
        raise DataError(
            f"all {plural(len(shared), 'validation or test image')} are training images too; give "
            "others, or leave them out and we hold some out"
        )
    names = join_names([relative(path, root) for path in shared], 3)
    images = plural(len(shared), "image")
    return [f"{images} in training and in validation or test (leak): {names}"] if shared else []


def _by_class(records: Iterable[ImageRecord], classes: Sequence[str]) -> ImagesByClass:
    """The images of each class; a multi-label image is in each of its classes."""
    images: ImagesByClass = {name: [] for name in classes}
    for record in records:
        for label in record.labels:
            images[label].append(record.path)
    return images


def _by_labels(records: Iterable[ImageRecord]) -> ImagesByClass:
    """The images by their full set of labels."""
    images: ImagesByClass = {}
    for record in records:
        images.setdefault(" | ".join(sorted(record.labels)), []).append(record.path)
    return images


def _samples(
    records: Sequence[ImageRecord],
    classes: Sequence[str],
    index: DatasetIndex,
    spec: DatasetSpec,
    *,
    weighted: bool = False,
) -> tuple[Sample, ...]:
    """Samples in order of class and name; multi-label and captioned ones in order of name.

    The order does not depend on the source, so the same images give the same training. Only those
    that are `weighted`, the training images, have the weights of their column.
    """
    class_index = {name: number for number, name in enumerate(classes)}
    if spec.captions:
        return tuple(
            Sample(r.path, class_index[r.labels[0]] if classes else NO_LABEL, r.captions)
            for r in sorted(
                records,
                key=lambda r: relative(r.path, index.root) if is_inside(r.path) else r.path,
            )
        )
    target_numbers = _target_numbers(index, spec)
    ordered = sorted(
        (
            NO_LABEL if index.multilabel or not record.labels else class_index[record.labels[0]],
            relative(record.path, index.root).split("/"),
            position,
        )
        for position, record in enumerate(records)
    )
    return tuple(
        Sample(
            records[position].path,
            label,
            labels=tuple(sorted(class_index[name] for name in records[position].labels))
            if index.multilabel
            else (),
            numbers=target_numbers(records[position]),
            weight=_weight(records[position], spec) if weighted else 1.0,
        )
        for label, _, position in ordered
    )


def _weight(record: ImageRecord, spec: DatasetSpec) -> float:
    """The weight of an image; 1 without `spec.weight_column`."""
    if spec.weight_column is None or not record.cells:
        return 1.0
    cell = record.cells[spec.columns.index(spec.weight_column)]
    try:
        weight = float(cell)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        where = printable(locate_in_lists(spec, [record.path]).get(record.path, record.path))
        found = f"{spec.weight_column} is {cell!r}" if cell else f"no {spec.weight_column}"
        raise DataError(f"{where}: {found}; expected a number of 0 or more")
    return weight


def _target_classes(index: DatasetIndex) -> tuple[tuple[str, ...], ...]:
    """The classes of each target that training images have."""
    used = [{*column} for column in zip(*(one.numbers for one in index.train), strict=True)]
    return tuple(
        tuple(text for place, text in enumerate(texts) if place in used[target])
        for target, texts in enumerate(index.target_classes)
    )


def _target_numbers(
    index: DatasetIndex, spec: DatasetSpec
) -> Callable[[ImageRecord], tuple[float, ...]]:
    """Returns the numbers of a record, those of texts as indices into `spec.choices`."""
    places = [
        {texts.index(text): float(classes.index(name)) for text, name in found.items()}
        for texts, classes in zip(index.target_classes, spec.choices, strict=False)
        for found in [align_classes(texts, classes)]
    ]

    def numbers(record: ImageRecord) -> tuple[float, ...]:
        found = list(record.numbers)
        for target, value in enumerate(record.numbers):
            if not places or not spec.choices[target] or math.isnan(value):
                continue
            if value not in places[target]:
                text = index.target_classes[target][int(value)]
                where = locate_in_lists(spec, [record.path]).get(record.path, record.path)
                raise DataError(
                    f"{printable(where)}: {printable(spec.numbers[target])} is {text!r}, which no "
                    f"training image is{nearest(text, spec.choices[target])}; correct it, or add "
                    "such images"
                )
            found[target] = places[target][int(value)]
        return tuple(found)

    return numbers


def list_images(inputs: Iterable[str], *, notes: list[str] | None = None) -> list[str]:
    """The images to predict, in the order of the inputs.

    A folder stands for all images under it; an image list (.csv, .jsonl...), shards and an `hf:`
    dataset for the images they hold; the name of a built-in dataset, unless a file has that name,
    for its validation images. A missing file or one that is no image stays in the result, so that
    its error is reported in its place.
    """
    images: list[str] = []
    notes = [] if notes is None else notes
    for name in inputs:
        is_there = os.path.lexists(name)
        is_glob = glob.has_magic(name) and not is_there
        paths = sorted(glob.glob(name, recursive=True)) if is_glob else [name]
        if not paths:
            raise DataError(f"{name}: matches no file; correct the pattern")
        if name in builtin_datasets.DATASETS and not is_there:
            paths = [str(builtin_datasets.DATASETS[name]() / "val")]
        found = [image for path in paths for image in _expand(path, notes)]
        # `**` matches folders and the files in them: keep one of each.
        images += {os.path.normpath(path): path for path in found}.values() if is_glob else found
    return images


def _expand(path: str, notes: list[str]) -> list[str]:
    """The images of a folder, a list, shards or a dataset of the hub; else the path itself."""
    source = named_source(path)
    if os.path.isdir(path):
        # images of unsupported formats are listed too, so that each gets its error
        walker = FolderWalker(path, suffixes=IMAGE_SUFFIXES | UNSUPPORTED_SUFFIXES)
        if images := walker.images(path):
            more = walker.notes()
        elif files := shards_in_folder(path):
            images, more = list_shard_images(files, path)
        else:
            raise DataError(f"{path}: no images in this folder{walker.other_files(path)}")
    elif source == "list" and os.path.isfile(path):
        return images_in(path, notes)
    elif source in ("", "list"):
        return [path]
    elif source == "hub":
        index = read_source(DatasetSpec(path, labels=False, all_splits=True))
        images = [record.path for records in index.splits.values() for record in records]
        more = index.notes
    else:
        images, more = list_shard_images(shard_files(path), path)
    notes += [f"{printable(path)}: {note}" for note in more]
    return images

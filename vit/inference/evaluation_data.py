"""Images and labels of an evaluation: read as in the training, and those that it held out."""

import dataclasses
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.config.stored_config import has_stored_config, run_folder_of, stored_config
from vit.data.dataset_types import Sample
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.list_files import is_list
from vit.data.sources.open_dataset import open_eval_split, read_source
from vit.data.sources.scene_groups import read_groups
from vit.data.sources.split_file import read_split
from vit.errors import ConfigError, VitError
from vit.inference.predictor import PathLike, Predictor, source_run
from vit.tasks.task import Task, get_task
from vit.text import Notify, ignore, plural, printable
from vit.weights.saved_model import LoadedRun


def source_of(model: PathLike | LoadedRun, predictor: Predictor) -> PathLike | LoadedRun | None:
    """What was trained: `model`, or the run that an exported file comes from, if it is here."""
    return source_run(predictor) if predictor.exported else model


def load_samples(
    task: Task,
    model: PathLike | LoadedRun | None,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Notify,
    unshared_classes: Collection[str] = (),
    *,
    label_settings: Mapping[str, Any] | None = None,
) -> tuple[Sample, ...]:
    """The images of a split for the evaluation of a network of `task` with `classes`.

    If the training of `model` held out images of the same data, only those; all where it is None.
    Of `unshared_classes`, in NFC, none. `label_settings`, fields of `spec`, replace those of the
    training.
    """
    run = run_folder_of(model) if isinstance(model, str | os.PathLike) else None
    spec = evaluated_spec(task, model, spec, classes, notify)
    spec = dataclasses.replace(spec, **(label_settings or {}))
    samples, notes = open_eval_split(
        spec,
        split=str(spec.split),
        classes=task.label_names(spec, classes),
        held_out=None if run is None else read_split(run),
        unshared_classes=unshared_classes,
    )
    for note in notes:
        notify(note)
    task.check_samples(samples, spec.data)
    if run is not None and spec.split == "val" and (seen := count_trained_on(run, samples)):
        notify(
            f"note: {printable(run)} was trained on {seen:,} of these "
            f"{plural(len(samples), 'image')}, so the numbers are too good for new ones; give "
            "images that it has not seen"
        )
    return samples


def evaluated_spec(
    task: Task,
    model: PathLike | LoadedRun | None,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Notify = ignore,
) -> DatasetSpec:
    """What `load_samples` reads, with the settings of the training of `model`, a run folder."""
    run = run_folder_of(model) if isinstance(model, str | os.PathLike) else None
    spec = with_training_settings(task.eval_spec(spec, classes), run, notify)
    return dataclasses.replace(spec, split=spec.split or "val")


def with_training_settings(
    spec: DatasetSpec, run: Path | None, notify: Notify = ignore
) -> DatasetSpec:
    """`spec` with the dataset settings of the training in run folder `run` where it has none.

    The image folder, whether images may lie outside of it, groups, and lists that people edit are
    for the same data only, also a copy; `notify` is called with a note about those not taken.
    """
    if run is None or not has_stored_config(run):
        return spec
    changed_lists: list[str] = []
    data = stored_config(run, changed_lists.append).data
    split, own = read_split(run), os.path.realpath(spec.data) == os.path.realpath(data.data)
    own = own or (split is not None and split.lies_in(Path(spec.data)))
    stored = DatasetSpec.from_config(data, labels=spec.labels)
    files = ("exclude", "corrections", "label_list")
    columns: tuple[str, ...] = ("image_column", "label_column", "caption_column")
    numbers = () if spec.labels or spec.captions else spec.target or stored.target
    usable = columns if own or is_list(spec.data, numbers) else ()
    if own:
        for note in changed_lists:
            notify(note)
        named_paths = ("images", "taxonomy", *files)
        lists = [name for name in named_paths if os.path.exists(getattr(stored, name) or "")]
        usable = (*columns, *lists, "allow_outside", "group", "groups")
        stored = dataclasses.replace(stored, groups=read_groups(run))
    chosen = {name: getattr(spec, name) or getattr(stored, name) for name in usable}
    found = dataclasses.replace(spec, **chosen, target=numbers or spec.target)
    named = own or Path(spec.data).name == Path(data.data).name  # lists of other data are of no use
    columns = () if Path(spec.data).is_dir() else columns
    missing = [
        f"{'labels' if name == 'label_list' else name}={printable(value)}"
        for name in ("group", *(files if named else ()), *columns, *(["images"] * own))
        if (value := getattr(stored, name)) is not None and getattr(found, name) is None
    ]
    if missing:
        why = f"{printable(spec.data)} is not its data; if it should be, give it again"
        if own:  # an earlier version did not store where they are
            why = "the files are not found; start in the folder in which it was trained"
        notify(
            f"note: {printable(run)} was trained with {', '.join(missing)} on "
            f"{printable(data.data)}, not applied: {why}"
        )
    return found


def count_trained_on(run: Path, samples: Sequence[Sample]) -> int:
    """How many of `samples` the training of `run` learned from, if it held out its own images.

    Its data are read again if images of `samples` are in their folder; 0 if they are gone.
    """
    record = read_split(run)
    if record is None:
        return 0
    held_out = {os.path.realpath(record.root / name) for name in record.val}
    paths = {os.path.realpath(sample.path) for sample in samples}
    inside = os.path.join(os.path.realpath(record.root), "")
    if not any(path.startswith(inside) for path in paths - held_out):
        return 0
    try:
        config = stored_config(run)
        index = read_source(get_task(config.training.task).dataset_spec(config))
    except VitError:
        return 0
    learned = {one.path for one in index.train}
    match = record.find(learned, index.root)
    if record.val and not match.paths:  # other images are there now
        return 0
    return len(paths & {os.path.realpath(path) for path in learned - match.paths})


def column_cells(spec: DatasetSpec, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """The cells of columns of a list, by column and by the path of the image."""
    found: dict[str, dict[str, str]] = {}
    if columns and is_list(spec.data, spec.numbers):
        index = read_source(dataclasses.replace(spec, columns=tuple(columns)))
        records = [*itertools.chain.from_iterable(index.splits.values())]
        cells = zip(*(record.cells for record in records), strict=True)
        for column, values in zip(columns, cells, strict=True):
            named = zip(records, values, strict=True)
            found[column] = {record.path: value for record, value in named}
    else:
        for column in columns:
            index = read_source(dataclasses.replace(spec, group=column))
            records = [*itertools.chain.from_iterable(index.splits.values())]
            if index.has_groups:
                found[column] = {record.path: record.group for record in records}
    for column in columns:
        if not any(found.get(column, {}).values()):
            raise ConfigError(
                f"slice={column}: {spec.data} has no such column, or "
                "nothing in it; name one of a list (.csv, .jsonl, .xlsx) or table"
            )
    return found

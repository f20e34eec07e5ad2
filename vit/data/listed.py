"""From what a source holds to samples: classes by name, and validation pictures where it has none.

(Of the sources that are not folders.)
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from vit.data.classes import VAL_NAMES, Pictures, check_classes, labelled, matched
from vit.data.containers import relative
from vit.data.folders import count, some
from vit.data.oddities import count_notes, equal_notes, name_notes
from vit.data.samples import Item, Listed, Sample, Splits
from vit.errors import DataError, printable

LAYOUT = "expected a split train, or none at all"


def splits_of(
    listed: Listed,
    data: str,
    *,
    val_share: float,
    seed: int,
    hold_out: Callable[..., tuple[Pictures, Pictures]],
) -> Splits:
    """What is trained on, and what is validated on."""
    splits, notes = listed.splits, list(listed.notes)
    first = "train" if "train" in splits else ""
    if first not in splits:
        raise DataError(f"{printable(data)} has {some(list(splits))} but no train; {LAYOUT}")
    if listed.several:
        raise DataError(f"{printable(data)}: pictures with several classes (--task multilabel)")
    train = _by_class(splits[first])
    check_classes(train, Path(data))
    val_name = next((name for name in VAL_NAMES if name in splits), None)
    if val_name is None:
        train, val = hold_out(train, val_share=val_share, seed=seed, root=listed.root)
        held = count(sum(map(len, val.values())), "picture")
        notes.append(f"no validation split: held out {held}, {val_share:.0%} of each class")
    else:
        read = _by_class(splits[val_name])
        val, more = matched(read, tuple(train), where=listed.where[val_name], owner="train")
        notes += more
        if val_name == "test":
            notes.append("no split val: validates on test, so keep other pictures for the end")
    if not any(val.values()):
        raise DataError(f"{printable(data)}: no pictures left to validate on; add some")
    classes = tuple(train)
    notes += name_notes(classes) + count_notes(train) + equal_notes(train, val, str(listed.root))
    return Splits(
        classes=classes,
        train=labelled(train, classes),
        val=labelled(val, classes),
        notes=tuple(notes),
        made=val_name is None,
        root=listed.root,
    )


def labelled_listed(
    listed: Listed, data: str, split: str, classes: Sequence[str], held_out: Collection[str]
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """One split for evaluation."""
    splits, notes = listed.splits, list(listed.notes)
    wanted = VAL_NAMES if split == "val" else (split,)
    name = next((name for name in wanted if name in splits), None)
    if name is None and (split != "val" or splits.keys() - {"train", ""}):
        there = some(list(filter(None, splits))) or "no splits"
        raise DataError(f"{printable(data)}: no split {printable(split)}; it has {there}")
    items = splits[name] if name else splits.get("train", splits.get("", []))
    if name is None:
        names = set(held_out)
        kept = [item for item in items if relative(item.path, listed.root) in names]
        what = f"the {count(len(kept), 'picture')} that training held out" if kept else "all"
        notes.append(f"no validation split: took {what}")
        items = kept or items
    found, more = matched(
        _by_class(items), tuple(classes), where=printable(data), owner="the model"
    )
    return labelled(found, tuple(classes)), tuple(notes + more)


def _by_class(items: Sequence[Item]) -> Pictures:
    found: Pictures = {}
    for item in sorted(items, key=lambda item: item.labels):
        found.setdefault(item.labels[0], []).append(item.path)
    return found

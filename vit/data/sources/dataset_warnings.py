"""Warnings about a dataset before training: class names, class counts, identical files."""

import contextlib
import hashlib
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from vit.class_tree import ancestors, last_name, parent
from vit.data.dataset_types import ImagesByClass
from vit.data.image_archives import content_digest, open_binary, relative
from vit.data.sources.split_file import file_digests, image_bytes
from vit.errors import BadImage
from vit.text import is_unicode, join_names, nearest_names, plural, printable

IMBALANCE = 10
"""Ratio of the largest class to the smallest one from which on there is a note."""
FEW_IMAGES = 10
"""Images a class below which there is a note."""
MAX_COMPARED = 50_000
"""Images up to which identical files are searched for."""
MAX_RARE = 100
"""Rare classes whose names are compared with those of frequent ones."""
TAIL_BYTES = 4096
SIMILARITY = 0.8
"""Ratio of `nearest_names` from which on the name of a rare class may be a typo of another."""


def class_problems(
    classes: Sequence[str], counts: Mapping[str, int], total: int | None = None
) -> list[tuple[str, str]]:
    """Kinds and texts of what looks wrong about class names and numbers of training images; of the
    nodes of a tree too."""
    nodes = Counter[str]()
    for name in classes:
        for node in ancestors(name):
            nodes[node] += counts.get(name, 0)
    by_form: dict[str, list[str]] = defaultdict(list)
    by_case: dict[str, list[str]] = defaultdict(list)
    for name in nodes:
        form = unicodedata.normalize("NFC", name)
        by_form[form].append(name)
        by_case[" ".join(form.casefold().split())].append(name)
    same = {form: names for form, names in by_form.items() if len(names) > 1}
    advice = "give them one name if they are one class"
    found = [
        (
            "class_names",
            f"classes {', '.join(map(ascii, names))} look the same, equal in normalised Unicode "
            f"({printable(form)}); {advice}",
        )
        for form, names in same.items()
    ]
    found += [
        (
            "similar_names",
            f"classes {', '.join(map(repr, names))} differ only in case or spaces; {advice}",
        )
        for names in by_case.values()
        if len(names) > 1 and names not in same.values()
    ]
    for rare, frequent in misspelt_names(nodes):
        images = plural(nodes[rare], "image")
        text = f"class {rare!r}, {images}, may be a typo of {frequent!r}, {nodes[frequent]:,}"
        found.append(("similar_names", text))
    if len(counts) < 2:
        return found
    total = sum(counts.values()) if total is None else total
    few = sorted((number, name) for name, number in counts.items() if number < FEW_IMAGES)
    if total < FEW_IMAGES * len(counts):
        text = f"only {plural(total, 'training image')} for {len(counts)} classes: very few"
        found.append(("few_pictures", text))
    elif few:
        names = join_names([f"{printable(name)} {number}" for number, name in few])
        text = f"classes of fewer than {FEW_IMAGES} training images, very few: {names}"
        found.append(("few_pictures", text))
    least, most = min(counts, key=lambda c: counts[c]), max(counts, key=lambda c: counts[c])
    if counts[most] >= IMBALANCE * counts[least]:
        text = (
            f"imbalanced classes: {printable(least)} has the fewest, "
            f"{plural(counts[least], 'image')}; {printable(most)} has {counts[most]:,}"
        )
        found.append(("imbalance", text))
    return found


def misspelt_names(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of a rare class and a frequent one whose name is nearly the same, perhaps a typo.

    Names with digits are left out: those of a series differ in one. Of the rare classes only the
    MAX_RARE with the fewest images are compared.
    """
    words = {name: n for name, n in counts.items() if n and not re.search(r"\d", name)}
    rare = sorted((n, name) for name, n in words.items() if n < FEW_IMAGES)[:MAX_RARE]
    found = []
    for number, name in rare:
        others = {
            last_name(other): other
            for other, n in words.items()
            if n >= IMBALANCE * number
            and abs(len(other) - len(name)) <= 1
            and other.casefold() != name.casefold()
            and parent(other) == parent(name)
        }
        near = nearest_names(last_name(name), others, cutoff=SIMILARITY)[:1]
        found += [(name, others[other]) for other in near]
    return found


def undecodable_error(classes: Sequence[str]) -> str:
    """Why classes with such a name cannot be learned; empty without one."""
    names = [name for name in classes if not is_unicode(name)]
    if not names:
        return ""
    return (
        f"{plural(len(names), 'class', 'classes')} with a name that is not UTF-8, which other "
        f"libraries cannot store ({join_names(names)}); rename the folder, or correct the list"
    )


def equal_notes(
    train: ImagesByClass, val: ImagesByClass, root: str, identical: Sequence[Sequence[str]] | None
) -> list[str]:
    """Notes about `identical` files in both splits, or in more than one class."""
    if identical is None:
        what = "identical files, and images of one scene,"
        return [f"{what} were not searched for: more than {MAX_COMPARED:,} images"]
    origins = {path: ("train", name) for name, paths in train.items() for path in paths}
    origins |= {path: ("val", name) for name, paths in val.items() for path in paths}
    leaks: list[str] = []
    class_conflicts: list[str] = []
    for group in identical:
        first, other, kinds = compare_origins(group, origins)
        if not kinds:
            continue
        pair = " = ".join(printable(relative(path, Path(root))) for path in (first, other))
        if "split" in kinds:
            leaks.append(pair)
        if "class" in kinds:
            class_conflicts.append(pair)
    notes = []
    if leaks:
        images = plural(len(leaks), "image")
        notes.append(
            f"{images} in training and in validation or test (leak): {join_names(leaks, 3)}; the "
            "scores are too good: delete one of each pair (vit check lists all)"
        )
    if class_conflicts:
        images = plural(len(class_conflicts), "image")
        notes.append(
            f"{images} in more than one class: {join_names(class_conflicts, 3)}; keep the right "
            "one (vit check lists all)"
        )
    return notes


Key = TypeVar("Key")


def compare_origins(
    group: Sequence[Key], origins: Mapping[Key, tuple[str, object]]
) -> tuple[Key, Key, set[str]]:
    """The first of identical images, the one whose origin differs most from it, and what differs in
    the group: `split`, `class`, both or neither."""
    first = group[0]
    fields = ("split", "class")
    kinds = {
        name for at, name in enumerate(fields) if len({origins[image][at] for image in group}) > 1
    }
    split, label = origins[first]
    by_difference = sorted(
        group[1:], key=lambda image: (origins[image][0] == split, origins[image][1] == label)
    )
    return first, by_difference[0], kinds


def copies_of(paths: Iterable[str], among: Iterable[str]) -> set[str]:
    """Those files of `among` that have the bytes of one of `paths`; unreadable ones have not."""
    own = {*file_digests(paths).values()} - {None}
    sizes = {digest.partition(":")[0] for digest in own if digest}
    return {path for path, digest in file_digests(among, sizes).items() if digest in own}


def equal_files(paths: Iterable[str]) -> list[list[str]]:
    """Groups of files with identical bytes; unreadable files are left out."""
    groups = [list(paths)]
    for key in (image_bytes, _tail_digest, content_digest):  # each reads more of fewer files
        groups = [part for group in groups for part in _group_by(group, key)]
    return groups


def _group_by(paths: list[str], key: Callable[[str], object]) -> list[list[str]]:
    groups: dict[object, list[str]] = defaultdict(list)
    for path in paths:
        with contextlib.suppress(OSError, BadImage):  # reported when its header is checked
            groups[key(path)].append(path)
    return [group for group in groups.values() if len(group) > 1]


def _tail_digest(path: str) -> bytes:
    with open_binary(path) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        return hashlib.blake2b(file.read(TAIL_BYTES)).digest()

"""Group leakage: images of one group, such as a patient, in training and in another split."""

from collections import defaultdict
from itertools import zip_longest

from vit.data.archives import relative
from vit.data.checks.check_listing import DatasetListing, ListedImage
from vit.data.checks.problems import SHOWN, Problem
from vit.data.sources.train_val_split import find_groups, group_notes
from vit.text import plural, printable


def find_group_leakage(listing: DatasetListing, group: str | None) -> list[Problem]:
    """Report groups that training shares with another split, and the number of groups.

    Args:
        group: Column of the groups, or a regular expression over paths; None for no groups.
    """
    if group is None:
        return []
    images = listing.images
    groups = (
        [one.group for one in images]
        if listing.grouped
        else find_groups(
            [relative(one.path, listing.root) for one in images], group, listing.columns
        )
    )
    found: dict[str, dict[str, list[ListedImage]]] = {
        split: defaultdict(list) for split in listing.splits
    }
    for one, name in zip(images, groups, strict=True):
        if name:
            found[one.split][name].append(one)
    notes = group_notes(groups, group, column=listing.grouped)
    problems = [Problem("source", note) for note in notes]
    train = found.pop(listing.train_split, {})
    for split, members in found.items():
        kind = "group_leak" if split == listing.val_split else "group_in_test"
        for name in sorted(train.keys() & members.keys()):
            here, there = train[name], members[name]
            words = (
                f"group {printable(name)} ({printable(group)}) has {plural(len(here), 'image')} "
                f"in {listing.train_split} and {len(there):,} in {split}"
            )
            in_turn = [one for both in zip_longest(here, there) for one in both if one]
            shown = tuple(one.path for one in in_turn[:SHOWN])
            number = len(in_turn) if len(in_turn) > SHOWN else 0
            problems.append(Problem(kind, words, shown, number))
    return problems

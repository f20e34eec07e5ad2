"""Turns equal and nearly equal images into problems: leaks, two labels, copies."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from vit.data.checks.check_listing import Listed
from vit.data.checks.image_stats import Facts
from vit.data.checks.near_duplicates import near_pairs
from vit.data.checks.problems import Problem
from vit.data.sources.dataset_warnings import compare_origins
from vit.errors import printable

Where = Mapping[str, tuple[str, object]]
"""Split and classes of each image."""


def copies(
    images: Sequence[Listed],
    facts: Mapping[str, Facts],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> list[Problem]:
    """Files that are the same, and images that nearly are.

    Args:
        images: All of them; those without facts count for nothing.
        facts: By path.
        workers: Threads that compare; one a core if None.
        progress: Told how many of how many images were compared with all others.
    """
    where = {one.path: (one.split, one.labels) for one in images if one.path in facts}
    groups: dict[bytes, list[str]] = defaultdict(list)
    for path in where:
        groups[facts[path].digest].append(path)
    problems = [
        problem for group in groups.values() if len(group) > 1 for problem in equal(group, where)
    ]
    members = [group for group in groups.values() if not facts[group[0]].blank]
    firsts = [facts[group[0]] for group in members]
    done = 0

    def further(number: int) -> None:
        nonlocal done
        done += number
        progress(done, len(firsts))

    pairs = near_pairs(
        [one.look for one in firsts],
        [min(one.width, one.height) for one in firsts],
        workers=workers,
        progress=further,
    )
    for pair in pairs:
        nearly = product(members[pair.first], members[pair.second])
        problems.append(near(nearly, where, f"correlation {pair.score:.3f}"))
    return problems


def equal(group: Sequence[str], where: Where) -> list[Problem]:
    """The problems of files of the same content."""
    first, other, kinds = compare_origins(group, where)
    paths = (first, other, *(path for path in group[1:] if path != other))
    labels = classes(paths, where)
    problems = []
    if "split" in kinds:
        splits = " and ".join(dict.fromkeys(where[path][0] for path in group))
        problems.append(Problem("leak", f"the same file in {splits}", paths, labels=labels))
    if "class" in kinds:
        problems.append(Problem("two_labels", "the same file in two classes", paths, labels=labels))
    return problems or [Problem("duplicate", "the same file", paths, labels=labels)]


def near(pairs: Iterable[tuple[str, str]], where: Where, how: str) -> Problem:
    """The problem of two images that are nearly the same.

    Args:
        pairs: Files of the first and of the second, of which there may be copies.
        where: Of all of them.
        how: By what they were found.
    """
    order = ("split", "class")
    worst = max(pairs, key=lambda pair: [name in compare_origins(pair, where)[2] for name in order])
    _, _, kinds = compare_origins(worst, where)
    labels = classes(worst, where)
    if "split" in kinds:
        splits = " and ".join(where[path][0] for path in worst)
        two = ", under two labels" if "class" in kinds else ""
        words = f"nearly the same image in {splits}{two} ({how})"
        return Problem("near_leak", words, worst, labels=labels)
    if "class" in kinds:
        words = f"nearly the same image in two classes ({how})"
        return Problem("near_two_labels", words, worst, labels=labels)
    return Problem("near_duplicate", f"nearly the same image ({how})", worst, labels=labels)


def classes(paths: Sequence[str], where: Where) -> tuple[str, ...]:
    """Names of the classes of each image."""
    found = []
    for path in paths:
        labels = where[path][1]
        assert isinstance(labels, tuple)
        found.append(", ".join(map(printable, labels)))
    return tuple(found)

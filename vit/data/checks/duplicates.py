"""Exact and near duplicates as problems: leaks between splits, contradicting labels, copies."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from vit.data.checks.check_listing import ListedImage
from vit.data.checks.image_stats import ImageStats
from vit.data.checks.near_duplicates import find_near_duplicates
from vit.data.checks.problems import Problem
from vit.data.sources.dataset_warnings import compare_origins
from vit.text import printable

SplitAndClasses = Mapping[str, tuple[str, tuple[str, ...]]]
"""Split and classes by path."""
IN_CLASSES = "in two classes"


def find_duplicates(
    images: Sequence[ListedImage],
    stats: Mapping[str, ImageStats],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> list[Problem]:
    """Find files of equal content, and images that are nearly the same.

    Args:
        workers: Threads that compare; one per core if None.
    """
    locations = {one.path: (one.split, one.labels) for one in images if one.path in stats}
    groups: dict[bytes, list[str]] = defaultdict(list)
    for path in locations:
        groups[stats[path].digest].append(path)
    copies = [group for group in groups.values() if len(group) > 1]
    problems = [one for group in copies for one in exact_duplicate_problems(group, locations)]
    members = [group for group in groups.values() if not stats[group[0]].blank]
    firsts = [stats[group[0]] for group in members]
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress(done, len(firsts))

    pairs = find_near_duplicates(
        [one.thumbnail for one in firsts],
        [min(one.width, one.height) for one in firsts],
        workers=workers,
        progress=advance,
    )
    distinct = [_one_per_origin(group, locations) for group in members]
    for pair in pairs:
        candidates = product(distinct[pair.first], distinct[pair.second])
        problems.append(
            near_duplicate_problem(candidates, locations, f"correlation {pair.score:.3f}")
        )
    return problems


def _one_per_origin(group: Sequence[str], locations: SplitAndClasses) -> list[str]:
    """The first file of each split and classes: copies may be thousands, their pairs millions."""
    firsts: dict[tuple[str, tuple[str, ...]], str] = {}
    for path in group:
        firsts.setdefault(locations[path], path)
    return [*firsts.values()]


def exact_duplicate_problems(group: Sequence[str], locations: SplitAndClasses) -> list[Problem]:
    """The problems of files with the same content."""
    first, other, kinds = compare_origins(group, locations)
    paths = (first, other, *(path for path in group[1:] if path != other))
    labels = class_names(paths, locations)
    problems = []
    if "split" in kinds:
        splits = " and ".join(dict.fromkeys(locations[path][0] for path in group))
        problems.append(Problem("leak", f"the same file in {splits}", paths, labels=labels))
    if "class" in kinds:
        where = _differing_labels(paths, locations)
        remedy = "keep it in one" if where == IN_CLASSES else "give it the same"
        detail = f"the same file {where}; {remedy}"
        problems.append(Problem("two_labels", detail, paths, labels=labels))
    return problems or [Problem("duplicate", "the same file", paths, labels=labels)]


def near_duplicate_problem(
    pairs: Iterable[tuple[str, str]], locations: SplitAndClasses, how: str
) -> Problem:
    """The problem of two images that are nearly the same.

    Args:
        pairs: Files of the first and of the second image; each may have exact copies.
    """
    order = ("split", "class")
    worst = max(
        pairs, key=lambda pair: [name in compare_origins(pair, locations)[2] for name in order]
    )
    _, _, kinds = compare_origins(worst, locations)
    labels = class_names(worst, locations)
    kind, where = "near_duplicate", ""
    if "split" in kinds:
        splits = " and ".join(locations[path][0] for path in worst)
        where = f" in {splits}" + (", under two labels" if "class" in kinds else "")
        kind = "near_leak"
    elif "class" in kinds:
        kind, where = "near_two_labels", f" {_differing_labels(worst, locations)}"
    return Problem(kind, f"nearly the same image{where} ({how})", worst, labels=labels)


def _differing_labels(paths: Sequence[str], locations: SplitAndClasses) -> str:
    """How images that are the same differ; where each may have several classes, in their labels."""
    single = all(len(locations[path][1]) == 1 for path in paths)
    return IN_CLASSES if single else "with different labels"


def class_names(paths: Sequence[str], locations: SplitAndClasses) -> tuple[str, ...]:
    """The names of the classes of each image."""
    return tuple(", ".join(map(printable, locations[path][1])) for path in paths)

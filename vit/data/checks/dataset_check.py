"""Looks at every image of a data set and says what is wrong with it."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.data.checks.check_cache import Store
from vit.data.checks.check_listing import Listing, list_images
from vit.data.checks.check_workers import SECONDS, look_at_all
from vit.data.checks.duplicates import copies
from vit.data.checks.group_leakage import shared_groups
from vit.data.checks.image_stats import Facts, Verdict
from vit.data.checks.problems import KINDS, Problem, bad_kind, shared
from vit.data.image_io import Stamp, stamp_of
from vit.data.sources.dataset_spec import VAL_NAMES, DatasetSpec
from vit.data.sources.dataset_warnings import (
    few_note,
    imbalance_note,
    lookalike_names,
    similar_names,
)
from vit.errors import printable
from vit.text import plural

KEPT = 512
"""Verdicts that are written at a time."""
ASPECT = 4.0
"""Long side over short side from which on an image is odd."""
LARGE = 30_000_000
"""Pixels from which on decoding takes long."""
SMALL = 4
"""Times below the median of short sides from which on an image is tiny."""

Progress = Callable[[str, int, int], object]
"""Told what is done with images, how many of them are done, and how many there are."""


@dataclass
class Report:
    """What was found.

    Args:
        listing: The images.
        facts: Of those that can be read, by path.
        problems: The worst first.
    """

    listing: Listing
    facts: dict[str, Facts]
    problems: list[Problem]

    @property
    def failed(self) -> bool:
        """Whether training would stop."""
        return any(problem.severity == "error" for problem in self.problems)

    def severities(self) -> dict[str, int]:
        """Problems of each severity."""
        found = Counter(problem.severity for problem in self.problems)
        return {name: found[name] for name in ("error", "warning", "note")}

    def kinds(self) -> dict[str, int]:
        """Problems of each kind, the worst first."""
        found = Counter(problem.kind for problem in self.problems)
        return {kind: found[kind] for kind in KINDS if kind in found}

    def lines(self, most: int) -> list[str]:
        """For a terminal: each kind with its number, and the first problems."""
        listing, found = self.listing, self.severities()
        splits = ", ".join(
            f"{printable(split)} {sum(listing.counts(split).values()):,}"
            for split in listing.splits
        )
        head = f"{plural(len(listing.images), 'image')} ({splits or 'none'})"
        lines = [f"{head} in {len(listing.classes):,} classes"]
        if not self.problems:
            return [*lines, "no problems found"]
        words = ", ".join(plural(number, name) for name, number in found.items())
        lines += [words, ""]
        for kind, number in self.kinds().items():
            first = next(problem for problem in self.problems if problem.kind == kind)
            lines.append(f"{KINDS[kind]:<8} {kind:<16} {number:>6,}  {first.told(listing.root)}")
        shown = [problem for problem in self.problems if problem.severity == "error"][:most]
        rest = found["error"] - len(shown)
        lines += ["", "training stops over:"] if shown else []
        lines += [f"  {problem.told(listing.root)}" for problem in shown]
        return lines + ([f"  and {rest:,} more (--json FILE has all)"] if rest else [])

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit check`."""
        listing = self.listing
        return {
            "images": len(listing.images),
            "classes": len(listing.classes),
            "severities": self.severities(),
            "kinds": self.kinds(),
            "splits": {
                split: sum(one.split == split for one in listing.images) for split in listing.splits
            },
            "class_counts": {split: listing.counts(split) for split in listing.splits},
            "statistics": numbers([*self.facts.values()]),
            "problems": [problem.to_dict() for problem in self.problems],
        }


def inspect(
    data: str | DatasetSpec,
    *,
    workers: int | None = None,
    cache: bool = True,
    cache_folder: Path | None = None,
    seconds: float = SECONDS,
    progress: Progress = lambda _what, _done, _total: None,
    notify: Callable[[str], object] = lambda _: None,
) -> Report:
    """Everything that can be said of `data` without a network.

    Args:
        data: As for `list_images`.
        workers: Processes that look at images, and threads that compare; one a core if None.
        cache: Whether verdicts of earlier days are used, and kept.
        cache_folder: Where; in the user's cache if None.
        seconds: After which an image is given up.
        progress: Told how far it is.
        say: Told why verdicts cannot be kept.

    Raises:
        DataError: As in `list_images`, or its group matches no path.
        ConfigError: A setting is not for this kind of source.
    """
    listing = list_images(data)
    listing.problems += shared_groups(
        listing, data.group if isinstance(data, DatasetSpec) else None
    )
    paths = list(dict.fromkeys(one.path for one in listing.images))
    with closing(Store(listing.root, cache_folder)) if cache else nullcontext() as store:
        if store is not None and store.note is not None:
            notify(store.note)
        verdicts = look(paths, store, workers, seconds, progress)
    facts = {path: found for path, found in verdicts.items() if isinstance(found, Facts)}
    problems = [*listing.problems, *broken(listing, verdicts), *counted(listing)]
    problems += copies(
        listing.images,
        facts,
        workers=workers,
        progress=lambda done, total: progress("compared", done, total),
    )
    problems += odd(facts)
    return Report(listing, facts, in_order(listing.with_lines(problems)))


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """The worst kinds first."""
    place = {kind: at for at, kind in enumerate(KINDS)}
    return sorted(problems, key=lambda problem: place[problem.kind])


def look(
    paths: Sequence[str],
    store: Store | None,
    workers: int | None,
    seconds: float,
    progress: Progress,
) -> dict[str, Verdict]:
    """The verdict on each of `paths`, in their order."""
    stamps: dict[str, Stamp] = {}
    found: dict[str, Verdict] = {}
    if store is not None:
        stamps = {path: stamp_of(path) for path in paths}
        found.update(store.known(stamps))
        store.forget(store.paths() - stamps.keys())
    missing = [path for path in paths if path not in found]
    fresh: list[tuple[str, Stamp, Facts]] = []
    try:
        for place, verdict in look_at_all(missing, workers=workers, seconds=seconds):
            path = missing[place]
            found[path] = verdict
            if store is not None and isinstance(verdict, Facts):
                fresh.append((path, stamps[path], verdict))
            if store is not None and len(fresh) == KEPT:
                store.keep(fresh)
                fresh = []
            progress("read", len(found), len(paths))
    finally:  # of an interrupted look, all that was seen is kept
        if store is not None:
            store.keep(fresh)
    return {path: found[path] for path in paths}


def broken(listing: Listing, verdicts: Mapping[str, Verdict]) -> list[Problem]:
    """Images that cannot be read, and classes and splits of which none can."""
    problems = [
        Problem(bad_kind(verdict), verdict, (path,))
        for path, verdict in verdicts.items()
        if isinstance(verdict, str)
    ]
    val = next((name for name in VAL_NAMES if name in listing.splits), listing.learned)
    for split in dict.fromkeys((listing.learned, val)):
        images = [one for one in listing.images if one.split == split]
        if split != listing.learned:
            groups = {"validation": images}
        else:
            groups = {
                f"class {printable(name)} in {split}": [one for one in images if name in one.labels]
                for name in listing.classes
            }
        problems += [
            Problem("broken_class", f"no image of {name} can be read")
            for name, members in groups.items()
            if members and all(isinstance(verdicts[one.path], str) for one in members)
        ]
    return problems


def counted(listing: Listing) -> list[Problem]:
    """What names and numbers of the classes say."""
    problems = []
    for form, names in lookalike_names(listing.classes).items():
        written = ", ".join(map(ascii, names))
        words = f"classes {written} look the same, as {printable(form)}"
        problems.append(Problem("class_names", words))
    for names in similar_names(listing.classes):
        written = ", ".join(map(ascii, names))
        words = f"classes {written} differ only in case or spaces"
        problems.append(Problem("similar_names", words))
    counts = {name: number for name, number in listing.counts(listing.learned).items() if number}
    if len(counts) > 1:
        notes = {"few_pictures": few_note(counts), "imbalance": imbalance_note(counts)}
        problems += [Problem(kind, note) for kind, note in notes.items() if note]
    return problems


def odd(facts: Mapping[str, Facts]) -> list[Problem]:
    """Images that are unlike the others, by kind; what all of them are is no problem."""
    total = len(facts)
    if not total:
        return []
    median = statistics.median(min(one.width, one.height) for one in facts.values())
    tests: dict[str, tuple[Callable[[Facts], bool], str]] = {
        "tiny": (
            lambda one: min(one.width, one.height) * SMALL < median,
            f"have a short side below a quarter of the median ({median:g} pixels)",
        ),
        "huge": (lambda one: one.width * one.height > LARGE, f"have more than {LARGE:,} pixels"),
        "extreme_aspect": (
            lambda one: max(one.width, one.height) > ASPECT * min(one.width, one.height),
            f"are more than {ASPECT:g} times as long as wide, or the other way",
        ),
        "turned": (lambda one: one.turned, "are turned by an EXIF tag, which is obeyed"),
        "alpha": (lambda one: one.alpha, "may be transparent: they are laid over white"),
        "blank": (lambda one: one.blank, "are blank: all pixels are alike"),
    }
    problems = []
    for kind, (test, words) in tests.items():
        problems += shared(kind, [path for path, one in facts.items() if test(one)], total, words)
    others = [path for path, one in facts.items() if one.mode not in ("RGB", "L", "RGBA", "P")]
    modes = ", ".join(sorted({facts[path].mode for path in others}))
    problems += shared("mode", others, total, f"are stored in {modes}, and read as RGB")
    grey = [path for path, one in facts.items() if one.grey]
    if len(grey) < total:
        problems += shared("greyscale", grey, total, "have no colours")
    return problems


def numbers(facts: Sequence[Facts]) -> dict[str, Any]:
    """Sizes, formats and shares of the images that can be read."""
    if not facts:
        return {"readable": 0}

    def spread(values: list[int]) -> dict[str, float]:
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    def share(name: str) -> float:
        return sum(bool(getattr(one, name)) for one in facts) / len(facts)

    return {
        "readable": len(facts),
        "width": spread([one.width for one in facts]),
        "height": spread([one.height for one in facts]),
        "formats": dict(Counter(one.format for one in facts).most_common()),
        "modes": dict(Counter(one.mode for one in facts).most_common()),
        "exif_rotated": share("turned"),
        "alpha": share("alpha"),
        "greyscale": share("grey"),
        "blank": share("blank"),
    }

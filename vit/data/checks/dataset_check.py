"""Dataset check of `vit check`: reads every image and reports the problems of the dataset."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.checks.check_listing import ALL, DatasetListing, ListedImage, list_dataset
from vit.data.checks.duplicates import find_duplicates
from vit.data.checks.image_stats import (
    TIMEOUT_SECONDS,
    ImageStats,
    StatsCache,
    StatsOrReason,
    compute_all_stats,
)
from vit.data.checks.number_outliers import number_problems, summarize_targets
from vit.data.checks.scenes import connected_scenes
from vit.data.dataset_types import ImageGroups, ImageRecord
from vit.data.image_archives import relative
from vit.data.image_io import Fingerprint, file_fingerprint
from vit.data.intensity_range import common_range
from vit.data.sources.dataset_problem import (
    KINDS,
    SHOWN,
    SKIPPABLE,
    Problem,
    problem_kind,
    shared_property,
)
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.dataset_warnings import class_problems, undecodable_error
from vit.data.sources.image_sources import find_sources, shared_notes
from vit.data.sources.scene_groups import FoundGroups, groups_table
from vit.data.sources.train_val_split import find_groups, group_notes, name_copies
from vit.text import Notify, join_names, plural, printable

CACHE_BATCH = 512
"""Statistics that are written to the cache at a time."""
EXTREME_ASPECT = 4.0
"""Ratio of long to short side above which an image is reported."""
MAX_SOURCE_NOTES = 8
"""Notes about reading the source that a terminal shows."""
HUGE_PIXELS = 30_000_000
"""Pixels above which decoding is slow."""
DARK_LEVEL = 64 / 255
"""Share of the range below which 99.9 % of the pixels of a dark image lie."""
BRIGHT_LEVEL = 200 / 255
"""Share of the range above which 99 % of the pixels of an over-exposed image lie."""
FLAT_CONTRAST = 50 / 255
"""Share of the range that 99.8 % of the pixels of a flat image use."""
TINY_FACTOR = 4
"""An image is tiny if its short side is this many times below the median."""

StageProgress = Callable[[str, int, int], object]
"""Called with the stage, the number of images done, and their total."""


@dataclass
class CheckReport:
    """The result of a dataset check."""

    listing: DatasetListing
    stats: dict[str, ImageStats]
    """Statistics of the readable images, by path."""
    problems: list[Problem]
    """The most severe first."""
    groups: FoundGroups | None = None
    """Scenes and sources; None where a column or an expression names the groups."""
    neighbour_agreement: float | None = None
    """Share of images whose nearest neighbours by features have the same label, if measured."""

    @property
    def failed(self) -> bool:
        """Whether training would raise an error."""
        return any(problem.severity == "error" for problem in self.problems)

    def severities(self) -> dict[str, int]:
        """Number of problems per severity."""
        found = Counter(problem.severity for problem in self.problems)
        return {name: found[name] for name in ("error", "warning", "note")}

    def kinds(self) -> dict[str, int]:
        """Number of problems per kind, the most severe first."""
        found = Counter(problem.kind for problem in self.problems)
        return {kind: found[kind] for kind in KINDS if kind in found}

    def groups_table(self) -> bytes:
        """All images with scene and source, as a CSV file to be edited; see `given_groups`."""
        assert self.groups is not None, "no column or expression names the groups"
        root = self.listing.root
        scenes = name_copies(self.groups.scenes, root)
        tables = scenes, self.groups.sources
        named = ({relative(path, root): one for path, one in table.items()} for table in tables)
        return groups_table(
            ImageGroups(*named), [relative(one.path, root) for one in self.listing.images]
        )

    def lines(self, limit: int, *, hint: bool = True) -> list[str]:
        """Lines for a terminal: the number of problems per kind, and the first `limit` errors."""
        listing, counts = self.listing, self.severities()
        splits = ", ".join(
            f"{printable(split)} {sum(one.split == split for one in listing.images):,}"
            for split in listing.splits
        )
        head = plural(len(listing.images), "image")
        if listing.splits != [ALL]:
            head += f" ({splits or 'none'})"
        captions = listing.spec is not None and listing.spec.captions
        classes = plural(len(listing.classes), "class", "classes")
        what = "with captions" if captions and not listing.classes else f"in {classes}"
        if listing.targets:
            what = "with numbers, and classes" if any(listing.choices) else "with numbers"
        lines = [f"{head} {what}", *map(target_line, summarize_targets(listing))]
        lines += [*map(channel_line, summarize_channels([*self.stats.values()]))]
        if self.groups is not None and (scenes := str(self.groups)):
            lines.append(scenes)
        if self.neighbour_agreement is not None:
            lines.append(
                f"the nearest images by features have the same label for "
                f"{self.neighbour_agreement:.1%}"
            )
        if not self.problems:
            return [*lines, "no problems found"]
        words = ", ".join(plural(number, name) for name, number in counts.items())
        lines += [words, ""]
        hidden = False
        for kind, number in self.kinds().items():
            # those of a source differ: what was left out, which columns are not used
            limit_of_kind = MAX_SOURCE_NOTES if kind == "source" else 1
            same = [one for one in self.problems if one.kind == kind][:limit_of_kind]
            hidden |= number > len(same) and KINDS[kind] != "error"
            start = f"{KINDS[kind]:<8} {kind:<16} {number:>6,}  "
            for problem in same:
                lines.append(start + problem.terminal_line(listing.root))
                start = " " * len(start)
        if hidden and hint:
            lines += ["", "the first of each kind; all: --html FILE (with thumbnails), --json FILE"]
        errors = [one for one in self.problems if one.severity == "error"]
        if errors:
            skippable = any(one.kind in SKIPPABLE for one in errors[:limit])
            advice = (
                "; --on-bad-image skip leaves out unreadable images and empty classes, not others"
            )
            lines += ["", f"vit train stops at these errors{advice if skippable else ''}:"]
        lines += [f"  {one.terminal_line(listing.root)}" for one in errors[:limit]]
        more = len(errors) - limit
        return lines + ([f"  and {more:,} more (--json FILE has all)"] if more > 0 else [])

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
            "statistics": summarize_stats([*self.stats.values()]),
            **({"targets": targets} if (targets := summarize_targets(listing)) else {}),
            **({} if self.groups is None else self.groups.to_dict()),
            "problems": [problem.to_dict() for problem in self.problems],
            **(
                {}
                if self.neighbour_agreement is None
                else {"neighbour_agreement": self.neighbour_agreement}
            ),
        }


def check_dataset(
    data: str | DatasetSpec,
    *,
    workers: int | None = None,
    cache: bool = True,
    cache_folder: Path | None = None,
    axes: str = "",
    timeout: float = TIMEOUT_SECONDS,
    progress: StageProgress = lambda _what, _done, _total: None,
    notify: Notify = lambda _: None,
) -> CheckReport:
    """Check a dataset without a model; statistics by other `axes` of TIFFs are not kept."""
    listing = list_dataset(data)
    listing.problems += find_group_leakage(
        listing, data.group if isinstance(data, DatasetSpec) else None
    )
    paths = list(dict.fromkeys(one.path for one in listing.images))
    cache = cache and not axes
    with closing(StatsCache(listing.root, cache_folder)) if cache else nullcontext() as store:
        if store is not None and store.note is not None:
            notify(store.note)
        results = load_or_compute_stats(paths, store, workers, timeout, progress, axes)
    stats = {path: found for path, found in results.items() if isinstance(found, ImageStats)}
    problems = [*listing.problems, *unreadable_images(listing, results)]
    if error := undecodable_error(listing.classes):
        problems.append(Problem("broken_class", error))
    train = [one for one in listing.images if one.split == listing.train_split]
    total = len(train) if any(len(one.labels) > 1 for one in train) else None
    counts = {x: number for x, number in listing.counts(listing.train_split).items() if number}
    found = class_problems(listing.classes, counts, total)
    problems += [Problem(kind, text) for kind, text in found]
    duplicates = find_duplicates(
        listing.images,
        stats,
        workers=workers,
        progress=lambda done, total: progress("compared", done, total),
    )
    groups = None
    if listing.spec is None or listing.spec.group is None:
        groups = listed_groups(listing, stats, duplicates.alike)
        problems += find_scene_leakage(listing, groups)
    problems += [*duplicates.problems, *unusual_images(stats), *number_problems(listing, stats)]
    return CheckReport(listing, stats, sort_by_severity(listing.with_lines(problems)), groups)


def listed_groups(
    listing: DatasetListing, stats: Mapping[str, ImageStats], alike: Sequence[Sequence[str]]
) -> FoundGroups:
    """The groups that a training finds: scenes, and of images with one class their sources."""
    origins = {path: one.origin for path, one in stats.items()}
    records = [ImageRecord(one.path, one.labels) for one in listing.images]
    single = all(len(one.labels) == 1 for one in records)
    sources = find_sources(records, listing.root, origins) if single else {}
    return FoundGroups(connected_scenes(alike, origins), sources)


def find_scene_leakage(listing: DatasetListing, groups: FoundGroups) -> list[Problem]:
    """Report scenes and sources that training shares with the validation images."""
    train, val = (
        [one.path for one in listing.images if one.split == split]
        for split in (listing.train_split, listing.val_split)
    )
    return [
        *(Problem("scene_leak", note) for note in groups.leak_notes(train, val)),
        *(Problem("source_leak", note) for note in shared_notes(train, val, groups.sources)),
    ]


def sort_by_severity(problems: Sequence[Problem]) -> list[Problem]:
    """Sort by kind, the most severe first."""
    rank = {kind: number for number, kind in enumerate(KINDS)}
    return sorted(problems, key=lambda problem: rank[problem.kind])


def load_or_compute_stats(
    paths: Sequence[str],
    cache: StatsCache | None,
    workers: int | None,
    timeout: float,
    progress: StageProgress,
    axes: str = "",
) -> dict[str, StatsOrReason]:
    """The statistics of each of `paths`, in their order; new ones are written to the cache."""
    fingerprints: dict[str, Fingerprint] = {}
    found: dict[str, StatsOrReason] = {}
    if cache is not None:
        fingerprints = {path: file_fingerprint(path) for path in paths}
        found.update(cache.read(fingerprints))
    missing = [path for path in paths if path not in found]
    unsaved: list[tuple[str, Fingerprint, ImageStats]] = []
    try:
        for at, result in compute_all_stats(missing, workers=workers, timeout=timeout, axes=axes):
            path = missing[at]
            found[path] = result
            if cache is not None and isinstance(result, ImageStats):
                unsaved.append((path, fingerprints[path], result))
            if cache is not None and len(unsaved) == CACHE_BATCH:
                cache.write(unsaved)
                unsaved = []
            progress("read", len(found), len(paths))
    finally:  # also if interrupted
        if cache is not None:
            cache.write(unsaved)
    return {path: found[path] for path in paths}


def unreadable_images(
    listing: DatasetListing, results: Mapping[str, StatsOrReason]
) -> list[Problem]:
    """Unreadable images, and classes and splits without any readable image."""
    problems = [
        Problem(problem_kind(result), result, (path,))
        for path, result in results.items()
        if isinstance(result, str)
    ]
    for split in dict.fromkeys((listing.train_split, listing.val_split or listing.train_split)):
        images = [one for one in listing.images if one.split == split]
        if split != listing.train_split:
            groups = {"validation": images}
        else:
            by_class: dict[str, list[ListedImage]] = defaultdict(list)
            for one in images:
                for name in one.labels:
                    by_class[name].append(one)
            groups = {
                f"class {printable(name)} in {split}": by_class[name] for name in listing.classes
            }
        problems += [
            Problem("broken_class", f"no image of {name} can be read")
            for name, members in groups.items()
            if members and all(isinstance(results[one.path], str) for one in members)
        ]
    return problems


def unusual_images(stats: Mapping[str, ImageStats]) -> list[Problem]:
    """Images with unusual properties, by kind."""
    total = len(stats)
    if not total:
        return []
    median = statistics.median(min(one.width, one.height) for one in stats.values())
    modes = {one.mode for one in stats.values()} - {"RGB", "L", "RGBA", "P"}
    own = [path for path, one in stats.items() if one.channels]
    kinds = sorted({stats[path].mode for path in own})
    tests: dict[str, tuple[Callable[[ImageStats], bool], str]] = {
        "tiny": (
            lambda one: min(one.width, one.height) * TINY_FACTOR < median,
            f"have a short side below a quarter of the median ({median:g} pixels)",
        ),
        "huge": (
            lambda one: one.width * one.height > HUGE_PIXELS,
            f"have more than {HUGE_PIXELS:,} pixels",
        ),
        "extreme_aspect": (
            lambda one: max(one.width, one.height) > EXTREME_ASPECT * min(one.width, one.height),
            f"are more than {EXTREME_ASPECT:g} times as long as wide, or the other way",
        ),
        "frames": (
            lambda one: one.frames,
            "have several frames or pages, of which only the first is read",
        ),
        "turned": (lambda one: one.exif_rotated, "are rotated by an EXIF tag, which is applied"),
        "alpha": (lambda one: one.alpha, "may be transparent: composited over white"),
        "blank": (lambda one: one.blank, "are blank: all pixels are equal"),
        "mode": (
            lambda one: one.mode in modes and not one.channels,
            f"are stored in {', '.join(sorted(modes - {*kinds}))}, and read as RGB",
        ),
        "greyscale": (lambda one: one.grey, "have no colours"),
    }
    problems = shared_property(
        "mode", own, total, f"are stored in {', '.join(kinds)}, and read with all their channels"
    )
    found = {one.channels: path for path, one in stats.items()}
    if len(found) > 1:
        kinds = [plural(number, "channel") if number else "RGB" for number in sorted(found)]
        words = f"images of {' and '.join(kinds)}: training takes one kind"
        problems.append(
            Problem("channels", words, tuple(found[number] for number in sorted(found)))
        )
    for kind, (test, words) in tests.items():
        paths = [path for path, one in stats.items() if test(one)]
        if kind != "greyscale" or len(paths) < total:
            problems += shared_property(kind, paths, total, words)
    return problems + unusual_exposures(stats)


def unusual_exposures(stats: Mapping[str, ImageStats]) -> list[Problem]:
    """Deep images, and images without contrast, relative to the range of training."""
    deep = [path for path, one in stats.items() if one.deep and not one.channels]
    floating = {stats[path].levels.floating for path in deep}
    found = None
    if len(floating) == 1:
        ranges = [(stats[path].levels.lowest, stats[path].levels.highest) for path in deep]
        found = common_range(ranges, whole=not floating.pop())
    words = ""
    if found is not None:
        words = f"; training reads values from about {found[0]:g} to {found[1]:g} as black to white"
    dark, bright, flat = [], [], []
    for path, one in stats.items():
        limits = found if one.deep else (0.0, 255.0)
        if one.blank or one.channels or limits is None:
            continue
        low, levels = limits[0], one.levels
        width = limits[1] - low
        if levels.highest - low < DARK_LEVEL * width:
            dark.append(path)
        elif levels.shadow - low > BRIGHT_LEVEL * width:
            bright.append(path)
        elif levels.contrast < FLAT_CONTRAST * width:
            flat.append(path)
    properties = (
        ("deep", deep, f"have more than 8 bits per channel{words}"),
        ("dark", dark, f"are dark: 99.9 % of the pixels are below {DARK_LEVEL:.0%} of white"),
        (
            *("overexposed", bright),
            f"are over-exposed: 99 % of the pixels are above {BRIGHT_LEVEL:.0%} of white",
        ),
        (
            *("flat", flat),
            f"have no contrast: 99.8 % of the pixels are within {FLAT_CONTRAST:.0%} of the range",
        ),
    )
    return [
        problem
        for kind, paths, what in properties
        for problem in shared_property(kind, paths, len(stats), what)
    ]


def summarize_stats(stats: Sequence[ImageStats]) -> dict[str, Any]:
    """Sizes, formats and shares of the readable images."""
    if not stats:
        return {"readable": 0}

    def spread(values: list[int]) -> dict[str, float]:
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    def share(name: str) -> float:
        return sum(bool(getattr(one, name)) for one in stats) / len(stats)

    return {
        "readable": len(stats),
        "width": spread([one.width for one in stats]),
        "height": spread([one.height for one in stats]),
        "formats": dict(Counter(one.format for one in stats).most_common()),
        "modes": dict(Counter(one.mode for one in stats).most_common()),
        "exif_rotated": share("exif_rotated"),
        "alpha": share("alpha"),
        "greyscale": share("grey"),
        "blank": share("blank"),
        **({"channels": channels} if (channels := summarize_channels(stats)) else {}),
    }


def summarize_channels(stats: Sequence[ImageStats]) -> list[dict[str, Any]]:
    """Each channel of the images of more than 8-bit RGB and grey: its range as training measures
    it, and its mean; nothing if their numbers of channels differ."""
    levels = [one.levels for one in stats if one.levels.channels is not None]
    tables = [one.channels or [] for one in levels]
    if len({len(table) for table in tables}) != 1:
        return []
    named, rows = {tuple(one.names or ()) for one in levels}, list[dict[str, Any]]()
    names = named.pop() if len(named) == 1 else ()
    for number, channel in enumerate(np.array(tables).transpose(1, 2, 0)):
        lows, highs, means, least, most = channel.tolist()
        found = common_range([*zip(lows, highs, strict=True)], whole=not levels[0].floating)
        low, high = found or (min(least), max(most))
        name = names[number] if names else str(number)
        rows.append({"name": name, "low": low, "high": high, "mean": statistics.fmean(means)})
        rows[-1]["constant"] = min(least) == max(most)
    return rows


def channel_line(row: Mapping[str, Any]) -> str:
    """A row of `summarize_channels` for a terminal."""
    values = f"{row['low']:g} to {row['high']:g}, mean {row['mean']:g}"
    return f"channel {printable(row['name'])}: {values}{', constant' if row['constant'] else ''}"


def target_line(row: Mapping[str, Any]) -> str:
    """A row of `summarize_targets` for a terminal."""
    if classes := row.get("classes"):
        counts = join_names([f"{name} {count}" for name, count in classes.items()])
        return printable(
            f"{row['name']}: {row['count']:,} images in {len(classes)} classes, {counts}"
        )
    ends = f" from {row['min']:g} to {row['max']:g} {row['unit']}".rstrip() if row["count"] else ""
    middle = f", median {row['median']:g}" if row["count"] else ""
    return printable(f"{row['name']}: {plural(row['count'], 'number')}{ends}{middle}")


def find_group_leakage(listing: DatasetListing, group: str | None) -> list[Problem]:
    """Report groups that training shares with another split, and the number of groups."""
    if group is None:
        return []
    groups = [one.group for one in listing.images]
    if not listing.grouped:
        names = [relative(one.path, listing.root) for one in listing.images]
        groups = find_groups(names, group, listing.columns)
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one, name in zip(listing.images, groups, strict=True):
        members[one.split, name].append(one.path)
    notes = group_notes(groups, group, column=listing.grouped)
    problems = [Problem("source", note) for note in notes]
    for split, name in sorted(members.keys(), key=lambda key: (listing.splits.index(key[0]), key)):
        here, there = members.get((listing.train_split, name), []), members[split, name]
        if not name or not here or split == listing.train_split:
            continue
        words = (
            f"group {printable(name)} ({printable(group)}) has {plural(len(here), 'image')} "
            f"in {listing.train_split} and {len(there):,} in {split}"
        )
        in_turn = [path for both in zip_longest(here, there) for path in both if path]
        number = len(in_turn) if len(in_turn) > SHOWN else 0
        kind = "group_leak" if split == listing.val_split else "group_in_test"
        problems.append(Problem(kind, words, tuple(in_turn[:SHOWN]), number))
    return problems

"""HTML report of `vit check`: problems of a dataset with thumbnails, in one offline file."""

from collections.abc import Sequence

from vit.data.checks.dataset_check import CheckReport, summarize_stats
from vit.data.checks.problems import KINDS, Problem, display_name
from vit.evaluation.error_analysis import thumbnail
from vit.evaluation.html_page import Html, called, document, join, table, tag
from vit.evaluation.html_page import numbers as cells
from vit.evaluation.run_report import PRIVACY
from vit.text import percent, plural
from vit.version import __version__

MOST_SHOWN = 24
"""Problems of a kind that are shown."""
MOST_IMAGES = 4
"""Thumbnails of one problem."""
MOST_CLASSES = 200
NO_IMAGE = {"foreign_format", "ignored_file", "hidden", "empty_folder", "not_a_file", "link"}
"""Kinds whose names are not opened."""


def check_page(report: CheckReport) -> Html:
    """The whole page."""
    listing, found = report.listing, report.severities()
    tiles = {
        "images": f"{len(listing.images):,}",
        "classes": f"{len(listing.classes):,}",
        "errors": f"{found['error']:,}",
        "warnings": f"{found['warning']:,}",
        "notes": f"{found['note']:,}",
    }
    name = listing.root.resolve().name or str(listing.root)
    verdict = (
        "Training stops over the errors."
        if report.failed
        else "Training goes on; look at the warnings first."
        if found["warning"]
        else "Nothing stands in the way of training."
    )
    sections = [
        tag("h1", called(name)),
        tag("p", verdict),
        tag(
            "dl",
            *(tag("div", tag("dt", k), tag("dd", v)) for k, v in tiles.items()),
            class_="tiles",
        ),
        *(kind_section(report, kind) for kind in report.kinds()),
        class_section(report),
        statistics_section(report),
        tag("footer", f"Written by vit {__version__}. ", PRIVACY, class_="soft small"),
    ]
    return document(f"{name}: {plural(found['error'], 'error')}", *sections)


def kind_section(report: CheckReport, kind: str) -> Html:
    """Problems of one kind, the first ones with images."""
    problems = [problem for problem in report.problems if problem.kind == kind]
    title = f"{kind.replace('_', ' ')}: {plural(len(problems), KINDS[kind])}"
    shown = [problem_box(report, problem) for problem in problems[:MOST_SHOWN]]
    rest = len(problems) - len(shown)
    more = f"{rest:,} more are left out here: vit check --json has all." if rest else ""
    return tag("section", tag("h2", title), *shown, tag("p", more, class_="soft small"))


def problem_box(report: CheckReport, problem: Problem) -> Html:
    """One problem in words, with names and thumbnails."""
    figures = []
    for at, path in enumerate(problem.images[:MOST_IMAGES]):
        name = display_name(path, report.listing.root)
        label = problem.labels[at] if at < len(problem.labels) else ""
        read = path in report.stats and problem.kind not in NO_IMAGE
        image = thumbnail(path, name) if read else None
        caption = [called(name), *([tag("br"), tag("b", called(label))] if label else [])]
        figures.append(tag("figure", image or Html(""), tag("figcaption", *caption)))
    rest = max(problem.count, len(problem.images)) - len(figures)
    more = f" And {rest:,} more." if rest > 0 and figures else ""
    wall = [tag("div", *figures, class_="wall")] if figures else []
    return join(tag("p", called(problem.detail), more), *wall)


def class_section(report: CheckReport) -> Html:
    """Images of each class in each split."""
    listing = report.listing
    counts = {split: listing.counts(split) for split in listing.splits}
    head = [tag("th", "class"), *(tag("th", called(split), class_="n") for split in counts)]
    rows: list[list[Html]] = [
        [
            tag("th", called(name), class_="name"),
            *cells(*(f"{counts[split][name]:,}" for split in counts)),
        ]
        for name in listing.classes[:MOST_CLASSES]
    ]
    left = len(listing.classes) - len(rows)
    more = f"{left:,} more classes are left out here." if left else ""
    return tag("section", tag("h2", "Classes"), table(head, rows), tag("p", more))


def statistics_section(report: CheckReport) -> Html:
    """Sizes, formats and shares."""
    found = summarize_stats([*report.stats.values()])
    if not found["readable"]:
        return tag("section", tag("h2", "Images"), tag("p", "None can be read."))
    rows: Sequence[tuple[str, str]] = [
        *(
            (
                name,
                f"{found[name]['min']:,} to {found[name]['max']:,}, median "
                f"{found[name]['median']:,}",
            )
            for name in ("width", "height")
        ),
        *(
            (name, ", ".join(f"{key} {number:,}" for key, number in found[name].items()))
            for name in ("formats", "modes")
        ),
        *(
            (name.replace("_", " "), percent(found[name], 1))
            for name in ("exif_rotated", "alpha", "greyscale", "blank")
        ),
    ]
    lines = [[tag("th", name, class_="name"), tag("td", called(value))] for name, value in rows]
    return tag("section", tag("h2", "Images"), table([], lines))

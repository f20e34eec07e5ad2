"""Pages about images, each in one offline file: `vit check` and `vit suggest`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit.data.checks.dataset_check import CheckReport, summarize_stats
from vit.data.sources.dataset_problem import KINDS, Problem, display_name
from vit.data.sources.list_files import is_list
from vit.evaluation.html_page import read_thumbnail, render_page

MAX_PROBLEMS = 24
"""Problems of a kind that are shown."""
MAX_IMAGES = 4
"""Images of one problem that are shown."""
MAX_SCENES, MAX_SCENE_IMAGES = 24, 12
"""Scenes, the largest first, and images of each, that are shown."""
MAX_CLASSES = 200
WITHOUT_IMAGE = {"foreign_format", "ignored_file", "hidden", "empty_folder", "not_a_file", "link"}
"""Kinds of problems whose files are not opened."""


def check_page(report: CheckReport) -> str:
    """The problems of a dataset, with thumbnails."""
    listing = report.listing
    heading = listing.root.resolve().name or str(listing.root)
    if listing.spec is not None and is_list(listing.spec.data, listing.spec.numbers):
        heading = Path(listing.spec.data).name
    problems = {
        kind: [problem for problem in report.problems if problem.kind == kind]
        for kind in report.kinds()
    }
    return render_page(
        "check_report.html.j2",
        heading=heading,
        report=report,
        severities=report.severities(),
        kinds=[
            {
                "kind": kind,
                "severity": KINDS[kind],
                "count": len(found),
                "problems": [_problem(report, one) for one in found[:MAX_PROBLEMS]],
                "single": len(found) > 1
                and all(len(one.images) == 1 and one.count <= 1 for one in found),
            }
            for kind, found in problems.items()
        ],
        groups=None if report.groups is None else str(report.groups),
        scenes=_scenes(report),
        sources=[] if report.groups is None else Counter(report.groups.sources.values()),
        classes=listing.classes[:MAX_CLASSES],
        counts={split: listing.counts(split) for split in listing.splits},
        statistics=summarize_stats([*report.stats.values()]),
    )


def _scenes(report: CheckReport) -> list[dict[str, Any]]:
    """The largest scenes with their first images."""
    scenes = [] if report.groups is None else sorted(report.groups.scenes, key=len, reverse=True)
    return [
        {
            "count": len(scene),
            "images": [
                (display_name(path, report.listing.root), read_thumbnail(path))
                for path in scene[:MAX_SCENE_IMAGES]
            ],
        }
        for scene in scenes[:MAX_SCENES]
    ]


def _problem(report: CheckReport, problem: Problem) -> dict[str, Any]:
    readable = set() if problem.kind in WITHOUT_IMAGE else report.stats.keys()
    images = [
        {
            "name": display_name(path, report.listing.root),
            "label": problem.labels[index] if index < len(problem.labels) else "",
            "image": read_thumbnail(path) if path in readable else None,
        }
        for index, path in enumerate(problem.images[:MAX_IMAGES])
    ]
    count = max(problem.count, len(problem.images))
    return {
        "detail": problem.detail,
        "images": images,
        "left_out": count - len(images) if images else 0,
    }


MAX_SUGGESTED = 2000
SIDE = 160
"""Longer side of a thumbnail, in pixels."""


def suggestions_page(
    heading: str,
    summary: Sequence[str],
    suggested: Sequence[tuple[str, str, str, float | None]],
    failed: Sequence[tuple[str, str]] = (),
) -> str:
    """Images to label, as listed: name, path, likely class (may be empty) and margin of each."""
    shown = suggested[:MAX_SUGGESTED]
    return render_page(
        "suggestions_page.html.j2",
        heading=heading,
        summary=summary,
        images=[
            {"name": name, "image": read_thumbnail(path, SIDE), "likely": likely, "margin": margin}
            for name, path, likely, margin in shown
        ],
        total=len(suggested),
        failed=failed,
    )

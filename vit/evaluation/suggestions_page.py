"""The page of `vit suggest`: images to label with their file names, in one offline file."""

from collections.abc import Sequence

from vit.evaluation.html_page import read_thumbnail, render_page

MAX_IMAGES = 2000
SIDE = 160
"""Longer side of a thumbnail, in pixels."""


def suggestions_page(
    heading: str,
    summary: Sequence[str],
    suggested: Sequence[tuple[str, str, str, float | None]],
    failed: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole page.

    Args:
        suggested: Name, path, likely class (may be empty) and margin of each image, in the order
            of the list.
    """
    shown = suggested[:MAX_IMAGES]
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

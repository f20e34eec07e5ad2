"""The page of `vit compare`: the result in words, and images that only one network gets right."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from vit.evaluation.html_page import readable_thumbnails, render_page
from vit.evaluation.paired_comparison import PairedComparison

MAX_IMAGES = 24
"""Images of each direction that are shown."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """An image that one of two classifiers gets right.

    Args:
        path: Its file.
        label: Its class.
        right: Probability that the right one gives to its class.
        answer: Answer of the other one.
        wrong: Probability of that.
    """

    path: str
    label: str
    right: float
    answer: str
    wrong: float


def comparison_page(
    names: tuple[str, str],
    comparison: PairedComparison,
    only_a: Sequence[Flip],
    only_b: Sequence[Flip],
) -> str:
    """The whole page; `names` are those of A and B."""

    def shown(flips: Sequence[Flip]) -> list[tuple[Flip, object]]:
        order = sorted(flips, key=lambda flip: -flip.wrong)
        found = readable_thumbnails(range(len(order)), [flip.path for flip in order])
        return [(order[index], image) for index, image in islice(found, MAX_IMAGES)]

    return render_page(
        "comparison_page.html.j2",
        heading=f"{names[0]} and {names[1]}",
        names=names,
        result=comparison.to_dict(),
        sentence=comparison.sentence(),
        directions=[
            ("A", "B", len(only_a), shown(only_a)),
            ("B", "A", len(only_b), shown(only_b)),
        ],
    )

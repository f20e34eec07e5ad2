"""The page of `vit compare`: the result in words, and images on which the networks differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from vit.evaluation.html_page import readable_thumbnails, render_page
from vit.evaluation.paired_comparison import AllPairs, PairedComparison, letters

MAX_IMAGES = 24
"""Images that are shown, of each direction where two networks are compared."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """An image that one of two classifiers gets right."""

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


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """An image that some of several classifiers get right."""

    path: str
    label: str
    answers: Sequence[tuple[str, float]]
    right: Sequence[bool]

    def lines(self) -> list[tuple[str, str, float]]:
        """Letters, answer and highest probability of networks with equal answers; right ones first.

        The others are sorted by their probability.
        """
        places: dict[tuple[bool, str], list[int]] = {}
        for place, (answer, _) in enumerate(self.answers):
            places.setdefault((not self.right[place], answer), []).append(place)
        lines = [
            (wrong, -max(self.answers[place][1] for place in alike), letters(alike), answer)
            for (wrong, answer), alike in places.items()
        ]
        return [(who, answer, -share) for _, share, who, answer in sorted(lines)]


def all_pairs_page(
    names: Sequence[str], result: AllPairs, disagreements: Sequence[Disagreement]
) -> str:
    """The whole page of more than two runs; `names` are theirs.

    The images on which most runs contradict each other come first, then the surest mistakes.
    """

    def order(image: Disagreement) -> tuple[float, float]:
        wrong = [
            share for (_, share), right in zip(image.answers, image.right, strict=True) if not right
        ]
        return abs(len(wrong) - len(image.right) / 2), -max(wrong)

    ordered = sorted(disagreements, key=order)
    found = readable_thumbnails(range(len(ordered)), [image.path for image in ordered])
    return render_page(
        "all_pairs_page.html.j2",
        heading=f"{len(names)} runs",
        result=result.to_dict(names),
        sentence=result.sentence(),
        count=len(ordered),
        images=[(ordered[index], image) for index, image in islice(found, MAX_IMAGES)],
    )

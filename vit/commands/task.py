"""One prediction: a list of pictures, what answers, and what is made of each answer."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vit.commands.engines import Answers, block_of
from vit.commands.output import say
from vit.commands.teams import Alone
from vit.errors import ConfigError, printable
from vit.runtime.results import TOP_K, Layout, Prediction
from vit.runtime.sorting import Sorter, Way

if TYPE_CHECKING:
    from vit.inference.processes import Team


@dataclass(frozen=True)
class Task:
    """One list of pictures and what is to be done with it.

    Args:
        args: Of the command line.
        style: The format of the rows.
        engine: What computes.
        images: The whole list.
        predictor: What answers.
        team: This process among the others.
    """

    args: argparse.Namespace
    style: str
    engine: str
    images: list[str]
    predictor: Answers
    team: "Alone | Team" = field(default_factory=Alone)

    @property
    def top_k(self) -> int:
        """Classes in a row; none where the network has none.

        Raises:
            ConfigError: Something was asked for that needs classes, and there are none.
        """
        classes = self.predictor.classes
        for flag, remedy in (
            ("top_k", "leave it out, or ask for several captions with --beams and --n-best"),
            ("threshold", "leave it out"),
            ("sort_into", "leave it out"),
        ):
            value = getattr(self.args, flag)
            if value is not None and not classes:
                raise ConfigError(
                    f"{flag}={printable(value)}: this network writes captions and names no "
                    f"classes; {remedy}"
                )
        if self.several and self.args.sort_into is not None:
            raise ConfigError(
                f"sort_into={printable(self.args.sort_into)}: this network may name several "
                "classes of a picture, or none, so no folder is its own; leave it out"
            )
        return min(self.args.top_k or (len(classes) if self.several else TOP_K), len(classes))

    @property
    def several(self) -> bool:
        """Whether a picture may have several classes, or none, by thresholds of their own."""
        return getattr(self.predictor, "thresholds", None) is not None

    @property
    def block(self) -> int:
        """Pictures after which the list may be cut, and every digit stays."""
        return block_of(self.predictor)

    @property
    def layout(self) -> Layout:
        """What rows look like."""
        predictor = self.predictor
        return Layout(self.top_k, predictor.classes, self.images, predictor.n_best, self.several)

    def sorter(self) -> Sorter | None:
        """What puts pictures into folders, if anything does."""
        folder = self.args.sort_into
        way: Way = self.args.sort_with or "copy"
        if folder is None:
            return None
        return Sorter(folder, way, self.predictor.classes, self.images)

    def places(self) -> list[int]:
        """Numbers of the pictures of this process: the processes take blocks by turns."""
        size, number = self.block, len(self.images)
        starts = range(self.team.rank * size, number, self.team.processes * size)
        return [at for start in starts for at in range(start, min(start + size, number))]

    def answers(self, images: Sequence[str], first: int = 0) -> Iterator[Prediction]:
        """Of `images`, of which the first has the number `first` in the list."""
        more = {"threshold": self.args.threshold} if self.several else {}
        if self.args.explain is not None:
            from vit.inference.drawing import check_drawable, explained
            from vit.inference.predictor import Predictor

            assert isinstance(self.predictor, Predictor), "an exported network explains nothing"
            check_drawable(self.predictor)
            folder = self.args.explain
            found = explained(self.predictor, images, folder, top_k=self.top_k, say=note, **more)
        elif first and draws(self.args):
            found = self.predictor.stream(images, top_k=max(self.top_k, 1), first=first)
        else:
            found = self.predictor.stream(images, top_k=max(self.top_k, 1), **more)
        return (above(prediction, self.args.threshold) for prediction in found)


def note(line: str) -> None:
    """A line of the command on standard error."""
    say(f"vit predict: {line}")


def draws(args: argparse.Namespace) -> bool:
    """Whether words are drawn, by the number of the picture in the list."""
    return bool(getattr(args, "search.temperature", 0))


def above(prediction: Prediction, threshold: float | None) -> Prediction:
    """Without the classes that are less probable than `threshold`."""
    if threshold is None:
        return prediction
    named = tuple(pair for pair in prediction.predictions if pair[1] >= threshold)
    return replace(prediction, predictions=named)

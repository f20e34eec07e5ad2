"""Answers for a list of images, on their way to a terminal, a pipe, or files that are kept.

One prediction: a list of images, what answers, and what is made of each answer.
"""

import argparse
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vit.commands.backends import Answers, asked_for, block_of, width_of
from vit.commands.command_output import naming, notify, open_output
from vit.commands.command_progress import Progress, summary
from vit.commands.launcher import SingleProcess
from vit.commands.predict_output import Files, Keeper, Unfinished
from vit.errors import ConfigError, VitError, printable
from vit.output.prediction_results import FORMATS, TOP_K, Layout, Prediction, unended_note
from vit.output.resumable_output import Claim, differences, part
from vit.output.sort_into_folders import UNSURE, Sorter, Way
from vit.text import plural
from vit.training.stop_signals import Interruption

if TYPE_CHECKING:
    from vit.inference.process_group import ProcessGroup


@dataclass(frozen=True)
class Task:
    """One list of images and what is to be done with it.

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
    group: "SingleProcess | ProcessGroup" = field(default_factory=SingleProcess)

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
        if self.multilabel and self.args.sort_into is not None:
            raise ConfigError(
                f"sort_into={printable(self.args.sort_into)}: this network may name several "
                "classes of an image, or none, so no folder is its own; leave it out"
            )
        return min(self.args.top_k or (len(classes) if self.multilabel else TOP_K), len(classes))

    @property
    def multilabel(self) -> bool:
        """Whether an image may have several classes, or none, by thresholds of their own."""
        return getattr(self.predictor, "thresholds", None) is not None

    @property
    def block(self) -> int:
        """Images after which the list may be cut, and every digit stays."""
        return block_of(self.predictor)

    @property
    def layout(self) -> Layout:
        """What rows look like."""
        predictor = self.predictor
        return Layout(self.top_k, predictor.classes, self.images, predictor.n_best, self.multilabel)

    def sorter(self) -> Sorter | None:
        """What puts images into folders, if anything does."""
        folder = self.args.sort_into
        way: Way = self.args.sort_with or "copy"
        if folder is None:
            return None
        return Sorter(folder, way, self.predictor.classes, self.images)

    def places(self) -> list[int]:
        """Numbers of the images of this process: the processes take blocks by turns."""
        size, number = self.block, len(self.images)
        starts = range(self.group.rank * size, number, self.group.processes * size)
        return [at for start in starts for at in range(start, min(start + size, number))]

    def answers(self, images: Sequence[str], first: int = 0) -> Iterator[Prediction]:
        """Of `images`, of which the first has the number `first` in the list."""
        more = {"threshold": self.args.threshold} if self.multilabel else {}
        if self.args.explain is not None:
            from vit.inference.attribution_plot import check_explainable, draw_explanations
            from vit.inference.predictor import Predictor

            assert isinstance(self.predictor, Predictor), "an exported network explains nothing"
            check_explainable(self.predictor)
            folder = self.args.explain
            found = draw_explanations(
                self.predictor, images, folder, top_k=self.top_k, notify=note, **more
            )
        elif first and draws(self.args):
            found = self.predictor.stream(images, top_k=max(self.top_k, 1), first=first)
        else:
            found = self.predictor.stream(images, top_k=max(self.top_k, 1), **more)
        return (above(prediction, self.args.threshold) for prediction in found)


def note(line: str) -> None:
    """A line of the command on standard error."""
    notify(f"vit predict: {line}")


def draws(args: argparse.Namespace) -> bool:
    """Whether words are drawn, by the number of the image in the list."""
    return bool(getattr(args, "search.temperature", 0))


def above(prediction: Prediction, threshold: float | None) -> Prediction:
    """Without the classes that are less probable than `threshold`."""
    if threshold is None:
        return prediction
    named = tuple(pair for pair in prediction.predictions if pair[1] >= threshold)
    return replace(prediction, predictions=named)


ECHO_SECONDS = 3.0  # a launcher hands its own signal on to processes that have it already


def in_blocks(predictions: Iterable[Prediction], size: int) -> Iterator[list[Prediction]]:
    """Lists of `size`, the last one shorter."""
    source = iter(predictions)
    while block := list(itertools.islice(source, size)):
        yield block


def count_in(tally: dict[str, int], prediction: Prediction, *, twice: bool = False) -> None:
    """Add one answer to the totals; `twice` if its image is in a second folder too."""
    unsure = prediction.error is None and not prediction.predictions
    unended = sum(not caption.ended for caption in prediction.captions)
    for name, number in (
        ("failed", int(prediction.error is not None)),
        ("captions", len(prediction.captions)),
        ("unended", unended),
        ("unsure", int(unsure)),
        ("twice", int(twice)),
    ):
        tally[name] = tally.get(name, 0) + number


def shown(task: Task) -> int:
    """Write rows to standard output, to a device, or with drawings; returns the failures.

    Raises:
        VitError: They cannot be written.
    """
    path = None if task.args.out == "-" else task.args.out
    header, line = FORMATS[task.style](task.layout)
    sorter, tally = task.sorter(), dict[str, int]()
    answers = task.answers(task.images)  # what cannot be drawn is refused before a line is shown
    on_terminal = path is None and sys.stdout.isatty()
    with (
        Progress(len(task.images), results_on_terminal=on_terminal) as progress,
        open_output(path) as out,
    ):
        out.write(header)
        for place, prediction in enumerate(answers):
            twice = sorter is not None and sorter(place, prediction)
            out.write(line(prediction))
            count_in(tally, prediction, twice=twice)
            progress.update(1)
        seconds = progress.seconds()
    return report(task, tally, done=len(task.images), seconds=seconds)


def kept(task: Task) -> int:
    """Write rows and vectors into files that survive a kill; returns the failures.

    Raises:
        Unfinished: The work ended before its end; the message says what is kept.
        VitError: It cannot begin.
    """
    args, group = task.args, task.group
    files = Files.of(args, group.processes)
    asked = asked_for(args, task.engine, task.predictor, task.images) | {
        "format": task.style,
        "top_k": task.top_k,
        "processes": group.processes,
    }
    require_alike(group.all_gather(asked))
    with Claim([*files.ends.values()]) as claim:
        found = group.run_on_main(
            lambda: files.begin(claim, asked, resume=args.resume, overwrite=args.overwrite)
        )
        group.run_on_main(lambda: claim.take(shared=True))  # or the others could not yet
        group.run_on_all(lambda: claim.take(shared=True))
        try:
            outcomes = answered(task, files, asked, found=found)
        except VitError as error:
            if group.rank:
                raise
            words = "; ".join(some for some in (str(error), how_to_go_on(files)) if some)
            raise Unfinished(words, error.exit_code) from None
    if group.rank:
        return 0
    totals: Counter[str] = Counter()
    for tally, _, _ in outcomes:
        totals.update(tally)
    done, seconds = sum(new for _, new, _ in outcomes), max(took for *_, took in outcomes)
    return report(task, totals, done=done, seconds=seconds)


def answered(
    task: Task, files: Files, asked: dict[str, Any], *, found: bool
) -> list[tuple[dict[str, int], int, float]]:
    """Of each process what `write` says, when all is finished; `found` is what to go on with."""
    group = task.group
    dim = 0 if files.embeddings is None else width_of(task.predictor)
    keeper = group.run_on_all(lambda: keeper_of(task, files, asked, dim))
    rows = sum(group.all_gather(keeper.rows))
    if found and group.rank == 0:
        name = printable(part(files.out))
        going_on = f"going on after {rows:,} of {plural(len(task.images), 'image')} in {name}"
        nothing = f"{name} held nothing whole: beginning at the first image"
        notify(f"vit predict: {going_on if rows else nothing}")
    outcomes = group.all_gather(group.run_on_all(lambda: write(task, files, keeper)))
    group.run_on_main(lambda: finish(files, task.images, dim))
    return outcomes


def how_to_go_on(files: Files) -> str:
    """What is kept, and with which flag the same command continues."""
    words = files.kept()
    return f"{words}: go on with --resume" if files.left else words


def finish(files: Files, images: Sequence[str], dim: int) -> None:
    with naming(os.fspath(files.out)):
        files.finish(images, dim)


def require_alike(asked: Sequence[dict[str, Any]]) -> None:
    """Refuse processes that would answer otherwise than one would alone.

    Raises:
        ConfigError: They differ in a setting, a file or a library.
    """
    for rank, one in enumerate(asked):
        if other := differences(asked[0], one):
            raise ConfigError(f"process {rank} differs from process 0: {'; '.join(other)}")


def keeper_of(task: Task, files: Files, asked: dict[str, Any], dim: int) -> Keeper:
    """What writes the rows of this process.

    Raises:
        VitError: It cannot.
    """
    with naming(task.args.out):
        return Keeper(
            files,
            task.group.rank,
            asked,
            resume=task.args.resume,
            layout=FORMATS[task.style](task.layout),
            images=len(task.images),
            dim=dim,
        )


def write(task: Task, files: Files, keeper: Keeper) -> tuple[dict[str, int], int, float]:
    """Answer the images of this process; returns totals, how many were new, and the seconds.

    Raises:
        VitError: Something ended the work; what is written is kept.
    """
    echo = ECHO_SECONDS if task.group.processes > 1 else 0.0
    with naming(task.args.out), Interruption(echo) as signals:
        try:
            outcome = write_on(task, keeper, lambda: check_going(files, signals))
            keeper.journal.close(sync=True)
        except BaseException as error:
            keeper.journal.close()
            if files.processes > 1:
                with suppress(OSError):
                    files.stop.touch()
            if isinstance(error, KeyboardInterrupt):
                raise Unfinished("stopped by Ctrl-C", 130) from None
            raise
    return outcome


def write_on(
    task: Task, keeper: Keeper, check: Callable[[], None]
) -> tuple[dict[str, int], int, float]:
    """As `write`; `check` is called after each block."""
    places, begun, tally = task.places(), keeper.rows, dict(keeper.tally)
    rest, sorter = places[begun:], task.sorter()
    answers = task.answers([task.images[place] for place in rest], rest[0] if rest else 0)
    following = iter(rest)
    group = task.group
    share = f" of process 0 of {group.processes}" if group.processes > 1 else ""
    with Progress(len(places), done=begun, share=share, quiet=group.rank > 0) as progress:
        for block in in_blocks(answers, task.block):
            for prediction, place in zip(block, following, strict=False):
                twice = sorter is not None and sorter(place, prediction)
                count_in(tally, prediction, twice=twice)
            keeper.put(block, tally)
            progress.update(len(block))
            check()
        return tally, len(rest), progress.seconds()


def check_going(files: Files, signals: Interruption) -> None:
    """Raises Unfinished where a signal came, or another process has given up."""
    if signals.number:
        name = "Ctrl-C" if signals.number == 2 else "SIGTERM"
        raise Unfinished(f"stopped by {name}", 128 + signals.number)
    if files.processes > 1 and files.stop.exists():
        raise Unfinished("", 2)


def report(task: Task, tally: dict[str, int], *, done: int, seconds: float) -> int:
    """Say how it went, on standard error; returns how many images failed.

    Args:
        task: What was done.
        tally: Totals of the whole list.
        done: Images that were answered now, and not before a kill.
        seconds: That they took.
    """
    failed = tally.get("failed", 0)
    if tally.get("unended"):
        notify(f"vit predict: {unended_note(tally['unended'], tally['captions'])}")
    if task.args.sort_into is not None:
        unsure = tally.get("unsure", 0)
        words = f", {unsure:,} of them into {UNSURE}" if unsure else ""
        notify(
            f"vit predict: {plural(len(task.images) - failed, 'image')} sorted into "
            f"{printable(task.args.sort_into)}{words}; {failed:,} left where they are"
        )
        if tally.get("twice"):
            notify(
                f"vit predict: {tally['twice']:,} of them were there in another folder, where they "
                "stay as well"
            )
    if line := summary(len(task.images), done, seconds, failed):
        notify(f"vit predict: {line}")
    return failed

"""Runs a prediction: a list of images through a predictor into a stream or resumable files."""

import argparse
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vit.commands.backends import ImagePredictor, embedding_dim, prediction_settings
from vit.commands.command_output import explain_write_errors, notify, open_output
from vit.commands.command_progress import Progress, summary
from vit.commands.launcher import SingleProcess
from vit.commands.predict_output import Interrupted, OutputFiles, RowWriter
from vit.errors import ConfigError, VitError, printable
from vit.output.prediction_results import FORMATS, TOP_K, Layout, Prediction, unended_note
from vit.output.resumable_output import FileLock, differences, partial_path
from vit.output.sort_into_folders import UNSURE, ImageSorter, SortMethod
from vit.text import plural
from vit.training.distributed.stop_signals import Interruption

if TYPE_CHECKING:
    from vit.inference.process_group import ProcessGroup

ECHO_SECONDS = 3.0  # a launcher forwards its own signal to processes that received it already


@dataclass(frozen=True)
class PredictionJob:
    """One list of images, the predictor, and the format of the output.

    Args:
        args: Parsed arguments of `vit predict`.
        style: Format of the rows.
        engine: Inference engine.
        images: The whole list.
        predictor: Predicts them.
        group: The processes of this job.
    """

    args: argparse.Namespace
    style: str
    engine: str
    images: list[str]
    predictor: ImagePredictor
    group: "SingleProcess | ProcessGroup" = field(default_factory=SingleProcess)

    @property
    def top_k(self) -> int:
        """Classes per row; 0 for a network without classes.

        Raises:
            ConfigError: A flag needs classes, and the network has none.
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
                    f"{flag}={printable(value)}: this network writes captions and has no classes; "
                    f"{remedy}"
                )
        if self.multilabel and self.args.sort_into is not None:
            raise ConfigError(
                f"sort_into={printable(self.args.sort_into)}: this network is multi-label, so an "
                "image has no single folder; leave it out"
            )
        return min(self.args.top_k or (len(classes) if self.multilabel else TOP_K), len(classes))

    @property
    def multilabel(self) -> bool:
        return self.predictor.thresholds is not None

    @property
    def layout(self) -> Layout:
        """Columns of the rows."""
        predictor = self.predictor
        return Layout(self.top_k, predictor.classes, self.images, predictor.n_best, self.multilabel)

    def sorter(self) -> ImageSorter | None:
        """The sorter of --sort-into, if given."""
        folder = self.args.sort_into
        method: SortMethod = self.args.sort_with or "copy"
        if folder is None:
            return None
        return ImageSorter(folder, method, self.predictor.classes, self.images)

    def own_indices(self) -> list[int]:
        """Indices of this process's images: processes take blocks in turn."""
        size, count = self.predictor.block_size, len(self.images)
        starts = range(self.group.rank * size, count, self.group.processes * size)
        return [index for start in starts for index in range(start, min(start + size, count))]

    def predict(self, images: Sequence[str], first: int = 0) -> Iterator[Prediction]:
        """Yield predictions of `images`; `first` is the index of the first one in the list."""
        options: dict[str, Any] = {"top_k": max(self.top_k, 1)}
        if self.multilabel:
            options["threshold"] = self.args.threshold
        if self.args.explain is not None:
            from vit.inference.attribution_plot import check_explainable, draw_explanations
            from vit.inference.predictor import Predictor

            assert isinstance(self.predictor, Predictor), "exported networks have no --explain"
            check_explainable(self.predictor)
            options["top_k"] = self.top_k
            predictions = draw_explanations(
                self.predictor, images, self.args.explain, notify=notify_predict, **options
            )
        else:
            if first and getattr(self.args, "search.temperature", 0):
                options["first"] = first  # sampling is seeded by the index
            predictions = self.predictor.stream(images, **options)
        return (apply_threshold(one, self.args.threshold) for one in predictions)


def notify_predict(line: str) -> None:
    """Print a line of the command on standard error."""
    notify(f"vit predict: {line}")


def apply_threshold(prediction: Prediction, threshold: float | None) -> Prediction:
    """Remove the classes less probable than `threshold`."""
    if threshold is None:
        return prediction
    classes = tuple(pair for pair in prediction.predictions if pair[1] >= threshold)
    return replace(prediction, predictions=classes)


def batched(predictions: Iterable[Prediction], size: int) -> Iterator[list[Prediction]]:
    """Lists of `size`; the last one may be shorter."""
    iterator = iter(predictions)
    while block := list(itertools.islice(iterator, size)):
        yield block


def update_totals(
    totals: dict[str, int], prediction: Prediction, *, duplicate: bool = False
) -> None:
    """Count one prediction; `duplicate` if --sort-into has its image in another folder too."""
    unsure = prediction.error is None and not prediction.predictions
    unended = sum(not caption.ended for caption in prediction.captions)
    for name, number in (
        ("failed", int(prediction.error is not None)),
        ("captions", len(prediction.captions)),
        ("unended", unended),
        ("unsure", int(unsure)),
        ("twice", int(duplicate)),
    ):
        totals[name] = totals.get(name, 0) + number


def predict_to_stream(job: PredictionJob) -> int:
    """Write rows to standard output, to a device, or with --explain; return the failures.

    Raises:
        VitError: The output cannot be written.
    """
    path = None if job.args.out == "-" else job.args.out
    header, format_row = FORMATS[job.style](job.layout)
    sorter, totals = job.sorter(), dict[str, int]()
    predictions = job.predict(job.images)  # raises before anything is written
    on_terminal = path is None and sys.stdout.isatty()
    with (
        Progress(len(job.images), results_on_terminal=on_terminal) as progress,
        open_output(path) as out,
    ):
        out.write(header)
        for index, prediction in enumerate(predictions):
            duplicate = sorter is not None and sorter(index, prediction)
            out.write(format_row(prediction))
            update_totals(totals, prediction, duplicate=duplicate)
            progress.update(1)
        seconds = progress.seconds()
    return report(job, totals, done=len(job.images), seconds=seconds)


def predict_to_file(job: PredictionJob) -> int:
    """Write rows and embeddings into resumable files; return the failures.

    Raises:
        Interrupted: The prediction stopped early; the message says what is kept.
        VitError: It cannot start.
    """
    args, group = job.args, job.group
    files = OutputFiles.of(args, group.processes)
    settings = prediction_settings(args, job.engine, job.predictor, job.images) | {
        "format": job.style,
        "top_k": job.top_k,
        "processes": group.processes,
    }
    check_equal_settings(group.all_gather(settings))
    with FileLock([*files.targets.values()]) as lock:
        resuming = group.run_on_main(
            lambda: files.begin(lock, settings, resume=args.resume, overwrite=args.overwrite)
        )
        # the main process shares its exclusive lock before the others can acquire theirs
        group.run_on_main(lambda: lock.acquire(shared=True))
        group.run_on_all(lambda: lock.acquire(shared=True))
        try:
            outcomes = predict_and_merge(job, files, settings, resuming=resuming)
        except VitError as error:
            if group.rank:
                raise
            message = "; ".join(part for part in (str(error), resume_hint(files)) if part)
            raise Interrupted(message, error.exit_code) from None
    if group.rank:
        return 0
    totals: Counter[str] = Counter()
    for own_totals, _, _ in outcomes:
        totals.update(own_totals)
    done = sum(predicted for _, predicted, _ in outcomes)
    return report(job, totals, done=done, seconds=max(seconds for *_, seconds in outcomes))


Outcome = tuple[dict[str, int], int, float]
"""Totals of a process's images, how many it predicted now, and the seconds that took."""


def predict_and_merge(
    job: PredictionJob, files: OutputFiles, settings: dict[str, Any], *, resuming: bool
) -> list[Outcome]:
    """Predict in all processes, merge their files, and return the outcome of each process."""
    group = job.group
    dim = 0 if files.embeddings is None else embedding_dim(job.predictor)
    writer = group.run_on_all(lambda: open_writer(job, files, settings, dim))
    rows = sum(group.all_gather(writer.rows))
    if resuming and group.rank == 0:
        name, total = printable(partial_path(files.out)), plural(len(job.images), "image")
        notify_predict(
            f"resuming after {rows:,} of {total} in {name}"
            if rows
            else f"{name} has no complete block: starting at the first image"
        )
    outcomes = group.all_gather(group.run_on_all(lambda: predict_own_images(job, files, writer)))
    group.run_on_main(lambda: finish(files, job.images, dim))
    return outcomes


def resume_hint(files: OutputFiles) -> str:
    """What is kept, and the flag that continues it."""
    kept = files.describe_kept()
    return f"{kept}: continue with --resume" if files.unfinished_files else kept


def finish(files: OutputFiles, images: Sequence[str], dim: int) -> None:
    with explain_write_errors(os.fspath(files.out)):
        files.finish(images, dim)


def check_equal_settings(settings: Sequence[dict[str, Any]]) -> None:
    """Refuse processes whose settings, files or libraries differ.

    Raises:
        ConfigError: The message names the differences.
    """
    for rank, own in enumerate(settings):
        if different := differences(settings[0], own):
            raise ConfigError(f"process {rank} differs from process 0: {'; '.join(different)}")


def open_writer(
    job: PredictionJob, files: OutputFiles, settings: dict[str, Any], dim: int
) -> RowWriter:
    """Open the files of this process.

    Raises:
        VitError: They cannot be written or resumed.
    """
    with explain_write_errors(job.args.out):
        return RowWriter(
            files,
            job.group.rank,
            settings,
            resume=job.args.resume,
            layout=FORMATS[job.style](job.layout),
            images=len(job.images),
            dim=dim,
        )


def predict_own_images(job: PredictionJob, files: OutputFiles, writer: RowWriter) -> Outcome:
    """Predict the images of this process; on any error the other processes stop as well.

    Raises:
        VitError: The prediction stopped early; what is written is kept.
    """
    echo = ECHO_SECONDS if job.group.processes > 1 else 0.0
    with explain_write_errors(job.args.out), Interruption(echo) as signals:
        try:
            outcome = write_blocks(job, writer, lambda: check_interruption(files, signals))
            writer.journal.close(sync=True)
        except BaseException as error:
            writer.journal.close()
            if files.processes > 1:
                with suppress(OSError):
                    files.stop.touch()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("stopped by Ctrl-C", 130) from None
            raise
    return outcome


def write_blocks(job: PredictionJob, writer: RowWriter, check: Callable[[], None]) -> Outcome:
    """Predict and write block by block; `check` is called after each block."""
    indices, done, totals = job.own_indices(), writer.rows, dict(writer.totals)
    remaining, sorter = indices[done:], job.sorter()
    images = [job.images[index] for index in remaining]
    predictions = job.predict(images, remaining[0] if remaining else 0)
    upcoming = iter(remaining)
    group = job.group
    share = f" of process 0 of {group.processes}" if group.processes > 1 else ""
    with Progress(len(indices), done=done, share=share, quiet=group.rank > 0) as progress:
        for block in batched(predictions, job.predictor.block_size):
            for prediction, index in zip(block, upcoming, strict=False):
                duplicate = sorter is not None and sorter(index, prediction)
                update_totals(totals, prediction, duplicate=duplicate)
            writer.write_block(block, totals)
            progress.update(len(block))
            check()
        return totals, len(remaining), progress.seconds()


def check_interruption(files: OutputFiles, signals: Interruption) -> None:
    """Raise Interrupted after a signal, or after another process has failed."""
    if signals.number:
        name = "Ctrl-C" if signals.number == 2 else "SIGTERM"
        raise Interrupted(f"stopped by {name}", 128 + signals.number)
    if files.processes > 1 and files.stop.exists():
        raise Interrupted("", 2)


def report(job: PredictionJob, totals: dict[str, int], *, done: int, seconds: float) -> int:
    """Print the summary on standard error; return how many images failed.

    Args:
        job: The prediction.
        totals: Totals of the whole list.
        done: Images predicted now, without those of an interrupted run.
        seconds: The time they took.
    """
    failed = totals.get("failed", 0)
    if totals.get("unended"):
        notify_predict(unended_note(totals["unended"], totals["captions"]))
    if job.args.sort_into is not None:
        unsure = totals.get("unsure", 0)
        into_unsure = f", {unsure:,} of them into {UNSURE}" if unsure else ""
        notify_predict(
            f"{plural(len(job.images) - failed, 'image')} sorted into "
            f"{printable(job.args.sort_into)}{into_unsure}; {failed:,} failed and stay out of it"
        )
        if totals.get("twice"):
            notify_predict(
                f"{totals['twice']:,} of them were in another folder there already, and stay in "
                "it as well"
            )
    if line := summary(len(job.images), done, seconds, failed):
        notify_predict(line)
    return failed

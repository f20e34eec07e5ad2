"""A whole prediction: images through a predictor into a stream, or into resumable files.

predict            checks flags and files, lists the images, opens the predictor
  write_stream     rows to standard output, a device, or with drawings
  write_file       rows and embeddings to files that --resume continues, by all processes
"""

import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from vit.config.parser import nearest
from vit.errors import ConfigError, RunError, VitError, WeightsError, is_out_of_memory
from vit.exported.engine import library_version, select_engine
from vit.inference.image_arguments import find_images, input_paths, input_rows, read_column
from vit.inference.predictor import Predictor, model_files, open_predictor
from vit.inference.process_group import (
    ProcessFailed,
    ProcessGroup,
    SingleProcess,
    current_process_group,
    world_size,
)
from vit.output.output_file import (
    check_distinct,
    check_folder,
    check_output,
    explain_write_errors,
    is_device,
    open_output,
)
from vit.output.prediction_results import (
    FORMATS,
    TOP_K,
    Layout,
    Prediction,
    byte_order_mark,
    check_classes,
    check_top_k,
    csv_settings,
    unended_note,
    write_workbook,
)
from vit.output.resumable_output import (
    Block,
    BlockLog,
    FileLock,
    ResumableOutput,
    describe_differences,
)
from vit.output.sort_into_folders import (
    UNSURE,
    ImageSorter,
    SortMethod,
    check_sorting,
    renamed_note,
)
from vit.paths import path_argument, sha256_of_files
from vit.stop_signals import Interrupted, Interruption
from vit.text import Notify, format_clock, plural, print_to_stderr, printable
from vit.version import __version__

if TYPE_CHECKING:
    from vit.generation.generation_config import Search

FORMAT_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".xlsx": "xlsx",
    ".txt": "table",
    "": "table",
}
ECHO_SECONDS = 3.0  # a launcher forwards its own signal to processes that received it already
MIN_IMAGES_FOR_SUMMARY = 101


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """Settings of a prediction, under the names of the flags of `vit predict`."""

    model: str
    """A run folder, other weights with a head, or an exported network (.onnx, .xml)."""
    inputs: Sequence[str]
    """Images, folders, patterns, lists; `-` is a list of paths on standard input."""
    out: str | None = None
    """File of results; None or `-` is standard output."""
    format: Literal["table", "jsonl", "csv", "xlsx"] | None = None
    """Format of the rows; by default the suffix of `out` decides, else table."""
    csv_separator: Literal["comma", "semicolon", "tab"] | None = None
    """Separator of CSV, comma by default; with semicolon the decimal sign is a comma."""
    csv_digits: int | Literal["full"] | None = None
    """Decimal digits of the scores in CSV; 4 by default."""
    resume: bool = False
    """Continue an interrupted prediction."""
    overwrite: bool = False
    """Replace what is at `out`, and drawings of the same names in `explain`."""
    top_k: int | None = None
    """Most probable classes in a row; all above their thresholds if the network is multi-label."""
    threshold: float | None = None
    """Minimum probability of a class in a row."""
    reject: bool = False
    """Answer `unknown` where the best class is too uncertain."""
    sets: float | None = None
    """Coverage of the prediction sets to add to each row."""
    sort_into: str | None = None
    """Folder in which each image is placed by its most probable class."""
    sort_with: SortMethod | None = None
    """How images are placed there; copies by default."""
    embeddings: str | None = None
    """File of image embeddings, .npy or .parquet."""
    explain: str | None = None
    """Folder of attribution maps."""
    no_deletion: bool = False
    """Draw maps of classes without the deletion metric, in a small part of the time."""
    engine: str | None = None
    """torch, onnx, openvino or ray; by default the suffix of the model decides."""
    device: str | None = None
    batch_size: int | None = None
    precision: str = "auto"
    workers: int | None = None
    keep_aspect: bool = False
    merge_tokens: int | None = None
    patch_size: int | None = None
    search: "Search | None" = None
    tta: Literal["flip", "crops"] | None = None
    compile: bool = False
    intensity_range: tuple[float, float] | None = None
    no_calibration: bool = False
    """These from `device` on: as for vit.Predictor."""

    @property
    def to_file(self) -> bool:
        """Whether results go to a file, not to standard output or a device."""
        return self.out is not None and self.out != "-" and not is_device(self.out)

    @property
    def resumable(self) -> bool:
        """Whether results go to a file that `resume` can continue."""
        return self.to_file and self.explain is None

    @property
    def samples(self) -> bool:
        """Whether captions are sampled, seeded by the index of the image."""
        return self.search is not None and self.search.temperature > 0

    def predictor_settings(self) -> dict[str, Any]:
        """Settings of the Predictor, or of `load_exported`."""
        names = ("device", "batch_size", "precision", "workers", "keep_aspect", "merge_tokens")
        settings = {name: getattr(self, name) for name in (*names, "patch_size", "search")}
        optional = {
            "tta": self.tta,
            "compile": self.compile,
            "embeddings": bool(self.embeddings),
            "intensity_range": self.intensity_range and tuple(self.intensity_range),
            "no_calibration": self.no_calibration,
        }
        return settings | {name: value for name, value in optional.items() if value}

    def csv_settings(self, style: str) -> dict[str, Any]:
        """`separator` and `digits` of a Layout; see `vit.output.prediction_results`."""
        return csv_settings(self.csv_separator, self.csv_digits, style)

    def check(self, engine: str, processes: int, style: str = "table") -> None:
        """Refuse settings that exclude each other."""
        check_top_k(self.top_k)
        self.csv_settings(style)
        out = self.out if self.to_file else None
        # of many inputs those that may be the output
        alike = [one for one in self.inputs if out and PurePath(one).suffix == PurePath(out).suffix]
        check_distinct({"--out": out, "--embeddings": self.embeddings}, [self.model, *alike])
        ray, several = engine == "ray", processes > 1
        rules = {
            "--resume continues a file: give its name with --out": self.resume and not self.to_file,
            "--resume does not work with --explain: drawings are always made anew": (
                self.resume and self.explain is not None
            ),
            "--embeddings needs --out FILE (without --explain): rows and vectors are resumed "
            "together": self.embeddings is not None and not self.resumable,
            "--no-deletion needs --explain DIR": self.no_deletion and self.explain is None,
            "--sort-with needs --sort-into DIR": (
                self.sort_with is not None and self.sort_into is None
            ),
            **{
                f"--{name.replace('_', '-')} does not work with --engine ray": (
                    ray and getattr(self, name) not in (None, False)
                )
                for name in (
                    *("resume", "explain", "embeddings", "sort_into", "threshold", "reject"),
                    "sets",
                )
            },
            **{
                f"--{name} does not work with --explain: predict twice": (
                    getattr(self, name) not in (None, False) and self.explain is not None
                )
                for name in ("reject", "sets")
            },
            "--format xlsx is a file: give --out FILE, without --explain and --engine ray": (
                style == "xlsx" and (ray or not self.resumable)
            ),
            "--engine ray writes files: give --out": ray and not self.to_file,
            f"{processes} processes write one file together: give --out FILE, without --explain": (
                several and not self.resumable
            ),
            "--engine ray starts its own workers: start one process": several and ray,
            "--temperature samples by the index of an image in one list: start one process": (
                several and self.samples
            ),
        }
        for message, broken in rules.items():
            if broken:
                raise ConfigError(message)


def predict(
    model: str | os.PathLike[str],
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    notify: Notify = print_to_stderr,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
    **settings: Any,
) -> int:
    """Predict images as `vit predict` does; return how many failed.

    Each image has its row, in the order of the inputs: a failed one with its error. Processes that
    a launcher started share the work; those besides the first one return 0.

    Args:
        model, settings: As in PredictionConfig.
        inputs: One input or several, as in PredictionConfig.
        notify: Called with notes and a summary.
        progress: Called with the images that this process has done, and their total.

    Raises:
        VitError: It cannot start, or stopped early; the message says what is kept.
    """
    known = [one.name for one in fields(PredictionConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name} is not a setting of a prediction{nearest(name, known)}")
    config = PredictionConfig(
        model=path_argument("model", model, "a run folder, weights, or an exported file"),
        inputs=input_paths(inputs),
        **settings,
    )
    engine = select_engine(config.model, config.engine)
    style = config.format or default_format(config.out, engine)
    config.check(engine, world_size(), style)
    group = current_process_group()
    output = None
    if engine != "ray" and config.resumable and config.out is not None:
        output = ResumableOutput(config.out, config.embeddings, processes=group.processes)
    images, failed = group.run_on_main(
        lambda: prepare(config, output, style=style, engine=engine, notify=notify)
    )
    if failed is None and engine == "ray":
        failed = run_on_ray(config, images, style, notify)
    elif failed is None:
        predictor = open_predictor_on_all(config, group, images, engine, output)
        job = PredictionJob(config, style, engine, images, predictor, group, notify, progress)
        failed = job.write_stream() if output is None else job.write_file(output)
    if group.rank:
        return 0
    if failed:
        notify(f"{failed} of {len(images)} images failed; each has its error in its row")
    return failed


def default_format(path: str | None, engine: str) -> str:
    """The format by the suffix of `path`, where only Ray's workers write Parquet; else a table."""
    if path is None or path == "-" or is_device(path):
        return "table"
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet" and engine == "ray":
        return "parquet"
    if suffix not in FORMAT_OF_SUFFIX:
        raise VitError(f"{printable(path)}: name it .jsonl, .csv or .xlsx, or add --format")
    return FORMAT_OF_SUFFIX[suffix]


def prepare(
    config: PredictionConfig,
    output: ResumableOutput | None,
    *,
    style: str,
    engine: str,
    notify: Notify,
) -> tuple[list[str], int | None]:
    """Check all paths; return the images, and the failures if `output` is already complete."""
    if output is not None:
        if config.embeddings is not None:
            from vit.output.embeddings_file import check_embeddings

            check_embeddings(config.embeddings)
        output.check(resume=config.resume, overwrite=config.overwrite)
    elif engine == "ray":
        check_ray(config.out or "", style, overwrite=config.overwrite)
    else:
        check_output(None if config.out == "-" else config.out, overwrite=config.overwrite)
    if config.explain is not None:
        check_folder(config.explain, overwrite=config.overwrite, content="drawings")
    images = find_images(config.inputs, lists=engine == "ray", notify=notify)
    if output is not None and config.resume and (output.needs_name or not config.overwrite):
        failed = output.complete(images, style)
        if failed is not None:
            name = printable(config.out)
            if config.sort_into is not None:
                raise ConfigError(
                    f"{name} is complete, and does not record whether the images were sorted: "
                    "leave --sort-into out, or start again with --overwrite"
                )
            notify(
                f"{name} is complete: {len(images):,} images, in the order of the inputs (the "
                "model and settings that wrote it are not recorded)"
            )
            return images, failed
    if config.sort_into is not None:
        filled = config.overwrite or (output is not None and bool(output.leftovers()))
        method = config.sort_with or "copy"
        check_sorting(config.sort_into, config.inputs, images, filled=filled, method=method)
    return images, None


def check_ray(out: str, style: str, *, overwrite: bool) -> None:
    """Check that Ray is installed and its workers can write `out`."""
    if find_spec("ray") is None:
        raise VitError("ray is not installed: pip install 'vit-toolkit[ray]'")
    from vit.inference.remote_files import check_out

    if "://" not in out:
        check_output(out, overwrite=overwrite)
    check_out(out, style, overwrite=overwrite)


def run_on_ray(config: PredictionConfig, images: list[str], style: str, notify: Notify) -> int:
    """Predict with Ray's workers; return how many images failed."""
    from vit.inference.ray_inference import predict_with_ray

    settings = config.predictor_settings()
    return predict_with_ray(
        config.model,
        images,
        config.out or "",
        style=style,
        top_k=config.top_k,
        workers=settings.pop("workers"),
        settings=settings,
        notify=notify,
        cells=input_rows([word for word in config.inputs if read_column(word) is None]),
        **config.csv_settings(style),
    )


def open_predictor_on_all(
    config: PredictionConfig,
    group: SingleProcess | ProcessGroup,
    images: list[str],
    engine: str,
    output: ResumableOutput | None,
) -> Predictor:
    """Open the predictor in every process, with one precision.

    With precision auto the first process chooses it, and a resumed prediction keeps the precision
    that it was begun with.
    """
    precision = config.precision
    if config.resume and precision == "auto" and output is not None:
        precision = group.run_on_main(lambda: output.stored_settings().get("precision", "auto"))
    settings = config.predictor_settings() | {"device": group.device(config.device)}

    def open_with(precision: str) -> Predictor:
        chosen = settings | {"precision": precision}
        return open_predictor(config.model, engine, chosen, images, explain=config.explain)

    predictor = group.run_on_all(lambda: None if group.rank else open_with(precision))
    precision = group.run_on_main(lambda: predictor.precision if predictor else precision)
    return group.run_on_all(lambda: predictor or open_with(precision))


@dataclass(frozen=True)
class PredictionJob:
    """One list of images, the predictor, and the format of the rows.

    Args:
        group: The processes that share the list.
    """

    config: PredictionConfig
    style: str
    engine: str
    images: list[str]
    predictor: Predictor
    group: SingleProcess | ProcessGroup
    notify: Notify
    progress: Callable[[int, int], object]
    totals: Counter[str] = field(default_factory=Counter)

    @cached_property
    def cells(self) -> dict[str, dict[str, Any]]:
        """Rows of the lists among the inputs, by the path of the image."""
        return input_rows(self.config.inputs)

    @property
    def multilabel(self) -> bool:
        return self.predictor.thresholds is not None

    @property
    def top_k(self) -> int:
        """Classes per row; 0 for a network without classes."""
        config = self.config
        names = ("threshold", "sort_into", "reject", "sets")
        flags = {name: getattr(config, name) for name in names}
        if self.multilabel and config.sort_into is not None:
            raise ConfigError(
                f"sort_into={printable(config.sort_into)}: this network is multi-label, so an "
                "image has no single folder; leave it out"
            )
        return classes_per_row(self.predictor, config.top_k, **flags)

    def row_format(self) -> tuple[str, Callable[[Prediction], str]]:
        """The header, and the function that makes a row."""
        predictor, config = self.predictor, self.config
        layout = Layout(
            self.top_k,
            predictor.classes,
            self.images,
            predictor.n_best,
            self.multilabel,
            shares=predictor.shares,
            **config.csv_settings(self.style),
            reject=self.config.reject,
            sets=self.config.sets is not None,
            cells=self.cells,
        )
        header, line = FORMATS[self.style](layout)
        if self.style == "csv" and config.to_file:
            header = byte_order_mark(layout) + header
        return header, line

    def sorter(self) -> Callable[[int, Prediction], bool]:
        """Places an image; returns whether one of its name lies in another folder too."""
        folder, method = self.config.sort_into, self.config.sort_with or "copy"
        if folder is None:
            return lambda _index, _prediction: False
        place = ImageSorter(folder, method, self.predictor.classes, self.images)

        def sort(index: int, prediction: Prediction) -> bool:
            known = prediction.unknown is None
            return place(index, prediction if known else replace(prediction, predictions=()))

        return sort

    def predict(self, images: Sequence[str], first: int = 0) -> Iterator[Prediction]:
        """Yield predictions of `images`; `first` is the index of the first one in the list."""
        config = self.config
        options: dict[str, Any] = {"top_k": max(self.top_k, 1)}
        if self.multilabel:
            options["threshold"] = config.threshold
        if config.explain is not None:
            from vit.inference.attribution_plot import check_explainable, draw_explanations

            deletion = not config.no_deletion
            check_explainable(self.predictor, deletion=deletion)
            options["top_k"] = self.top_k
            predictions = draw_explanations(
                self.predictor,
                images,
                config.explain,
                deletion=deletion,
                notify=self.notify,
                **options,
            )
        else:
            if first and config.samples:
                options["first"] = first  # sampling is seeded by the index
            if config.reject or config.sets is not None:
                options |= {"reject": config.reject, "sets": config.sets}
            predictions = self.predictor.stream(images, **options)
        return (apply_threshold(one, config.threshold) for one in predictions)

    def count(self, prediction: Prediction, *, duplicate: bool) -> None:
        """Add one prediction to the totals."""
        self.totals["failed"] += prediction.error is not None
        self.totals["captions"] += len(prediction.captions)
        self.totals["unended"] += sum(not caption.ended for caption in prediction.captions)
        self.totals["unknown"] += prediction.unknown is not None
        self.totals["unsure"] += prediction.error is None and (
            not prediction.predictions or prediction.unknown is not None
        )
        self.totals["duplicates"] += duplicate

    def write_stream(self) -> int:
        """Write rows to standard output, to a device, or with drawings; return the failures."""
        header, format_row = self.row_format()
        sort, total, begin = self.sorter(), len(self.images), time.monotonic()
        predictions = self.predict(self.images)  # raises before anything is written
        with open_output(None if self.config.out == "-" else self.config.out) as out:
            self.progress(0, total)
            out.write(header)
            for index, prediction in enumerate(predictions):
                self.count(prediction, duplicate=sort(index, prediction))
                out.write(format_row(prediction))
                self.progress(index + 1, total)
        return self.report(self.totals, done=total, seconds=time.monotonic() - begin)

    def write_file(self, output: ResumableOutput) -> int:
        """Write rows and embeddings into resumable files; return the failures."""
        config, group = self.config, self.group
        settings = self.settings_record()
        first, *others = group.all_gather(settings)
        for rank, other in enumerate(others, 1):
            if different := describe_differences(first, other):
                raise ConfigError(f"process {rank} differs from process 0: {'; '.join(different)}")
        with FileLock(output.targets) as lock:
            resuming = group.run_on_main(
                lambda: output.begin(
                    lock, settings, resume=config.resume, overwrite=config.overwrite
                )
            )
            # the main process shares its exclusive lock before the others can acquire theirs
            group.run_on_main(lambda: lock.acquire(shared=True))
            group.run_on_all(lambda: lock.acquire(shared=True))
            try:
                outcomes = self.predict_and_merge(output, settings, resuming=resuming)
            except VitError as error:
                if group.rank:
                    raise
                resume = "continue with --resume"
                if is_out_of_memory(error):  # rows of other batches have other last digits
                    resume += " and the same batch size, or start again with --overwrite"
                message = "; ".join(filter(None, (str(error), output.describe_kept(resume))))
                raise ProcessFailed(message, error.exit_code) from None
        if group.rank:
            return 0
        totals: Counter[str] = Counter()
        for own_totals, _, _ in outcomes:
            totals.update(own_totals)
        done = sum(predicted for _, predicted, _ in outcomes)
        return self.report(totals, done=done, seconds=max(seconds for *_, seconds in outcomes))

    def settings_record(self) -> dict[str, Any]:
        """Everything that determines the output; only a prediction with equal ones is resumed."""
        config, predictor = self.config, self.predictor
        paths = b"\0".join(map(os.fsencode, self.images))
        cells = hashlib.sha256()
        for row in self.cells.items():
            cells.update(repr(row).encode())
        folder = config.sort_into and os.path.abspath(config.sort_into)
        return {
            "vit": __version__,
            "engine": library_version(self.engine),
            "model": sha256_of_files(model_files(config.model)),
            "list_of_images": hashlib.sha256(paths).hexdigest(),
            "images": len(self.images),
            "list_cells": cells.hexdigest() if self.cells else None,
            "batch_size": predictor.batch_size,
            "block": predictor.block_size,
            "device": str(predictor.device).split(":")[0],
            "precision": predictor.precision,
            "keep_aspect": config.keep_aspect,
            "merge_tokens": config.merge_tokens,
            "patch_size": config.patch_size,
            "tta": config.tta,
            "compile": config.compile,
            **{
                name: value
                for name in ("no_calibration", "reject", "sets")
                if (value := getattr(config, name)) not in (None, False)
            },
            "search": config.search and asdict(config.search),
            "threshold": config.threshold,
            "embeddings": config.embeddings and os.path.abspath(config.embeddings),
            "sort_into": folder,
            "sort_with": (config.sort_with or "copy") if folder else None,
            "format": self.style,
            "format_separator": config.csv_separator,
            "format_digits": (
                str(config.csv_settings("csv")["digits"]) if self.style == "csv" else None
            ),
            "top_k": self.top_k,
            "processes": self.group.processes,
        } | ({"intensity_range": [*config.intensity_range]} if config.intensity_range else {})

    def predict_and_merge(
        self, output: ResumableOutput, settings: dict[str, Any], *, resuming: bool
    ) -> "list[Outcome]":
        """Predict in all processes, write the final files, and return each process's outcome."""
        group, config = self.group, self.config
        header, format_row = self.row_format()
        # the width of the network's embeddings
        dim = 0 if config.embeddings is None else int(self.predictor.model.num_features)
        log = group.run_on_all(lambda: output.open_log(group.rank, settings, resume=config.resume))
        rows = sum(group.all_gather(log.images))
        if resuming and group.rank == 0:
            name = printable(output.partial)
            self.notify(
                f"resuming after {rows:,} of {plural(len(self.images), 'image')} in {name}"
                if rows
                else f"{name} has no complete block: starting at the first image"
            )
        outcomes = group.all_gather(
            group.run_on_all(lambda: self.predict_own_images(output, log, format_row, dim))
        )
        workbook = partial(write_workbook, shares=self.predictor.shares)
        write = workbook if self.style == "xlsx" else None
        group.run_on_main(lambda: output.finish(header.encode(), self.images, dim, write))
        return outcomes

    def predict_own_images(
        self,
        output: ResumableOutput,
        log: BlockLog,
        format_row: Callable[[Prediction], str],
        dim: int,
    ) -> "Outcome":
        """Predict the images of this process; on any error the other processes stop as well."""
        echo = ECHO_SECONDS if self.group.processes > 1 else 0.0
        note = "stopping after this block; a second signal ends at once"
        stops = Interruption(echo, lambda: self.notify(note))
        with explain_write_errors(output.out), stops as signals:
            try:
                return self.write_blocks(
                    log, format_row, dim, lambda: check_interruption(output, signals)
                )
            except BaseException as error:
                if output.processes > 1:
                    with suppress(OSError):
                        output.stop.touch()
                if isinstance(error, KeyboardInterrupt):
                    raise Interrupted("stopped by Ctrl-C", 2) from None
                raise
            finally:
                log.close()

    def write_blocks(
        self,
        log: BlockLog,
        format_row: Callable[[Prediction], str],
        dim: int,
        check: Callable[[], None],
    ) -> "Outcome":
        """Predict and append block by block; `check` is called after each block."""
        begin, size, group = time.monotonic(), self.predictor.block_size, self.group
        starts = range(group.rank * size, len(self.images), group.processes * size)  # in turn
        indices = [i for start in starts for i in range(start, start + size)]
        indices = [i for i in indices if i < len(self.images)]
        total, remaining = len(indices), indices[log.images :]
        self.totals.update(log.totals)
        sort = self.sorter()
        report_progress = (lambda *_: None) if group.rank else self.progress
        report_progress(log.images, total)
        images = [self.images[index] for index in remaining]
        predictions = self.predict(images, remaining[0] if remaining else 0)
        upcoming = iter(remaining)
        for block in batched(predictions, size):
            positions = list(itertools.islice(upcoming, len(block)))
            for index, prediction in zip(positions, block, strict=True):
                self.count(prediction, duplicate=sort(index, prediction))
            log.append(
                Block(
                    first=positions[0],
                    images=len(block),
                    rows="".join(map(format_row, block)).encode(),
                    vectors=encode_embeddings(block, dim) if dim else b"",
                    errors=[(n, one.error) for n, one in enumerate(block) if one.error is not None],
                    totals=dict(self.totals),
                )
            )
            report_progress(log.images, total)
            check()
        return dict(self.totals), len(remaining), time.monotonic() - begin

    def report(self, totals: Counter[str], *, done: int, seconds: float) -> int:
        """Report the summary; return how many images failed."""
        failed, total = totals["failed"], len(self.images)
        if totals["unended"]:
            self.notify(unended_note(totals["unended"], totals["captions"]))
        if self.config.reject:
            self.notify(f"{totals['unknown']:,} of {plural(total, 'image')} are unknown")
        if self.config.sort_into is not None:
            into_unsure = f", {totals['unsure']:,} of them into {UNSURE}" * bool(totals["unsure"])
            self.notify(
                f"{plural(total - failed, 'image')} sorted into "
                f"{printable(self.config.sort_into)}{into_unsure}; {failed:,} failed and stay out "
                "of it"
            )
            if note := renamed_note(self.predictor.classes):
                self.notify(note)
            if totals["duplicates"]:
                self.notify(
                    f"{totals['duplicates']:,} of them were in another folder there already, and "
                    "stay in it as well"
                )
        if total >= MIN_IMAGES_FOR_SUMMARY:
            rate = f"{done / seconds:,.4g}" if seconds > 0 and done else "0"
            images = f"{total:,} images" if done == total else f"{done:,} of {total:,} images"
            self.notify(f"{images} in {format_clock(seconds)}, {rate} images/s, {failed:,} failed")
        return failed


def classes_per_row(predictor: Predictor, top_k: int | None, **flags: Any) -> int:
    """Classes in a row of the predictions; 0 for a network without classes.

    Args:
        top_k: Requested number; default: 5, or all classes of a multi-label network.
    """
    classes, several = predictor.classes, predictor.thresholds is not None
    check_classes(classes, top_k=top_k, **flags)
    return min(top_k or (len(classes) if several else TOP_K), len(classes))


Outcome = tuple[dict[str, int], int, float]
"""Totals of a process's images, how many it predicted now, and the seconds that took."""


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


def encode_embeddings(block: Sequence[Prediction], dim: int) -> bytes:
    """Encode the embeddings of a block; failures have none."""
    from vit.output.embeddings_file import encode_vectors

    for one in block:
        if one.error is None and one.embedding is None:
            raise WeightsError(f"{printable(one.image)}: the network gave no embedding")
    return encode_vectors((one.embedding for one in block), dim)


def check_interruption(output: ResumableOutput, signals: Interruption) -> None:
    """Raise after a signal, or after another process has failed (without a message)."""
    if signals.number:
        name = "Ctrl-C" if signals.number == 2 else "SIGTERM"
        raise Interrupted(f"stopped by {name}", signals.number)
    if output.processes > 1 and output.stop.exists():
        raise RunError("")

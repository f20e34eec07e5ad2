"""A whole prediction: images through a predictor into a stream, or into resumable files.

predict            checks flags and files, lists the images, opens the predictor
  write_stream     rows to standard output, a device, or with drawings
  write_file       rows and embeddings to files that --resume continues, by all processes

Predictions go through files, so the processes of a launcher (ProcessGroup) exchange only small
Python objects, over gloo on the CPU whatever device computes.
"""

import atexit
import datetime
import hashlib
import itertools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.atomic_files import explain_write_errors
from vit.class_tree import last_name
from vit.config.inference_config import InferenceConfig, PredictionConfig, accepts_settings
from vit.config.settings import check_together, split_settings
from vit.errors import (
    ConfigError,
    DataError,
    RunError,
    VitError,
    is_out_of_memory,
)
from vit.exported.engine import library_version, select_engine
from vit.inference.predictor import Predictor, model_files
from vit.output.output_file import (
    check_distinct,
    check_folder,
    check_output,
    is_device,
    open_output,
)
from vit.output.prediction_results import (
    FORMATS,
    Layout,
    Prediction,
    byte_order_mark,
    check_classes,
    classes_per_row,
    csv_settings,
    unended_note,
    write_workbook,
)
from vit.output.resumable_output import (
    Block,
    BlockLog,
    FileLock,
    ResumableOutput,
    check_embeddings,
    describe_differences,
    encode_vectors,
)
from vit.output.sort_into_folders import (
    UNSURE,
    ImageSorter,
    check_sorting,
    renamed_note,
)
from vit.paths import did_you_mean, path_argument, sha256_of_files
from vit.stop_signals import Interrupted, Interruption
from vit.text import Notify, Progress, format_clock, ignore, plural, print_to_stderr, printable
from vit.version import __version__

T = TypeVar("T")
TIMEOUT = datetime.timedelta(days=30)  # one process may finish long before another
FORMAT_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".xlsx": "xlsx",
    ".txt": "table",
    "": "table",
}
ECHO_SECONDS = 3.0  # a launcher forwards its own signal to processes that received it already
MIN_IMAGES_FOR_SUMMARY = 101
RECORDED = ("keep_aspect", "merge_tokens", "patch_size", "tta", "compile", "intensity_range")
"""Settings of the network that a prediction cannot change when it is resumed."""


@accepts_settings(PredictionConfig, InferenceConfig)
def predict(
    model: str | os.PathLike[str],
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    notify: Notify = print_to_stderr,
    progress: Progress = ignore,
    **settings: Any,
) -> int:
    """Predict images as `vit predict` does; return how many failed.

    Each image has its row, in the order of the inputs: a failed one with its error. Processes that
    a launcher started share the work; those besides the first one return 0.

    Args:
        model: A run folder, other weights with a head, or an exported network (.onnx, .xml).
        inputs: Images, folders, patterns, lists; `-` is a list of paths on standard input.
        notify: Called with notes and a summary.
        progress: Called with the images that this process has done, and their total.
        settings: Fields of PredictionConfig (what is written) and of InferenceConfig.

    Raises:
        VitError: It cannot start, or stopped early; the message says what is kept.
    """
    names = {
        "model": path_argument("model", model, "a run folder, weights, or an exported file"),
        "inputs": input_paths(inputs),
    }
    config, inference = split_settings(
        settings | names, "a prediction", PredictionConfig, InferenceConfig
    )
    engine = select_engine(config.model, config.engine)
    config = replace(config, engine=engine, format=config.format or default_format(config))
    check_prediction(config, inference)
    group = ProcessGroup()
    output = None
    if engine != "ray" and file_of(config) is not None and config.explain is None:
        output = ResumableOutput(str(config.out), config.embeddings, processes=group.processes)
    images = group.run_on_main(lambda: prepare(config, output, notify))
    if engine == "ray":
        failed = run_on_ray(config, inference, images, notify)
    else:
        predictor = open_predictor_on_all(config, inference, group, images, output)
        job = PredictionJob(config, inference, images, predictor, group, notify, progress)
        failed = job.write_stream() if output is None else job.write_file(output)
    if group.rank:
        return 0
    if failed:
        notify(f"{failed} of {len(images)} images failed; each has its error in its row")
    return failed


def file_of(config: PredictionConfig) -> str | None:
    """The file of results; None for standard output or a device."""
    return None if config.out in (None, "-") or is_device(str(config.out)) else config.out


def check_prediction(config: PredictionConfig, inference: InferenceConfig) -> None:
    """Refuse settings that exclude each other."""
    out, processes = file_of(config), world_size()
    check_together(replace(config, out=out))
    csv_settings(config, str(config.format))
    # of many inputs those that may be the output
    alike = [one for one in config.inputs if out and Path(one).suffix == Path(out).suffix]
    check_distinct({"--out": out, "--embeddings": config.embeddings}, [config.model, *alike])
    ray, streamed = config.engine == "ray", out is None or config.explain is not None
    rules = {
        "--format xlsx is a file: give --out FILE, without --explain and --engine ray": (
            config.format == "xlsx" and (ray or streamed)
        ),
        "--engine ray writes files: give --out": ray and out is None,
        f"explain={config.explain!r}: not supported by an exported network; give the run it was "
        "exported from": config.explain is not None and config.engine != "torch",
        f"{processes} processes write one file together: give --out FILE, without --explain": (
            processes > 1 and streamed
        ),
        "--engine ray starts its own workers: start one process": processes > 1 and ray,
        "--temperature samples by the index of an image in one list: start one process": (
            processes > 1 and samples(inference)
        ),
    }
    for message, broken in rules.items():
        if broken:
            raise ConfigError(message)


def samples(inference: InferenceConfig) -> bool:
    """Whether captions are sampled, seeded by the index of the image."""
    return inference.search is not None and inference.search.temperature > 0


def default_format(config: PredictionConfig) -> Any:
    """The format by the suffix of the file; else table."""
    path = file_of(config)
    if path is None:
        return "table"
    suffix = Path(path).suffix.lower()
    if suffix not in FORMAT_OF_SUFFIX:
        raise VitError(f"{path}: name it .jsonl, .csv or .xlsx, or add --format")
    return FORMAT_OF_SUFFIX[suffix]


def prepare(config: PredictionConfig, output: ResumableOutput | None, notify: Notify) -> list[str]:
    """Check all paths; return the images."""
    if output is not None:
        if config.embeddings is not None:
            check_embeddings(config.embeddings)
        output.check(resume=config.resume, overwrite=config.overwrite)
    else:
        check_output(None if config.out == "-" else config.out, overwrite=config.overwrite)
    if config.explain is not None:
        check_folder(config.explain, overwrite=config.overwrite, content="drawings")
    images = find_images(config.inputs, urls=config.engine == "ray", notify=notify)
    if config.sort_into is not None:
        begun = output is not None and (output.is_done() or bool(output.leftovers()))
        method = config.sort_with or "copy"
        check_sorting(
            config.sort_into,
            config.inputs,
            images,
            filled=config.overwrite or begun,
            method=method,
        )
    return images


def input_paths(inputs: Any) -> list[str]:
    """One input or a list of them, of a Python call, as text."""
    listed = inputs if isinstance(inputs, list | tuple) else [inputs]
    wanted = "files, folders, patterns or lists; images in memory are for vit.Predictor"
    return [path_argument("inputs", one, wanted) for one in listed]


def find_images(inputs: Sequence[str], *, notify: Notify, urls: bool = False) -> list[str]:
    """Paths of all `inputs` in their order, `-` replaced by the list on standard input.

    With `urls`, lists of URLs too, which only Ray's workers open.
    """
    images: list[str] = []
    notes: list[str] = []
    for word in inputs:
        if word == "-":
            images += read_path_list()
        elif urls and (listed := read_urls(word)) is not None:
            images += listed
        else:
            images += expand(word, notes, alone=len(inputs) == 1)
    for note in notes:
        notify(note)
    if not images:
        raise DataError("the list on standard input is empty; give one path a line")
    return images


def read_urls(word: str) -> list[str] | None:
    """Images of a list with URLs in its column `image`; names are relative to the folder of the
    list, and other words give None."""
    from vit.inference.ray_inference import is_url, read_list

    if not word.lower().endswith((".csv", ".jsonl")):
        return None
    try:
        names = read_list(word)
    except DataError:  # it is missing, or has other columns: `expand` reads it, or says why not
        return None
    if not any(map(is_url, names)):
        return None
    folder = os.path.dirname(word)
    return [name if is_url(name) else os.path.join(folder, name) for name in names]


def expand(word: str, notes: list[str], *, alone: bool) -> list[str]:
    """Paths that one input means; a folder without images is an error of its own among others."""
    from vit.data.sources.dataset_spec import refuse_run_folder
    from vit.data.sources.open_dataset import list_images

    if alone:  # among others it has its row
        refuse_run_folder(word)
    try:
        found = list_images([word], notes=notes)
        if alone and found == [word] and (hint := did_you_mean(word)):
            notes.append(f"{printable(word)} is not there{hint}")
        return found
    except DataError:
        if alone or not os.path.isdir(word):
            raise
        return [word]


def input_rows(inputs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rows of the image lists among `inputs`; see `list_rows`."""
    from vit.data.sources.dataset_spec import DatasetSpec, named_source
    from vit.data.sources.image_list import list_rows

    spec = partial(DatasetSpec, allow_outside=True, labels=False, reads_splits=False)
    found: dict[str, dict[str, Any]] = {}
    for word in inputs:
        is_list = named_source(word) == "list" and os.path.isfile(word)
        rows = list_rows(spec(word)) if is_list else {}
        found |= {path: {**row, **found.get(path, {})} for path, row in rows.items()}
    return found


def read_path_list() -> list[str]:
    """Paths on standard input, one a line, or with NUL between them as `find -print0` writes."""
    raw = sys.stdin.buffer.read()
    if b"\0" in raw:
        names = raw.split(b"\0")
    else:
        names = [line.removesuffix(b"\r") for line in raw.split(b"\n")]
    return [os.fsdecode(name) for name in names if name]


def run_on_ray(
    config: PredictionConfig, inference: InferenceConfig, images: list[str], notify: Notify
) -> int:
    """Predict with Ray's workers; return how many images failed."""
    from vit.inference.ray_inference import predict_with_ray

    style = str(config.format)
    return predict_with_ray(
        config.model,
        images,
        str(config.out),
        style=style,
        top_k=config.top_k,
        settings=vars(inference),
        notify=notify,
        cells=input_rows([word for word in config.inputs if read_urls(word) is None]),
        **csv_settings(config, style),
    )


class ProcessFailed(VitError):
    """Error of one process, raised in all of them."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class ProcessGroup:
    """The processes started by a launcher, seen from one of them; or this one."""

    def __init__(self) -> None:
        self.rank, self.processes = 0, 1
        if (started := world_size()) == 1:
            return
        from accelerate import PartialState

        with warnings.catch_warnings():  # accelerate warns about its choice of OMP_NUM_THREADS
            warnings.simplefilter("ignore")
            state = PartialState(cpu=True, timeout=TIMEOUT)
        self.rank, self.processes = int(state.process_index), int(state.num_processes)
        if self.processes != started:
            raise RunError(
                f"{started} processes were started, and {self.processes} can work together"
            )
        atexit.register(destroy_process_group)

    def device(self, requested: str | None) -> str | None:
        """Device of this process: one GPU each, where there are GPUs and no other is requested."""
        if self.processes == 1:
            return requested
        if requested is not None and ":" in requested:
            raise ConfigError(
                f"device={requested!r}: {self.processes} processes take a device each; "
                "use --device cuda or cpu"
            )
        import torch

        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        if requested not in (None, "cuda") or (requested is None and on_cpu):
            return requested or "cpu"
        if not torch.cuda.is_available():
            return requested
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Call `function` in process 0 and return its result, or raise its error, in all."""
        result: Any = self.run_on_all(function if self.rank == 0 else lambda: None)
        first: T = self.all_gather(result)[0]
        return first

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call `function` in every process and return its local result once all have finished."""
        if self.processes == 1:
            return function()
        try:
            result = function()
        except VitError as error:
            self._raise_first((str(error), error.exit_code))
            raise
        except Exception as error:
            self._raise_first((f"process {self.rank}: {type(error).__name__}: {error}", 1))
            raise
        self._raise_first(None)
        return result

    def all_gather(self, value: T) -> list[T]:
        """`value` of every process, by rank."""
        if self.processes == 1:
            return [value]
        from accelerate.utils import gather_object

        try:
            values: list[T] = gather_object([value])
        except RuntimeError:  # its connection is closed
            raise RunError("another process has ended; what is written is kept") from None
        return values

    def _raise_first(self, failure: tuple[str, int] | None) -> None:
        """Raise the failure of any process; one with an empty message only followed another."""
        failures = [one for one in self.all_gather(failure) if one is not None]
        for message, code in sorted(failures, key=lambda one: not one[0]):
            raise ProcessFailed(message, code)


def destroy_process_group() -> None:
    """Leave the group before the interpreter exits: running gloo threads may abort it."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def world_size() -> int:
    """How many processes a launcher has started."""
    word = os.environ.get("WORLD_SIZE", "1")
    return int(word) if word.isdecimal() else 1


def open_predictor_on_all(
    config: PredictionConfig,
    inference: InferenceConfig,
    group: ProcessGroup,
    images: list[str],
    output: ResumableOutput | None,
) -> Predictor:
    """Open the predictor in every process, with the precision that the first process chooses, or
    that a resumed prediction was begun with."""
    precision: str = inference.precision
    if config.resume and precision == "auto" and output is not None:
        precision = group.run_on_main(lambda: output.stored_settings().get("precision", "auto"))
    settings = vars(inference) | {
        "device": group.device(inference.device),
        "embeddings": config.embeddings is not None,
    }

    def open_with(precision: str) -> Predictor:
        chosen = settings | {"precision": precision}
        predictor = Predictor(config.model, engine=config.engine, **chosen)
        predictor.autotune_precision(images)
        return predictor

    predictor = group.run_on_all(lambda: None if group.rank else open_with(precision))
    precision = group.run_on_main(lambda: predictor.precision if predictor else precision)
    return group.run_on_all(lambda: predictor or open_with(precision))


@dataclass(frozen=True)
class PredictionJob:
    """One list of images, the predictor, and the format of the rows."""

    config: PredictionConfig
    inference: InferenceConfig
    images: list[str]
    predictor: Predictor
    group: ProcessGroup
    notify: Notify
    progress: Progress
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
            config.refuse(
                "sort_into",
                "this network is multi-label, so an image has no single folder; leave it out",
            )
        if (answers := self.predictor.answers) is not None:
            del flags["sets"]
            check_classes((), answers.kind, top_k=config.top_k, **flags)
            answers.check_coverage(config.sets)
            return 0
        check_classes(self.predictor.classes, top_k=config.top_k, **flags)
        return classes_per_row(self.predictor.classes, self.predictor.thresholds, config.top_k)

    def row_format(self) -> tuple[str, Callable[[Prediction], str]]:
        predictor, config, style = self.predictor, self.config, str(self.config.format)
        layout = Layout(
            self.top_k,
            predictor.classes,
            self.images,
            predictor.n_best,
            self.multilabel,
            shares=predictor.shares,
            **csv_settings(config, style),
            reject=config.reject,
            sets=config.sets is not None and predictor.answers is None,
            answers=predictor.answer_columns(config.sets),
            cells=self.cells,
        )
        header, line = FORMATS[style](layout)
        marked = style == "csv" and file_of(config) is not None
        return (byte_order_mark(layout) if marked else "") + header, line

    def sorter(self) -> Callable[[int, Prediction], None]:
        """Places an image in the folder of its class, if that is requested."""
        folder, method = self.config.sort_into, self.config.sort_with or "copy"
        if folder is None:
            return lambda _index, _prediction: None
        predictor = self.predictor
        return ImageSorter(folder, method, predictor.classes, self.images, predictor.tree)

    def predict(self, images: Sequence[str], first: int = 0) -> Iterator[Prediction]:
        """Yield predictions of `images`; `first` is the index of the first one in the list."""
        config = self.config
        options: dict[str, Any] = {"top_k": config.top_k, "threshold": config.threshold}
        if config.explain is not None:
            from vit.inference.attribution_plot import check_explainable, draw_explanations

            deletion = not config.no_deletion
            check_explainable(self.predictor, deletion=deletion)
            return draw_explanations(
                self.predictor,
                images,
                config.explain,
                deletion=deletion,
                notify=self.notify,
                **options,
            )
        if first and samples(self.inference):
            options["first"] = first  # sampling is seeded by the index
        return self.predictor.stream(images, reject=config.reject, sets=config.sets, **options)

    def count(self, prediction: Prediction) -> None:
        self.totals["failed"] += prediction.error is not None
        self.totals["captions"] += len(prediction.captions)
        self.totals["unended"] += sum(not caption.ended for caption in prediction.captions)
        self.totals["unknown"] += prediction.unknown is not None
        self.totals["unsure"] += prediction.error is None and prediction.best is None

    def write_stream(self) -> int:
        """Write rows to standard output, to a device, or with drawings; return the failures."""
        header, format_row = self.row_format()
        sort, total, begin = self.sorter(), len(self.images), time.monotonic()
        predictions = self.predict(self.images)  # raises before anything is written
        with open_output(None if self.config.out == "-" else self.config.out) as out:
            self.progress(0, total)
            out.write(header)
            for index, prediction in enumerate(predictions):
                sort(index, prediction)
                self.count(prediction)
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
            done = group.run_on_main(
                lambda: output.begin(
                    lock, settings, resume=config.resume, overwrite=config.overwrite
                )
            )
            if done is not None:
                if group.rank == 0:
                    self.notify(f"{printable(output.out)} is complete")
                return done.get("failed", 0)  # sums of counters leave zeros out
            # the main process shares its exclusive lock before the others can acquire theirs
            group.run_on_main(lambda: lock.acquire(shared=True))
            group.run_on_all(lambda: lock.acquire(shared=True))
            try:
                outcomes = self.predict_and_merge(output, settings)
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
        predicted = sum(outcome.predicted for outcome in outcomes)
        seconds = max(outcome.seconds for outcome in outcomes)
        return self.report(sum_totals(outcomes), done=predicted, seconds=seconds)

    def settings_record(self) -> dict[str, Any]:
        """Everything that determines the output; only a prediction with equal ones is resumed."""
        config, inference, predictor = self.config, self.inference, self.predictor
        paths = b"\0".join(map(os.fsencode, self.images))
        cells = hashlib.sha256()
        for row in self.cells.items():
            cells.update(repr(row).encode())
        digits = csv_settings(config, "csv")["digits"] if config.format == "csv" else None
        return {
            "vit": __version__,
            "engine": library_version(str(config.engine)),
            "model": sha256_of_files(model_files(config.model)),
            "list_of_images": hashlib.sha256(paths).hexdigest(),
            "images": len(self.images),
            "list_cells": cells.hexdigest() if self.cells else None,
            "batch_size": predictor.batch_size,
            "block": predictor.block_size,
            "device": str(predictor.device).split(":")[0],
            "precision": predictor.precision,
            **{name: getattr(inference, name) for name in RECORDED},
            "no_calibration": inference.no_calibration or None,
            "search": inference.search and asdict(inference.search),
            "threshold": config.threshold,
            "reject": config.reject or None,
            "sets": config.sets,
            "embeddings": config.embeddings and os.path.abspath(config.embeddings),
            "sort_into": config.sort_into and os.path.abspath(config.sort_into),
            "sort_with": (config.sort_with or "copy") if config.sort_into else None,
            "format": config.format,
            "format_separator": config.csv_separator,
            "format_digits": str(digits) if config.format == "csv" else None,
            "top_k": self.top_k,
            "processes": self.group.processes,
        }

    def predict_and_merge(
        self, output: ResumableOutput, settings: dict[str, Any]
    ) -> "list[Outcome]":
        """Predict in all processes, write the final files, and return each process's outcome."""
        group, config = self.group, self.config
        header, format_row = self.row_format()
        # the width of the network's embeddings
        dim = 0 if config.embeddings is None else int(self.predictor.model.num_features)
        log = group.run_on_all(lambda: output.open_log(group.rank, settings, resume=config.resume))
        rows = sum(group.all_gather(log.images))
        if rows and group.rank == 0:
            name = printable(output.partial)
            self.notify(f"resuming after {rows:,} of {plural(len(self.images), 'image')} in {name}")
        outcomes = group.all_gather(
            group.run_on_all(lambda: self.predict_own_images(output, log, format_row, dim))
        )
        workbook = partial(write_workbook, shares=self.predictor.shares)
        write = workbook if config.format == "xlsx" else None
        record = (settings, sum_totals(outcomes)) if config.resume else None
        images = len(self.images)
        group.run_on_main(lambda: output.finish(header.encode(), images, dim, write, record))
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
        blocks = [range(start, min(start + size, len(self.images))) for start in starts]
        total = sum(map(len, blocks))
        blocks = blocks[-(-log.images // size) :]
        images = [self.images[index] for block in blocks for index in block]
        self.totals.update(log.totals)
        sort = self.sorter()
        report_progress = (lambda *_: None) if group.rank else self.progress
        report_progress(log.images, total)
        predictions = self.predict(images, blocks[0][0] if blocks else 0)
        for indices in blocks:
            block = list(itertools.islice(predictions, len(indices)))
            for index, prediction in zip(indices, block, strict=True):
                sort(index, prediction)
                self.count(prediction)
            log.append(
                Block(
                    first=indices[0],
                    images=len(block),
                    rows="".join(map(format_row, block)).encode(),
                    vectors=encode_vectors((x.embedding for x in block), dim) if dim else b"",
                    errors=[(n, one.error) for n, one in enumerate(block) if one.error is not None],
                    totals=dict(self.totals),
                )
            )
            report_progress(log.images, total)
            check()
        return Outcome(self.totals, len(images), time.monotonic() - begin)

    def report(self, totals: Counter[str], *, done: int, seconds: float) -> int:
        """Report the summary; return how many images failed."""
        failed, total = totals["failed"], len(self.images)
        if totals["unended"]:
            self.notify(unended_note(totals["unended"], totals["captions"]))
        if self.config.reject:
            unknown = f"{totals['unknown']:,} of {plural(total, 'image')} are unknown"
            self.notify(f"{unknown}; {self.predictor.calibration.promise}")
        if self.config.sort_into is not None:
            into_unsure = f", {totals['unsure']:,} of them into {UNSURE}" * bool(totals["unsure"])
            self.notify(
                f"{plural(total - failed, 'image')} sorted into "
                f"{printable(self.config.sort_into)}{into_unsure}; {failed:,} failed and stay out "
                "of it"
            )
            nodes = () if self.predictor.tree is None else map(last_name, self.predictor.tree.nodes)
            if note := renamed_note([*dict.fromkeys(nodes)] or self.predictor.classes):
                self.notify(note)
        if total >= MIN_IMAGES_FOR_SUMMARY:
            rate = f"{done / seconds:,.4g}" if seconds > 0 and done else "0"
            images = f"{total:,} images" if done == total else f"{done:,} of {total:,} images"
            self.notify(f"{images} in {format_clock(seconds)}, {rate} images/s, {failed:,} failed")
        return failed


class Outcome(NamedTuple):
    """What one process has done."""

    totals: Counter[str]
    predicted: int
    seconds: float


def sum_totals(outcomes: Sequence[Outcome]) -> Counter[str]:
    return sum((outcome.totals for outcome in outcomes), Counter())


def check_interruption(output: ResumableOutput, signals: Interruption) -> None:
    """Raise after a signal, or after another process has failed (without a message)."""
    if signals.number:
        name = "Ctrl-C" if signals.number == 2 else "SIGTERM"
        raise Interrupted(f"stopped by {name}", signals.number)
    if output.processes > 1 and output.stop.exists():
        raise RunError("")

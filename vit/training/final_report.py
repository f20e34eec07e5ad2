"""After the last epoch: what the task adds to the run folder, and report.html; `vit report`.

Only the main process does this, on all validation images, or on `caption_samples` of them for
captions. The run is complete before: an error in the report is logged, and does not fail the run.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vit.config import Config
from vit.config.setting_layers import with_settings
from vit.config.stored_config import stored_config
from vit.data.dataloader import EvaluationLoader
from vit.data.dataset_types import Sample, Splits
from vit.data.preprocessing import Preprocessing
from vit.errors import DataError, RunError
from vit.evaluation.fit_calibration import MIN_DISTANCES
from vit.evaluation.run_report import REPORT_FILE
from vit.event_log import METRICS_FILE, EventLog, read_event_log
from vit.paths import did_you_mean, path_argument
from vit.stop_signals import Interrupted, Interruption
from vit.tasks.finished_run import FinishedRun
from vit.tasks.task import Task, get_task
from vit.training.checkpoint.run_folder import lock_folder, require_held_out
from vit.training.distributed.devices import inference_precision, make_accelerator
from vit.training.logging.environment import read_environment
from vit.training.logging.training_progress import notify
from vit.training.settings_from_data import prepare_data
from vit.training.teacher import with_teacher
from vit.training.training_context import TrainingContext
from vit.training.training_loaders import caption_ids_of, num_workers, validation_batch_size
from vit.weights.saved_model import load_run

DISTANCE_IMAGES = 2000
"""Training images, about, that the distance of other images is measured from."""


def distance_samples(config: Config, splits: Splits) -> Sequence[Sample]:
    """The training images that the distance of other images is measured from.

    Empty if there are too few images, and for bags.
    """
    samples = splits.train[:: max(1, len(splits.train) // DISTANCE_IMAGES)]
    few = min(len(samples), len(splits.val)) < MIN_DISTANCES
    return () if few or config.data.tiles else samples


def finished_run(
    config: Config,
    splits: Splits,
    task: Task,
    accelerator: Accelerator,
    *,
    workers: int | None,
    **known: Any,
) -> FinishedRun:
    """The best weights of a run, with what its task needs."""
    device, processes = accelerator.device, int(accelerator.num_processes)

    def open_loader(samples: Sequence[Sample], preprocessing: Preprocessing) -> EvaluationLoader:
        return EvaluationLoader(
            samples,
            preprocessing,
            batch_size=validation_batch_size(config, processes),
            workers=workers,
            pin_memory=device.type == "cuda",
            caption_ids=caption_ids_of(config, splits.tokenizer, samples),
            classes=task.label_width(config),
        )

    return FinishedRun(
        config=config,
        splits=splits,
        task=task,
        device=device,
        precision=inference_precision(config.run.precision, device),
        processes=processes,
        open_loader=open_loader,
        notify=notify,
        environment=read_environment(known["folder"]),
        **known,
    )


def finish_run(
    run: TrainingContext, folder: Path, splits: Splits, *, epoch: int
) -> dict[str, Any] | None:
    """Let the task complete the run folder, and write report.html, or log why it cannot be; returns
    the accuracy on new sources, if it was measured."""
    best = finished_run(
        run.config,
        splits,
        run.task,
        run.accelerator,
        workers=num_workers(run),
        folder=folder,
        best_epoch=epoch,
        interruption=run.interruption,
        failed=run.failed,
        distance_samples=distance_samples(run.config, splits) if run.task.measures_distance else (),
    )
    run.task.finish(best)
    best.__dict__.pop("loaded", None)  # which the task has completed
    try:
        run.task.write_report(best)
    except Interrupted:
        raise
    except Exception as error:  # a bug in the report does not make the run incomplete
        reason = f"{type(error).__name__}: {error}"
        notify(f"note: no {REPORT_FILE}, but the run is complete: {reason}")
    else:
        notify(f"report: {folder / REPORT_FILE}")
    return best.new_sources and best.new_sources.scores()


def report(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    workers: int | None = None,
    robustness: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.html of a finished run again, and return its path: `vit report`.

    Args:
        run: The run folder.
        data: Where the images of the training are now; where they were by default.
        device: cpu, cuda, cuda:N or mps; that of the training by default.
        workers: Loader processes.
        robustness: That of `vit.evaluate(run, data, corruptions=True)`, which becomes a section.

    Raises:
        VitError: The run has no finished epoch, its data are not there, or have other classes.
    """
    folder = Path(path_argument("run", run, "a run folder"))
    config, log = finished_config(folder)
    path = None if data is None else path_argument("data", data, "the images of the training")
    chosen = {"report": "full", "data": path, "device": device, "workers": workers}
    config = with_settings(config, **{n: v for n, v in chosen.items() if v is not None})
    accelerator = make_accelerator(config.run)
    if log.damage:
        notify(f"note: {log.damage}; the report has what is left")
    loaded = load_run(folder)
    with lock_folder(folder), Interruption() as signals:
        found, splits, failed = prepare_data(config, accelerator, notify, folder)
        if splits.unlabelled:  # their classes are those of the teacher
            splits = with_teacher(found, splits, accelerator, notify, folder)
        task = get_task(config.training.task).with_data(found, splits)
        if tuple(task.output_names(splits)) != tuple(loaded.classes):
            raise DataError(
                f"{config.data.data} has other classes than the run; vit evaluate "
                "measures it on them, matched by name"
            )
        require_held_out(folder, splits)
        best = finished_run(
            found,
            splits,
            task,
            accelerator,
            workers=found.data.workers,
            folder=folder,
            best_epoch=max(log.events, key=task.rank)["epoch"],
            interruption=signals,
            failed=failed,
            robustness=robustness,
        )
        task.write_report(best)
    return folder / REPORT_FILE


def finished_config(folder: Path) -> tuple[Config, EventLog]:
    """The settings of a run that has finished an epoch, and its epochs."""
    needed = ("config.yaml", METRICS_FILE, "model.safetensors")
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        hint = did_you_mean(folder) if not folder.exists() else ""
        raise RunError(
            f"{folder} is no run folder with a finished epoch: it has no {missing[0]}{hint}"
        )
    log = read_event_log(folder / METRICS_FILE, "epoch")
    if not log.events:
        why = log.damage or "nothing to report"
        raise RunError(f"{folder} has no finished epoch: {why}")
    return stored_config(folder), log

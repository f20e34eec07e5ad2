"""What the best weights of a run say of pictures, for its report and its thresholds."""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vit.data.loading import Batch, EvaluationLoader
from vit.data.samples import Sample, Splits
from vit.errors import DataError, printable
from vit.evaluation.metrics import Outcomes
from vit.evaluation.report import REPORT_FILE
from vit.precision import autocast
from vit.training.batches import micro_batch_size, rows_of, words_of, workers_of
from vit.training.devices import inference_precision
from vit.training.interruption import Interrupted
from vit.training.loop import Training
from vit.weights.folder import LoadedRun


def measure(
    run: Training, loaded: LoadedRun, splits: Splits, folder: Path
) -> tuple[Outcomes, list[str], dict[str, str]]:
    """Answers of the best weights to every validation picture, as the training measured them.

    Returns:
        Outcomes, the files they belong to, and the files that cannot be read with the reason.

    Raises:
        DataError: None can be read.
    """
    failed: dict[str, str] = {}
    parts = [
        (batch.indices, Outcomes.of(logits.softmax(dim=1), batch.labels))
        for batch, logits in answered(run, loaded, splits.val, folder, failed)
    ]
    paths = [splits.val[index].path for indices, _ in parts for index in indices.tolist()]
    return Outcomes.cat([outcomes for _, outcomes in parts]), paths, failed


def measure_several(
    run: Training, loaded: LoadedRun, splits: Splits, folder: Path
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Sigmoids of the best weights for every validation picture, float64 (pictures, classes).

    Returns:
        They, which pictures they belong to, (pictures,), and the files that cannot be read.

    Raises:
        DataError: None can be read.
    """
    failed: dict[str, str] = {}
    parts = [
        (logits.sigmoid(), batch.indices)
        for batch, logits in answered(run, loaded, splits.val, folder, failed)
    ]
    probabilities, indices = (torch.cat(part) for part in zip(*parts, strict=True))
    return probabilities, indices, failed


def answered(
    run: Training,
    loaded: LoadedRun,
    samples: Sequence[Sample],
    folder: Path,
    failed: dict[str, str],
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Batches of `samples` and the logits of the best weights, float64 (pictures, classes).

    Arguments and errors are those of `seen`.

    Raises:
        DataError: No picture can be read.
    """
    device = run.accelerator.device
    precision = inference_precision(run.config.run.precision, device)
    found = False
    with contextlib.closing(seen(run, loaded, samples, folder, failed)) as batches:
        for batch, images in batches:
            with torch.inference_mode(), autocast(precision, device):
                logits = loaded.model(images)
            found = True
            yield batch, logits.float().cpu().double()
    if not found:
        raise DataError("not one validation picture can be read")


def seen(
    run: Training,
    loaded: LoadedRun,
    samples: Sequence[Sample],
    folder: Path,
    failed: dict[str, str],
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Batches of `samples` with their normalised images, and the best weights on their device.

    Args:
        run: The finished training.
        loaded: Its best weights.
        samples: The pictures.
        folder: The run folder.
        failed: Receives the files that cannot be read, with the reason.

    Raises:
        Interrupted: A signal came.
    """
    device = run.accelerator.device
    loaded.model.to(device)
    loader = EvaluationLoader(
        samples,
        loaded.preprocessing,
        batch_size=micro_batch_size(run),
        workers=workers_of(run),
        pin_memory=device.type == "cuda",
        words=words_of(run, samples),
        classes=rows_of(run.config),
    )
    try:
        for batch in loader:
            if run.interruption.number:
                raise Interrupted(
                    f"interrupted before {REPORT_FILE} was written; the run is complete, and "
                    f"vit train --resume --out {printable(folder)} writes it",
                    run.interruption.number,
                )
            failed.update((bad.path, bad.reason) for bad in batch.failed)
            if len(batch.labels):
                images = batch.images.to(device, non_blocking=True)
                yield batch, loaded.preprocessing.normalise(images)
    finally:
        loader.close()

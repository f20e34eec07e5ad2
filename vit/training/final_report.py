"""After the last epoch: evaluates the best weights once more and writes report.html.

Only the main process does this, on all validation images, or on `caption_samples` of them for
captions. The run is complete before: an error here is logged, and does not fail the run.
"""

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.data.dataloader import EvaluationLoader
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.data.multilabel_targets import MultiHot, labels_of
from vit.errors import DataError, VitError, printable
from vit.evaluation.caption_report import (
    CaptionedImage,
    CaptionFacts,
    CaptionOutcomes,
    write_caption_report,
)
from vit.evaluation.classification_metrics import Outcomes
from vit.evaluation.classification_report import write_classification_report
from vit.evaluation.multilabel_metrics import DEFAULT_THRESHOLD, MIN_IMAGES, choose_thresholds
from vit.evaluation.multilabel_report import MultilabelOutcomes, write_multilabel_report
from vit.evaluation.run_report import REPORT_FILE, RunFacts
from vit.generation.caption import Caption
from vit.generation.caption_likelihood import MIN_SHUFFLED_GAP, matched_and_shuffled_losses
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Search
from vit.model.captioner import Captioner
from vit.precision import autocast
from vit.tasks.captioning import Captioning, is_chosen, target_words
from vit.text import join_names
from vit.training.distributed.devices import inference_precision
from vit.training.distributed.stop_signals import Interrupted
from vit.training.logging.training_progress import notify
from vit.training.training_loaders import caption_ids_of, micro_batch_size, num_workers
from vit.training.training_state import TrainingState
from vit.weights.saved_model import LoadedRun, load_run, set_thresholds


def measure(
    run: TrainingState, loaded: LoadedRun, splits: Splits, folder: Path
) -> tuple[Outcomes, list[str], dict[str, str]]:
    """Predictions of the best weights for every validation image.

    Returns:
        Outcomes, their files, and the unreadable files with the reason.

    Raises:
        DataError: No image can be read.
    """
    failed: dict[str, str] = {}
    parts = [
        (batch.indices, Outcomes.of(logits.softmax(dim=1), batch.labels))
        for batch, logits in predict_batches(run, loaded, splits.val, folder, failed)
    ]
    paths = [splits.val[index].path for indices, _ in parts for index in indices.tolist()]
    return Outcomes.cat([outcomes for _, outcomes in parts]), paths, failed


def measure_multilabel(
    run: TrainingState, loaded: LoadedRun, splits: Splits, folder: Path
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Multi-label probabilities of the best weights for every validation image.

    Returns:
        Probabilities, float64 (images, classes); their images' indices, (images,); and the
        unreadable files with the reason.

    Raises:
        DataError: No image can be read.
    """
    failed: dict[str, str] = {}
    parts = [
        (logits.sigmoid(), batch.indices)
        for batch, logits in predict_batches(run, loaded, splits.val, folder, failed)
    ]
    probabilities, indices = (torch.cat(part) for part in zip(*parts, strict=True))
    return probabilities, indices, failed


def predict_batches(
    run: TrainingState,
    loaded: LoadedRun,
    samples: Sequence[Sample],
    folder: Path,
    failed: dict[str, str],
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Batches of `samples` and the logits of the best weights, float64 (images, classes).

    Takes the arguments of `evaluation_batches`, and raises its errors.

    Raises:
        DataError: No image can be read.
    """
    device = run.accelerator.device
    precision = inference_precision(run.config.run.precision, device)
    found = False
    with contextlib.closing(evaluation_batches(run, loaded, samples, folder, failed)) as batches:
        for batch, images in batches:
            with torch.inference_mode(), autocast(precision, device):
                logits = loaded.model(images)
            found = True
            yield batch, logits.float().cpu().double()
    if not found:
        raise DataError("not one validation image can be read")


def evaluation_batches(
    run: TrainingState,
    loaded: LoadedRun,
    samples: Sequence[Sample],
    folder: Path,
    failed: dict[str, str],
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Batches of `samples` with their normalised images, and the best weights on their device.

    Args:
        run: The finished run.
        loaded: Its best weights.
        samples: The images.
        folder: The run folder.
        failed: Receives the files that cannot be read, with the reason.

    Raises:
        Interrupted: A signal was received.
    """
    device = run.accelerator.device
    loaded.model.to(device)
    loader = EvaluationLoader(
        samples,
        loaded.preprocessing,
        batch_size=micro_batch_size(run),
        workers=num_workers(run),
        pin_memory=device.type == "cuda",
        caption_ids=caption_ids_of(run, samples),
        classes=run.task.label_width(run.config),
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


@torch.inference_mode()
def measure_captions(
    run: TrainingState,
    loaded: LoadedRun,
    batches: Iterator[tuple[Batch, Tensor]],
    samples: Sequence[Sample],
) -> tuple[CaptionOutcomes, Outcomes | None]:
    """Captions by the best weights, their losses, and class predictions if there is a head.

    Args:
        run: The finished run.
        loaded: Its best weights, on its device.
        batches: Batches of `samples`, with normalised images on the device.
        samples: The images to evaluate.

    Raises:
        DataError: No image can be read.
    """
    model, tokenizer, device = loaded.model, loaded.tokenizer, run.accelerator.device
    assert isinstance(model, Captioner)
    assert tokenizer is not None
    precision = inference_precision(run.config.run.precision, device)
    input_images: list[CaptionedImage] = []
    answers: list[Outcomes] = []
    sums = torch.zeros(4, dtype=torch.float64)
    for batch, images in batches:
        assert batch.mismatched_ids is not None
        words, others = target_words(batch, device), batch.mismatched_ids.to(device)
        with autocast(precision, device):
            classes, memory = model.encode_images(images)
            written = generate_captions(model.decoder, memory, tokenizer, Search())
            losses = matched_and_shuffled_losses(
                model.decoder, memory, words, others, tokenizer.pad
            )
        sums += losses.sum(dim=1)
        means = (losses[0] / losses[1]).tolist()
        rows = zip(batch.indices.tolist(), written, means, strict=True)
        input_images += [
            captioned_image(samples[index], best, loss) for index, (best, *_), loss in rows
        ]
        if loaded.classes:
            probabilities = classes.float().cpu().double().softmax(dim=1)
            answers.append(Outcomes.of(probabilities, batch.labels))
    if not input_images:
        raise DataError("not one validation image can be read")
    summed, count, other_summed, other_count = sums.tolist()
    outcomes = CaptionOutcomes(
        images=input_images, loss=summed / count, shuffled_loss=other_summed / other_count
    )
    return outcomes, Outcomes.cat(answers) if answers else None


def captioned_image(sample: Sample, caption: Caption, loss: float) -> CaptionedImage:
    """The caption of one image, as the report shows it."""
    return CaptionedImage(
        path=sample.path,
        caption=caption.text,
        score=caption.score,
        ended=caption.ended,
        references=sample.captions,
        loss=loss,
    )


def caption_facts(run: TrainingState, splits: Splits) -> CaptionFacts:
    """Statistics of the captions, for the report."""
    task = run.task
    assert isinstance(task, Captioning)
    return CaptionFacts(
        captions=sum(len(sample.captions) for sample in splits.train),
        mean_tokens=task.mean_tokens,
        val_images=len(splits.val),
        min_shuffled_gap=MIN_SHUFFLED_GAP,
    )


def finish_run(run: TrainingState, folder: Path, splits: Splits, *, epoch: int) -> None:
    """Choose thresholds for a multi-label task, then write the report.

    Args:
        run, folder, splits, epoch: As for `try_report`.

    Raises:
        VitError: As `save_thresholds`.
    """
    if run.config.training.multilabel:
        save_thresholds(run, folder, splits)
    try_report(run, folder, splits, epoch=epoch)


def try_report(run: TrainingState, folder: Path, splits: Splits, *, epoch: int) -> None:
    """Write report.html, or log why it could not be written.

    Args:
        run: The finished run.
        folder: The run folder.
        splits: The data.
        epoch: The best epoch, from 1.

    Raises:
        Interrupted: A signal was received; the run itself is complete.
    """
    try:
        loaded = load_run(folder)
        report = report_of(loaded)
        report(run, loaded, folder, splits, epoch)
    except Interrupted:
        raise
    except (VitError, OSError, RuntimeError, ValueError, MemoryError) as error:
        notify(f"note: no {REPORT_FILE}, but the run is complete: {printable(error)}")
    except Exception as error:  # a bug in the report does not make the run incomplete
        reason = f"{type(error).__name__}: {printable(error)}"
        notify(f"note: no {REPORT_FILE}, but the run is complete: {reason}")
    else:
        notify(f"report: {printable(folder / REPORT_FILE)}")


def report_of(loaded: LoadedRun) -> Callable[[TrainingState, LoadedRun, Path, Splits, int], None]:
    """The function that writes the report of a network's task."""
    if loaded.tokenizer is not None:
        return report_captions
    return report_classes if loaded.thresholds is None else report_multilabel


def report_multilabel(
    run: TrainingState, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a multi-label classifier; arguments as for `try_report`."""
    probabilities, indices, failed = measure_multilabel(run, loaded, splits, folder)
    events = read_events(folder)
    facts = run_facts(run, loaded, splits, events, epoch=epoch, failed=failed)
    assert loaded.thresholds is not None, "an image may have several classes"
    write_multilabel_report(
        folder,
        facts=facts,
        events=events,
        outcomes=MultilabelOutcomes(
            probabilities=probabilities,
            targets=MultiHot(map(labels_of, splits.val), len(splits.classes))[indices],
            thresholds=loaded.thresholds,
            paths=[splits.val[index].path for index in indices.tolist()],
        ),
    )


def save_thresholds(run: TrainingState, folder: Path, splits: Splits) -> None:
    """Choose thresholds of the classes on the validation images, and write them to the run.

    Raises:
        VitError: The run cannot be read or written.
        Interrupted: A signal was received; the run is unchanged.
    """
    probabilities, indices, _ = measure_multilabel(run, load_run(folder), splits, folder)
    targets = MultiHot(map(labels_of, splits.val), len(splits.classes))[indices]
    thresholds, few = choose_thresholds(probabilities, targets)
    set_thresholds(folder, thresholds)
    notify(
        f"thresholds of the classes: {min(thresholds):.3f} to {max(thresholds):.3f}, by F1 on the "
        "validation images"
    )
    if few:
        names = join_names([printable(splits.classes[index]) for index in few])
        notify(
            f"note: fewer than {MIN_IMAGES} validation images have, or lack, class {names}: its "
            f"threshold is {DEFAULT_THRESHOLD}"
        )


def report_classes(
    run: TrainingState, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a classifier; arguments as for `try_report`."""
    outcomes, paths, failed = measure(run, loaded, splits, folder)
    events = read_events(folder)
    facts = run_facts(run, loaded, splits, events, epoch=epoch, failed=failed)
    write_classification_report(folder, facts=facts, events=events, outcomes=outcomes, paths=paths)


def report_captions(
    run: TrainingState, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a captioner; arguments as for `try_report`."""
    chosen = is_chosen(
        torch.arange(len(splits.val)), len(splits.val), run.config.training.caption_samples
    )
    samples = tuple(one for one, taken in zip(splits.val, chosen.tolist(), strict=True) if taken)
    failed: dict[str, str] = {}
    with contextlib.closing(evaluation_batches(run, loaded, samples, folder, failed)) as batches:
        outcomes, class_outcomes = measure_captions(run, loaded, batches, samples)
    events = read_events(folder)
    write_caption_report(
        folder,
        facts=run_facts(run, loaded, splits, events, epoch=epoch, failed=failed),
        caption_facts=caption_facts(run, splits),
        events=events,
        outcomes=outcomes,
        class_outcomes=class_outcomes,
    )


def run_facts(
    run: TrainingState,
    loaded: LoadedRun,
    splits: Splits,
    events: Sequence[Mapping[str, Any]],
    *,
    epoch: int,
    failed: Mapping[str, str],
) -> RunFacts:
    """Facts about the run that every report shows."""
    soups = [event["epochs"] for event in events if event["event"] == "soup" and event["better"]]
    return RunFacts(
        config=run.config,
        classes=splits.classes,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        machine=machine(run),
        train_images=len(splits.train),
        root=splits.root,
        val_held_out=splits.made,
        best_epoch=epoch,
        soup=soups[0] if soups else (),
        unreadable={**run.failed, **failed},
    )


def machine(run: TrainingState) -> str:
    """Devices and arithmetic, such as `1 x cuda, bf16`."""
    device = run.accelerator.device
    precision = inference_precision(run.config.run.precision, device)
    return f"{run.processes} x {device.type} in {precision}"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read the events of metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]

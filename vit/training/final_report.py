"""After the last epoch: the best weights are measured once more, and the report is written.

Only the main process does this, on all validation images, or on `caption_samples` of
them where captions are written; nothing that it does can cost a run that is already complete.

What the best weights of a run say of images, for its report and its thresholds.
What the best weights of a captioner say of the validation images, for its report.
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
    Captioned,
    CaptionOutcomes,
    WordFacts,
    write_caption_report,
)
from vit.evaluation.classification_metrics import Outcomes
from vit.evaluation.classification_report import REPORT_FILE, RunFacts, write_report
from vit.evaluation.multilabel_metrics import FEWEST, USUAL, choose_thresholds
from vit.evaluation.multilabel_report import Measured, write_multilabel_report
from vit.generation.caption import Caption
from vit.generation.caption_likelihood import MIN_SHUFFLED_GAP, matched_and_shuffled_losses
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Search
from vit.model.captioner import Captioner
from vit.precision import autocast
from vit.text import join_names
from vit.training.captioning_task import Captioning, is_chosen, target_words
from vit.training.devices import inference_precision
from vit.training.stop_signals import Interrupted
from vit.training.training_loaders import micro_batch_size, rows_of, words_of, workers_of
from vit.training.training_loop import TrainingState
from vit.training.training_progress import notify
from vit.weights.saved_model import LoadedRun, load_run, set_thresholds


def measure(
    run: TrainingState, loaded: LoadedRun, splits: Splits, folder: Path
) -> tuple[Outcomes, list[str], dict[str, str]]:
    """Answers of the best weights to every validation image, as the training measured them.

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


def measure_multilabel(
    run: TrainingState, loaded: LoadedRun, splits: Splits, folder: Path
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Sigmoids of the best weights for every validation image, float64 (images, classes).

    Returns:
        They, which images they belong to, (images,), and the files that cannot be read.

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
    run: TrainingState,
    loaded: LoadedRun,
    samples: Sequence[Sample],
    folder: Path,
    failed: dict[str, str],
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Batches of `samples` and the logits of the best weights, float64 (images, classes).

    Arguments and errors are those of `seen`.

    Raises:
        DataError: No image can be read.
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
        raise DataError("not one validation image can be read")


def seen(
    run: TrainingState,
    loaded: LoadedRun,
    samples: Sequence[Sample],
    folder: Path,
    failed: dict[str, str],
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Batches of `samples` with their normalised images, and the best weights on their device.

    Args:
        run: The finished training.
        loaded: Its best weights.
        samples: The images.
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
        caption_ids=words_of(run, samples),
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


@torch.inference_mode()
def measure_captions(
    run: TrainingState,
    loaded: LoadedRun,
    batches: Iterator[tuple[Batch, Tensor]],
    samples: Sequence[Sample],
) -> tuple[CaptionOutcomes, Outcomes | None]:
    """Captions of the best weights, their losses, and answers where there is a head for classes.

    Args:
        run: The finished training.
        loaded: Its best weights, on its device.
        batches: Of `samples`, with their normalised images on the device.
        samples: Those that are measured.

    Raises:
        DataError: Not one image can be read.
    """
    model, tokenizer, device = loaded.model, loaded.tokenizer, run.accelerator.device
    assert isinstance(model, Captioner)
    assert tokenizer is not None
    precision = inference_precision(run.config.run.precision, device)
    input_images: list[Captioned] = []
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
        told = zip(batch.indices.tolist(), written, means, strict=True)
        input_images += [captioned(samples[index], best, loss) for index, (best, *_), loss in told]
        if loaded.classes:
            chances = classes.float().cpu().double().softmax(dim=1)
            answers.append(Outcomes.of(chances, batch.labels))
    if not input_images:
        raise DataError("not one validation image can be read")
    summed, count, other_summed, other_count = sums.tolist()
    outcomes = CaptionOutcomes(
        images=input_images, loss=summed / count, other_loss=other_summed / other_count
    )
    return outcomes, Outcomes.cat(answers) if answers else None


def captioned(sample: Sample, caption: Caption, loss: float) -> Captioned:
    """What the report shows of an image."""
    return Captioned(
        path=sample.path,
        caption=caption.text,
        score=caption.score,
        ended=caption.ended,
        references=sample.captions,
        loss=loss,
    )


def word_facts(run: TrainingState, splits: Splits) -> WordFacts:
    """What the report tells of the words."""
    task = run.task
    assert isinstance(task, Captioning)
    return WordFacts(
        captions=sum(len(sample.captions) for sample in splits.train),
        mean_tokens=task.mean_tokens,
        val_images=len(splits.val),
        least_gap=MIN_SHUFFLED_GAP,
    )


def end(run: TrainingState, folder: Path, splits: Splits, *, epoch: int) -> None:
    """Choose thresholds, where an image may have several classes; then report.

    Args:
        run, folder, splits, epoch: As for `leave_report`.

    Raises:
        VitError: As `settle_thresholds`.
    """
    if run.config.training.multilabel:
        settle_thresholds(run, folder, splits)
    leave_report(run, folder, splits, epoch=epoch)


def leave_report(run: TrainingState, folder: Path, splits: Splits, *, epoch: int) -> None:
    """Write report.html, or say in one line why there is none.

    Args:
        run: The finished training.
        folder: The run folder.
        splits: The data.
        epoch: The best epoch, from 1.

    Raises:
        Interrupted: A signal came; the run itself is complete.
    """
    try:
        loaded = load_run(folder)
        report = report_of(loaded)
        report(run, loaded, folder, splits, epoch)
    except Interrupted:
        raise
    except (VitError, OSError, RuntimeError, ValueError, MemoryError) as error:
        notify(f"note: no {REPORT_FILE}, but the run is complete: {printable(error)}")
    except Exception as error:  # a fault of ours: the run is as complete as with any other
        said = f"{type(error).__name__}: {printable(error)}"
        notify(f"note: no {REPORT_FILE}, but the run is complete: {said}")
    else:
        notify(f"report: {printable(folder / REPORT_FILE)}")


def report_of(loaded: LoadedRun) -> Callable[[TrainingState, LoadedRun, Path, Splits, int], None]:
    """What writes the report of a network."""
    if loaded.tokenizer is not None:
        return report_captions
    return report_classes if loaded.thresholds is None else report_multilabel


def report_multilabel(
    run: TrainingState, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a network that says several classes; otherwise as `leave_report`."""
    probabilities, indices, failed = measure_multilabel(run, loaded, splits, folder)
    events = read_events(folder)
    facts = run_facts(run, loaded, splits, events, epoch=epoch, failed=failed)
    assert loaded.thresholds is not None, "an image may have several classes"
    write_multilabel_report(
        folder,
        facts=facts,
        events=events,
        measured=Measured(
            probabilities=probabilities,
            targets=MultiHot(map(labels_of, splits.val), len(splits.classes))[indices],
            thresholds=loaded.thresholds,
            paths=[splits.val[index].path for index in indices.tolist()],
        ),
    )


def settle_thresholds(run: TrainingState, folder: Path, splits: Splits) -> None:
    """Choose thresholds of classes on the validation images, and keep them in the run.

    Raises:
        VitError: The run cannot be read or written.
        Interrupted: A signal came; the run is as it was.
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
            f"note: fewer than {FEWEST} validation images have, or lack, class {names}: its "
            f"threshold is {USUAL}"
        )


def report_classes(
    run: TrainingState, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a classifier; arguments and errors are those of `leave_report`."""
    outcomes, paths, failed = measure(run, loaded, splits, folder)
    events = read_events(folder)
    facts = run_facts(run, loaded, splits, events, epoch=epoch, failed=failed)
    write_report(folder, facts=facts, events=events, outcomes=outcomes, paths=paths)


def report_captions(
    run: TrainingState, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a captioner; arguments and errors are those of `leave_report`."""
    chosen = is_chosen(
        torch.arange(len(splits.val)), len(splits.val), run.config.training.caption_samples
    )
    samples = tuple(one for one, taken in zip(splits.val, chosen.tolist(), strict=True) if taken)
    failed: dict[str, str] = {}
    with contextlib.closing(seen(run, loaded, samples, folder, failed)) as batches:
        outcomes, answers = measure_captions(run, loaded, batches, samples)
    events = read_events(folder)
    write_caption_report(
        folder,
        facts=run_facts(run, loaded, splits, events, epoch=epoch, failed=failed),
        word_facts=word_facts(run, splits),
        events=events,
        outcomes=outcomes,
        answers=answers,
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
    """What both reports tell of the run."""
    soups = [event["epochs"] for event in events if event["event"] == "soup" and event["better"]]
    return RunFacts(
        config=run.config,
        classes=splits.classes,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        machine=machine(run),
        train_images=len(splits.train),
        root=splits.root,
        made=splits.made,
        epoch=epoch,
        soup=soups[0] if soups else (),
        left_out={**run.failed, **failed},
    )


def machine(run: TrainingState) -> str:
    """Devices and arithmetic, such as `1 x cuda, bf16`."""
    device = run.accelerator.device
    precision = inference_precision(run.config.run.precision, device)
    return f"{run.processes} x {device.type} in {precision}"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl tells of the run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]

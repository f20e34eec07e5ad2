"""After the last epoch: the best weights are measured once more, and the report is written.

Only the main process does this, on all validation pictures, or on `caption_samples` of
them where captions are written; nothing that it does can cost a run that is already complete.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vit.data.samples import Splits
from vit.data.several import MultiHot, labels_of
from vit.data.sources.folders import some
from vit.errors import VitError, printable
from vit.evaluation.caption_report import write_caption_report
from vit.evaluation.report import REPORT_FILE, RunFacts, write_report
from vit.evaluation.several_metrics import FEWEST, USUAL, choose_thresholds
from vit.evaluation.several_report import Measured, write_several_report
from vit.training.answering import measure, measure_several, seen
from vit.training.caption_ending import measure_captions, word_facts
from vit.training.captioning import is_chosen
from vit.training.devices import inference_precision
from vit.training.interruption import Interrupted
from vit.training.loop import Training
from vit.training.progress import say
from vit.weights.folder import LoadedRun, load_run
from vit.weights.run_config import set_thresholds


def end(run: Training, folder: Path, splits: Splits, *, epoch: int) -> None:
    """Choose thresholds, where a picture may have several classes; then report.

    Args:
        run, folder, splits, epoch: As for `leave_report`.

    Raises:
        VitError: As `settle_thresholds`.
    """
    if run.config.training.several:
        settle_thresholds(run, folder, splits)
    leave_report(run, folder, splits, epoch=epoch)


def leave_report(run: Training, folder: Path, splits: Splits, *, epoch: int) -> None:
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
        say(f"note: no {REPORT_FILE}, but the run is complete: {printable(error)}")
    except Exception as error:  # a fault of ours: the run is as complete as with any other
        said = f"{type(error).__name__}: {printable(error)}"
        say(f"note: no {REPORT_FILE}, but the run is complete: {said}")
    else:
        say(f"report: {printable(folder / REPORT_FILE)}")


def report_of(loaded: LoadedRun) -> Callable[[Training, LoadedRun, Path, Splits, int], None]:
    """What writes the report of a network."""
    if loaded.tokenizer is not None:
        return report_captions
    return report_classes if loaded.thresholds is None else report_several


def report_several(
    run: Training, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a network that says several classes; otherwise as `leave_report`."""
    probabilities, indices, failed = measure_several(run, loaded, splits, folder)
    events = read_events(folder)
    facts = run_facts(run, loaded, splits, events, epoch=epoch, failed=failed)
    assert loaded.thresholds is not None, "a picture may have several classes"
    write_several_report(
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


def settle_thresholds(run: Training, folder: Path, splits: Splits) -> None:
    """Choose thresholds of classes on the validation pictures, and keep them in the run.

    Raises:
        VitError: The run cannot be read or written.
        Interrupted: A signal came; the run is as it was.
    """
    probabilities, indices, _ = measure_several(run, load_run(folder), splits, folder)
    targets = MultiHot(map(labels_of, splits.val), len(splits.classes))[indices]
    thresholds, few = choose_thresholds(probabilities, targets)
    set_thresholds(folder, thresholds)
    say(
        f"thresholds of the classes: {min(thresholds):.3f} to {max(thresholds):.3f}, by F1 on the "
        "validation pictures"
    )
    if few:
        names = some([printable(splits.classes[index]) for index in few])
        say(
            f"note: fewer than {FEWEST} validation pictures have, or lack, class {names}: its "
            f"threshold is {USUAL}"
        )


def report_classes(
    run: Training, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
) -> None:
    """Write the report of a classifier; arguments and errors are those of `leave_report`."""
    outcomes, paths, failed = measure(run, loaded, splits, folder)
    events = read_events(folder)
    facts = run_facts(run, loaded, splits, events, epoch=epoch, failed=failed)
    write_report(folder, facts=facts, events=events, outcomes=outcomes, paths=paths)


def report_captions(
    run: Training, loaded: LoadedRun, folder: Path, splits: Splits, epoch: int
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
    run: Training,
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


def machine(run: Training) -> str:
    """Devices and arithmetic, such as `1 x cuda, bf16`."""
    device = run.accelerator.device
    precision = inference_precision(run.config.run.precision, device)
    return f"{run.processes} x {device.type} in {precision}"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl tells of the run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]

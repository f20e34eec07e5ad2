"""After the last epoch: the best weights are measured once more, and the report is written.

Only the main process does this, on all validation pictures; nothing that it does can cost a run
that is already complete.
"""

import json
from pathlib import Path
from typing import Any

import torch

from vit.data.loading import EvaluationLoader
from vit.data.samples import Splits
from vit.errors import DataError, VitError, printable
from vit.evaluation.metrics import Outcomes
from vit.evaluation.report import REPORT_FILE, RunFacts, write_report
from vit.precision import autocast
from vit.training.batches import micro_batch_size
from vit.training.devices import inference_precision
from vit.training.interruption import Interrupted
from vit.training.loop import Training
from vit.training.progress import say
from vit.weights.folder import LoadedRun, load_run


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
        outcomes, paths, failed = measure(run, loaded, splits, folder)
        events = read_events(folder)
        soups = [
            event["epochs"] for event in events if event["event"] == "soup" and event["better"]
        ]
        facts = RunFacts(
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
        write_report(folder, facts=facts, events=events, outcomes=outcomes, paths=paths)
    except Interrupted:
        raise
    except (VitError, OSError, RuntimeError, ValueError, MemoryError) as error:
        say(f"note: no {REPORT_FILE}, but the run is complete: {printable(error)}")
    else:
        say(f"report: {printable(folder / REPORT_FILE)}")


@torch.inference_mode()
def measure(
    run: Training, loaded: LoadedRun, splits: Splits, folder: Path
) -> tuple[Outcomes, list[str], dict[str, str]]:
    """Answers of the best weights to every validation picture, as the training measured them.

    Returns:
        Outcomes, the files they belong to, and the files that cannot be read with the reason.
    """
    device = run.accelerator.device
    precision = inference_precision(run.config.run.precision, device)
    model = loaded.model.to(device)
    loader = EvaluationLoader(
        splits.val,
        loaded.preprocessing,
        batch_size=micro_batch_size(run),
        workers=run.config.data.workers,
        pin_memory=device.type == "cuda",
    )
    parts: list[Outcomes] = []
    paths: list[str] = []
    failed: dict[str, str] = {}
    try:
        for batch in loader:
            if run.interruption.number:
                raise Interrupted(
                    f"interrupted before {REPORT_FILE} was written; the run is complete, and "
                    f"vit train --resume --out {printable(folder)} writes it",
                    run.interruption.number,
                )
            failed.update((bad.path, bad.reason) for bad in batch.failed)
            if not len(batch.labels):
                continue
            images = loaded.preprocessing.normalise(batch.images.to(device, non_blocking=True))
            with autocast(precision, device):
                logits = model(images)
            parts.append(Outcomes.of(logits.float().cpu().double().softmax(dim=1), batch.labels))
            paths += [splits.val[index].path for index in batch.indices.tolist()]
    finally:
        loader.close()
    if not parts:
        raise DataError("not one validation picture can be read")
    return Outcomes.cat(parts), paths, failed


def machine(run: Training) -> str:
    """Devices and arithmetic, such as `1 x cuda, bf16`."""
    device = run.accelerator.device
    precision = inference_precision(run.config.run.precision, device)
    return f"{run.processes} x {device.type} in {precision}"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl tells of the run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]

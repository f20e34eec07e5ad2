"""Accuracy of a run and of its exported file: the score of the task on the same labelled images."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vit.data.dataset_types import Sample
from vit.errors import BadImage, DataError, VitError
from vit.evaluation.metric_rows import metric_of
from vit.exported.onnx_session import Array, OnnxSession
from vit.tasks.task import calibrated_activation, task_of_run
from vit.text import Notify, format_clock, percent
from vit.weights.saved_model import LoadedRun

BATCH_SIZE = 16
"""Images that torch computes at once."""
MAX_DROP = 0.01
SECONDS = 30.0
"""Between two lines about a long comparison."""


@dataclass(frozen=True)
class Accuracy:
    """Scores of a run and of its file on the same images; `before` is that of the run."""

    count: int
    failed: int
    before: float | None
    after: float | None
    agreement: float | None
    difference: float
    score: str = "top-1"

    @property
    def drop(self) -> float:
        """Loss of the score; 0 where it is undefined."""
        return 0.0 if self.before is None or self.after is None else self.before - self.after

    def check(self, max_drop: float | None, name: str) -> None:
        """Raise VitError if the file loses more than `max_drop`, by default MAX_DROP."""
        max_drop = MAX_DROP if max_drop is None else max_drop
        lost = self.drop
        if self.score == "top-1":
            lost = round(self.drop * self.count) / self.count  # as a share of whole images
        if lost > max_drop:
            raise VitError(
                f"{name} would lose {lost:.2%} of {self.score} ({percent(self.before)} "
                f"to {percent(self.after)} on {self.count} images), more than max_drop="
                f"{max_drop:g}; nothing was written; calibrate with more images, or choose another "
                "precision"
            )

    def line(self) -> str:
        left_out = f"; {self.failed} could not be read" if self.failed else ""
        answer = "class" if self.score == "top-1" else "classes"
        alike = f"numbers within {self.difference:.2g}"
        if self.agreement is not None:
            share = f"{self.agreement:.2%}"
            alike = f"same {answer} on {share}, probabilities within {self.difference:.2g}"
        return (
            f"{self.score}: run {percent(self.before)}, file {percent(self.after)}, on "
            f"{self.count} images ({alike}{left_out})"
        )


def compare(
    run: LoadedRun,
    session: OnnxSession,
    samples: Sequence[Sample],
    notify: Notify = lambda _line: None,
) -> Accuracy:
    """Accuracy of `run` in float32, and of the file that `session` computes."""
    task = task_of_run(run)
    ours: list[Array] = []
    theirs: list[Array] = []
    readable: list[Sample] = []
    start = last = time.monotonic()
    for number in range(0, len(samples), BATCH_SIZE):
        images: list[Tensor] = []
        for sample in samples[number : number + BATCH_SIZE]:
            try:
                image = run.preprocessing.read(sample.path)
            except BadImage:
                continue
            theirs.append(session({"images": run.preprocessing.to_graph_input(image)[None]})[0][0])
            if not np.isfinite(theirs[-1]).all():
                raise VitError(
                    f"{sample.path}: the exported network overflows; nothing was "
                    "written; choose precision fp32"
                )
            images.append(run.preprocessing(image))
            readable.append(sample)
        if images:
            ours.extend(probabilities(run, images))
        done, now = number + BATCH_SIZE, time.monotonic()
        if now - last >= SECONDS and done < len(samples):
            left = format_clock((now - start) / done * (len(samples) - done))
            notify(f"compared {done:,} of {len(samples):,} images with the run, {left} left")
            last = now
    if not readable:
        raise DataError(f"none of {len(samples)} images can be read; choose other data")
    before, after = np.stack(ours), np.stack(theirs)
    decided, again = (task.decisions(one, run.thresholds) for one in (before, after))
    return Accuracy(
        count=len(readable),
        failed=len(samples) - len(readable),
        before=task.score(before, readable),
        after=task.score(after, readable),
        agreement=None if decided is None else float((decided == again).all(axis=1).mean()),
        difference=float(np.abs(before - after).max()),
        score=metric_of(task.share or task.metric).title,
    )


@torch.inference_mode()
def probabilities(run: LoadedRun, images: Sequence[Tensor]) -> Array:
    """Outputs of the network for preprocessed images, (images, outputs), in float32."""
    if run.preprocessing.native:
        logits = run.model.forward_packed([run.preprocessing.normalise(one) for one in images])
    else:
        logits = run.model(run.preprocessing.normalise(torch.stack([*images])))
    computed: Array = calibrated_activation(run)(logits).numpy()
    return computed

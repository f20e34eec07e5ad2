"""Accuracy of a run and of its exported file: top-1 on the same labelled images.

Multi-label networks are compared by mean average precision.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from vit.data.dataset_types import Sample
from vit.data.image_io import read_image
from vit.errors import BadImage, DataError, VitError, printable
from vit.exported.onnx_session import Array, OnnxSession
from vit.tasks.task import get_task
from vit.weights.saved_model import LoadedRun


@dataclass(frozen=True)
class Accuracy:
    """How run and file do on the same images.

    Args:
        count: Images that could be read.
        failed: Images that could not.
        before: Top-1 of the run, or what `score` says.
        after: The same of the file.
        agreement: Share of images for which both say the same class, or the same classes.
        difference: Largest difference of two probabilities.
        score: What was measured: top-1 or mAP.
    """

    count: int
    failed: int
    before: float
    after: float
    agreement: float
    difference: float
    score: str = "top-1"

    @property
    def drop(self) -> float:
        """Share of the score that the file loses."""
        return self.before - self.after

    def check(self, max_drop: float, name: str) -> None:
        """Refuse a file that loses too much.

        Raises:
            VitError: It does.
        """
        lost = self.drop
        if self.score == "top-1":
            lost = round(self.drop * self.count) / self.count  # as a share of whole images
        if lost > max_drop:
            raise VitError(
                f"{printable(name)} would lose {lost:.2%} of {self.score} ({self.before:.2%} to "
                f"{self.after:.2%} on {self.count} images), more than max_drop={max_drop:g}; "
                "nothing was written; calibrate with more images, or choose another precision"
            )

    def line(self) -> str:
        """For people."""
        left_out = f"; {self.failed} could not be read" if self.failed else ""
        answer = "class" if self.score == "top-1" else "classes"
        return (
            f"{self.score}: run {self.before:.2%}, file {self.after:.2%}, on {self.count} images "
            f"(same {answer} on {self.agreement:.2%}, probabilities within {self.difference:.2g}"
            f"{left_out})"
        )


def compare(run: LoadedRun, session: OnnxSession, samples: Sequence[Sample]) -> Accuracy:
    """Top-1 of `run`, and of the file that `session` computes.

    Raises:
        DataError: Not one image can be read.
        VitError: The file gives numbers that are none.
    """
    rows: list[tuple[Array, Array, Sample]] = []
    for sample, image in readable(samples):
        theirs = session({"images": np.asarray(image)[None]})[0][0]
        if not np.isfinite(theirs).all():
            raise VitError(
                f"{printable(sample.path)}: the exported network overflows; nothing was written; "
                "choose precision fp32"
            )
        rows.append((probabilities(run, image), theirs, sample))
    if not rows:
        raise DataError(f"none of {len(samples)} images can be read; choose other data")
    ours = np.stack([row[0] for row in rows])
    theirs = np.stack([row[1] for row in rows])
    seen = [row[2] for row in rows]
    task = get_task(run.task_name)
    named = [task.decisions(side, run.thresholds) for side in (ours, theirs)]
    return Accuracy(
        count=len(rows),
        failed=len(samples) - len(rows),
        before=task.score(ours, seen),
        after=task.score(theirs, seen),
        agreement=float((named[0] == named[1]).all(axis=1).mean()),
        difference=float(np.abs(ours - theirs).max()),
        score=task.score_name,
    )


def readable(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Image.Image]]:
    """The images that can be read."""
    for sample in samples:
        try:
            image = read_image(sample.path)
        except BadImage:
            continue
        yield sample, image


@torch.inference_mode()
def probabilities(run: LoadedRun, image: Image.Image) -> Array:
    """What torch says of one image, in float32."""
    floats = run.preprocessing.normalise(run.preprocessing(image).unsqueeze(0))
    computed: Array = get_task(run.task_name).activation()(run.model(floats))[0].numpy()
    return computed

"""What a file loses: top-1 of the run and of the file on the same labelled pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from vit.data.decoding import read_image
from vit.data.samples import Sample
from vit.errors import BadImage, DataError, VitError, printable
from vit.runtime.greedy import Array
from vit.runtime.session import Session
from vit.weights.folder import LoadedRun


@dataclass(frozen=True)
class Accuracy:
    """How run and file do on the same pictures.

    Args:
        count: Pictures that could be read.
        failed: Pictures that could not.
        before: Top-1 of the run.
        after: Top-1 of the file.
        agreement: Share of pictures for which both say the same class.
        difference: Largest difference of two probabilities.
    """

    count: int
    failed: int
    before: float
    after: float
    agreement: float
    difference: float

    @property
    def drop(self) -> float:
        """Share of top-1 that the file loses."""
        return self.before - self.after

    def check(self, max_drop: float, name: str) -> None:
        """Refuse a file that loses too much.

        Raises:
            VitError: It does.
        """
        lost = round(self.drop * self.count) / self.count  # as a share of whole pictures
        if lost > max_drop:
            raise VitError(
                f"{printable(name)} would lose {lost:.2%} of top-1 ({self.before:.2%} to "
                f"{self.after:.2%} on {self.count} pictures), more than max_drop={max_drop:g}; "
                "nothing was written; calibrate with more pictures, or choose another precision"
            )

    def line(self) -> str:
        """For people."""
        left_out = f"; {self.failed} could not be read" if self.failed else ""
        return (
            f"top-1: run {self.before:.2%}, file {self.after:.2%}, on {self.count} pictures "
            f"(same class on {self.agreement:.2%}, probabilities within {self.difference:.2g}"
            f"{left_out})"
        )


def compare(run: LoadedRun, session: Session, samples: Sequence[Sample]) -> Accuracy:
    """Top-1 of `run`, and of the file that `session` computes.

    Raises:
        DataError: Not one picture can be read.
        VitError: The file gives numbers that are none.
    """
    rows: list[tuple[Any, Any, int]] = []
    for sample, image in readable(samples):
        theirs = session({"images": np.asarray(image)[None]})[0][0]
        if not np.isfinite(theirs).all():
            raise VitError(
                f"{printable(sample.path)}: the exported network overflows; nothing was written; "
                "choose precision fp32"
            )
        rows.append((probabilities(run, image), theirs, sample.label))
    if not rows:
        raise DataError(f"none of {len(samples)} pictures can be read; choose other data")
    ours, theirs = (np.stack([row[side] for row in rows]) for side in (0, 1))
    labels = np.array([row[2] for row in rows])
    said = ours.argmax(1), theirs.argmax(1)
    return Accuracy(
        count=len(rows),
        failed=len(samples) - len(rows),
        before=float((said[0] == labels).mean()),
        after=float((said[1] == labels).mean()),
        agreement=float((said[0] == said[1]).mean()),
        difference=float(np.abs(ours - theirs).max()),
    )


def readable(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Image.Image]]:
    """The pictures that can be read."""
    for sample in samples:
        try:
            image = read_image(sample.path)
        except BadImage:
            continue
        yield sample, image


@torch.inference_mode()
def probabilities(run: LoadedRun, image: Image.Image) -> Array:
    """What torch says of one picture, in float32."""
    floats = run.preprocessing.normalise(run.preprocessing(image).unsqueeze(0))
    said: Array = run.model(floats).softmax(dim=1)[0].numpy()
    return said

"""Predicts with Ray in a process of its own, with workers that die.

python ray_child.py RUN OUT STYLE DIES IMAGE...    DIES: never, once or always
"""

import os
import signal
import sys
from pathlib import Path

from vit.errors import VitError
from vit.inference import ray_inference

run, out, style, dies, *images = sys.argv[1:]
mark = Path(f"{out}.died")


class Mortal(ray_inference.Worker):
    """Is killed when the piece with the image 20 is answered and not yet handed back."""

    def answers(self, images, first):
        found = super().answers(images, first)
        if first <= 20 < first + len(images) and (dies == "always" or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


if dies != "never":
    ray_inference.Worker = Mortal
settings = {"precision": "fp32", "batch_size": 4, "device": "cpu", "workers": 2}
try:
    failed = ray_inference.predict_with_ray(
        run, images, out, style=style, top_k=2, settings=settings,
        notify=lambda note: print(note, file=sys.stderr),
    )  # fmt: skip
except VitError as error:
    sys.exit(f"error: {error}")
print(failed)

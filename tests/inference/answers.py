"""What is expected of a predictor: logits of its network called directly, and its right answers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vit.data.image_io import read_image
from vit.inference.predictor import Predictor
from vit.weights.saved_model import LoadedRun


@torch.inference_mode()
def direct_logits(run: LoadedRun, paths: Sequence[str], model: nn.Module | None = None) -> Tensor:
    """Logits (images, classes) in float64 of the run's network, or of `model`, in one batch."""
    images = torch.stack([run.preprocessing(read_image(path)) for path in paths])
    return (model or run.model)(run.preprocessing.normalise(images)).double()


def right_answers(run: Path, paths: Sequence[str | Path]) -> list[bool]:
    """Whether the best class of each image is the name of its folder."""
    found = Predictor(run, device="cpu", precision="fp32")(paths)
    return [one.predictions[0][0] == Path(one.image).parent.name for one in found]

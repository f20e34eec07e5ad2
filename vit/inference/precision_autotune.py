"""Chooses fp32 or bf16 for a network on this CPU by timing both once, and caches the result.

Whether bf16 is faster on a CPU that has instructions for it depends on the machine and the network.
A trial runs real images in both precisions; its result is kept in the user's cache folder, so that
`vit predict` and `vit evaluate` use the same precision.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.atomic_files import write_text
from vit.config import ModelConfig
from vit.data.image_objects import ImageInput
from vit.errors import BadImage, RunError
from vit.evaluation.classification_metrics import ranking
from vit.paths import user_cache
from vit.precision import Precision, cpu_features
from vit.text import Notify, printable
from vit.timing import timed

ROUNDS = 3
MIN_BATCHES = 100
"""Batches of a list from which on a trial costs less than a tenth of the time."""
MIN_SPEEDUP = 1.1
"""Speed-up from which on bf16 is worth its rounding; less may be noise of a busy machine."""
PRECISIONS: tuple[Precision, Precision] = ("fp32", "bf16")

Predict = Callable[[Sequence[Tensor], Precision], Tensor]
Timer = Callable[[Callable[[], Tensor]], tuple[float, Tensor]]


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial of bf16 against fp32."""

    speedup: float
    agreement: float
    difference: float
    images: int

    @property
    def precision(self) -> Precision:
        """bf16 if it is clearly faster, else fp32."""
        return "bf16" if self.speedup >= MIN_SPEEDUP else "fp32"

    def line(self) -> str:
        """The chosen precision, its speed-up and its cost, for the user."""
        if self.precision == "fp32":
            return f"precision: fp32 (bf16 runs {self.speedup:.2f} times as fast here)"
        return (
            f"precision: bf16, {self.speedup:.2f} times as fast as fp32 here; of the first "
            f"{self.images} images {self.agreement:.0%} get the same class, and probabilities "
            f"differ by at most {self.difference:.4f}"
        )


def run_trial(
    predict: Predict, batches: Sequence[Sequence[Tensor]], timed: Timer = timed
) -> TrialResult:
    """Compute each batch in both precisions, which take turns in going first."""
    for precision in PRECISIONS:
        predict(batches[0], precision)
    speedups, same, differences = [], 0, [0.0]
    for turn, batch in enumerate(batches):
        runs: dict[Precision, tuple[float, Tensor]] = {}
        for precision in PRECISIONS[:: 1 if turn % 2 else -1]:
            runs[precision] = timed(lambda b=batch, p=precision: predict(b, p))  # type: ignore[misc]
        (slow, exact), (fast, rounded) = (runs[precision] for precision in PRECISIONS)
        speedups.append(slow / fast)
        same += int((ranking(exact)[:, 0] == ranking(rounded)[:, 0]).sum())
        differences.append(float((exact - rounded).abs().nan_to_num(1.0).max()))
    images = sum(map(len, batches))
    return TrialResult(statistics.median(speedups), same / images, max(differences), images)


class PrecisionAutotuner:
    """Precision of one network: cached, or chosen by a trial once a list is long enough."""

    def __init__(
        self,
        config: ModelConfig,
        usage: Mapping[str, Any],
        *,
        usual: Precision,
        notify: Notify,
        folder: Path | None = None,
    ) -> None:
        machine = {"cpu": sorted(cpu_features()), "torch": torch.__version__}
        network = {"network": asdict(config), "threads": torch.get_num_threads(), **usage}
        text = json.dumps({**machine, **network}, sort_keys=True, default=str)
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        self.path = (user_cache() / "precision" if folder is None else folder) / name
        self.notify = notify
        self.result = load_result(self.path)
        self.precision = usual if self.result is None else self.result.precision

    def choose(
        self,
        images: Sequence[ImageInput],
        batch_size: int,
        *,
        read: Callable[[ImageInput], Tensor | BadImage],
        run: Callable[[Sequence[Tensor], Precision], Any],
        timed: Timer = timed,
    ) -> Precision:
        """The precision for `images`, after a trial on the first of them if none is cached."""
        if self.result is not None or len(images) < MIN_BATCHES * batch_size:
            return self.precision
        read_images = [read(image) for image in images[: ROUNDS * batch_size]]
        good = [image for image in read_images if isinstance(image, Tensor)]
        starts = range(0, len(good) - batch_size + 1, batch_size)
        batches = [good[start : start + batch_size] for start in starts]
        if not batches:
            return self.precision
        result = run_trial(lambda batch, way: run(batch, way).probabilities, batches, timed)
        self.result, self.precision = result, result.precision
        self.notify(result.line())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(asdict(result)) + "\n")
        except (OSError, RunError):
            self.notify(
                f"note: {printable(self.path.parent)} cannot be written, so this is measured again "
                "each time; set XDG_CACHE_HOME to a folder that can, or give --precision"
            )
        return self.precision


def load_result(path: Path) -> TrialResult | None:
    """The cached result; None if it is missing or damaged."""
    try:
        result = TrialResult(**json.loads(path.read_text(encoding="utf-8")))
        return result if all(math.isfinite(value) for value in asdict(result).values()) else None
    except (OSError, ValueError, TypeError):
        return None

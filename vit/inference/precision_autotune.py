"""Which arithmetic is faster for one network on this machine: timed once, then remembered.

Where a CPU has instructions for bf16, no rule says whether they pay: that depends on the machine
and on the network. A trial runs real images both ways in turn; its verdict is kept in the user's
cache folder, so that `vit predict` and `vit evaluate` agree, today and tomorrow.
"""

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.errors import BadImage, RunError, printable
from vit.evaluation.classification_metrics import ranking
from vit.inference.model_runner import Seen
from vit.paths import user_cache
from vit.precision import Precision, cpu_words
from vit.weights.safetensors_io import write_text

ROUNDS = 3
WORTH = 100
"""Batches of a list from which on a trial costs less than a tenth of the time."""
CLEARLY = 1.1
"""How much faster bf16 must be: less is not worth its rounding, and a busy machine may say so."""
WAYS: tuple[Precision, Precision] = ("fp32", "bf16")

Answers = Callable[[Sequence[Tensor], Precision], Tensor]
Timed = Callable[[Callable[[], Tensor]], tuple[float, Tensor]]


def timed(compute: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds that a computation takes, and what it gives."""
    began = time.perf_counter()
    found = compute()
    return time.perf_counter() - began, found


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    Args:
        speedup: How many times as fast bf16 is as fp32.
        agreement: Share of the images with the same most probable class.
        difference: Largest difference of a probability.
        images: That both were computed of.
    """

    speedup: float
    agreement: float
    difference: float
    images: int

    @property
    def precision(self) -> Precision:
        """The faster arithmetic; fp32 where bf16 gains little."""
        return "bf16" if self.speedup >= CLEARLY else "fp32"

    def line(self) -> str:
        """What was picked, how much faster it is, and what it costs."""
        if self.precision == "fp32":
            return f"precision: fp32 (bf16 runs {self.speedup:.2f} times as fast here)"
        return (
            f"precision: bf16, {self.speedup:.2f} times as fast as fp32 here; of the first "
            f"{self.images} images {self.agreement:.0%} get the same class, and probabilities "
            f"differ by at most {self.difference:.4f}"
        )


def trial(answers: Answers, batches: Sequence[Sequence[Tensor]], timed: Timed) -> Verdict:
    """Compute each of `batches` both ways in turn; each goes first as often as last.

    Args:
        answers: Probabilities (batch, classes) of prepared images.
        batches: Real images; the first is computed once more before, without being timed.
        timed: Runs a computation and says how long it took.
    """
    for way in WAYS:
        answers(batches[0], way)
    speedups, same, differences = [], 0, [0.0]
    for turn, batch in enumerate(batches):
        found: dict[Precision, tuple[float, Tensor]] = {}
        for way in WAYS[:: 1 if turn % 2 else -1]:
            found[way] = timed(lambda batch=batch, way=way: answers(batch, way))  # type: ignore[misc]
        (slow, exact), (fast, rough) = (found[way] for way in WAYS)
        speedups.append(slow / fast)
        same += int((ranking(exact)[:, 0] == ranking(rough)[:, 0]).sum())
        differences.append(float((exact - rough).abs().nan_to_num(1.0).max()))
    images = sum(map(len, batches))
    return Verdict(statistics.median(speedups), same / images, max(differences), images)


class Choice:
    """The arithmetic of one network: remembered, or picked when a list is long enough.

    Args:
        config: Of the network.
        about: What else of its use a verdict depends on.
        usual: Taken while nothing is known.
        say: Told what a trial picked.
        folder: Where verdicts are kept; in the user's cache when left out.
    """

    def __init__(
        self,
        config: ModelConfig,
        about: Mapping[str, Any],
        *,
        usual: Precision,
        notify: Callable[[str], object],
        folder: Path | None = None,
    ) -> None:
        self.folder = user_cache() / "precision" if folder is None else folder
        self.key = key_of(network=asdict(config), threads=torch.get_num_threads(), **about)
        self.notify = notify
        self.verdict = remembered(self.folder, self.key)
        self.precision = usual if self.verdict is None else self.verdict.precision

    def settle(
        self,
        images: Sequence[str | os.PathLike[str]],
        size: int,
        *,
        read: Callable[[str], Tensor | BadImage],
        see: Callable[[Sequence[Tensor], Precision], Seen],
        timed: Timed = timed,
    ) -> Precision:
        """The arithmetic for `images`, in batches of `size`; tried on the first of them if need be.

        Args:
            images: Paths.
            size: Of a batch.
            read: Prepares an image.
            see: The network.
            timed: Runs a computation and says how long it took.
        """
        if self.verdict is not None or len(images) < WORTH * size:
            return self.precision
        prepared = [read(os.fspath(path)) for path in images[: ROUNDS * size]]
        good = [image for image in prepared if isinstance(image, Tensor)]
        batches = [good[at : at + size] for at in range(0, len(good) - size + 1, size)]
        if not batches:
            return self.precision
        verdict = trial(lambda batch, way: see(batch, way).probabilities, batches, timed)
        self.verdict, self.precision = verdict, verdict.precision
        self.notify(verdict.line())
        note = remember(self.folder, self.key, verdict)
        if note is not None:
            self.notify(note)
        return self.precision


def key_of(**about: Any) -> str:
    """The name of a verdict: changes with the CPU, torch, and whatever else it is `about`."""
    machine = {"cpu": sorted(cpu_words()), "torch": torch.__version__}
    text = json.dumps({**machine, **about}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def remembered(folder: Path, key: str) -> Verdict | None:
    """The verdict that is kept in `folder`; None where there is none, or it is damaged."""
    try:
        kept = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        verdict = Verdict(**kept)
        numbers = [float(value) for value in asdict(verdict).values()]
        return verdict if all(map(math.isfinite, numbers)) else None
    except (OSError, ValueError, TypeError):
        return None


def remember(folder: Path, key: str, verdict: Verdict) -> str | None:
    """Keep a verdict in `folder`; a note where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", json.dumps(asdict(verdict)) + "\n")
    except (OSError, RunError):
        return (
            f"note: {printable(folder)} cannot be written, so this is measured again each time; "
            "set XDG_CACHE_HOME to a folder that can, or give --precision"
        )
    return None

"""What the head of a network reads of each picture, made once and kept under its content.

features = pool(forward_features(preprocessing(picture)))      no augmentation
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from vit.config import ModelConfig
from vit.data.feed import OnBadImage
from vit.data.samples import Sample
from vit.data.sources.folders import count
from vit.errors import BadImage, DataError
from vit.training.agreement import on_main
from vit.training.feature_making import FeatureMaker
from vit.training.feature_store import FeatureStore
from vit.weights.tensorfile import digest

SENT = 2**24
"""Numbers sent from process to process at a time."""
NO_MATTER = ("num_classes", "dropout", "attention_dropout", "drop_path")
"""Settings of a network that its features do not depend on."""


@dataclass(frozen=True)
class Features:
    """What the head reads of the pictures that could be read, in the order of the samples.

    Args:
        values: (pictures, dim) float32, on the CPU.
        labels: (pictures,) int64.
        failed: The other pictures, and why.
    """

    values: Tensor
    labels: Tensor
    failed: dict[str, str]


def weights_digest(state: Mapping[str, Tensor], config: ModelConfig) -> str:
    """A name for everything in a network that its features depend on: not the head.

    Args:
        state: Weights by name, on any device.
        config: Settings of the network; the same weights mean something else in another one.
    """
    body = {
        name: tensor.detach().cpu()
        for name, tensor in state.items()
        if not name.startswith("head.")
    }
    settings = {
        name: repr(value) for name, value in asdict(config).items() if name not in NO_MATTER
    }
    return digest(body, settings)


def extract(
    samples: Sequence[Sample],
    maker: FeatureMaker,
    *,
    weights_key: str,
    say: Callable[[str], None],
    on_bad_image: OnBadImage = "stop",
    cache: Path | None = None,
) -> Features | None:
    """Features of `samples`; those in the cache are not made again. Call it on all processes.

    Args:
        samples: Files and their classes.
        maker: Makes those that are missing.
        weights_key: From `weights_digest`, of the maker's network.
        say: Told, on the main process, what came from the cache.
        on_bad_image: `stop` at a picture that cannot be read, or `skip` it.
        cache: Folder of features to take from and to add to; None keeps nothing.

    Returns:
        The same on all processes; None where the maker was interrupted: what was made is kept.

    Raises:
        BadImage: A picture cannot be read, and `on_bad_image` is stop.
        DataError: None can be read.
        RunError: The cache cannot be written, or a feature is not finite.
    """
    accelerator = maker.accelerator
    keys = maker.keys([sample.path for sample in samples])
    if keys is None:
        return None
    table = Table(samples, keys, on_bad_image)
    identity = maker.identity(weights_key)
    cached = on_main(accelerator, lambda: table.open(cache, identity, say))
    missing = [(key, path) for key, path in table.files.items() if key not in cached]
    with closing(maker.make(missing)) as chunks:
        for made in chunks:
            on_main(accelerator, lambda: table.keep(made.keys, made.values))  # noqa: B023
            table.leave_out(made.failed)
            if not made.whole:
                return None
    if accelerator.is_main_process:
        say(table.summary(cached))
    return table.features(accelerator)


@dataclass
class Table:
    """The features of a list of samples while they are collected; the main process has them all.

    Args:
        samples: Files and their classes.
        keys: Of each sample, or why there is none.
        on_bad_image: `stop` at a picture that cannot be read, or `skip` it.

    Raises:
        BadImage: A sample has no key, and is to stop the run.
    """

    samples: Sequence[Sample]
    keys: Sequence[bytes | BadImage]
    on_bad_image: OnBadImage
    store: FeatureStore | None = None
    pieces: list[tuple[list[bytes], Tensor]] = field(default_factory=list)
    bad: dict[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files: dict[bytes, str] = {}
        """Each content once, with the first file that has it."""
        for sample, key in zip(self.samples, self.keys, strict=True):
            if isinstance(key, bytes):
                self.files.setdefault(key, sample.path)
            elif self.on_bad_image == "stop":
                raise BadImage(key.path, key.reason)

    def open(
        self, cache: Path | None, identity: Mapping[str, object], say: Callable[[str], None]
    ) -> set[bytes]:
        """Take what `cache` has; answers with its keys."""
        if cache is not None:
            self.store = FeatureStore(cache, identity, say)
            self.pieces += self.store.read(self.files.keys())
        return {key for keys, _ in self.pieces for key in keys}

    def keep(self, keys: list[bytes], values: Tensor) -> None:
        """Take what was made, and write it down."""
        if keys:
            self.pieces.append((keys, values))
            if self.store is not None:
                self.store.write(keys, values)

    def leave_out(self, failed: Mapping[bytes, BadImage]) -> None:
        """Remember pictures that cannot be read.

        Raises:
            BadImage: They are to stop the run; the first of them in the order of the samples.
        """
        if failed and self.on_bad_image == "stop":
            first = next(failed[key] for key in self.files if key in failed)
            raise BadImage(first.path, first.reason)
        self.bad.update((key, bad.reason) for key, bad in failed.items())

    def summary(self, cached: set[bytes]) -> str:
        """Where the features came from, in a line."""
        good = [key for key in self.keys if isinstance(key, bytes) and key not in self.bad]
        taken = sum(key in cached for key in good)
        made = len(set(good) - cached)
        parts = [f"{made:,} made"]
        if self.store is not None:
            parts.insert(0, f"{taken:,} of {count(len(self.samples), 'picture')} from the cache")
        if same := len(good) - taken - made:
            parts.append(f"{same:,} the same as another")
        if lost := len(self.samples) - len(good):
            parts.append(f"{lost:,} left out that cannot be read")
        return f"features: {', '.join(parts)}"

    def features(self, accelerator: Accelerator) -> Features:
        """All of them in the order of the samples, on all processes.

        Raises:
            DataError: There are none.
        """
        failed: dict[str, str] = {}
        labels, good = [], []
        for sample, key in zip(self.samples, self.keys, strict=True):
            if isinstance(key, BadImage):
                failed[sample.path] = key.reason
            elif key in self.bad:
                failed[sample.path] = self.bad[key]
            else:
                labels.append(sample.label)
                good.append(key)
        if not good:
            raise DataError("not one picture can be read: there are no features")
        values = on_all(accelerator, lambda: self.values(good))
        return Features(values, torch.tensor(labels, dtype=torch.int64), failed)

    def values(self, keys: Sequence[bytes]) -> Tensor:
        """Features of `keys`, (pictures, dim); the pieces are used up."""
        place = {key: row for row, key in enumerate(self.files)}
        unique = torch.zeros(len(place), self.pieces[0][1].shape[1])
        while self.pieces:
            some, values = self.pieces.pop()
            unique[torch.tensor([place[key] for key in some])] = values
        rows = [place[key] for key in keys]
        return unique if rows == [*range(len(unique))] else unique[torch.tensor(rows)]


def on_all(accelerator: Accelerator, make: Callable[[], Tensor]) -> Tensor:
    """A large tensor that the main process makes, on the CPU of all."""
    made: list[Tensor] = []

    def shape() -> tuple[int, ...]:
        made.append(make())
        return tuple(made[0].shape)

    size = on_main(accelerator, shape)
    if accelerator.num_processes == 1:
        return made[0]
    values = made[0] if made else torch.empty(size)
    for part in torch.split(values, max(SENT // size[1], 1)):
        part.copy_(broadcast(part.to(accelerator.device)))
    return values

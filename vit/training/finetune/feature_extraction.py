"""Extracts the input of the head for each image, and caches it on disk by the image's content.

    features = pool(forward_features(preprocessing(image)))      without augmentation

    CACHE/<digest of weights, preprocessing, precision>/<random name>.safetensors
        keys    (images, 32) uint8     SHA-256 of the image file
        values  (images, dim) float32

Files are read by threads and divided among processes. No cache file is written twice, so two runs
may write at the same time.
"""

import contextlib
import hashlib
import json
import math
import os
import stat
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor

from vit.config import ModelConfig
from vit.data.archives import MAX_BYTES, is_inside, open_binary
from vit.data.dataloader import OnBadImage, default_workers
from vit.data.dataset_types import Sample
from vit.data.image_io import check_header, read_image
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, DataError, RunError, WeightsError, printable
from vit.model.vision_transformer import VisionTransformer
from vit.precision import autocast
from vit.text import plural
from vit.training.distributed.collectives import on_main
from vit.training.distributed.devices import arithmetic, inference_precision
from vit.weights.safetensors_io import digest, explain_write_errors, read_tensors, write_tensors

KEY_BYTES = 32
STALE_SECONDS = 24 * 3600


class FeatureStore:
    """Features of one network, one preprocessing and one arithmetic.

    Args:
        cache: The folder of all stores.
        identity: Everything but the image that a feature depends on, as JSON takes it.
        say: Told of damaged files.

    Raises:
        RunError: The folder cannot be written.
    """

    def __init__(
        self, cache: Path, identity: Mapping[str, object], notify: Callable[[str], None]
    ) -> None:
        text = json.dumps(identity, sort_keys=True)
        self.folder = cache / hashlib.sha256(text.encode()).hexdigest()[:32]
        self.notify = notify
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()

    def read(self, wanted: Set[bytes]) -> Iterator[tuple[list[bytes], Tensor]]:
        """What there is of `wanted`, chunk by chunk; a damaged chunk is told of and deleted.

        Returns:
            Keys, none of which comes twice, and their features (images, dim).
        """
        left = set(wanted)
        for path in sorted(self.folder.glob("[!.]*.safetensors")):
            try:
                keys, values = self._chunk(path)
            except WeightsError as error:
                self.notify(f"note: {error}; its features are made again")
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            rows = [row for row, key in enumerate(keys) if key in left]
            if rows:
                left.difference_update(keys)
                yield [keys[row] for row in rows], values[rows]

    def write(self, keys: Sequence[bytes], values: Tensor) -> None:
        """Keep `values`, (images, dim) float32, under different `keys`.

        Raises:
            RunError: The disk is full, or the folder cannot be written.
        """
        flat = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8)
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        write_tensors(path, {"keys": flat.view(-1, KEY_BYTES), "values": values}, {})

    def _chunk(self, path: Path) -> tuple[list[bytes], Tensor]:
        tensors, _ = read_tensors(path)
        keys, values = tensors.get("keys"), tensors.get("values")
        if (
            tensors.keys() != {"keys", "values"}
            or keys is None
            or values is None
            or (keys.dtype, values.dtype) != (torch.uint8, torch.float32)
            or (keys.ndim, values.ndim) != (2, 2)
            or keys.shape != (len(values), KEY_BYTES)
        ):
            raise WeightsError(f"{printable(path)} is damaged: it holds no features")
        flat = keys.numpy().tobytes()
        return [flat[at : at + KEY_BYTES] for at in range(0, len(flat), KEY_BYTES)], values

    def _clean(self) -> None:
        """Delete what writers that were killed have left; a living one is done within a day."""
        for path in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()


VERSION = 1
"""Of what a feature means; another one makes all of them anew."""
CHUNK = 1000
"""Images that are made, over all processes, before they are kept."""
HASHED = 4096
"""Files of one process hashed between two looks for a signal."""
PIECE = 2**20


class FeatureBatch(NamedTuple):
    """Features of some images, from all processes."""

    keys: list[bytes]
    """Of the images that could be read."""
    values: Tensor
    """Their features, (images, dim) float32."""
    failed: dict[bytes, BadImage]
    """The other ones."""
    whole: bool
    """Whether it is the whole chunk; False where a signal came."""


@dataclass(frozen=True, kw_only=True)
class FeatureExtractor:
    """Computes features, all processes together.

    Args:
        network: Whole, on the device of the accelerator; it is left in evaluation mode.
        preprocessing: How images are prepared.
        accelerator: The devices.
        precision: Setting `precision` of the run.
        batch_size: Images that a device takes at once.
        workers: Threads that read images; None to choose by the number of cores.
        interrupted: Asked between batches, at the same places on all processes; True, on all of
            them, ends the work.
        advance: Told how many more images of this process are done.
    """

    network: VisionTransformer
    preprocessing: Preprocessing
    accelerator: Accelerator
    precision: str
    batch_size: int
    workers: int | None = None
    interrupted: Callable[[], bool] = lambda: False
    advance: Callable[[int], None] = lambda _: None

    @property
    def threads(self) -> int:
        """How many read."""
        if self.workers is None:
            return default_workers(self.accelerator.num_processes)
        return max(self.workers, 1)

    def identity(self, weights_key: str) -> dict[str, Any]:
        """Everything but the image that a feature depends on."""
        return {
            "weights": weights_key,
            "preprocessing": self.preprocessing.to_dict(),
            "arithmetic": arithmetic(self.precision, self.accelerator.device),
            "version": VERSION,
        }

    def keys(self, paths: Sequence[str]) -> list[bytes | BadImage] | None:
        """Digests of the files, the same on all processes; None where a signal came."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        found: dict[int, bytes | BadImage] = {}
        with ThreadPoolExecutor(self.threads, thread_name_prefix="hash-image") as pool:
            for first in range(0, len(paths), HASHED * processes):
                mine = range(first, min(first + HASHED * processes, len(paths)))[rank::processes]
                found.update(zip(mine, pool.map(key_of, [paths[i] for i in mine]), strict=True))
                if self.interrupted():
                    return None
        keys = {place: key for part in gather_object([found]) for place, key in part.items()}
        return [keys[place] for place in range(len(paths))]

    def make(self, files: Sequence[tuple[bytes, str]]) -> Generator[FeatureBatch, None, None]:
        """Features of `files`, a chunk at a time; the same on all processes.

        Args:
            files: Keys and paths; no key comes twice.

        Raises:
            RunError: A feature is not finite.
        """
        processes = self.accelerator.num_processes
        chunks = [files[at : at + CHUNK] for at in range(0, len(files), CHUNK)]
        rounds = [math.ceil(len(chunk) / (processes * self.batch_size)) for chunk in chunks]
        self.network.eval()
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="read-image")
        try:
            batches = self.ahead(pool, self.share(chunks, rounds))
            for count in rounds:
                yield self.gathered(islice(batches, count))
        finally:
            pool.shutdown(cancel_futures=True)

    def share(
        self, chunks: Sequence[Sequence[tuple[bytes, str]]], rounds: Sequence[int]
    ) -> Iterator[Sequence[tuple[bytes, str]]]:
        """This process's batches of all chunks; empty ones where others have more."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        for chunk, batches in zip(chunks, rounds, strict=True):
            mine = chunk[rank::processes]
            for number in range(batches):
                yield mine[number * self.batch_size : (number + 1) * self.batch_size]

    def ahead(
        self, pool: ThreadPoolExecutor, batches: Iterator[Sequence[tuple[bytes, str]]]
    ) -> Iterator[list[tuple[bytes, Tensor | BadImage]]]:
        """Prepared images of `batches`, while threads read the next one."""
        reading: deque[list[tuple[bytes, Future[Tensor | BadImage]]]] = deque()
        while True:
            for batch in islice(batches, 2 - len(reading)):
                reading.append([(key, pool.submit(self.read, key, path)) for key, path in batch])
            if not reading:
                return
            yield [(key, image.result()) for key, image in reading.popleft()]

    def read(self, key: bytes, path: str) -> Tensor | BadImage:
        """One prepared image, uint8 (3, height, width), or why there is none."""
        try:
            image = self.preprocessing(read_image(path))
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the traceback, which holds memory
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(path, f"cannot be resized: {error}")
        if key_of(path) != key:  # its features would stand under the key of another content
            return BadImage(path, "it changed while it was read")
        return image

    def gathered(self, batches: Iterator[list[tuple[bytes, Tensor | BadImage]]]) -> FeatureBatch:
        """Features of a chunk, of which each process has some batches."""
        keys: list[bytes] = []
        values: list[Tensor] = []
        failed: dict[bytes, BadImage] = {}
        whole = True
        for batch in batches:
            good = {key: image for key, image in batch if isinstance(image, Tensor)}
            failed.update((key, bad) for key, bad in batch if isinstance(bad, BadImage))
            if good:
                keys += good
                values.append(self.forward(torch.stack([*good.values()])))
            self.advance(len(batch))
            if self.interrupted():
                whole = False
                break
        parts = gather_object([(keys, values, failed)])
        all_values = [part for _, some, _ in parts for part in some]
        together = torch.cat(all_values) if all_values else torch.empty(0, 0)
        if not together.isfinite().all():
            used = arithmetic(self.precision, self.accelerator.device)
            raise RunError(
                f"a feature is not finite in {used}: use --precision fp32, or check the weights"
            )
        return FeatureBatch(
            [key for some, _, _ in parts for key in some],
            together,
            {key: bad for _, _, some in parts for key, bad in some.items()},
            whole,
        )

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """Bytes (batch, 3, height, width) -> what the head reads, (batch, dim) float32, CPU"""
        network, device = self.network, self.accelerator.device
        count = len(images)
        # few shapes: the last batch of a list is filled up with blank images
        rows = min(self.batch_size, 1 << (count - 1).bit_length())
        filled = images.new_zeros(rows, *images.shape[1:])
        filled[:count] = images
        dtype = next(network.parameters()).dtype
        inputs = self.preprocessing.normalise(filled.to(device), dtype)
        with autocast(inference_precision(self.precision, device), device):
            read: Tensor = network.features(inputs)
        return read[:count].float().cpu()


def key_of(path: str) -> bytes | BadImage:
    """SHA-256 of the file `path`, or why it is no image."""
    total = hashlib.sha256()
    with contextlib.suppress(OSError, BadImage):
        # a pipe would block, a device never end
        if is_inside(path) or _is_readable(os.stat(path)):
            with open_binary(path) as file:
                while piece := file.read(PIECE):
                    total.update(piece)
            return total.digest()
    try:
        check_header(path)
    except BadImage as bad:
        return BadImage(bad.path, bad.reason)
    return BadImage(path, "cannot be read")


def _is_readable(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES


SENT = 2**24
"""Numbers sent from process to process at a time."""
IRRELEVANT_SETTINGS = ("num_classes", "dropout", "attention_dropout", "drop_path")
"""Settings of a network that its features do not depend on."""


@dataclass(frozen=True)
class Features:
    """What the head reads of the images that could be read, in the order of the samples.

    Args:
        values: (images, dim) float32, on the CPU.
        labels: (images,) int64.
        failed: The other images, and why.
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
        name: repr(value)
        for name, value in asdict(config).items()
        if name not in IRRELEVANT_SETTINGS
    }
    return digest(body, settings)


def extract(
    samples: Sequence[Sample],
    maker: FeatureExtractor,
    *,
    weights_key: str,
    notify: Callable[[str], None],
    on_bad_image: OnBadImage = "stop",
    cache: Path | None = None,
) -> Features | None:
    """Features of `samples`; those in the cache are not made again. Call it on all processes.

    Args:
        samples: Files and their classes.
        maker: Makes those that are missing.
        weights_key: From `weights_digest`, of the maker's network.
        say: Told, on the main process, what came from the cache.
        on_bad_image: `stop` at an image that cannot be read, or `skip` it.
        cache: Folder of features to take from and to add to; None keeps nothing.

    Returns:
        The same on all processes; None where the maker was interrupted: what was made is kept.

    Raises:
        BadImage: An image cannot be read, and `on_bad_image` is stop.
        DataError: None can be read.
        RunError: The cache cannot be written, or a feature is not finite.
    """
    accelerator = maker.accelerator
    keys = maker.keys([sample.path for sample in samples])
    if keys is None:
        return None
    table = FeatureTable(samples, keys, on_bad_image)
    identity = maker.identity(weights_key)
    cached = on_main(accelerator, lambda: table.open(cache, identity, notify))
    missing = [(key, path) for key, path in table.files.items() if key not in cached]
    with closing(maker.make(missing)) as chunks:
        for made in chunks:
            on_main(accelerator, lambda: table.keep(made.keys, made.values))  # noqa: B023
            table.leave_out(made.failed)
            if not made.whole:
                return None
    if accelerator.is_main_process:
        notify(table.summary(cached))
    return table.features(accelerator)


@dataclass
class FeatureTable:
    """The features of a list of samples while they are collected; the main process has them all.

    Args:
        samples: Files and their classes.
        keys: Of each sample, or why there is none.
        on_bad_image: `stop` at an image that cannot be read, or `skip` it.

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
        self, cache: Path | None, identity: Mapping[str, object], notify: Callable[[str], None]
    ) -> set[bytes]:
        """Take what `cache` has; answers with its keys."""
        if cache is not None:
            self.store = FeatureStore(cache, identity, notify)
            self.pieces += self.store.read(self.files.keys())
        return {key for keys, _ in self.pieces for key in keys}

    def keep(self, keys: list[bytes], values: Tensor) -> None:
        """Take what was made, and write it down."""
        if keys:
            self.pieces.append((keys, values))
            if self.store is not None:
                self.store.write(keys, values)

    def leave_out(self, failed: Mapping[bytes, BadImage]) -> None:
        """Remember images that cannot be read.

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
            parts.insert(0, f"{taken:,} of {plural(len(self.samples), 'image')} from the cache")
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
            raise DataError("not one image can be read: there are no features")
        values = on_all(accelerator, lambda: self.values(good))
        return Features(values, torch.tensor(labels, dtype=torch.int64), failed)

    def values(self, keys: Sequence[bytes]) -> Tensor:
        """Features of `keys`, (images, dim); the pieces are used up."""
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

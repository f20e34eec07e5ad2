"""Extracts the input of the head for each image, and caches it on disk by the image's content.

    features = pool(forward_features(preprocessing(image)))      without augmentation

An ImagePass may compute another vector of each image, such as the answers of a teacher.

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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vit.atomic_files import explain_write_errors
from vit.config import ModelConfig
from vit.data.archives import MAX_BYTES, is_inside, open_binary
from vit.data.dataloader import default_workers
from vit.data.dataset_types import Sample
from vit.data.image_io import check_header, read_image
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, DataError, RunError, WeightsError, error_text
from vit.model.vision_transformer import VisionTransformer
from vit.precision import autocast
from vit.text import Notify, plural, printable
from vit.training.distributed.collectives import broadcast_tensor, on_main
from vit.training.distributed.devices import arithmetic, inference_precision
from vit.weights.safetensors_io import digest, read_tensors, write_tensors

KEY_BYTES = 32
STALE_SECONDS = 24 * 3600
VERSION = 1
"""Part of the cache's identity; another one invalidates all features."""
CHUNK = 1000
"""Images that are computed, over all processes, before they are written to the cache."""
HASHED = 4096
"""Files that a process hashes between two checks for a signal."""
READ_BYTES = 2**20
OnBadImage = Literal["stop", "skip"]
IRRELEVANT_SETTINGS = ("num_classes", "dropout", "attention_dropout", "drop_path")
"""Settings of a network that its features do not depend on."""


@dataclass(frozen=True)
class Features:
    """Features of the readable images, in the order of the samples.

    Args:
        values: (images, dim) float32, on the CPU.
        labels: (images,) int64.
    """

    values: Tensor
    labels: Tensor
    failed: dict[str, str]


def extract(
    samples: Sequence[Sample],
    extractor: "ImagePass",
    *,
    weights_key: str,
    notify: Notify,
    on_bad_image: OnBadImage = "stop",
    cache: Path | None = None,
) -> Features | None:
    """Features of `samples`, from the cache or computed; all processes must make this call.

    Args:
        cache: Folder of the cache; None for no cache.

    Returns:
        The same on all processes; None after a signal, with the computed features in the cache.
    """
    accelerator = extractor.accelerator
    keys = extractor.keys([sample.path for sample in samples])
    if keys is None:
        return None
    table = FeatureTable(samples, keys, on_bad_image, extractor.title)
    identity = extractor.identity(weights_key)
    cached = on_main(accelerator, lambda: table.open(cache, identity, notify))
    missing = [(key, path) for key, path in table.files.items() if key not in cached]
    with closing(extractor.compute(missing)) as chunks:
        for chunk in chunks:
            on_main(accelerator, lambda: table.add(chunk.keys, chunk.values))  # noqa: B023
            table.exclude(chunk.failed)
            if not chunk.complete:
                return None
    if accelerator.is_main_process:
        notify(table.summary(cached))
    return table.features(accelerator)


def weights_digest(state: Mapping[str, Tensor], config: ModelConfig) -> str:
    """Digest of everything in a network that its features depend on, so without the head."""
    body = {name: tensor.detach().cpu() for name, tensor in state.items()}
    body = {name: tensor for name, tensor in body.items() if not name.startswith("head.")}
    settings = {name: repr(value) for name, value in asdict(config).items()}
    return digest(body, {n: v for n, v in settings.items() if n not in IRRELEVANT_SETTINGS})


class FeatureChunk(NamedTuple):
    """Features of some images, from all processes."""

    keys: list[bytes]
    """Keys of the readable images."""
    values: Tensor
    """Their features, (images, dim) float32."""
    failed: dict[bytes, BadImage]
    """The unreadable images."""
    complete: bool
    """False if a signal ended the work."""


@dataclass(frozen=True, kw_only=True)
class ImagePass(ABC):
    """Computes a vector of each image, on all processes.

    Args:
        batch_size: Images per device in one forward pass.
        workers: Threads that read images; by the number of cores if None.
    """

    title: ClassVar[str]
    """What is computed, for the log."""

    accelerator: Accelerator
    precision: str
    batch_size: int
    workers: int | None = None
    interrupted: Callable[[], bool] = lambda: False
    advance: Callable[[int], None] = lambda _: None

    @abstractmethod
    def identity(self, weights_key: str) -> dict[str, Any]:
        """Everything but the image that a vector depends on."""

    @abstractmethod
    def prepare(self, path: str) -> Tensor:
        """The input of one image, uint8."""

    @abstractmethod
    def vectors(self, inputs: Sequence[Tensor]) -> Tensor:
        """What is computed of the inputs of a batch, (batch, dim) float32 on the CPU."""

    @property
    def threads(self) -> int:
        """Number of threads that read files."""
        if self.workers is None:
            return default_workers(self.accelerator.num_processes)
        return max(self.workers, 1)

    def keys(self, paths: Sequence[str]) -> list[bytes | BadImage] | None:
        """Digests of the files, the same on all processes; None after a signal."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        found: dict[int, bytes | BadImage] = {}
        with ThreadPoolExecutor(self.threads, thread_name_prefix="hash-image") as pool:
            for first in range(0, len(paths), HASHED * processes):
                own = range(first, min(first + HASHED * processes, len(paths)))[rank::processes]
                found.update(zip(own, pool.map(content_key, [paths[i] for i in own]), strict=True))
                if self.interrupted():
                    return None
        keys = {index: key for part in gather_object([found]) for index, key in part.items()}
        return [keys[index] for index in range(len(paths))]

    def compute(self, files: Sequence[tuple[bytes, str]]) -> Generator[FeatureChunk, None, None]:
        """Features of `files`, distinct keys and paths, in chunks; the same on all processes."""
        processes = self.accelerator.num_processes
        chunks = [files[at : at + CHUNK] for at in range(0, len(files), CHUNK)]
        rounds = [math.ceil(len(chunk) / (processes * self.batch_size)) for chunk in chunks]
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="read-image")
        try:
            batches = self.prefetch(pool, self.own_batches(chunks, rounds))
            for count in rounds:
                yield self.compute_chunk(islice(batches, count))
        finally:
            pool.shutdown(cancel_futures=True)

    def own_batches(
        self, chunks: Sequence[Sequence[tuple[bytes, str]]], rounds: Sequence[int]
    ) -> Iterator[Sequence[tuple[bytes, str]]]:
        """This process's batches of all chunks; empty ones where other processes have more."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        for chunk, batches in zip(chunks, rounds, strict=True):
            own = chunk[rank::processes]
            for number in range(batches):
                yield own[number * self.batch_size : (number + 1) * self.batch_size]

    def prefetch(
        self, pool: ThreadPoolExecutor, batches: Iterator[Sequence[tuple[bytes, str]]]
    ) -> Iterator[list[tuple[bytes, Tensor | BadImage]]]:
        """Prepared images of `batches`, while threads read the next batch."""
        reading: deque[list[tuple[bytes, Future[Tensor | BadImage]]]] = deque()
        while True:
            for batch in islice(batches, 2 - len(reading)):
                reading.append([(key, pool.submit(self.read, key, path)) for key, path in batch])
            if not reading:
                return
            yield [(key, image.result()) for key, image in reading.popleft()]

    def read(self, key: bytes, path: str) -> Tensor | BadImage:
        """The input of one image, or the reason why it is unreadable."""
        try:
            image = self.prepare(path)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the traceback, which holds memory
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(path, f"cannot be resized: {error_text(error)}")
        if content_key(path) != key:  # the cache would have its features under another content
            return BadImage(path, "it changed while it was read")
        return image

    def compute_chunk(
        self, batches: Iterator[list[tuple[bytes, Tensor | BadImage]]]
    ) -> FeatureChunk:
        """Features of a chunk, from this process's batches and those of the others."""
        keys: list[bytes] = []
        values: list[Tensor] = []
        failed: dict[bytes, BadImage] = {}
        complete = True
        for batch in batches:
            images = {key: image for key, image in batch if isinstance(image, Tensor)}
            failed.update((key, bad) for key, bad in batch if isinstance(bad, BadImage))
            if images:
                keys += images
                values.append(self.vectors([*images.values()]))
            self.advance(len(batch))
            if self.interrupted():
                complete = False
                break
        parts = gather_object([(keys, values, failed)])
        tensors = [part for _, some, _ in parts for part in some]
        all_values = torch.cat(tensors) if tensors else torch.empty(0, 0)
        if not all_values.isfinite().all():
            used = arithmetic(self.precision, self.accelerator.device)
            raise RunError(
                f"{self.title}: one is not finite in {used}: use --precision fp32, or check the "
                "weights"
            )
        return FeatureChunk(
            [key for some, _, _ in parts for key in some],
            all_values,
            {key: bad for _, _, some in parts for key, bad in some.items()},
            complete,
        )


@dataclass(frozen=True, kw_only=True)
class FeatureExtractor(ImagePass):
    """Computes features on all processes."""

    title = "features"
    network: VisionTransformer
    preprocessing: Preprocessing

    def identity(self, weights_key: str) -> dict[str, Any]:
        """Everything but the image that a feature depends on."""
        return {
            "weights": weights_key,
            "preprocessing": self.preprocessing.to_dict(),
            "arithmetic": arithmetic(self.precision, self.accelerator.device),
            "version": VERSION,
        }

    def prepare(self, path: str) -> Tensor:
        """One image of the network, uint8 (3, height, width)."""
        deep = self.preprocessing.intensity_range
        return self.preprocessing(read_image(path, intensity_range=deep))

    def vectors(self, inputs: Sequence[Tensor]) -> Tensor:
        """Features of prepared images."""
        return self.forward(torch.stack([*inputs]))

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """uint8 (batch, 3, height, width) -> input of the head, (batch, dim) float32 on the CPU"""
        network, device = self.network.eval(), self.accelerator.device
        count = len(images)
        # few shapes for compilation: the last batch is padded with blank images
        rows = min(self.batch_size, 1 << (count - 1).bit_length())
        filled = images.new_zeros(rows, *images.shape[1:])
        filled[:count] = images
        dtype = next(network.parameters()).dtype
        inputs = self.preprocessing.normalise(filled.to(device), dtype)
        with autocast(inference_precision(self.precision, device), device):
            read: Tensor = network.features(inputs)
        return read[:count].float().cpu()


def content_key(path: str) -> bytes | BadImage:
    """SHA-256 of the file `path`, or the reason why it is no image."""
    total = hashlib.sha256()
    with contextlib.suppress(OSError, BadImage):
        # a pipe would block, a device never end
        if is_inside(path) or _is_readable(os.stat(path)):
            with open_binary(path) as file:
                while data := file.read(READ_BYTES):
                    total.update(data)
            return total.digest()
    try:
        check_header(path)
    except BadImage as bad:
        return BadImage(bad.path, bad.reason)
    return BadImage(path, "cannot be read")


def _is_readable(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES


class FeatureStore:
    """Cached features of one network, preprocessing and precision."""

    def __init__(self, cache: Path, identity: Mapping[str, object], notify: Notify) -> None:
        text = json.dumps(identity, sort_keys=True)
        self.folder = cache / hashlib.sha256(text.encode()).hexdigest()[:32]
        self.notify = notify
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".*.tmp"):  # of killed writers; others finish within a day
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    def read(self, wanted: Set[bytes]) -> Iterator[tuple[list[bytes], Tensor]]:
        """Distinct keys of `wanted` and their features (images, dim), file by file.

        A damaged file is reported and deleted.
        """
        left = set(wanted)
        for path in sorted(self.folder.glob("[!.]*.safetensors")):
            try:
                keys, values = self._read_file(path)
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
        """Write `values`, (images, dim) float32, under distinct `keys`."""
        flat = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8)
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        write_tensors(path, {"keys": flat.view(-1, KEY_BYTES), "values": values}, {})

    def _read_file(self, path: Path) -> tuple[list[bytes], Tensor]:
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


@dataclass
class FeatureTable:
    """Collects the features of `samples`; only the main process has them all."""

    samples: Sequence[Sample]
    keys: Sequence[bytes | BadImage]
    on_bad_image: OnBadImage
    title: str = "features"
    store: FeatureStore | None = None
    parts: list[tuple[list[bytes], Tensor]] = field(default_factory=list)
    failed: dict[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files: dict[bytes, str] = {}
        """The first file of each content."""
        for sample, key in zip(self.samples, self.keys, strict=True):
            if isinstance(key, bytes):
                self.files.setdefault(key, sample.path)
            elif self.on_bad_image == "stop":
                raise BadImage(key.path, key.reason)

    def open(
        self, cache: Path | None, identity: Mapping[str, object], notify: Notify
    ) -> set[bytes]:
        """Load the features that are in `cache`; returns their keys."""
        if cache is not None:
            self.store = FeatureStore(cache, identity, notify)
            self.parts += self.store.read(self.files.keys())
        return {key for keys, _ in self.parts for key in keys}

    def add(self, keys: list[bytes], values: Tensor) -> None:
        """Add computed features, and write them to the cache."""
        if keys:
            self.parts.append((keys, values))
            if self.store is not None:
                self.store.write(keys, values)

    def exclude(self, failed: Mapping[bytes, BadImage]) -> None:
        """Record unreadable images."""
        if failed and self.on_bad_image == "stop":
            first = next(failed[key] for key in self.files if key in failed)
            raise BadImage(first.path, first.reason)
        self.failed.update((key, bad.reason) for key, bad in failed.items())

    def summary(self, cached: set[bytes]) -> str:
        """Log line: how many features were cached and computed."""
        good = [key for key in self.keys if isinstance(key, bytes) and key not in self.failed]
        loaded = sum(key in cached for key in good)
        computed = len(set(good) - cached)
        counts = [f"{computed:,} made"]
        if self.store is not None:
            counts.insert(0, f"{loaded:,} of {plural(len(self.samples), 'image')} from the cache")
        if same := len(good) - loaded - computed:
            counts.append(f"{same:,} the same as another")
        if lost := len(self.samples) - len(good):
            counts.append(f"{lost:,} left out that cannot be read")
        return f"{self.title}: {', '.join(counts)}"

    def features(self, accelerator: Accelerator) -> Features:
        """All features in the order of the samples, on all processes."""
        failed: dict[str, str] = {}
        labels, good = [], []
        for sample, key in zip(self.samples, self.keys, strict=True):
            if isinstance(key, BadImage):
                failed[sample.path] = key.reason
            elif key in self.failed:
                failed[sample.path] = self.failed[key]
            else:
                labels.append(sample.label)
                good.append(key)
        if not good:
            raise DataError(f"not one image can be read: there are no {self.title}")
        values = broadcast_tensor(accelerator, lambda: self.values(good))
        return Features(values, torch.tensor(labels, dtype=torch.int64), failed)

    def values(self, keys: Sequence[bytes]) -> Tensor:
        """Features of `keys`, (images, dim); frees the parts."""
        index = {key: row for row, key in enumerate(self.files)}
        unique = torch.zeros(len(index), self.parts[0][1].shape[1])
        while self.parts:
            some, values = self.parts.pop()
            unique[torch.tensor([index[key] for key in some])] = values
        rows = [index[key] for key in keys]
        return unique if rows == [*range(len(unique))] else unique[torch.tensor(rows)]

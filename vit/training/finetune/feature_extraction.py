"""Extracts a vector of each image, and caches it on disk by the image's content.

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
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from vit.atomic_files import explain_write_errors
from vit.config import Config, ModelConfig
from vit.data.dataloader import default_workers
from vit.data.dataset_types import Sample
from vit.data.image_archives import open_binary
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, DataError, RunError, WeightsError, error_text
from vit.model.vision_transformer import VisionTransformer
from vit.paths import user_cache
from vit.precision import autocast
from vit.text import Notify, plural
from vit.training.distributed.collectives import broadcast_tensor, on_main
from vit.training.distributed.devices import arithmetic, inference_precision
from vit.weights.safetensors_io import digest, read_tensors, write_tensors

KEY_BYTES = 32
VERSION = 1
"""Part of the cache's identity; another one invalidates all vectors."""
CHUNK = 1000
"""Images that are computed, over all processes, before they are written to the cache."""
HASHED = 4096
"""Files that a process hashes between two checks for a signal."""
BATCH_SIZE, CPU_BATCH_SIZE = 64, 16
IRRELEVANT_SETTINGS = ("num_classes", "dropout", "attention_dropout", "drop_path")
"""Settings of a network that its features do not depend on."""

T = TypeVar("T")
Key = bytes
Keyed = tuple[Key, str]
"""SHA-256 of a file, and its path."""


@dataclass(frozen=True)
class Features:
    """Vectors of readable images in the order of samples, (images, dim) float32 on the CPU."""

    values: Tensor
    labels: Tensor
    failed: dict[str, str]


class Extractor(NamedTuple):
    """How the vector of an image is computed.

    Args:
        identity: Everything but the image that a vector depends on.
        vectors: Of the inputs of a batch, (batch, dim) float32 on the CPU.
    """

    title: str
    identity: Mapping[str, Any]
    prepare: Callable[[str], Tensor]
    vectors: Callable[[Sequence[Tensor]], Tensor]


class Chunk(NamedTuple):
    """What a process has computed."""

    keys: list[Key]
    values: list[Tensor]
    failed: dict[Key, BadImage]
    stopped: bool
    """Whether a signal ended the work."""


def extract(
    samples: Sequence[Sample],
    extractor: Extractor,
    config: Config,
    accelerator: Accelerator,
    notify: Notify,
    stopped: Callable[[], bool] = lambda: False,
) -> Features | None:
    """Vectors of `samples`, from the cache or computed; all processes must make this call.

    The same on all processes; None after a signal, with what was computed in the cache.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    size, workers = batch_size(accelerator.device), config.data.workers
    threads = default_workers(processes) if workers is None else max(workers, 1)
    with (
        ThreadPoolExecutor(threads, "read-image") as pool,
        tqdm(
            desc=extractor.title,
            total=len(samples) // processes,
            unit="img",
            disable=None if accelerator.is_main_process else True,
            leave=False,
        ) as bar,
    ):
        keys = content_keys([sample.path for sample in samples], accelerator, pool, stopped)
        if keys is None:
            return None
        require_readable((key for key in keys if isinstance(key, BadImage)), config)
        unreadable: dict[Key, BadImage] = {}
        files: dict[Key, str] = {}  # the first of each content
        for sample, key in zip(samples, keys, strict=True):
            if not isinstance(key, BadImage):
                files.setdefault(key, sample.path)
        store = FeatureStore(feature_folder(config), extractor.identity, files, notify)
        cached = on_main(accelerator, store.open)
        missing = [(key, path) for key, path in files.items() if key not in cached]
        chunks = [missing[at : at + CHUNK][rank::processes] for at in range(0, len(missing), CHUNK)]
        batches = [[own[at : at + size] for at in range(0, len(own), size)] for own in chunks]
        images = read_ahead(pool, partial(read, extractor), chain.from_iterable(batches))
        for own in batches:
            mine = compute(islice(images, len(own)), extractor, stopped, bar.update)
            parts: list[Chunk] = gather_object([mine])
            values = [part for each in parts for part in each.values]
            if not all(part.isfinite().all() for part in values):
                used = arithmetic(config.run.precision, accelerator.device)
                raise RunError(
                    f"{extractor.title}: one is not finite in {used}: use --precision fp32, or "
                    "check the weights"
                )
            made = [key for each in parts for key in each.keys]
            on_main(accelerator, partial(store.add, made, values))
            for each in parts:
                unreadable |= each.failed
            require_readable((unreadable[key] for key in files if key in unreadable), config)
            if any(each.stopped for each in parts):
                return None
    failed: dict[str, str] = {}
    labels, good = list[int](), list[Key]()
    for sample, key in zip(samples, keys, strict=True):
        if isinstance(key, BadImage):
            failed[sample.path] = key.reason
        elif key in unreadable:
            failed[sample.path] = unreadable[key].reason
        else:
            labels.append(sample.label)
            good.append(key)
    if not good:
        raise DataError(f"not one image can be read: there are no {extractor.title}")
    if accelerator.is_main_process:
        loaded, fresh = sum(key in cached for key in good), len({*good} - cached)
        total = plural(len(samples), "image")
        notify(f"{extractor.title}: {loaded:,} of {total} from the cache, {fresh:,} made")
    every = broadcast_tensor(accelerator, lambda: store.vectors(good))
    return Features(every, torch.tensor(labels), failed)


def feature_folder(config: Config) -> Path:
    """The folder of the cache."""
    folder = config.finetune.feature_cache
    return user_cache() / "features" if folder is None else Path(folder).expanduser()


def batch_size(device: torch.device) -> int:
    """Images of one forward pass."""
    return CPU_BATCH_SIZE if device.type == "cpu" else BATCH_SIZE


def require_readable(bad_images: Iterable[BadImage], config: Config) -> None:
    """Raise the first of `bad_images`, unless these are to be skipped."""
    for bad in bad_images:
        if config.data.on_bad_image == "stop":
            raise bad


def content_keys(
    paths: Sequence[str], accelerator: Accelerator, pool: Executor, stopped: Callable[[], bool]
) -> list[Key | BadImage] | None:
    """Digests of the files, the same on all processes; None after a signal."""
    own = range(len(paths))[accelerator.process_index :: accelerator.num_processes]
    found: dict[int, Key | BadImage] = {}
    for first in range(0, len(own), HASHED):
        some = own[first : first + HASHED]
        found.update(zip(some, pool.map(content_key, [paths[i] for i in some]), strict=True))
        if stopped():
            break
    keys = {index: key for part in gather_object([found]) for index, key in part.items()}
    return [keys[index] for index in range(len(paths))] if len(keys) == len(paths) else None


def content_key(path: str) -> Key | BadImage:
    """SHA-256 of the file `path`, or the reason why it cannot be read."""
    try:
        with open_binary(path) as file:
            return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
    except BadImage as bad:
        return BadImage(bad.path, bad.reason)
    except OSError as error:
        return BadImage(path, error_text(error))


def read_ahead(
    pool: Executor, act: Callable[[Keyed], T], batches: Iterable[Sequence[Keyed]]
) -> Iterator[list[T]]:
    """The results of `act` for each batch, while threads compute those of the next one."""
    ahead: Iterator[T] | None = None
    for batch in batches:
        now, ahead = ahead, pool.map(act, batch)
        if now is not None:
            yield [*now]
    if ahead is not None:
        yield [*ahead]


def read(extractor: Extractor, file: Keyed) -> tuple[Key, Tensor | BadImage]:
    """The key of an image, and its input or the reason why it is unreadable."""
    key, path = file
    try:
        image = extractor.prepare(path)
    except BadImage as bad:
        return key, BadImage(bad.path, bad.reason)  # without the traceback, which holds memory
    except (ValueError, OSError, MemoryError) as error:
        return key, BadImage(path, f"cannot be resized: {error_text(error)}")
    if content_key(path) != key:  # the cache would have its vector under another content
        return key, BadImage(path, "it changed while it was read")
    return key, image


def compute(
    batches: Iterable[list[tuple[Key, Tensor | BadImage]]],
    extractor: Extractor,
    stopped: Callable[[], bool],
    advance: Callable[[int], object],
) -> Chunk:
    """The vectors of this process's batches of a chunk, until a signal."""
    made = Chunk([], [], {}, False)
    for batch in batches:
        images = {key: image for key, image in batch if isinstance(image, Tensor)}
        made.failed.update((key, bad) for key, bad in batch if isinstance(bad, BadImage))
        if images:
            made.keys.extend(images)
            made.values.append(extractor.vectors([*images.values()]))
        advance(len(batch))
        if stopped():
            return made._replace(stopped=True)
    return made


def network_features(
    network: VisionTransformer,
    preprocessing: Preprocessing,
    config: Config,
    accelerator: Accelerator,
    weights_key: str,
) -> Extractor:
    """Extracts the input of the head of `network`."""
    device = accelerator.device
    precision = inference_precision(config.run.precision, device)

    def prepare(path: str) -> Tensor:
        return preprocessing(preprocessing.read(path))

    @torch.inference_mode()
    def vectors(inputs: Sequence[Tensor]) -> Tensor:
        count, dtype = len(inputs), next(network.parameters()).dtype
        if preprocessing.native:
            floats = [preprocessing.normalise(image.to(device), dtype) for image in inputs]
            with autocast(precision, device):
                return network.eval().features_packed(floats).float().cpu()
        # few shapes for compilation: the last batch is padded with blank images
        rows = min(batch_size(device), 1 << (count - 1).bit_length())
        filled = inputs[0].new_zeros(rows, *inputs[0].shape)
        torch.stack([*inputs], out=filled[:count])
        with autocast(precision, device):
            found: Tensor = network.eval().features(
                preprocessing.normalise(filled.to(device), dtype)
            )
        return found[:count].float().cpu()

    identity = {
        "weights": weights_key,
        "preprocessing": preprocessing.to_dict(),
        "arithmetic": arithmetic(config.run.precision, device),
        "version": VERSION,
    }
    return Extractor(title="features", identity=identity, prepare=prepare, vectors=vectors)


def weights_digest(state: Mapping[str, Tensor], config: ModelConfig) -> str:
    """Digest of everything in a network that its features depend on, so without the head."""
    body = {name: tensor.detach().cpu() for name, tensor in state.items()}
    body = {name: tensor for name, tensor in body.items() if not name.startswith("head.")}
    settings = {name: repr(value) for name, value in asdict(config).items()}
    return digest(body, {n: v for n, v in settings.items() if n not in IRRELEVANT_SETTINGS})


class FeatureStore:
    """Vectors by content, of the main process, and their cache on the disk."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, object],
        keys: Iterable[Key],
        notify: Notify,
    ) -> None:
        text = json.dumps(identity, sort_keys=True)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        self.rows = {key: row for row, key in enumerate(keys)}
        self.values = torch.empty(0)
        self.notify = notify

    def open(self) -> set[Key]:
        """Read the vectors that are in the cache; returns their keys."""
        found: set[Key] = set()
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("[!.]*.safetensors")):
            try:
                keys, values = read_vectors(path)
            except WeightsError as error:
                self.notify(f"note: {error}; its features are made again")
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            kept = [row for row, key in enumerate(keys) if key in self.rows]
            if kept:
                self._set([keys[row] for row in kept], values[kept])
                found.update(keys[row] for row in kept)
        return found

    def add(self, keys: Sequence[Key], values: Sequence[Tensor]) -> None:
        """Add vectors under distinct `keys`, and write them to the cache."""
        if not keys:
            return
        every = torch.cat([*values])
        self._set(keys, every)
        flat = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8)
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        write_tensors(path, {"keys": flat.view(-1, KEY_BYTES), "values": every}, {})

    def _set(self, keys: Sequence[Key], values: Tensor) -> None:
        if not len(self.values):
            self.values = torch.zeros(len(self.rows), values.shape[1])
        self.values[[self.rows[key] for key in keys]] = values

    def vectors(self, keys: Sequence[Key]) -> Tensor:
        """The vectors of `keys`, (images, dim)."""
        rows = [self.rows[key] for key in keys]
        return self.values if rows == [*range(len(self.values))] else self.values[rows]


def read_vectors(path: Path) -> tuple[list[Key], Tensor]:
    """Keys and vectors of a file of the cache."""
    tensors, _ = read_tensors(path)
    keys, values = tensors.get("keys"), tensors.get("values")
    if (
        keys is None
        or values is None
        or (keys.dtype, values.dtype) != (torch.uint8, torch.float32)
        or values.ndim != 2
        or keys.shape != (len(values), KEY_BYTES)
    ):
        raise WeightsError(f"{path} is damaged: it holds no features")
    flat = keys.numpy().tobytes()
    return [flat[at : at + KEY_BYTES] for at in range(0, len(flat), KEY_BYTES)], values

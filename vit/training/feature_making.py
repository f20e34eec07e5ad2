"""Keys and features of pictures: files are read by threads, the work is shared by processes."""

import contextlib
import hashlib
import math
import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vit.data.containers import MAX_BYTES, is_inside, open_binary
from vit.data.decoding import check_header, read_image
from vit.data.preprocessing import Preprocessing
from vit.data.processes import default_workers
from vit.errors import BadImage, RunError
from vit.model.classifier import VisionTransformer
from vit.precision import autocast
from vit.training.devices import arithmetic, inference_precision

VERSION = 1
"""Of what a feature means; another one makes all of them anew."""
CHUNK = 1000
"""Pictures that are made, over all processes, before they are kept."""
HASHED = 4096
"""Files of one process hashed between two looks for a signal."""
PIECE = 2**20


class Made(NamedTuple):
    """Features of some pictures, from all processes."""

    keys: list[bytes]
    """Of the pictures that could be read."""
    values: Tensor
    """Their features, (pictures, dim) float32."""
    failed: dict[bytes, BadImage]
    """The other ones."""
    whole: bool
    """Whether it is the whole chunk; False where a signal came."""


@dataclass(frozen=True, kw_only=True)
class FeatureMaker:
    """Computes features, all processes together.

    Args:
        network: Whole, on the device of the accelerator; it is left in evaluation mode.
        preprocessing: How pictures are prepared.
        accelerator: The devices.
        precision: Setting `precision` of the run.
        batch_size: Pictures that a device takes at once.
        workers: Threads that read pictures; None to choose by the number of cores.
        interrupted: Asked between batches, at the same places on all processes; True, on all of
            them, ends the work.
        advance: Told how many more pictures of this process are done.
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
        """Everything but the picture that a feature depends on."""
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
        everyones = {place: key for part in gather_object([found]) for place, key in part.items()}
        return [everyones[place] for place in range(len(paths))]

    def make(self, files: Sequence[tuple[bytes, str]]) -> Generator[Made, None, None]:
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
        for chunk, count in zip(chunks, rounds, strict=True):
            mine = chunk[rank::processes]
            for number in range(count):
                yield mine[number * self.batch_size : (number + 1) * self.batch_size]

    def ahead(
        self, pool: ThreadPoolExecutor, batches: Iterator[Sequence[tuple[bytes, str]]]
    ) -> Iterator[list[tuple[bytes, Tensor | BadImage]]]:
        """Prepared pictures of `batches`, while threads read the next one."""
        reading: deque[list[tuple[bytes, Future[Tensor | BadImage]]]] = deque()
        while True:
            for batch in islice(batches, 2 - len(reading)):
                reading.append([(key, pool.submit(self.read, key, path)) for key, path in batch])
            if not reading:
                return
            yield [(key, picture.result()) for key, picture in reading.popleft()]

    def read(self, key: bytes, path: str) -> Tensor | BadImage:
        """One prepared picture, uint8 (3, height, width), or why there is none."""
        try:
            picture = self.preprocessing(read_image(path))
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the traceback, which holds memory
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(path, f"cannot be resized: {error}")
        if key_of(path) != key:  # its features would stand under the key of another content
            return BadImage(path, "it changed while it was read")
        return picture

    def gathered(self, batches: Iterator[list[tuple[bytes, Tensor | BadImage]]]) -> Made:
        """Features of a chunk, of which each process has some batches."""
        keys: list[bytes] = []
        values: list[Tensor] = []
        failed: dict[bytes, BadImage] = {}
        whole = True
        for batch in batches:
            good = {key: picture for key, picture in batch if isinstance(picture, Tensor)}
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
        return Made(
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
        # few shapes: the last batch of a list is filled up with blank pictures
        rows = min(self.batch_size, 1 << (count - 1).bit_length())
        filled = images.new_zeros(rows, *images.shape[1:])
        filled[:count] = images
        dtype = next(network.parameters()).dtype
        inputs = self.preprocessing.normalise(filled.to(device), dtype)
        with autocast(inference_precision(self.precision, device), device):
            read: Tensor = network.features(inputs)
        return read[:count].float().cpu()


def key_of(path: str) -> bytes | BadImage:
    """SHA-256 of the file `path`, or why it is no picture."""
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

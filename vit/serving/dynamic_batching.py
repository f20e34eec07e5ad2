"""Dynamic batching: images of all requests share batches, and wait in one bounded queue.

    request -> decode (threads) -> waiting images, by model and shape -> batch (threads) -> output

A batch begins as soon as a thread is free, with what is waiting by then: under load batches grow by
themselves, and a single image never waits for others; while it is the only one it has all cores,
where these give the same digits. All methods but the two that run in threads
belong to the event loop's thread, so nothing is locked.

A batch that raises is computed again image by image, so that an image fails alone. A thread cannot
be ended: if one never returns, or if the network fails on random pixels too, as after an error of a
GPU, the scheduler calls `on_failure`, and the server ends for a supervisor to start it again. The
threads share the process of the server: a process of their own would survive a crash of a library,
at the price of a copy of each image and a second copy of the weights while models are reloaded; the
kernels see tensors of known shapes only, and other replicas (`--replicas`) go on meanwhile.
"""

import asyncio
import contextlib
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from vit.errors import BadImage
from vit.process_resources import usable_cores
from vit.serving.served_model import ServedModel, Upload
from vit.serving.server_config import RequestError
from vit.serving.server_metrics import ServerMetrics

T = TypeVar("T")


@dataclass
class WaitingImage:
    """A decoded image, and where its output goes."""

    name: str
    pixels: Any
    output: "asyncio.Future[Any]"


class QueueFull(RequestError):
    """No image is accepted now; there may be room after `retry_after` seconds."""

    def __init__(self, retry_after: int, limit: str) -> None:
        reason = f"the server is busy; try again in {retry_after} s"
        super().__init__(429, reason, {"retry-after": str(retry_after)})
        self.limit = limit


class ComputeFailed(RequestError):
    """The network gives no output for an image that was read; not the client's fault."""

    def __init__(self, reason: str, status: int = 500) -> None:
        super().__init__(status, reason)


class ServerFailed(ComputeFailed):
    """The network will not give outputs in this process any more."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, 503)


class BatchScheduler:
    """Decodes images and computes batches of them, for all models.

    If a thread computes longer than `compute_timeout` seconds, its call counts as one that never
    returns. `on_failure` is called when `failure` is set, the reason why the server must end.
    """

    def __init__(
        self,
        compute: Executor,
        compute_threads: int,
        all_cores: Executor | None,
        max_queue: int,
        compute_timeout: float,
        metrics: ServerMetrics,
    ) -> None:
        self.failure, self.compute_timeout = "", compute_timeout
        self.on_failure: Callable[[], object] = lambda: None
        self.compute, self.idle, self.all_cores = compute, compute_threads, all_cores
        self.compute_threads, self.max_queue, self.metrics = compute_threads, max_queue, metrics
        decoders = min(8, usable_cores())
        self.decoders = ThreadPoolExecutor(decoders, thread_name_prefix="decode")
        self.accepted = 0
        self.seconds_per_image = 0.05
        """Of the last batches; a moving average."""
        self._groups: dict[tuple[ServedModel, Hashable], deque[WaitingImage]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._calls, self._progress = 0, 0.0

    def check_room(self, images: int = 1) -> None:
        """Refuse images that the queue has no room for."""
        self.check_failure()
        if self.accepted + images > self.max_queue:
            seconds = self.accepted * self.seconds_per_image / self.compute_threads
            raise QueueFull(min(max(math.ceil(seconds), 1), 60), "max_queue")

    def check_failure(self) -> None:
        """Raise ServerFailed if no image is computed any more."""
        if self.failure:
            raise ServerFailed(self.failure)

    async def predict(
        self, model: ServedModel, names: Sequence[str], uploads: list[Upload]
    ) -> list[Any]:
        """Outputs of the images of one request, in order, each as `to_prediction` takes it.

        `uploads` is emptied, so that bytes are freed as they are decoded.
        """
        self.check_room(len(uploads))
        self.accepted += len(uploads)
        self.metrics.waiting.set(self.accepted)
        uploads.reverse()
        pending = [self._predict_one(model, name, uploads.pop()) for name in names]
        return await asyncio.gather(*pending)

    async def _predict_one(self, model: ServedModel, name: str, upload: Upload) -> Any:
        loop = asyncio.get_running_loop()
        try:
            decoding = loop.run_in_executor(self.decoders, model.decode, name, upload)
            del upload
            pixels = await decoding
            del decoding
            self.check_failure()
            output: asyncio.Future[Any] = loop.create_future()
            key = model, tuple(pixels.shape)
            self._groups.setdefault(key, deque()).append(WaitingImage(name, pixels, output))
            del pixels
            self._start_batches()
            return await output
        except BadImage as error:
            self.metrics.images.labels(model.name, "unreadable").inc()
            return error
        finally:
            self.accepted -= 1
            self.metrics.waiting.set(self.accepted)

    def _start_batches(self) -> None:
        """Start a batch in each idle thread, the group that has waited longest first."""
        while self.idle and self._groups:
            key, waiting = next(iter(self._groups.items()))
            del self._groups[key]
            model, batch = key[0], list[WaitingImage]()
            largest = model.sizes_for(waiting[0].pixels)[-1]
            while waiting and len(batch) < largest:
                one = waiting.popleft()
                if not one.output.done():  # else the client has gone
                    batch.append(one)
            if waiting:
                self._groups[key] = waiting  # behind the others
            if batch:
                self.idle -= 1
                task = asyncio.get_running_loop().create_task(self._run(model, batch))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _run(self, model: ServedModel, batch: list[WaitingImage]) -> None:
        loop = asyncio.get_running_loop()
        sizes = model.sizes_for(batch[0].pixels)
        rows = next(size for size in sizes if size >= len(batch))
        names, pixels = [one.name for one in batch], [one.pixels for one in batch]
        only = self.idle == self.compute_threads - 1 and rows == sizes[0]
        executor = self.all_cores if only and model.exact_on_all_cores else None
        began = loop.time()
        try:
            outputs = await self._compute(model.run, names, pixels, rows, executor=executor)
        except Exception as error:  # each waiting request must have its answer
            outputs = await self._recover(model, batch, error)
        self.idle += 1
        seconds = loop.time() - began
        self.seconds_per_image += 0.1 * (seconds / len(batch) - self.seconds_per_image)
        self.metrics.batch_images.labels(model.name).observe(len(batch))
        self.metrics.batch_seconds.labels(model.name).observe(seconds)
        for one, output in zip(batch, outputs, strict=True):
            if one.output.done():
                continue
            if isinstance(output, ComputeFailed):
                one.output.set_exception(output)
                continue
            kind = "failed" if isinstance(output, BadImage) else "answered"
            self.metrics.images.labels(model.name, kind).inc()
            one.output.set_result(output)
        self._start_batches()

    async def _compute(
        self, function: Callable[..., T], *arguments: Any, executor: Executor | None = None
    ) -> T:
        """Call a function in a thread that computes, or in that of `executor`."""
        loop, began = asyncio.get_running_loop(), list[float]()

        def call() -> T:
            began.append(time.monotonic())
            return function(*arguments)

        def end(future: "asyncio.Future[T]") -> None:
            self._calls -= 1
            self._progress = time.monotonic()
            if not future.cancelled():
                future.exception()  # of a call that was given up, nobody else asks

        submitted, left = time.monotonic(), self.compute_timeout
        future = loop.run_in_executor(executor or self.compute, call)
        self._calls += 1
        future.add_done_callback(end)
        try:
            while not (await asyncio.wait({future}, timeout=left))[0]:
                left = self._seconds_left(submitted, began)
                if left <= 0:
                    seconds = f"{self.compute_timeout:g} s (--compute-timeout)"
                    self.fail(f"the network has not answered in {seconds}")
                    raise ServerFailed(self.failure)
        except asyncio.CancelledError:
            future.cancel()  # if it has not begun
            raise
        return future.result()

    def _seconds_left(self, submitted: float, began: Sequence[float]) -> float:
        """Seconds until a call is given up; one that waits has time while others end."""
        since = began[0] if began else max(submitted, self._progress)
        return since + self.compute_timeout - time.monotonic()

    async def _recover(
        self, model: ServedModel, batch: list[WaitingImage], error: Exception
    ) -> list[Any]:
        """Outputs of a batch that raised `error`, computed image by image."""
        if isinstance(error, ServerFailed):
            return [error] * len(batch)
        traceback.print_exception(error, file=sys.stderr)
        failed = ComputeFailed("the network failed on this image; the server's log has the reason")
        outputs: list[Any] = [failed] * len(batch)
        try:
            for place, one in enumerate(batch if len(batch) > 1 else ()):
                with contextlib.suppress(Exception):
                    outputs[place] = await self._compute_one(model, one.name, one.pixels)
            if self.failure:
                return [ServerFailed(self.failure)] * len(batch)
            if all(output is failed for output in outputs):
                await self._compute_one(model, "", model.predictor.random_image(0))
        except Exception as reason:
            self.fail(f"the network fails on random pixels too: {reason}")
            return [ServerFailed(self.failure)] * len(batch)
        return outputs

    async def _compute_one(self, model: ServedModel, name: str, pixels: Any) -> Any:
        run, rows = model.run, model.sizes_for(pixels)[0]
        (output,) = await self._compute(run, [name], [pixels], rows)
        return output

    def fail(self, reason: str) -> None:
        """Refuse all images from now on, and those that wait."""
        if not self.failure:
            self.failure = reason
            for waiting in self._groups.values():
                for one in waiting:
                    if not one.output.done():
                        one.output.set_exception(ServerFailed(reason))
            self._groups.clear()
            self.on_failure()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on an output in a thread that computes, after the batches that run.

        It is not refused when the queue is full, since its image was accepted.
        """
        self.check_failure()
        self.accepted += 1
        try:
            return await self._compute(function, *arguments)
        finally:
            self.accepted -= 1

    def close(self) -> bool:
        """Stop the threads; return whether one still computes, which is not waited for."""
        computing = self._calls > 0
        self.decoders.shutdown(wait=not computing, cancel_futures=True)
        for executor in (self.compute, self.all_cores):
            if executor is not None:
                executor.shutdown(wait=not computing, cancel_futures=True)
        return computing

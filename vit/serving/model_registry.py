"""The models of a server by name, and their replacement while requests go on.

A request keeps the model that it began with. A changed model is loaded and measured beside the old
one, and takes its name when it is ready; one that cannot be loaded changes nothing.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from vit.data.image_io import Fingerprint, file_fingerprint
from vit.errors import ConfigError, VitError
from vit.inference.predictor import model_files
from vit.serving.batch_invariance import measure_batch_sizes
from vit.serving.served_model import ServedModel, check_names
from vit.serving.server_config import RequestError
from vit.serving.server_metrics import ServerMetrics
from vit.text import Notify, printable

POLL_SECONDS = 2.0


class ModelRegistry:
    """The models of a server by name, with threads that compute.

    `all_cores` is a thread that computes with the cores of all of them; None for a single one.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        engine: str | None = None,
        settings: dict[str, Any],
        notify: Notify,
        watched: bool = False,
    ) -> None:
        self.engine, self.settings, self.watched = engine, settings, watched
        self.notify = notify
        self.sources = check_names(words)
        if not self.sources:
            raise ConfigError("models: give at least one run folder or exported file")
        if watched and len(self.sources) > 1:
            raise ConfigError("watch: one model is watched; start a server for each")
        self.fingerprints = {name: self._fingerprint(name) for name in self.sources}
        self.models = {name: self._open(name) for name in self.sources}
        self.compute_threads = max(model.compute_threads for model in self.models.values())
        self.compute: Executor
        self.all_cores: Executor | None = None
        if any(model.engine == "torch" for model in self.models.values()):
            from vit.inference.torch_engine import make_thread_pool

            self.compute = make_thread_pool(self.compute_threads)
            if self.compute_threads > 1:
                self.all_cores = make_thread_pool(1)
        else:
            self.compute = ThreadPoolExecutor(self.compute_threads, thread_name_prefix="compute")
        for model in self.models.values():
            self._measure(model)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-model")
        self._reloading = asyncio.Lock()

    @property
    def default(self) -> str:
        return next(iter(self.models))

    def get(self, name: str | None) -> ServedModel:
        model = self.models.get(self.default if name is None else name)
        if model is None:
            served = ", ".join(self.models)
            raise RequestError(404, f"model={printable((name or '')[:100])}: served are {served}")
        return model

    async def reload(self, metrics: ServerMetrics, names: Sequence[str] | None = None) -> None:
        """Load models again, all by default; those that cannot be loaded stay as they are."""
        loop = asyncio.get_running_loop()
        async with self._reloading:
            for name in names or list(self.sources):
                fingerprint = await loop.run_in_executor(self._loader, self._fingerprint, name)
                try:
                    model = await loop.run_in_executor(self._loader, self._open, name)
                    await loop.run_in_executor(self._loader, self._measure, model)
                except Exception as error:  # a file of any content must not end the server
                    reason = str(error) if isinstance(error, VitError) else repr(error)
                    self.notify(
                        f"{name} is not reloaded, the model loaded before goes on: "
                        f"{printable(reason)}"
                    )
                    metrics.reloads.labels(name, "failed").inc()
                else:
                    self.models[name] = model
                    self.notify(f"{name} is reloaded: {model.summary()}")
                    metrics.reloads.labels(name, "done").inc()
                self.fingerprints[name] = fingerprint

    async def watch(self, metrics: ServerMetrics) -> None:
        """Reload models whose files have changed, once they are the same at two looks.

        Models of the hub are looked for in its cache only.
        """
        loop = asyncio.get_running_loop()
        look = partial(self._fingerprint, offline=True)
        before = dict(self.fingerprints)
        while True:
            await asyncio.sleep(POLL_SECONDS)
            now = {
                name: await loop.run_in_executor(self._loader, look, name) for name in self.sources
            }
            changed = [
                name
                for name, found in now.items()
                if found == before[name] and found != self.fingerprints[name]
            ]
            before = now
            if changed:
                await self.reload(metrics, changed)

    def close(self, *, wait: bool = True) -> None:
        """End the thread that loads; it waits for those that compute while it measures."""
        self._loader.shutdown(wait=wait, cancel_futures=True)

    def _open(self, name: str) -> ServedModel:
        source = self.sources[name]
        return ServedModel(name, source, self.engine, dict(self.settings), self.watched)

    def _measure(self, model: ServedModel) -> None:
        measure_batch_sizes(model, largest_batch(model), self.compute, self.all_cores)

    def _fingerprint(self, name: str, *, offline: bool | None = None) -> tuple[Fingerprint, ...]:
        """Fingerprints of a model's files; empty while they cannot be found."""
        source = self.sources[name]
        try:
            files = model_files(source, offline=offline)
        except (VitError, OSError, ValueError):
            return ()
        return tuple(file_fingerprint(str(file)) for file in files)


def largest_batch(model: ServedModel) -> int:
    """Size of the batches of `vit predict`; captions are computed one by one."""
    if model.captions:
        return 1
    size: int = model.predictor.largest_batch(model.predictor.random_image(0).shape)
    return size

"""`vit serve --engine ray`: the application of the server in replicas of Ray Serve.

    client -> Ray's proxy (connections) -> a replica: Application with its own models and batches

Each replica is a process. One that dies or fails is replaced by Ray; the requests that it had are
answered 500 by the proxy, and the other replicas go on. Limits of connections and headers are those
of the proxy; all others hold in each replica.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vit.data.image_io import set_max_pixels
from vit.exported.engine import exported_engine
from vit.inference.ray_inference import cluster, raise_worker_errors, shares
from vit.serving.application import Application
from vit.serving.http_server import KEEP_ALIVE_SECONDS, bind, url_of
from vit.serving.model_registry import ModelRegistry
from vit.serving.replicas import Replicas, signal_handlers
from vit.serving.served_model import check_names
from vit.serving.server_config import ServerConfig
from vit.serving.server_metrics import ServerMetrics
from vit.text import Notify, plural

NAME = "vit"
"""Name of the application in Ray Serve."""
HEALTH_SECONDS = 5


def replica_settings(replicas: Replicas, requests: int) -> dict[str, Any]:
    """Settings of a deployment; `requests` are those that a replica should have at a time."""
    if replicas.least == replicas.most:
        return {"num_replicas": replicas.most}
    limits = {"min_replicas": replicas.least, "max_replicas": replicas.most}
    return {"autoscaling_config": {**limits, "target_ongoing_requests": requests}}


class ReplicaApplication:
    """The ASGI application of one replica, which looks for changed models while it lives."""

    def __init__(self, words: Sequence[str], config: ServerConfig, settings: dict[str, Any]):
        registry = open_registry(words, config, settings)
        self.application = Application(registry, config, ServerMetrics())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.application.asgi(scope, receive, send)
            return
        await receive()
        watching = asyncio.create_task(
            self.application.registry.watch(self.application.metrics), name="watch models"
        )
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watching.cancel()
        await send({"type": "lifespan.shutdown.complete"})


class Replica:
    """What Ray Serve calls besides the application, which `ingress` adds as `app`."""

    app: ReplicaApplication

    def check_health(self) -> None:
        """Raise if Ray must replace this replica."""
        if failure := self.app.application.scheduler.failure:
            raise RuntimeError(failure)


def open_registry(
    words: Sequence[str], config: ServerConfig, settings: dict[str, Any]
) -> ModelRegistry:
    set_max_pixels(config.max_pixels)
    return ModelRegistry(
        words,
        settings=settings,
        notify=lambda line: print(line, flush=True),
    )


def describe_models(
    words: Sequence[str], config: ServerConfig, settings: dict[str, Any]
) -> tuple[list[str], int]:
    """A line about each model, and the images that one process computes at a time."""
    registry = open_registry(words, config, settings)
    models = registry.models.values()
    largest = max(model.batch_sizes[-1] for model in models)
    lines = [f"{model.name}: {model.summary()}" for model in models]
    return lines, largest * registry.compute_threads


def serve_with_ray(
    models: Sequence[str],
    config: ServerConfig,
    replicas: Replicas,
    *,
    notify: Notify,
    **settings: Any,
) -> None:
    """Serve models with Ray Serve until a signal stops it.

    The cluster is that of RAY_ADDRESS, or one of this machine for as long as the server runs. Each
    machine needs this package, and the models at the same paths.
    """
    words = [f"{name}={shared_path(source)}" for name, source in check_names(models).items()]
    with bind(config.host, config.port) as listener:  # in one line if it is taken
        url, config = url_of(listener), replace(config, port=listener.getsockname()[1])
    with cluster(replicas.most) as ray, raise_worker_errors():
        from ray import serve

        _, share = shares(ray.cluster_resources(), settings.get("device"), replicas.most)
        if "num_gpus" not in share:
            cores = int(ray.cluster_resources().get("CPU", 1))
            share["num_cpus"] = max(1, cores // replicas.most)
        about = ray.remote(**share)(describe_models).remote(words, config, settings)
        lines, images = ray.get(about)

        def build() -> ReplicaApplication:
            return ReplicaApplication(words, config, settings)

        deployment = serve.deployment(
            name="server",
            ray_actor_options=share,
            max_ongoing_requests=config.max_connections,
            health_check_period_s=HEALTH_SECONDS,
            graceful_shutdown_timeout_s=config.stop_timeout,
            max_constructor_retry_count=1,
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
            **replica_settings(replicas, images),
        )(serve.ingress(build)(Replica))
        http = {"host": config.host, "port": config.port}
        serve.start(
            http_options={**http, "keep_alive_timeout_s": KEEP_ALIVE_SECONDS},
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )

        stopped = threading.Event()
        try:
            serve.run(deployment.bind(), name=NAME, route_prefix="/")
            for line in lines:
                notify(line)
            number = plural(replicas.most, "replica")
            upto = "up to " if replicas.least < replicas.most else ""
            notify(
                f"listening at {url}{'' if config.token else ' without a token'}, {upto}{number}"
            )
            with signal_handlers({"SIGTERM": stopped.set, "SIGINT": stopped.set}):
                stopped.wait()
        finally:
            serve.delete(NAME)
            if os.environ.get("RAY_ADDRESS", "local") == "local":
                serve.shutdown()
        notify("stopped")


def shared_path(source: str) -> str:
    """A path as all processes of this machine find it; names of weights stay."""
    is_file = exported_engine(source) or os.path.exists(source)
    return os.path.abspath(source) if is_file else source

"""The process of `vit serve`: loads the models, listens with uvicorn, and obeys signals.

    SIGTERM, SIGINT   stop listening, answer what was accepted, exit with 0; again: exit at once
    SIGHUP            load the models again
    network failed    stop in the same way, and exit with 1, for a supervisor to start it again

uvicorn's HTTP protocol on h11 gets what it lacks: a limit of time for the header of a request, a
limit of connections, and errors as JSON.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vit.data.image_io import set_max_pixels
from vit.errors import ConfigError, VitError
from vit.output.prediction_results import to_json
from vit.serving.application import Application
from vit.serving.model_registry import ModelRegistry
from vit.serving.server_config import ServerConfig
from vit.serving.server_metrics import ServerMetrics
from vit.text import Notify, print_to_stderr, printable

MAX_HEADER_BYTES = 16384
KEEP_ALIVE_SECONDS = 20
BACKLOG = 1024
"""Connections that the system keeps until they are accepted."""
ACCEPTS = 16
"""Connections that are accepted at a time: a flood of them does not stall the others."""
SPARE_FILES = 64
"""Open files besides the connections."""


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol of one connection, with limits; `serve` sets these attributes."""

    limits: ServerConfig
    metrics: ServerMetrics
    waiting: "dict[LimitedProtocol, None]"
    """Connections without a whole request, the one that waits longest first."""
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            # connections that are only held open make room for those that have requests
            oldest = next(iter(self.waiting), self)
            self.waiting.pop(oldest, None)
            reason = "too many connections; try again in a second"
            self.metrics.limits_reached.labels("max_connections").inc()
            oldest.refuse(429, reason, b"retry-after: 1\r\n")
        if not transport.is_closing():
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._answering:
            self._start_timer()
        super().data_received(data)
        if self._answering:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._answering or self.transport.is_closing()):
            self.waiting[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:  # closing would wait for a client that does not read
            self._write_timer = self.loop.call_later(self.limits.body_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        del msg
        self.refuse(
            400, f"this is no HTTP request, or its header is longer than {MAX_HEADER_BYTES} bytes"
        )
        if self.cycle is not None:  # a body that breaks off: its request ends too
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def refuse(self, status: int, reason: str, header: bytes = b"") -> None:
        """Write an error and close, whatever the state of the connection."""
        self.metrics.refused.labels(str(status)).inc()
        body = to_json({"error": reason}).encode()
        head = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\n" % status
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        if not self._answering or not self.cycle.response_started:
            self.transport.write(head + header + length + body)
        self.transport.close()

    @property
    def _answering(self) -> bool:
        """Whether the header of a request is complete, and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._timer is None:
            self.waiting.setdefault(self)
            self._timer = self.loop.call_later(self.limits.header_timeout, self._too_slow)

    def _stop_timer(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            seconds = self.limits.header_timeout
            self.refuse(408, f"no request was complete after {seconds:g} seconds")


class ServerError(VitError):
    """The server ended before it had answered what it accepted; a thread may still compute."""

    exit_code = 1


class SignalServer(uvicorn.Server):
    """A uvicorn server whose signals are handled by `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class RunningServer:
    """A server that answers; `stop` and `reload` do what SIGTERM and SIGHUP do, in any thread."""

    url: str
    application: Application
    stop: Callable[[], object]
    reload: Callable[[], object]


def serve(
    models: Sequence[str],
    config: ServerConfig | None = None,
    *,
    engine: str | None = None,
    listener: socket.socket | None = None,
    notify: Notify = print_to_stderr,
    on_ready: Callable[[RunningServer], object] = lambda _server: None,
    **settings: Any,
) -> None:
    """Serve models until a signal stops it.

    Args:
        listener: A socket at the address, which other processes may share; its own by default.

    Raises:
        VitError: A model, a setting or the address cannot be used.
        ServerError: The network failed, or did not end what was accepted in time.
    """
    config = config or ServerConfig()
    set_max_pixels(config.max_pixels)
    raise_file_limit(config.max_connections + SPARE_FILES)
    with listener or bind(config.host, config.port) as listener:
        registry = ModelRegistry(
            models,
            engine=engine,
            settings=settings,
            notify=notify,
            watched=config.watch is not None,
        )
        metrics = ServerMetrics()
        application = Application(registry, config, metrics)
        try:
            asyncio.run(_serve(application, listener, notify, on_ready))
        finally:
            computing = application.scheduler.close()
            registry.close(wait=not computing)
        if application.scheduler.failure:
            raise ServerError(f"{application.scheduler.failure}; start the server again")
        if computing:
            raise ServerError("stopped before the network had ended what was accepted")


async def _serve(
    application: Application,
    listener: socket.socket,
    notify: Notify,
    on_ready: Callable[[RunningServer], object],
) -> None:
    config, registry = application.config, application.registry
    shared = {"limits": config, "metrics": application.metrics, "waiting": {}}
    protocol = type("Protocol", (LimitedProtocol,), shared)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = SignalServer(
        uvicorn.Config(
            application.asgi,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(config.stop_timeout),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            backlog=ACCEPTS,
        )
    )
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = application.stopping = True

    def reload() -> None:
        task = loop.create_task(registry.reload(application.metrics))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    def from_thread(action: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(action)

        return call

    def fail() -> None:
        if not server.should_exit:
            notify(f"stopping: {application.scheduler.failure}")
            stop()

    application.scheduler.on_failure = fail
    actions = {"SIGTERM": stop, "SIGINT": stop, "SIGHUP": reload}
    for name, action in actions.items():
        with contextlib.suppress(NotImplementedError, AttributeError, ValueError, RuntimeError):
            loop.add_signal_handler(getattr(signal, name), action)
    watching = loop.create_task(registry.watch(application.metrics))
    serving = loop.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.002)
        listener.listen(BACKLOG)
        url = url_of(listener)
        for model in registry.models.values():
            notify(f"{model.name}: {model.summary()}")
        every = "" if is_loopback(listener) else ", open to other machines"
        notify(f"listening at {url}{every}{'' if config.token else ' without a token'}")
        on_ready(RunningServer(url, application, from_thread(stop), from_thread(reload)))
        await serving
        notify("stopped")
    finally:
        watching.cancel()
        if application.watch is not None:
            application.watch.flush()


def bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(f"host={printable(host)!r} is no address of this machine") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        flag = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise VitError(
            f"{host}:{port} cannot be used: {error.strerror}; choose another {flag}"
        ) from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files, as far as the system allows."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

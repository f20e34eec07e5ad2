"""`vit serve --replicas N`: the server in several processes of this machine.

    supervisor: binds the address, starts the processes, and again each that ends by itself
    replica:    accepts connections from the supervisor's socket, with models and batches of its own

The supervisor keeps the socket, so that connections of a moment without a replica wait for the
next one. A pipe to each replica carries `stop` and `reload` there, notes and errors back; a replica
stops when its pipe closes, so that none outlives the supervisor.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from vit.errors import ConfigError, VitError
from vit.process_resources import usable_cores
from vit.serving.http_server import RunningServer, ServerError, bind, serve
from vit.serving.server_config import ServerConfig
from vit.serving.server_metrics import SHARED_FOLDER, forget_process
from vit.text import Notify, plural

LONGEST_DELAY = 30.0
"""Seconds before a replica that cannot start is started again; 1, 2, 4 ... until then."""


@dataclass(frozen=True)
class Replicas:
    """Number of replicas; Ray adds and removes some between two limits by their load."""

    least: int = 1
    most: int = 1

    @classmethod
    def parse(cls, text: str) -> "Replicas":
        """`N` or `LEAST-MOST`."""
        first, separator, last = text.partition("-")
        words = [first, last] if separator else [first]
        if all(word.isascii() and word.isdecimal() for word in words):
            least, most = int(words[0]), int(words[-1])
            if 0 < least <= most:
                return cls(least, most)
        raise ConfigError(f"replicas={text!r}: give a number, or LEAST-MOST such as 1-8")


@dataclass
class Replica:
    """A process that serves, as the supervisor sees it."""

    number: int
    process: Any
    pipe: Connection
    ready: bool = False

    def tell(self, word: str) -> None:
        """Say `stop` or `reload`; one that is not ready has nothing to lose."""
        if self.ready:
            with contextlib.suppress(OSError):  # it has ended
                self.pipe.send(word)
        elif word == "stop":
            self.process.terminate()


class Supervisor:
    """Starts replicas, and again each that ends by itself, until it is told to stop."""

    def __init__(
        self,
        start: Callable[[int], Replica],
        listener: socket.socket,
        notify: Notify,
        metrics_folder: str,
    ) -> None:
        self.start, self.listener, self.notify = start, listener, notify
        self.metrics_folder = metrics_folder
        self.events: queue.SimpleQueue[tuple[Any, str, Any]] = queue.SimpleQueue()
        self.replicas: dict[int, Replica] = {}
        self.failures: dict[int, int] = {}
        """Starts in a row that failed, of each replica."""
        self.begun = self.stopping = False
        self.exit_codes: list[int] = []

    def stop(self) -> None:
        """Stop as SIGTERM does; may be called in any thread, and by a signal."""
        self.events.put((None, "stop", None))

    def reload(self) -> None:
        self.events.put((None, "reload", None))

    def run(self, number: int) -> None:
        """Return after `stop`, when all have ended."""
        for one in range(1, number + 1):
            self._start(one)
        while self.replicas or not self.stopping:
            replica, what, value = self.events.get()
            if what in ("stop", "reload"):
                if what == "stop":
                    self.stopping = True
                    self.listener.close()
                for other in self.replicas.values():
                    other.tell(what)
            elif what == "start" and not self.stopping:
                self._start(value)
            elif what == "ready":
                self._on_ready(replica, [*value, plural(number, "replica")])
            elif what == "failed" and not self.begun:
                raise VitError(value)
            elif what in ("note", "failed"):
                self.notify(f"replica {replica.number}: {value}")
            elif what == "ended":
                self._on_end(replica)
        if any(code > 0 for code in self.exit_codes):
            raise ServerError("stopped before the network had ended what was accepted")

    def close(self) -> None:
        """End all processes at once."""
        for replica in self.replicas.values():
            replica.process.kill()
            replica.process.join()

    def _start(self, number: int) -> None:
        replica = self.replicas[number] = self.start(number)
        threading.Thread(target=self._listen, args=(replica,), daemon=True).start()

    def _listen(self, replica: Replica) -> None:
        """Queue what a replica says until it ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.events.put((replica, *replica.pipe.recv()))
        replica.process.join()
        self.events.put((replica, "ended", None))

    def _on_ready(self, replica: Replica, notes: list[str]) -> None:
        replica.ready, self.failures[replica.number] = True, 0
        if self.stopping:
            replica.tell("stop")
        elif self.begun:
            self.notify(f"replica {replica.number} is ready")
        else:
            self.begun = True
            for note in notes:
                self.notify(note)

    def _on_end(self, replica: Replica) -> None:
        number, code = replica.number, replica.process.exitcode
        del self.replicas[number]
        replica.pipe.close()
        forget_process(replica.process.pid, self.metrics_folder)
        if self.stopping:
            self.exit_codes.append(code)
            return
        reason = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        if not self.begun:
            raise VitError(f"replica {number} ended {reason} before it was ready")
        delay = 0.0
        if not replica.ready:
            self.failures[number] = self.failures.get(number, 0) + 1
            delay = min(2.0 ** (self.failures[number] - 1), LONGEST_DELAY)
        after = f" in {delay:g} s" if delay else ""
        self.notify(f"replica {number} ended {reason}; it is started again{after}")
        again = threading.Timer(delay, self.events.put, [(None, "start", number)])
        again.daemon = True
        again.start()


def serve_replicas(
    models: Sequence[str],
    config: ServerConfig,
    number: int,
    *,
    engine: str | None = None,
    notify: Notify,
    **settings: Any,
) -> None:
    """Serve models in processes of this machine until a signal stops it."""
    context: Any = multiprocessing.get_context("spawn")  # a fork of threads of torch may hang
    with (
        bind(config.host, config.port) as listener,
        tempfile.TemporaryDirectory(prefix="vit-metrics-") as folder,
    ):
        config = replace(config, port=listener.getsockname()[1])
        environment = {SHARED_FOLDER: folder}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // number))

        def start(one: int) -> Replica:
            ours, theirs = context.Pipe()
            words = (listener, theirs, list(models), config, engine, settings)
            process = context.Process(target=run_replica, args=words, daemon=True)
            with child_environment(environment):
                process.start()
            theirs.close()
            return Replica(one, process, ours)

        supervisor = Supervisor(start, listener, notify, folder)
        stop = supervisor.stop
        with signal_handlers({"SIGTERM": stop, "SIGINT": stop, "SIGHUP": supervisor.reload}):
            try:
                supervisor.run(number)
            finally:
                supervisor.close()
    notify("stopped")


@contextlib.contextmanager
def signal_handlers(actions: dict[str, Callable[[], object]]) -> Iterator[None]:
    """Call actions at signals, those that this system has; outside of the main thread at none."""
    before: dict[str, Any] = {}
    for name, action in actions.items():
        with contextlib.suppress(AttributeError, ValueError):
            before[name] = signal.signal(getattr(signal, name), lambda *_, do=action: do())
    try:
        yield
    finally:
        for name, previous in before.items():
            signal.signal(getattr(signal, name), previous)


@contextlib.contextmanager
def child_environment(variables: dict[str, str]) -> Iterator[None]:
    """What a process that is started inherits: environment variables, and no Ctrl-C for now."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_replica(
    listener: socket.socket,
    pipe: Connection,
    models: list[str],
    config: ServerConfig,
    engine: str | None,
    settings: dict[str, Any],
) -> None:
    """The process of a replica: serve until the supervisor says stop, or is gone."""
    if os.name == "posix":
        os.setsid()  # Ctrl-C reaches the supervisor only
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    notes, ready, lock = list[str](), False, threading.Lock()

    def say(what: str, value: object) -> None:
        with lock, contextlib.suppress(OSError):  # the supervisor is gone
            pipe.send((what, value))

    def note(line: str) -> None:
        if ready:
            say("note", line)
        else:
            notes.append(line)

    def obey(server: RunningServer) -> None:
        actions = {"stop": server.stop, "reload": server.reload}
        with contextlib.suppress(EOFError, OSError):
            while True:
                actions[pipe.recv()]()
        server.stop()

    def on_ready(server: RunningServer) -> None:
        nonlocal ready
        ready = True
        say("ready", notes)
        threading.Thread(target=obey, args=(server,), daemon=True).start()

    code = 0
    try:
        serve(
            models, config, listener=listener, engine=engine, notify=note, on_ready=on_ready,
            **settings,
        )  # fmt: skip
    except VitError as error:
        code = error.exit_code
        say("failed", str(error))
    os._exit(code)  # Python would wait for a thread that may never end

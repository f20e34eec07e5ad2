"""Several processes at one address: killed ones are replaced, signals reach all, none is left."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import vit
from tests.serving.conftest import ask, wait_for
from vit.errors import ConfigError, VitError
from vit.serving import replicas as module
from vit.serving.http_server import ServerError
from vit.serving.replicas import Replica, Supervisor

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


class Server:
    """`vit serve --replicas` in a process of its own."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self.log = log
        words = ["serve", str(model), "--precision", "fp32", "--port", "0", *flags]
        with open(log, "w") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "vit", *words], stderr=file)
        self.wait_for("listening at")
        self.port = int(re.findall(r"listening at http://127.0.0.1:(\d+)", log.read_text())[0])

    def wait_for(self, words: str, times: int = 1) -> None:
        """Wait until the log has some words."""
        wait_for(self.log.read_text, lambda text: text.count(words) >= times)

    def replicas(self) -> list[int]:
        """Processes that serve."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [one for one in map(int, children) if is_replica(one)]

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Status and body; 0 where the connection is closed before the answer."""
        try:
            answer = ask(self.port, method, path, body)
        except (ConnectionResetError, BrokenPipeError, http.client.IncompleteRead):
            return 0, ""
        return answer.status, answer.body.decode()


def is_replica(process: int) -> bool:
    """Whether it lives, and is one of `multiprocessing` that is no tracker."""
    try:
        return b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Server]:
    server = Server(model, log, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
@needs_proc
def test_a_killed_replica_is_replaced_and_every_row_is_right(exported, files, predicted, tmp_path):
    expected, stop = predicted("fruit"), threading.Event()
    answers: list[tuple[int, bool]] = []

    with serving(exported, tmp_path / "log", "--replicas", "2") as server:

        def keep_asking(place: int) -> None:
            name, content = files[place]
            while not stop.is_set():
                status, text = server.ask("POST", f"/predict?name={name}", content)
                answers.append((status, text == f'{{"results": [{expected[place]}]}}'))

        server.wait_for("is ready")
        assert "2 replicas\n" in server.log.read_text()
        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(keep_asking, place) for place in range(4)]
            for kill in (1, 2, 3):
                os.kill(server.replicas()[0], signal.SIGKILL)
                server.wait_for("ended by signal 9; it is started again", kill)
                server.wait_for("is ready", 1 + kill)
            stop.set()
            for client in clients:
                client.result(60)
        lost = answers.count((0, False))
        assert lost <= 3 * 4, "only those of a killed replica"
        assert set(answers) <= {(200, True), (0, False)}
        # of all processes that there were; an answer may be lost after it was counted
        text = server.ask("GET", "/metrics")[1]
        (done,) = map(float, re.findall(r'vit_images_total{.*outcome="answered"} (\S+)', text))
        assert len(answers) - lost <= done <= len(answers)

        server.process.send_signal(signal.SIGHUP)
        server.wait_for("fruit is reloaded", 2)
        assert re.search(
            r'vit_reloads_total{.*outcome="done"} 2.0', server.ask("GET", "/metrics")[1]
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert server.log.read_text().endswith("vit serve: stopped\n")


@pytest.mark.slow
@needs_proc
def test_connections_wait_for_the_next_replica_and_none_outlives_the_supervisor(
    exported, files, tmp_path
):
    with serving(exported, tmp_path / "log", "--replicas", "1") as server:
        (replica,) = server.replicas()
        os.kill(replica, signal.SIGKILL)
        server.wait_for("is started again")
        assert server.ask("POST", "/predict", files[0][1])[0] == 200
        (last,) = server.replicas()
        server.process.kill()
        wait_for(lambda: not is_replica(last))


def test_what_no_replica_can_serve_is_one_line(tmp_path, exported):
    words = ["serve", str(tmp_path / "none.onnx"), "--replicas", "2", "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "vit", *words], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none.onnx is missing" in done.stderr
    for number in ("0", "two"):
        with pytest.raises(ConfigError, match=f"replicas='{number}'"):
            vit.serve(exported, replicas=number)


class Process:
    """A process that has ended with a code."""

    pid = 1 << 30

    def __init__(self, code: int) -> None:
        self.exitcode = code

    def join(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def terminate(self) -> None:
        pass


class Pipe:
    """What a replica says."""

    def __init__(self, *messages: tuple[str, Any]) -> None:
        self.messages = list(messages)

    def recv(self) -> tuple[str, Any]:
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)

    def send(self, word: str) -> None:
        pass

    def close(self) -> None:
        pass


class Listener:
    def close(self) -> None:
        pass


def supervise(starts: list[Replica], tmp_path: Path) -> list[str]:
    """Notes of a supervisor that stops after the last of some starts."""
    notes: list[str] = []

    def start(number: int) -> Replica:
        replica = starts.pop(0)
        replica.number = number
        if not starts:
            supervisor.stop()
        return replica

    listener: Any = Listener()
    supervisor = Supervisor(start, listener, notes.append, str(tmp_path))
    supervisor.run(1)
    return notes


def replica(code: int, *messages: tuple[str, Any]) -> Replica:
    pipe: Any = Pipe(*messages)
    return Replica(0, Process(code), pipe)


READY = ("ready", ["listening"])


def test_the_log_says_why_a_replica_is_started_again_and_failures_wait(tmp_path, monkeypatch):
    delays: list[float] = []

    class Timer:
        def __init__(self, delay: float, action: Callable[..., object], words: list[Any]) -> None:
            delays.append(delay)
            self.start = lambda: action(*words)

    monkeypatch.setattr(module.threading, "Timer", Timer)
    failing = [replica(2, ("failed", "it is gone")) for _ in range(7)]
    starts = [replica(-11, READY), *failing, replica(1, READY), replica(0, READY)]
    notes = supervise(starts, tmp_path)
    assert delays == [0, 1, 2, 4, 8, 16, 30, 30, 0]
    assert notes[:5] == [
        "listening",
        "1 replica",
        "replica 1 ended by signal 11; it is started again",
        "replica 1: it is gone",
        "replica 1 ended with exit code 2; it is started again in 1 s",
    ]
    assert notes[-2:] == [
        "replica 1 is ready",
        "replica 1 ended with exit code 1; it is started again",
    ]


def test_the_first_start_that_fails_ends_it(tmp_path):
    with pytest.raises(VitError, match=r"^no such model$"):
        supervise([replica(2, ("failed", "no such model")), replica(0)], tmp_path)
    with pytest.raises(VitError, match="replica 1 ended by signal 9 before it was ready"):
        supervise([replica(-9), replica(0)], tmp_path)


def test_a_stop_that_leaves_images_unanswered_is_an_error(tmp_path):
    with pytest.raises(ServerError, match="stopped before"):
        supervise([replica(1, READY)], tmp_path)
    assert supervise([replica(0, READY)], tmp_path) == []

"""Replicas of Ray Serve; with Ray itself (slow), two of them, one of which is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import vit
from tests.serving.conftest import ask, wait_for
from vit.errors import ConfigError, VitError
from vit.serving.http_server import bind
from vit.serving.ray_deployment import replica_settings, shared_path
from vit.serving.replicas import Replicas

wait = partial(wait_for, seconds=200)
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")


def test_the_number_of_replicas_may_be_a_range():
    assert replica_settings(Replicas.parse("2"), 8) == {"num_replicas": 2}
    scaled = replica_settings(Replicas.parse("1-4"), 8)["autoscaling_config"]
    assert scaled == {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    for text in ("0", "", "-2", "2-", "4-1", "two", "1-2-3", "²"):
        with pytest.raises(ConfigError, match="1-8"):
            Replicas.parse(text)


def test_a_range_needs_ray(exported):
    with pytest.raises(ConfigError, match=r"replicas=1-2: .*engine ray"):
        vit.serve(exported, replicas="1-2")
    if find_spec("ray") is None:
        with pytest.raises(VitError, match=r"ray is not installed: pip install .*\[ray\]"):
            vit.serve(exported, engine="ray", port=0)


def test_paths_are_the_same_for_all_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert shared_path("run") == str(tmp_path / "run")
    assert shared_path("none.onnx") == str(tmp_path / "none.onnx")
    assert shared_path("timm/vit_tiny_patch16_224") == "timm/vit_tiny_patch16_224"


def replicas_of(process: int) -> set[int]:
    """Processes of replicas that a server has started."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
            names[int(folder.name)] = (folder / "cmdline").read_bytes()

    def is_child(one: int) -> bool:
        while one and one != process:
            one = parents.get(one, 0)
        return one == process

    return {
        one
        for one, name in names.items()
        if name.startswith(b"ray::ServeReplica") and is_child(one)
    }


@needs_ray
@pytest.mark.slow
def test_rows_stay_right_while_a_replica_is_killed(sources, files, predicted, tmp_path):
    expected, log = predicted("fruit"), tmp_path / "log"
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "vit", "serve", str(sources["fruit"])]
    words += ["--engine", "ray", "--replicas", "2", "--port", str(port)]
    stop, answers = threading.Event(), list[tuple[int, bool]]()

    def keep_asking(place: int) -> None:
        while not stop.is_set():
            name, content = files[place]
            answer = ask(port, "POST", f"/predict?name={name}", content)
            text = answer.body.decode()
            answers.append((answer.status, text == f'{{"results": [{expected[place]}]}}'))

    with open(log, "w") as file, subprocess.Popen(words, stderr=file, stdout=file) as server:
        try:
            wait(log.read_text, lambda text: "listening at" in text or server.poll() is not None)
            assert server.poll() is None, log.read_text()
            first = wait(lambda: replicas_of(server.pid), lambda found: len(found) == 2)
            with ThreadPoolExecutor(4) as pool:
                clients = [pool.submit(keep_asking, place) for place in range(4)]
                try:
                    wait(lambda: len(answers), lambda number: number > 20)
                    os.kill(min(first), signal.SIGKILL)
                    killed = len(answers)
                    now = wait(
                        lambda: replicas_of(server.pid),
                        lambda found: len(found) == 2 and min(first) not in found,
                    )
                    wait(lambda: len(answers), lambda number: number > killed + 40)
                finally:
                    stop.set()
                for client in clients:
                    client.result()
            assert now - first, "Ray has replaced the one that was killed"
            server.send_signal(signal.SIGTERM)
            assert server.wait(40) == 0, log.read_text()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(40)
    assert all(right for status, right in answers if status == 200)
    lost = [status for status, _ in answers if status != 200]
    assert set(lost) <= {500, 503}, "a lost request is told so"
    assert len(lost) <= 8, "only those that the killed replica had"
    assert [json.loads(row)["image"] for row in expected] == [name for name, _ in files]


@needs_ray
@pytest.mark.slow
def test_what_ray_cannot_serve_is_one_line(tmp_path):
    words = ["serve", str(tmp_path / "none.onnx"), "--engine", "ray", "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "vit", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "none.onnx is missing" in done.stderr.splitlines()[-1]

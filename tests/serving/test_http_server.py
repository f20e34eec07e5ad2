"""Limits of time and size on real connections, reload, and the end of a server."""

import asyncio
import gc
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import uvicorn

import vit
from tests.serving.conftest import ask, multipart, running, wait_for
from vit.commands.serve_command import read_token
from vit.errors import ConfigError, VitError
from vit.inference.predictor import model_files
from vit.paths import sha256_of_files
from vit.serving import model_registry
from vit.serving.http_server import LimitedProtocol, ServerError, bind, is_loopback, serve
from vit.serving.model_registry import ModelRegistry
from vit.serving.server_config import ServerConfig
from vit.serving.server_metrics import ServerMetrics
from vit.weights.safetensors_io import read_tensors, write_tensors

HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"


def raw(client, data: bytes, wait: float = 10) -> bytes:
    """What the server writes until its answer is complete, or it closes."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=wait) as connection:
        connection.sendall(data)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> bytes:
    answer = b""
    while not is_complete(answer) and (part := connection.recv(65536)):
        answer += part
    return answer


def is_complete(answer: bytes) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(separator) and length is not None and len(body) >= int(length[1])


def status_of(answer: bytes) -> int:
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return int(answer.split()[1])


@pytest.fixture(scope="module")
def strict(exported):
    """A server with small limits."""
    limits = {"max_image_mb": 0.05, "max_request_mb": 0.1, "max_images": 3, "max_pixels": 10_000}
    timeouts = {"header_timeout": 0.3, "body_timeout": 0.3}
    with running([exported], **limits, **timeouts) as client:
        yield client


def test_a_large_request_is_refused_before_its_body_is_read(strict):
    answer = raw(strict, HEAD + b"Content-Length: 999999999\r\n\r\n")
    assert status_of(answer) == 413
    assert b"--max-image-mb" in answer
    assert b"100 Continue" not in raw(
        strict, HEAD + b"Expect: 100-continue\r\nContent-Length: 999999999\r\n\r\n"
    )


def test_a_large_request_without_a_length_is_refused_where_the_limit_is(strict):
    chunk = b"8000\r\n" + bytes(0x8000) + b"\r\n"
    answer = raw(strict, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + 4 * chunk + b"0\r\n\r\n")
    assert status_of(answer) == 413


def test_too_large_and_too_many_images_are_refused(strict, files):
    answer = strict.send([("large", bytes(60_000))])
    assert (answer.status, "--max-image-mb" in answer.json["error"]) == (413, True)
    answer = strict.send(files[:4])
    assert (answer.status, "--max-images" in answer.json["error"]) == (413, True)
    assert strict.send(files[:3]).status == 200


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(strict, tmp_path):
    from PIL import Image

    Image.new("L", (200, 200)).save(tmp_path / "wide.png")
    answer = strict.post((tmp_path / "wide.png").read_bytes())
    assert (answer.status, "10,000" in answer.json["error"]) == (422, True)


def test_slow_clients_are_told_so(strict):
    begun = (
        b"",
        b"POST /pre",
        HEAD + b"Content-Length: 100\r\n\r\nabc",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    )
    with ThreadPoolExecutor(4) as pool:
        assert [*map(status_of, pool.map(lambda data: raw(strict, data), begun))] == [408] * 4


def test_a_client_that_does_not_read_is_cut_off(strict):
    """The models are asked for until their answers no longer fit into the system's buffers."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", strict.port))
        request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while True:
                connection.sendall(100 * request)


def test_what_is_no_http_is_refused(strict):
    long = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000
    chunks = HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n"
    for data in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", long, chunks):
        assert status_of(raw(strict, data)) == 400
    assert strict.get("/health").status == 200


def test_clients_that_go_away_leave_nothing_behind(strict, files):
    body = multipart(files[:1])
    for cut in (10, len(body) - 3):
        with socket.create_connection(("127.0.0.1", strict.port)) as connection:
            length = f"Content-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(HEAD + length + body[:cut])
    application = strict.server.application
    wait_for(lambda: not application.budget.held and not application.scheduler.accepted)


def test_a_full_queue_says_when_to_ask_again(exported, files):
    with running([exported], max_queue=2, max_images=2) as client:
        application = client.server.application
        application.scheduler.accepted = 2
        answer = client.post(files[0][1])
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        application.scheduler.accepted = 0
        assert client.post(files[0][1]).status == 200
        application.budget.held = application.budget.limit
        assert client.post(files[0][1]).status == 429
        application.budget.held = 0
        reached = client.get("/metrics").body
    assert b'vit_limit_reached_total{limit="max_queue"} 1.0' in reached
    assert b'vit_limit_reached_total{limit="max_memory_mb"} 1.0' in reached
    assert b'vit_limit_reached_total{limit="max_connections"} 0.0' in reached


def test_connections_that_are_only_held_open_make_room_for_requests(exported, files):
    with running([exported], max_connections=8) as client:
        many = [socket.create_connection(("127.0.0.1", client.port), timeout=10) for _ in range(8)]
        try:
            many[0].sendall(HEAD + b"Content-Length: 9\r\n\r\nabc")  # a request has begun
            many[1].sendall(HEAD)
            wait_for(lambda: len(waiting(client)), lambda number: number == 7)
            assert client.post(files[0][1]).status == 200
            assert status_of(read_answer(many[1])) == 429
            assert client.post(files[0][1]).status == 200
            many[0].sendall(b"abcdef")
            assert status_of(read_answer(many[0])) == 422
            text = client.get("/metrics").body.decode()
            assert re.search(r'vit_limit_reached_total\{limit="max_connections"\} [1-9]', text)
        finally:
            for one in many:
                one.close()


def waiting(client):
    """Connections of the server that have no whole request."""
    config = client.server.application.config
    connections = (one for one in gc.get_objects() if LimitedProtocol in type(one).__mro__)
    return next((one.waiting for one in connections if one.limits is config), {})


def test_a_changed_run_is_served_without_a_lost_request(tiny_run, files, tmp_path, monkeypatch):
    monkeypatch.setattr(model_registry, "POLL_SECONDS", 0.02)
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    stop, statuses = threading.Event(), []
    log: list[str] = []
    with running([run], log=log) as client:
        text = client.get("/metrics").body
        assert b'vit_reloads_total{model="run",outcome="failed"} 0.0' in text
        before = client.post(files[0][1]).body
        first = sha256_of_files(model_files(str(run)))
        assert client.get("/models").json["models"][0]["sha256"] == first

        def keep_asking() -> None:
            while not stop.is_set():
                statuses.append(client.post(files[0][1]).status)

        asking = threading.Thread(target=keep_asking)
        asking.start()
        tensors, metadata = read_tensors(run / "model.safetensors")
        tensors["head.weight"] = torch.roll(tensors["head.weight"], 1, 0)
        write_tensors(tmp_path / "new", tensors, metadata)
        os.replace(tmp_path / "new", run / "model.safetensors")
        after = wait_for(lambda: client.post(files[0][1]).body, lambda body: body != before)
        second = sha256_of_files(model_files(str(run)))
        (run / "config.json").write_text("{", encoding="utf-8")
        text = wait_for(lambda: client.get("/metrics").body, lambda text: b'"failed"} 1.0' in text)
        assert b'vit_reloads_total{model="run",outcome="done"} 1.0' in text
        assert client.post(files[0][1]).body == after
        assert client.get("/models").json["models"][0]["sha256"] == second != first
        stop.set()
        asking.join()
    assert set(statuses) == {200}
    done, failed = (line for line in log if "reloaded" in line)
    assert done.startswith("run is reloaded: 3 classes, torch in fp32 on cpu, up to ")
    assert done.endswith(f", sha256 {second[:12]}")
    assert failed.startswith("run is not reloaded, the model loaded before goes on: ")


def test_the_hub_is_asked_at_the_start_and_at_a_reload_only(exported, tmp_path, monkeypatch):
    looks, own = [], shutil.copy(exported, tmp_path / "own.onnx")

    def look(source, *, offline):
        if source == str(own):  # servers of other tests look too
            looks.append((offline, threading.current_thread().name.rpartition("_")[0]))
        return model_files(source, offline=offline)

    async def main():
        watching = asyncio.ensure_future(registry.watch(ServerMetrics()))
        while len(looks) < 3:
            await asyncio.sleep(0.001)
        watching.cancel()
        await registry.reload(ServerMetrics())

    monkeypatch.setattr(model_registry, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(model_registry, "model_files", look)
    registry = ModelRegistry([str(own)], settings={}, notify=print)
    asyncio.run(main())
    registry.close()
    (first, _), *watched, last = looks
    assert first is None
    assert set(watched) == {(True, "load-model")}
    assert last == (None, "load-model")


def test_a_part_of_a_second_to_stop_is_not_none(exported, monkeypatch):
    given, config = {}, uvicorn.Config
    monkeypatch.setattr(
        uvicorn, "Config", lambda *args, **named: given.update(named) or config(*args, **named)
    )
    with running([exported], stop_timeout=0.5):
        assert given["timeout_graceful_shutdown"] == 1


def test_an_exported_file_is_served_without_torch_and_sigterm_answers_what_was_accepted(
    exported, files
):
    code = (
        "import sys; from vit.serving.http_server import serve; "
        "from vit.serving.server_config import ServerConfig; "
        "serve([sys.argv[1]], ServerConfig(port=0), "
        "on_ready=lambda server: print(server.url, flush=True)); "
        "heavy = {'torch', 'timm', 'torchvision', 'accelerate'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(exported)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        content = files[0][1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Length", str(len(content)))
        connection.endheaders(content[:50])
        waiting = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        waiting.request("GET", "/ready")  # the server has read both headers when this is answered
        assert waiting.getresponse().read()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        connection.send(content[50:])
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["results"][0]["predictions"]
        assert process.wait(20) == 0
        connection.close()
        waiting.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_cannot_be_served_is_one_line(tiny_run, tmp_path):
    for settings, words in [
        ({"prot": 1}, "did you mean port"),
        ({"port": 70_000}, "0 to 65535"),
        ({"token": " x"}, "without spaces"),
        ({"max_image_mb": 99.0}, "max_request_mb=64"),
        ({"max_queue": 0}, "more than 0"),
        ({"max_memory_mb": math.inf}, "max_memory_mb=inf is not a finite number"),
        ({"stop_timeout": math.inf}, "stop_timeout=inf is not a finite number"),
        ({"max_queue": 9}, "max_images=64: .* max_queue=9 .*; lower the first or raise the second"),
    ]:
        with pytest.raises(ConfigError, match=words):
            vit.serve(tiny_run, **settings)
    for models, words in [
        ([tiny_run, tiny_run], r"two models are called tiny; give .* second="),
        ([tmp_path / "no_such.onnx"], "no_such"),
        ([f"a/b={tiny_run}"], "letters, digits"),
    ]:
        with pytest.raises(VitError, match=words):
            serve([*map(str, models)], ServerConfig(port=0))
    taken = bind("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(VitError, match=rf"127.0.0.1:{port} cannot be used.* another --port"):
        bind("127.0.0.1", port)
    taken.close()
    with pytest.raises(VitError, match=r"192.0.2.1:0 cannot be used.* another --host"):
        bind("192.0.2.1", 0)


def test_a_network_that_never_ends_makes_the_server_end_with_an_error(exported, files, monkeypatch):
    ends = threading.Event()
    with (
        pytest.raises(ServerError, match=r"has not answered in 0.1 s .*; start the server again"),
        running([exported], compute_timeout=0.1) as client,
    ):
        model = client.server.application.registry.get(None)
        monkeypatch.setattr(model, "run", lambda *_: ends.wait(30))
        answer = client.post(files[0][1])
        assert (answer.status, "has not answered" in answer.json["error"]) == (503, True)
    ends.set()


def test_probes_are_answered_under_any_name_and_a_failed_network_fails_them(exported):
    with running([exported], allowed_hosts=("photos.example",)) as client:
        assert client.get("/models", Host="10.0.0.7:8000").status == 421
        for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready"):
            assert client.get(path, Host="10.0.0.7:8000").status == 200
        client.server.application.scheduler.failure = "it failed"
        for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status == 503
        assert client.post(b"x").json == {"error": "it failed"}
        client.server.application.scheduler.failure = ""


@pytest.mark.slow
def test_reload_and_stop_under_load_lose_no_request_and_a_full_disk_of_the_log_stops_nothing(
    exported, files
):
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "vit", "serve", str(exported), "--port", str(port)]
    answers: list[tuple[int, bytes]] = []
    stopping = threading.Event()

    def keep_asking(seed: int) -> str:
        try:
            while True:
                answer = ask(port, "POST", "/predict", files[seed][1])
                answers.append((answer.status, answer.body))
        except ConnectionError as error:  # http.client's RemoteDisconnected is one
            if not stopping.is_set():
                raise
            return type(error).__name__

    with open("/dev/full", "w") as full, subprocess.Popen(words, stderr=full) as server:
        try:
            wait_for(lambda: ready(port))
            with ThreadPoolExecutor(4) as pool:
                clients = [pool.submit(keep_asking, seed) for seed in range(4)]
                for reloads in (1, 2, 3):
                    server.send_signal(signal.SIGHUP)
                    text = f'vit_reloads_total{{model="fruit",outcome="done"}} {reloads}.0'
                    wait_for(lambda: metrics(port), lambda found, text=text: text in found)
                    wait_for(lambda: len(answers), lambda count, least=10 * reloads: count > least)
                stopping.set()
                server.send_signal(signal.SIGTERM)
                ends = [client.result(20) for client in clients]
            assert server.wait(20) == 0
        finally:
            server.kill()
    assert {status for status, _ in answers} == {200}
    assert len({body for _, body in answers}) == 4
    assert set(ends) <= {"ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected"}


def ready(port: int) -> bool:
    try:
        return ask(port, "GET", "/ready").status == 200
    except ConnectionRefusedError:
        return False


def metrics(port: int) -> str:
    return ask(port, "GET", "/metrics").body.decode()


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_an_address_that_other_machines_reach_is_told_from_this_machine(host, loopback):
    with bind(host, 0) as listener:
        assert is_loopback(listener) is loopback


@pytest.mark.parametrize(("content", "words"), [("", "is empty"), ("a\nb\n", "has 2 lines")])
def test_a_token_file_has_one_line(tmp_path, content, words):
    file = tmp_path / "token.txt"
    file.write_text(content)
    with pytest.raises(VitError, match=f"--token-file: .*token.txt {words}; give the token in"):
        read_token(None, str(file))
    file.write_text("secret\n")
    assert read_token(None, str(file)) == "secret"

"""A server of tiny networks in a thread, and a client of the standard library."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import pytest

from tests.exported.test_exported_classifier import written
from tests.inference.captioners import save_captioner
from vit.commands.main import main
from vit.data.image_io import MAX_PIXELS, set_max_pixels
from vit.serving.http_server import RunningServer, serve
from vit.serving.server_config import ServerConfig

BOUNDARY = "edge-of-a-part"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def rows(self) -> list[str]:
        """The text of each row, as it was sent."""
        text = self.body.decode()
        assert text.startswith('{"results": [')
        rows, decoder, place = [], json.JSONDecoder(), len('{"results": [')
        while text[place] != "]":
            _, end = decoder.raw_decode(text, place)
            rows.append(text[place:end])
            place = end + 2 * text.startswith(", ", end)
        return rows


def multipart(files: Sequence[tuple[str, bytes]], field: str = "file") -> bytes:
    """A body with a part for each (name, content)."""
    disposition = 'Content-Disposition: form-data; name="{}"; filename="{}"'
    parts = [
        f"--{BOUNDARY}\r\n{disposition.format(field, name)}\r\n\r\n".encode(
            "utf-8", "surrogateescape"
        )
        + content
        + b"\r\n"
        for name, content in files
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """The answer of a server on this machine, over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, path, body, named)
        response = connection.getresponse()
        return Answer(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def wait_for(
    read: Callable[[], Value], condition: Callable[[Value], object] = bool, seconds: float = 60
) -> Value:
    """The first value for which the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition(value := read()):
        assert time.monotonic() < deadline, value
        time.sleep(0.01)
    return value


class Client:
    """A connection to a server that is closed after each answer."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.port = int(server.url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return ask(self.port, method, path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def send(self, files: Sequence[tuple[str, bytes]], **query: Any) -> Answer:
        """Files as a multipart body."""
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        return self.ask("POST", f"/predict?{urlencode(query)}", multipart(files), Content_Type=kind)

    def post(self, body: bytes, **query: Any) -> Answer:
        """A raw body."""
        path = f"/predict?{urlencode(query)}"
        return self.ask("POST", path, body, Content_Type="image/png")


@contextmanager
def running(
    models: Sequence[object], *, log: list[str] | None = None, **limits: Any
) -> Iterator[Client]:
    """A client of a server that runs inside; its notes are appended to `log`."""
    ready, found, errors = threading.Event(), [], []

    def run() -> None:
        try:
            config = ServerConfig(port=0, **limits)
            serve(
                [*map(str, models)],
                config,
                precision="fp32",
                notify=([] if log is None else log).append,
                on_ready=lambda server: (found.append(server), ready.set()),
            )
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    if errors:
        raise errors[0]
    try:
        yield Client(found[0])
    finally:
        found[0].stop()
        thread.join(60)
        set_max_pixels(MAX_PIXELS)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_captioner(tmp_path_factory.mktemp("runs") / "captioner")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("exported") / "fruit.onnx")


@pytest.fixture(scope="session")
def sources(distance_run, several_run, captioner, exported) -> dict[str, Path]:
    """The models of `client` by name."""
    return {
        "tiny": distance_run,
        "several": several_run,
        "captions": captioner,
        "fruit": exported,
    }


@pytest.fixture(scope="session")
def client(sources: dict[str, Path]) -> Iterator[Client]:
    with running([f"{name}={path}" for name, path in sources.items()]) as client:
        yield client


@pytest.fixture(scope="session")
def files(tiny_data: Path) -> list[tuple[str, bytes]]:
    """Names and contents of the images of `tiny_data`."""
    paths = sorted((tiny_data / "val").rglob("*.*"))
    return [(str(path), path.read_bytes()) for path in paths]


@pytest.fixture
def predicted(sources, files, capfd) -> Callable[..., list[str]]:
    """Rows of `vit predict` for `files`, or for other paths."""

    def predicted(name: str, *flags: str, paths: Sequence[str] = ()) -> list[str]:
        engine = ("-b", "1") if name in ("fruit", "captions") else ()
        images = paths or [path for path, _ in files]
        words = [str(sources[name]), *images, "--precision", "fp32", *engine, *flags]
        capfd.readouterr()
        assert main(["predict", *words, "--format", "jsonl"]) == 0
        return capfd.readouterr().out.splitlines()

    return predicted

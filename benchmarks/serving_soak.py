"""Answers of `vit serve` to many clients, alone or beside abuse: rows, seconds and memory.

    python -m benchmarks.serving_soak RUN IMAGES --requests 10000 --clients 32
    python -m benchmarks.serving_soak RUN IMAGES --minutes 30 --bad FOLDER
    python -m benchmarks.serving_soak RUN IMAGES --minutes 10 --replicas 2 --kill 2

Good clients send images as raw bodies, as multipart bodies of one to eight, and by the protocol of
KServe; every row must be the one of `vit predict`, byte for byte, under the name that was sent with
the image. With --bad, others send the files of FOLDER, broken requests, slow ones, and hold
connections open: these must end with a row, with a sentence and a status of 4xx, or closed, never
with 5xx. With --kill, a process of the server is killed (SIGKILL) every so many seconds: its
requests may end with a closed connection, and with nothing else. Prints counts, seconds of requests
of one image, and the server's memory. The clients share the machine with the server. Needs the
extra `serve`.
"""

import argparse
import base64
import collections
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from vit.data.sources.open_dataset import list_images

BOUNDARY = "soak-part"
CLOSED = -1
"""The status of a request whose connection was closed before its answer."""
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
Answer = tuple[int, bytes]


class Soak:
    """Clients of one server, and what they saw.

    Args:
        port: Of the server.
        images: Content of good images, by name.
        rows: The row of `vit predict` of each.
        kills: Whether processes of the server are killed.
    """

    def __init__(
        self, port: int, images: dict[str, bytes], rows: dict[str, str], kills: bool = False
    ) -> None:
        self.port, self.images, self.rows, self.kills = port, images, rows, kills
        self.last_row = 0.0
        """When a row came last."""
        self.names = [*images]
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []
        self.problems: list[str] = []
        self.stop = threading.Event()
        self.lock = threading.Lock()

    def ask(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Status and body of one request, on a connection of its own; 0 and the error without."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (ConnectionResetError, BrokenPipeError, http.client.IncompleteRead):
            return CLOSED, b""
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()
        finally:
            connection.close()

    def count(self, kind: str, problem: str | None = None) -> None:
        """Count a request, and keep its problem."""
        with self.lock:
            self.counts[kind] += 1
            if problem:
                self.problems.append(f"{kind}: {problem}")

    def check(self, kind: str, status: int, found: str, expected: str) -> None:
        """Count a request, and what is wrong with its answer."""
        if status == CLOSED and self.kills:
            self.count("closed")
            return
        problem = compare(status, found, expected)
        if status == 200:
            self.last_row = time.monotonic()
        self.count(kind, problem)

    def good_client(self, seed: int) -> None:
        """Ask until told to stop."""
        draw = random.Random(seed)
        ways = (self.ask_raw, self.ask_raw, self.ask_multipart, self.ask_kserve)
        while not self.stop.is_set():
            draw.choice(ways)(draw)

    def ask_raw(self, draw: random.Random) -> None:
        """An image as the body."""
        name = draw.choice(self.names)
        began = time.perf_counter()
        status, body = self.ask(f"/predict?{urlencode({'name': name})}", self.images[name], {})
        with self.lock:
            self.seconds.append(time.perf_counter() - began)
            self.counts["429"] += status == 429
        expected = f'{{"results": [{self.rows[name]}]}}'
        self.check("raw", status, body.decode(), expected)

    def ask_multipart(self, draw: random.Random) -> None:
        """One to eight images as files of a form."""
        names = draw.sample(self.names, draw.randint(1, 8))
        status, body = self.ask(
            "/predict", multipart((name, self.images[name]) for name in names), MULTIPART
        )
        expected = f'{{"results": [{", ".join(self.rows[name] for name in names)}]}}'
        self.check("multipart", status, body.decode(), expected)

    def ask_kserve(self, draw: random.Random) -> None:
        """One to four images by the protocol of KServe, whose rows have numbers as names."""
        names = draw.sample(self.names, draw.randint(1, 4))
        tensor = {
            "name": "encoded",
            "datatype": "BYTES",
            "shape": [len(names)],
            "data": [base64.b64encode(self.images[name]).decode() for name in names],
        }
        record = json.dumps({"inputs": [tensor]}).encode()
        status, body = self.ask("/v2/models/soak/infer", record, {})
        rows = [
            self.rows[name].replace(json.dumps(name), f'"{n}"', 1) for n, name in enumerate(names)
        ]
        found = body.decode()
        if status == 200:
            outputs = {one["name"]: one["data"] for one in json.loads(body)["outputs"]}
            found = "\n".join(outputs["rows"])
        self.check("kserve", status, found, "\n".join(rows))

    def bad_client(self, seed: int, bad: list[Path]) -> None:
        """Misbehave in one way after another until told to stop."""
        draw = random.Random(seed)
        while not self.stop.is_set():
            kind, data, wait = draw.choice([*broken_requests(draw, bad)])
            try:
                problem = self.send_bytes(data, wait)
            except OSError as error:  # closed by the server while it was sent
                problem = None if isinstance(error, ConnectionError) else repr(error)
            self.count(kind, problem)

    def send_bytes(self, data: bytes, wait: float) -> str | None:
        """Send the bytes of a request, and say what is wrong with the answer.

        Args:
            data: The request.
            wait: Seconds after which an answer is no longer waited for, as of a client that goes.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(data)
            connection.settimeout(wait)
            answer = b""
            with contextlib.suppress(TimeoutError):
                while part := connection.recv(65536):
                    answer += part
                    if wait >= 1 and whole(answer):
                        break
        if not answer:
            return None
        status = int(answer.split(maxsplit=2)[1])
        if status >= 500:
            return f"status {status}: {answer[-300:]!r}"
        if status >= 400 and b'"error"' not in answer:
            return f"status {status} without a sentence: {answer[-300:]!r}"
        return None

    def hold_connections(self) -> None:
        """Open 1,000 connections again and again, and let them wait."""
        while not self.stop.is_set():
            with contextlib.ExitStack() as many, contextlib.suppress(OSError):
                for _ in range(1000):
                    many.enter_context(socket.create_connection(("127.0.0.1", self.port), 10))
                self.stop.wait(5)
            self.count("1,000 connections")
            self.stop.wait(20)

    def kill_replicas(self, server: int, every: float) -> None:
        """Kill a process of the server again and again; note how soon a row comes after it."""
        draw, waits, killed = random.Random(0), list[float](), 0
        while not self.stop.wait(every):
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(draw.choice(replicas_of(server)), signal.SIGKILL)
                killed, moment = killed + 1, time.monotonic()
                while self.last_row <= moment and not self.stop.wait(0.002):
                    pass
                waits.append(time.monotonic() - moment)
        print(
            f"{killed} killed; a row came after a median of {statistics.median(waits):.2f} s, at "
            f"most {max(waits):.2f} s"
        )

    def run(self, clients: Sequence[Callable[[], None]], until: Callable[[], bool]) -> None:
        """Run clients in threads until a condition holds, and ask the server for its health."""

        def guarded(client: Callable[[], None]) -> None:
            try:
                client()
            except BaseException:
                self.count("client", traceback.format_exc())

        self.stop.clear()
        threads = [threading.Thread(target=guarded, args=(one,)) for one in clients]
        for thread in threads:
            thread.start()
        while not until():
            time.sleep(0.2)
        self.stop.set()
        for thread in threads:
            thread.join()


def compare(status: int, found: str, expected: str) -> str | None:
    """What is wrong with an answer."""
    if (status, found) == (200, expected) or (status == 429 and '"error"' in found):
        return None
    return f"status {status}: {found[:300]!r} instead of {expected[:300]!r}"


def multipart(files: Iterator[tuple[str, bytes]]) -> bytes:
    """A body with a part for each (name, content)."""
    head = '--{}\r\nContent-Disposition: form-data; name="file"; filename="{}"\r\n\r\n'
    parts = [head.format(BOUNDARY, name).encode() + content + b"\r\n" for name, content in files]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def whole(answer: bytes) -> bool:
    """Whether an answer is complete."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(separator) and length is not None and len(body) >= int(length[1])


def broken_requests(draw: random.Random, bad: list[Path]) -> Iterator[tuple[str, bytes, float]]:
    """Kinds of abuse: their names, bytes, and seconds that their client waits for an answer."""

    def request(head: str, body: bytes = b"", path: str = "/predict") -> bytes:
        return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + body

    def lengthy(body: bytes, path: str = "/predict", more: str = "", extra: int = 0) -> bytes:
        return request(f"{more}Content-Length: {len(body) + extra}\r\n", body, path)

    form = f"Content-Type: {MULTIPART['Content-Type']}\r\n"
    for _ in range(6):  # most often
        file = draw.choice(bad).read_bytes()
        yield "broken image", lengthy(file), 60
        yield "broken image in a form", lengthy(multipart(iter([("x", file)])), more=form), 60
    some = draw.randbytes(5000)
    yield "half of a request, closed", lengthy(some, extra=5000), 0.05
    yield "half of a request, waiting", lengthy(some, extra=5000), 60
    yield "too short a length", request("Content-Length: 10\r\n", some), 5
    yield "a length that is none", request("Content-Length: ten\r\n", some), 5
    yield "a gigabyte announced", request("Content-Length: 1000000000\r\n"), 60
    yield "header of 100,000 bytes", request("X: " + "a" * 100_000 + "\r\n"), 60
    yield "header that never ends", HEAD + b"X-Slow: ", 60
    yield "no HTTP", draw.randbytes(300) + b"\r\n\r\n", 60
    named = multipart(iter([("n" * 100_000, some)]))
    yield "name of 100,000 characters", lengthy(named, more=form), 60
    yield "form without an end", lengthy(named[:-50], more=form), 60
    for model in ("../../etc/passwd", "%00", "soak/../soak", "\\\\host\\share", "a" * 5000):
        yield "path as a model", lengthy(some, f"/predict?{urlencode({'model': model})}"), 60
    yield "path", lengthy(some, "/page/../../../etc/passwd"), 60
    yield "KServe with nonsense", lengthy(some, "/v2/models/soak/infer"), 60
    deep = b"[" * 100_000
    yield "KServe with nested JSON", lengthy(deep, "/v2/models/soak/infer"), 60


def is_small_file(path: Path) -> bool:
    """Whether it is a file of less than 20 MB, as a client could send, and nothing special."""
    return path.is_file() and path.stat().st_size < 20e6


def replicas_of(server: int) -> list[int]:
    """Processes that a server has started to serve."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="utf-8").split()
    commands = {int(one): Path(f"/proc/{one}/cmdline") for one in children}
    return [one for one, path in commands.items() if b"spawn_main" in path.read_bytes()]


def resident(server: int) -> float:
    """Megabytes of memory that a server and its replicas hold."""
    total = 0
    for process in (server, *replicas_of(server)):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        total += sum(int(one) for one in re.findall(r"^VmRSS:\s+(\d+)", status, re.MULTILINE))
    return total / 1024


def expected_rows(run: str, images: list[str]) -> dict[str, str]:
    """Rows of `vit predict`, by path."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        words = ["predict", run, *images, "--precision", "fp32", "--device", "cpu"]
        words += ["--batch-size", "1"] if run.endswith((".onnx", ".xml")) else []
        subprocess.run([sys.executable, "-m", "vit", *words, "--out", str(out)], check=True)
        lines = out.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["image"]: line for line in lines}


def seconds_line(what: str, seconds: list[float]) -> str:
    """Median and 99th percentile of requests of one image."""
    times = sorted(1000 * one for one in seconds)
    median, p99 = statistics.median(times), times[int(0.99 * (len(times) - 1))]
    ratio = f"p99 / median {p99 / median:.1f}"
    return f"{what}: {len(times):,} requests, median {median:.1f} ms, p99 {p99:.1f} ms, {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("images")
    parser.add_argument("--bad", type=Path, help="a folder of broken images: abuse beside the rest")
    parser.add_argument("--clients", type=int, default=4, help="that behave")
    parser.add_argument("--requests", type=int, help="of these, instead of --minutes")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--replicas", type=int, help="processes of the server")
    parser.add_argument("--kill", type=float, metavar="SECONDS", help="kill one so often")
    parser.add_argument("--port", type=int, default=8600)
    args = parser.parse_args()
    paths = list_images([args.images])[:1000]
    rows = expected_rows(args.run, paths)
    if args.kill and not args.replicas:
        parser.error("--kill needs --replicas")
    port, words = args.port, ["--precision", "fp32", "--device", "cpu", "--port", str(args.port)]
    words += ["--replicas", str(args.replicas)] if args.replicas else []
    server = subprocess.Popen(
        [sys.executable, "-m", "vit", "serve", f"soak={args.run}", *words], stderr=subprocess.PIPE
    )
    assert server.stderr is not None
    log: list[str] = []
    threading.Thread(
        target=lambda: log.extend(line.decode() for line in server.stderr or ()), daemon=True
    ).start()
    contents = {path: Path(path).read_bytes() for path in paths}
    soak = Soak(port, contents, rows, bool(args.kill))
    try:
        while True:
            assert server.poll() is None, log
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.1)
        good = [partial(soak.good_client, seed) for seed in range(args.clients)]
        if args.requests:
            soak.run(good, lambda: sum(soak.counts.values()) >= args.requests)
            print(seconds_line(f"{args.clients} clients", soak.seconds))
        else:
            soak_for_minutes(soak, server.pid, args, good)
        print(dict(soak.counts.most_common()))
        print(f"problems: {len(soak.problems)}", *soak.problems[:20], sep="\n")
        assert server.poll() is None, f"the server ended: {log[-5:]}"
    finally:
        server.terminate()
        server.wait(60)


def soak_for_minutes(
    soak: Soak, server: int, args: argparse.Namespace, good: Sequence[Callable[[], None]]
) -> None:
    """Good clients alone for half a minute, then beside abuse, and the memory meanwhile."""
    end = time.monotonic() + 30
    soak.run(good, lambda: time.monotonic() > end)
    print(seconds_line("alone", soak.seconds), flush=True)
    soak.seconds.clear()
    bad: list[Callable[[], None]] = []
    if args.bad:
        files = sorted(path for path in args.bad.rglob("*") if is_small_file(path))
        bad += [partial(soak.bad_client, seed, files) for seed in range(100, 108)]
        bad.append(soak.hold_connections)
    if args.kill:
        bad.append(lambda: soak.kill_replicas(server, args.kill))
    begin, memory = time.monotonic(), list[tuple[float, float]]()

    def done() -> bool:
        now = time.monotonic() - begin
        if not memory or now - memory[-1][0] >= 5:
            memory.append((now, resident(server)))
        return bool(now > 60 * args.minutes)

    soak.run([*good, *bad], done)
    print(seconds_line("beside abuse" if args.bad else "all", soak.seconds))
    tenth = max(len(memory) // 10, 1)
    parts = [[mb for _, mb in memory[n : n + tenth]] for n in range(0, len(memory), tenth)]
    print("memory, MB, median of each tenth:", [round(statistics.median(one)) for one in parts])
    print(f"largest: {max(mb for _, mb in memory):.0f} MB")


if __name__ == "__main__":
    main()

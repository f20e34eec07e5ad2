"""Requests a second of `vit serve`, beside a plain handler and LitServe with the same network.

    python benchmarks/serving.py RUN IMAGES [--clients 1 8] [--seconds 10] [--rounds 3]

Each server is a process of its own and the clients are threads of this one, on the same machine;
each client sends one image after another. The servers take turns within each round, and only one of
them has requests at a time. `predictor` is no server: vit.Predictor in a process of its own, one
image after another, for the overhead of one request. `fastapi` answers with vit.Predictor, one
image a pass, behind FastAPI, or behind Starlette, on which FastAPI is built, where that is not
installed; `litserve` with vit.Predictor in LitServe's batches, if it is installed. Needs the extra
`serve`.
"""

import argparse
import base64
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vit.data.sources.open_dataset import list_images

PREDICTOR = """
import io, sys, time
import vit
from PIL import Image
predictor = vit.Predictor(sys.argv[1], precision=sys.argv[2], device="cpu")
images = [open(path, "rb").read() for path in sys.argv[4:]]
end, number = time.perf_counter() + float(sys.argv[3]), 0
predictor([Image.open(io.BytesIO(images[0])).convert("RGB")])
while (began := time.perf_counter()) < end:
    predictor([Image.open(io.BytesIO(images[number % len(images)])).convert("RGB")])
    print(time.perf_counter() - began)
    number += 1
"""
PLAIN = """
import io, sys, threading
import uvicorn, vit
from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
predictor, lock = vit.Predictor(sys.argv[1], precision=sys.argv[2], device="cpu"), threading.Lock()
def answer(data):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    with lock:
        (found,) = predictor([image])
    return [[label, score] for label, score in found.predictions]
async def predict(request: Request):
    return JSONResponse(await run_in_threadpool(answer, await request.body()))
try:
    from fastapi import FastAPI
    app = FastAPI()
    app.post("/predict")(predict)
except ImportError:
    app = Starlette()
    app.add_route("/predict", predict, methods=["POST"])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[3]), log_level="error")
"""
LITSERVE = """
import base64, io, sys
import litserve, vit
from PIL import Image
class API(litserve.LitAPI):
    def setup(self, device):
        self.predictor = vit.Predictor(sys.argv[1], precision=sys.argv[2], device="cpu")
    def decode_request(self, request):
        return Image.open(io.BytesIO(base64.b64decode(request["image"]))).convert("RGB")
    def batch(self, inputs):
        return list(inputs)
    def predict(self, images):
        return self.predictor(images)
    def unbatch(self, output):
        return output
    def encode_response(self, found):
        return {"predictions": [[label, score] for label, score in found.predictions]}
if __name__ == "__main__":
    api = API(max_batch_size=8, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu").run(
        host="127.0.0.1", port=int(sys.argv[3]), log_level="error", generate_client_file=False
    )
"""


def commands(run: str, precision: str, folder: Path) -> dict[str, list[str]]:
    """The command of each server, without its port."""
    words = ["-m", "vit", "serve", run, "--device", "cpu", "--precision", precision, "--port"]
    found = {"vit serve": [sys.executable, *words]}
    for name, code in {"fastapi": PLAIN, "litserve": LITSERVE}.items():
        if name == "litserve" and find_spec(name) is None:
            print("litserve is not installed")
            continue
        script = folder / f"benchmark_{name}.py"  # no name of a module
        script.write_text(code, encoding="utf-8")
        found[name] = [sys.executable, str(script), run, precision]
    return found


def to_body(name: str, image: bytes) -> bytes:
    """The body that a server takes: the image, or JSON with it for LitServe."""
    text = base64.b64encode(image).decode()
    return json.dumps({"image": text}).encode() if name == "litserve" else image


def send(port: int, data: bytes) -> None:
    """One request on a connection of its own."""
    kind = "application/json" if data.startswith(b"{") else "image/jpeg"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/predict", data, {"Content-Type": kind})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"port {port} answered {answer.status}")
    finally:
        connection.close()


def measure_predictor(
    run: str, precision: str, images: Sequence[str], seconds: float
) -> list[float]:
    """Seconds of each image in a process of its own."""
    words = [sys.executable, "-c", PREDICTOR, run, precision, str(seconds), *images]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


def wait_until_it_answers(port: int, process: subprocess.Popen[bytes], data: bytes) -> float:
    """Seconds until the first answer."""
    began = time.perf_counter()
    while process.poll() is None:
        with contextlib.suppress(OSError):
            send(port, data)
            return time.perf_counter() - began
        time.sleep(0.1)
    raise SystemExit(f"{process.args!r} ended with {process.returncode}")


def measure(port: int, images: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds of each request that `clients` made in `seconds`."""
    end, took = time.perf_counter() + seconds, list[float]()

    def ask(index: int) -> None:
        while (began := time.perf_counter()) < end:
            send(port, images[index % len(images)])
            took.append(time.perf_counter() - began)
            index += clients

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("images")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="auto", help="of all of them")
    parser.add_argument("--port", type=int, default=8500, help="the first of a few")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for scripts of servers")
    args = parser.parse_args()
    paths = list_images([args.images])[:200]
    images = [Path(path).read_bytes() for path in paths]
    bodies = {
        name: [to_body(name, image) for image in images] for name in ("litserve", "vit serve")
    }
    bodies["fastapi"] = bodies["vit serve"]
    found = commands(args.run, args.precision, args.folder)
    ports = {name: args.port + place for place, name in enumerate(found)}
    processes = {
        name: subprocess.Popen(
            [*words, str(ports[name])], stderr=subprocess.DEVNULL, start_new_session=True
        )
        for name, words in found.items()
    }
    try:
        for name, process in processes.items():
            ready = wait_until_it_answers(ports[name], process, bodies[name][0])
            print(f"{name}: answered after {ready:.1f} s, with all servers starting at once")
        print("| clients | server | requests/s | median ms | p99 ms |\n|---|---|---|---|---|")
        for clients in args.clients:
            took: dict[str, list[list[float]]] = {name: [] for name in found}
            if clients == 1:
                took["predictor"] = []
            for _ in range(args.rounds):
                if clients == 1:
                    alone = measure_predictor(args.run, args.precision, paths, args.seconds)
                    took["predictor"].append(alone)
                for name in found:
                    took[name].append(measure(ports[name], bodies[name], clients, args.seconds))
            for name, rounds in took.items():
                rate = statistics.median(len(one) / args.seconds for one in rounds)
                times = sorted(1000 * one for each in rounds for one in each)
                median, p99 = statistics.median(times), times[int(0.99 * (len(times) - 1))]
                print(f"| {clients} | {name} | {rate:.1f} | {median:.1f} | {p99:.1f} |", flush=True)
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # LitServe has processes of its own
        for process in processes.values():
            process.wait(30)


if __name__ == "__main__":
    main()

"""`vit serve`: trained models behind an HTTP interface and a web page."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vit.commands.command_options import (
    NO_CALIBRATION_HELP,
    SEARCH_FIELDS,
    add_search_options,
    positive_int,
    search_from_args,
)
from vit.commands.command_output import notify
from vit.commands.command_parser import CommandParser
from vit.config.parser import nearest
from vit.errors import ConfigError, VitError
from vit.paths import path_argument
from vit.serving.server_config import ServerConfig
from vit.text import Notify, printable

EXIT_FAILED, STDERR = 1, 2
LIBRARIES = ("starlette", "uvicorn", "python_multipart", "prometheus_client")
DEFAULTS = ServerConfig()
LIMITS = {
    "max_image_mb": ("MB", "largest image file"),
    "max_request_mb": ("MB", "largest request"),
    "max_images": ("N", "most images of one request"),
    "max_pixels": ("N", "most pixels of one image that are decoded"),
    "max_queue": ("N", "most images that wait or are computed; further requests are answered 429"),
    "max_memory_mb": ("MB", "most bytes of all requests in memory"),
    "max_connections": ("N", "most connections at the same time"),
    "header_timeout": ("S", "seconds in which the header of a request must arrive"),
    "body_timeout": ("S", "seconds in which the body of a request must arrive"),
    "compute_timeout": ("S", "seconds after which a batch never ends: the server exits with 1"),
    "stop_timeout": ("S", "seconds that accepted requests have after SIGTERM"),
}
"""Limit -> its metavar and description; fields of ServerConfig."""
NETWORK = ("batch_size", "device", "precision", "workers", "no_calibration")


def add_arguments(parser: CommandParser) -> None:
    """Add MODEL, and the options of the address, of access, limits and the network."""
    parser.essential = ("models", "host", "port", "token_file", "device", "batch_size")
    parser.examples = (
        "vit serve runs/photos",
        "vit serve photos.onnx --host 0.0.0.0 --token-file token.txt",
        "vit serve cats=runs/cats dogs=runs/dogs --port 8080",
        "vit serve runs/photos --engine ray --replicas 1-4",
        "curl -F file=@cat.jpg http://127.0.0.1:8000/predict",
    )
    parser.usage = "vit serve MODEL [NAME=MODEL ...] [--host H] [--port P] [options]"
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="a run folder, other weights with a head, or an .onnx or .xml of vit export; "
        "NAME=MODEL names it in requests, the first one is the default",
    )
    _add_access(parser)
    _add_limits(parser)
    _add_network(parser)
    add_search_options(parser)


def _add_access(parser: CommandParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--host",
        default=DEFAULTS.host,
        help=f"address to listen at (default: {DEFAULTS.host}, this machine only; 0.0.0.0: all)",
    )
    group.add_argument(
        "--port",
        type=int,
        default=DEFAULTS.port,
        metavar="P",
        help=f"port to listen at (default: {DEFAULTS.port}; 0: a free one)",
    )
    group.add_argument(
        "--token",
        metavar="TOKEN",
        help="token that requests must have, as `Authorization: Bearer TOKEN` (default: none); "
        "other users of this machine see it in the list of processes",
    )
    group.add_argument("--token-file", metavar="FILE", help="file with the token, in one line")
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name by which clients address the server, such as behind a proxy; may be repeated "
        "(default: those of this machine; any name with --host)",
    )


def _add_limits(parser: CommandParser) -> None:
    group = parser.add_argument_group("limits (docs/serve.md)")
    for name, (metavar, text) in LIMITS.items():
        value = getattr(DEFAULTS, name)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=positive_int if isinstance(value, int) else float,
            default=value,
            metavar=metavar,
            help=f"{text} (default: {value:,})"
            if isinstance(value, int)
            else f"{text} (default: {value:g})",
        )


def _add_network(parser: CommandParser) -> None:
    group = parser.add_argument_group("network (how it runs)")
    group.add_argument(
        "-b",
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="largest batch; rows equal those of vit predict --batch-size N (default: that of vit "
        "predict; 1 for exported networks and captions)",
    )
    group.add_argument("--device", metavar="D", help="cpu, cuda, cuda:N or mps (default: the best)")
    group.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="arithmetic of the network (default: auto, bf16 on hardware that has it)",
    )
    group.add_argument(
        "-j",
        "--workers",
        type=positive_int,
        metavar="N",
        help="batches that are computed at the same time on a CPU (default: one a core, at most 8)",
    )
    group.add_argument(
        "--engine",
        choices=["torch", "onnx", "openvino", "ray"],
        help="inference engine (default: torch; onnx for an .onnx, openvino for an .xml); ray "
        "serves with Ray Serve, on one machine or a cluster",
    )
    group.add_argument(
        "--replicas",
        metavar="N|LEAST-MOST",
        help="serve with N processes, each with its own models and limits, and restart one that "
        "ends (default: one process alone); a range lets --engine ray choose by the load",
    )
    group.add_argument("--no-calibration", action="store_true", help=NO_CALIBRATION_HELP)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    if sys.stderr is sys.__stderr__:
        sys.stderr = StandardError()
    network = {name: getattr(args, name) for name in NETWORK}
    if any(flag in args for flag in SEARCH_FIELDS):
        network["search"] = search_from_args(args)
    try:
        serve(
            args.models,
            host=args.host,
            port=args.port,
            token=read_token(args.token, args.token_file),
            allowed_hosts=tuple(args.allow_host),
            engine=args.engine,
            replicas=args.replicas,
            notify=lambda line: notify(f"vit serve: {line}"),
            **{name: getattr(args, name) for name in LIMITS},
            **network,
        )
    except VitError as error:
        if error.exit_code != EXIT_FAILED:
            raise
        notify(f"vit serve: {error}")
        os._exit(EXIT_FAILED)  # Python would wait for a thread that may never end
    return 0


class StandardError(io.TextIOBase):
    """Standard error that ignores write errors: a closed pipe, or a full disk."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(STDERR, text.encode("utf-8", "backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)


def serve(
    models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    engine: str | None = None,
    replicas: int | str | None = None,
    notify: Notify = notify,
    **settings: Any,
) -> None:
    """Serve models as `vit serve` does, until a signal.

    Args:
        models: One model or several: run folders, other weights or exported files, each of them
            alone or as `NAME=MODEL`; the first one is the default.
        engine: torch, onnx or openvino; by default the suffix of each model decides. With ray the
            server runs in Ray Serve.
        replicas: Processes that serve, each with its own models, such as 2; one that ends by
            itself is restarted. With ray also "1-8", by load. A script calls this under
            `if __name__ == "__main__":`, as for all of multiprocessing.
        notify: Called with notes.
        settings: Fields of ServerConfig (vit/serving/server_config.py), and as for vit.Predictor
            `batch_size`, `device`, `precision`, `workers`, `no_calibration` and `search`.

    Raises:
        VitError: A model, a setting or the address cannot be used.
    """
    for name in LIBRARIES:
        if find_spec(name) is None:
            raise VitError(f"{name} is not installed: pip install 'vit-toolkit[serve]'")
    access = [one.name for one in fields(ServerConfig)]
    known = [*access, *NETWORK, "search"]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name} is not a setting of a server{nearest(name, known)}")
    config = ServerConfig(**{name: settings.pop(name) for name in access if name in settings})
    several = [models] if isinstance(models, str | os.PathLike) else models
    words = [path_argument("models", one, "a run folder, weights, or a file") for one in several]
    from vit.serving.replicas import Replicas, serve_replicas

    number = Replicas.parse(str(1 if replicas is None else replicas))
    if engine == "ray":
        from vit.serving.ray_deployment import serve_with_ray

        serve_with_ray(words, config, number, notify=notify, **settings)
    elif number.least < number.most:
        raise ConfigError(f"replicas={replicas}: a range needs engine ray; give one number")
    elif replicas is not None:
        serve_replicas(words, config, number.most, engine=engine, notify=notify, **settings)
    else:
        from vit.serving.http_server import serve

        serve(words, config, engine=engine, notify=notify, **settings)


def read_token(token: str | None, path: str | None) -> str | None:
    """The token, of the flag or of a file."""
    if path is None:
        return token
    if token is not None:
        raise VitError("--token and --token-file: give one of them")
    try:
        lines = Path(path).read_text(encoding="utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise VitError(f"--token-file: {printable(path)} cannot be read ({reason})") from None
    if len(lines) != 1:
        has = f"has {len(lines)} lines" if lines else "is empty"
        raise VitError(f"--token-file: {printable(path)} {has}; give the token in one line")
    return lines[0]

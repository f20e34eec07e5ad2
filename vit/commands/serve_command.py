"""`vit serve`: trained models behind an HTTP interface and a web page."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vit.commands.command_output import notify
from vit.commands.command_parser import (
    SETTING,
    CommandParser,
    add_fields,
    add_search_options,
    checked_settings,
    settings_from_args,
)
from vit.config.inference_config import InferenceConfig
from vit.config.settings import split_settings
from vit.errors import ConfigError, VitError
from vit.output.output_file import check_output
from vit.paths import path_argument
from vit.serving.server_config import ServerConfig
from vit.text import Notify

EXIT_FAILED, STDERR = 1, 2
LIBRARIES = ("starlette", "uvicorn", "python_multipart", "prometheus_client")
NETWORK = ("batch_size", "device", "precision", "workers", "no_calibration")


def add_arguments(parser: CommandParser) -> None:
    """Add MODEL, and the options of the address, of access, limits and the network."""
    parser.essential = (
        *("models", f"{SETTING}host", f"{SETTING}port", "token_file"),
        *(f"{SETTING}device", f"{SETTING}batch_size"),
    )
    parser.examples = (
        "vit serve runs/photos",
        "vit serve photos.onnx --host 0.0.0.0 --token-file token.txt",
        "vit serve cats=runs/cats dogs=runs/dogs --port 8080",
        "vit serve runs/photos --engine ray --replicas 1-4",
        "vit serve runs/photos --watch field.jsonl",
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
    access = ("host", "port", "token", "allowed_hosts")
    group = parser.add_argument_group("access")
    add_fields(group, ServerConfig, only=access, flags={"allowed_hosts": "allow_host"})
    group.add_argument("--token-file", metavar="FILE", help="file with the token, in one line")
    limits = parser.add_argument_group("limits (docs/serve.md)")
    add_fields(limits, ServerConfig, without=(*access, "watch"))
    add_fields(parser.add_argument_group("watching (docs/serve.md)"), ServerConfig, only=("watch",))
    group = parser.add_argument_group("network (how it runs)")
    add_fields(group, InferenceConfig, only=NETWORK)
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
    add_search_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    if sys.stderr is sys.__stderr__:
        sys.stderr = StandardError()
    settings = checked_settings(args, ServerConfig, InferenceConfig)
    hosts = settings_from_args(args).get("allow_host", ())
    token = read_token(settings.pop("token", None), args.token_file)
    try:
        serve(
            args.models,
            engine=args.engine,
            replicas=args.replicas,
            notify=lambda line: notify(f"vit serve: {line}"),
            **{**settings, "token": token, "allowed_hosts": hosts},
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
    config, inference = split_settings(settings, "a server", ServerConfig, InferenceConfig)
    default = InferenceConfig()
    network = {
        name: value for name, value in vars(inference).items() if value != getattr(default, name)
    }
    for name in network:
        if name not in (*NETWORK, "search"):
            inference.refuse(name, "is not a setting of a server")
    several = [models] if isinstance(models, str | os.PathLike) else models
    words = [path_argument("models", one, "a run folder, weights, or a file") for one in several]
    from vit.serving.replicas import Replicas, serve_replicas

    number = Replicas.parse(str(1 if replicas is None else replicas))
    check_output(config.watch, overwrite=True)
    if config.watch is not None and engine == "ray":
        raise ConfigError("watch with engine=ray: its replicas share no file; leave engine out")
    if engine == "ray":
        from vit.serving.ray_deployment import serve_with_ray

        serve_with_ray(words, config, number, notify=notify, **network)
    elif number.least < number.most:
        raise ConfigError(f"replicas={replicas}: a range needs engine ray; give one number")
    elif replicas is not None:
        serve_replicas(words, config, number.most, engine=engine, notify=notify, **network)
    else:
        from vit.serving.http_server import serve

        serve(words, config, engine=engine, notify=notify, **network)


def read_token(token: str | None, path: str | None) -> str | None:
    if path is None:
        return token
    if token is not None:
        raise VitError("--token and --token-file: give one of them")
    try:
        lines = Path(path).read_text(encoding="utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise VitError(f"--token-file: {path} cannot be read ({reason})") from None
    if len(lines) != 1:
        has = f"has {len(lines)} lines" if lines else "is empty"
        raise VitError(f"--token-file: {path} {has}; give the token in one line")
    return lines[0]

"""The ASGI application of `vit serve`, on Starlette.

    upload (request_body) -> images in memory -> BatchScheduler (decode, batch, compute)
           -> rows of served_model -> {"results": [ROW, ...]}

    GET  /                 the page (page/), /page.css, /page.js
    POST /predict          images -> rows, as `vit predict --format jsonl` writes them
    GET  /models /health /ready /metrics /openapi.json
    *    /v2/...           kserve_protocol

Every refusal is {"error": SENTENCE} with a status of 4xx. Requests never name a file or a URL.
"""

import asyncio
import hmac
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from vit.errors import BadImage, ConfigError, VitError
from vit.generation.generation_config import Search
from vit.output.prediction_results import to_json
from vit.serving import kserve_protocol
from vit.serving.dynamic_batching import BatchScheduler, QueueFull
from vit.serving.model_registry import ModelRegistry
from vit.serving.openapi_document import PREDICT_PARAMETERS, openapi_document
from vit.serving.request_body import BodyReader, ClientGone, MemoryBudget, check_name
from vit.serving.served_model import RowOptions, ServedModel, Upload
from vit.serving.server_config import MEGABYTE, RequestError, ServerConfig
from vit.serving.server_metrics import ServerMetrics, WatchFile
from vit.text import nearest, printable

CAPTION_FLAGS = {field.name for field in fields(Search)} - {"top_k"} | {"sample_top_k"}
PAGE = Path(__file__).parent / "page"
ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
PROBES = {"/health", "/ready", "/v2/health/live", "/v2/health/ready"}
"""Paths without secrets, which Kubernetes requests by IP address."""
OPEN_PATHS = {*ASSETS, *PROBES}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
OWN_NAMES = {"localhost", "127.0.0.1", "[::1]"}
ROUTE = "vit.route"
"""Key of the scope with the path of the route, for metrics."""
TRUE, FALSE = ("1", "true", "yes", ""), ("0", "false", "no")
Handler = Callable[[Request], Awaitable[Response]]


class Application:
    """Answers the requests of one server."""

    def __init__(
        self, registry: ModelRegistry, config: ServerConfig, metrics: ServerMetrics
    ) -> None:
        self.registry, self.config, self.metrics = registry, config, metrics
        self.scheduler = BatchScheduler(
            registry.compute,
            registry.compute_threads,
            registry.all_cores,
            config.max_queue,
            config.compute_timeout,
            metrics,
        )
        for name, model in registry.models.items():
            metrics.add_model(name, rejects=model.allows(RowOptions(reject=True)))
        self.watch: WatchFile | None = None
        if config.watch is not None:
            self.watch = WatchFile(config.watch, registry.notify)
        self.budget = MemoryBudget(int(config.max_memory_mb * MEGABYTE), metrics)
        self.stopping = False
        self.document = openapi_document(config, [*registry.models], OPEN_PATHS)
        gets: dict[str, Handler] = {
            "/models": self.models,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.show_metrics,
            "/openapi.json": self.openapi,
            "/v2": self.kserve_server,
            "/v2/health/live": self.kserve_live,
            "/v2/health/ready": self.kserve_ready,
            "/v2/models/{name}": self.kserve_model,
            "/v2/models/{name}/versions/{version}": self.kserve_model,
            "/v2/models/{name}/ready": self.kserve_model_ready,
            "/v2/models/{name}/versions/{version}/ready": self.kserve_model_ready,
        }
        posts: dict[str, Handler] = {
            "/predict": self.predict,
            "/v2/models/{name}/infer": self.kserve_infer,
            "/v2/models/{name}/versions/{version}/infer": self.kserve_infer,
        }
        routes = [Route(path, self._asset, methods=["GET"]) for path in ASSETS]
        routes += [
            Route(path, self._checked(path, one), methods=["GET"]) for path, one in gets.items()
        ]
        routes += [
            Route(path, self._checked(path, one), methods=["POST"]) for path, one in posts.items()
        ]
        starlette = Starlette(routes=routes, exception_handlers={HTTPException: refuse_route})
        starlette.router.redirect_slashes = False
        self.asgi = AccessControl(starlette, config, metrics)

    # --- answers -----------------------------------------------------------------------------

    async def _asset(self, request: Request) -> Response:
        name, kind = ASSETS[request.url.path]
        headers = {"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"}
        return Response((PAGE / name).read_bytes(), media_type=kind, headers=headers)

    async def models(self, _request: Request) -> Response:
        models = [model.describe() for model in self.registry.models.values()]
        names = ("max_image_mb", "max_request_mb", "max_images", "max_pixels")
        limits = {name: getattr(self.config, name) for name in names}
        return json_response({"models": models, "limits": limits})

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return not (self.stopping or self.scheduler.failure)

    async def health(self, _request: Request) -> Response:
        if failure := self.scheduler.failure:
            return json_response({"status": "failed", "error": failure}, 503)
        return json_response({"status": "alive"})

    async def ready(self, _request: Request) -> Response:
        status, code = ("ready", 200) if self.is_ready else ("stopping", 503)
        return json_response({"status": status}, code)

    async def show_metrics(self, _request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _request: Request) -> Response:
        return json_response(self.document)

    async def predict(self, request: Request) -> Response:
        query = parse_query(request)
        model = self.registry.get(query.get("model"))
        given = [field.name for field in fields(RowOptions) if field.name in query]
        options = RowOptions(**{name: parse_parameter(name, query[name]) for name in given})
        explain = query.get("explain")
        if explain not in (None, "json", "image"):
            raise ConfigError(f"explain={printable(explain[:40])!r}: give json or image")
        model.check(options, explain=explain is not None)
        with self._body(request) as body:
            uploads = await body.images(self.scheduler, query.get("name", "image"))
            names = [one.name for one in uploads]
            pending: list[Upload] = [*uploads]
            del uploads  # the scheduler empties `pending`, and so frees bytes as they are decoded
            outputs = await self._compute(model, names, pending)
        predictions = [
            model.to_prediction(*one, options) for one in zip(names, outputs, strict=True)
        ]
        if options.reject:
            for one in predictions:
                if one.error is None:
                    self.metrics.rejections.labels(model.name, one.unknown or "class").inc()
        rows = [model.format_row(one, options) for one in predictions]
        results = f'"results": [{", ".join(rows)}]'
        if failed := [one for one in outputs if isinstance(one, BadImage)]:
            if len(outputs) == 1:
                raise RequestError(422, failed[0].reason)
            if len(failed) == len(outputs):
                error = to_json(f"none of the {len(outputs)} images can be read")
                return json_text(f'{{"error": {error}, {results}}}', 422)
        if explain is not None:
            maps = [
                None
                if isinstance(output, BadImage)
                else await self.scheduler.call(
                    model.explain, name, output, options, explain == "image"
                )
                for name, output in zip(names, outputs, strict=True)
            ]
            results += f', "explanations": {to_json(maps)}'
        return json_text(f"{{{results}}}")

    # --- KServe ------------------------------------------------------------------------------

    async def kserve_server(self, _request: Request) -> Response:
        return json_response(kserve_protocol.SERVER)

    async def kserve_live(self, _request: Request) -> Response:
        live = not self.scheduler.failure
        return json_response({"live": live}, 200 if live else 503)

    async def kserve_ready(self, _request: Request) -> Response:
        return json_response({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def kserve_model(self, request: Request) -> Response:
        return json_response(kserve_protocol.model_metadata(self._kserve_model(request)))

    async def kserve_model_ready(self, request: Request) -> Response:
        return json_response({"name": self._kserve_model(request).name, "ready": True})

    async def kserve_infer(self, request: Request) -> Response:
        model = self._kserve_model(request)
        self.scheduler.check_room()
        header_length = request.headers.get(kserve_protocol.HEADER_LENGTH)
        with self._body(request) as body:
            parsed = await asyncio.get_running_loop().run_in_executor(
                self.scheduler.decoders,
                kserve_protocol.parse_request,
                await body.read(),
                header_length,
                model,
                self.config,
            )
            names = parsed.names
            outputs = await self._compute(model, names, parsed.uploads)
        content, headers = kserve_protocol.make_response(model, parsed, names, outputs)
        return Response(content, headers=headers)

    def _kserve_model(self, request: Request) -> ServedModel:
        version = request.path_params.get("version", kserve_protocol.VERSION)
        if version != kserve_protocol.VERSION:
            shown = printable(version[:40])
            raise RequestError(404, f"version {shown!r}: models have version 1 only")
        return self.registry.get(request.path_params["name"])

    async def _compute(
        self, model: ServedModel, names: Sequence[str], uploads: list[Upload]
    ) -> list[Any]:
        """Outputs of the images of a request, which are counted if the model is watched."""
        outputs = await self.scheduler.predict(model, names, uploads)
        if self.watch is not None and model.reference is not None:
            self.watch.add(model.reference, outputs)
        return outputs

    # --- requests ----------------------------------------------------------------------------

    def _body(self, request: Request) -> BodyReader:
        body = BodyReader(request.scope, request.receive, self.config, self.budget)
        request.state.body = body
        return body

    def _checked(self, path: str, handler: Handler) -> Handler:
        """`handler` of a route, with its exceptions as answers."""

        async def answer(request: Request) -> Response:
            request.scope[ROUTE] = path
            try:
                return await handler(request)
            except ClientGone:
                self.metrics.refused.labels("client gone").inc()
                return Response(status_code=400)  # nobody reads it
            except RequestError as error:
                if isinstance(error, QueueFull):
                    self.metrics.limits_reached.labels(error.limit).inc()
                refused = error
            except VitError as error:
                refused = RequestError(400, str(error))
            except Exception:  # Starlette would answer in plain text
                traceback.print_exc(file=sys.stderr)
                refused = RequestError(500, "the server failed; its log has the reason")
            self.metrics.refused.labels(str(refused.status)).inc()
            unread = getattr(request.state, "body", None)
            return Refusal(refused.status, refused.reason, refused.headers, unread)

        return answer


class Refusal(Response):
    """An error as JSON; what the client still sends is dropped, so that it can read the answer."""

    media_type = "application/json"

    def __init__(
        self,
        status: int,
        reason: str,
        headers: dict[str, str] | None = None,
        unread: BodyReader | None = None,
    ) -> None:
        self.unread = None if unread is None or unread.complete else unread
        closing = {} if self.unread is None else {"connection": "close"}
        text = to_json({"error": " ".join(reason.split())})
        super().__init__(text, status, headers={**(headers or {}), **closing})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        if self.unread is not None:
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await self.unread.discard()
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": self.body})


class AccessControl:
    """Checks the host name and the token of each request, and adds headers and metrics."""

    def __init__(self, app: Any, config: ServerConfig, metrics: ServerMetrics) -> None:
        self.app, self.config, self.metrics = app, config, metrics
        self.names = OWN_NAMES | {name.lower() for name in config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.monotonic(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {key for key, _ in message["headers"]}
                more = {**SECURITY_HEADERS, "cache-control": "no-store"}
                more["content-security-policy"] = "default-src 'none'; frame-ancestors 'none'"
                message["headers"] = [
                    *message["headers"],
                    *(
                        (key.encode(), value.encode())
                        for key, value in more.items()
                        if key.encode() not in names
                    ),
                ]
            await send(message)

        refusal = self.refuse(scope)
        try:
            if refusal is not None:
                self.metrics.refused.labels(str(refusal.status_code)).inc()
                await refusal(scope, receive, send_with_headers)
            else:
                await self.app(scope, receive, send_with_headers)
        except Exception:
            traceback.print_exc(file=sys.stderr)
        finally:
            route = scope.get(ROUTE, "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.request_seconds.labels(route).observe(time.monotonic() - began)

    def refuse(self, scope: Scope) -> Refusal | None:
        """The refusal of a request, or None."""
        headers = dict(scope["headers"])
        if (self.config.loopback or self.config.allowed_hosts) and scope["path"] not in PROBES:
            # a page of another site may lead its own name to this address (DNS rebinding)
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if host_name(host) not in self.names:
                return Refusal(
                    421,
                    f"this server is not called {printable(host[:100])!r}; allow the name with "
                    "--allow-host",
                )
        if self.config.token is None or scope["path"] in OPEN_PATHS:
            return None
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, b"Bearer " + self.config.token.encode()):
            return None
        return Refusal(
            401,
            "this is not the token of this server: Authorization: Bearer TOKEN"
            if given
            else "this server needs a token: Authorization: Bearer TOKEN",
            {"www-authenticate": "Bearer"},
        )


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() else host


async def refuse_route(_request: Request, error: Exception) -> Response:
    """Answer for an unknown path or method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    methods = {name.lower(): value for name, value in headers.items()}.get(
        "allow", "another method"
    )
    reason = {
        404: "there is no such path; see /openapi.json",
        405: f"this path takes {methods}; see /openapi.json",
    }
    return Refusal(error.status_code, reason.get(error.status_code, error.detail), headers)


def json_response(content: Any, status: int = 200) -> Response:
    return json_text(to_json(content), status)


def json_text(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


def parse_query(request: Request) -> dict[str, str]:
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in PREDICT_PARAMETERS:
            hint = nearest(name[:40], PREDICT_PARAMETERS)
            if name in CAPTION_FLAGS:
                flag = f"--{name.replace('_', '-')}"
                hint = f", but the flag {flag} of vit serve: it is the same for all captions"
            raise RequestError(400, f"{printable(name[:40])!r} is not a parameter{hint}")
        if name in query:
            raise RequestError(400, f"{name}: it is there twice")
        query[name] = value
    if not check_name(query.get("name", "image")):
        raise RequestError(400, "name: it is empty; leave it out, or give the name of the image")
    return query


def parse_parameter(name: str, word: str) -> Any:
    """The value of an option of the rows, as its schema in the OpenAPI document allows."""
    schema = PREDICT_PARAMETERS[name][1]
    shown = f"{name}={printable(word[:40])!r}"
    if schema["type"] == "boolean":
        if word.lower() not in TRUE + FALSE:
            raise ConfigError(f"{shown}: give true or false")
        return word.lower() in TRUE
    whole, least, most = schema["type"] == "integer", schema.get("minimum", 0), schema["maximum"]
    try:
        number = int(word[:40]) if whole else float(word[:40])
    except ValueError:
        number = -1
    if not least <= number <= most or number == schema.get("exclusiveMinimum"):
        above = "above" if "exclusiveMinimum" in schema else "from"
        upto = f"a number of at least {least}" if whole else f"a number {above} {least} to {most}"
        raise ConfigError(f"{shown}: give {upto}")
    return number

"""Bodies of requests: multipart or a raw image, in memory, within limits.

Nothing is written to disk, and not a byte above a limit is kept: each chunk is counted before it is
parsed. python-multipart splits the parts as they arrive.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartState, parse_options_header

from vit.data.image_io import EncodedImage
from vit.serving.dynamic_batching import BatchScheduler, QueueFull
from vit.serving.server_config import MEGABYTE, RequestError, ServerConfig
from vit.serving.server_metrics import ServerMetrics

FIELD = "file"
MAX_NAME = 1000
"""Characters of an image's name."""
MAX_PART_HEADERS, MAX_PART_HEADER_BYTES = 8, 4096
Message = Mapping[str, Any]


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class MemoryBudget:
    """Bytes of all requests that are in memory."""

    def __init__(self, limit: int, metrics: ServerMetrics) -> None:
        self.limit, self.held, self.metrics = limit, 0, metrics

    def take(self, size: int) -> None:
        if self.held + size > self.limit:
            raise QueueFull(1, "max_memory_mb")
        self.held += size
        self.metrics.memory.set(self.held)

    def give(self, size: int) -> None:
        self.held -= size
        self.metrics.memory.set(self.held)


class BodyReader:
    """Reads the body of one request; a context manager that returns its bytes to the budget."""

    def __init__(
        self, scope: Mapping[str, Any], receive: Any, config: ServerConfig, budget: MemoryBudget
    ) -> None:
        self.receive, self.config, self.budget = receive, config, budget
        self.headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        self.taken, self.complete = 0, False

    def __enter__(self) -> "BodyReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.budget.give(self.taken)

    def check_header(self, what: str) -> None:
        """Refuse a body by its header, before a byte of it is read."""
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise RequestError(
                415, f"Content-Encoding: {encoding[:40]} is not read; send the bytes as they are"
            )
        length = self.headers.get("content-length", "")
        if length.isdecimal():
            check_size(what, int(length), self.config)

    async def chunks(self, what: str = "request") -> AsyncIterator[bytes]:
        """Yield the body as it arrives, of the size that an image or a request may have."""
        self.check_header(what)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.body_timeout
        while not self.complete:
            try:
                message: Message = await asyncio.wait_for(
                    self.receive(), max(deadline - loop.time(), 0.001)
                )
            except TimeoutError:
                raise RequestError(
                    408,
                    f"the request was not complete after {self.config.body_timeout:g} seconds",
                    {"connection": "close"},
                ) from None
            if message["type"] != "http.request":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            self.complete = not message.get("more_body", False)
            check_size(what, self.taken + len(chunk), self.config)
            self.budget.take(len(chunk))
            self.taken += len(chunk)
            if chunk:
                yield chunk

    async def discard(self, seconds: float = 1.0) -> None:
        """Drop what a refused client still sends, so that it can read its answer."""
        loop = asyncio.get_running_loop()
        deadline, left = loop.time() + seconds, self.config.max_request_mb * MEGABYTE
        while not self.complete and left > 0 and loop.time() < deadline:
            try:
                message = await asyncio.wait_for(self.receive(), deadline - loop.time())
            except TimeoutError:
                return
            self.complete = not message.get("more_body", False)
            left -= len(message.get("body", b""))

    async def read(self, what: str = "request") -> bytes:
        """The whole body; as `chunks`."""
        return b"".join([chunk async for chunk in self.chunks(what)])

    async def images(self, scheduler: BatchScheduler, name: str) -> list[EncodedImage]:
        """The images of the body: the parts `file` of a multipart one, else the body."""
        scheduler.check_room()
        kind, options = parse_options_header(self.headers.get("content-type", ""))
        if kind == b"application/json":
            raise RequestError(
                415,
                "JSON has no image here; send the bytes of an image as the body, or as the field "
                f"`{FIELD}` of multipart/form-data",
            )
        if not kind.startswith(b"multipart/"):
            data = await self.read("image")
            if not data:
                raise RequestError(
                    400,
                    "the request has no image; send it as the body, or as the field "
                    f"`{FIELD}` of multipart/form-data",
                )
            return [EncodedImage(check_name(name), data)]
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:
            raise RequestError(400, "a multipart body is multipart/form-data with a boundary")
        return await self._parts(boundary, scheduler)

    async def _parts(self, boundary: bytes, scheduler: BatchScheduler) -> list[EncodedImage]:
        parts = MultipartImages(self.config)
        parser = MultipartParser(
            boundary,
            parts.callbacks(),  # type: ignore[arg-type]
            max_header_count=MAX_PART_HEADERS,
            max_header_size=MAX_PART_HEADER_BYTES,
        )
        try:
            async for chunk in self.chunks():
                parser.write(chunk)
        except MultipartParseError as error:
            raise RequestError(400, f"the multipart body is not well formed: {error}") from None
        if parser.state != MultipartState.END:
            raise RequestError(400, "the multipart body is cut short")
        if not parts.images:
            raise RequestError(400, f"the request has no image; send it as the field `{FIELD}`")
        scheduler.check_room(len(parts.images))
        return parts.images


class MultipartImages:
    """Collects the images of a multipart body from the callbacks of the parser."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.images = config, list[EncodedImage]()
        self._field, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name, self._data, self._chunks = "", 0, list[bytes]()

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add,
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._headers, self._data, self._chunks = {}, 0, []
        check_count(len(self.images) + 1, self.config)

    def _end_header(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        text = self._headers.get(b"content-disposition", b"").decode("latin-1")
        _, options = parse_options_header(text)
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field != FIELD:
            raise RequestError(
                400,
                f"the multipart field {field[:100]!r} is not known: images are in `{FIELD}`, and "
                "options such as top_k in the URL",
            )
        name = options.get(b"filename", b"").decode("utf-8", "surrogateescape")
        self._name = check_name(name or f"image{len(self.images) + 1}")

    def _add(self, data: bytes, start: int, end: int) -> None:
        self._data += end - start
        check_size("image", self._data, self.config)
        self._chunks.append(data[start:end])

    def _end(self) -> None:
        self.images.append(EncodedImage(self._name, b"".join(self._chunks)))
        self._chunks = []


def check_size(what: str, size: int, config: ServerConfig) -> None:
    """Refuse an image or a request, `what`, of more bytes than its limit."""
    megabytes = getattr(config, f"max_{what}_mb")
    if size > megabytes * MEGABYTE:
        raise RequestError(
            413,
            f"the {what} is larger than {megabytes:g} MB, the limit of this server "
            f"(--max-{what}-mb)",
        )


def check_count(images: int, config: ServerConfig) -> None:
    """Refuse a request with too many images."""
    if images > config.max_images:
        raise RequestError(
            413,
            f"a request has at most {config.max_images} images here (--max-images); "
            "send the others in another one",
        )


def check_name(name: str) -> str:
    if len(name) > MAX_NAME:
        raise RequestError(400, f"the name of an image has at most {MAX_NAME} characters here")
    return name

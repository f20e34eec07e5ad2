"""Settings of `vit serve`: address, access and limits; what is refused. Imports no torch."""

from dataclasses import dataclass, field, fields

from vit.errors import ConfigError

MEGABYTE = 1_000_000


class RequestError(Exception):
    """A request that is answered with a status of 4xx or 5xx and a sentence."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the server, under the names of the flags."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all of this machine."""
    port: int = 8000
    """Port to listen at; 0 for a free one."""
    token: str | None = field(default=None, repr=False)
    """Token that requests must have, as `Authorization: Bearer TOKEN`."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may address the server, beside those of this machine."""
    max_image_mb: float = 20.0
    """Largest image file, in megabytes."""
    max_request_mb: float = 64.0
    """Largest request, in megabytes."""
    max_images: int = 64
    """Most images of one request."""
    max_pixels: int = 100_000_000
    """Most pixels of one image that are decoded; a larger JPEG is decoded at a part of its size."""
    max_queue: int = 256
    """Most images that wait or are computed; further requests are answered 429."""
    max_memory_mb: float = 512.0
    """Most bytes of all requests that are being received or computed, in megabytes."""
    max_connections: int = 1000
    """Most connections at the same time."""
    header_timeout: float = 10.0
    """Seconds in which the header of a request must arrive."""
    body_timeout: float = 30.0
    """Seconds in which the body of a request must arrive."""
    compute_timeout: float = 300.0
    """Seconds after which a batch never ends; the server then ends itself, with an error."""
    stop_timeout: float = 30.0
    """Seconds that accepted requests have after a signal to stop."""
    watch: str | None = None
    """File (.jsonl) that counts of the answers are appended to, for `vit drift RUN FILE`: one
    model, a run folder with a calibration."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            limit = one.name.startswith("max_") or one.name.endswith("_timeout")
            if limit and not value > 0:
                raise ConfigError(f"{one.name}={value!r}: must be more than 0")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: must be from 0 to 65535")
        if self.token is not None and not (
            self.token.isascii() and self.token.isprintable() and self.token.strip() == self.token
        ):
            raise ConfigError("token: give printable ASCII characters without spaces around them")
        if self.token == "":
            raise ConfigError("token: it is empty; leave it out, or give one")
        if self.watch is not None and not self.watch.endswith(".jsonl"):
            raise ConfigError(f"watch={self.watch}: give a file whose name ends with .jsonl")
        if self.max_image_mb > self.max_request_mb:
            raise ConfigError(
                f"max_image_mb={self.max_image_mb:g}: a request has at most "
                f"max_request_mb={self.max_request_mb:g}; lower the first or raise the second"
            )
        if self.max_request_mb > self.max_memory_mb:
            raise ConfigError(
                f"max_request_mb={self.max_request_mb:g}: all requests together have "
                f"max_memory_mb={self.max_memory_mb:g}; lower the first or raise the second"
            )
        if self.max_images > self.max_queue:
            raise ConfigError(
                f"max_images={self.max_images}: only max_queue={self.max_queue} images may wait; "
                "lower the first or raise the second"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

"""Configuration of a server, validated before it starts."""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core import machine
from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """Configuration of a server; see `zoo serve --help`.

    Attributes:
        host: Address to bind.
        port: Port; 0 for any free port.
        threads: Number of intra-op threads of a worker.
        workers: Number of inference processes.
        max_batch: Maximum dynamic batch size, in requests.
        queue: Maximum number of queued requests.
        deadline: Default request timeout, in seconds.
        read_timeout: Timeout for receiving a request, in seconds.
        grace: Graceful shutdown timeout, in seconds.
        max_body: Maximum request size, in bytes.
        api_keys: SHA-256 digests of the API keys; empty for no authentication.
        certfile: TLS certificate, PEM.
        keyfile: TLS private key, PEM.
        origins: Allowed CORS origins.
        access_log: Write an access log on stdout.
        watch: Reload models when int8.onnx in their folders changes.

    Raises:
        RequestError: A value is invalid.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    threads: int = 1
    workers: int = 1
    max_batch: int = 64
    queue: int = 256
    deadline: float = 30.0
    read_timeout: float = 20.0
    grace: float = 30.0
    max_body: int = 64 << 20
    api_keys: frozenset[bytes] = frozenset()  # SHA-256 of each
    certfile: Path | None = None
    keyfile: Path | None = None
    origins: frozenset[str] = frozenset()
    access_log: bool = False
    watch: bool = False

    def __post_init__(self) -> None:
        machine.require_threads(self.threads)
        for name, most in (("workers", 1024), ("max_batch", 65536), ("queue", 1 << 20), ("max_body", 1 << 34)):
            whole_number(name.replace("_", " "), getattr(self, name), most)
        if not 0 <= self.port < 1 << 16:
            raise RequestError(f"found the port {self.port}, wanted 1 to 65535, or 0 for any that is free")
        for name in ("deadline", "read_timeout", "grace"):
            if not 0 < getattr(self, name) <= 86_400:
                raise RequestError(f"found {name.replace('_', ' ')} {getattr(self, name)}, wanted seconds above 0")
        if (self.certfile is None) != (self.keyfile is None):
            raise RequestError("TLS needs both --certfile and --keyfile")
        if self.certfile is not None and self.keyfile is not None:
            _require_certificate(self.certfile, self.keyfile)

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        """Where the server is found."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * (self.certfile is not None)}://{host}:{self.port}"


def read_keys(path: str | Path) -> frozenset[bytes]:
    """SHA-256 digests of the keys in a file, one a line; empty lines and those that begin with # are none.

    Raises RequestError where the file cannot be read, or holds no key or one of less than 16 characters.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the keys in {path}: {getattr(error, 'strerror', None) or error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys or min(map(len, keys)) < 16:
        raise RequestError(f"{path} holds {len(keys)} keys; wanted at least one, of 16 characters or more, one a line")
    return frozenset(digest(key) for key in keys)


def digest(key: str) -> bytes:
    """What is kept and compared of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _require_certificate(certfile: Path, keyfile: Path) -> None:
    for path in (certfile, keyfile):
        if not path.is_file():
            raise RequestError(f"found no file {path}, wanted a certificate and its key in PEM")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise RequestError(
            f"{certfile} and {keyfile} are no certificate and its key in PEM, without a passphrase: {error}"
        ) from error


def names(models: Sequence[str], found: Sequence[str]) -> list[str]:
    """Returns the public names of models.

    Args:
        models: Models as given by the user.
        found: Their names.

    Raises:
        RequestError: Two models have the same name.
    """
    for name in found:
        if found.count(name) > 1:
            given = [model for model, each in zip(models, found, strict=True) if each == name]
            raise RequestError(f"{' and '.join(given)} are both named {name}; serve them by servers of their own")
    return list(found)

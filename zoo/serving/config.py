"""Configuration of a server, validated before it starts."""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.core import machine
from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError


@dataclass(frozen=True)
class ServerConfig:
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
        cors_origins: Allowed CORS origins.
        access_log: Write an access log on stdout.
        watch: Reload models when int8.onnx in their folders changes.
        deltas: Places of deltas by public name of the model, see `zoo.serving.deltas`.

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
    api_keys: frozenset[bytes] = frozenset()
    certfile: Path | None = None
    keyfile: Path | None = None
    cors_origins: frozenset[str] = frozenset()
    access_log: bool = False
    watch: bool = False
    deltas: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        machine.require_threads(self.threads)
        for name, most in (("workers", 1024), ("max_batch", 65536), ("queue", 1 << 20), ("max_body", 1 << 34)):
            whole_number(name.replace("_", " "), getattr(self, name), most)
        if not 0 <= self.port < 1 << 16:
            raise RequestError(f"found the port {self.port}, expected 1 to 65535, or 0 for any that is free")
        for name in ("deadline", "read_timeout", "grace"):
            if not 0 < getattr(self, name) <= 86_400:
                raise RequestError(f"found {name.replace('_', ' ')} {getattr(self, name)}, expected seconds above 0")
        if self.watch and self.deltas:
            raise RequestError("found --watch and --deltas, expected one of them")
        if self.access_log and (sys.stdout is None or sys.stdout.closed):
            raise RequestError("stdout is closed, expected a place for the access log; redirect it to a file")
        if (self.certfile is None) != (self.keyfile is None):
            raise RequestError("TLS needs both --certfile and --keyfile")
        if self.certfile is not None and self.keyfile is not None:
            _require_certificate(self.certfile, self.keyfile)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        """Base URL of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * (self.certfile is not None)}://{host}:{self.port}"


def read_api_keys(path: str | Path) -> frozenset[bytes]:
    """Reads a file of API keys.

    Args:
        path: Text file with one key per line, in printable ASCII; empty lines and lines that begin with # are skipped.

    Returns:
        SHA-256 digests of the keys.

    Raises:
        RequestError: The file cannot be read, has no key, or a key is shorter than 16 characters or has characters that
            HTTP headers cannot carry.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the keys in {path}: {getattr(error, 'strerror', None) or error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys or min(map(len, keys)) < 16:
        raise RequestError(f"{path} has {len(keys)} keys; expected lines of 16 or more characters")
    for key in keys:
        if not (key.isascii() and key.isprintable()):
            number = next(number for number, line in enumerate(lines, 1) if line.strip() == key)
            raise RequestError(f"line {number} of {path} has characters that no HTTP header carries; expected ASCII")
    return frozenset(key_digest(key) for key in keys)


def key_digest(key: str) -> bytes:
    """Returns the digest of an API key that the server stores and compares.

    Args:
        key: The key.

    Returns:
        SHA-256 digest, 32 bytes.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _require_certificate(certfile: Path, keyfile: Path) -> None:
    for path in (certfile, keyfile):
        if not path.is_file():
            raise RequestError(f"found no file {path}, expected a certificate and its key in PEM")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise RequestError(
            f"{certfile} and {keyfile} are no certificate and its key in PEM, without a passphrase: {error}"
        ) from error


def require_unique(names: Sequence[str], models: Sequence[str]) -> None:
    """Checks that all models of a server have different names.

    Args:
        names: Public names of the models.
        models: Models as given by the user, in the same order.

    Raises:
        RequestError: Two models have the same name.
    """
    for name in names:
        if names.count(name) > 1:
            same = [model for model, other in zip(models, names, strict=True) if other == name]
            raise RequestError(f"{' and '.join(same)} are both named {name}; serve them by servers of their own")

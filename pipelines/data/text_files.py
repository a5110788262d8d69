"""Text files and stdin, opened for bytes: plain or gzip by content, with one message for every fault."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.core.files import GZIP

STDIN = "-"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
TAR = slice(257, 262)  # of the first bytes of a tar archive: its mark, "ustar"
PACKED = 1 << 16  # compressed bytes read at once


class _Gunzip(io.RawIOBase):
    """The decompressed content of a gzip stream; half as slow as `gzip.GzipFile`."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.packed, self.member = stream, b"", zlib.decompressobj(zlib.MAX_WBITS | 16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer as far as one member goes. Raises EOFError for a member that is cut short."""
        while True:
            if self.member.eof:  # zero padding may follow, or another member
                tail = self.member.unused_data.lstrip(b"\0")
                while not tail:
                    if not (tail := self.stream.read1(PACKED)):
                        return 0
                    tail = tail.lstrip(b"\0")
                self.packed, self.member = tail, zlib.decompressobj(zlib.MAX_WBITS | 16)
            packed = self.packed or self.stream.read1(PACKED)
            data = self.member.decompress(packed, len(buffer))
            self.packed = self.member.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not packed and not self.member.eof:
                raise EOFError


class _Shared(io.RawIOBase):
    """A binary stream that stays open when its reader is closed."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """One read of the stream, at most."""
        data = self.stream.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_text(source: str | Path, name: str = "") -> Iterator[io.BufferedReader[Any]]:
    """Opens a text file, plain or gzip by its content, or stdin, for bytes.

    A read of a pipe returns as soon as the pipe holds bytes (`read1`), so that Ctrl-C is seen between two of them.

    Args:
        source: Path of the file, or "-" for stdin.
        name: Of the source in messages; default: `source`.

    Yields:
        The decompressed bytes: `readline`, iteration by lines, `read1`.

    Raises:
        RequestError: The file cannot be opened or read, its gzip data end early, it is a tar archive, or stdin is
            closed. Faults of reads within the block are included.
    """
    name = name or str(source)
    try:
        if str(source) == STDIN:
            if sys.stdin is None:
                raise RequestError("stdin is closed; name a file")
            raw: io.BufferedReader[Any] = io.BufferedReader(_Shared(sys.stdin.buffer))
        else:
            raw = Path(source).open("rb")  # noqa: SIM115 (closed below)
        with raw:
            file = io.BufferedReader(_Gunzip(raw), PACKED) if raw.peek(len(GZIP))[: len(GZIP)] == GZIP else raw
            if file.peek(TAR.stop)[TAR] == b"ustar":
                raise RequestError(f"found {name} to be a tar archive, expected text; extract it: tar -xf {name}")
            yield file
    except EOFError as error:
        raise RequestError(
            f"cannot read {name}: it is cut short (its gzip data end early); copy the whole file again"
        ) from error
    except (OSError, zlib.error) as error:
        raise RequestError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def open_decoded(source: str | Path | io.BytesIO) -> Generator[io.TextIOWrapper]:
    """Opens a text file in UTF-8, or bytes in memory, as text with its line ends and without a byte order mark.

    Args:
        source: As for `open_text`, or the bytes of a text.

    Yields:
        The text.

    Raises:
        RequestError: As `open_text`.
    """
    with nullcontext(io.BytesIO(source.getvalue())) if isinstance(source, io.BytesIO) else open_text(source) as file:
        yield io.TextIOWrapper(file, "utf-8-sig", newline="")


def not_utf8(name: str | Path, error: UnicodeDecodeError) -> str:
    """Returns the fault of a text that is not UTF-8, and the command that converts it.

    Args:
        name: Name of the file.
        error: Error of its first bytes.
    """
    if b"\0" in error.object and not error.object.startswith(UTF_16):
        return f"{name} has bytes of value 0, as binary files and UTF-16 without its mark have; expected text in UTF-8"
    if error.object.startswith(UTF_16) and b"\0" in error.object[:4]:
        problem, encoding = "UTF-16", "UTF-16"
    else:
        problem, encoding = f"not UTF-8 (byte 0x{error.object[error.start]:02x})", "WINDOWS-1252"
    return f"{name} is {problem}; expected UTF-8; convert it: iconv -f {encoding} -t UTF-8 {name} > NEW"


def read_lines(source: str | Path, errors: str = "strict") -> Generator[str | None, None, None]:
    """Reads the lines of a UTF-8 text file or of stdin. Only a line feed ends a line.

    Args:
        source: As for `open_text`.
        errors: How bytes that are not UTF-8 are decoded, see `bytes.decode`.

    Yields:
        Each line without its end and the first one without a byte order mark; None for a line that cannot be decoded.

    Raises:
        RequestError: As `open_text`; or the file is UTF-16.
    """
    with open_text(source) as file:
        if file.peek(2)[:2] in UTF_16 and b"\0" in file.peek(4):
            raise RequestError(f"{source} is UTF-16; expected UTF-8: iconv -f UTF-16 -t UTF-8 {source} > texts.txt")
        yield from decoded(file, errors)


def decoded(file: Iterable[bytes], errors: str = "strict") -> Iterator[str | None]:
    """Decodes lines of UTF-8, see `read_lines`.

    Args:
        file: Lines as bytes.
        errors: How bytes that are not UTF-8 are decoded, see `bytes.decode`.

    Returns:
        Iterator over the lines, as of `read_lines`.
    """
    for number, line in enumerate(file):
        try:
            yield line.rstrip(b"\r\n").decode("utf-8-sig" if number == 0 else "utf-8", errors)
        except UnicodeDecodeError:
            yield None

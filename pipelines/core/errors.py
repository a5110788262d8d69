"""The two kinds of failure of a command; `zoo.cli.app` turns them into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

OWN = ("zoo", "pipelines")  # packages of this project


class ZooError(Exception):
    """The work failed (exit code 1); the message is one line."""

    exit_code = 1


class RequestError(ZooError, ValueError):
    """The request was wrong (exit code 2); the message says what was found, what was expected and what to run."""

    exit_code = 2


def error_of_process(message: str, exit_code: int) -> ZooError:
    """Returns the error of another process.

    Args:
        message: Its message.
        exit_code: Its exit code.

    Returns:
        A RequestError for exit code 2, else a ZooError.
    """
    return (RequestError if exit_code == RequestError.exit_code else ZooError)(message)


def plain(text: str) -> str:
    """Escapes control characters, so that names in a file cannot control the terminal.

    Args:
        text: Text.

    Returns:
        The escaped text.
    """
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def one_line(error: BaseException) -> str:
    """Joins the message of an exception to one line.

    Args:
        error: Exception.
    """
    return " ".join(str(error).split()) or type(error).__name__


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a suggestion for a name that is not known, to be put before the list of the known ones.

    Args:
        name: The unknown name.
        names: The known names.

    Returns:
        "did you mean 'NAME'? ", or "" where none is near.
    """
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def require_options(owner: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """Checks that a model or family takes options.

    Args:
        owner: Name of the model or family, for the message.
        options: Names of the options.
        allowed: Names of the allowed options.

    Raises:
        RequestError: An option is not allowed; the message lists the allowed options.
    """
    allowed = sorted(allowed)
    if unknown := sorted(set(options) - set(allowed)):
        raise RequestError(f"{owner} has no option {', '.join(unknown)}, expected {', '.join(allowed) or 'none'}")


def not_installed(feature: str, library: str | None, package: str) -> RequestError:
    """Returns the error for a library that is not installed.

    Args:
        feature: Operation that needs the library.
        library: Name of the library, or several separated by commas.
        package: What pip installs, such as "int8-zoo[train]".
    """
    verb = "are" if "," in str(library) else "is"
    return RequestError(f"{feature} needs {library}, which {verb} not installed; run: pip install '{package}'")


@contextmanager
def requires(feature: str, package: str) -> Iterator[None]:
    """Context in which an import of a library that is not installed raises `not_installed`.

    Args:
        feature: Operation that needs the library.
        package: What pip installs, such as "int8-zoo[train]".

    Raises:
        RequestError: A module of a library is missing. A missing module of this project stays a ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OWN:
            raise
        raise not_installed(feature, error.name, package) from error


class Panic(RuntimeError):
    """A library written in Rust panicked."""


@contextmanager
def catch_panics(*, quiet: bool = False) -> Iterator[None]:
    """Context in which a panic of a library written in Rust is a `Panic`: pyo3 raises a BaseException.

    Args:
        quiet: Keep the report that Rust prints off stderr, for all threads of the process; what else is printed
            appears at the end of the context.

    Raises:
        Panic: A library panicked.
    """
    with ExitStack() as stack:
        held = stack.enter_context(_held_stderr()) if quiet else []
        try:
            yield
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":
                raise
            held.clear()
            raise Panic(one_line(error)) from error


@contextmanager
def _held_stderr() -> Iterator[list[int]]:
    """Context that buffers stderr; when it ends, the buffer is discarded if the yielded list is empty."""
    held = [2]
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (OSError, ValueError, AttributeError):  # stderr is closed
        yield held
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield held
        finally:
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            if held and (text := file.read()):
                os.write(2, text)

"""The two kinds of failure of a command; `zoo.cli.app` turns them into one line and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def one_line(error: Exception) -> str:
    """Joins the message of an exception to one line.

    Args:
        error: Exception.
    """
    return " ".join(str(error).split()) or type(error).__name__


def not_installed(what: str, library: str | None, package: str) -> RequestError:
    """Returns the error for a library that is not installed.

    Args:
        what: Operation that needs the library.
        library: Name of the library.
        package: What pip installs, such as "int8-zoo[train]".
    """
    return RequestError(f"{what} needs {library}, which is not installed; run: pip install '{package}'")


@contextmanager
def requires(what: str, package: str) -> Iterator[None]:
    """Context in which an import of a library that is not installed raises `not_installed`.

    Args:
        what: Operation that needs the library.
        package: What pip installs, such as "int8-zoo[train]".

    Raises:
        RequestError: A module of a library is missing. A missing module of this project stays a ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OWN:
            raise
        raise not_installed(what, error.name, package) from error

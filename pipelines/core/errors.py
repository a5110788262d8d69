"""The two kinds of failure of a command; `zoo.cli.app` turns them into one line and an exit code."""

from __future__ import annotations


class ZooError(Exception):
    """The work failed (exit code 1); the message is one line."""

    exit_code = 1


class RequestError(ZooError, ValueError):
    """The request was wrong (exit code 2); the message says what was found, what was expected and what to run."""

    exit_code = 2


def plain(text: str) -> str:
    """Escapes control characters, so that names in a file cannot control the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def one_line(error: Exception) -> str:
    """Joins the message of a library's exception to one line."""
    return " ".join(str(error).split()) or type(error).__name__

"""The two ways a verb can fail; `zoo.cli.app` turns them into one line and an exit code."""

from __future__ import annotations


class ZooError(Exception):
    """The work failed (exit code 1). The message is one line for a person."""

    exit_code = 1


class RequestError(ZooError, ValueError):
    """The request was wrong (exit code 2): says what was found, what was wanted and what to run."""

    exit_code = 2


def plain(text: str) -> str:
    """`text` with its control characters written out, so that names in a file cannot speak to the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def one_line(error: Exception) -> str:
    """All that an exception of a library says, joined to one line."""
    return " ".join(str(error).split()) or type(error).__name__

"""Repositories of the Hugging Face Hub: their ids, downloads by huggingface_hub, and errors of one line."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core import settings
from pipelines.core.errors import RequestError, ZooError, one_line, requires

PREFIX = "hf://"
PACKAGE = "int8-zoo[hub]"  # what pip installs for this module
ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_REVISION = re.compile(r"\w[\w./-]*")


@dataclass(frozen=True)
class Repository:
    """A repository of models.

    Attributes:
        id: ORG/NAME.
        revision: Branch, tag or commit; None for the main branch.

    Raises:
        RequestError: The id or the revision is invalid.
    """

    id: str
    revision: str | None = None

    def __post_init__(self) -> None:
        valid_revision = self.revision is None or _REVISION.fullmatch(self.revision)
        if not ID.fullmatch(self.id) or not valid_revision:
            raise RequestError(f"found {self}, expected {PREFIX}ORG/NAME or {PREFIX}ORG/NAME@REVISION")

    @classmethod
    def parse(cls, text: str) -> Repository:
        """Parses hf://ORG/NAME[@REVISION].

        Args:
            text: The address.

        Raises:
            RequestError: The text is no such address.
        """
        name, separator, revision = text.removeprefix(PREFIX).partition("@")
        return cls(name, revision if separator else None)

    @property
    def name(self) -> str:
        """Name without the organization."""
        return self.id.partition("/")[2]

    def __str__(self) -> str:
        return f"{PREFIX}{self.id}" + (f"@{self.revision}" if self.revision is not None else "")

    def snapshot(self, allow: Sequence[str] | None = None, ignore: Sequence[str] | None = None) -> Path:
        """Downloads files into the cache of huggingface_hub; ZOO_OFFLINE and HF_HUB_OFFLINE use the cache alone.

        Args:
            allow: Patterns of the files; None for all.
            ignore: Patterns of files to leave out.

        Returns:
            The folder of the snapshot, whose name is the commit. It must not be written to.

        Raises:
            RequestError: The repository or revision is not found or not open to the user, or not in the cache.
            ZooError: The network or the hub failed.
        """
        with requires(f"{self}", PACKAGE):
            import huggingface_hub
        with errors_of(self, "download"):
            return Path(
                huggingface_hub.snapshot_download(
                    self.id,
                    revision=self.revision,
                    allow_patterns=None if allow is None else list(allow),
                    ignore_patterns=None if ignore is None else list(ignore),
                    local_files_only=settings.offline(),
                )
            )


def is_address(model: object) -> bool:
    """Returns whether a model is given as hf://...

    Args:
        model: Name, path or address of a model.
    """
    return isinstance(model, str) and model.startswith(PREFIX)


@contextlib.contextmanager
def errors_of(repository: Repository, work: str) -> Iterator[None]:
    """Context in which errors of huggingface_hub become errors of one line, and its progress is for terminals alone.

    Args:
        repository: The repository.
        work: "download" or "upload".

    Raises:
        RequestError: The request was wrong: no such repository, no access, offline.
        ZooError: The network or the hub failed.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    quiet = not sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None
    if quiet:
        disable_progress_bars()
    try:
        yield
    except ZooError:
        raise
    except Exception as error:  # the HTTP client has several, the validation of names another one
        raise _one_line(repository, work, error) from error
    finally:
        if quiet:
            enable_progress_bars()


def _one_line(repository: Repository, work: str, error: Exception) -> ZooError:
    """Returns the error for an exception of huggingface_hub."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError | RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the failed request
    place, log_in = constants.ENDPOINT, "set HF_TOKEN, or run: hf auth login"
    match error:
        case errors.GatedRepoError():
            return RequestError(
                f"{repository} is gated; accept its terms at {place}/{repository.id} and log in: {log_in}"
            )
        case errors.RepositoryNotFoundError():
            create = " (zoo push --create makes a new one)" if work == "upload" else ""
            return RequestError(
                f"found no repository {repository.id} at {place}{create}, or it is private; log in: {log_in}"
            )
        case errors.RevisionNotFoundError():
            return RequestError(f"found no revision {repository.revision or 'main'} of {repository.id} at {place}")
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return RequestError(
                f"cannot {work} {repository}: ZOO_OFFLINE or HF_HUB_OFFLINE forbids the network, and the cache of "
                "huggingface_hub lacks its files; run it again without the variable"
            )
        case errors.HfHubHTTPError():
            status = error.response.status_code
            if status in (401, 403):
                return RequestError(f"cannot {work} {repository}: {place} answered {status}; check the token: {log_in}")
            if status == 429:
                return ZooError(
                    f"cannot {work} {repository}: {place} answered 429, its rate limit; run it again later, or with a "
                    f"token: {log_in}"
                )
            return ZooError(f"cannot {work} {repository}: {place} answered {status}; run it again to resume")
        case errors.HFValidationError():
            return RequestError(f"found {repository}, expected the name of a repository: {one_line(error)}")
    return ZooError(f"cannot {work} {repository} at {place}: {one_line(error)}")

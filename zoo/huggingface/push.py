"""Upload of a model folder to the Hugging Face Hub, in one commit."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.core import settings
from pipelines.core.errors import RequestError, requires
from pipelines.core.files import link_or_copy, mapped, write_json, write_text
from pipelines.models.folder import SOURCE, ModelFolder
from pipelines.models.hub import CARD
from pipelines.models.record import NATIVE, QUANTIZATION, RANGES, RECORD, SAMPLES, SCALES, STAGES, TRAINED
from zoo.huggingface import signing
from zoo.huggingface.model_card import REPORTS, model_card
from zoo.huggingface.repository import PACKAGE, Repository, errors_of

README = "README.md"
LEFT_OUT = ("checkpoint", "*.found*")  # of an interrupted training; replaced files
# files of an earlier push, which are deleted on the hub if the folder lacks them
REPLACED = (
    *STAGES,
    mapped(Path(NATIVE)).name,
    QUANTIZATION,
    RANGES,
    RECORD,
    SAMPLES,
    SCALES,
    TRAINED,
    signing.SIGNATURE,
)


def push(
    folder: ModelFolder,
    repository: Repository,
    reports: Path,
    *,
    private: bool = False,
    create: bool = False,
    private_key: Path | None = None,
) -> dict[str, Any]:
    """Uploads a built model folder with its model card.

    Args:
        folder: Model folder with int8.onnx.
        repository: Repository, with a revision for another branch than main.
        reports: Folder of the model's report files; it may be missing.
        private: Make a new repository private.
        create: Make the repository if there is none.
        private_key: Key that signs the files, or None.

    Returns:
        {"model", "repository", "url", "commit", "files": {name: bytes}}.

    Raises:
        RequestError: There is no such repository, or no access to it.
        ZooError: The network or the hub failed.
    """
    if settings.offline():
        raise RequestError("zoo push needs the network, which ZOO_OFFLINE forbids; run it without ZOO_OFFLINE")
    with requires("zoo push", PACKAGE):
        import huggingface_hub
    cache = settings.home()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".push-", dir=cache) as scratch:
        staging = Path(scratch) / folder.card.name
        stage(folder, repository, reports, staging)
        if private_key is not None:
            signing.sign(staging, private_key)
        names = {str(path.relative_to(staging)): path.stat().st_size for path in _files(staging)}
        api = huggingface_hub.HfApi(library_name="int8-zoo")
        with errors_of(repository, "upload"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*commit a data file")  # id_counts.parquet belongs to the model
            if create:
                api.create_repo(repository.id, private=private, exist_ok=True)
            committed = api.upload_folder(
                repo_id=repository.id,
                folder_path=staging,
                revision=repository.revision,
                commit_message=f"zoo push {folder.card.name}",
                delete_patterns=[name for name in REPLACED if name not in names],
            )
    return {
        "model": folder.card.name,
        "repository": str(repository),
        "url": f"{api.endpoint}/{repository.id}",
        "commit": committed.oid,
        "files": names,
    }


def stage(folder: ModelFolder, repository: Repository, reports: Path, target: Path) -> None:
    """Writes the files of a repository: those of the folder, its reports, and README.md unless the folder has one.

    Args:
        folder: Model folder with int8.onnx.
        repository: Repository, which the model card names.
        reports: Folder of report files; it may be missing.
        target: New folder.
    """
    sources = {path.relative_to(folder.path): path for path in _files(folder.path)}
    sources |= {Path(REPORTS) / path.name: path for path in sorted(reports.glob("*.json"))}
    for name, source in sources.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source, target / name)
    if SOURCE in folder.card.details:  # its weights are among the files
        details = {key: value for key, value in folder.card.details.items() if key != SOURCE}
        write_json(target / CARD, replace(folder.card, details=details).to_json())
    if Path(README) not in sources:
        write_text(target / README, model_card(folder, repository, reports))


def _files(folder: Path) -> list[Path]:
    """Returns the files of a folder, without hidden ones and those of an interrupted training; the card comes last."""
    paths = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in parts.parts)
        left_out = any(Path(part).match(pattern) for part in parts.parts for pattern in LEFT_OUT)
        if path.is_file() and not hidden and not left_out:
            paths.append(path)
    return sorted(paths, key=lambda path: path.name == CARD)

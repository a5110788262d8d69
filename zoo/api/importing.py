"""Command that imports a model of another toolkit: import."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import settings
from pipelines.core.errors import RequestError, ZooError, one_line, require_options
from pipelines.core.files import link_or_copy, locked, require_free, require_place, umask
from pipelines.models.family import Family, Importable, Importer
from pipelines.models.folder import SOURCE, ModelFolder
from pipelines.models.hub import CARD
from pipelines.models.protocols import ShipsSamples
from pipelines.models.record import QUANTIZATION, RANGES, SAMPLES, SCALES, STAGES, TRAINED
from zoo.api.models import build
from zoo.api.paths import Model, output_path
from zoo.api.training_settings import write_card
from zoo.huggingface.repository import ID, Repository, is_address

logger = logging.getLogger(__name__)

POINTER = b"version https://git-lfs.github.com/spec/"  # beginning of a file that Git LFS has not fetched
REPOSITORY_FILES = ("README.md", ".git*")  # of a repository, not of its model


def import_model(
    source: Model,
    output: Model | None,
    *,
    format: str | None = None,
    int8: bool = False,
    force: bool = False,
    keep_float: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Imports a model of another toolkit as a model folder with its frozen graph, fp32.onnx.

    All problems of the model are reported together, before anything is written. No code of the model is executed.
    Texts that ship calibrate text encoders and translation models. With `int8` the float weights are
    removed after the build, and rebuilt from `source` on demand (`restore`).

    Args:
        source: A folder, a file, or a hub id ORG/NAME or hf://ORG/NAME[@REVISION], which is downloaded.
        output: Folder of the new model.
        format: Format of `source`; None to detect it.
        int8: Also build int8.onnx, of families that need no calibration data (`ShipsSamples`).
        keep_float: Keep the float weights beside int8.onnx.
        force: Replace the model in `output` and all files that were built from it.
        **options: Options of the family's importer (`Importer.options`), e.g. `target_language`.

    Returns:
        {"model", "path", "family", "format", "parameters"} and the details of the importer; with `int8` also
        "quality", see `ShipsSamples.judged`.

    Raises:
        RequestError: The format or an option is unknown, the model is not supported, or the folder is in use.
    """
    target = output_path(output, "an imported model")
    importers = [(entry, entry.importer()) for entry in zoo.entries().values() if isinstance(entry, Importable)]
    formats = {name: what for _, importer in importers for name, what in importer.formats.items()}
    if format is not None and format not in formats:
        raise RequestError(f"unknown format {format!r}; choose one of {', '.join(formats)}")
    require_place(target / CARD)
    if not (force and (target / CARD).is_file()):
        require_free(target, "choose another, or replace a model there with --force")
    path = _found(str(source), [pattern for _, importer in importers for pattern in importer.patterns])
    _require_regular(path)
    with _understood(path):
        chosen = {name: value for name, value in options.items() if value}
        suitable = [candidate for candidate in importers if format or chosen.keys() <= set(candidate[1].options)]
        # the error below names their options
        others = [candidate for candidate in importers if candidate not in suitable]
        entry, importer, recognized = _recognized(path, format, [*suitable, *others])
        if suitable and (entry, importer) in others and not importer.supports(path):  # no family has the architecture
            entry, importer = suitable[0]
            recognized = next(iter(importer.formats))
    require_options(entry.name, chosen, importer.options)
    if path.is_dir() and target.resolve() == path.resolve():
        raise RequestError(f"found {target} as the folder of both models; choose another output")
    with _staged(target) as folder_path:
        with _understood(path):
            details, files = importer.write(path, folder_path, format=recognized, **chosen)
        origin, address = Path(source).name, str(path.resolve())
        if path != Path(source):  # downloaded; the folder of a snapshot is its commit
            origin = Repository.parse(str(source)).id
            address = str(Repository(origin, path.name))
            details = {**details, "base_model": {"repository": origin, "commit": path.name}}
        if not keep_float:
            of_weights = {name: value for name, value in chosen.items() if name not in importer.runtime_options}
            of_weights |= {
                name: _found_anywhere(of_weights[name]) for name in importer.path_options if name in of_weights
            }
            details = {**details, SOURCE: {"model": address, "format": recognized, "options": of_weights}}
        description = f"{entry.title}; imported from {origin}"
        write_card(folder_path, entry.name, description, details, files, name=target.resolve().name)
        folder = zoo.load(folder_path)
        folder.ensure("fp32.onnx")
        parameters = folder.record["fp32.onnx"]["parameters"]
    built = build(target) if int8 and isinstance(folder.entry, ShipsSamples) else {}
    return {
        "model": folder.card.name,
        "path": str(target),
        "family": entry.name,
        "format": recognized,
        "parameters": parameters,
        **{key: detail for key, detail in details.items() if key not in ("preprocessing", SOURCE)},
        **{key: figure for key, figure in built.items() if key == "quality"},
    }


def _found_anywhere(value: Any) -> Any:
    """Returns the absolute path of a file, or another value as it is."""
    return str(Path(value).resolve()) if isinstance(value, str) and Path(value).is_file() else value


def restore(folder: ModelFolder, name: str) -> None:
    """Rebuilds a file of an imported folder from the model that was imported, which the card names.

    Args:
        folder: Model folder, see `import_model`.
        name: Name of the file, which the card lists.

    Raises:
        RequestError: The source of the import is missing or has changed, or the folder is not writable.
    """
    card, importer = folder.card, folder.entry.importer()  # type: ignore[attr-defined]
    made_of, listed = folder.source, card.file(name)
    assert listed is not None
    source, options = str(made_of["model"]), dict(made_of.get("options", {}))
    again = f"zoo import MODEL -o {folder.path} --force (with --keep-float to keep the weights there)"
    try:
        path = _found(source, importer.patterns)
    except RequestError as error:
        why = "is gone" if Path(source).is_absolute() else f"cannot be read ({one_line(error)})"
        raise RequestError(
            f"{folder.path} has only int8, and its float weights are rebuilt from {source}, which {why}; put it back, "
            f"or run: {again}"
        ) from error
    logger.warning("%s has only int8: rebuilding %s from %s", card.name, name, source)
    try:
        with tempfile.TemporaryDirectory(prefix=".restored-", dir=folder.path) as scratch:
            with _understood(path):
                importer.write(path, Path(scratch) / card.name, format=made_of["format"], **options)
            made = Path(scratch) / card.name / name
            if not made.is_file() or (fault := listed.fault(made)):
                fault = "no such file" if not made.is_file() else fault
                raise RequestError(
                    f"{source} is not the model that {folder.path} was imported from ({name}: {fault}); put that model "
                    f"back, or run: {again}"
                )
            made.replace(folder.path / name)
    except OSError as error:
        raise RequestError(
            f"cannot write {folder.path}: {error.strerror or error}; copy the model to a folder you may write"
        ) from error


def _require_regular(path: Path) -> None:
    """Raises RequestError if a folder has a FIFO, socket or device, from which reading may never end."""
    for file in (path, *path.glob("*"), *path.glob("*/*")):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise RequestError(f"found {file}, which is no regular file; expected the files of a model")


def _is_pointer(file: Path) -> bool:
    """Returns whether a file is one of Git LFS that was not fetched."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(POINTER)) == POINTER


@contextlib.contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Context that reports unreadable files and unexpected values of a model as an error of one line."""
    try:
        yield
    except ZooError as error:
        named = (file for file in (*path.glob("*"), *path.glob("*/*")) if file.name in str(error))
        if pointer := next(filter(_is_pointer, named), None):
            message = f"found {pointer}, a pointer of Git LFS without its content; run: git lfs pull"
            raise RequestError(message) from error
        raise
    except OSError as error:
        file = Path(str(error.filename or ""))
        if path not in (file, *file.parents):  # of the folder that is written
            raise
        raise RequestError(f"cannot import {path}: cannot read {file} ({error.strerror or error})") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise RequestError(
            f"cannot import {path}: its files are not as the toolkit writes them ({type(error).__name__}: "
            f"{one_line(error)})"
        ) from error


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Context with a hidden folder whose files move to `target` on success; on failure nothing is left of them."""
    before = next(parent for parent in target.absolute().parents if parent.is_dir())
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
    try:
        staging.chmod(0o777 & ~umask())
        yield staging
        target.mkdir(exist_ok=True)
        for name in (*STAGES, QUANTIZATION, SAMPLES, TRAINED, RANGES, SCALES):  # of the model that was there
            (target / name).unlink(missing_ok=True)
        for file in sorted(staging.iterdir(), key=lambda path: path.name == CARD):  # the card last
            if file.is_dir():
                shutil.copytree(file, target / file.name, dirs_exist_ok=True)
            else:
                file.replace(target / file.name)
    except Exception as error:  # messages name the folder that was asked for
        error.args = tuple(str(argument).replace(str(staging), str(target)) for argument in error.args)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        parent = target.absolute().parent
        while parent != before and not any(parent.iterdir()):  # made here, for nothing
            parent.rmdir()
            parent = parent.parent


_OPTIMUM = "ONNX files exported by optimum in {path}; import the original of transformers"
_BARE = "weights without their configuration in {path}; expected the whole folder of transformers, with config.json"
# Formats of other toolkits: (patterns of files of which a folder has all, or that the file matches; what to say)
OTHER_FORMATS = (
    (
        ("*.argosmodel",),
        "{path}, a package of Argos Translate, which is a zip archive; unpack it, copy its sentencepiece.model (or "
        "bpe.model) into its folder model, and import that folder of CTranslate2",
    ),
    (
        ("metadata.json", "model/model.bin"),
        "an unpacked package of Argos Translate in {path}; copy its sentencepiece.model (or bpe.model) into "
        "{path}/model, and import that folder of CTranslate2",
    ),
    (("*.gguf",), "a GGUF model of llama.cpp in {path}, which is not supported; import the original of transformers"),
    (
        ("adapter_config.json",),
        "an adapter of PEFT in {path}, which is not a whole model; merge it into its base model with "
        "merge_and_unload() and save_pretrained(), and import that folder",
    ),
    (
        ("gliner_config.json",),
        "a model of GLiNER in {path}, which is not supported; import a tagger of transformers "
        "(...ForTokenClassification), or train one with zoo train token-classification",
    ),
    (
        ("dict.*.txt",),
        "a model of fairseq in {path}, which is not supported; convert it with ct2-fairseq-converter "
        "--model_path MODEL.pt --data_dir {path} --output_dir FOLDER, and import that folder of CTranslate2",
    ),
    (
        ("ckpt-*.index",),
        "a checkpoint of TensorFlow in {path}, which is not supported; convert a model of OpenNMT-tf with "
        "ct2-opennmt-tf-converter --config CONFIG.yml --model_type TYPE --output_dir FOLDER, and import that folder "
        "of CTranslate2",
    ),
    (
        ("*.pt",),
        "a checkpoint of PyTorch in {path}, which is not supported; convert a model of OpenNMT-py with "
        "ct2-opennmt-py-converter --model_path MODEL.pt --output_dir FOLDER, one of fairseq with "
        "ct2-fairseq-converter, and import that folder of CTranslate2",
    ),
    (("*.nemo",), "a model of NeMo in {path}, which is not supported; import a folder of transformers"),
    (("*encoder_model*.onnx",), _OPTIMUM),
    (("onnx/*encoder_model*.onnx",), _OPTIMUM),
    (
        ("*.onnx",),
        "an ONNX model in {path}, which needs no import; quantize it with zoo quantize FILE.onnx, or import the "
        "original of transformers",
    ),
    (("saved_model.pb",), "a SavedModel of TensorFlow in {path}, which is not supported; export it to ONNX"),
    (("*.tflite",), "a model of TensorFlow Lite in {path}, which is not supported; export the original to ONNX"),
    (("*.keras",), "a model of Keras in {path}, which is not supported; export it to ONNX"),
    (("*.h5",), "weights of Keras in {path}, which are not supported; export the model to ONNX"),
    (("*.safetensors",), _BARE),
    (("pytorch_model*.bin",), _BARE),
)


def _holds(path: Path, patterns: Sequence[str]) -> bool:
    """Returns whether a folder has a file of every pattern, or a file matches one."""
    if path.is_dir():
        return all(any(path.glob(pattern)) for pattern in patterns)
    return any(path.match(pattern) for pattern in patterns)


def _recognized(
    path: Path, format: str | None, importers: Sequence[tuple[Any, Importer]]
) -> tuple[Family, Importer, str]:
    """Returns the family, importer and format of a model; raises RequestError if no importer recognizes it."""
    for entry, importer in importers:
        recognized = format if format in importer.formats else "" if format else importer.recognize(path)
        if recognized:
            return entry, importer, recognized
    if (path / CARD).is_file():
        raise RequestError(f"{path} is a model folder already; run: zoo build {path}, or name it in any command")
    if other := next((text for patterns, text in OTHER_FORMATS if _holds(path, patterns)), ""):
        raise RequestError(f"found {other.format(path=path)}")
    formats = [name for _, importer in importers for name in importer.formats]
    raise RequestError(
        f"found no model in {path} ({_contents(path)}); expected one of: {', '.join(formats)} (folders of "
        "transformers, sentence-transformers and CTranslate2 with their config.json, or files of Marian)"
    )


def _contents(path: Path) -> str:
    """Describes a path for a message: a file, or the first names in a folder."""
    if not path.is_dir():
        return "a file"
    names = sorted(file.name for file in path.iterdir())
    return f"no config.json beside {', '.join(names[:5])}{' ...' * (len(names) > 5)}" if names else "an empty folder"


def _found(source: str, patterns: list[str]) -> Path:
    """Returns the local path of a source; a repository of the hub is downloaded.

    Args:
        source: Path, hub id ORG/NAME, or hf://ORG/NAME[@REVISION].
        patterns: Patterns of the files to download.

    Raises:
        RequestError: There is no such path or repository.
        ZooError: The download failed.
    """
    if is_address(source):
        return Repository.parse(source).snapshot(patterns)
    path = Path(source)
    if path.exists():
        return path
    if not ID.fullmatch(source):
        raise RequestError(f"found no {source}; expected a folder, a file, or the hub id ORG/NAME of a model")
    try:
        return Repository(source).snapshot(patterns)
    except ZooError as error:
        raise type(error)(f"found no folder {source}; {error}") from error


def hub_folder(model: str) -> Path:
    """Returns the cached folder of a model of the Hugging Face Hub, which is copied or imported at first use.

    Args:
        model: hf://ORG/NAME[@REVISION]: a repository that `zoo push` wrote, or one that an importer reads.

    Returns:
        A folder for each commit.

    Raises:
        RequestError: There is no such repository, or no importer reads its model.
        ZooError: The download failed.
    """
    asked = Repository.parse(model)
    listed = asked.snapshot([CARD, ".gitattributes"])  # a pattern that matches no file would be a warning
    pinned = Repository(asked.id, listed.name)
    place = settings.home() / "hub" / asked.id.replace("/", "--") / listed.name[:12] / asked.name
    if (place / CARD).is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent / ".lock", f"another process fetches {asked}"):
        if (place / CARD).is_file():
            return place
        if not (listed / CARD).is_file():
            logger.warning("%s is no model of zoo push; importing it into %s", asked, place)
            import_model(str(pinned), place)
            return place
        source = pinned.snapshot(ignore=REPOSITORY_FILES)
        with _staged(place) as staging:
            shutil.copytree(source, staging, copy_function=link_or_copy, dirs_exist_ok=True)
    return place

"""Model folders: files by name, the card, the recipe, and build.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core import files
from pipelines.core.derived import derived as derived_file
from pipelines.core.errors import RequestError
from pipelines.models import unlisted
from pipelines.models.family import Family
from pipelines.models.hub import CARD, Card, require_plain
from pipelines.models.record import (
    RANGES,
    STAGES,
    TRAINED,
    read_record,
    recipe_of,
)
from pipelines.quantization.recipe import QuantRecipe

if TYPE_CHECKING:  # imported in the stages: running a finished model does not need them and saves 60 MB
    import onnx_ir as ir

    from pipelines.quantization.calibration.table import CalibrationTable


SOURCE = "source"  # key of a card: the model of another toolkit that the weights are made of again, if they are missing


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model's files.

    Attributes:
        path: The folder.
        card: Its card.
        entry: The family that runs it.
        fetch: Fetches a missing file of the card: that of a pretrained model is downloaded, that of an imported one is
            made of `SOURCE`.
    """

    path: Path
    card: Card
    entry: Family
    fetch: Callable[[str], object] | None = field(default=None, compare=False)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Preprocessing that the card binds to the weights."""
        return dict(self.card.details.get("preprocessing", {}))

    @property
    def weights(self) -> str:
        """File that freeze starts from: the card's published weights, else the family's checkpoint."""
        published = self.card.details.get("weights")
        if not isinstance(published, dict) or "file" not in published:
            own, former = self.entry.checkpoint, self.entry.former_checkpoint
            return former if former and not (self.path / own).is_file() and (self.path / former).is_file() else own
        require_plain(f"{self.path / CARD}: the weights' file", published["file"])
        return str(published["file"])

    @property
    def imported(self) -> bool:
        """Whether the graph comes from elsewhere, see `pipelines.models.family.OnnxImportable`."""
        return "structure" in self.card.details

    @property
    def source(self) -> dict[str, Any]:
        """The model that this one was imported from, as `zoo import` wrote it to the card; {} for none."""
        named = self.card.details.get(SOURCE)
        return named if isinstance(named, dict) and {"model", "format"} <= named.keys() else {}

    @property
    def restorable(self) -> bool:
        """Whether the weights can be rebuilt from the source of the import."""
        return bool(self.source) and self.fetch is not None and self.is_listed(self.weights)

    @property
    def has_float(self) -> bool:
        """Whether the folder has the float model, or can build it without training code, as an imported model can."""
        return self.imported or (self.path / "rewritten.onnx").is_file()

    def is_listed(self, name: str) -> bool:
        """Returns whether the card lists a file, which then ships with the model instead of being built.

        Args:
            name: Name of the file.
        """
        return self.card.file(name) is not None

    def verify(self, name: str) -> Path:
        """Checks a file of this folder, which is fetched if it is missing and the card lists it.

        Args:
            name: Name of the file.

        Returns:
            Path of the file.

        Raises:
            RequestError: The file is missing, or differs from the one that the card lists.
        """
        path, listed = self.path / name, self.card.file(name)
        if self.fetch and listed and not path.is_file():
            self.fetch(name)
        if not path.is_file():
            raise RequestError(f"{self.path} holds no {name}; train or download the model again")
        if listed and (fault := listed.fault(path)):
            raise RequestError(
                f"{path} is not the file that its card lists ({fault}); download or copy the model again"
            )
        return path

    def ensure(self, name: str) -> Path:
        """Verifies a file of this folder if the card lists it, or builds it if it is missing or stale.

        Args:
            name: Name of the file.

        Returns:
            Path of the file.

        Raises:
            RequestError: See `verify` and `pipelines.models.stages.build`.
        """
        if name == unlisted.INT8 and unlisted.is_replaced(self, name):
            unlisted.use_replaced(self, name)
        elif name in STAGES and not self.is_listed(name):
            from pipelines.models.stages import build  # not needed to read a folder

            build(self, until=name)
        return self.verify(name)

    @property
    def trained(self) -> CalibrationTable | None:
        """Ranges of quantization-aware training, or None.

        Raises:
            RequestError: The file is invalid.
        """
        path = self.path / TRAINED
        if not path.is_file():
            return None
        from pipelines.quantization.calibration.table import CalibrationTable  # onnx: finished models do not need it

        return CalibrationTable.load(path)

    def with_given_ranges(self, table: CalibrationTable) -> CalibrationTable:
        """Replaces observed ranges by those that came with the model (`RANGES`).

        Args:
            table: Calibration table.

        Returns:
            The table with the given ranges.
        """
        if not (self.path / RANGES).is_file():
            return table
        tensors = dict(table.tensors)
        for name, magnitude in files.read_json(self.path / RANGES).items():
            if (observed := tensors.get(name)) is not None:
                low = -magnitude if observed.minimum < 0 else 0.0
                tensors[name] = replace(observed, low=low, high=magnitude, method="given")
        return replace(table, tensors=tensors)

    @property
    def record(self) -> dict[str, Any]:
        """Content of build.json, see `read_record`."""
        return read_record(self.path)

    @property
    def own_recipe(self) -> QuantRecipe:
        """Recipe that the model comes with: its card's, else the family's."""
        return recipe_of(self.card.details.get("recipe")) or self.entry.recipe

    @property
    def recipe(self) -> QuantRecipe:
        """Recipe of int8.onnx: the last one used or trained for, else the model's own.

        Its observer is that of calibration.json.
        """
        record, trained = self.record, self.trained
        recipe = (
            recipe_of(record.get("int8.onnx", {}).get("recipe"))
            or (trained and recipe_of(trained.recipe))
            or self.own_recipe
        )
        return replace(recipe, observer=record.get("calibration.json", {}).get("observer", recipe.observer))


def open_folder(
    path: str | Path, entries: Callable[[str], Family], fetch: Callable[[str], object] | None = None
) -> ModelFolder:
    """Opens a model folder.

    Args:
        path: The folder.
        entries: Returns the family of a name.
        fetch: Fetches a missing file of the card.

    Returns:
        The folder.

    Raises:
        RequestError: The folder has no valid card, the family is unknown, or a training was interrupted there.
    """
    path = Path(path)
    if not (path / CARD).is_file():
        if (path / "checkpoint").is_dir():
            raise RequestError(
                f"{path} holds an interrupted training; resume it with: zoo train ... -o {path} --resume"
            )
        theirs = (path / "config.json").is_file()  # of transformers, sentence-transformers or CTranslate2
        made = f"make one of it with: zoo import {path} -o NEW" if theirs else "make one with: zoo train"
        raise RequestError(f"{path} is no model folder (it has no {CARD}); {made}, or zoo download NAME")
    card = Card.read(path / CARD)
    if not isinstance(preprocessing := card.details.get("preprocessing", {}), dict):
        raise RequestError(
            f"{path / CARD}: preprocessing is {preprocessing!r}; expected an object; train or download the model again"
        )
    return ModelFolder(path, card, entries(card.entry).for_model(preprocessing), fetch)


def derived(
    folder: ModelFolder,
    source: str,
    kind: str,
    form: int | str,
    make: Callable[[Path, Path], object],
    suffix: str = ".onnx",
) -> Path:
    """Returns the path of a file derived from a file of the folder, see `pipelines.core.derived`.

    It is written to the folder, or to the cache if the folder is not writable.

    Args:
        folder: Model folder.
        source: Name of the source file.
        kind: Kind of the derived file, part of its name.
        form: Version of `make`.
        make: Writes the result; takes the paths of source and result.
        suffix: Suffix of the derived file.
    """
    return derived_file(folder.ensure(source), [folder.path], kind, form, make, suffix)


def derived_graph(
    folder: ModelFolder, source: str, kind: str, form: int | str, make: Callable[[ir.Model], ir.Model]
) -> Path:
    """Returns the path of a graph derived from one of the folder, with weights in .onnx.data, which engines map.

    onnxruntime keeps a second copy of weights in the graph's own file.

    Args:
        folder: Model folder.
        source: Name of the source file.
        kind: Kind of the derived graph, part of its name.
        form: Version of `make`.
        make: Converts the model.
    """

    def write(origin: Path, path: Path) -> None:
        from pipelines.graph import io

        io.save_mapped(make(io.load(origin)), path, io.PAGE)

    return derived(folder, source, kind, form, write)

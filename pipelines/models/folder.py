"""A folder with a model: the files in it by name, its card, its recipe, and what build.json tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.models.entry import Entry
from pipelines.models.hub import CARD, Card, require_plain
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe

if TYPE_CHECKING:  # imported where a stage is made: who runs a finished model needs none of it, and keeps 60 MB
    from pipelines.quantization.calibration.table import CalibrationTable

ROAD = ("fp32.onnx", "rewritten.onnx", "calibration.json", "int8.onnx")
NATIVE = "native.onnx"
STAGES = (*ROAD, NATIVE)
HALF = "fp16.onnx"  # the weights of a shipped model, see graph.compress_fp16
SAMPLES = "calibration.npz"
# ranges of quantization-aware training: a table of no graph yet, with the recipe that they were trained for
TRAINED = "qat.json"
# {tensor: greatest magnitude} of tensors whose ranges came with the model, whatever samples say; of no tensor but those
RANGES = "ranges.json"
RECORD = "build.json"
QUANTIZATION = "quantization.json"


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model's files, its card, the entry that knows what to do with them, and, of a pretrained model,
    what brings a file of its card that is not there yet.
    """

    path: Path
    card: Card
    entry: Entry
    fetch: Callable[[str], object] | None = field(default=None, compare=False)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What the card binds to the weights."""
        return dict(self.card.details.get("preprocessing", {}))

    @property
    def weights(self) -> str:
        """The file that freeze starts from: the one the card names for published weights, else the entry's
        checkpoint.
        """
        published = self.card.details.get("weights")
        if not isinstance(published, dict) or "file" not in published:
            own, former = self.entry.checkpoint, self.entry.former_checkpoint
            return former if former and not (self.path / own).is_file() and (self.path / former).is_file() else own
        require_plain(f"{self.path / CARD}: the weights' file", published["file"])
        return str(published["file"])

    def given(self, name: str) -> bool:
        """Whether the file came with the card, rather than being built here."""
        return any(each.name == name for each in self.card.files)

    def verify(self, name: str) -> Path:
        """The path of a file of this folder. Raises RequestError where it is missing, or not the one that the card
        lists.
        """
        path = self.path / name
        if not path.is_file():
            raise RequestError(f"{self.path} holds no {name}; train or download the model again")
        for each in self.card.files:
            if each.name == name and (fault := each.fault(path)):
                raise RequestError(
                    f"{path} is not the file that its card lists ({fault}); download or copy the model again"
                )
        return path

    def ensure(self, name: str) -> Path:
        """The path of a file of this folder: verified where the card lists it, made by its stage where it is missing or
        stale.
        """
        if name in STAGES and not self.given(name):
            from pipelines.models.stages import build  # who only reads a folder builds nothing

            build(self, until=name)
        return self.verify(name)

    @property
    def trained(self) -> CalibrationTable | None:
        """The ranges that quantization-aware training left. Raises RequestError where the file is broken."""
        path = self.path / TRAINED
        if not path.is_file():
            return None
        from pipelines.quantization.calibration.table import CalibrationTable  # onnx: finished models do not need it

        return CalibrationTable.load(path)

    @property
    def record(self) -> dict[str, Any]:
        """What `read_record` finds in build.json."""
        return read_record(self.path)

    @property
    def own_recipe(self) -> QuantRecipe:
        """The recipe that the model comes with: its card's, else the entry's."""
        return recipe_of(self.card.details.get("recipe")) or self.entry.recipe

    @property
    def recipe(self) -> QuantRecipe:
        """The recipe int8.onnx is made by: the one last used here, or trained for, else the model's own; its observer
        is calibration.json's.
        """
        record, trained = self.record, self.trained
        recipe = (
            recipe_of(record.get("int8.onnx", {}).get("recipe"))
            or (trained and recipe_of(trained.recipe))
            or self.own_recipe
        )
        return replace(recipe, observer=record.get("calibration.json", {}).get("observer", recipe.observer))


def read_record(folder: Path) -> dict[str, Any]:
    """build.json of a folder without what is not as `note` writes it, so that it is made anew; {} where nothing was
    built yet.
    """
    try:
        record = files.read_json(folder / RECORD)
    except RequestError:
        return {}
    return (
        {stage: record[stage] for stage in STAGES if stage in record and _sound(stage, record[stage])}
        if isinstance(record, dict)
        else {}
    )


def _sound(stage: str, said: Any) -> bool:
    """Whether this is what `note` writes of a stage."""
    if not isinstance(said, dict) or not isinstance(said.get("inputs"), dict):
        return False
    identities = said.get("files", {})  # as `files.identity` gives them; none where an older version built
    if not isinstance(identities, dict) or not all(
        isinstance(each, dict) and {"bytes", "modified", "sha256"} <= each.keys() for each in identities.values()
    ):
        return False
    return {
        "calibration.json": said.get("observer") in OBSERVERS,
        "int8.onnx": recipe_of(said.get("recipe")) is not None,
    }.get(stage, True)


def recipe_of(kept: Any) -> QuantRecipe | None:
    """The recipe that `QuantRecipe.to_json` wrote; None for anything else."""
    try:
        return QuantRecipe(**kept)
    except (KeyError, TypeError, ValueError):
        return None


def open_folder(
    path: str | Path, entries: Callable[[str], Entry], fetch: Callable[[str], object] | None = None
) -> ModelFolder:
    """Open a model folder. Raises RequestError where it has no valid card or the entry is unknown."""
    path = Path(path)
    if not (path / CARD).is_file():
        if (path / "checkpoint").is_dir():
            raise RequestError(
                f"{path} holds a training that was interrupted; go on with: zoo train ... -o {path} --resume"
            )
        raise RequestError(
            f"{path} is no model folder (it has no {CARD}); make one with: zoo train, or zoo download NAME"
        )
    card = Card.read(path / CARD)
    if not isinstance(found := card.details.get("preprocessing", {}), dict):
        raise RequestError(
            f"{path / CARD}: preprocessing is {found!r}; wanted an object; train or download the model again"
        )
    return ModelFolder(path, card, entries(card.entry), fetch)

"""Where a training starts: random weights, pre-trained vectors, or a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from pipelines.core.files import sha256
from pipelines.core.plain import from_plain
from zoo.recommenders import criteo
from zoo.recommenders.data.columns.kinds import AS_NUMBERS, AS_TEXTS
from zoo.recommenders.data.columns.labels import label_rules
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.schema import FEATURES, Column, Schema
from zoo.recommenders.data.schema_inference import infer, load_schema, with_labels
from zoo.recommenders.models.checkpoints import Build, training_record
from zoo.recommenders.train_config import TrainConfig
from zoo.recommenders.training.growth.growing import Grown, grown
from zoo.recommenders.training.growth.id_counts import Counts, counted
from zoo.recommenders.training.growth.survey import growing
from zoo.recommenders.training.growth.vectors import Vectors, digest_of, with_vectors
from zoo.recommenders.training.tables.networks import require_in_memory
from zoo.training.settings import require_kept

FINETUNE_ONLY = ("freeze_towers", "evict_after", "evict_below")  # settings that need a model to start from


@dataclass(frozen=True)
class Start:
    """The start of a training.

    Attributes:
        config: Training settings; those of the sizes are the model's.
        features: Features of the network, with the new ids of the log.
        folder: Folder of the model that training starts from; None: random weights.
        model: That model with the tables for the log, or None.
        vectors: Pre-trained vectors of a new model, see `with_vectors`.
    """

    config: TrainConfig
    features: Features
    folder: Path | None
    model: Grown | None
    vectors: Vectors

    @property
    def adds_ids(self) -> bool:
        """Whether the model gets rows for new ids."""
        return self.model is not None and any(column["added"] for column in self.model.report.values())

    @property
    def ids(self) -> dict[str, Any]:
        """{"ids": report of the grown tables}, or {} where no table grows."""
        return {"ids": self.model.report} if self.model is not None and self.model.report else {}

    def digest(self) -> str | None:
        """Returns the SHA-256 of the vectors, or of the model's float graph; None for random weights."""
        if self.vectors:
            return digest_of(self.vectors)
        return sha256(self.folder / "fp32.onnx") if self.folder else None

    def save_counts(self, output: Path, counts: Sequence[Counts]) -> None:
        """Writes how often the ids of tables that can grow occurred, this log included.

        Args:
            output: Model folder.
            counts: Occurrences of every id of every field in this log, see `counted`.
        """
        if growing(self.features):
            before, pending = (None, {}) if self.model is None else (self.model.counts, self.model.pending)
            counted(self.features, counts, before, pending).save(output, self.features)


def open_start(
    build: Build,
    data: Any,
    config: TrainConfig,
    start_from: str | Path | None,
    schema: str | Path | Schema | None,
    label: str | Sequence[str] | None,
    on_error: str,
) -> Start:
    """Determines the features and settings of a training, and adapts the model that it starts from to the log.

    Args:
        build: Creates the untrained network from features and settings.
        data: Labelled log, see `Features.read`.
        config: Training settings.
        start_from: Model folder whose weights, schema and sizes are the start; None: random weights.
        schema: Schema or its file; None: inferred from the log.
        label: Columns to predict, one or several; None: those of the schema.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        The start.

    Raises:
        RequestError: The log, the schema, the settings or the model cannot be used.
    """
    folder, model = Path(start_from) if start_from else None, None
    if about := training_record(folder) if folder else {}:
        config = _with_sizes(config, about["config"])
        config = replace(config, negative_rate=config.negative_rate or about["config"].get("negative_rate", 0.0))
        features = Features.from_json(about["features"])
    else:
        features = Features(_schema(data, schema, label, on_error, getattr(build, "sequences", False)))
    require_labels(build, features.schema)
    if folder:
        require_in_memory(build, features, config, "fine-tuning")
        model = grown(build, features, config, folder, data)
        features = model.features
    features, vectors = with_vectors(features)
    if vectors:
        require_in_memory(build, features, config, "training from given vectors")
    _require_trainable(config, features, folder is not None)
    return Start(config, features, folder, model, vectors)


def _require_trainable(config: TrainConfig, features: Features, finetunes: bool) -> None:
    """Raises RequestError for settings of fine-tuning in other trainings, and for logs without categories."""
    if not finetunes and (only := [name for name in FINETUNE_ONLY if getattr(config, name)]):
        raise RequestError(
            f"found the setting {only[0]} in a training from random weights, expected it in fine-tuning; run: zoo "
            "finetune MODEL"
        )
    if not features.fields:
        raise RequestError(
            "found numbers alone, expected a category or a list of them to learn embeddings of; give one such as an id "
            'or a code "kind": "category" (zoo schema LOG -o schema.json, then --schema schema.json)'
        )


def _schema(
    data: Any,
    schema: str | Path | Schema | None,
    label: str | Sequence[str] | None,
    on_error: str,
    sequences: bool,
) -> Schema:
    """Returns the schema, with other labels if given, or infers it from the data."""
    if schema is None:
        log_schema = infer(open_logs(data), label, on_error, sequences=sequences)
        ignored = ", ".join(f"{column.name} ({column.why})" for column in log_schema.of("ignored"))
        held = ", ".join(column.name for column in log_schema.of("timestamp")) or "their order"
        counts = {kind: len(log_schema.of(kind)) for kind in FEATURES}
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        mixed = ", ".join(
            column.name for column in log_schema.of("category") if AS_NUMBERS in column.why or AS_TEXTS in column.why
        )
        kinds += f" (numbers with other texts: {mixed}; zoo schema says more)" if mixed else ""
        kinds += f"; ignored: {ignored}" if ignored else ""
        print_line(
            f"schema inferred from {log_schema.rows:,} rows: predicts {', '.join(log_schema.labels)} from {kinds}; the "
            f"last rows by {held} are held out (zoo schema shows it, --schema takes an edited one)",
        )
        return log_schema
    source = criteo.schema(data, on_error=on_error) if criteo.is_built_in(schema) else schema
    log_schema = source if isinstance(source, Schema) else load_schema(source, data, on_error)
    names = [column.name for column in log_schema.columns]
    rules = label_rules(label, names)
    if not rules:
        return log_schema
    if unknown := [name for name in rules if name not in names]:
        raise RequestError(f"the schema has no column {unknown[0]!r}; its columns are {', '.join(names)}")
    chosen = with_labels(log_schema.columns, list(rules))
    return replace(log_schema, columns=tuple(_asked(column, rules) for column in chosen))


def _asked(column: Column, rules: Mapping[str, Mapping[str, Any]]) -> Column:
    """A column with the values that `rules` has for it, and without a label `where` that `rules` lacks."""
    where = column.where if column.where in rules else ""
    return replace(column, where=where, positive=rules.get(column.name) or column.positive)


def require_labels(build: Build, schema: Schema) -> None:
    """Checks the number of labels that a network is trained on.

    Args:
        build: Creates the network; `labels` gives the fewest and the most labels, if more than one may be.
        schema: Schema of the log.

    Raises:
        RequestError: The network predicts another number.
    """
    if not schema.labels:
        raise RequestError("the schema has no column of the kind label; training predicts one of 0 and 1")
    fewest, most = getattr(build, "labels", (1, 1))
    if len(schema.labels) > most:
        able = [name for name, entry in zoo.entries().items() if getattr(getattr(entry, "build", None), "labels", ())]
        raise RequestError(
            f"the schema has the labels {', '.join(schema.labels)}, expected one; train a family of several labels "
            f"({', '.join(able)}), or choose one with --label {schema.labels[0]}"
        )
    if len(schema.labels) < fewest:
        raise RequestError(
            f"the schema has the label {schema.labels[0]} alone, expected at least {fewest}; name them in their order, "
            "such as --label clicked --label bought"
        )


def _with_sizes(config: Any, kept: Mapping[str, Any]) -> Any:
    """The settings with the sizes of the model that training starts from."""
    kept = {**config.absent, **kept}
    sizes = from_plain({name: kept[name] for name in _sizes(config) if name in kept})
    for name, size in sizes.items():
        if (setting := getattr(config, name)) != getattr(type(config)(), name):
            require_kept(name, setting, size)
    return replace(config, **sizes)


def _sizes(config: Any) -> list[str]:
    """Settings that determine the shapes of the weights: those of the family, and two of the shared recipe."""
    return ["embedding_size", "hidden", *(asdict(config).keys() - asdict(TrainConfig()).keys())]

"""A scikit-learn estimator that trains a recommender on a data frame: `ZooClassifier`.

Needs the extras `sklearn` and `train`.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

import zoo
from pipelines.core import files
from pipelines.core.console import console
from pipelines.core.errors import RequestError
from pipelines.models.family import SchemaInferring
from zoo.recommenders.data.schema import OF_ROWS, Schema
from zoo.training.runs import require_free_run

LABEL, MODEL = "label", "model"
STEPS = 20  # of an epoch, at least, as far as batches have `MIN_BATCH` rows
MIN_BATCH = 16
MAX_BATCH = 256
NOT_PACKED = ("checkpoint", ".build.lock")  # parts of a model folder that a pickle leaves out


class ZooClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Binary classifier on a data frame: a recommender that is trained here and predicts in int8.

    `fit` takes a data frame of pandas or polars, or an array of numbers. Columns of texts are categories or lists of
    them, as `zoo.schema` infers; floats are numbers; missing values are allowed. Training holds out rows for early
    stopping: the last ones by a column of times, otherwise random ones of both classes.

    Args:
        family: Family of `zoo.train` with one label, such as "wide-deep", "deepfm" or "dcn-v2".
        settings: Training settings {name: value} over the defaults of the family, as `zoo train --set NAME=VALUE`.
            Frames of some hundred rows get smaller batches and a shorter average of weights than the family's.
        precision: "int8" or "fp32".
        engine: Engine of `zoo.pipeline`.
        threads: Number of intra-op threads of predictions.
        held_out: Share of the rows that is held out.
        bins: Number of quantile bins of each number. The families need categories, so the bins are one for each number
            of a frame that has no column of categories.
        random_state: Seed of the weights, the order of the rows and the held-out rows.
        verbose: Whether training prints its progress to stderr.

    Attributes:
        classes_: The two classes, sorted.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if the frame has names.
        schema_: Schema of the columns, as `zoo.schema` returns it.
        metrics_: {"auc", "logloss", "accuracy"} on the held-out rows.
    """

    def __init__(
        self,
        family: str = "deepfm",
        *,
        settings: Mapping[str, Any] | None = None,
        precision: str = "int8",
        engine: str = "auto",
        threads: int = 1,
        held_out: float = 0.1,
        bins: int = 32,
        random_state: Any = 0,
        verbose: bool = False,
    ) -> None:
        self.family = family
        self.settings = settings
        self.precision = precision
        self.engine = engine
        self.threads = threads
        self.held_out = held_out
        self.bins = bins
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.allow_nan = tags.input_tags.categorical = tags.input_tags.string = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Trains the model and builds it in the precision of predictions.

        Args:
            X: Data frame [n, columns], or array [n, columns].
            y: Classes [n], two different ones.

        Returns:
            The estimator.

        Raises:
            ValueError: The data cannot be used: one class alone, fewer than two rows of a class, no usable column.
        """
        columns = self._columns(X, y, reset=True)
        targets = self._targets(y, columns)
        random = check_random_state(self.random_state)
        order, held = _order(targets, self.held_out, random)
        self._bins: dict[str, tuple[str, NDArray[np.float64]]] = {}
        schema = self._schema(columns, targets)
        if not schema.of(*OF_ROWS):
            self._bins = _bins({column.name: columns[column.name] for column in schema.of("number")}, self.bins)
            columns = self._with_bins(columns)
            schema = self._schema(columns, targets)
        log = _log(columns, order) | {schema.labels[0]: targets[order]}
        self.schema_ = schema.to_json()
        self.__dict__.pop("_pipeline", None)  # of an earlier fit
        path = self._new_folder()
        settings = {"held_out": self.held_out if schema.of("timestamp") else held, **_for_rows(len(targets))}
        settings |= {"seed": int(random.randint(2**31 - 1)), **(self.settings or {})}
        quiet, console.quiet = console.quiet, not self.verbose
        try:
            texts = {name: str(value) for name, value in settings.items()}
            self.metrics_ = zoo.train(
                self.family, log, path / MODEL, schema=schema.save(path / "schema.json"), settings=texts
            )
        finally:
            console.quiet = quiet
        self._open()
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Computes the probabilities of the classes.

        Args:
            X: Data frame or array with the columns of `fit`.

        Returns:
            float64 [n, 2], in the order of `classes_`.

        Raises:
            ValueError: The columns are not those of `fit`.
        """
        check_is_fitted(self)
        rows = _log(self._with_bins(self._columns(X)))
        outputs = self._pipeline.predict(self._pipeline.preprocess(rows))
        positive = next(iter(outputs.values())).astype(np.float64).reshape(-1)
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, X: Any) -> NDArray[Any]:
        """Predicts the classes.

        Args:
            X: Data frame or array with the columns of `fit`.

        Returns:
            Array [n] of classes: the second one from a probability of 0.5 on.
        """
        positive = self.predict_proba(X)[:, 1] >= 0.5
        classes: NDArray[Any] = self.classes_[positive.astype(int)]
        return classes

    def save(self, output: str | Path) -> Path:
        """Writes the model folder, for `zoo serve`, `zoo rank`, `zoo finetune` and `zoo push`.

        Args:
            output: New folder.

        Returns:
            Path of the folder.

        Raises:
            RequestError: There is something else in `output`.
        """
        check_is_fitted(self)
        folder = Path(output)
        require_free_run(folder)
        for name, content in self._packed().items():
            files.write_bytes(folder / name, content)
        return folder

    def __sklearn_is_fitted__(self) -> bool:
        return "_pipeline" in vars(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        state.pop("_folder", None)
        if state.pop("_pipeline", None) is not None:
            state["_files"] = self._packed()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        packed = state.pop("_files", None) or state.pop("_folder", None)  # of 0.3.0
        super().__setstate__(state)
        if packed:
            path = self._new_folder()
            for name, content in packed.items():
                files.write_bytes(path / MODEL / name, content)
            self._open()

    # ------------------------------------------------------------------------------------------------------- privately

    def _new_folder(self) -> Path:
        """Makes a folder that is removed with the estimator."""
        self._folder = Path(tempfile.mkdtemp(prefix="zoo-classifier-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _open(self) -> None:
        """Opens the pipeline; builds the model where it is not built."""
        model = self._folder / MODEL
        self._pipeline = zoo.pipeline(model, self.precision, self.engine, self.threads)

    def _packed(self) -> dict[str, bytes]:
        """Content of the files of the model folder, by their relative path."""
        model = self._folder / MODEL
        paths = [path for path in sorted(model.rglob("*")) if path.is_file()]
        names = {path: path.relative_to(model) for path in paths}
        return {str(name): path.read_bytes() for path, name in names.items() if name.parts[0] not in NOT_PACKED}

    def _columns(self, X: Any, y: Any = None, reset: bool = False) -> dict[str, Any]:
        """Checks the input and returns its columns by name; an array's are x0, x1, ..."""
        is_frame = hasattr(X, "columns") and hasattr(X, "dtypes")
        checks = {"skip_check_array": True} if is_frame else {"dtype": None, "ensure_all_finite": "allow-nan"}
        checked = validate_data(self, X, **({"y": y} if reset else {}), reset=reset, **checks)
        X = checked[0] if reset else checked
        values = [X[name] for name in X.columns] if is_frame else [_numbers(column) for column in X.T]
        if reset:
            self._names = [str(name) for name in X.columns] if is_frame else [f"x{i}" for i in range(len(values))]
        return dict(zip(self._names, values, strict=True))

    def _schema(self, columns: Mapping[str, Any], targets: NDArray[np.int64]) -> Schema:
        """Infers the schema; columns that inference ignores as of no log of clicks are used, as X was chosen."""
        family = zoo.entry(self.family)
        if not isinstance(family, SchemaInferring):
            raise RequestError(f"found the family {self.family!r}, expected one that is trained on a schema")
        label = next(name for name in (LABEL, *(f"{LABEL}_{i}" for i in range(len(columns)))) if name not in columns)
        log = _log(columns) | {label: targets}
        floats = {name: np.asarray(values, np.float64) for name, values in columns.items() if _kind(values) == "f"}
        kinds = {name: "number" for name, values in floats.items() if not np.isnan(values).all()}
        kinds |= dict.fromkeys(self._bins, "category")

        def inferred(chosen: Mapping[str, str]) -> Schema:
            schema = family.infer_schema(log, label=label, delimiter=None, on_error="raise", kinds=chosen)[0]
            assert isinstance(schema, Schema)
            return schema

        schema = inferred(kinds)
        unused = [column for column in schema.of("ignored", "weight") if column.distinct]
        numbers = [column.name for column in unused if _kind(columns[column.name]) in "iub"]
        return inferred(kinds | dict.fromkeys(numbers, "number")) if numbers else schema

    def _targets(self, y: Any, columns: Mapping[str, Any]) -> NDArray[np.int64]:
        """Checks the classes and returns 0 and 1."""
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        check_consistent_length(next(iter(columns.values())), y)
        check_classification_targets(y)
        if (kind := type_of_target(y, input_name="y", raise_unknown=True)) != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.classes_, targets = np.unique(y, return_inverse=True)
        counts = np.bincount(targets)
        if len(counts) < 2 or counts.min() < 2:
            shown = ", ".join(
                f"{count} of {name!r}" for name, count in zip(self.classes_.tolist(), counts, strict=True)
            )
            raise ValueError(f"found n_samples={len(y)} rows, {shown}; expected two rows of each of two classes")
        return targets.astype(np.int64)

    def _with_bins(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the categories of the numbers' quantiles."""
        added = {}
        for name, (source, points) in self._bins.items():
            values = np.asarray(columns[source], np.float64)
            places = np.searchsorted(points, values, side="right").astype(str)
            added[name] = np.where(np.isnan(values), "", places)
        return {**columns, **added}


def _kind(values: Any) -> str:
    """Kind of the values of a column, as of a dtype of numpy; "O" for everything but numbers and truth values."""
    dtype = values.dtype
    if hasattr(dtype, "is_numeric"):  # of polars
        if dtype.is_numeric():
            return "f" if dtype.is_float() else "i"
        return "b" if str(dtype) == "Boolean" else "O"
    return dtype.kind if dtype.kind in "fiub" else "O"


def _numbers(column: NDArray[Any]) -> NDArray[Any]:
    """Returns a column of an array of objects as floats, where it has numbers alone."""
    if column.dtype.kind == "O" and all(isinstance(value, Real) for value in column):
        return column.astype(np.float64)
    return column


def _log(columns: Mapping[str, Any], order: Any = None) -> dict[str, Any]:
    """Returns columns in a form that logs are read from, with the rows in an order."""
    rows = slice(None) if order is None else order
    taken = {name: values.iloc[rows] if hasattr(values, "iloc") else values[rows] for name, values in columns.items()}
    return {name: values.to_arrow() if hasattr(values, "to_arrow") else values for name, values in taken.items()}


def _bins(columns: Mapping[str, Any], count: int) -> dict[str, tuple[str, NDArray[np.float64]]]:
    """Returns the columns of bins: {name: (column of numbers, upper ends of all bins but the last)}."""
    bins = {}
    for name, column in columns.items():
        values = np.asarray(column, np.float64)
        points = np.quantile(values[~np.isnan(values)], np.linspace(0, 1, count + 1)[1:-1])
        bins[f"{name} (bin)"] = (name, np.unique(points))
    return bins


def _order(targets: NDArray[np.int64], held_out: float, random: np.random.RandomState) -> tuple[NDArray[np.int64], int]:
    """Shuffles the rows: a share of both classes is last. Returns the order, and the number of the last rows."""
    parts: tuple[list[Any], list[Any]] = [], []
    for target in (0, 1):
        rows = random.permutation(np.flatnonzero(targets == target))
        held = min(max(round(held_out * len(rows)), 1), len(rows) - 1)
        parts[0].append(rows[held:])
        parts[1].append(rows[:held])
    first, last = (random.permutation(np.concatenate(part)) for part in parts)
    return np.concatenate([first, last]), len(last)


def _for_rows(rows: int) -> dict[str, Any]:
    """Returns the settings for few rows: an epoch has `STEPS` steps, and weights are averaged over one epoch."""
    if rows >= STEPS * MAX_BATCH:
        return {}
    batch = max(rows // STEPS, MIN_BATCH)
    return {"batch_size": batch, "ema": 1 - 1 / max(rows // batch, 2)}

"""The scikit-learn estimator: data frames, pipelines, pickles, model folders, and scikit-learn's own checks."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import lazily

import zoo
from pipelines.core.errors import RequestError

pytest.importorskip("torch", reason="needs the train extra")
pl = lazily.module("polars", reason="needs the test extra")
sklearn = lazily.module("sklearn", reason="needs the sklearn extra")
estimators = lazily.module("zoo.sklearn", reason="zoo is not installed")

SMALL = {"epochs": 12, "l2_embeddings": 1000, "embedding_size": 4, "hidden": "8", "refit": False}


def small(**options: Any) -> Any:
    """An estimator that is trained in a second."""
    return estimators.ZooClassifier(precision="fp32", engine="onnxruntime", settings=SMALL | options)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng, n = np.random.default_rng(0), 240
    kinds = rng.choice(list("abcd"), n)
    columns = {"user_id": rng.integers(0, 12, n), "kind": kinds, "price": rng.normal(size=n), "weight": np.arange(n)}
    return pd.DataFrame(columns).assign(bought=np.where((kinds == "a") | (rng.random(n) < 0.1), "yes", "no"))


@pytest.fixture(scope="module")
def fitted(frame: pd.DataFrame) -> Any:
    return small().fit(frame.drop(columns="bought"), frame["bought"])


def test_a_frame_is_fitted_and_its_columns_are_used(frame: pd.DataFrame, fitted: Any) -> None:
    rows = frame.drop(columns="bought")
    assert fitted.classes_.tolist() == ["no", "yes"] and fitted.feature_names_in_.tolist() == list(rows.columns)
    kinds = {column["name"]: column["kind"] for column in fitted.schema_["columns"]}
    assert kinds == {"user_id": "category", "kind": "category", "price": "number", "weight": "number", "label": "label"}
    probabilities = fitted.predict_proba(rows)
    assert probabilities.shape == (len(rows), 2) and np.allclose(probabilities.sum(axis=1), 1)
    assert (fitted.predict(rows) == fitted.classes_[probabilities.argmax(axis=1)]).all()
    assert fitted.score(rows, frame["bought"]) > 0.8 and fitted.metrics_["auc"] > 0.8
    np.testing.assert_array_equal(fitted.predict_proba(pl.from_pandas(rows)), probabilities)


def test_pickles_and_folders_are_the_model(tmp_path: Path, frame: pd.DataFrame, fitted: Any) -> None:
    rows = frame.drop(columns="bought")
    expected = fitted.predict_proba(rows)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(rows), expected)
    state = fitted.__getstate__()
    earlier = type(fitted)()
    earlier.__setstate__({**state, "_files": None, "_folder": state["_files"]})  # as 0.3.0 writes it
    np.testing.assert_array_equal(earlier.predict_proba(rows), expected)
    folder = fitted.save(tmp_path / "model")
    annotated = zoo.annotate(zoo.pipeline(folder, precision="fp32", engine="onnxruntime"), rows)
    np.testing.assert_allclose(annotated["probability"], expected[:, 1])
    with pytest.raises(RequestError, match="model"):
        fitted.save(folder)


def test_numbers_alone_get_bins_also_where_they_are_missing(frame: pd.DataFrame) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(200, 2))
    target = np.abs(values[:, 0]) > 0.7
    values[::20, 1] = np.nan
    model = sklearn.pipeline.make_pipeline(sklearn.impute.SimpleImputer(), small(epochs=20)).fit(values, target)
    assert [column["name"] for column in model[-1].schema_["columns"]][:4] == ["x0", "x1", "x0 (bin)", "x1 (bin)"]
    assert model.score(values, target) > 0.8  # no linear function of the numbers
    alone = sklearn.base.clone(model[-1]).fit(values, target)
    assert alone.predict_proba(values).shape == (200, 2)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([0] * 240, "expected two rows of each of two classes"),
        ([1] + [0] * 239, "1 of 1; expected two rows"),
        ([0, 1, 2] * 80, "Only binary classification is supported"),
        ([0, 1] * 3, "inconsistent numbers of samples"),
    ],
)
def test_targets_that_are_not_two_classes(frame: pd.DataFrame, target: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small().fit(frame.drop(columns="bought"), target)


@pytest.mark.slow
def test_default_settings_in_int8(frame: pd.DataFrame) -> None:
    rows, target = frame.drop(columns="bought"), frame["bought"]
    scores = sklearn.model_selection.cross_val_score(estimators.ZooClassifier("wide-deep"), rows, target, cv=3)
    assert scores.mean() > 0.85


@pytest.mark.slow
def test_checks_of_scikit_learn() -> None:
    from sklearn.utils import estimator_checks

    estimator_checks.check_estimator(small(epochs=20, refit=True))

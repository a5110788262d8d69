"""Data frames in and out of the pipelines of every task; pipelines of small dictionaries stand for the networks."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers import lazily

import zoo
from pipelines.core.errors import RequestError
from pipelines.models.pipeline import Pipeline

pd = pytest.importorskip("pandas", reason="needs the test extra")
pl = lazily.module("polars", reason="needs the test extra")
TEXTS = {"id": [7, 8], "text": ["one", "two"]}
FORMS = {"pandas": pd.DataFrame, "polars": lambda columns: pl.DataFrame(columns), "arrow": pa.table}


def pipeline(results: Any, parts: str = "lines") -> Any:
    """A pipeline that returns `results` of what it reads, which it keeps in `seen`."""

    class Fake:
        PARTS = parts
        seen: Any = None

        def __call__(self, raw: Any, **options: Any) -> Any:
            self.seen = raw
            return [result | options if isinstance(result, dict) else result for result in results]

    Pipeline.register(Fake)
    return Fake()


def columns(frame: Any) -> dict[str, list[Any]]:
    """The columns of a frame of any kind as lists."""
    if isinstance(frame, pa.Table):
        return frame.to_pydict()
    return {str(name): frame[name].to_list() for name in frame.columns}


@pytest.mark.parametrize("form", FORMS)
def test_results_are_columns_of_a_frame_of_the_same_kind(form: str) -> None:
    frame = FORMS[form](TEXTS)
    model = pipeline([{"translation": "eins", "score": 0.5}, {"translation": "zwei", "score": 0.25, "unmet": ["x"]}])
    annotated = zoo.annotate(model, frame, "text", prefix="de_")
    assert type(annotated) is type(frame) and model.seen == ["one", "two"]
    made = {"de_translation": ["eins", "zwei"], "de_score": [0.5, 0.25]}
    assert {name: cells for name, cells in columns(annotated).items() if name != "de_unmet"} == TEXTS | made
    assert columns(annotated)["de_unmet"][1] == ["x"] and list(columns(frame)) == ["id", "text"]


def test_the_index_of_pandas_stays() -> None:
    frame = pd.DataFrame({"text": ["one", "two"]}, index=[5, 3])
    annotated = zoo.annotate(pipeline([{"score": 1.0}, {"score": 2.0}]), frame)
    assert annotated.index.tolist() == [5, 3] and annotated["score"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("form", FORMS)
def test_lists_vectors_and_ranked_labels_are_columns(form: str) -> None:
    frame = FORMS[form]({"text": ["one", "two"]})
    entities = [[{"word": "one", "start": 0}], []]
    assert columns(zoo.annotate(pipeline(entities), frame))["results"] == entities
    vectors = [{"embedding": np.arange(3, dtype=np.float32) + i} for i in range(2)]
    embeddings = columns(zoo.annotate(pipeline(vectors), frame))["embedding"]
    np.testing.assert_array_equal(np.stack(embeddings), np.stack([result["embedding"] for result in vectors]))
    top = [{"top5": [("cat", 0.75), ("dog", 0.25)]}] * 2
    assert columns(zoo.annotate(pipeline(top), frame))["top5"][0][1] == {"label": "dog", "probability": 0.25}


def test_recommenders_read_the_frame_images_paths_and_pairs_two_columns() -> None:
    frame = pd.DataFrame({"a": ["x", "y"], "b": ["u", "v"]})
    ranker, photos, pairs = (pipeline([{"score": 1}] * 2, parts) for parts in ("rows", "files", "lines"))
    zoo.annotate(ranker, frame)
    assert ranker.seen is frame
    zoo.annotate(photos, frame, "a")
    assert photos.seen == [Path("x"), Path("y")]
    zoo.annotate(pairs, frame, ["a", "b"], top_k=2)
    assert pairs.seen == [("x", "u"), ("y", "v")]


def test_a_frame_without_rows_stays() -> None:
    assert zoo.annotate(pipeline([]), pd.DataFrame(TEXTS)[:0], "text").shape == (0, 2)


@pytest.mark.parametrize(
    ("frame", "column", "message"),
    [
        (TEXTS, None, "^found the columns id, text; say which one is read: column=NAME$"),
        (TEXTS, "words", "^found no column 'words'; the columns are id, text$"),
        ({"score": ["one"]}, None, "^found the column 'score' in the frame, expected none with the name of a result"),
    ],
)
def test_wrong_columns(frame: Any, column: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        zoo.annotate(pipeline([{"score": 1}]), pd.DataFrame(frame), column)


def test_rows_are_no_frame() -> None:
    with pytest.raises(RequestError, match="^found list, expected a data frame"):
        zoo.annotate(pipeline([]), [{"text": "one"}])


@pytest.mark.parametrize("form", FORMS)
def test_a_ranker_takes_frames(form: str) -> None:
    ranker = zoo.pipeline("shop-clicks", engine="onnxruntime")
    rows = ranker.example(4)
    frame = FORMS[form]({name: [row[name] for row in rows] for name in rows[0]})
    annotated = columns(zoo.annotate(ranker, frame))
    assert annotated["probability"] == [result["probability"] for result in ranker(rows)]
    assert annotated["click"] == [probability >= 0.5 for probability in annotated["probability"]]

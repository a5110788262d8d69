"""Pipelines called with what no pipeline takes: one line of the project's own, never another library's error."""

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError

pytestmark = pytest.mark.usefixtures("shared_home")

MODELS = ["multi30k-en-de", "wide-deep-criteo", "mobilenet-v1-cifar10"]
NOTHING = [None, 5, 3.5, b"abc", [], [None], [5], {"a": 1}, object(), True, {1, 2}, np.zeros(3)]


@pytest.fixture(scope="module")
def opened():
    return {name: zoo.pipeline(name) for name in MODELS}


@pytest.fixture
def translator(opened):
    return opened["multi30k-en-de"]


@pytest.mark.parametrize("raw", NOTHING, ids=lambda raw: type(raw).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_input(opened, name, raw):
    with pytest.raises(RequestError) as raised:
        opened[name](raw)
    assert "\n" not in str(raised.value)


def test_an_empty_name_is_no_folder_of_images(opened):
    with pytest.raises(RequestError, match="found the text"):
        opened["mobilenet-v1-cifar10"]("")


@pytest.mark.parametrize("beam", ["4", None, 2.5, 0, -1, 10**6])
def test_what_is_no_beam(opened, monkeypatch, translator, beam):
    monkeypatch.setattr(translator, "beam", beam)
    with pytest.raises(RequestError, match="found beam"):
        translator(["A dog."])


@pytest.mark.parametrize("token", [2**32 + 5, -1, 8000, -(2**63)])
def test_tokens_are_checked_before_they_become_smaller_integers(translator, token):
    with pytest.raises(RequestError, match=f"found token {token}, expected 0 to 7999"):
        translator.predict({"source": np.array([[token, 3]])})


@pytest.mark.parametrize("dtype", ["U8", "datetime64[s]", [("a", "i4")], "f4", "i8"], ids=str)
@pytest.mark.parametrize("engine", [pytest.param("auto", marks=pytest.mark.slow), "native", "onnxruntime"])
def test_ids_of_another_type(dtype, engine):
    pipeline = zoo.pipeline("wide-deep-criteo", engine=engine)
    batch = pipeline.preprocess(pipeline.example(4))
    with pytest.raises(RequestError, match=r"input ids is .* expected int32 \[n, 26\]"):
        pipeline.predict({**batch, "ids": np.zeros(batch["ids"].shape, dtype)})


@pytest.mark.parametrize("size", [9223372036854775808, 0, -1, 2.5, "3"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_batch_size(name, size):
    with pytest.raises(RequestError, match="batch size must be"):
        zoo.pipeline(name, batch_size=size)


@pytest.mark.parametrize("threads", [0, "2", 1.5, 10**9])
def test_what_is_no_number_of_threads(threads):
    with pytest.raises(RequestError, match="threads must be"):
        zoo.pipeline("wide-deep-criteo", threads=threads)


def test_a_batch_size_of_a_million_sentences_translates(translator):
    texts = ["Two children play in the snow."]
    assert zoo.pipeline("multi30k-en-de", batch_size=10**6)(texts) == translator(texts)

"""What all entries and all shipped models have in common."""

import dataclasses
import inspect
from pathlib import Path

import numpy as np
import onnx
import pytest

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.models import family
from pipelines.models.hub import CARD, Hub
from pipelines.models.pipeline import Pipeline
from pipelines.quantization.calibration.table import CalibrationTable
from zoo.serving.handlers.base import Handler
from zoo.translation.search.options import OPTIONS

pytestmark = pytest.mark.usefixtures("shared_home")
LIMIT = 32_000_000
SHIPPED = [
    name for name in zoo.names() if (zoo.SHIPPED / name / "int8.onnx").is_file()
]  # of others the user fetches the weights


UNTRAINED = ("ranker", "image-network", "vit", "convnext", "efficientnet-lite", "mobilenet-v3")  # of published weights


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_every_part_of_an_entry_is_there(name: str) -> None:
    entry = zoo.entry(name)
    assert entry.name == name
    assert issubclass(entry.pipeline(), Pipeline) and entry.passes({})
    assert isinstance(entry, family.Trainable) == (name not in UNTRAINED)
    assert isinstance(entry, family.Freezable) == (name not in ("ranker", "image-network"))
    assert isinstance(entry, family.Servable) and issubclass(entry.handler(), Handler)
    if isinstance(entry, family.Trainable):
        pytest.importorskip("tensorflow", reason="training needs the train extra")
        assert type(entry.train_config()) is type(entry.finetune_config())
        assert dataclasses.is_dataclass(entry.train_config()) and entry.processes in ("torch", "tensorflow", "")
    if isinstance(entry, family.Prunable):
        assert {"metric", "drop", "batch_size"} <= {*dir(entry.prunable())}
    if isinstance(entry, family.Importable):
        assert entry.importer().formats


def test_a_ranker_is_not_trained_here(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"ranker models are only imported, not trained; train one of autoint, bst, dcn-v2, "
    ):
        zoo.train("ranker", [], tmp_path / "new")


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_the_run_options_of_an_entry_are_those_of_its_pipeline(name: str) -> None:
    entry = zoo.entry(name)
    arguments = inspect.signature(entry.pipeline().run).parameters
    own = {key: param.default for key, param in arguments.items() if param.kind is param.KEYWORD_ONLY}
    declared = {option.name: option.default for option in entry.run_options}
    if any(param.kind is param.VAR_KEYWORD for param in arguments.values()):  # options of translation by their table
        own = {"draft": None, **{name: declared[name] for name in OPTIONS}, **own}
    assert declared == own


LINES = {
    "wide-deep": ("rows", {"clicks": 1234}, "12,345 rows, 1,234 clicks predicted, 5,679 rows/s, int8 in native"),
    "resnet50": ("images", {}, "12,345 images, 6 left out, 5,679 images/s, int8 in native"),
    "transformer-mt": ("sentences", {}, "12,345 sentences, 6 left out, 5,679 sentences/s, int8 in native"),
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_that_a_run_ends_with(name: str) -> None:
    unit, more, line = LINES[name]
    report = {unit: 12345, f"{unit}_per_second": 5678.9, "skipped": 6, "precision": "int8", "engine": "native"}
    assert zoo.entry(name).summary.format(**report, **more) == line


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="wide-deep"):
        zoo.entry("deep-wide")
    with pytest.raises(RequestError, match=f"{zoo.names()[0]}"):
        zoo.load("nothing-of-that-name")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_complete_and_its_files_match_the_card(name: str) -> None:
    card = Hub(zoo.SHIPPED).card(name)
    assert {"data", "licence", "preprocessing", "metrics", "calibration"} <= set(card.details)
    metrics = card.details["metrics"]
    report = files.read_json(zoo.SHIPPED / name / metrics["report"])
    for precision in ("fp32", "int8"):
        measured = report.get("quality", report)["metrics"][precision]
        assert metrics[precision] == pytest.approx(
            {key: measured[key] for key in metrics[precision]}, abs=0.005
        )  # BLEU is told to two places
    for file in card.files:
        path = zoo.SHIPPED / name / file.name
        assert (path.stat().st_size, files.sha256(path)) == (file.size, file.sha256)
        assert path.stat().st_size <= LIMIT


@pytest.mark.parametrize("name", SHIPPED)
def test_the_graphs_of_a_shipped_model_are_stock_onnx_with_the_same_inputs_and_a_dynamic_batch(name: str) -> None:
    folder = zoo.load(name)
    signatures = []
    for graph in ("fp32.onnx", "rewritten.onnx", "int8.onnx"):
        model = onnx.load(folder.ensure(graph))
        onnx.checker.check_model(model, full_check=True)
        assert {domain.domain for domain in model.opset_import} == {""}
        assert all(value.type.tensor_type.shape.dim[0].dim_param for value in model.graph.input)
        signatures.append([(value.name, value.type.tensor_type.elem_type) for value in model.graph.input])
    assert signatures[0] == signatures[1] == signatures[2]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_int8_model_is_what_this_code_makes_of_the_shipped_weights(name: str, tmp_path: Path) -> None:
    """The table belongs to the rewritten graph, and quantizing again gives the same scales (and the same bytes with the
    same packages).
    """
    folder = zoo.load(name)
    rewritten = io.load(folder.ensure("rewritten.onnx"))
    CalibrationTable.load(folder.ensure("calibration.json")).require(rewritten)
    zoo.quantize(name, tmp_path / "again.onnx")
    assert files.sha256(tmp_path / "again.onnx") == files.sha256(folder.ensure("int8.onnx"))


@pytest.mark.parametrize("name", SHIPPED)
def test_fp32_holds_float16_values(name: str) -> None:
    model = io.load(zoo.load(name).ensure("fp32.onnx"))
    for value in model.graph.initializers.values():
        array = query.constant(value)
        if array is not None and array.dtype == np.float32 and array.size >= 64:
            assert np.array_equal(array, array.astype(np.float16).astype(np.float32)), value.name


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_three_parts_chain_to_the_call(name: str, precision: str) -> None:
    opened = zoo.pipeline(name, precision=precision, engine="onnxruntime")
    raw = opened.example(5)
    batch = opened.preprocess(raw)
    assert all(array.flags.c_contiguous and len(array) == 5 for array in batch.values())
    assert opened.postprocess(opened.predict(batch)) == opened(raw)
    assert (opened.path / CARD).is_file()

"""Small models and data that tests of several tasks use."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from helpers.rewriting import model, run
from helpers.sample_files import TEXT

from pipelines.engines import stock
from pipelines.engines.openvino.session import OpenVinoSession
from pipelines.graph import io

ROOT = Path(__file__).resolve().parents[2]
# folders of tests of small models that OpenVINO takes longer to compile than they take to be made
WITHOUT_OPENVINO = (
    *("distributed", "recommenders/models", "recommenders/training", "serving", "texts"),
    *("translation/importers", "translation/search", "translation/training", "vision/training"),
)


@pytest.fixture(autouse=True, scope="module")
def without_openvino(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models run in ONNX Runtime and the native kernels alone in `WITHOUT_OPENVINO`."""
    with pytest.MonkeyPatch.context() as patch:
        folder = request.path.parent.relative_to(Path(__file__).parent).as_posix()
        if folder.startswith(WITHOUT_OPENVINO):
            patch.delitem(stock.STOCK, "openvino")
        yield


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO in a test whose folder runs without it."""
    monkeypatch.setitem(stock.STOCK, "openvino", OpenVinoSession)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 synthetic labelled rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    subprocess.run([sys.executable, ROOT / "scripts" / "synthesize_criteo.py", "-n", "1500", "-o", path], check=True)
    return path


@pytest.fixture(scope="session")
def trained(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Wide & Deep model, trained for one epoch and built up to int8."""
    pytest.importorskip("torch", reason="training needs the train extra")
    import zoo

    folder = tmp_path_factory.mktemp("models") / "small"
    settings = {
        "epochs": "1",
        "hidden": "64,32",
        "buckets": "100",
        "embedding_size": "8",
        "held_out": "500",
        "refit": "false",
    }
    zoo.train("wide-deep", str(rows), folder, settings=settings)
    zoo.build(folder)
    return folder


class Language:
    """Sentences of made-up words, and their translations word by word."""

    FORM = (2, 1, 64, 128, 4)
    SETTINGS: ClassVar = {
        "arch": "word-by-word",
        "vocabulary": "60",
        "dropout": "0",
        "warmup": "100",
        "precision": "fp32",
    }

    def __init__(self) -> None:
        stems = (("lan", "x"), ("tor", "y"), ("pes", "z"), ("fil", "w"))
        self.words = {f"{a}{b}": f"{b}{c}{a}" for a in ("ba", "ko", "mi", "ru") for b, c in stems}

    def pairs(self, count: int, seed: int = 0) -> list[tuple[str, str]]:
        random, words = np.random.default_rng(seed), np.array(list(self.words))
        chosen = [words[random.integers(len(words), size=random.integers(2, 9))].tolist() for _ in range(count)]
        return [(" ".join(sentence), " ".join(self.words[word] for word in sentence)) for sentence in chosen]

    def write(self, path: Path, count: int, seed: int = 0) -> Path:
        path.write_text("".join(f"{a}\t{b}\n" for a, b in self.pairs(count, seed)))
        return path


@pytest.fixture(scope="session")
def language() -> Language:
    return Language()


@pytest.fixture(scope="session")
def translator(language: Language, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Transformer that knows the made-up language, built up to int8."""
    torch = pytest.importorskip("torch", reason="training needs the train extra")
    import zoo
    from zoo.translation.models.config import ModelConfig
    from zoo.translation.models.transformer import ARCHITECTURES

    torch.set_num_threads(1)
    ARCHITECTURES["word-by-word"] = ModelConfig(*language.FORM)
    folder = tmp_path_factory.mktemp("translation")
    settings = {**language.SETTINGS, "epochs": "12", "batch_size": "384", "learning_rate": "0.002"}
    zoo.train("transformer-mt", str(language.write(folder / "pairs.tsv", 1500)), folder / "model", settings=settings)
    zoo.build(folder / "model")
    return folder / "model"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mlp.onnx, e.npz with labels that are the float model's, and c.npz."""
    rng = np.random.default_rng(0)
    made = model(
        TEXT, w=rng.standard_normal((8, 16)).astype(np.float32), v=rng.standard_normal((16, 4)).astype(np.float32)
    )
    io.save(made, tmp_path / "mlp.onnx")
    x = rng.standard_normal((200, 8)).astype(np.float32)
    np.savez(tmp_path / "e.npz", x=x, label=run(made, x=x)["y"].argmax(1))
    np.savez(tmp_path / "unlabelled.npz", x=x)
    np.savez(tmp_path / "c.npz", x=rng.standard_normal((64, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path

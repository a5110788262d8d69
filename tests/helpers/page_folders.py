"""The folders in which the commands of the documentation's pages are run: what a reader would have there, made up."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import zoo

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = ("A man", "A woman", "A dog", "Two children", "Three boys", "An old man", "A girl", "Some people")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GERMAN = ("Ein Mann", "Eine Frau", "Ein Hund", "Zwei Kinder", "Drei Jungen", "Ein alter Mann", "Ein Mädchen", "Leute")
DOES = ("in the snow", "on the street", "near a lake", "at night", "in a red car", "with a ball", "in the city")
TUT = (
    "im Schnee",
    "auf der Straße",
    "an einem See",
    "bei Nacht",
    "in einem roten Auto",
    "mit einem Ball",
    "in der Stadt",
)


def written(folder: Path, name: str, lines: Iterable[str]) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{line}\n" for line in lines))


def synthetic(kind: str, path: Path, rows: int) -> None:
    """Rows by scripts/synthesize_KIND.py: "criteo" or "log"."""
    script, where = ROOT / "scripts" / f"synthesize_{kind}.py", ("-o", path) if kind == "criteo" else (path,)
    subprocess.run([sys.executable, script, *where, "-n", str(rows)], check=True, capture_output=True)


def images(folder: Path, names: Iterable[str], size: int, seed: int = 0) -> None:
    """JPEGs of a colour a subfolder, with noise."""
    random = np.random.default_rng(seed)
    for name in names:
        colour = np.array([hash_of(name.partition("/")[0]) >> shift & 255 for shift in (0, 8, 16)])
        pixels = np.clip(random.normal(colour, 40, (size, size, 3)), 0, 255).astype(np.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)


def hash_of(text: str) -> int:
    """The same number in every process."""
    return int.from_bytes(text.encode(), "little") * 2654435761


def classes(folder: Path, names: Iterable[str], count: int, seed: int = 0) -> None:
    images(folder, [f"{name}/{i}.jpg" for name in names for i in range(count)], 32, seed)


def pairs(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        who, what = random.integers(len(ENGLISH)), random.integers(len(DOES))
        yield f"{ENGLISH[who]} {DOES[what]}.", f"{GERMAN[who]} {TUT[what]}."


def shipped_sample(folder: Path, name: str) -> None:
    (folder / name).write_bytes((ROOT / "zoo" / "weights" / "wide-deep-criteo" / "sample.tsv.gz").read_bytes())


def readme(folder: Path) -> None:
    shipped_sample(folder, "sample.tsv.gz")
    images(folder, ["photo.jpg"], 300)


def run(folder: Path) -> None:
    """photos/ are those of the development data, where they are: the page asks for their accuracy."""
    network(folder)
    zoo.quantize(folder / "model.onnx", folder / "int8.onnx", calibration_data=folder / "calib.npz", correct=False)
    images(folder / "photos", [f"photo{i}.jpg" for i in range(24)], 300)
    labels = list(map(str, range(24)))
    real = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared")) / "data" / "imagenet" / "nips17"
    if real.is_dir():
        rows = [line.split(",") for line in (real / "labels.csv").read_text().splitlines()[1:25]]
        labels = [row[1] for row in rows]
        for i, row in enumerate(rows):
            shutil.copyfile(real / row[0], folder / "photos" / f"photo{i}.jpg")
    written(folder, "photos/labels.csv", ["file,label", *(f"photo{i}.jpg,{label}" for i, label in enumerate(labels))])


def fine_tune(folder: Path) -> None:
    from helpers import huggingface_folders

    huggingface_folders.make("nllb", folder / "nllb")
    zoo.import_model(folder / "nllb", folder / "my-nllb", target_language="deu_Latn")
    written(folder, "old.tsv", map("\t".join, pairs(64)))
    synthetic("criteo", folder / "rows.tsv", 4000)
    synthetic("criteo", folder / "test-rows.tsv", 1000)
    for name, count in (("pairs.tsv", 300), ("test.tsv", 40)):
        written(folder, name, map("\t".join, pairs(count, count)))
    written(folder, "text.txt", (english for english, _ in pairs(5)))
    for name, count in (("animals", 12), ("animals-test", 4), ("folder", 16)):
        classes(folder / name, ("cat", "dog", "frog"), count)
    synthetic("log", folder / "log.csv", 500)


def many_machines(folder: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    synthetic("log", folder / "log.csv", 1600)
    table = pyarrow.csv.read_csv(folder / "log.csv")
    clicks = folder / "bucket" / "clicks"
    clicks.mkdir(parents=True)
    for part in range(8):
        pyarrow.parquet.write_table(table.slice(200 * part, 200), clicks / f"{part}.parquet")


def own_log(folder: Path) -> None:
    synthetic("log", folder / "items.csv", 300)
    synthetic("log", folder / "users.csv", 20)


def rank(folder: Path) -> None:
    user = {"user_id": "u7", "age": 33, "country": "日本", "device": "phone", "history": "books|toys"}
    (folder / "user.json").write_text(json.dumps(user))
    items = (f"i{number},{number / 7 + 1:.2f},{'books|toys' if number % 2 else 'tools'}" for number in range(120))
    written(folder, "items.csv", ['item_id,"price, EUR",categories', *items])


def network(folder: Path) -> None:
    """model.onnx, of uint8 pixels to ten classes, and samples for it."""
    import onnx_ir as ir

    from helpers.rewriting import model

    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * (2 / np.prod(shape[1:])) ** 0.5).astype(np.float32)

    text = """(uint8[n,3,224,224] image) => (float[n,10] logits) {
        pixels = Cast<to = 1>(image)  small = Mul(pixels, scale)
        a = Conv<strides = [4, 4], pads = [1, 1, 1, 1]>(small, w0)  b = Relu(a)
        c = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(b, w1)  d = Relu(c)
        e = GlobalAveragePool(d)  f = Flatten(e)  logits = Gemm<transB = 1>(f, w2)
    }"""
    scale = np.array(1 / 255, np.float32)
    made = model(text, scale=scale, w0=normal(16, 3, 3, 3), w1=normal(32, 16, 3, 3), w2=normal(10, 32))
    ir.save(made, folder / "model.onnx")
    for name in ("calib", "test"):
        np.savez(folder / f"{name}.npz", image=random.integers(0, 256, (24, 3, 224, 224), np.uint8))


def own_model(folder: Path) -> None:
    from helpers import exported_networks

    network(folder)
    exported_networks.bright_box_network(folder / "detector.onnx")
    images(folder / "photos", [f"{i}.jpg" for i in range(12)], 256)


def search(folder: Path) -> None:
    from helpers import multi_vector_models, text_models

    for name, labels in (("all-mpnet-base-v2", 0), ("reranker", 1)):
        (folder / name).mkdir()
        text_models.write(folder / name, "mpnet" if not labels else "bert", labels)
    (folder / "colbertv2.0").mkdir()
    multi_vector_models.stanford(folder / "colbertv2.0")
    written(folder, "queries.txt", (english for english, _ in pairs(3)))
    written(folder, "pairs.tsv", map("\t".join, pairs(64)))
    (folder / "search.py").write_text(block("search-your-own-texts.md", "import sys\n"))


def label(folder: Path) -> None:
    from helpers import text_models

    for name, kind in (("sentiment", "Sequence"), ("ner", "Token")):
        names = {0: "O", 1: "B-PER", 2: "I-PER"} if kind == "Token" else {0: "bad", 1: "good"}
        text_models.write_task(folder / name, f"AutoModelFor{kind}Classification", id2label=names)
    texts = [" ".join(pair) for pair in pairs(64)]
    written(folder, "texts.txt", texts)
    written(folder, "labelled.tsv", (f"{text}\t{'good' if i % 2 else 'bad'}" for i, text in enumerate(texts)))
    written(folder, "words.conll", (f"{word}\tO" if word else "" for text in texts for word in [*text.split(), ""]))


def serve(folder: Path) -> None:
    readme(folder)
    written(folder, "rows.tsv", gzip.decompress((folder / "sample.tsv.gz").read_bytes()).decode().splitlines()[:2])


def smaller(folder: Path) -> None:
    synthetic("criteo", folder / "rows.tsv", 4000)
    synthetic("log", folder / "films.csv", 2000)
    for name, family, log in (("my-ctr", "wide-deep", "rows.tsv"), ("my-films", "deepfm", "films.csv")):
        command = ["zoo.cli.app", "train", family, "--data", folder / log, "-o", folder / name, "--epochs", "1"]
        subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    classes(folder / "images", ("cat", "dog", "frog"), 8)
    for part, count in (("train", 12), ("test", 4)):
        classes(folder / "cifar10" / part, CIFAR10, count)
    with tarfile.open(folder / "cifar10.tar.gz", "w:gz") as tar:
        for part in ("train", "test"):
            tar.add(folder / "cifar10" / part, part)
    (folder / "compress.json").write_text(json.dumps(strategy()))


def strategy() -> dict[str, Any]:
    """The strategy with a schedule that the page shows."""
    settings: dict[str, Any] = json.loads(block("smaller.md", '{"epochs": 12'))
    return settings


def block(page: str, start: str) -> str:
    """The code block of a page that starts with a text."""
    text = (ROOT / "docs" / page).read_text()
    offset = text.index(f"\n{start}") + 1
    return text[offset : text.index("```", offset)]


def translate(folder: Path) -> None:
    from helpers import huggingface_folders

    huggingface_folders.make("marian", folder / "Helsinki-NLP" / "opus-mt-en-de")
    texts = huggingface_folders.sentences(80)
    for name in ("text.txt", "some-text.txt", "book.txt"):
        written(folder, name, texts[:40])
    written(folder, "pairs.tsv", (f"{text}\t{text}" for text in texts))


def control(folder: Path) -> None:
    written(folder, "text.txt", ["A man is riding a bicycle.", "Two children play in the park."])
    written(folder, "banned.txt", ["Fahrrad", "ein Mann"])
    written(folder, "terms.tsv", ["man\tHerr", "bicycle\tRad"])


FOLDERS: Mapping[str, Callable[[Path], None]] = {
    "README": readme,
    "control-translations": control,
    "daily-training": lambda folder: None,
    "fine-tune": fine_tune,
    "label-texts": label,
    "many-machines": many_machines,
    "own-log": own_log,
    "own-model": own_model,
    "rank-candidates": rank,
    "reliability": lambda folder: None,
    "run": run,
    "search-your-own-texts": search,
    "sequences-and-labels": rank,
    "serve": serve,
    "smaller": smaller,
    "translate-with-a-model-you-have": translate,
}

"""Sentence encoders in this project and in what people run them with, on one thread and one core, in turn.

    ZOO_MIRROR=FOLDER python scripts/peers/texts.py FOLDER TEXTS [--ways NAME,...] [--rounds 3] [--work DIR] [-o FILE]

FOLDER is all-MiniLM-L6-v2 as sentence-transformers writes it, TEXTS a text a line. Three loads are made of them:
sentences as they are, paragraphs of sentences up to 100 to 300 tokens, and both mixed. Of each: one text at a time, and
a stream in batches of 32, in the given order and sorted by length, all with tokenization; and the same without it. What
a way returns is compared with torch's float32 vectors by cosine. A way whose library is missing is left out, and told.

    zoo                    this project, int8, native
    sentence-transformers  torch, fp32; it sorts by itself
    onnxruntime-fp32       fp32.onnx, the graph that fastembed runs
    onnxruntime-dynamic    quantize_dynamic per channel, as sentence-transformers makes its avx512_vnni files
    onnxruntime-static     quantize_static, QDQ
    openvino-nncf          NNCF with model_type=TRANSFORMER, as sentence-transformers makes its OpenVINO int8 files
    fastembed              its own pipeline around fp32.onnx
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.graph import edit, io
from scripts.peers import common

BATCH, LONGEST = 32, 256
CALIBRATION = 256  # texts that peers are calibrated on
STREAM, SINGLE = 64, 16  # texts of a measurement
MODEL = "minilm-l6"
Batch = dict[str, Any]


class Way:
    """An engine in a process of its own; `batches` are texts as lists."""

    def __init__(self, folder: Path, work: Path, texts: Sequence[str]) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(LONGEST)
        self.tokenizer.enable_padding()
        self.run: Callable[[Batch], Any] = self.make(folder, work, texts)
        self.kept: list[Any] = []

    def make(self, folder: Path, work: Path, texts: Sequence[str]) -> Callable[[Batch], Any]:
        """What computes a batch."""
        raise NotImplementedError

    def encode(self, texts: Sequence[str]) -> Any:
        """Texts to what `run` takes."""
        found = self.tokenizer.encode_batch(list(texts))
        ids, mask = ([getattr(each, key) for each in found] for key in ("ids", "attention_mask"))
        return {"input_ids": np.array(ids, np.int64), "attention_mask": np.array(mask, np.int64)}

    def batches(self, texts: Sequence[str], size: int, sort: bool) -> list[list[str]]:
        """Texts in batches."""
        ordered = sorted(texts, key=len) if sort else list(texts)
        return [ordered[at : at + size] for at in range(0, len(texts), size)]

    def time(self, texts: Sequence[str], size: int, sort: bool, tokenize: bool) -> list[float]:
        """Seconds of each batch; the sorting is free."""
        parts = self.batches(texts, size, sort)
        made = [None if tokenize else self.encode(part) for part in parts]
        seconds = []
        for part, ready in zip(parts, made, strict=True):
            start = time.perf_counter()
            self.run(self.encode(part) if ready is None else ready)
            seconds.append(time.perf_counter() - start)
        return seconds

    def vectors(self, texts: Sequence[str]) -> Any:
        """float32 [n, width], of length 1."""
        parts = [np.asarray(self.run(self.encode(texts[at : at + BATCH]))) for at in range(0, len(texts), BATCH)]
        found = np.concatenate(parts)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def memory(self) -> float:
        """Resident memory in MB, with what making the model left behind."""
        status = Path("/proc/self/status").read_text()
        return round(int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6, 1)

    def samples(self, texts: Sequence[str]) -> list[Batch]:
        """Calibration samples, each for itself."""
        return [self.encode([text]) for text in texts[:CALIBRATION]]


class Zoo(Way):
    """The native encoder, texts of any lengths in one call."""

    def make(self, folder: Path, work: Path, texts: Sequence[str]) -> Callable[[Batch], Any]:
        """See `Way.make`."""
        opened: Any = zoo.pipeline(MODEL, "int8", "native")
        self.cut = opened.tokenizer
        return opened.compute  # type: ignore[no-any-return]

    def encode(self, texts: Sequence[str]) -> Any:
        """See `Way.encode`."""
        return self.cut(list(texts))


class OnnxRuntime(Way):
    """fp32.onnx, or what onnxruntime's quantizers make of it."""

    kind = "fp32"

    def make(self, folder: Path, work: Path, texts: Sequence[str]) -> Callable[[Batch], Any]:
        """See `Way.make`."""
        import onnxruntime as ort
        from onnxruntime import quantization

        path = work / f"{self.kind}.onnx"
        if self.kind == "dynamic":
            quantization.quantize_dynamic(
                work / "fp32.onnx", path, per_channel=True, weight_type=quantization.QuantType.QInt8
            )
        elif self.kind == "static":
            samples = iter(self.samples(texts))

            class Reader(quantization.CalibrationDataReader):
                def get_next(self) -> Any:
                    """The next sample, or None."""
                    return next(samples, None)

            quantization.quantize_static(work / "fp32.onnx", path, Reader(), per_channel=True)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = ort.InferenceSession(path, options)
        return lambda batch: session.run(None, batch)[0]


class OnnxRuntimeDynamic(OnnxRuntime):
    """See the module."""

    kind = "dynamic"


class OnnxRuntimeStatic(OnnxRuntime):
    """See the module."""

    kind = "static"


class OpenVino(Way):
    """What NNCF makes of fp32.onnx."""

    def make(self, folder: Path, work: Path, texts: Sequence[str]) -> Callable[[Batch], Any]:
        """See `Way.make`."""
        import nncf
        import openvino as ov

        core = ov.Core()
        data = nncf.Dataset(self.samples(texts))
        kind = nncf.ModelType.TRANSFORMER
        made = nncf.quantize(core.read_model(work / "fp32.onnx"), data, model_type=kind, subset_size=CALIBRATION)
        compiled = core.compile_model(made, "CPU", {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"})
        return lambda batch: compiled(batch)[0]


class SentenceTransformers(Way):
    """torch, by the library that the model comes from: text in, vectors out."""

    def make(self, folder: Path, work: Path, texts: Sequence[str]) -> Callable[[Batch], Any]:
        """See `Way.make`."""
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        model = SentenceTransformer(str(folder), device="cpu")

        def run(given: Any) -> Any:
            if isinstance(given, list):
                return model.encode(given, batch_size=BATCH)
            with torch.inference_mode():
                return model.forward({key: each.clone() for key, each in given.items()})["sentence_embedding"].numpy()

        self.model = model
        return run

    def encode(self, texts: Sequence[str]) -> Any:
        """See `Way.encode`."""
        return list(texts)


class FastEmbed(Way):
    """fastembed around the graph up to the last layer; it pools itself."""

    def make(self, folder: Path, work: Path, texts: Sequence[str]) -> Callable[[Batch], Any]:
        """See `Way.make`."""
        from fastembed import TextEmbedding

        place = work / "fastembed"
        place.mkdir(exist_ok=True)
        part = edit.extract(io.load(work / "fp32.onnx"), ["input_ids", "attention_mask"], ["hidden"])
        io.save(part, place / "model.onnx")
        for each in folder.glob("*.json"):
            (place / each.name).write_bytes(each.read_bytes())
        name = "sentence-transformers/all-MiniLM-L6-v2"
        model = TextEmbedding(name, specific_model_path=str(place), threads=1)
        return lambda given: np.stack(list(model.embed(given, batch_size=BATCH)))

    def encode(self, texts: Sequence[str]) -> Any:
        """See `Way.encode`."""
        return list(texts)


WAYS: dict[str, type[Way]] = {
    "zoo": Zoo,
    "openvino-nncf": OpenVino,
    "onnxruntime-dynamic": OnnxRuntimeDynamic,
    "onnxruntime-static": OnnxRuntimeStatic,
    "onnxruntime-fp32": OnnxRuntime,
    "sentence-transformers": SentenceTransformers,
    "fastembed": FastEmbed,
}
TEXT_ONLY = ("sentence-transformers", "fastembed")  # that take texts, not tokens
ORDERS = {"single": (1, False), "unsorted": (BATCH, False), "sorted": (BATCH, True)}


def loads(texts: Sequence[str], tokenizer: Any, seed: int = 0) -> dict[str, list[str]]:
    """Sentences, paragraphs and a mix of both."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rng = np.random.default_rng(seed)
    order = [texts[i] for i in rng.permutation(len(texts))]
    sentences, rest, paragraphs = order[:STREAM], iter(order[STREAM:]), []
    while len(paragraphs) < STREAM:
        wanted, parts, length = int(rng.integers(100, 300)), [], 2
        while length < wanted:
            parts.append(next(rest))
            length += len(tokenizer.encode(parts[-1], add_special_tokens=False).ids)
        paragraphs.append(" ".join(parts))
    mixed = [*sentences[: STREAM // 2], *paragraphs[: STREAM // 2]]
    return {"sentences": sentences, "paragraphs": paragraphs, "mixed": [mixed[i] for i in rng.permutation(STREAM)]}


def measure(name: str, workers: dict[str, Any], given: dict[str, list[str]], rounds: int) -> dict[str, Any]:
    """All ways on one load, in turn: milliseconds of a text alone, texts/s of the streams; medians of the rounds."""
    texts, results = given[name], {}
    for tokenize in (True, False):
        for order, (size, sort) in ORDERS.items():
            some = texts[:SINGLE] if order == "single" else texts
            able = {key: each for key, each in workers.items() if tokenize or key not in TEXT_ONLY}
            seconds: dict[str, list[float]] = {key: [] for key in able}
            for number in range(rounds + 1):
                for key, worker in able.items():
                    found = worker.ask("time", some, size, sort, tokenize)
                    if number:  # the first warms up
                        seconds[key].append(float(np.median(found)) if order == "single" else sum(found))
            what = f"{order}{'' if tokenize else ', tokens given'}"
            results[what] = {
                key: common.median([1e3 * x if order == "single" else len(some) / x for x in each])
                for key, each in seconds.items()
            }
    return {"load": name, "texts": len(texts), "characters": int(np.mean([*map(len, texts)])), "results": results}


def table(report: Any) -> str:
    """The report as text."""
    lines = [f"{key}: cosine {each['cosine']}, {each['memory_mb']} MB" for key, each in report["ways"].items()]
    for load in report["loads"]:
        for what, found in load["results"].items():
            cells = ", ".join(f"{key} {each['median']:.4g}" for key, each in found.items())
            lines.append(f"{load['load']}, {what}: {cells}")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    with common.one_line("texts.py"):
        parser = common.Parser(__doc__)
        parser.add_argument("folder", type=Path)
        parser.add_argument("texts", type=Path)
        parser.add_argument("--ways", default=",".join(WAYS))
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--core", type=int, default=0)
        parser.add_argument("--work", default=None)
        options = parser.parse_args()
        names = common.listed("way", options.ways, WAYS)
        texts = list(dict.fromkeys(filter(None, options.texts.read_text().split("\n"))))
        if len(texts) < 20 * STREAM:
            raise RequestError(f"found {len(texts)} texts, wanted {20 * STREAM}")
        with common.folder(options.work) as work:
            fp32 = zoo.load(MODEL).ensure("fp32.onnx")
            (work / "fp32.onnx").write_bytes(fp32.read_bytes())
            left_out: dict[str, str] = {}
            workers: dict[str, Any] = {}
            ways: dict[str, Any] = {}
            held, calibration = texts[CALIBRATION:], texts[:CALIBRATION]
            exact = None
            for name in ("onnxruntime-fp32", *(each for each in names if each != "onnxruntime-fp32")):
                make = functools.partial(WAYS[name], options.folder, work, calibration)
                worker = common.Worker(make, options.core, work / f"{name}.log", OMP_NUM_THREADS="1")
                try:
                    found = worker.ask("vectors", held[:512])
                except ZooError as error:
                    left_out[name] = str(error)
                    continue
                exact = found if exact is None else exact
                if name not in names:  # it was only compared with
                    worker.close()
                    continue
                ways[name] = {"cosine": round(float((found * exact).sum(axis=1).mean()), 5)}
                workers[name] = worker
            import tokenizers

            given = loads(held, tokenizers.Tokenizer.from_file(str(options.folder / "tokenizer.json")))
            environment = machine.environment(threads=1, packages=common.versions("nncf", *TEXT_ONLY, "torch"))
            report = common.gather(
                "loads", given, lambda name: measure(name, workers, given, options.rounds), None, environment
            )
            for name, worker in workers.items():
                ways[name]["memory_mb"] = worker.ask("memory")
                worker.close()
            report |= {"ways": ways, "left_out": left_out}
            if options.output:
                from pipelines.core import files

                files.write_json(options.output, report)
            common.show(report, table, options.json)


if __name__ == "__main__":
    main()

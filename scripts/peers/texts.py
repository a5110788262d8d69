"""Sentence encoders in this project and in what people run them with, on one thread and one core, in turn.

    ZOO_MIRROR=FOLDER python scripts/peers/texts.py FOLDER TEXTS [--ways NAME,...] [--rounds 9] [--work DIR] [-o FILE]

FOLDER is all-MiniLM-L6-v2 as sentence-transformers writes it, TEXTS a text a line. Three loads are made of them:
sentences as they are, paragraphs of sentences up to 100 to 300 tokens, and both mixed. Of each: one text at a time, and
a stream in batches of 32, in the given order and sorted by length, all with tokenization; and the same without it. What
a way returns is compared with float32 vectors by cosine. Models are quantized in processes of their own: memory is that
of one that opens the finished files, which stay in --work. A way whose library is missing is left out, and told.

    zoo                    this project, int8, native
    zoo-two-threads        the same on two threads and cores
    sentence-transformers  torch, fp32; it sorts by itself, as the two below
    st-onnx-int8           its ONNX backend, quantized by it for avx512_vnni
    st-openvino-int8       its OpenVINO backend, quantized by it
    onnxruntime-fp32       fp32.onnx, the graph that fastembed runs
    onnxruntime-dynamic    quantize_dynamic per channel, as sentence-transformers makes its avx512_vnni files
    onnxruntime-static     quantize_static, QDQ
    openvino-nncf          NNCF with model_type=TRANSFORMER, as sentence-transformers makes its OpenVINO int8 files
    fastembed              its own pipeline around fp32.onnx
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.graph import edit, io
from scripts.peers import harness

BATCH, LONGEST = 32, 256
CALIBRATION = 256  # texts that peers are calibrated on
SENTENCES, STREAM, SINGLE = 512, 64, 16  # texts of a measurement: short ones, others, alone
SLOW, FEW = 4, 3  # a way that takes so many times as long as the quickest has so few rounds
MODEL = "minilm-l6"
Batch = dict[str, Any]


class Way:
    """An engine in a process of its own; `batches` are texts as lists."""

    def __init__(self, folder: Path, work: Path, texts: Sequence[str]) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(LONGEST)
        self.tokenizer.enable_padding()
        self.folder, self.work, self.texts = folder, work, texts

    def build(self) -> None:
        """Write what `open` reads, where fp32.onnx is not that."""

    def open(self) -> None:
        """Make `run`, which computes a batch."""
        self.run: Callable[[Batch], Any] = self.opened()

    def opened(self) -> Callable[[Batch], Any]:
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
        """Resident memory in MB."""
        status = Path("/proc/self/status").read_text()
        return round(int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6, 1)

    def samples(self, texts: Sequence[str]) -> list[Batch]:
        """Calibration samples, each for itself."""
        return [self.encode([text]) for text in texts[:CALIBRATION]]


class Zoo(Way):
    """The native encoder, texts of any lengths in one call."""

    threads = 1

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        opened: Any = zoo.pipeline(MODEL, "int8", "native", threads=self.threads)
        self.cut = opened.tokenizer
        return opened.compute  # type: ignore[no-any-return]

    def build(self) -> None:
        """See `Way.build`."""
        self.opened()

    def encode(self, texts: Sequence[str]) -> Any:
        """See `Way.encode`."""
        return self.cut(list(texts))


class ZooTwoThreads(Zoo):
    """See the module."""

    threads = 2

    def open(self) -> None:
        """See `Way.open`."""
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        super().open()


class OnnxRuntime(Way):
    """fp32.onnx, or what onnxruntime's quantizers make of it."""

    kind = "fp32"

    def build(self) -> None:
        """See `Way.build`."""
        from onnxruntime import quantization

        source, path = self.work / "fp32.onnx", self.work / f"{self.kind}.onnx"
        if self.kind == "dynamic":
            quantization.quantize_dynamic(source, path, per_channel=True, weight_type=quantization.QuantType.QInt8)
        elif self.kind == "static":
            samples = iter(self.samples(self.texts))

            class Reader(quantization.CalibrationDataReader):
                def get_next(self) -> Any:
                    """The next sample, or None."""
                    return next(samples, None)

            quantization.quantize_static(source, path, Reader(), per_channel=True)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = ort.InferenceSession(self.work / f"{self.kind}.onnx", options)
        return lambda batch: session.run(None, batch)[0]


class OnnxRuntimeDynamic(OnnxRuntime):
    """See the module."""

    kind = "dynamic"


class OnnxRuntimeStatic(OnnxRuntime):
    """See the module."""

    kind = "static"


class OpenVino(Way):
    """What NNCF makes of fp32.onnx."""

    def build(self) -> None:
        """See `Way.build`."""
        import nncf
        import openvino as ov

        data = nncf.Dataset(self.samples(self.texts))
        kind = nncf.ModelType.TRANSFORMER
        source = ov.Core().read_model(self.work / "fp32.onnx")
        made = nncf.quantize(source, data, model_type=kind, subset_size=CALIBRATION)
        ov.save_model(made, self.work / "nncf.xml", compress_to_fp16=False)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        import openvino as ov

        settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
        compiled = ov.Core().compile_model(self.work / "nncf.xml", "CPU", settings)
        return lambda batch: compiled(batch)[0]


class SentenceTransformers(Way):
    """The library that the model comes from: text in, vectors out."""

    backend: ClassVar[str] = "torch"
    options: ClassVar[dict[str, Any]] = {}

    @property
    def place(self) -> Path:
        """A copy of the model's folder, for the files of this backend."""
        place = self.work / f"st-{self.backend}"
        shutil.copytree(self.folder, place, dirs_exist_ok=True)
        return place

    def model(self, **options: Any) -> Any:
        """The model in its backend."""
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(self.place), device="cpu", backend=self.backend, model_kwargs=options)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        return self.opened_with(self.options)

    def opened_with(self, options: dict[str, Any]) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        import torch

        torch.set_num_threads(1)
        model = self.model(**options)

        def run(given: Any) -> Any:
            if isinstance(given, list):
                return model.encode(given, batch_size=BATCH)
            with torch.inference_mode():
                return model.forward({key: each.clone() for key, each in given.items()})["sentence_embedding"].numpy()

        return run

    def encode(self, texts: Sequence[str]) -> Any:
        """See `Way.encode`."""
        return list(texts)


class SentenceTransformersOnnx(SentenceTransformers):
    """See the module."""

    backend: ClassVar[str] = "onnx"
    options: ClassVar[dict[str, Any]] = {
        "file_name": "onnx/model_qint8_avx512_vnni.onnx",
        "provider": "CPUExecutionProvider",
    }

    def build(self) -> None:
        """See `Way.build`."""
        from sentence_transformers import export_dynamic_quantized_onnx_model

        model = self.model(export=True, provider="CPUExecutionProvider")
        export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(self.place))

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        import onnxruntime as ort

        session = ort.SessionOptions()
        session.intra_op_num_threads = session.inter_op_num_threads = 1
        options = {**self.options, "session_options": session}
        return self.opened_with(options)


class SentenceTransformersOpenVino(SentenceTransformers):
    """See the module."""

    backend: ClassVar[str] = "openvino"
    options: ClassVar[dict[str, Any]] = {"file_name": "openvino/openvino_model_qint8_quantized.xml"}

    def build(self) -> None:
        """See `Way.build`."""
        import csv

        from optimum.intel import OVQuantizationConfig
        from sentence_transformers import export_static_quantized_openvino_model

        place = self.work / "st-texts"
        place.mkdir(exist_ok=True)
        with (place / "train.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([each] for each in self.texts)])
        model, config = self.model(export=True), OVQuantizationConfig(num_samples=CALIBRATION)
        export_static_quantized_openvino_model(
            model,
            config,
            str(self.place),
            dataset_name=str(place),
            dataset_config_name="default",
            dataset_split="train",
            column_name="text",
        )

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        options = {**self.options, "ov_config": {"INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY"}}
        return self.opened_with(options)


class FastEmbed(Way):
    """fastembed around the graph up to the last layer; it pools itself."""

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way.opened`."""
        from fastembed import TextEmbedding

        name = "sentence-transformers/all-MiniLM-L6-v2"
        model = TextEmbedding(name, specific_model_path=str(self.work / "fastembed"), threads=1)
        return lambda given: np.stack(list(model.embed(given, batch_size=BATCH)))

    def build(self) -> None:
        """See `Way.build`."""
        place = self.work / "fastembed"
        place.mkdir(exist_ok=True)
        part = edit.extract(io.load(self.work / "fp32.onnx"), ["input_ids", "attention_mask"], ["hidden"])
        io.save(part, place / "model.onnx")
        for each in self.folder.glob("*.json"):
            (place / each.name).write_bytes(each.read_bytes())

    def encode(self, texts: Sequence[str]) -> Any:
        """See `Way.encode`."""
        return list(texts)


WAYS: dict[str, type[Way]] = {
    "zoo": Zoo,
    "zoo-two-threads": ZooTwoThreads,
    "openvino-nncf": OpenVino,
    "onnxruntime-dynamic": OnnxRuntimeDynamic,
    "onnxruntime-static": OnnxRuntimeStatic,
    "onnxruntime-fp32": OnnxRuntime,
    "sentence-transformers": SentenceTransformers,
    "st-onnx-int8": SentenceTransformersOnnx,
    "st-openvino-int8": SentenceTransformersOpenVino,
    "fastembed": FastEmbed,
}
TEXT_ONLY = ("sentence-transformers", "st-onnx-int8", "st-openvino-int8", "fastembed")  # that take texts, not tokens
PACKAGES = ("nncf", "torch", "transformers", "sentence-transformers", "optimum-onnx", "optimum-intel", "fastembed")
ORDERS = {"single": (1, False), "unsorted": (BATCH, False), "sorted": (BATCH, True)}


def loads(texts: Sequence[str], tokenizer: Any, seed: int = 0) -> dict[str, list[str]]:
    """Sentences, paragraphs and a mix of both."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rng = np.random.default_rng(seed)
    order = [texts[i] for i in rng.permutation(len(texts))]
    sentences, rest, paragraphs = order[:SENTENCES], iter(order[SENTENCES:]), []
    while len(paragraphs) < STREAM:
        wanted, parts, length = int(rng.integers(100, 300)), [], 2
        while length < wanted:
            parts.append(next(rest))
            length += len(tokenizer.encode(parts[-1], add_special_tokens=False).ids)
        paragraphs.append(" ".join(parts))
    mixed = [*sentences[: STREAM // 2], *paragraphs[: STREAM // 2]]
    return {"sentences": sentences, "paragraphs": paragraphs, "mixed": [mixed[i] for i in rng.permutation(STREAM)]}


def measure(
    name: str, workers: dict[str, Any], given: dict[str, list[str]], rounds: int, advance: Callable[[float], None]
) -> dict[str, Any]:
    """All ways on one load, in turn: milliseconds of a text alone, texts/s of the streams; medians of the rounds."""
    texts, results = given[name], {}
    for tokenize in (True, False):
        for order, (size, sort) in ORDERS.items():
            some = texts[:SINGLE] if order == "single" else texts
            able = {key: each for key, each in workers.items() if tokenize or key not in TEXT_ONLY}
            seconds: dict[str, list[float]] = {key: [] for key in able}
            for number in range(rounds + 1):
                quickest = min((each[0] for each in seconds.values() if each), default=0.0)
                for key, worker in able.items():
                    if len(seconds[key]) >= FEW and min(seconds[key]) > SLOW * quickest:
                        continue
                    found = worker.ask("time", some, size, sort, tokenize)
                    if number:  # the first warms up
                        seconds[key].append(float(np.median(found)) if order == "single" else sum(found))
            what = f"{order}{'' if tokenize else ', tokens given'}"
            results[what] = {
                key: harness.median([1e3 * x if order == "single" else len(some) / x for x in each])
                for key, each in seconds.items()
            }
            advance(1)
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
    with harness.one_line("texts.py"):
        parser = harness.Parser(__doc__)
        parser.add_argument("folder", type=Path)
        parser.add_argument("texts", type=Path)
        parser.add_argument("--ways", default=",".join(WAYS))
        parser.add_argument("--rounds", type=int, default=9)
        parser.add_argument("--core", type=int, default=0)
        parser.add_argument("--work", default=None)
        options = parser.parse_args()
        names = harness.listed("way", options.ways, WAYS)
        texts = list(dict.fromkeys(filter(None, options.texts.read_text().split("\n"))))
        if len(texts) < 20 * STREAM:
            raise RequestError(f"found {len(texts)} texts, wanted {20 * STREAM}")
        with harness.folder(options.work) as work:
            fp32 = zoo.load(MODEL).ensure("fp32.onnx")
            (work / "fp32.onnx").write_bytes(fp32.read_bytes())
            left_out: dict[str, str] = {}
            workers: dict[str, Any] = {}
            ways: dict[str, Any] = {}
            held, calibration = texts[CALIBRATION:], texts[:CALIBRATION]
            exact = None
            for name in ("onnxruntime-fp32", *(each for each in names if each != "onnxruntime-fp32")):
                make = functools.partial(WAYS[name], options.folder, work, calibration)
                try:
                    if not (done := work / f"{name}.built").exists():
                        builder = harness.Worker(make, options.core, work / f"{name}-build.log", OMP_NUM_THREADS="1")
                        builder.ask("build")
                        builder.close()
                        done.touch()
                    worker = harness.Worker(make, options.core, work / f"{name}.log", OMP_NUM_THREADS="1")
                    worker.ask("open")
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
            environment = machine.environment(threads=1, packages=harness.versions(*PACKAGES))
            with progress("comparing", 2 * len(ORDERS) * len(given)) as advance:

                def timed(name: str) -> dict[str, Any]:
                    return measure(name, workers, given, options.rounds, advance)

                report = harness.gather("loads", given, timed, None, environment)
            for name, worker in workers.items():
                ways[name]["memory_mb"] = worker.ask("memory")
                worker.close()
            sizes = {name: zoo.load(MODEL).ensure(f"{name}.onnx").stat().st_size for name in ("fp32", "int8")}
            report |= {"ways": ways, "left_out": left_out, "bytes": sizes}
            if options.output:
                from pipelines.core import files

                files.write_json(options.output, report)
            harness.show(report, table, options.json)


if __name__ == "__main__":
    main()

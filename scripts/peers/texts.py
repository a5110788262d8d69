"""Sentence encoders in this project and in the libraries that people run them with, on one thread and core, in turn.

FOLDER is all-MiniLM-L6-v2 as sentence-transformers writes it, TEXTS a text a line; $ZOO_MIRROR is FOLDER, too. Three
loads are made of them: sentences as they are, paragraphs of sentences up to 100 to 300 tokens, and both mixed. Of each:
one text at a time, and a stream in batches of 32, in the given order and sorted by length, all with tokenization; and
the same without it. Results are compared with float32 vectors by cosine. Models are quantized in processes of their
own: memory is that of one that opens the finished files, which stay in --work. A way whose library is missing is left
out, with the reason.

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

import csv
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.graph import edit, io
from scripts.peers import harness, processes
from scripts.peers.engines import onnx_runtime, open_vino, pytorch
from zoo.texts.metrics import lowest

BATCH, LONGEST = 32, 256
CALIBRATION = 256  # texts that calibrate the peers
COMPARED = 512  # texts whose vectors are compared
SENTENCES, STREAM, SINGLE = 512, 64, 16  # texts of a measurement: short ones, others, alone
SLOW, FEW = 4, 3  # a way that takes SLOW times as long as the quickest has FEW rounds
MODEL, EXACT = "minilm-l6", "onnxruntime-fp32"
ORDERS = {"single": (1, False), "unsorted": (BATCH, False), "sorted": (BATCH, True)}
PACKAGES = ("nncf", "torch", "transformers", "sentence-transformers", "optimum-onnx", "optimum-intel", "fastembed")
Batch = dict[str, Any]


class Way:
    """An encoder in a process of its own.

    Attributes:
        text_only: Whether it takes texts, not tokens.
        run: Computes the vectors of a batch.
    """

    text_only = False

    def __init__(self, folder: Path, work: Path, texts: Sequence[str]) -> None:
        self.folder, self.work, self.texts = folder, work, texts
        self.run: Callable[[Batch], Any]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which truncates and pads."""
        import tokenizers

        found = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        found.enable_truncation(LONGEST)
        found.enable_padding()
        return found

    def build(self) -> None:
        """Writes the files that `opened` reads."""

    def opened(self) -> Callable[[Batch], Any]:
        """Returns the function that computes a batch."""
        raise NotImplementedError

    def open(self) -> None:
        """Opens the files."""
        self.run = self.opened()

    def encode(self, texts: Sequence[str]) -> Any:
        """Returns a batch of texts."""
        if self.text_only:
            return list(texts)
        found = self.tokenizer.encode_batch(list(texts))
        ids, mask = ([getattr(each, key) for each in found] for key in ("ids", "attention_mask"))
        return {"input_ids": np.array(ids, np.int64), "attention_mask": np.array(mask, np.int64)}

    def time(self, texts: Sequence[str], size: int, sort: bool, tokenize: bool) -> list[float]:
        """Returns the seconds of each batch; the sorting is not timed."""
        ordered = sorted(texts, key=len) if sort else list(texts)
        batches = [ordered[at : at + size] for at in range(0, len(texts), size)]
        made = [None if tokenize else self.encode(batch) for batch in batches]
        seconds = []
        for batch, ready in zip(batches, made, strict=True):
            start = time.perf_counter()
            self.run(self.encode(batch) if ready is None else ready)
            seconds.append(time.perf_counter() - start)
        return seconds

    def vectors(self, texts: Sequence[str]) -> Any:
        """Returns L2-normalized embeddings, float32 [n, width]."""
        batches = (texts[at : at + BATCH] for at in range(0, len(texts), BATCH))
        found = np.concatenate([np.asarray(self.run(self.encode(batch))) for batch in batches])
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def memory(self) -> float:
        """Returns the resident memory in MB."""
        return processes.memory_mb("VmRSS")

    def samples(self) -> list[Batch]:
        """Returns the calibration samples, one a batch."""
        return [self.encode([text]) for text in self.texts[:CALIBRATION]]


class Zoo(Way):
    """The native encoder, texts of any lengths in one call."""

    def __init__(self, *arguments: Any, threads: int = 1) -> None:
        super().__init__(*arguments)
        self.threads = threads

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way`."""
        if self.threads > 1:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        opened: Any = zoo.pipeline(MODEL, "int8", "native", threads=self.threads)
        self.encode = lambda texts: opened.tokenizer(list(texts))  # type: ignore[method-assign]
        return opened.compute  # type: ignore[no-any-return]

    def build(self) -> None:
        """See `Way`."""
        self.opened()


class OnnxRuntime(Way):
    """fp32.onnx, or the files that onnxruntime's quantizers make of it."""

    def __init__(self, *arguments: Any, kind: str = "fp32") -> None:
        super().__init__(*arguments)
        self.source, self.path = self.work / "fp32.onnx", self.work / f"{kind}.onnx"

    def build(self) -> None:
        """See `Way`."""
        if self.path.stem == "dynamic":
            onnx_runtime.quantize_dynamic(self.source, self.path)
        elif self.path.stem == "static":
            plain: dict[str, Any] = {"prepare": False, "activations": "QInt8"}
            onnx_runtime.quantize_static(self.source, self.path, self.samples(), **plain)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way`."""
        session = onnx_runtime.session(self.path)
        return lambda batch: session.run(None, batch)[0]


class OpenVino(Way):
    """fp32.onnx, quantized by NNCF."""

    def build(self) -> None:
        """See `Way`."""
        import nncf
        import openvino as ov

        source = ov.Core().read_model(self.work / "fp32.onnx")
        made = open_vino.quantize(source, self.samples(), model_type=nncf.ModelType.TRANSFORMER)
        open_vino.save(made, self.work / "nncf.xml")

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way`."""
        import openvino as ov

        settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
        compiled = ov.Core().compile_model(self.work / "nncf.xml", "CPU", settings)
        return lambda batch: compiled(batch)[0]


class SentenceTransformers(Way):
    """The library of the model: text in, vectors out."""

    text_only = True

    def __init__(self, *arguments: Any, backend: str = "torch", **options: Any) -> None:
        super().__init__(*arguments)
        self.backend, self.options = backend, options

    @property
    def place(self) -> Path:
        """A copy of the model's folder, for the files of this backend."""
        place = self.work / f"st-{self.backend}"
        shutil.copytree(self.folder, place, dirs_exist_ok=True)
        return place

    def model(self, **options: Any) -> Any:
        """Returns the model opened by the library."""
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(self.place), device="cpu", backend=self.backend, model_kwargs=options)

    def build(self) -> None:
        """See `Way`."""
        if self.backend == "onnx":
            from sentence_transformers import export_dynamic_quantized_onnx_model

            model = self.model(export=True, provider="CPUExecutionProvider")
            export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(self.place))
        elif self.backend == "openvino":
            from optimum.intel import OVQuantizationConfig
            from sentence_transformers import export_static_quantized_openvino_model

            data = self.work / "st-texts"
            data.mkdir(exist_ok=True)
            with (data / "train.csv").open("w", newline="") as file:
                csv.writer(file).writerows([["text"], *([each] for each in self.texts)])
            model, config = self.model(export=True), OVQuantizationConfig(num_samples=CALIBRATION)
            dataset = {"dataset_name": str(data), "dataset_config_name": "default", "dataset_split": "train"}
            export_static_quantized_openvino_model(model, config, str(self.place), column_name="text", **dataset)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way`."""
        import torch

        pytorch.use_one_thread()
        options = dict(self.options)
        if self.backend == "onnx":
            import onnxruntime as ort

            options["session_options"] = session = ort.SessionOptions()
            session.intra_op_num_threads = session.inter_op_num_threads = 1
        model = self.model(**options)

        def run(batch: Any) -> Any:
            if isinstance(batch, list):
                return model.encode(batch, batch_size=BATCH)
            with torch.inference_mode():
                return model.forward({key: each.clone() for key, each in batch.items()})["sentence_embedding"].numpy()

        return run


class FastEmbed(Way):
    """fastembed around the graph up to the last layer; it pools itself."""

    text_only = True

    def build(self) -> None:
        """See `Way`."""
        place = self.work / "fastembed"
        place.mkdir(exist_ok=True)
        part = edit.extract(io.load(self.work / "fp32.onnx"), ["input_ids", "attention_mask"], ["hidden"])
        io.save(part, place / "model.onnx")
        for each in self.folder.glob("*.json"):
            (place / each.name).write_bytes(each.read_bytes())

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way`."""
        from fastembed import TextEmbedding

        name = "sentence-transformers/all-MiniLM-L6-v2"
        model = TextEmbedding(name, specific_model_path=str(self.work / "fastembed"), threads=1)
        return lambda texts: np.stack(list(model.embed(texts, batch_size=BATCH)))


ONNX = {"file_name": "onnx/model_qint8_avx512_vnni.onnx", "provider": "CPUExecutionProvider"}
OPENVINO = {
    "file_name": "openvino/openvino_model_qint8_quantized.xml",
    "ov_config": {"INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY"},
}
WAYS: dict[str, Callable[..., Way]] = {
    "zoo": Zoo,
    "zoo-two-threads": functools.partial(Zoo, threads=2),
    "openvino-nncf": OpenVino,
    "onnxruntime-dynamic": functools.partial(OnnxRuntime, kind="dynamic"),
    "onnxruntime-static": functools.partial(OnnxRuntime, kind="static"),
    EXACT: OnnxRuntime,
    "sentence-transformers": SentenceTransformers,
    "st-onnx-int8": functools.partial(SentenceTransformers, backend="onnx", **ONNX),
    "st-openvino-int8": functools.partial(SentenceTransformers, backend="openvino", **OPENVINO),
    "fastembed": FastEmbed,
}
TEXT_ONLY = ("sentence-transformers", "st-onnx-int8", "st-openvino-int8", "fastembed")


# ----------------------------------------------------------------------------------------------------------- measuring


def loads(texts: Sequence[str], tokenizer: Any, seed: int = 0) -> dict[str, list[str]]:
    """Returns sentences, paragraphs and a mix of both."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rng = np.random.default_rng(seed)
    order = [texts[i] for i in rng.permutation(len(texts))]
    sentences, others, paragraphs = order[:SENTENCES], iter(order[SENTENCES:]), []
    while len(paragraphs) < STREAM:
        least, parts, length = int(rng.integers(100, 300)), [], 2
        while length < least:
            parts.append(next(others))
            length += len(tokenizer.encode(parts[-1], add_special_tokens=False).ids)
        paragraphs.append(" ".join(parts))
    mixed = [*sentences[: STREAM // 2], *paragraphs[: STREAM // 2]]
    return {"sentences": sentences, "paragraphs": paragraphs, "mixed": [mixed[i] for i in rng.permutation(STREAM)]}


def open_ways(
    names: Sequence[str], folder: Path, work: Path, texts: Sequence[str], workers: processes.Workers
) -> dict[str, dict[str, Any]]:
    """Builds and opens ways in `workers`; {way: {"cosine" to the float32 vectors, ...}} of those that run."""
    ways: dict[str, dict[str, Any]] = {}
    exact = None
    for name in (EXACT, *(name for name in names if name != EXACT)):
        make = functools.partial(WAYS[name], folder, work, texts[:CALIBRATION])
        done = work / f"{name}.built"
        if not done.exists():
            with harness.leave_out(name, workers.left_out):
                builder = processes.Worker(make, processes.last_core(), work / f"{name}-build.log")
                builder.ask("build")
                builder.close()
                done.touch()
        if name in workers.left_out:
            continue
        workers.open(name, make)
        found = workers.ask(name, "vectors", texts[CALIBRATION:][:COMPARED]) if name in workers.live else None
        if found is None:
            continue
        exact = found if exact is None else exact
        cosines = (found * exact).sum(axis=1)
        ways[name] = {"cosine": round(float(cosines.mean()), 5), **lowest(cosines)}
    if EXACT not in names:  # it was only compared with
        ways.pop(EXACT)
        workers.live.pop(EXACT).close()
    return ways


def time_load(
    name: str, workers: Mapping[str, Any], texts: Sequence[str], rounds: int, advance: harness.Advance
) -> dict[str, Any]:
    """Times all ways on one load, in turn: milliseconds of a single text, texts/s of the streams; medians."""
    results = {}
    for tokenize in (True, False):
        for order, (size, sort) in ORDERS.items():
            chosen = texts[:SINGLE] if order == "single" else texts
            able = {key: each for key, each in workers.items() if tokenize or key not in TEXT_ONLY}
            seconds: dict[str, list[float]] = {key: [] for key in able}
            for number in range(rounds + 1):
                quickest = min((each[0] for each in seconds.values() if each), default=0.0)
                for key, worker in able.items():
                    if len(seconds[key]) >= FEW and min(seconds[key]) > SLOW * quickest:
                        continue
                    taken = worker.ask("time", chosen, size, sort, tokenize)
                    if number:  # the first warms up
                        seconds[key].append(float(np.median(taken)) if order == "single" else sum(taken))
            results[f"{order}{'' if tokenize else ', tokens given'}"] = {
                key: harness.median([1e3 * x if order == "single" else len(chosen) / x for x in each])
                for key, each in seconds.items()
            }
            advance(1)
    return {"load": name, "texts": len(texts), "characters": int(np.mean([*map(len, texts)])), "results": results}


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", type=Path)
    parser.names("--ways", "way", WAYS)
    parser.count("--rounds", 9, "turns of each way")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"loads": [`time_load`], "ways": {way: {"cosine", "memory_mb"}}, "left_out", "bytes", "environment"}."""
    import tokenizers

    texts = list(dict.fromkeys(filter(None, args.texts.read_text().split("\n"))))
    if len(texts) < 20 * STREAM:
        raise RequestError(f"found {len(texts)} texts, expected {20 * STREAM}")
    with harness.folder(args.work) as work, processes.Workers(work) as workers:
        (work / "fp32.onnx").write_bytes(zoo.load(MODEL).ensure("fp32.onnx").read_bytes())
        ways = open_ways(args.ways, args.folder, work, texts, workers)
        tokenizer = tokenizers.Tokenizer.from_file(str(args.folder / "tokenizer.json"))
        streams = loads(texts[CALIBRATION:], tokenizer)
        environment = machine.environment(threads=1, packages=harness.versions(*PACKAGES))
        with progress("comparing", 2 * len(ORDERS) * len(streams)) as advance:

            def one(name: str) -> dict[str, Any]:
                return time_load(name, workers.live, streams[name], args.rounds, advance)

            report = harness.gather("loads", streams, one, None, environment)
        for name, memory in workers.ask_all("memory").items():
            ways[name]["memory_mb"] = memory
        sizes = {name: zoo.load(MODEL).ensure(f"{name}.onnx").stat().st_size for name in ("fp32", "int8")}
        return report | {"ways": ways, "left_out": workers.left_out, "bytes": sizes}

"""Text encoders in processes of their own: this project, and the libraries that people run them with."""

from __future__ import annotations

import csv
import functools
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core.errors import ZooError
from pipelines.graph import edit, io
from scripts.peers import processes
from scripts.peers.engines import onnx_runtime, open_vino, pytorch

BATCH, LONGEST = 32, 256
CALIBRATION = 256  # texts that calibrate the peers
MODEL, EXACT = "minilm-l6", "onnxruntime-fp32"
Batch = dict[str, Any]


def unpadded(outputs: Any, batch: Batch) -> Any:
    """Returns the rows of a batch, one a text; where each token has one, those of all tokens without the padding."""
    return outputs[batch["attention_mask"] != 0] if outputs.ndim == 3 else outputs


class Encoder:
    """An encoder in a process of its own.

    Attributes:
        text_only: Whether it takes texts, not tokens.
        longest: Maximum number of tokens of a text; longer ones are truncated.
        clock: Seconds by which it is timed.
        run: Computes the vectors of a batch.
    """

    text_only = False
    longest = LONGEST
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, folder: Path, work: Path, texts: Sequence[str]) -> None:
        self.folder, self.work, self.texts = folder, work, texts
        self.run: Callable[[Batch], Any]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which truncates and pads."""
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.enable_truncation(self.longest)
        tokenizer.enable_padding()
        return tokenizer

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
        encodings = self.tokenizer.encode_batch(list(texts))
        kinds = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        return {
            name: np.array([getattr(encoding, kind) for encoding in encodings], np.int64)
            for name, kind in kinds.items()
            if name in self.inputs
        }

    @functools.cached_property
    def inputs(self) -> set[str]:
        """Names of the inputs of fp32.onnx."""
        return {str(value.name) for value in io.load(self.work / "fp32.onnx").graph.inputs}

    def time(self, texts: Sequence[str], size: int, sort: bool, tokenize: bool) -> list[float]:
        """Returns the seconds of each batch; the sorting is not timed."""
        ordered = sorted(texts, key=len) if sort else list(texts)
        batches = [ordered[first : first + size] for first in range(0, len(texts), size)]
        made = [None if tokenize else self.encode(batch) for batch in batches]
        seconds = []
        for batch, ready in zip(batches, made, strict=True):
            start = self.clock()
            self.run(self.encode(batch) if ready is None else ready)
            seconds.append(self.clock() - start)
        return seconds

    def vectors(self, texts: Sequence[str]) -> Any:
        """Returns L2-normalized embeddings, float32 [n, width]; of tagged tokens a row per token.

        Raises:
            ZooError: The engine returned fewer rows than texts, as OpenVINO does where it lacks memory.
        """
        batches = (texts[first : first + BATCH] for first in range(0, len(texts), BATCH))
        embeddings = np.concatenate([np.asarray(self.run(self.encode(batch))) for batch in batches])
        if len(embeddings) < len(texts):
            raise ZooError(f"it returned {len(embeddings)} vectors of {len(texts)} texts")
        return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)

    def memory(self) -> float:
        """Returns the resident memory in MB."""
        return processes.memory_mb("VmRSS")

    def limit_memory(self, gigabytes: float) -> None:
        """Limits the memory of this process, so that a text that the engine cannot hold is an error.

        Args:
            gigabytes: Address space beside what it has now, in 10^9 bytes.
        """
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(gigabytes * 1e9),) * 2)

    def samples(self) -> list[Batch]:
        """Returns the calibration samples, one a batch."""
        return [self.encode([text]) for text in self.texts[:CALIBRATION]]


class Zoo(Encoder):
    """The native encoder, texts of any lengths in one call."""

    model: str | Path = MODEL

    def __init__(self, *arguments: Any, threads: int = 1) -> None:
        super().__init__(*arguments)
        self.threads = threads

    def opened(self) -> Callable[[Batch], Any]:
        """See `Encoder`."""
        if self.threads > 1:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        opened: Any = zoo.pipeline(self.model, "int8", "native", threads=self.threads)
        self.encode = lambda texts: opened.tokenizer(list(texts))  # type: ignore[method-assign]
        return opened.compute  # type: ignore[no-any-return]

    def build(self) -> None:
        """See `Encoder`."""
        self.opened()


class OnnxRuntime(Encoder):
    """fp32.onnx, or the files that onnxruntime's quantizers make of it."""

    def __init__(self, *arguments: Any, kind: str = "fp32") -> None:
        super().__init__(*arguments)
        self.source, self.path = self.work / "fp32.onnx", self.work / f"{kind}.onnx"

    def build(self) -> None:
        """See `Encoder`."""
        if self.path.stem == "dynamic":
            onnx_runtime.quantize_dynamic(self.source, self.path)
        elif self.path.stem == "static":
            plain: dict[str, Any] = {"prepare": False, "activations": "QInt8"}
            onnx_runtime.quantize_static(self.source, self.path, self.samples(), **plain)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Encoder`."""
        session = onnx_runtime.session(self.path)
        return lambda batch: unpadded(session.run(None, batch)[0], batch)


class OpenVino(Encoder):
    """fp32.onnx, as it is or quantized by NNCF; OpenVINO computes float operators in bfloat16 on CPUs that have it."""

    def __init__(self, *arguments: Any, kind: str = "nncf") -> None:
        super().__init__(*arguments)
        self.kind = kind

    def build(self) -> None:
        """See `Encoder`."""
        if self.kind == "fp32":
            return
        import nncf
        import openvino as ov

        source = ov.Core().read_model(self.work / "fp32.onnx")
        made = open_vino.quantize(source, self.samples(), model_type=nncf.ModelType.TRANSFORMER)
        open_vino.save(made, self.work / "nncf.xml")

    def opened(self) -> Callable[[Batch], Any]:
        """See `Encoder`."""
        import openvino as ov

        settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
        file = self.work / ("fp32.onnx" if self.kind == "fp32" else "nncf.xml")
        compiled = ov.Core().compile_model(file, "CPU", settings)
        return lambda batch: unpadded(compiled(batch)[0], batch)


class SentenceTransformers(Encoder):
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
        """See `Encoder`."""
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
                csv.writer(file).writerows([["text"], *([text] for text in self.texts)])
            model, config = self.model(export=True), OVQuantizationConfig(num_samples=len(self.texts[:CALIBRATION]))
            dataset = {"dataset_name": str(data), "dataset_config_name": "default", "dataset_split": "train"}
            export_static_quantized_openvino_model(model, config, str(self.place), column_name="text", **dataset)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Encoder`."""
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
                return model.forward({key: x.clone() for key, x in batch.items()})["sentence_embedding"].numpy()

        return run


class FastEmbed(Encoder):
    """fastembed around the graph up to the last layer; it pools itself."""

    text_only = True

    @property
    def place(self) -> Path:
        """The folder that it reads."""
        return self.work / "fastembed"

    def build(self) -> None:
        """See `Encoder`."""
        self.place.mkdir(exist_ok=True)
        part = edit.extract(io.load(self.work / "fp32.onnx"), ["input_ids", "attention_mask"], ["hidden"])
        io.save(part, self.place / "model.onnx")
        for path in self.folder.glob("*.json"):
            (self.place / path.name).write_bytes(path.read_bytes())

    def opened(self) -> Callable[[Batch], Any]:
        """See `Encoder`."""
        from fastembed import TextEmbedding

        name = "sentence-transformers/all-MiniLM-L6-v2"
        model = TextEmbedding(name, specific_model_path=str(self.place), threads=1)
        return lambda texts: np.stack(list(model.embed(texts, batch_size=BATCH)))


ONNX = {"file_name": "onnx/model_qint8_avx512_vnni.onnx", "provider": "CPUExecutionProvider"}
OPENVINO = {
    "file_name": "openvino/openvino_model_qint8_quantized.xml",
    "ov_config": {"INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY"},
}
WAYS: dict[str, Callable[..., Encoder]] = {
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

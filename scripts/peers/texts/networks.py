"""Text encoders of newer architectures with random weights, in this project and in other libraries, on one core.

Networks have the layers of public models (SHAPES) in two sizes, --layers of them, since all layers take the same time,
and a vocabulary of words; they stay in --work. Tasks: "embed" a text, "classify" it, or "tag" its tokens. Times are CPU
time from texts to results, of one text of 16, 64 and 256 tokens, of a stream of texts of 5 to 256 tokens in batches of
the sizes and orders of STREAMS, and of one text of 8,192 tokens, with --memory GB for each engine. Results, also of the
long text, are compared with float32 by cosine; one that is far from it is not timed. An engine that cannot compute a
network is left out, with the reason.

    zoo                    this project, int8, native; without padding, so a stream is one batch
    openvino-fp32          the float32 graph with default settings, which compute in bfloat16 on CPUs with bfloat16
    openvino-nncf          NNCF with model_type=TRANSFORMER
    onnxruntime-fp32       the float32 graph
    onnxruntime-dynamic    quantize_dynamic per channel
    sentence-transformers  torch, fp32
    st-onnx-int8           its ONNX backend, quantized by it for avx512_vnni
    st-openvino-int8       its OpenVINO backend, quantized by it
    fastembed              the float32 graph, added as a model of its own

The last four embed texts only. --packages names folders of packages for engines that need other versions than this
process: fastembed, and the int8 backends of sentence-transformers, which lack GTE and Nomic in transformers 4:

    python -m venv A && A/bin/pip install fastembed
    python -m venv B && B/bin/pip install "sentence-transformers[onnx,openvino]" datasets "huggingface-hub<1"
    pip install --no-deps --target C sentence-transformers
    P=lib/python3.11/site-packages
    LIST=fastembed=A/$P,st-onnx-int8=B/$P,st-openvino-int8=B/$P,sentence-transformers=C
    python scripts/peers text-networks --sizes small --tasks embed --packages $LIST
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from scripts.peers import harness, processes
from scripts.peers.texts import encoders, runs, shapes
from scripts.peers.texts.encoders import EXACT, Batch, Encoder

LENGTHS, LONG = (16, 64, 256), 8192  # tokens of a text
STREAM = 48  # texts of a stream
STREAMS = {"one by one": (1, False), "batches of 8, sorted": (8, True), "batches of 32, sorted": (32, True)}
WHOLE = {"one batch": (STREAM, False)}  # of this project
COMPARED, CALIBRATED, ROWS = 64, 64, 32  # texts
UNPRINTED = ("engines", "left_out", "unable", "order")  # in the table
# The first that can hold a long text: float32, else this project; OpenVINO's results are wrong where memory is short.
REFERENCES = (EXACT, "sentence-transformers", "openvino-fp32", "zoo")
MIN_COSINE = 0.9  # cosine with it of an engine that is timed
NEEDED = ("zoo", EXACT)  # `Zoo.build` exports the graph, the other computes what results are compared with
PACKAGES = (
    "nncf",
    "torch",
    "transformers",
    "sentence-transformers",
    "optimum-onnx",
    "optimum-intel",
    "fastembed",
    "onnxruntime",
    "openvino",
)


class Zoo(encoders.Zoo):
    """The model that `build` imports, native."""

    def build(self) -> None:
        """Imports and quantizes the network, and links fp32.onnx for the other engines."""
        if not self.model.exists():
            zoo.import_model(self.folder, self.model)
            file = zoo.load(self.model).ensure("fp32.onnx")
            for path in file.parent.glob("fp32.onnx*"):
                (self.work / path.name).hardlink_to(path)
            lines = self.work / "calibration.txt"
            lines.write_text("\n".join(self.texts))
            zoo.calibrate(self.model, lines, samples=ROWS)
        self.opened()

    @property
    def model(self) -> Path:
        """See `encoders.Zoo`."""
        return self.work / "model"


class FastEmbed(encoders.FastEmbed):
    """fp32.onnx as a model of the user's own, which pools and normalizes by itself."""

    def build(self) -> None:
        """See `Way`."""
        self.place.mkdir(exist_ok=True)
        for file in (*self.folder.glob("*.json"), *self.work.glob("fp32.onnx*")):
            (self.place / file.name).unlink(missing_ok=True)
            (self.place / file.name).hardlink_to(file)

    def opened(self) -> Callable[[Batch], Any]:
        """See `Way`."""
        from fastembed import TextEmbedding
        from fastembed.common.model_description import ModelSource, PoolingType

        source: dict[str, Any] = {"sources": ModelSource(hf="zoo/network"), "model_file": "fp32.onnx"}
        TextEmbedding.add_custom_model("zoo/network", PoolingType.DISABLED, False, dim=1, **source)
        model = TextEmbedding("zoo/network", specific_model_path=str(self.place), threads=1)
        return lambda texts: np.stack(list(model.embed(texts, batch_size=len(texts))))


ENCODERS: dict[str, Callable[..., Encoder]] = {
    "zoo": Zoo,
    "openvino-fp32": functools.partial(encoders.OpenVino, kind="fp32"),
    **{name: encoders.WAYS[name] for name in ("openvino-nncf", EXACT, "onnxruntime-dynamic")},
    **{name: encoders.WAYS[name] for name in ("sentence-transformers", "st-onnx-int8", "st-openvino-int8")},
    "fastembed": FastEmbed,
}


def timed(name: str, *arguments: Any) -> Encoder:
    """Makes an engine of texts of any length that is timed by its CPU time.

    Args:
        name: Its name in `ENCODERS`.
        *arguments: See `Way`.
    """
    way = ENCODERS[name](*arguments)
    way.longest, way.clock = LONG, time.process_time
    return way


# ----------------------------------------------------------------------------------------------------------- measuring


def text_loads() -> dict[str, list[str]]:
    """Returns the texts of all loads, by name: of equal lengths, the stream, and the long text."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(3.6, 0.8, STREAM)), 5, 256).astype(int)
    single = {f"{count} tokens": [shapes.text(rng, count) for _ in range(4)] for count in LENGTHS}
    return single | {
        "stream": [shapes.text(rng, count) for count in lengths],
        f"{LONG:,} tokens": [shapes.text(rng, LONG)],
    }


def time_single(
    workers: Mapping[str, processes.Worker], texts: Sequence[str], rounds: int, *, warm: bool = False
) -> dict[str, Any]:
    """Times single texts: {engine: milliseconds of a text}; see `runs.in_turn`."""

    def take(name: str) -> float:
        return 1e3 * float(np.median(workers[name].ask("time", texts, 1, False, True)))

    return harness.medians({"ms": runs.in_turn(workers, rounds, take, warm=warm)})["ms"]  # type: ignore[no-any-return]


def time_stream(workers: Mapping[str, processes.Worker], texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Times a stream: {engine: texts/s in its fastest order, and the order}; one round selects it."""
    orders = {name: WHOLE if name == "zoo" else STREAMS for name in workers}
    cases = {(name, order): sizes for name, streams in orders.items() for order, sizes in streams.items()}

    def take(case: tuple[str, str]) -> float:
        return sum(workers[case[0]].ask("time", texts, *cases[case], True))

    tried = runs.in_turn(cases, 1, take)
    quickest = [(name, min(streams, key=lambda order: tried[name, order])) for name, streams in orders.items()]
    seconds = runs.in_turn(quickest, rounds, take, warm=True)
    return {
        name: {**harness.median([len(texts) / x for x in seconds[name, order]]), "order": order}
        for name, order in quickest
    }


def time_long(workers: Mapping[str, processes.Worker], texts: Sequence[str], rounds: int, memory: int) -> Any:
    """Times a long text: ({engine: milliseconds}, {engine: reason why it cannot}); ends engines that cannot.

    Engines whose results are far from those of float32 are not timed.
    """
    vectors: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, worker in workers.items():
        try:
            worker.ask("limit_memory", memory)
            vectors[name] = worker.ask("vectors", texts)
        except ZooError as error:
            reasons[name] = str(error)
    reference = next((name for name in REFERENCES if name in vectors), None)
    cosines = {
        name: 1.0 if reference is None else float((x * vectors[reference]).sum(1).min()) for name, x in vectors.items()
    }
    for name, cosine in cosines.items():
        if not cosine >= MIN_COSINE:
            reasons[name] = (
                f"its result has the cosine {cosine:.3f} with that of {reference}; expected {MIN_COSINE} or more"
            )
    results = time_single({name: workers[name] for name in vectors if name not in reasons}, texts, rounds, warm=True)
    if reference:
        results = {name: {**figures, "cosine": round(cosines[name], 5)} for name, figures in results.items()}
    return results, reasons


class Network(NamedTuple):
    """A network, its folder, the makers of its engines, and the texts for the comparison of results."""

    case: tuple[str, str, str]  # shape, size, task
    place: Path
    makers: dict[str, Callable[[], Encoder]]
    compared: list[str]
    left_out: dict[str, str]


def built(case: tuple[str, str, str], args: Any, work: Path, core: int) -> Network:
    """Writes a network and the files of its engines, on one core."""
    place, rng = work / "-".join((*case, str(args.layers))), np.random.default_rng(1)
    folder = place / "network"
    processes.in_process(shapes.write, folder, *case, args.layers, cores={core})
    texts = [shapes.text(rng, int(count)) for count in rng.integers(5, 128, CALIBRATED + COMPARED)]
    names = [
        name
        for name in dict.fromkeys((*NEEDED, *args.engines))
        if case[-1] == "embed" or name not in encoders.TEXT_ONLY
    ]
    makers = {name: functools.partial(timed, name, folder, place, texts[:CALIBRATED]) for name in names}
    with processes.Workers(place, args.packages) as workers:
        runs.build_encoders(makers, place, workers, core)
    return Network(case, place, makers, texts[CALIBRATED:], workers.left_out)


def measure_network(network: Network, args: Any, advance: harness.Advance) -> dict[str, Any]:
    """Returns {"shape", "size", "task", "engines", "loads": [{"load", "results", "unable"}], "left_out"}."""
    shape, size, task = network.case
    with processes.Workers(network.place, args.packages) as workers:
        workers.left_out |= network.left_out
        engines = runs.open_encoders(network.makers, network.compared, network.place, workers)
        loads: list[dict[str, Any]] = []
        for name, inputs in text_loads().items():
            unable: dict[str, str] = {}
            if name == "stream":
                results = time_stream(workers.live, inputs, args.rounds)
            elif len(inputs) > 1:
                results = time_single(workers.live, inputs, args.rounds)
            elif args.memory:
                results, unable = time_long(workers.live, inputs, args.long_rounds, args.memory)
            else:
                continue
            loads.append({"load": name, "results": results, "unable": unable})
            advance(1)
        memory = workers.ask_all("memory")
    return {
        "shape": shape,
        "size": size,
        "task": task,
        "engines": {name: {**figures, "memory_mb": memory.get(name)} for name, figures in engines.items()},
        "loads": loads,
        "left_out": workers.left_out,
    }


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("--shapes", "shape", shapes.SHAPES)
    parser.names("--sizes", "size", shapes.WIDTHS)
    parser.names("--tasks", "task", shapes.CLASSES)
    parser.names("--engines", "engine", ENCODERS)
    parser.count("--layers", 6, "layers of a network")
    parser.count("--rounds", 9, "turns of each engine")
    parser.count("--long-rounds", 3, f"the same with the text of {LONG:,} tokens")
    parser.count("--memory", 6, "GB of each engine for that text, 0 to leave it out", least=0)
    parser.add_argument("--packages", default="", metavar="ENGINE=FOLDER,...", help="packages of engines, see above")
    parser.work()


def read_packages(value: str) -> dict[str, str]:
    """Returns folders of packages by engine, of the option --packages."""
    pairs = [package.partition("=") for package in value.split(",") if package]
    harness.require_known("engine", [name for name, *_ in pairs], ENCODERS)
    if missing := [folder for *_, folder in pairs if not Path(folder).is_dir()]:
        raise RequestError(f"found no folder {missing[0] or '(empty)'}; expected --packages ENGINE=FOLDER,...")
    return {name: folder for name, _, folder in pairs}


def measure(args: Any) -> dict[str, Any]:
    """Returns {"networks": [`measure_network`], "layers", "environment"}."""
    args.packages = read_packages(args.packages)
    cases = [(shape, size, task) for task in args.tasks for size in args.sizes for shape in args.shapes]
    others = {name: harness.versions(*PACKAGES, folder=folder) for name, folder in args.packages.items()}
    environment = machine.environment(threads=1, packages=harness.versions(*PACKAGES), packages_of=others)
    with harness.folder(args.work) as work, progress("comparing", 5 * len(cases)) as advance:
        networks = processes.on_all_cores(lambda case, core: built(case, args, work, core), cases)
        report = harness.gather(
            "networks", networks, lambda network: measure_network(network, args, advance), args.output, environment
        )
    return report | {"layers": args.layers}

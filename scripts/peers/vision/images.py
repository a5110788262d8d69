"""JPEG bytes to label in this project and in the usual pipelines of its peers: same weights, same photos, one core.

Photos are those of the development data ($ZOO_SHARED, by default ../shared): every fifth of data/imagenet/nips17
calibrates the peers, the others are classified, one by one, from bytes in memory. This project's model is what
`zoo.pipeline` opens: its calibration is shipped. A peer gets the float network in fp32.onnx from the normalized image
on, and its photos the usual way: Pillow opens, converts to RGB and resizes, the middle is cut out, numpy normalizes and
transposes. torch gets the network in torch, LiteRT that graph with batch norms folded, in operators of TensorFlow; its
file takes and gives float32, which is its converter's default.

Peers are quantized in processes of their own, as their documentation does it; then one process on one core, one thread,
gives each all photos, whose labels are compared, and `BLOCK` of the first `TIMED` photos in turn. Milliseconds are of
processor time; "core_share" is its share of the clock's: well below 1 the machine was busy, and the figures are rough.
A peer that cannot be built or opened is left out, and the report says why. Needs the `train` and `peers` extras. The
weight files are taken from $ZOO_MIRROR, by default $ZOO_SHARED/weights.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import zoo
from pipelines.core.errors import ZooError
from pipelines.core.progress import progress
from pipelines.data.images import labelled
from pipelines.data.preprocess import Preprocess
from pipelines.models.family import network_of
from scripts.peers import harness, processes
from scripts.peers.engines import onnx_runtime, open_vino, pytorch
from scripts.peers.quantization import settings
from scripts.peers.vision import float_networks
from scripts.peers.vision.float_networks import CALIBRATE_EVERY, NORMALIZED, Work, obvious, photo_folder

Array = NDArray[Any]
MODELS = ("mobilenet-v2-imagenet", "resnet50-imagenet", "mobilenet-v1-imagenet")
OURS, FLOAT, STOCK = "zoo-int8", "openvino-fp32", "zoo-openvino"
BLOCK, TIMED = 10, 60  # photos of a turn, and of a round
BUILD_SECONDS = 600
PACKAGES = ("nncf", "pillow", "simplejpeg", "torch", "torchao", "tensorflow-cpu", "tensorflow")


# --------------------------------------------------------------------------------------------------------------- peers


def build_zoo(work: Work, target: Path) -> None:
    """Writes this project's files, all that its engines read."""
    opened = zoo.pipeline(work.model, batch_size=1)
    opened.predict(opened.blank())  # type: ignore[attr-defined]


def build_torch(work: Work, target: Path) -> None:
    """Quantizes by torchao and compiles ahead of time by Inductor, weights frozen."""
    import torch

    layout = torch.channels_last
    samples = [(torch.from_numpy(batch[NORMALIZED]).contiguous(memory_format=layout),) for batch in work.batches()]
    network = network_of(zoo.load(work.model))[1]
    converted = torch.export.export(pytorch.quantize(network, samples, strict=True), samples[0])
    if not any("quantize" in str(node.target) for node in converted.graph.nodes):  # happens without strict export
        raise ZooError("torch's quantizer found nothing to quantize")
    path, options = str(target.with_suffix(".pt2")), {"freezing": True}
    torch._inductor.aoti_compile_and_package(converted, package_path=path, inductor_configs=options)


def build_litert(work: Work, target: Path) -> None:
    """Quantizes to full integers by TensorFlow's converter."""
    import tensorflow as tf

    spec = tf.TensorSpec([1, work.spec.size, work.spec.size, 3], tf.float32)
    function = tf.function(float_networks.tensorflow_network(work.folded), input_signature=[spec], autograph=False)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()], function)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([batch[NORMALIZED].transpose(0, 2, 3, 1)] for batch in work.batches())
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    target.with_suffix(".tflite").write_bytes(converter.convert())


class System(NamedTuple):
    """An open pipeline: decoding and preprocessing of JPEG bytes, the model, the number of the class."""

    prepare: Callable[[bytes], Any]
    run: Callable[[Any], Any]
    label: Callable[[Any], int]
    engine: str = ""


def _peer(session: Callable[[Array], Array], spec: Preprocess, *, last: bool = False) -> System:
    return System(lambda data: obvious(data, spec, last=last), session, lambda logits: int(logits.argmax()))


def open_onnxruntime(work: Work, path: Path) -> System:
    """Opens a file in onnxruntime."""
    session = onnx_runtime.session(path)
    name = session.get_inputs()[0].name
    return _peer(lambda x: session.run(None, {name: x})[0], work.spec)


def openvino_session(path: Path, threads: int, size: int) -> Callable[[Array], Array]:
    """Opens a network of one image in OpenVINO."""
    request = open_vino.infer_request(path, [1, 3, size, size], threads)
    return lambda x: request.infer([x], share_inputs=True)[0]


def open_openvino(work: Work, path: Path) -> System:
    """Opens a file in OpenVINO."""
    return _peer(openvino_session(path, 1, work.spec.size), work.spec)


def open_zoo(work: Work, path: Path, engine: str = "auto") -> System:
    """Opens this project's pipeline."""
    opened = zoo.pipeline(work.model, engine=engine, batch_size=1)
    opened.predict(opened.blank())  # type: ignore[attr-defined]  # "auto" decides
    return System(
        opened.preprocess, opened.predict, lambda out: int(opened.postprocess(out)[0]["index"]), opened.engine
    )


def open_torch(work: Work, path: Path) -> System:
    """Opens a package of Inductor."""
    import torch

    pytorch.use_one_thread()
    model = torch._inductor.aoti_load_package(str(path))
    return _peer(lambda x: model(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy(), work.spec, last=True)


def open_litert(work: Work, path: Path) -> System:
    """Opens a file in LiteRT."""
    import tensorflow as tf

    interpreter = tf.lite.Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(x: Array) -> Array:
        interpreter.set_tensor(source["index"], x)
        interpreter.invoke()
        logits: Array = interpreter.get_tensor(target["index"])
        return logits

    return _peer(run, work.spec, last=True)


class Peer(NamedTuple):
    """A system.

    Attributes:
        build: Writes its file; None if it has none.
        suffix: Suffix of the file.
        open: Opens the file.
    """

    build: Callable[[Work, Path], Any] | None
    suffix: str
    open: Callable[[Work, Path], System]


SYSTEMS = {
    OURS: Peer(build_zoo, "", open_zoo),
    STOCK: Peer(None, "", functools.partial(open_zoo, engine="openvino")),  # this project's file in the stock engine
    "openvino-int8": Peer(settings.nncf(preset="performance"), ".xml", open_openvino),
    "onnxruntime-int8": Peer(settings.onnxruntime_static("MinMax"), ".onnx", open_onnxruntime),
    "torch-int8": Peer(build_torch, ".pt2", open_torch),
    "litert-int8": Peer(build_litert, ".tflite", open_litert),
    FLOAT: Peer(None, "", lambda work, path: open_openvino(work, work.fp32)),
}


# ----------------------------------------------------------------------------------------------------------- measuring


def target_of(work: Work, name: str) -> Path:
    """Returns the path of the file that a peer writes."""
    return (work.fp32.parent / name).with_suffix(SYSTEMS[name].suffix)


def _build(name: str, work: Work) -> None:
    build = SYSTEMS[name].build
    assert build is not None
    build(work, target_of(work, name))


def time_systems(work: Work, names: Sequence[str], photos: Sequence[Path], rounds: int) -> dict[str, Any]:
    """Opens all systems and times them, in this process.

    Args:
        work: The model.
        names: Names of the systems.
        photos: Photos to classify.
        rounds: Times that each system sees each of the first `TIMED` photos.

    Returns:
        {"left_out": {name: reason}, "engine": {name: the one chosen, or ""}, "labels": {name: a class a photo},
        "whole", "prepare", "model", "clock" (of the whole): {name: milliseconds a photo, one number a round},
        "model_only": the same of one input again and again}.
    """
    opened: dict[str, System] = {}
    left_out: dict[str, str] = {}
    photo = photos[0].read_bytes()
    for name in names:
        with harness.leave_out(name, left_out):
            system = SYSTEMS[name].open(work, target_of(work, name))
            system.run(system.prepare(photo))
            opened[name] = system
    labels = {
        name: [system.label(system.run(system.prepare(path.read_bytes()))) for path in photos]
        for name, system in opened.items()
    }
    timed = photos[:TIMED]
    spent = {name: np.zeros((rounds, 4)) for name in opened}
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        for start in range(0, len(timed), BLOCK):
            block = [path.read_bytes() for path in timed[start : start + BLOCK]]
            for name, system in opened.items():
                system.label(system.run(system.prepare(block[-1])))  # caches warm again after the others' turns
                clock = time.perf_counter()
                for data in block:
                    begin = time.process_time()
                    x = system.prepare(data)
                    prepared = time.process_time()
                    out = system.run(x)
                    computed = time.process_time()
                    system.label(out)
                    spent[name][turn, :3] += time.process_time() - begin, prepared - begin, computed - prepared
                spent[name][turn, 3] += time.perf_counter() - clock
        gc.collect()
    gc.enable()
    times = {
        key: {name: list(taken[:, i] / len(timed) * 1e3) for name, taken in spent.items()}
        for i, key in enumerate(COLUMNS)
    }
    inputs = {name: system.prepare(photo) for name, system in opened.items()}
    again = {name: functools.partial(system.run, inputs[name]) for name, system in opened.items()}
    times["model_only"] = harness.in_turn(again, rounds)
    return {
        "left_out": left_out,
        "engine": {name: system.engine for name, system in opened.items()},
        "labels": labels,
        **times,
    }


COLUMNS = ("whole", "prepare", "model", "clock")


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of `time_systems` as the report has them.

    Returns {"best_int8_peer", "results": [{"system", "engine", "ms": {"whole", "prepare", "model", "model_only":
    {"median", "spread"}}, "images_per_second", "times_as_fast_as_best" (median over the rounds), "labels_as_best",
    "labels_as_fp32" (shares), "core_share"}], "ours": {peer: {"times_as_fast", "same_labels"} of this project's}}.
    """
    whole, labels = measured["whole"], measured["labels"]
    peers = [name for name in whole if name.endswith("-int8") and name != OURS]
    best = min(peers, key=lambda name: float(np.median(whole[name]))) if peers else None
    results = []
    for name in whole:
        row: dict[str, Any] = {"system": name, "engine": measured["engine"][name]}
        row["ms"] = {key: harness.median(measured[key][name]) for key in ("whole", "prepare", "model", "model_only")}
        row["images_per_second"] = round(1e3 / float(np.median(whole[name])), 1)
        if best is not None:
            row["times_as_fast_as_best"] = harness.ratio(whole[best], whole[name])
        for key, other in (("labels_as_best", best), ("labels_as_fp32", FLOAT)):
            if other in labels:
                row[key] = round(float(np.mean(np.equal(labels[name], labels[other]))), 4)
        row["core_share"] = harness.ratio(whole[name], measured["clock"][name])
        results.append(row)
    ours = {
        name: {
            "times_as_fast": harness.ratio(whole[name], whole[OURS]),
            "same_labels": round(float(np.mean(np.equal(labels[name], labels[OURS]))), 4),
        }
        for name in whole
        if OURS in whole and name != OURS
    }
    return {"best_int8_peer": best, "results": results, "ours": ours}


def built(
    name: str, peers: Sequence[str], photos: Sequence[Path], scratch: Path, advance: harness.Advance
) -> tuple[Work, dict[str, float], dict[str, str]]:
    """Builds a model's float network and its peers' files in `scratch`; files found there are not built again.

    Returns:
        (the work, {peer: seconds} of what was built, {peer: why it is left out}).

    Raises:
        ZooError: The network cannot be built.
    """
    core, calibration = {processes.last_core()}, photos[::CALIBRATE_EVERY]
    work = float_networks.prepare(name, scratch / f"{name}-{len(calibration)}", calibration)
    limits: dict[str, Any] = {"cores": core, "seconds": BUILD_SECONDS}
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for peer in peers:
        target = target_of(work, peer)
        if SYSTEMS[peer].build is not None and not target.is_file():
            start = time.perf_counter()
            with harness.leave_out(peer, left_out):
                processes.on_one_core(_build, peer, work, log=work.fp32.with_name(f"{peer}.log"), **limits)
                seconds[peer] = round(time.perf_counter() - start, 1)
            if peer in left_out:
                target.unlink(missing_ok=True)
        advance(1)
    return work, seconds, left_out


def compare(
    name: str, peers: Sequence[str], photos: Sequence[Path], rounds: int, scratch: Path, advance: harness.Advance
) -> dict[str, Any]:
    """Measures one model: `summary`, "model", "photos", "build_seconds", "left_out"."""
    tested = [path for index, path in enumerate(photos) if index % CALIBRATE_EVERY]
    counts = {"calibration": len(photos) - len(tested), "tested": len(tested), "timed": min(TIMED, len(tested))}
    about = {"model": name, "photos": counts}
    try:
        work, seconds, left_out = built(name, peers, photos, scratch, advance)
    except ZooError as error:
        advance(len(peers) + 1)
        empty: dict[str, Any] = {"best_int8_peer": None, "results": [], "ours": {}}
        return {**about, **empty, "left_out": dict.fromkeys(peers, harness.reason(error))}
    log, able = work.fp32.with_name("measure.log"), [peer for peer in peers if peer not in left_out]
    core = {processes.last_core()}
    measured = processes.on_one_core(time_systems, work, able, tested, rounds, cores=core, log=log)
    advance(1)
    return {**about, "build_seconds": seconds, **summary(measured), "left_out": left_out | measured["left_out"]}


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", zoo.names(), MODELS)
    parser.names("--peers", "peer", SYSTEMS)
    parser.count("--photos", 500, "photos, of which every fifth calibrates", least=2)
    parser.count("--rounds", 9, f"times that each system sees each of the first {TIMED} photos")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    photos = labelled(photo_folder()).paths[: args.photos]
    facts = harness.environment(*PACKAGES, rounds=args.rounds)
    steps = len(args.models) * (len(args.peers) + 1)
    with harness.folder(args.work) as scratch, progress("comparing", steps) as advance:

        def one(name: str) -> dict[str, Any]:
            return compare(name, args.peers, photos, args.rounds, scratch, advance)

        return harness.gather("models", args.models, one, args.output, facts)

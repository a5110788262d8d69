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

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from scripts.peers import harness, processes
from scripts.peers.texts import runs
from scripts.peers.texts.encoders import BATCH, CALIBRATION, EXACT, MODEL, TEXT_ONLY, WAYS

COMPARED = 512  # texts whose vectors are compared
SENTENCES, STREAM, SINGLE = 512, 64, 16  # texts of a measurement: short ones, others, alone
ORDERS = {"single": (1, False), "unsorted": (BATCH, False), "sorted": (BATCH, True)}
PACKAGES = ("nncf", "torch", "transformers", "sentence-transformers", "optimum-onnx", "optimum-intel", "fastembed")


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


def time_load(
    name: str, workers: Mapping[str, Any], texts: Sequence[str], rounds: int, advance: harness.Advance
) -> dict[str, Any]:
    """Times all ways on one load, in turn: milliseconds of a single text, texts/s of the streams; medians."""
    results = {}
    for tokenize in (True, False):
        for order in ORDERS:
            chosen = texts[:SINGLE] if order == "single" else texts
            able = [key for key in workers if tokenize or key not in TEXT_ONLY]

            def take(key: str, chosen: Sequence[str] = chosen, order: str = order, tokenize: bool = tokenize) -> float:
                taken = workers[key].ask("time", chosen, *ORDERS[order], tokenize)
                return float(np.median(taken)) if order == "single" else sum(taken)

            seconds = runs.in_turn(able, rounds, take)
            results[f"{order}{'' if tokenize else ', tokens given'}"] = {
                key: harness.median([1e3 * x if order == "single" else len(chosen) / x for x in times])
                for key, times in seconds.items()
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
        names = (EXACT, *(name for name in args.ways if name != EXACT))
        makers = {name: functools.partial(WAYS[name], args.folder, work, texts[:CALIBRATION]) for name in names}
        ways = runs.open_encoders(makers, texts[CALIBRATION:][:COMPARED], work, workers)
        if EXACT not in args.ways:  # it was only compared with
            ways.pop(EXACT)
            workers.live.pop(EXACT).close()
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

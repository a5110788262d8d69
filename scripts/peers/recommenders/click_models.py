"""Recommenders trained on a log with columns of its own, in the engines of the peers and of this project.

They are timed as in `wide-deep`: same weights, same inputs, one thread, in turn. Inputs are rows of the log that the
model keeps for calibration, drawn at random. Engines that read a graph get fp32.onnx as it was frozen; torch gets the
network that was trained. Engines that quantize by themselves calibrate on 2,048 rows of the pool; FBGEMM's tables are
int8 and its layers float, by Inductor; zentorch compiles what torchao quantized (it has quantized bags of 4 bits alone,
see `tables`). Needs the `train` and `peers` extras; an engine that cannot be opened is left out, and the report says
why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core.errors import RequestError
from scripts.peers import harness, processes
from scripts.peers.recommenders import engines, wide_deep

FAMILIES = ("wide-deep", "deepfm", "dcn-v2", "dlrm", "autoint", "finalmlp", "gdcn", "two-tower")
SEVERAL_LABELS, SEQUENCES = ("mmoe", "ple", "esmm"), ("din", "bst", "sasrec")
KNOWN = FAMILIES + SEQUENCES + SEVERAL_LABELS
ENGINES = [name for name in engines.ENGINES if name != "tensorflow-fp32"]
COMPILED = ("torch-int8", "zentorch-fp32", "zentorch-int8", "fbgemm-int8")  # by torch, a minute a model
PACKAGES = (*engines.PACKAGES, "deepctr-torch")


def compare(
    model: str | Path, sizes: Sequence[int] = (512, 1), peers: Sequence[str] = tuple(ENGINES), rounds: int = 15
) -> dict[str, Any]:
    """Measures one model in all engines.

    Returns:
        {"model", "family"} and the fields of `wide_deep.compare`.

    Raises:
        RequestError: The model predicts no probabilities of a row.
    """
    folder = zoo.load(model)
    if folder.entry.name not in KNOWN:
        raise RequestError(f"{model} is a {folder.entry.name} model; expected one of {', '.join(KNOWN)}")
    with tempfile.TemporaryDirectory() as scratch:
        inputs = engines.Inputs(str(model), Path(scratch))
        compared = wide_deep.compare(inputs, peers, sizes, inputs.kinds, rounds)
    return {"model": folder.card.name, "family": folder.entry.name, **compared}


def deepctr(first: Path, last: Path, labels: Sequence[str] = ("clicked",)) -> dict[str, Any]:
    """Networks of DeepCTR-Torch, trained on the log `first` and evaluated on the log `last`.

    Wide & Deep, DeepFM and DCN for one label; SharedBottom, MMoE, PLE and ESMM for two. As in its documentation:
    embeddings of 16, layers of 256 and 128, dropout 0.3, Adam, batches of 256. Columns: those of the inferred schema.

    Args:
        first: Log to train on.
        last: Log to evaluate on.
        labels: Columns to predict.

    Returns:
        {network: metrics on `last` of the best of four epochs, by AUC}, those of several labels as {"labels": {label:
        metrics}}; {} where the library is not installed.
    """
    try:
        import torch
        from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat  # type: ignore[import-not-found]
    except ImportError:
        return {}
    from zoo.recommenders.data.encoding import Rows
    from zoo.recommenders.data.features import Features
    from zoo.recommenders.data.logs import open_log
    from zoo.recommenders.data.schema_inference import infer
    from zoo.recommenders.metrics import click_metrics

    features = Features(infer(open_log(first), list(labels)))
    columns: list[Any] = []
    for field in features.fields:
        plain = SparseFeat(field.name, field.rows + 1, embedding_dim=16)  # id 0 is its padding
        columns.append(VarLenSparseFeat(plain, field.width, combiner="mean") if field.is_list else plain)
    columns += [DenseFeat(f"number {index}", 1) for index in range(features.shape[1])]

    def read(path: Path) -> tuple[dict[str, Any], Any]:
        rows = Rows.concatenate(list(features.read(path, labelled=True)))
        inputs = {f"number {index}": rows.numbers[:, index] for index in range(features.shape[1])}
        for field in features.fields:
            ids = rows.ids[:, field.start : field.start + field.width]
            inputs[field.name] = np.where(ids == field.last, 0, ids + 1) if field.is_list else ids[:, 0]
        return inputs, rows.labels

    (x, y), (last_x, truth) = read(first), read(last)
    results = {}
    for name, build in _deepctr_networks(columns, len(labels)).items():
        torch.manual_seed(0)
        model = build()
        loss = "binary_crossentropy"
        model.compile("adam", [loss] * len(labels) if len(labels) > 1 else loss, metrics=[])
        epochs = []
        for _ in range(4):
            model.fit(x, y, batch_size=256, epochs=1, verbose=0)
            scores = model.predict(last_x, 4096).astype(np.float64).reshape(len(truth), len(labels))
            by_column = zip(labels, truth.reshape(scores.shape).T, scores.T, strict=True)
            epochs.append({label: click_metrics(*column) for label, *column in by_column})
        best = max(epochs, key=lambda metrics: sum(label["auc"] for label in metrics.values()))
        results[name] = {"labels": best} if len(labels) > 1 else best[labels[0]]
    return results


def _deepctr_networks(columns: Sequence[Any], labels: int) -> dict[str, Callable[[], Any]]:
    """Returns what makes the networks of DeepCTR-Torch for a number of labels."""
    from deepctr_torch import models
    from deepctr_torch.models import multitask

    wide = {"wide-deep": models.WDL, "deepfm": models.DeepFM, "dcn": models.DCN}
    deep = {
        "shared-bottom": (multitask.SharedBottom, "bottom_dnn_hidden_units"),
        "mmoe": (multitask.MMOE, "expert_dnn_hidden_units"),
        "ple": (multitask.PLE, "expert_dnn_hidden_units"),
        "esmm": (multitask.ESMM, "tower_dnn_hidden_units"),
    }
    common, layers = {"dnn_dropout": 0.3, "seed": 0}, (256, 128)
    if labels == 1:
        return {
            name: partial(build, columns, columns, dnn_hidden_units=layers, task="binary", **common)
            for name, build in wide.items()
        }
    return {
        name: partial(build, columns, task_names=["ctr", "ctcvr"], **{hidden: layers}, **common)
        for name, (build, hidden) in deep.items()
    }


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("models", nargs="+", help="model folders")
    parser.numbers("--batch-size", "512,1", "batch sizes")
    parser.names("--peers", "engine", ENGINES)
    parser.count("--rounds", 15, "turns of each engine")
    parser.count("--neighbour", 0, "MB that a process on another core reads all the time; 0: no such process", least=0)


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    facts = harness.environment(*PACKAGES, rounds=args.rounds, neighbour_mb=args.neighbour)

    def one(model: str) -> dict[str, Any]:
        return compare(model, args.batch_size, args.peers, args.rounds)

    with processes.neighbour(args.neighbour):
        return harness.gather("models", args.models, one, args.output, facts)

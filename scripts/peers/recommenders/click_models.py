"""Recommenders trained on a log with columns of its own, in the engines of the peers and of this project.

As `wide-deep` times them: same weights, same inputs, one thread, in turn. Inputs are rows of the log that the model
keeps for calibration, drawn at random. Engines that read a graph get fp32.onnx as it was frozen; torch gets the network
that was trained. Engines that quantize by themselves calibrate on 2,048 rows of the pool. Needs the `train` and `peers`
extras; an engine that cannot be opened is left out, and the report says why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core.errors import RequestError
from scripts.peers import harness
from scripts.peers.recommenders import engines, wide_deep

FAMILIES = ("wide-deep", "deepfm", "dcn-v2", "dlrm", "autoint", "finalmlp", "gdcn", "two-tower")
SEVERAL_LABELS, SEQUENCES = ("mmoe", "ple", "esmm"), ("din", "bst")
ENGINES = [name for name in engines.ENGINES if name != "tensorflow-fp32"]
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
    if folder.entry.name not in (known := FAMILIES + SEVERAL_LABELS + SEQUENCES):
        raise RequestError(f"{model} is a {folder.entry.name} model; expected one of {', '.join(known)}")
    with tempfile.TemporaryDirectory() as scratch:
        inputs = engines.Inputs(str(model), Path(scratch))
        found = wide_deep.compare(inputs, peers, sizes, inputs.kinds, rounds)
    return {"model": folder.card.name, "family": folder.entry.name, **found}


def deepctr(first: Path, last: Path) -> dict[str, Any]:
    """Wide & Deep, DeepFM and DCN of DeepCTR-Torch, trained on the log `first` and evaluated on the log `last`.

    As in its documentation: embeddings of 16, layers of 256 and 128, dropout 0.3, Adam, batches of 256. Columns are
    those of the inferred schema.

    Returns:
        {network: metrics on `last` of the best of four epochs}; {} where the library is not installed.
    """
    try:
        import torch
        from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat  # type: ignore[import-not-found]
        from deepctr_torch.models import DCN, WDL, DeepFM  # type: ignore[import-not-found]
    except ImportError:
        return {}
    from zoo.recommenders.data.encoding import Rows
    from zoo.recommenders.data.features import Features
    from zoo.recommenders.data.logs import open_log
    from zoo.recommenders.data.schema_inference import infer
    from zoo.recommenders.metrics import click_metrics

    features = Features(infer(open_log(first)))
    columns: list[Any] = []
    for field in features.fields:
        plain = SparseFeat(field.name, field.rows + 1, embedding_dim=16)  # id 0 is its padding
        columns.append(VarLenSparseFeat(plain, field.width, combiner="mean") if field.is_list else plain)
    columns += [DenseFeat(f"number {at}", 1) for at in range(features.shape[1])]

    def read(path: Path) -> tuple[dict[str, Any], Any]:
        rows = Rows.concatenate(list(features.read(path, labelled=True)))
        inputs = {f"number {at}": rows.numbers[:, at] for at in range(features.shape[1])}
        for field in features.fields:
            ids = rows.ids[:, field.start : field.start + field.width]
            inputs[field.name] = np.where(ids == field.last, 0, ids + 1) if field.is_list else ids[:, 0]
        return inputs, rows.labels

    (x, y), (last_x, labels) = read(first), read(last)
    results = {}
    for name, build in (("wide-deep", WDL), ("deepfm", DeepFM), ("dcn", DCN)):
        torch.manual_seed(0)
        model = build(columns, columns, dnn_hidden_units=(256, 128), dnn_dropout=0.3, task="binary", seed=0)
        model.compile("adam", "binary_crossentropy", metrics=[])
        epochs = []
        for _ in range(4):
            model.fit(x, y, batch_size=256, epochs=1, verbose=0)
            epochs.append(click_metrics(labels, model.predict(last_x, 4096).ravel().astype(np.float64)))
        results[name] = max(epochs, key=lambda metrics: metrics["auc"])
    return results


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("models", nargs="+", help="model folders")
    parser.numbers("--batch-size", "512,1", "batch sizes")
    parser.names("--peers", "engine", ENGINES)
    parser.count("--rounds", 15, "turns of each engine")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    facts = harness.environment(*PACKAGES, rounds=args.rounds)

    def one(model: str) -> dict[str, Any]:
        return compare(model, args.batch_size, args.peers, args.rounds)

    return harness.gather("models", args.models, one, args.output, facts)

"""Time recommenders trained on a log of one's own in the engines of their peers and in this project's: same weights,
same inputs, one thread, in turn.

    python scripts/peers/recommenders/click_models.py MODEL... [--batch-size 512,1] [--peers NAME,...] [--rounds 15] [-o FILE]

As `wide_deep.py` does it: every engine in a process of its own on one core, a turn of 0.1 s each in every round, what
is timed is one call from inputs to probabilities. Inputs are rows of the log that the model keeps to calibrate on,
drawn at random into a pool of 32,768 rows or 64 batches. Engines that read a graph get fp32.onnx as it was frozen;
torch gets the network that was trained. Those that quantize by themselves calibrate on 2,048 rows of the pool. Needs
the `train` and `peers` extras; an engine that cannot be opened is left out, and the report says why.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import files, machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from scripts.peers import harness
from scripts.peers.recommenders import wide_deep as one_model
from scripts.peers.recommenders.wide_deep import Array, Call, Opened

NETWORKS = {  # of a family, in torch
    "wide-deep-log": ("zoo.wide_deep.log", "WideDeep"),
    "deepfm": ("zoo.deepfm", "DeepFM"),
    "dcn-v2": ("zoo.dcn_v2", "DCNv2"),
    "dlrm": ("zoo.dlrm", "DLRM"),
    "two-tower": ("zoo.two_tower", "TwoTower"),
}
PACKAGES = (*one_model.PACKAGES, "deepctr-torch")
CALIBRATION_BATCH, CALIBRATION_BATCHES = 256, 8


class Work(harness.Work):
    """What every process is given: the model."""

    def samples(self) -> list[dict[str, Array]]:
        """Batches to calibrate on."""
        return self.batches("log", CALIBRATION_BATCH)[:CALIBRATION_BATCHES]

    def batches(self, kind: str, size: int) -> list[dict[str, Array]]:
        """The pool of inputs in batches of `size`."""
        with np.load(zoo.load(self.model).path / "calibration.npz") as kept:
            rows = {name: kept[name] for name in kept.files}
        count = size * max(one_model.POOL_ROWS // size, one_model.POOL_BATCHES)
        drawn = np.random.default_rng(0).integers(0, len(next(iter(rows.values()))), count)
        pool = {name: np.ascontiguousarray(each[drawn]) for name, each in rows.items()}
        return [{name: each[at : at + size] for name, each in pool.items()} for at in range(0, count, size)]


def torch_int8(work: Work) -> Opened:
    """Post-training quantization of the exported network for Inductor on x86; see `wide_deep.torch_int8`."""
    import torch
    import torch._inductor.config as inductor
    from torchao.quantization.pt2e import move_exported_model_to_eval  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # type: ignore[import-untyped]

    from zoo.recommenders.export.freeze import network

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    inductor.freezing = True
    inductor.cpp_wrapper = True  # less Python a call
    folder = zoo.load(work.model)
    package, name = NETWORKS[folder.entry.name]
    build = getattr(importlib.import_module(f"{package}.model"), name)
    model = network(folder.path, build, importlib.import_module(f"{package}.train").Settings)[0]

    class Probability(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, numbers: Any, scales: Any) -> Any:
            found = self.model(ids, numbers, scales)
            return torch.sigmoid(found[0] if isinstance(found, tuple) else found)

    def prepare(batch: dict[str, Array]) -> Any:
        some = len(batch["ids"])
        empty = np.zeros((some, 0), np.float32)
        return tuple(torch.from_numpy(batch.get(each, empty)) for each in ("ids", "numbers", "scales"))

    samples = [prepare(batch) for batch in work.samples()]
    rows = {0: torch.export.Dim("rows", min=1, max=1 << 20)}
    exported = torch.export.export(Probability().eval(), samples[0], dynamic_shapes=(rows, rows, rows)).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for sample in samples:
        prepared(*sample)
    converted = move_exported_model_to_eval(convert_pt2e(prepared))

    def open_size(size: int) -> Call:
        torch.compiler.reset()  # no guards of the other sizes
        compiled: Any = torch.compile(converted, dynamic=False)
        return Call(prepare, lambda inputs: compiled(*inputs))

    return open_size


PEERS: dict[str, Callable[[Any], Opened]] = {
    **{name: one_model.PEERS[name] for name in one_model.PEERS if not name.startswith(("torch", "tensorflow"))},
    "torch-int8": torch_int8,
}


class Engine(one_model.Engine):
    """One engine in its own process."""

    def open(self) -> None:
        """Read, quantize, or whatever the engine wants once."""
        self.opened = cache(PEERS[self.name](self.work))


def compare(
    model: str | Path, sizes: Sequence[int] = (512, 1), peers: Sequence[str] = tuple(PEERS), rounds: int = 15
) -> dict[str, Any]:
    """All `peers` in turn, for every batch size; see `wide_deep.compare`."""
    harness.require_known("engine", peers, PEERS)
    if min([*sizes, rounds]) < 1:
        raise RequestError(f"batch sizes {', '.join(map(str, sizes))} and rounds {rounds} must all be 1 or more")
    folder = zoo.load(model)
    if folder.entry.name not in NETWORKS:
        raise RequestError(f"{model} is a {folder.entry.name} model; wanted one of {', '.join(NETWORKS)}")
    core = max(os.sched_getaffinity(0))
    results: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, harness.Workers() as workers:
        work = Work(str(model), Path(scratch))
        if {"onnxruntime-int8", "openvino-qdq"} & set(peers):
            one_model.stock_quantize(work.fp32, work.stock, work.samples())
        for name in dict.fromkeys(peers):
            made, log = partial(Engine, name, work), work.scratch / f"{name}.log"  # type: ignore[arg-type]
            workers.live[name] = harness.Worker(made, core, log, TORCHINDUCTOR_CACHE_DIR=str(work.scratch / "inductor"))
            workers.ask(name, "open")
        with progress("rounds", len(sizes) * rounds) as advance:
            for size in sizes:
                found = workers.ask_all("begin", "log", size)
                turns: dict[str, list[one_model.Turn]] = {name: [] for name in found}
                for _ in range(rounds):
                    for name, turn in workers.ask_all("turn").items():
                        turns[name].append(turn)
                    advance(1)
                memory = workers.ask_all("memory")
                for name in memory:
                    error = float(np.abs(found[name] - found[one_model.REFERENCE]).max())
                    summary = one_model.summary(size, turns[name])
                    results.append({"engine": name, "ids": "log", "batch_size": size, **summary})
                    results[-1] |= {"max_probability": float(f"{error:.2e}"), "memory_mb": memory[name]}
                ratios += [{"batch_size": size, **each} for each in one_model.speedups({n: turns[n] for n in memory})]
    if not results:
        raise ZooError("no engine could be opened")
    return {
        "model": folder.card.name,
        "family": folder.entry.name,
        "results": results,
        "ratios": ratios,
        "left_out": workers.left_out,
    }


def deepctr(first: Path, last: Path) -> dict[str, Any]:
    """Wide & Deep, DeepFM and DCN of DeepCTR-Torch on the same rows: trained on the log `first`, judged on `last`.

    As its documentation does: embeddings of 16, layers of 256 and 128, dropout 0.3, Adam, batches of 256; the best of
    four epochs on the last rows themselves. Columns are as the schema has them. {} where it is not installed.
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
    for each in features.fields:
        plain = SparseFeat(each.name, each.rows + 1, embedding_dim=16)  # id 0 is its padding
        columns.append(VarLenSparseFeat(plain, each.width, combiner="mean") if each.is_list else plain)
    columns += [DenseFeat(f"number {at}", 1) for at in range(features.shape[1])]

    def read(path: Path) -> tuple[dict[str, Array], Any]:
        rows = Rows.concatenate(list(features.read(path, labelled=True)))
        found = {f"number {at}": rows.numbers[:, at] for at in range(features.shape[1])}
        for each in features.fields:
            ids = rows.ids[:, each.start : each.start + each.width]
            found[each.name] = np.where(ids == each.last, 0, ids + 1) if each.is_list else ids[:, 0]
        return found, rows.labels

    (x, y), (asked, labels) = read(first), read(last)
    results = {}
    for name, build in (("wide-deep", WDL), ("deepfm", DeepFM), ("dcn", DCN)):
        torch.manual_seed(0)
        model = build(columns, columns, dnn_hidden_units=(256, 128), dnn_dropout=0.3, task="binary", seed=0)
        model.compile("adam", "binary_crossentropy", metrics=[])
        epochs = []
        for _ in range(4):
            model.fit(x, y, batch_size=256, epochs=1, verbose=0)
            epochs.append(click_metrics(labels, model.predict(asked, 4096).ravel().astype(np.float64)))
        results[name] = max(epochs, key=lambda metrics: metrics["auc"])
    return results


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    return "\n\n".join(f"{each['family']}\n{one_model.table(each)}" for each in report["models"])


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("models", nargs="+", help="model folders")
    parser.add_argument("--batch-size", default="512,1", help="several with commas (default 512,1)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--rounds", default="15", help="turns of each engine (default 15)")
    with harness.one_line("click_models"):
        args = parser.parse_args()
        sizes, (rounds, *_) = harness.numbers("batch size", args.batch_size), harness.numbers("rounds", args.rounds)
        names = harness.listed("engine", args.peers)
        where = machine.environment(threads=1, rounds=rounds, peers=harness.versions(*one_model.PACKAGES))
        report = harness.gather(
            "models", args.models, lambda model: compare(model, sizes, names, rounds), args.output, where
        )
        if args.output:
            files.write_json(args.output, report)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()

"""Tables of docs/benchmarks/custom-log.md.

The public functions take the content of a report and its source (CPU and link), and return Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.analysis import markdown

Model = Mapping[str, Any]
RANKED = {"recall@10": "recall@10", "recall@50": "recall@50", "ndcg@10": "NDCG@10", "mrr": "MRR"}


def trained(report: Mapping[str, Any], source: str) -> str:
    """Renders quality and speed of trained families: those of one label, of several labels, and of next items.

    report: {"data", "models", "deepctr", "left_out"}, see `scripts/reproduction/recommenders.py`. A model with a
    "commit" was measured at that commit, all others at that of the report.
    """
    models: Sequence[Model] = report["models"]
    several = [model for model in models if "labels" in model["quality"]]
    ranked = [model for model in models if "mrr" in model["quality"]["metrics"]["fp32"]]
    one = [model for model in models if model not in several and model not in ranked]
    deepctr: Mapping[str, Any] = report.get("deepctr", {})
    peers = {name: best for name, best in deepctr.items() if "labels" not in best}
    joint = {name: best["labels"] for name, best in deepctr.items() if "labels" in best}
    said = ", ".join(f"{name} {best['auc']:.4f} / {best['logloss']:.4f}" for name, best in peers.items())
    peer = f" DeepCTR-Torch on the same rows, best of four epochs: {said}." if said else ""
    peer += markdown.earlier(models) + _left_out(report)
    head = (
        "Trained with the default recipes on a log with user, item and list columns, evaluated on "
        f"{report['data']}; int8 in the native engine, engines interleaved, {source}.{peer}\n\n"
    )
    sizes = _sizes(one)
    columns = ["family", "AUC / LogLoss", "AUC, int8 - fp32", "max probability error", *_speed_columns(sizes)]
    parts = [head + markdown.table(columns, [[m["model"], *_clicks(m), *_speeds(m, sizes)] for m in one])]
    if several:
        sizes = _sizes(several)
        names = list(several[0]["quality"]["labels"])
        said = ", ".join(
            f"{name} " + " / ".join(f"{labels[label]['auc']:.4f}" for label in names) for name, labels in joint.items()
        )
        peer = f" DeepCTR-Torch on the same rows, best of four epochs: {said}." if said else ""
        columns = ["family", f"AUC of {' / '.join(names)}", "AUC, int8 - fp32", "max probability error"]
        rows = [[model["model"], *_labels(model, names), *_speeds(model, sizes)] for model in several]
        table = markdown.table([*columns, *_speed_columns(sizes)], rows)
        parts.append(f"Several labels, trained together on the same rows.{peer}\n\n{table}")
    if ranked:
        sizes = _sizes(ranked)
        columns = ["family", *RANKED.values(), "recall@10, int8 - fp32", "max probability error"]
        rows = [[model["model"], *_next_items(model), *_speeds(model, sizes)] for model in ranked]
        table = markdown.table([*columns, *_speed_columns(sizes)], rows)
        count = ranked[0]["quality"].get("next_items", 0)
        parts.append(
            f"Next items: the rank of the clicked item, in {count:,} rows, among all known items outside the "
            f"history.\n\n{table}"
        )
    return "\n".join(parts)


def _left_out(report: Mapping[str, Any]) -> str:
    """Returns sentences on peers that were measured with some families alone, and on peers that failed."""
    timed = {model["model"]: {row["engine"] for row in model.get("results", ())} for model in report["models"]}
    reasons = [(why, name, "") for name, why in report.get("left_out", {}).items()]
    reasons += [(why, name, m["model"]) for m in report["models"] for name, why in m.get("left_out", {}).items()]
    failed: dict[tuple[str, str], list[str]] = {}
    for why, name, family in reasons:
        failed.setdefault((name, why), []).append(family)
    text = ""
    for engine in sorted(set().union(*timed.values())):
        models = [name for name, engines in timed.items() if engine in engines]
        if len(models) < len(timed) and not any(name == engine for name, _ in failed):
            text += f" {engine} was measured with {', '.join(models)} alone."
    for (name, why), models in failed.items():
        where = f" with {', '.join(models)}" if any(models) and len(models) < len(timed) else ""
        text += f" {name} failed{where}: {markdown.reason(why)}."
    return text


def _clicks(model: Model) -> list[str]:
    """Cells of a family of one label."""
    fp32, moved = model["quality"]["metrics"]["fp32"], model["quality"]["native"]["difference"]
    return [
        f"{fp32['auc']:.4f} / {fp32['logloss']:.4f}",
        f"{moved['auc']:+.5f}",
        f"{moved['max_probability']:.4f}",
    ]


def _labels(model: Model, names: Sequence[str]) -> list[str]:
    """Cells of a family of several labels."""
    labels, native = model["quality"]["labels"], model["quality"]["native"]["labels"]
    moved = [native[name]["difference"] for name in names]
    return [
        " / ".join(f"{labels[name]['metrics']['fp32']['auc']:.4f}" for name in names),
        " / ".join(f"{change['auc']:+.5f}" for change in moved),
        f"{max(change['max_probability'] for change in moved):.4f}",
    ]


def _next_items(model: Model) -> list[str]:
    """Cells of a next-item family."""
    fp32, moved = model["quality"]["metrics"]["fp32"], model["quality"]["native"]["difference"]
    return [
        *(f"{fp32[name]:.4f}" for name in RANKED),
        f"{moved['recall@10']:+.4f}",
        f"{moved['max_probability']:.4f}",
    ]


def _sizes(models: Sequence[Model]) -> list[int]:
    """Batch sizes at which a model was timed, the largest first."""
    return sorted({ratio["batch_size"] for model in models for ratio in model.get("ratios", ())}, reverse=True)


def _speed_columns(sizes: Sequence[int]) -> list[str]:
    return [f"batch {size}: speed-up over the best peer" for size in sizes]


def _speeds(model: Model, sizes: Sequence[int]) -> list[str]:
    """Speed-up over the best peer at every batch size, and that peer; "" where the model was not timed."""
    best = (_over_best(model, size) if model.get("ratios") else None for size in sizes)
    return ["" if pair is None else f"{pair[0]:.2f}x {pair[1]}" for pair in best]


def reading(report: Mapping[str, Any], source: str) -> str:
    """Renders the log reader compared with peers, file to arrays.

    report: {"rows", "shapes"}, see `scripts/peers/recommenders/log_reading.py`.
    """
    rows = []
    for shape in report["shapes"]:
        (other, ratio), quarter_and_all = next(iter(shape["over"].items())), shape["peak_memory_mb"]
        memory = " / ".join(f"{megabytes:,.0f}" for megabytes in quarter_and_all)
        speeds = {row["way"]: f"{row['rows_per_second']:,}" for row in shape["results"]}
        ours = next(speed for way, speed in speeds.items() if way != other)
        rows.append([shape["shape"], f"{shape['megabytes']:,.0f}", other, speeds[other], ours, f"{ratio:.2f}x", memory])
    columns = ["log", "MB", "peer", "peer, rows/s", "zoo, rows/s", "speed-up", "peak MB, quarter / all rows"]
    return (
        f"Logs of {report['rows']:,} synthetic rows read to arrays by `scripts/peers/recommenders/log_reading.py` "
        f"({source}): Criteo's format against its dedicated reader, custom "
        "columns against pandas with a hash per column.\n\n" + markdown.table(columns, rows)
    )


WAYS = {
    "native run": ":run, JSON",
    "native run csv": ":run, CSV",
    "onnxruntime run": ":run, JSON, ONNX Runtime fp32",
    "onnxruntime run csv": ":run, CSV, ONNX Runtime fp32",
    "openvino nncf run": ":run, JSON, OpenVINO, NNCF",
    "openvino nncf run csv": ":run, CSV, OpenVINO, NNCF",
    "rank rows": ":rank, rows of items",
    "rank ids": ":rank, ids of a catalogue",
}


MODEL_COLUMNS = ["user's columns", "full rows", "rank", "layers of it, full rows", "layers of it, rank", "speed-up"]
LOOKUPS = ("Gather", "LookupSum", "Numbers")


def _layers(steps: Sequence[Mapping[str, Any]], way: str) -> float:
    """Returns the share of a program's time that is not spent on lookups."""
    layers = sum(step[way] for step in steps if step["step"].split()[0] not in LOOKUPS)
    return layers / sum(step[way] for step in steps)


def ranking(report: Mapping[str, Any], source: str) -> str:
    """Renders rankings of one user's candidates compared with full rows.

    report: {"models"}, see `scripts/peers/recommenders/ranking.py`.
    """
    models: Sequence[Model] = report["models"]
    ways = [way for way in WAYS if way in models[0]["http_cpu_ms"]]
    inside = [
        [
            model["model"],
            f"{model['user_columns']:.0%}",
            *(f"{model['ms'][way]['median']:.3f}" for way in ("full rows", "rank rows", "rank ids")),
            *(f"{model['ratios'][way]:.2f}x" for way in ("rank rows", "rank ids")),
        ]
        for model in models
    ]
    computed = [
        [
            model["model"],
            f"{model['user_columns']:.0%}",
            *(f"{model['ms'][way]['median']:.3f}" for way in ("model, full rows", "model, shared")),
            *(f"{_layers(model['steps'], way):.0%}" for way in ("full rows", "shared")),
            f"{model['ratios']['model']:.2f}x",
        ]
        for model in models
    ]
    served = [
        [model["model"], *(f"{model['http_cpu_ms'][way]['median']:.2f}" for way in ways)]
        for model in models
        if model["http_cpu_ms"]
    ]
    columns = ["family", "user's columns", "full rows", "rank, rows", "rank, ids", "rows: speed-up", "ids: speed-up"]
    return (
        f"One user and {models[0]['candidates']} candidates by `scripts/peers/recommenders/ranking.py` ({source}): CPU "
        "time in ms, interleaved: Python rows to probabilities, and `rank` to the ten best items.\n\n"
        f"{markdown.table(columns, inside)}\n"
        "The model alone, from encoded rows to probabilities. Candidates share the user's part of the first layer; the "
        "other layers are computed for every candidate and bound the speed-up.\n\n"
        f"{markdown.table(['family', *MODEL_COLUMNS], computed)}\n"
        "Over HTTP: CPU time of the server in ms per request, one client. Full rows are sent to `:run`, also to the "
        "other engines.\n\n" + markdown.table(["family", *(WAYS[way] for way in ways)], served)
    )


def retrieval(report: Mapping[str, Any], source: str) -> str:
    """Renders retrieval from a large catalogue and ranking of its candidates, compared with FAISS.

    report: {"ranker", "vector_size", "items", "candidates", "ways"}, see `scripts/peers/recommenders/retrieval.py`.
    """
    rows = [
        [
            way["way"],
            *(f"{way[clock][share]:.1f}" for clock in ("cpu_ms", "ms") for share in ("p50", "p99")),
            f"{way['cpu_ratio']:.2f}x",
            f"{way['candidates']:.1%}",
            f"{way['best']:.1%}",
        ]
        for way in report["ways"]
    ]
    columns = ["way", "CPU ms, p50", "CPU ms, p99", "wall ms, p50", "wall ms, p99", "CPU time over ours"]
    columns += ["candidates of exact float search", "best ten of all candidates"]
    return (
        f"The best ten of {report['items']:,} items for one user, by `scripts/peers/recommenders/retrieval.py` "
        f"({source}): {report['candidates']:,} candidates by vectors of {report['vector_size']} numbers, ranked by "
        f"{report['ranker']}. {_shared(report['environment'])}\n\n" + markdown.table(columns, rows)
    )


def new_ids(report: Mapping[str, Any], source: str) -> str:
    """Renders trainings day after day, by the start of new ids.

    report: {"models", ...}, see `scripts/reproduction/recommenders.py`.
    """
    models: Sequence[Model] = report["models"]
    ways = list(models[0]["auc"])
    rows = [
        [model["model"], what, *(f"{np.median(model[key][way]):.4f}" for way in ways)]
        for model in models
        for what, key in (("all", "auc"), ("of new ids", "auc_new"))
    ]
    names = [f"day after day, `new_ids={way}`" if way in ("unknown", "similar") else way for way in ways]
    regained = []
    for model in models:
        whole, first, *daily = (float(np.median(model["auc"][way])) for way in ways)
        regained.append((max(daily) - first) / (whole - first))
    return (
        f"Training day after day regains {min(regained):.0%} to {max(regained):.0%} of the AUC that one training on "
        "all days has over the first day alone.\n\n"
        f"Logs of {report['days']} days by `scripts/reproduction/recommenders.py` ({source}), {report['rows']:,} rows "
        f"each, with {report['users']} new users and {report['items']} new items a day: AUC on {report['judged']:,} "
        f"held-out rows, and on the {report['new']:,} of these rows with a new user or item on the last day; "
        f"medians of {report['environment']['rounds']} seeds.\n\n{markdown.table(['family', 'rows', *names], rows)}"
    )


def _shared(environment: Mapping[str, Any]) -> str:
    """Returns how a comparison shared the machine."""
    if environment.get("scheduler", "other") == "other":
        return "Other processes shared the machine."
    return f"Other processes shared the machine, but not the core (scheduler: {environment['scheduler']})."


def _over_best(model: Mapping[str, Any], size: int) -> tuple[float, str]:
    """Returns the speed-up of the native kernels over the fastest peer, and that peer."""
    (over,) = (r["over"] for r in model["ratios"] if (r["engine"], r["batch_size"]) == ("zoo-native", size))
    timed = {peer: ratio for peer, ratio in over.items() if ratio is not None}  # null: never timed
    peer = min(timed, key=timed.__getitem__)
    return float(timed[peer]), peer

"""Image classifiers in MODELS.md and docs/benchmarks/, rendered from report files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zoo
from pipelines.analysis import markdown
from pipelines.models.hub import Hub

OVERVIEW = "ms per photo, JPEG to label"


def overview(name: str) -> dict[str, str]:
    """Returns the cells of a model in the overview table.

    Args:
        name: Name of the model.

    Returns:
        {column: cell}; {} if nothing was measured.
    """
    measured = _reports(name)
    if not measured:
        return {}
    report = markdown.newest(measured)
    int8 = _quickest(report, "int8")
    top1 = " / ".join(f"{100 * report.content['quality']['metrics'][name]['top1']:.2f}" for name in ("fp32", "int8"))
    return {
        "top-1, %": top1,
        **{markdown.cpu_column(report): _speed_up(report) for report in measured},
        "MB": f"{_quickest(report, 'fp32')['model_mb']:.1f} / {int8['model_mb']:.1f}",
    }


def _speed_up(report: markdown.Report) -> str:
    """The latency of int8 from JPEG to label and its ratio to fp32, each in its fastest engine."""
    int8, fp32 = (_quickest(report, name) for name in ("int8", "fp32"))
    latency = int8["latency_ms"]["p50"]
    return f"{latency:.2f} ({fp32['latency_ms']['p50'] / latency:.2f}x)"


def sections(name: str) -> str:
    """Renders the section of a model in MODELS.md.

    Args:
        name: Name of the model.

    Returns:
        Markdown, without the heading.
    """
    spec = Hub(zoo.SHIPPED).card(name).details["preprocessing"]
    mean, deviation = (", ".join(f"{value:.4g}" for value in spec[key]) for key in ("mean", "std"))
    lines = [
        f"- **Run:** `zoo run {name} photos/ -o labels.csv`",
        f"- **Input:** images; shorter side resized to {spec['resize']} pixels ({spec['interpolation']}), centre crop "
        f"{spec['size']} x {spec['size']}, {spec['channels']}. The graph takes uint8 pixels and normalizes them "
        f"(0 to 1, mean {mean}, standard deviation {deviation})",
    ]
    if not (measured := _reports(name)):
        return "\n".join([*lines, "- **Quality, speed:** not measured\n"])
    report = markdown.newest(measured)
    return "\n".join([*lines, _quality(report), *map(_speed_by_engine, measured)])


def benchmarks(names: Sequence[str]) -> str:
    """Renders the page of image classifiers in docs/benchmarks/.

    Args:
        names: Names of the models.

    Returns:
        Markdown; "" if nothing was measured.
    """
    measured = [(name, report) for name in names for report in _reports(name)]
    pipelines = [_peer_pipelines(report) for report in markdown.reports(markdown.PEERS, "images")]
    networks = [_networks_alone(report) for report in markdown.reports(markdown.PEERS, "image-networks")]
    quantizers = [_peer_quantizers(report) for report in markdown.reports(markdown.PEERS, "vision")]
    parts = [
        *(["## From JPEG to label\n", _pipelines(measured)] if measured else []),
        *(["## Peer pipelines\n", *pipelines] if pipelines else []),
        *(["## Networks\n", *networks] if networks else []),
        *(["## Quantizers\n", _best_quantizers(), *quantizers] if quantizers else []),
    ]
    return "\n".join(["# Image classification\n", *parts]) if parts else ""


def _reports(name: str) -> list[markdown.Report]:
    return markdown.reports(zoo.SHIPPED / name / "reports", "images")


def _quickest(report: markdown.Report, precision: str) -> dict[str, Any]:
    """The result of the engine with the lowest latency from JPEG to label."""
    results = [result for result in report.content["results"] if result["precision"] == precision]
    return min(results, key=lambda result: float(result["latency_ms"]["p50"]))


def _quality(report: markdown.Report) -> str:
    quality = report.content["quality"]
    shares = {
        key: " -> ".join(f"{100 * quality['metrics'][precision][key]:.2f}%" for precision in ("fp32", "int8"))
        for key in ("top1", "top5")
    }
    low, high = (100 * bound for bound in quality["interval"]["agreement"])
    return (
        f"- **Quality** on {report.content['data']}, fp32 -> int8: top-1 {shares['top1']}, top-5 {shares['top5']}; "
        f"label agreement {100 * quality['difference']['agreement']:.2f}% (95% interval {low:.2f} to {high:.2f})"
    )


def _speed_by_engine(report: markdown.Report) -> str:
    results = {(result["precision"], result["engine"]): result for result in report.content["results"]}
    rows = []
    for engine in sorted({engine for _, engine in results}):
        fp32, int8 = results.get(("fp32", engine)), results["int8", engine]
        before = (fp32 or _quickest(report, "fp32"))["latency_ms"]["p50"]
        latency = int8["latency_ms"]["p50"]
        rates = [f"{entry['offline']['images_per_second']:,.0f}" if entry else "-" for entry in (fp32, int8)]
        cells = [f"{before:.2f}" if fp32 else "-", f"{latency:.2f}", f"{before / latency:.2f}x", " / ".join(rates)]
        rows.append([engine, *cells])
    columns = [
        "engine",
        "fp32 ms",
        "int8 ms",
        "int8 speed-up (native: over the faster fp32)",
        "stream, images/s, fp32 / int8",
    ]
    return (
        f"- **Speed** from JPEG to label, single photos ({markdown.source(report, markdown.MODELS)}):\n\n"
        + markdown.table(columns, rows)
    )


def _pipelines(measured: Sequence[tuple[str, markdown.Report]]) -> str:
    """Latency of models from JPEG to label, split by stage: a table per CPU."""
    data: dict[str, dict[str, None]] = {}
    for name, report in measured:
        data.setdefault(report.content["data"], {})[name] = None
    parts = ["Single photos:\n", *(f"- {', '.join(names)}: {text}" for text, names in data.items()), ""]
    for name in dict.fromkeys(markdown.cpu(report) for _, report in measured):
        group = [(model, report) for model, report in measured if markdown.cpu(report) == name]
        place = markdown.source(group[0][1], markdown.BENCHMARKS).rpartition(", ")[0]
        links = ", ".join(markdown.link(report.path, markdown.BENCHMARKS, model) for model, report in group)
        parts.append(f"On {place}, {links}:\n\n{_stages(group)}")
    return "\n".join(parts)


def _stages(measured: Sequence[tuple[str, markdown.Report]]) -> str:
    """The table of models on one CPU."""
    rows = []
    for name, report in measured:
        fp32 = _quickest(report, "fp32")["latency_ms"]["p50"]
        for result in sorted(report.content["results"], key=lambda e: (e["precision"], e["engine"])):
            metrics = report.content["quality"]["metrics"][result["precision"]]
            stages = ("decode", "preprocess", "model", "postprocess")
            rows.append(
                [
                    name,
                    result["precision"],
                    result["engine"],
                    *(f"{100 * metrics[key]:.2f}" for key in ("top1", "top5")),
                    " / ".join(f"{result['latency_ms'][key]:.2f}" for key in ("p50", "p90", "p99")),
                    f"{fp32 / result['latency_ms']['p50']:.2f}x",
                    " / ".join(f"{result['split_ms'][stage]:.2f}" for stage in stages),
                    f"{result['offline']['images_per_second']:,.0f} ({result['offline']['batch_size']})",
                    f"{result['model_mb']:.1f} / {result['memory_mb']:.0f}",
                ]
            )
    columns = [
        "model",
        "precision",
        "engine",
        "top-1 %",
        "top-5 %",
        "JPEG to label, p50 / p90 / p99 ms",
        "speed-up over the faster fp32",
        "decode / resize / model / post ms",
        "stream, images/s (batch size)",
        "file / process MB",
    ]
    return markdown.table(columns, rows)


def _peer_pipelines(report: markdown.Report) -> str:
    """JPEG to label: this project and peer pipelines."""
    rows = []
    for model in report.content["models"]:
        for result in model["results"]:
            times = [f"{result['ms'][key]['median']:.2f}" for key in ("whole", "prepare", "model", "model_only")]
            ratio = model["ours"].get(result["system"])
            gain = [f"{ratio['times_as_fast']:.2f}x", f"{100 * ratio['same_labels']:.1f}"] if ratio else ["", ""]
            as_fp32 = f"{100 * result['labels_as_fp32']:.1f}"
            rows.append([model["model"], result["system"], *times, *gain, as_fp32])
    columns = [
        "model",
        "pipeline",
        "JPEG to label, ms",
        "decode and resize",
        "model",
        "model only, warm",
        "speed-up of zoo-int8",
        "label agreement with zoo-int8, %",
        "label agreement with zoo-fp32, %",
    ]
    photos = report.content["models"][0]["photos"]
    count = photos["tested"]
    timed = f" of {photos['timed']} of them" if photos.get("timed", count) < count else ""
    return (
        f"Peers are Pillow, NumPy and the peer's engine. Same weights, {count} single photos, interleaved, medians of "
        f"CPU time{timed}, by `scripts/peers/vision/images.py` "
        f"({markdown.source(report, markdown.BENCHMARKS)}).\n\n" + markdown.table(columns, rows)
    )


def _networks_alone(report: markdown.Report) -> str:
    """Networks in the native kernels and in other engines: batches, threads, first call, peak throughput."""
    engines = ("onnxruntime", "openvino", "openvino-nncf", "litert")
    rows = []
    for model in report.content["models"]:
        two = model.get("two_threads", {})
        parts = {
            "batch 1": model["batch_1"],
            "batch 16": model["batch_16"],
            "batch 1, two threads, wall clock": two.get("batch_1"),
            "batch 16, two threads, wall clock": two.get("batch_16"),
            "batch 1, AVX2 only, 7-bit weights": model["avx2"],
            "batch 1, AVX2 only, 8-bit weights": model["avx2_8_bits"],
        }
        for part, times in parts.items():
            if times:
                peers = [
                    f"{times[peer]['ms']['median']:.2f} ({times[peer]['native_is']:.2f}x)" if peer in times else ""
                    for peer in engines
                ]
                rows.append([model["model"], part, f"{times['native']['ms']['median']:.2f}", *peers])
        first = {
            name: [call[key]["median"] for key in ("ms", "megabytes")] for name, call in model["first_call"].items()
        }
        rows.append(
            [
                model["model"],
                "first call of a process, ms; MB (PSS)",
                *("{:.0f}; {:.0f}".format(*first[name]) if name in first else "" for name in ("native", *engines)),
            ]
        )
    limits = "; ".join(
        f"{model['model']} {model['gmac_per_second']:.0f} of {model['limit_gmac_per_second']:.0f} GMAC/s "
        f"({model['share']:.2f})"
        for model in report.content["models"]
    )
    labels = "; ".join(
        f"{model['model']} {model['labels']['equal']} of {model['labels']['photos']} photos"
        for model in report.content["models"]
    )
    return (
        "Milliseconds per image; in brackets the speed-up of the native kernels. native, onnxruntime and openvino run "
        "this project's int8.onnx, the others their own quantized files. Interleaved in one process, by "
        f"`scripts/peers/vision/image_networks.py` ({markdown.source(report, markdown.BENCHMARKS)}).\n\n"
        f"- Multiply-accumulates per second, of the peak of int8 instructions on this core: {limits}.\n"
        f"- Labels equal to ONNX Runtime's: {labels}.\n"
        "- With AVX2 only, OpenVINO's sums saturate unless weights have 7 bits (`zoo quantize --reduced-range`).\n"
        "  The native kernels are exact with 8.\n\n" + markdown.table(["network", "load", "native", *engines], rows)
    )


def _best_quantizers() -> str:
    """Agreement and SQNR of this project's file and of the best file of a peer, per network and CPU."""
    rows, higher = [], {"agreement": 0, "sqnr_db": 0}
    for report in markdown.reports(markdown.PEERS, "vision"):
        for model in report.content["models"]:
            cells = [model["model"], markdown.cpu(report)]
            for key, form in (("agreement", ".2f"), ("sqnr_db", ".1f")):
                values: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
                for result in model["results"]:
                    for metrics in result["accuracy"].values():
                        values[result["setting"] == "zoo"].append((metrics[key], result["setting"]))
                higher[key] += max(values[True])[0] > max(values[False])[0]
                cells += [f"{max(values[True])[0]:{form}}", "{:{form}} ({})".format(*max(values[False]), form=form)]
            rows.append(cells)
    columns = ["network", "CPU", "agreement, %: zoo", "best peer", "SQNR, dB: zoo", "best peer"]
    return (
        f"`zoo quantize` agrees more often with fp32 than the best peer in {higher['agreement']} of {len(rows)} "
        f"cases, and has the higher SQNR in {higher['sqnr_db']}.\n\n"
        "The best file of `zoo quantize` and of its peers, each in its best engine.\n\n" + markdown.table(columns, rows)
    )


def _peer_quantizers(report: markdown.Report) -> str:
    """This project's quantizer and its peers, per network and setting."""
    rows = []
    for model in report.content["models"]:
        for result in model["results"]:
            medians = []
            for engine in ("onnxruntime", "openvino"):
                timing = model["milliseconds"].get(engine, {}).get(result["setting"])
                medians.append(f"{timing['median']:.2f}" if timing else "")
            for engine_name, metrics in result["accuracy"].items():
                shares = [f"{metrics[key]:.2f}" for key in ("drop", "agreement", "agreement_of_views")]
                cells = [*shares, f"{metrics['sqnr_db']:.1f}", *medians, f"{result['peak_mb']:,.0f}"]
                rows.append([model["model"], result["setting"], engine_name, *cells])
    columns = [
        "network",
        "setting",
        "evaluated in",
        "top-1 drop",
        "agreement, %",
        "agreement over views, %",
        "SQNR, dB",
        "onnxruntime, ms",
        "OpenVINO, ms",
        "peak MB",
    ]
    counts = report.content["models"][0]["photos"]
    return (
        f"Post-training quantization of the same float files, calibrated on {counts['calibration']} photos, evaluated "
        f"on {counts['test']} others, batch size 1, interleaved, by `scripts/peers/quantization/vision.py` "
        f"({markdown.source(report, markdown.BENCHMARKS)}). `zoo` is `zoo quantize --search`. "
        "Agreement: labels equal to fp32's, of the photos and of five views of each photo; one photo is "
        f"{100 / counts['test']:.2f} points. SQNR: of the logits. peak MB: memory of quantization.\n\n"
        + markdown.table(columns, rows)
    )

"""What the pages of the zoo show of image classifiers, rendered from their report files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zoo
from pipelines.analysis.markdown import Report, by_cpu, cpu_name, newest, reports, source, table
from pipelines.models.hub import Hub

ROOT = zoo.SHIPPED.parents[1]
MODELS = ROOT / "MODELS.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PEERS = ROOT / "scripts" / "peers" / "reports"


def overview(name: str) -> dict[str, str]:
    """The model's cells in the overview, by column."""
    measured = _reports(name)
    if not measured:
        return {}
    report = newest(measured)
    int8 = _quickest(report, "int8")
    top1 = " / ".join(f"{100 * report.content['quality']['metrics'][each]['top1']:.2f}%" for each in ("fp32", "int8"))
    return {
        "quality, fp32 / int8": f"top-1 {top1}",
        "speed-up": by_cpu((each, _speed_up(each)) for each in measured),
        "MB, fp32 / int8": f"{_quickest(report, 'fp32')['model_mb']:.1f} / {int8['model_mb']:.1f}",
    }


def _speed_up(report: Report) -> str:
    """int8 to fp32 from JPEG to label, each in its quickest engine."""
    int8, fp32 = (_quickest(report, each) for each in ("int8", "fp32"))
    latency = int8["latency_ms"]["p50"]
    return f"{fp32['latency_ms']['p50'] / latency:.2f}x: {latency:.2f} ms a photo, {int8['engine']}"


def headline(name: str) -> list[str]:
    """README's line about the model: images a second from JPEG to label, and the gain over the peers' pipelines."""
    lines = []
    for report in reports(PEERS, "images"):
        for model in (model for model in report.content["models"] if model["model"] == name):
            results = {result["system"]: result for result in model["results"]}
            same = {system: f"{100 * result['labels_as_fp32']:.1f}%" for system, result in results.items()}
            gains = ", ".join(
                f"{ratio['times_as_fast']:.2f}x Pillow and {peer} ({same[peer]})"
                for peer, ratio in model["ours"].items()
                if "int8" in peer
            )
            lines.append(
                f"- **{name}** ({cpu_name(report)}, one thread): from JPEG to label "
                f"{results['zoo-int8']['images_per_second']:,.0f} images/s, "
                f"fp32's label on {same['zoo-int8']} of the photos; {gains}."
            )
    return lines


def sections(name: str) -> str:
    """The model's own part of its section in MODELS.md."""
    spec = Hub(zoo.SHIPPED).card(name).details["preprocessing"]
    mean, deviation = (", ".join(f"{value:.4g}" for value in spec[key]) for key in ("mean", "std"))
    lines = [
        f"- **Run:** `zoo run {name} photos/ -o labels.csv`",
        f"- **Input:** images, the shorter side resized to {spec['resize']} pixels ({spec['interpolation']}), the "
        f"{spec['size']} x {spec['size']} in the centre, {spec['channels']}; the graph takes them as uint8 and "
        f"normalizes them (0 to 1, mean {mean}, standard deviation {deviation})",
    ]
    if not (measured := _reports(name)):
        return "\n".join([*lines, "- **Quality, speed:** not measured\n"])
    report = newest(measured)
    return "\n".join([*lines, _quality(report), *map(_speed_by_engine, measured)])


def benchmarks(names: Sequence[str]) -> str:
    """The part of docs/benchmarks.md about the image classifiers called `names`."""
    measured = [(name, report) for name in names for report in _reports(name)]
    pipelines = [_beside_pipelines(report) for report in reports(PEERS, "images")]
    networks = [_networks_alone(report) for report in reports(PEERS, "image-networks")]
    quantizers = [_beside_quantizers(report) for report in reports(PEERS, "vision")]
    parts = [
        *(["### From JPEG to label\n", _pipelines(measured)] if measured else []),
        *(["### Beside other pipelines\n", *pipelines] if pipelines else []),
        *(["### Networks alone\n", *networks] if networks else []),
        *(["### The quantizer beside others\n", *quantizers] if quantizers else []),
    ]
    return "\n".join(["## Image classification\n", *parts]) if parts else ""


def _reports(name: str) -> list[Report]:
    return reports(zoo.SHIPPED / name / "reports", "images")


def _quickest(report: Report, precision: str) -> dict[str, Any]:
    """The result of the engine with the least latency from JPEG to label."""
    results = [result for result in report.content["results"] if result["precision"] == precision]
    return min(results, key=lambda result: float(result["latency_ms"]["p50"]))


def _quality(report: Report) -> str:
    quality = report.content["quality"]
    shares = {
        key: " -> ".join(f"{100 * quality['metrics'][precision][key]:.2f}%" for precision in ("fp32", "int8"))
        for key in ("top1", "top5")
    }
    low, high = (100 * bound for bound in quality["interval"]["agreement"])
    return (
        f"- **Quality** on {report.content['data']}, fp32 -> int8: top-1 {shares['top1']}, top-5 {shares['top5']}; the "
        f"same label for {100 * quality['difference']['agreement']:.2f}% of the photos (95% interval {low:.2f} to "
        f"{high:.2f})"
    )


def _speed_by_engine(report: Report) -> str:
    results = {(result["precision"], result["engine"]): result for result in report.content["results"]}
    rows = []
    for engine in sorted({engine for _, engine in results}):
        fp32, int8 = results.get(("fp32", engine)), results["int8", engine]
        before = (fp32 or _quickest(report, "fp32"))["latency_ms"]["p50"]
        latency = int8["latency_ms"]["p50"]
        rates = [f"{each['offline']['images_per_second']:,.0f}" if each else "-" for each in (fp32, int8)]
        cells = [f"{before:.2f}" if fp32 else "-", f"{latency:.2f}", f"{before / latency:.2f}x", " / ".join(rates)]
        rows.append([engine, *cells])
    columns = [
        "engine",
        "fp32 ms",
        "int8 ms",
        "int8 is (native: to the quicker fp32)",
        "images/s in a stream, fp32 / int8",
    ]
    return f"- **Speed** from JPEG to label, one photo at a time ({source(report, MODELS)}):\n\n" + table(columns, rows)


def _pipelines(measured: Sequence[tuple[str, Report]]) -> str:
    """Latency of models from JPEG to label, in parts."""
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
        "to the quicker fp32",
        "decode / resize / model / post ms",
        "images/s in a stream (batch size)",
        "file / process MB",
    ]
    sources = "\n".join(
        f"- {name}: {report.content['data']} ({source(report, BENCHMARKS)})" for name, report in measured
    )
    return f"One photo at a time.\n\n{sources}\n\n" + table(columns, rows)


def _beside_pipelines(report: Report) -> str:
    """JPEG bytes to label here and in the obvious pipelines of others."""
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
        "model alone, warm",
        "zoo-int8 is",
        "same label as zoo-int8, %",
        "same label as zoo-fp32, %",
    ]
    count = report.content["models"][0]["photos"]["tested"]
    return (
        f"The obvious pipelines (Pillow, numpy, the peer's engine) and this one: the same weights, {count} photos one "
        "by one, in turn, medians of processor time, by `scripts/peers/vision/images.py` "
        f"({source(report, BENCHMARKS)}).\n\n" + table(columns, rows)
    )


def _networks_alone(report: Report) -> str:
    """Networks in the native kernels and in other engines: batches, threads, the first call, the machine's limit."""
    engines = ("onnxruntime", "openvino", "openvino-nncf", "litert")
    rows = []
    for model in report.content["models"]:
        two = model.get("two_threads", {})
        parts = {
            "batch 1": model["batch_1"],
            "batch 16": model["batch_16"],
            "batch 1, two threads, by the clock": two.get("batch_1"),
            "batch 16, two threads, by the clock": two.get("batch_16"),
            "batch 1, AVX2 alone, weights of 7 bits": model["avx2"],
            "batch 1, AVX2 alone, of 8": model["avx2_8_bits"],
        }
        for part, found in parts.items():
            if found:
                beside = [
                    f"{found[each]['ms']['median']:.2f} ({found[each]['native_is']:.2f}x)" if each in found else ""
                    for each in engines
                ]
                rows.append([model["model"], part, f"{found['native']['ms']['median']:.2f}", *beside])
        first = {
            name: [each[key]["median"] for key in ("ms", "megabytes")] for name, each in model["first_call"].items()
        }
        rows.append(
            [
                model["model"],
                "first call of a process, ms; its MB (PSS)",
                *("{:.0f}; {:.0f}".format(*first[each]) if each in first else "" for each in ("native", *engines)),
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
        "Milliseconds an image of this project's int8.onnx in native kernels, onnxruntime and OpenVINO, and of the "
        "peers' own quantized files; in brackets how many times as fast the native kernels are. In turn within one "
        f"process, by `scripts/peers/vision/image_networks.py` ({source(report, BENCHMARKS)}). Products a second "
        "beside "
        f"those of int8 in registers alone, the limit of this core: {limits}. Labels equal to onnxruntime's: {labels}. "
        "Held to AVX2, OpenVINO's products saturate unless weights have 7 bits (`zoo quantize --reduced-range`); these "
        "are always exact.\n\n" + table(["network", "what", "native", *engines], rows)
    )


def _beside_quantizers(report: Report) -> str:
    """This project's quantizer beside others, per network and setting."""
    rows = []
    for model in report.content["models"]:
        for result in model["results"]:
            medians = []
            for engine in ("onnxruntime", "openvino"):
                timing = model["milliseconds"].get(engine, {}).get(result["setting"])
                medians.append(f"{timing['median']:.2f}" if timing else "")
            for judge, metrics in result["accuracy"].items():
                shares = [f"{metrics[key]:.2f}" for key in ("drop", "agreement", "agreement_of_views")]
                cells = [*shares, f"{metrics['sqnr_db']:.1f}", *medians, f"{result['peak_mb']:,.0f}"]
                rows.append([model["model"], result["setting"], judge, *cells])
    columns = [
        "network",
        "setting",
        "judged in",
        "top-1 drop",
        "agreement %",
        "of all views %",
        "SQNR dB",
        "ms in onnxruntime",
        "ms in OpenVINO",
        "MB",
    ]
    counts = report.content["models"][0]["photos"]
    return (
        f"Post-training quantization of the same float files, calibrated on {counts['calibration']} photos, judged on "
        f"{counts['test']} others, batch size 1, in turn, by `scripts/peers/quantization/vision.py` "
        f"({source(report, BENCHMARKS)}). `zoo` is `zoo quantize --search`. Agreement: share of labels equal to "
        "fp32's, where one photo is .25 points; over five views of each photo chance moves it less, and it moves the "
        "SQNR of the logits least. MB: peak memory of quantizing.\n\n" + table(columns, rows)
    )

"""The model card of a repository: README.md with a YAML header, usage, and tables of the model's reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.analysis import markdown
from pipelines.models.folder import ModelFolder
from zoo.huggingface.repository import Repository

LIBRARY = "int8-zoo"
REPORTS = "reports"  # folder of report files in a model folder
# https://huggingface.co/tasks, by the task of a family
PIPELINE_TAGS = {
    "clicks": "tabular-classification",
    "images": "image-classification",
    "translation": "translation",
    "embedding": "sentence-similarity",
    "sparse embedding": "feature-extraction",
    "late interaction": "feature-extraction",
    "ranking": "text-ranking",
    "fill-mask": "fill-mask",
    "text classification": "text-classification",
    "token classification": "token-classification",
    "question answering": "question-answering",
    "zero-shot classification": "zero-shot-classification",
}
TAGS = {"clicks": ["recommendation", "ctr-prediction"], "late interaction": ["late-interaction"]}
# https://huggingface.co/docs/hub/repositories-licenses, of the licences that cards name
LICENCES = (
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "gpl-3.0", "lgpl-3.0", "mpl-2.0"),
    *("cc-by-4.0", "cc-by-nc-4.0", "cc-by-sa-4.0", "cc0-1.0"),
)
METRICS = {"auc": "roc_auc", "top1": "accuracy", "spearman": "spearmanr"}  # names of the hub
RATES = ("samples_per_second", "rows_per_second", "sentences_per_second", "images_per_second", "texts_per_second")
SHOWN = ("fp32", "int8")  # precisions of the table of quality
_ORIGIN = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/resolve/")


@dataclass(frozen=True)
class Quality:
    """Metrics on one data set.

    Attributes:
        data: Name of the data.
        samples: Number of samples, None if unknown.
        metrics: {precision: {metric: value}}.
    """

    data: str
    samples: int | None
    metrics: Mapping[str, Mapping[str, float]]


def model_card(folder: ModelFolder, repository: Repository, reports: Path) -> str:
    """Writes the model card of a folder.

    Args:
        folder: Model folder with int8.onnx.
        repository: Repository that the folder goes to.
        reports: Folder of the model's report files; it may be missing.

    Returns:
        The text of README.md.

    Raises:
        RequestError: A report is no JSON file.
    """
    files = [file for file in markdown.reports(reports, "") if isinstance(file.content, dict)]
    qualities = list(_qualities(folder, [file.content for file in files]))
    parts = [
        f"---\n{_header(folder, qualities)}\n---\n",
        f"# {repository.name}\n\n{folder.card.description}\n\n{folder.entry.title}. INT8 for CPUs, by int8-zoo.\n",
        _usage(folder, repository),
        _quality(qualities),
        _speed(files),
        _facts(folder),
    ]
    return "\n".join(part for part in parts if part)


def _header(folder: ModelFolder, qualities: Sequence[Quality]) -> str:
    """Returns the metadata as YAML, without the lines around it."""
    from huggingface_hub import EvalResult, ModelCardData

    task, details = folder.entry.task, folder.card.details
    tag = PIPELINE_TAGS.get(task)
    results = [
        EvalResult(
            task_type=tag or task,
            dataset_type=re.sub(r"[^a-z0-9]+", "-", quality.data.lower()).strip("-")[:60],
            dataset_name=quality.data,
            metric_type=METRICS.get(metric, metric),
            metric_name=f"{metric} ({precision})",
            metric_value=value,
        )
        for quality in qualities
        for precision, metrics in quality.metrics.items()
        for metric, value in metrics.items()
    ]
    base = base_model(folder)
    languages = str(folder.preprocessing.get("languages", "")) if task == "translation" else ""
    header = ModelCardData(
        library_name=LIBRARY,
        pipeline_tag=tag,
        **_licence(str(details.get("licence", ""))),
        language=re.findall(r"\b[a-z]{2,3}\b", languages) or None,
        base_model=base,
        base_model_relation="quantized" if base else None,
        tags=["int8", "onnx", "cpu", folder.entry.name, *TAGS.get(task, [])],
        model_name=folder.card.name if results else None,
        eval_results=results or None,
    )
    return header.to_yaml()


def base_model(folder: ModelFolder) -> str | None:
    """Returns the repository that a model was imported from, or that its weights come from; None if there is none.

    Args:
        folder: Model folder.
    """
    imported = folder.card.details.get("base_model")
    if isinstance(imported, dict) and isinstance(imported.get("repository"), str):
        return str(imported["repository"])
    matches = (_ORIGIN.match(file.url) for file in folder.card.files if file.url)
    return next((match[1] for match in matches if match), None)


def _licence(text: str) -> dict[str, Any]:
    """Returns the keys of the header for a licence; "other" with its text if it begins with no name that is known."""
    if not text:
        return {}
    name = text.lower()
    prefixes = [prefix for prefix in LICENCES if name.startswith(prefix) and not name[len(prefix) :][:1].isalnum()]
    if prefixes:
        return {"license": prefixes[0]}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", name.split(":")[0])[:60].strip("-")}


def _usage(folder: ModelFolder, repository: Repository) -> str:
    from pipelines.graph import io

    graph = io.load(folder.path / "int8.onnx").graph
    ports = [
        [kind, f"`{value.name}`", str(value.dtype), str(value.shape)]
        for kind, values in (("input", graph.inputs), ("output", graph.outputs))
        for value in values
        if value.name not in graph.initializers
    ]
    return f"""## Usage

```bash
pip install "int8-zoo[hub]"
zoo run {repository} INPUT -o OUTPUT
zoo serve {repository}
```

```python
import zoo

model = zoo.pipeline("{repository}")
```

`int8.onnx` has QDQ operators and runs in every ONNX engine, without pre- and post-processing:

```python
import onnxruntime
from huggingface_hub import hf_hub_download

session = onnxruntime.InferenceSession(hf_hub_download("{repository.id}", "int8.onnx"))
```

{markdown.table(["", "name", "type", "shape"], ports)}"""


def _qualities(folder: ModelFolder, reports: Sequence[Mapping[str, Any]]) -> Iterator[Quality]:
    """Yields the metrics of reports (`zoo evaluate --json`, images), else those of the training."""
    measured = False
    for report in reports:
        data, samples = report.get("data", "held-out data"), report.get("samples")
        named = ", ".join(map(str, data)) if isinstance(data, list) else str(data)
        metrics = {key: _numbers(figures) for key, figures in _mapping(report.get("metrics")).items()}
        if not metrics:
            for run in _results(report):
                own = {key: run[key] for key in ("top1", "top5") if _is_number(run.get(key))}
                if own:
                    metrics.setdefault(run["precision"], own)
        metrics = {precision: own for precision, own in metrics.items() if own}
        if metrics:
            measured = True
            yield Quality(named, samples if isinstance(samples, int) else None, metrics)
    trained = _numbers(_mapping(folder.card.details.get("training")).get("metrics"))
    if trained and not measured:
        yield Quality(str(folder.card.details.get("data", "held-out rows of the training")), None, {"fp32": trained})


def _quality(qualities: Sequence[Quality]) -> str:
    rows = [
        [
            quality.data,
            "" if quality.samples is None else f"{quality.samples:,}",
            metric,
            *(f"{own[metric]:.4f}" if metric in own else "" for own in (quality.metrics.get(p, {}) for p in SHOWN)),
        ]
        for quality in qualities
        for metric in dict.fromkeys(name for own in quality.metrics.values() for name in own)
    ]
    if not rows:
        return ""
    return f"## Quality\n\n{markdown.table(['data', 'samples', 'metric', *SHOWN], rows)}"


def _speed(reports: Sequence[markdown.Report]) -> str:
    rows = []
    for report in reports:
        for run in _results(report.content):
            values = {**run, **_mapping(run.get("offline"))}
            rate = next((key for key in RATES if _is_number(values.get(key))), None)
            if rate is not None and isinstance(report.content.get("environment"), dict):
                cpu = markdown.cpu(report)
                batch, threads = str(values.get("batch_size", "")), str(values.get("threads", 1))
                unit = rate.removesuffix("_per_second")
                rows.append([cpu, run["engine"], run["precision"], threads, batch, f"{values[rate]:,.0f} {unit}/s"])
    if not rows:
        return ""
    return f"## Speed\n\n{markdown.table(['CPU', 'engine', 'precision', 'threads', 'batch size', 'throughput'], rows)}"


def _facts(folder: ModelFolder) -> str:
    """Returns data, origin and licence of the card, and the sizes of the graphs."""
    details = folder.card.details
    facts = [[key, str(details[key])] for key in ("data", "origin", "architecture", "licence") if details.get(key)]
    if base := base_model(folder):
        facts.append(["base model", f"[{base}](https://huggingface.co/{base})"])
    sizes = [
        f"{name} {path.stat().st_size / 1e6:.1f} MB"
        for name in ("fp32.onnx", "int8.onnx")
        if (path := folder.path / name).is_file()
    ]
    facts.append(["files", ", ".join(sizes)])
    escaped = [[key, re.sub(r"\s+", " ", text).replace("|", r"\|")] for key, text in facts]
    return f"## Model\n\n{markdown.table(['', ''], escaped)}"


def _results(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the results of a report that name an engine and a precision."""
    results = report.get("results")
    listed = results if isinstance(results, list) else []
    return [run for run in listed if isinstance(run, dict) and {"engine", "precision"} <= run.keys()]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, float]:
    return {key: number for key, number in _mapping(value).items() if _is_number(number)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Quality of translations: BLEU and chrF by sacreBLEU, and their changes by int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import LEVEL, RESAMPLES, against_fp32, interval
from pipelines.core.errors import RequestError, requires
from zoo.translation.data.parallel_text import normalize_whitespace
from zoo.translation.data.text_files import Faults, read_pairs

if TYPE_CHECKING:
    from zoo.translation.inference import TranslationPipeline


def evaluate(pipelines: Mapping[str, TranslationPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Evaluates pipelines of several precisions on parallel text.

    Args:
        pipelines: {precision: pipeline}.
        data: See `zoo.translation.data.text_files.read_pairs`.
        on_error: "raise" or "skip" for lines that are no pairs.

    Returns:
        `compare_translations` and the keys samples, skipped and beam.
    """
    faults, first = Faults(), next(iter(pipelines.values()))
    sources, references = [], []
    languages = str(first.folder.preprocessing.get("languages", ""))
    for number, (source, reference) in enumerate(
        read_pairs(data, languages, held_out=True, on_error=on_error, faults=faults), 1
    ):
        line = first.line(f"pair {number}", source)
        first.report_errors([(line.where, line.fault)], faults, on_error)
        if not line.fault:
            sources.append(line.text)
            references.append(normalize_whitespace(reference))
    tokens = first.vocabulary.encode(sources)
    translations = {}
    for name, pipeline in pipelines.items():
        best = [hypotheses[0].tokens for hypotheses in pipeline.translate(tokens)]
        translations[name] = pipeline.vocabulary.decode(best)
    compared = compare_translations(translations, references)
    return {"samples": len(sources), "skipped": faults.total(), "beam": first.beam, **compared}


def translation_metrics(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Computes BLEU and chrF by sacreBLEU at its defaults (see `signatures`).

    Args:
        translations: Translations.
        references: One reference each.

    Returns:
        {"bleu", "chrf"}, 0 to 100.
    """
    return {
        name: metric.corpus_score(list(translations), [list(references)]).score for name, metric in _metrics().items()
    }


def signatures() -> dict[str, str]:
    """Returns the signatures of sacreBLEU for the metrics of `translation_metrics` (Post 2018)."""
    texts = {}
    for name, metric in _metrics().items():
        metric.corpus_score(["one"], [["one"]])  # it knows its signature after use
        texts[name] = metric.get_signature().format()
    return texts


def _metrics() -> dict[str, Any]:
    """Returns the metrics of sacreBLEU by key. Raises RequestError if it is not installed."""
    with requires("the quality of translations", "int8-zoo[train]"):
        import sacrebleu
    return {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}


def compare_translations(translations: Mapping[str, Sequence[str]], references: Sequence[str]) -> dict[str, Any]:
    """Compares translations of several precisions of the same sentences with those of fp32.

    Args:
        translations: {precision: translations}.
        references: One reference each.

    Returns:
        {"metrics": per precision, "difference": {"bleu", "chrf": int8 - fp32, "agreement": share of equal
        translations}, "interval": 95% paired bootstrap intervals of the difference (Koehn 2004), "signatures"};
        difference and interval of further precisions under "others".

    Raises:
        RequestError: There are no sentences.
    """
    if not references:
        raise RequestError("found no sentences; expected at least one with its reference")
    metrics = _metrics()
    statistics: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in translations}  # [sentences, counts]
    for name, texts in translations.items():
        for key, metric in metrics.items():
            statistics[name][key] = np.array(metric._extract_corpus_statistics(list(texts), [list(references)]))
    n = len(references)
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)  # how often each sentence comes

    def compare(a: str, b: str) -> dict[str, Any]:
        same = np.array([x == y for x, y in zip(translations[a], translations[b], strict=True)])
        difference: dict[str, float] = {}
        intervals: dict[str, Any] = {"level": LEVEL, "resamples": RESAMPLES}
        for key, metric in metrics.items():
            before, after = statistics[a][key], statistics[b][key]
            difference[key] = _score(metric, after)[0] - _score(metric, before)[0]
            intervals[key] = interval(_score(metric, after, draws) - _score(metric, before, draws))
        intervals["agreement"] = interval(draws @ same / n)
        return {"difference": {**difference, "agreement": float(same.mean())}, "interval": intervals}

    names = {name: name for name in translations}
    compared = against_fp32(names, lambda name: translation_metrics(translations[name], references), compare)
    return {**compared, "signatures": signatures()}


def _score(metric: Any, statistics: NDArray[Any], draws: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Computes corpus scores: of all sentences, [1], or of every draw of them, [draws].

    statistics: Counts of n-grams and lengths of each sentence, [sentences, counts].
    """
    totals = statistics.sum(axis=0)[None] if draws is None else draws @ statistics
    return np.array([metric._compute_score_from_stats(total.tolist()).score for total in totals])

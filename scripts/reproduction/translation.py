"""The parts of scripts/reproduce.py that measure translation."""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import files, machine
from pipelines.models import hub
from scripts.peers import harness
from scripts.peers.harness import median
from scripts.reproduction.reports import ROUNDS, card_metrics, cpu_slug, evaluate, measure_together, report
from zoo.translation.metrics import translation_metrics


def translators() -> list[str]:
    """Returns the translation models that ship."""
    return [name for name in zoo.names() if hub.Hub(zoo.SHIPPED).card(name).entry == "transformer-mt"]


def teacher_of(name: str) -> str:
    """Returns the model that a translation model which ships was trained by, "" if by none."""
    training = files.read_json(zoo.SHIPPED / name / "card.json").get("training", {})
    return str(training.get("config", {}).get("teacher", ""))


def test_set() -> tuple[Path, Path]:
    """Returns the files of Multi30k's test_2016_flickr, English and German."""
    name = "data/translation/multi30k/test_2016_flickr"
    source, target = (harness.development_data(f"{name}.{language}.gz") for language in ("en", "de"))
    return source, target


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a packed file."""
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def translation() -> None:
    """Same weights and sentences in CTranslate2, OpenVINO, torch and this project, in turn, one pinned core.

    The shape "base" is among `imported`; students have layers that no other engine has (`students`).
    """
    models = ["small", *(name for name in translators() if not teacher_of(name))]
    ctranslate2 = "ctranslate2-int8,ctranslate2-default,ctranslate2-fp32"
    peers = f"zoo-native,zoo-int8,zoo-fp32,{ctranslate2},openvino-int8,torch-fp32"
    measure_together("translation", ",".join(models), "--peers", peers, "--sentences", "500")


def imported() -> None:
    """The same for shapes of imported models, Marian's format beside Marian itself, also with shortlists."""
    peers = "zoo-native,zoo-shortlist,ctranslate2-int8,marian-int8,marian-fp32"
    arguments = "base,opus,firefox", "--tasks", "steps", "--rounds", "5", "--peers", peers
    measure_together("translation-imported", *arguments, comparison="translation")


def in_turn(
    opened: Mapping[Any, Callable[[list[str]], Any]], texts: list[str], clock: Callable[[], float]
) -> tuple[dict[Any, Any], dict[Any, list[float]]]:
    """Translates texts by pipelines in turn; returns the translations, and texts/s of every round by `clock`."""
    results = {key: translate(texts) for key, translate in opened.items()}  # and warmed up
    rates: dict[Any, list[float]] = {key: [] for key in opened}
    for _ in range(ROUNDS):
        for key, translate in opened.items():
            start = clock()
            translate(texts)
            rates[key].append(len(texts) / (clock() - start))
    return results, rates


def threads() -> None:
    """Multi30k's test set from text to text in native code, int8, beam 4: one thread and two, in turn, on two cores."""
    source, _ = test_set()
    texts = lines_of(source)
    for name in translators():
        opened = {count: zoo.pipeline(name, engine="native", threads=count) for count in (1, 2)}
        results, rates = in_turn(opened, texts, time.perf_counter)
        speed = {
            "data": f"Multi30k test_2016_flickr ({len(texts):,} sentences), beam {opened[1].beam}",
            "sentences_per_second": {str(count): median(speeds, 1) for count, speeds in rates.items()},
            "times_as_fast": round(float(np.median(rates[2]) / np.median(rates[1])), 3),
            "same_translations": results[1] == results[2],
        }
        report(f"threads-{cpu_slug()}", {**speed, "environment": machine.environment(threads=2, rounds=ROUNDS)}, name)


def students() -> None:
    """Students and their teachers in native code, int8, each with its own beam, in turn, one pinned thread.

    Multi30k's test set, from text to text.
    """
    source, target = test_set()
    texts, references = (lines_of(path) for path in (source, target))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for name in translators():
        if not (teacher := teacher_of(name)):
            continue
        opened: dict[str, Any] = {model: zoo.pipeline(model, engine="native") for model in (teacher, name)}
        results, rates = in_turn(opened, texts, time.process_time)
        said = {model: [row["translation"] for row in results[model]] for model in opened}
        speed = {
            "teacher": teacher,
            "data": f"Multi30k test_2016_flickr ({len(texts):,} sentences)",
            "beams": {model: translate.beam for model, translate in opened.items()},
            "metrics": {model: translation_metrics(said[model], references) for model in opened},
            "sentences_per_second": {model: median(speeds, 1) for model, speeds in rates.items()},
            "times_as_fast": median(np.divide(rates[name], rates[teacher]).tolist()),
        }
        environment = machine.environment(threads=1, rounds=ROUNDS)
        report(f"teacher-{cpu_slug()}", {**speed, "environment": environment}, name)


def steps() -> None:
    """The effect of each rewrite of translation in ms a step, fp32 and int8, one pinned thread.

    The smaller of the two models alone: the base one takes an hour more.
    """
    measure_together("steps", "small", comparison="translation-rewrites")


def bleu() -> None:
    """fp32 and int8 of every translation model on Multi30k's test set, with its own beam; cards.

    int8 also in native code.
    """
    source, target = test_set()
    for name in translators():
        result = evaluate(name, f"{source},{target}", "interval")
        about = f"Multi30k test_2016_flickr ({result['samples']:,} sentences), beam {result['beam']}"
        report("bleu", result | {"data": about}, name)
        metrics = {
            kind: {key: round(value, 2) for key, value in scores.items()}
            for kind, scores in (result["metrics"] | {"native": result["native"]["metrics"]}).items()
        }
        place = f"Multi30k test_2016_flickr, beam {result['beam']}, sacreBLEU {result['signatures']['bleu']}"
        card_metrics(name, {"on": place, "report": "reports/bleu.json", **metrics})

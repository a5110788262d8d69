"""The parts of scripts/reproduce.py that measure translation."""

from __future__ import annotations

import gzip
import os
import time
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
    """The translation models that ship."""
    return [name for name in zoo.names() if hub.Hub(zoo.SHIPPED).card(name).entry == "transformer-mt"]


def teacher_of(name: str) -> str:
    """The model that a translation model which ships was trained by, "" if by none."""
    training = files.read_json(zoo.SHIPPED / name / "card.json").get("training", {})
    return str(training.get("config", {}).get("teacher", ""))


def test_set() -> tuple[Path, Path]:
    """Sentences of Multi30k's test_2016_flickr, English and German."""
    name = "data/translation/multi30k/test_2016_flickr"
    source, target = (harness.development_data(f"{name}.{language}.gz") for language in ("en", "de"))
    return source, target


def lines_of(path: Path) -> list[str]:
    """The lines of a packed file."""
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def translation() -> None:
    """Same weights and sentences in CTranslate2, OpenVINO, torch and this project, in turn, one pinned core.

    The shape "base" is among `imported`; students have layers that no other engine has (`students`).
    """
    models = ["small", *(name for name in translators() if not teacher_of(name))]
    ctranslate2 = "ctranslate2-int8,ctranslate2-default,ctranslate2-fp32"
    peers = f"zoo-native,zoo-int8,zoo-fp32,{ctranslate2},openvino-int8,torch-fp32"
    measure_together("translation", ",".join(models), "--peers", peers)


def imported() -> None:
    """The same of the shapes that are imported, of Marian's format beside Marian itself, with shortlists, too."""
    peers = "zoo-native,zoo-shortlist,ctranslate2-int8,marian-int8,marian-fp32"
    arguments = "base,opus,firefox", "--tasks", "steps", "--rounds", "5", "--peers", peers
    measure_together("translation-imported", *arguments, comparison="translation")


def threads() -> None:
    """Multi30k's test set from text to text in native code, int8, beam 4: one thread and two, in turn, on two cores."""
    source, _ = test_set()
    texts = lines_of(source)
    for name in translators():
        opened = {count: zoo.pipeline(name, engine="native", threads=count) for count in (1, 2)}
        results = {count: each(texts) for count, each in opened.items()}  # and warmed up
        rates: dict[int, list[float]] = {count: [] for count in opened}
        for _ in range(ROUNDS):
            for count, each in opened.items():
                start = time.perf_counter()
                each(texts)
                rates[count].append(len(texts) / (time.perf_counter() - start))
        told = {str(count): median(each, 1) for count, each in rates.items()}
        found = {
            "data": f"Multi30k test_2016_flickr ({len(texts):,} sentences), beam {opened[1].beam}",
            "sentences_per_second": told,
            "times_as_fast": round(float(np.median(rates[2]) / np.median(rates[1])), 3),
            "same_translations": results[1] == results[2],
        }
        report(f"threads-{cpu_slug()}", {**found, "environment": machine.environment(threads=2, rounds=ROUNDS)}, name)


def students() -> None:
    """Students and their teachers in native code, int8, each with its own beam, in turn, one pinned thread.

    Multi30k's test set, from text to text.
    """
    source, target = test_set()
    texts, references = (lines_of(each) for each in (source, target))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for name in translators():
        if not (teacher := teacher_of(name)):
            continue
        opened: dict[str, Any] = {each: zoo.pipeline(each, engine="native") for each in (teacher, name)}
        said = {each: [one["translation"] for one in opened[each](texts)] for each in opened}  # and warmed up
        seconds: dict[str, list[float]] = {each: [] for each in opened}
        for _ in range(ROUNDS):
            for each, translate in opened.items():
                start = time.process_time()
                translate(texts)
                seconds[each].append(time.process_time() - start)
        found = {
            "teacher": teacher,
            "data": f"Multi30k test_2016_flickr ({len(texts):,} sentences)",
            "beams": {each: translate.beam for each, translate in opened.items()},
            "metrics": {each: translation_metrics(said[each], references) for each in opened},
            "sentences_per_second": {each: median([len(texts) / one for one in seconds[each]], 1) for each in opened},
            "times_as_fast": median([a / b for a, b in zip(seconds[teacher], seconds[name], strict=True)]),
        }
        environment = machine.environment(threads=1, rounds=ROUNDS)
        report(f"teacher-{cpu_slug()}", {**found, "environment": environment}, name)


def steps() -> None:
    """What each rewrite of translation is worth in ms a step, fp32 and int8, one pinned thread.

    The smaller of the two models alone: the base one takes an hour more.
    """
    measure_together("steps", "small", comparison="translation-rewrites")


def bleu() -> None:
    """fp32 and int8 of every translation model on Multi30k's test set, with its own beam; cards.

    int8 also in native code.
    """
    source, target = test_set()
    for name in translators():
        found = evaluate(name, f"{source},{target}", "interval")
        about = f"Multi30k test_2016_flickr ({found['samples']:,} sentences), beam {found['beam']}"
        report("bleu", found | {"data": about}, name)
        metrics = {
            kind: {key: round(value, 2) for key, value in each.items()}
            for kind, each in (found["metrics"] | {"native": found["native"]["metrics"]}).items()
        }
        place = f"Multi30k test_2016_flickr, beam {found['beam']}, sacreBLEU {found['signatures']['bleu']}"
        card_metrics(name, {"on": place, "report": "reports/bleu.json", **metrics})

"""Time translation in the engines of its peers and in this project's: same weights, same sentences, one thread and
core, in turn.

    python scripts/peers/translation/translation.py [MODEL,...] [--tasks steps,text] [--batch-size 1,32] [--beam 1,4] [--peers
    NAME,...] [-o FILE]

MODEL: a trained model (name of the zoo or folder), or a size of random weights, `base` (6+6 layers of 512, 32,000
pieces), `opus` (with 58,101, as OPUS-MT's) or `small` (3+3 of 256, 8,000); or `firefox`, random weights that Marian
made (6+2 of 256, SSRU, 32,000), which it runs itself, in int8 by its own tool, beside what is imported of them. Task
`steps`: exactly `STEPS` tokens of every sentence, for each batch size and
beam; no token ends a sentence. Its sentences have 8 to 32 tokens: those of the test set, drawn ones for random weights.
Task `text`, of trained models: Multi30k's test_2016_flickr ($ZOO_SHARED, by default ../shared) from text to text at
natural lengths, the last batch size and beam, with BLEU and chrF.

Every engine lives in a process of its own, all pinned to one core, and only one works at a time: a round gives each a
turn, all the same sentences. Seconds are of processor time; "core_share" is its share of the clock's: well below 1
others were at work, and the figures are rough. "search" leaves the tokenization out, "whole" has it. Memory is the
process's: the peak while timed, and by shares (PSS) after it. This project's int8 comes in both forms: "zoo-native"
decodes in the native kernels, "zoo-int8" has the whole search in the graph of int8.onnx, as "zoo-fp32" has it in float,
both in onnxruntime; "zoo-shortlist" (random weights) is "zoo-native" with a shortlist of drawn words, over 3,000 of
them for each sentence. CTranslate2 is told to use AVX-512 where an AMD CPU has it, which it does not by itself;
"ctranslate2-default" (task text) is not told how large a batch is, and makes one of all sentences. OpenVINO has a
decoder with its state inside and weights in int8, by NNCF, the beam search in Python; torch likewise, in float32,
"torch-naive" without any cache. An engine that cannot be opened is left out, and the report says why. Needs the `train`
and `peers` extras.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from scripts.peers import harness
from scripts.peers.translation.models import FIREFOX, FIREFOX_LENGTH, LENGTHS, RANDOM, Work, copied, drawn
from scripts.peers.translation.systems import PEERS, Case, System, isa, make
from zoo.translation.data.parallel_text import tidy
from zoo.translation.data.text_files import read_pairs
from zoo.translation.metrics import signatures, translation_metrics

SHARED = Path(os.environ.get("ZOO_SHARED", Path(__file__).resolve().parents[4] / "shared"))
TEST_SET = "data/translation/multi30k/test_2016_flickr"
TASKS = ("steps", "text")
WITHOUT_TEXT = (*RANDOM, FIREFOX)  # of random weights
STEPS = 30
POOL = 256  # sentences of task steps
TURN = 4  # sentences of a turn, if a batch has fewer
PACKAGES = ("ctranslate2", "nncf", "sentencepiece", "sacrebleu", "torch")


def test_set(count: int) -> tuple[list[str], list[str]]:
    """The first `count` sentences and their translations. Raises RequestError where they are missing."""
    names = [SHARED / f"{TEST_SET}.{language}.gz" for language in ("en", "de")]
    if missing := [str(each) for each in names if not each.is_file()]:
        raise RequestError(
            f"found no {' and no '.join(missing)}; set ZOO_SHARED to the folder that holds data/translation"
        )
    pairs = [(tidy(a), tidy(b)) for a, b in itertools.islice(read_pairs(",".join(map(str, names))), count)]
    return [a for a, _ in pairs], [b for _, b in pairs]


# ----------------------------------------------------------------------------------------------------------- measuring


class Engine:
    """One engine in its own process."""

    def __init__(self, name: str, work: Work, case: Case) -> None:
        self.name, self.work, self.case = name, work, case
        self.system: System
        self.inputs: list[Any] = []

    def open(self, inputs: Sequence[Any]) -> list[str]:
        """Open, and translate the first of the inputs. inputs: of task steps batches of tokens, else texts. Returns the
        translations.
        """
        self.system = PEERS[self.name].open(self.work, self.case)
        self.inputs = [self.system.given(each) for each in inputs] if self.case.steps else list(inputs)
        first = self.inputs[0] if self.case.steps else self.system.read(self.inputs[: self.case.batch_size])
        found = self.system.search(first)
        if self.case.steps and (wrong := {len(each) for each in self.system.tokens(found)} - {self.case.steps}):
            raise ZooError(
                f"found translations of {', '.join(map(str, sorted(wrong)))} tokens, wanted {self.case.steps}"
            )
        harness.forget_peak()
        return [] if self.case.steps else self.system.write(found)

    def turn(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Translate the inputs of these numbers. Returns {"whole", "search": processor seconds, "clock", "tokens",
        "texts"}.
        """
        if self.case.steps:
            clock, begin, tokens = time.perf_counter(), time.process_time(), 0
            for i in chosen:
                found = self.system.search(self.inputs[i])
                tokens += sum(map(len, self.system.tokens(found)))
            spent = time.process_time() - begin
            return {
                "whole": spent,
                "search": spent,
                "clock": time.perf_counter() - clock,
                "tokens": tokens,
                "texts": [],
            }
        clock, begin = time.perf_counter(), time.process_time()
        given = self.system.read([self.inputs[i] for i in chosen])
        read = time.process_time()
        found = self.system.search(given)
        searched = time.process_time()
        texts = self.system.write(found)
        spent = time.process_time() - begin
        tokens = sum(map(len, self.system.tokens(found)))
        return {
            "whole": spent,
            "search": searched - read,
            "clock": time.perf_counter() - clock,
            "tokens": tokens,
            "texts": texts,
        }

    def memory(self) -> dict[str, float]:
        """Of this process, in MB."""
        return {"peak": harness.peak_memory(), "shares": harness.shared_memory()}


def inputs_of(case: Case, work: Work, texts: Sequence[str]) -> list[Any]:
    """What is translated: texts, or batches of tokens. texts: the test set, empty for random weights."""
    if not case.steps:
        return list(texts)
    vocabulary = work.vocabulary
    lengths = (FIREFOX_LENGTH, FIREFOX_LENGTH) if case.model == FIREFOX else LENGTHS
    sentences = vocabulary.encode(texts) if texts else drawn(len(vocabulary), POOL, lengths)
    fit = [each for each in sentences if LENGTHS[0] <= len(each) <= LENGTHS[1]]
    order = np.random.default_rng(0).permutation(len(fit))[: max(POOL, case.batch_size)].tolist()
    return [
        [fit[i] for i in order[at : at + case.batch_size]]
        for at in range(0, len(order) - case.batch_size + 1, case.batch_size)
    ]


def compare(
    case: Case,
    work: Work,
    peers: Sequence[str],
    rounds: int,
    text: tuple[list[str], list[str]],
    advance: Callable[[float], None],
) -> dict[str, Any]:
    """All `peers` in turn. text: sentences and references of the test set.

    Returns {"model", "task", "batch_size", "beam", "steps", "sentences" (of a turn), "results": [{"engine",
    "sentences_per_second", its "tokens_per_second" (of the translations), "ms_a_step" (a batch's, task steps),
    "search_per_second" (sentences, tokenization left out): {"median", "spread"} of the rounds, "bleu", "chrf" (task
    text), "memory_mb": {"peak", "shares"}, "core_share"}], "ratios": {engine of this project: {peer: median over the
    rounds of how many times as fast}}, "left_out": {engine: reason}}.
    """
    inputs = inputs_of(case, work, text[0])
    each = max(1, TURN // case.batch_size) if case.steps else len(inputs)
    core = max(os.sched_getaffinity(0))
    turns: dict[str, list[dict[str, Any]]] = {}
    with harness.Workers() as workers:
        for name in peers:
            log = work.folder.parent / f"{name}.log"
            workers.live[name] = harness.Worker(
                partial(Engine, name, work, case), core, log, **(isa() if "ctranslate2" in name else {})
            )
            workers.ask(name, "open", inputs)
            advance(1)
        for turn in range(rounds):
            chosen = [i % len(inputs) for i in range(turn * each, (turn + 1) * each)]
            for name, found in workers.ask_all("turn", chosen).items():
                turns.setdefault(name, []).append(found)
            advance(1)
        memory = workers.ask_all("memory")
    turns = {name: found for name, found in turns.items() if name in memory}
    count = each * (case.batch_size if case.steps else 1)
    results = [
        {"engine": name, **summary(case, found, count, text[1]), "memory_mb": memory[name]}
        for name, found in turns.items()
    ]
    return {
        **case._asdict(),
        "sentences": count,
        "results": results,
        "ratios": ratios(turns),
        "left_out": workers.left_out,
    }


def summary(
    case: Case, turns: Sequence[Mapping[str, Any]], sentences: int, references: Sequence[str]
) -> dict[str, Any]:
    """See `compare`."""
    whole = [each["whole"] for each in turns]
    found: dict[str, Any] = {
        "sentences_per_second": harness.median([sentences / each for each in whole]),
        "tokens_per_second": harness.median([each["tokens"] / each["whole"] for each in turns], 1),
        "core_share": round(float(np.median([each["whole"] / each["clock"] for each in turns])), 3),
    }
    if case.steps:
        batches = sentences // case.batch_size
        return {**found, "ms_a_step": harness.median([1e3 * each / batches / case.steps for each in whole], 4)}
    quality = {key: round(value, 2) for key, value in translation_metrics(turns[0]["texts"], references).items()}
    return {**found, "search_per_second": harness.median([sentences / each["search"] for each in turns]), **quality}


def ratios(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """See `compare`."""
    seconds = {name: np.array([each["whole"] for each in found]) for name, found in turns.items()}
    ours = [name for name in seconds if name.startswith("zoo-")]
    peers = [name for name in seconds if name not in ours]
    return {name: {peer: round(float(np.median(seconds[peer] / seconds[name])), 3) for peer in peers} for name in ours}


def apart(log: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Run in a process of its own: torch and NNCF are to be in no other."""
    with ProcessPoolExecutor(1, get_context("spawn"), harness.talk_into, (log,)) as pool:
        return pool.submit(function, *args).result()


def fitting(model: str, peers: Sequence[str]) -> list[str]:
    """Those that read the format of a model."""
    return [each for each in peers if each.startswith("zoo-") or PEERS[each].marian == (model == FIREFOX)]


def prepare(model: str, task: str, peers: Sequence[str], scratch: Path, steps: int) -> tuple[Work, dict[str, str]]:
    """A model's folder and what its peers read; (work, {engine: why it cannot be})."""
    work, left_out = Work(scratch / f"{Path(model).name}-{task}" / "model"), {}
    work.made("").mkdir(parents=True, exist_ok=True)
    if not work.folder.is_dir():
        apart(work.made("model.log"), copied, model, work.folder, steps)
    for name in fitting(model, peers):
        try:
            apart(work.made(f"{name}.log"), make, name, work)
        except Exception as error:  # any library's own kinds
            left_out[name] = harness.why(error)
    return work, left_out


def cases(
    models: Sequence[str], tasks: Sequence[str], sizes: Sequence[int], beams: Sequence[int], steps: int
) -> Iterator[Case]:
    """What is asked for, in order."""
    for model, task in itertools.product(models, tasks):
        if task == "steps":
            yield from (Case(model, task, size, beam, steps) for size in sizes for beam in beams)
        elif model not in WITHOUT_TEXT:
            yield Case(model, task, sizes[-1], beams[-1])


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    line = "{:20} {:6} {:>5} {:>4}  {:17} {:>11} {:>17} {:>9} {:>8} {:>6} {:>6} {:>7} {:>7} {:>5}".format
    columns = (
        "model",
        "task",
        "batch",
        "beam",
        "engine",
        "sentences/s",
        "spread",
        "tokens/s",
        "ms/step",
        "BLEU",
        "chrF",
        "peak MB",
        "PSS MB",
    )
    lines = [line(*columns, "core")]
    for case in report["cases"]:
        for each in case["results"]:
            rate, tokens = each["sentences_per_second"], each["tokens_per_second"]
            step = f"{each['ms_a_step']['median']:.3f}" if "ms_a_step" in each else ""
            quality = [f"{each[key]:.2f}" if key in each else "" for key in ("bleu", "chrf")]
            memory = [f"{each['memory_mb'][key]:.0f}" for key in ("peak", "shares")]
            here = (Path(case["model"]).name, case["task"], case["batch_size"], case["beam"], each["engine"])
            spread = "{:.2f}..{:.2f}".format(*rate["spread"])
            lines.append(
                line(
                    *here,
                    f"{rate['median']:.2f}",
                    spread,
                    f"{tokens['median']:.0f}",
                    step,
                    *quality,
                    *memory,
                    each["core_share"],
                )
            )
        lines += [
            f"{name} is so many times as fast: {', '.join(f'{p} {r}x' for p, r in each.items())}"
            for name, each in case["ratios"].items()
        ]
        lines += [f"{name} left out: {why}" for name, why in case["left_out"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument(
        "models", nargs="?", default=",".join(WITHOUT_TEXT), help=f"with commas; {', '.join(WITHOUT_TEXT)} by default"
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="steps, text; both by default")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--batch-size", default="1,32", help="several with commas (default 1,32)")
    parser.add_argument("--beam", default="1,4", help="several with commas (default 1,4)")
    parser.add_argument("--steps", default=str(STEPS), help=f"tokens of a sentence of task steps (default {STEPS})")
    parser.add_argument("--sentences", default="1000", help="so many of the test set (default 1000)")
    parser.add_argument("--rounds", default="9", help="turns of each engine (default 9)")
    parser.add_argument("--work", metavar="DIR", help="keep the models there; what is found there is not made again")
    with harness.one_line("translation"):
        args = parser.parse_args()
        models, peers = harness.listed("model", args.models), harness.listed("engine", args.peers, PEERS)
        harness.require_known(
            "model", [each for each in models if not Path(each).is_dir()], [*WITHOUT_TEXT, *zoo.names()]
        )
        ((steps,), (sentences,), (rounds,)) = (
            harness.numbers(each, getattr(args, each))[:1] for each in ("steps", "sentences", "rounds")
        )
        numbers = harness.numbers("batch size", args.batch_size), harness.numbers("beam", args.beam)
        wanted = list(cases(models, harness.listed("task", args.tasks, TASKS), *numbers, steps))
        if not wanted:
            raise RequestError("found nothing to do: random weights have only the task steps")
        text = test_set(sentences) if set(models) - set(WITHOUT_TEXT) else ([], [])
        data = (
            {
                "test_set": f"multi30k {Path(TEST_SET).name}, the first {len(text[0])} sentences",
                "signatures": signatures(),
            }
            if text[0]
            else {}
        )
        facts = machine.environment(
            threads=1, rounds=rounds, ctranslate2=isa() or "default", **data, peers=harness.versions(*PACKAGES)
        )
        prepared: dict[tuple[str, str], tuple[Work, dict[str, str]]] = {}
        with (
            harness.folder(args.work) as scratch,
            progress("comparing", len(wanted) * (len(peers) + rounds)) as advance,
        ):

            def measure(case: Case) -> dict[str, Any]:
                key = (case.model, case.task)
                if key not in prepared:
                    prepared[key] = prepare(*key, peers, scratch, steps)
                work, left_out = prepared[key]
                given = ([], []) if case.model in WITHOUT_TEXT else text
                fit = [
                    each
                    for each in fitting(case.model, peers)
                    if each not in left_out and not (case.steps and PEERS[each].texts)
                ]
                found = compare(case, work, fit, rounds, given, advance)
                return {**found, "left_out": left_out | found["left_out"]}

            report = harness.gather("cases", wanted, measure, args.output, facts)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()

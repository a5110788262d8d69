"""Translation in the engines of the peers and of this project: same weights, same sentences, one thread and core.

MODEL: a trained model (name of the zoo or folder), or a size of random weights, `base` (6+6 layers of 512, 32,000
pieces), `opus` (with 58,101, as OPUS-MT's) or `small` (3+3 of 256, 8,000); or `firefox`, random weights that Marian
made (6+2 of 256, SSRU, 32,000): Marian runs them itself, in int8 by its own tool, beside the model imported from them.
Task `steps`: exactly --steps tokens of every sentence, for each batch size and beam; no token ends a sentence. Its
sentences have 8 to 32 tokens: those of the test set, drawn ones for random weights. Task `text`, of trained models:
Multi30k's test_2016_flickr ($ZOO_SHARED, by default ../shared) from text to text at natural lengths, the last batch
size and beam, with BLEU and chrF.

Every engine has a process of its own, all pinned to one core, and only one works at a time: a round gives each a turn,
all the same sentences. Seconds are of processor time; "core_share" is its share of the clock's: well below 1 the
machine was busy, and the figures are rough. "search" leaves the tokenization out. Memory is the process's: the peak
while timed, and by shares (PSS) after it. "zoo-native" decodes in the native kernels, "zoo-int8" has the whole search
in the graph of int8.onnx, as "zoo-fp32" has it in float, both in onnxruntime; "zoo-shortlist" (random weights) is
"zoo-native" with a shortlist of drawn words, over 3,000 of them for each sentence. CTranslate2 is set to AVX-512 where
an AMD CPU has it, which it does not use by itself; "ctranslate2-default" (task text) gets no batch size, and makes one
batch of all sentences. OpenVINO has a decoder with its state inside and weights in int8, by NNCF, the beam search in
Python; torch likewise, in float32, "torch-naive" without any cache. An engine that cannot be opened is left out, and
the report says why. Needs the `train` and `peers` extras.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from scripts.peers import harness, processes
from scripts.peers.translation.models import FIREFOX, FIREFOX_LENGTH, LENGTHS, RANDOM, Work, copied, drawn
from scripts.peers.translation.systems import PEERS, Case, System, isa, make
from zoo.translation.data.parallel_text import normalize_whitespace
from zoo.translation.data.text_files import read_pairs
from zoo.translation.metrics import signatures, translation_metrics

TEST_SET = "data/translation/multi30k/test_2016_flickr"
TASKS = ("steps", "text")
WITHOUT_TEXT = (*RANDOM, FIREFOX)  # of random weights
STEPS = 30
POOL = 256  # sentences of task steps
TURN = 4  # sentences of a turn, if a batch has fewer
PACKAGES = ("ctranslate2", "nncf", "sentencepiece", "sacrebleu", "torch")


def test_set(count: int) -> tuple[list[str], list[str]]:
    """Returns the first `count` sentences and their translations.

    Raises:
        RequestError: They are missing.
    """
    names = [harness.development_data(f"{TEST_SET}.{language}.gz") for language in ("en", "de")]
    pairs = [
        (normalize_whitespace(a), normalize_whitespace(b))
        for a, b in itertools.islice(read_pairs(",".join(map(str, names))), count)
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


# ----------------------------------------------------------------------------------------------------------- measuring


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, work: Work, case: Case) -> None:
        self.name, self.work, self.case = name, work, case
        self.system: System
        self.inputs: list[Any] = []

    def open(self, inputs: Sequence[Any]) -> list[str]:
        """Opens the engine and translates the first of the inputs.

        Args:
            inputs: Batches of tokens of task steps, else texts.

        Returns:
            The translations of texts.

        Raises:
            ZooError: A translation of task steps has another number of tokens.
        """
        self.system = PEERS[self.name].open(self.work, self.case)
        self.inputs = [self.system.prepare(batch) for batch in inputs] if self.case.steps else list(inputs)
        first = self.inputs[0] if self.case.steps else self.system.read(self.inputs[: self.case.batch_size])
        result = self.system.search(first)
        if self.case.steps and (wrong := {len(tokens) for tokens in self.system.tokens(result)} - {self.case.steps}):
            raise ZooError(
                f"found translations of {', '.join(map(str, sorted(wrong)))} tokens, expected {self.case.steps}"
            )
        processes.reset_peak()
        return [] if self.case.steps else self.system.write(result)

    def turn(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Translates the inputs with these indices.

        Returns:
            {"whole", "search": processor seconds, "clock", "tokens", "texts"}.
        """
        steps, clock, begin = self.case.steps, time.perf_counter(), time.process_time()
        ready = [self.inputs[i] for i in chosen] if steps else [self.system.read([self.inputs[i] for i in chosen])]
        read = time.process_time()
        results = [self.system.search(batch) for batch in ready]
        searched = time.process_time()
        texts = [] if steps else self.system.write(results[0])
        spent, lasted = time.process_time() - begin, time.perf_counter() - clock
        tokens = sum(len(sentence) for part in results for sentence in self.system.tokens(part))
        return {"whole": spent, "search": searched - read, "clock": lasted, "tokens": tokens, "texts": texts}

    def memory(self) -> dict[str, float]:
        """Returns peak and proportional memory of this process, in MB."""
        return {"peak": processes.memory_mb("VmHWM"), "shares": processes.memory_mb("Pss")}


def inputs_of(case: Case, work: Work, texts: Sequence[str]) -> list[Any]:
    """Returns the inputs of a case: texts, or batches of tokens.

    Args:
        case: The case.
        work: The model.
        texts: The test set; empty for random weights.
    """
    if not case.steps:
        return list(texts)
    vocabulary = work.vocabulary
    lengths = (FIREFOX_LENGTH, FIREFOX_LENGTH) if case.model == FIREFOX else LENGTHS
    sentences = vocabulary.encode(texts) if texts else drawn(len(vocabulary), POOL, lengths)
    fit = [sentence for sentence in sentences if LENGTHS[0] <= len(sentence) <= LENGTHS[1]]
    order = np.random.default_rng(0).permutation(len(fit))[: max(POOL, case.batch_size)].tolist()
    return [
        [fit[i] for i in order[start : start + case.batch_size]]
        for start in range(0, len(order) - case.batch_size + 1, case.batch_size)
    ]


def compare(
    case: Case,
    work: Work,
    peers: Sequence[str],
    rounds: int,
    text: tuple[list[str], list[str]],
    advance: harness.Advance,
) -> dict[str, Any]:
    """Times the engines `peers` in turn.

    Args:
        case: What is timed.
        work: The model.
        peers: Names of engines.
        rounds: Turns of each.
        text: Sentences and references of the test set.
        advance: Progress.

    Returns:
        {"model", "task", "batch_size", "beam", "steps", "sentences" (of a turn), "results": [{"engine",
        "sentences_per_second", its "tokens_per_second" (of the translations), "ms_a_step" (a batch's, task steps),
        "search_per_second" (sentences, tokenization left out): {"median", "spread"} of the rounds, "bleu", "chrf" (task
        text), "memory_mb": {"peak", "shares"}, "core_share"}], "ratios": {engine of this project: {peer: median over
        the rounds of how many times as fast}}, "left_out": {engine: reason}}.
    """
    inputs = inputs_of(case, work, text[0])
    size = max(1, TURN // case.batch_size) if case.steps else len(inputs)
    turns: dict[str, list[dict[str, Any]]] = {}
    with processes.Workers(work.folder.parent) as workers:
        for name in peers:
            workers.open(name, partial(Engine, name, work, case), inputs, **(isa() if "ctranslate2" in name else {}))
            advance(1)
        for turn in range(rounds):
            chosen = [i % len(inputs) for i in range(turn * size, (turn + 1) * size)]
            for name, measured in workers.ask_all("turn", chosen).items():
                turns.setdefault(name, []).append(measured)
            advance(1)
        memory = workers.ask_all("memory")
    turns = {name: series for name, series in turns.items() if name in memory}
    count = size * (case.batch_size if case.steps else 1)
    results = [
        {"engine": name, **summary(case, series, count, text[1]), "memory_mb": memory[name]}
        for name, series in turns.items()
    ]
    figures = {"sentences": count, "results": results, "ratios": ratios(turns), "left_out": workers.left_out}
    return case._asdict() | figures


def summary(
    case: Case, turns: Sequence[Mapping[str, Any]], sentences: int, references: Sequence[str]
) -> dict[str, Any]:
    """See `compare`."""
    whole = [turn["whole"] for turn in turns]
    rates: dict[str, Any] = {
        "sentences_per_second": harness.median([sentences / seconds for seconds in whole]),
        "tokens_per_second": harness.median([turn["tokens"] / turn["whole"] for turn in turns], 1),
        "core_share": harness.ratio(whole, [turn["clock"] for turn in turns]),
    }
    if case.steps:
        batches = sentences // case.batch_size
        return {**rates, "ms_a_step": harness.median([1e3 * seconds / batches / case.steps for seconds in whole], 4)}
    quality = {key: round(value, 2) for key, value in translation_metrics(turns[0]["texts"], references).items()}
    return {**rates, "search_per_second": harness.median([sentences / turn["search"] for turn in turns]), **quality}


def ratios(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """See `compare`."""
    seconds = {name: [turn["whole"] for turn in series] for name, series in turns.items()}
    ours = [name for name in seconds if name.startswith("zoo-")]
    peers = [name for name in seconds if name not in ours]
    return {name: {peer: harness.ratio(seconds[peer], seconds[name]) for peer in peers} for name in ours}


def fitting(model: str, peers: Sequence[str]) -> list[str]:
    """Returns the engines that read the format of a model."""
    return [peer for peer in peers if peer.startswith("zoo-") or PEERS[peer].marian == (model == FIREFOX)]


def prepare(model: str, task: str, peers: Sequence[str], scratch: Path, steps: int) -> tuple[Work, dict[str, str]]:
    """Writes a model's folder and the models of its peers; returns (work, {engine: reason of its absence})."""
    left_out: dict[str, str] = {}
    work = Work(scratch / f"{Path(model).name}-{task}" / "model")
    work.made("").mkdir(parents=True, exist_ok=True)
    if not work.folder.is_dir():
        processes.in_process(copied, model, work.folder, steps, log=work.made("model.log"))
    for name in fitting(model, peers):
        with harness.leave_out(name, left_out):
            processes.in_process(make, name, work, log=work.made(f"{name}.log"))
    return work, left_out


def cases(
    models: Sequence[str], tasks: Sequence[str], sizes: Sequence[int], beams: Sequence[int], steps: int
) -> Iterator[Case]:
    """Yields the cases in order."""
    for model, task in itertools.product(models, tasks):
        if task == "steps":
            yield from (Case(model, task, size, beam, steps) for size in sizes for beam in beams)
        elif model not in WITHOUT_TEXT:
            yield Case(model, task, sizes[-1], beams[-1])


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", None, WITHOUT_TEXT)
    parser.names("--tasks", "task", TASKS)
    parser.names("--peers", "engine", PEERS)
    parser.numbers("--batch-size", "1,32", "batch sizes")
    parser.numbers("--beam", "1,4", "beam sizes")
    parser.count("--steps", STEPS, "tokens of a sentence of task steps")
    parser.count("--sentences", 1000, "sentences of the test set")
    parser.count("--rounds", 9, "turns of each engine")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"cases": [`compare`], "environment"}."""
    models, peers = args.models, args.peers
    harness.require_known("model", [name for name in models if not Path(name).is_dir()], [*WITHOUT_TEXT, *zoo.names()])
    chosen = list(cases(models, args.tasks, args.batch_size, args.beam, args.steps))
    if not chosen:
        raise RequestError("found nothing to do: random weights have only the task steps")
    text = test_set(args.sentences) if set(models) - set(WITHOUT_TEXT) else ([], [])
    about = f"multi30k {Path(TEST_SET).name}, the first {len(text[0])} sentences"
    data = {"test_set": about, "signatures": signatures()} if text[0] else {}
    facts = harness.environment(*PACKAGES, rounds=args.rounds, ctranslate2=isa() or "default", **data)
    prepared: dict[tuple[str, str], tuple[Work, dict[str, str]]] = {}
    steps = len(chosen) * (len(peers) + args.rounds)
    with harness.folder(args.work) as scratch, progress("comparing", steps) as advance:

        def one(case: Case) -> dict[str, Any]:
            key = (case.model, case.task)
            if key not in prepared:
                prepared[key] = prepare(*key, peers, scratch, args.steps)
            work, left_out = prepared[key]
            able = [name for name in fitting(case.model, peers) if name not in left_out]
            able = [name for name in able if not (case.steps and PEERS[name].texts)]
            pairs = ([], []) if case.model in WITHOUT_TEXT else text
            result = compare(case, work, able, args.rounds, pairs, advance)
            return {**result, "left_out": left_out | result["left_out"]}

        return harness.gather("cases", chosen, one, args.output, facts)

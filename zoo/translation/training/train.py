"""Training of translation models, in one process or, under torchrun, in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import sentencepiece
import torch
from torch import distributed

import zoo
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from pipelines.core.files import write_bytes, write_json
from pipelines.models.npz import write_npz
from zoo.training.runs import (
    Processes,
    load_checkpoint,
    plot_curves,
    processes,
    provenance,
    require_output,
    save_checkpoint,
    save_weights,
)
from zoo.translation.data.parallel_text import (
    VOCABULARY,
    ParallelText,
    Vocabulary,
    batches,
    decoder_samples,
    learn_vocabulary,
    load_parallel_text,
)
from zoo.translation.data.text_files import Pair, sources
from zoo.translation.data.vocabularies import ImportedVocabulary
from zoo.translation.metrics import signatures
from zoo.translation.models.checkpoints import MODEL, STATE, inherit, load_teacher, open_network
from zoo.translation.models.decoding import translate
from zoo.translation.search.config import DEFAULT_SEARCH
from zoo.translation.train_config import FROZEN, TrainingConfig
from zoo.translation.training import adapters, qat
from zoo.translation.training.distillation import distill_corpus
from zoo.translation.training.start import StartModel, mixed
from zoo.translation.training.trainer import Trainer
from zoo.translation.training.weight_averaging import average, groups, weights_after

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer

CALIBRATION_SENTENCES = 256
DATA_SETTINGS = ("languages", "swap", "validation_data", "validation", "max_length", "max_ratio")


def _stopped(history: Sequence[Mapping[str, Any]], config: TrainingConfig) -> bool:
    """Returns whether training is finished."""
    best = groups(history, 1)["best"]
    return len(history) >= config.epochs or (bool(best) and len(history) - best[0] >= config.patience)


def train(
    build: type[Transformer],
    data: Any,
    output: str | Path,
    *,
    config: TrainingConfig,
    resume: bool = False,
    start_from: str | Path | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Trains a Transformer on parallel text.

    `output` gets model.pt (averaged weights), vocabulary.model, train.json (features of the model, config, metrics with
    sacreBLEU's signatures), calibration.npz (see `decoder_samples`), history.json, curves.png and, after every epoch,
    checkpoint/. A seed gives the same weights on one machine with one number of processes and threads, resumed or not.
    Under torchrun every process calls this function with the same arguments; process 0 writes.

    Args:
        build: Class of the network.
        data: See `zoo.translation.data.text_files.read_pairs`.
        output: The model folder to write.
        config: The training recipe.
        resume: Whether to continue from the checkpoint in `output`.
        start_from: Model folder whose network, weights, vocabulary and shortlist are taken over.
        on_error: "raise" or "skip" for lines that are no pairs.

    Returns:
        {"bleu", "chrf", "loss"} of the held-out pairs; with a start model also "bleu_before", and of the held-out pairs
        of `config.keep_data` "kept_bleu" and "kept_bleu_before".

    Raises:
        RequestError: The data cannot be used, the output folder is in use, or the checkpoint is of another run.
    """
    output = Path(output)
    with processes() as group:
        require_output(output, STATE, resume)
        config.require_start(start_from is not None)
        start = None if start_from is None else StartModel.read(Path(start_from), config)
        config = config if start is None else start.settled(config)
        vocabulary = _own_vocabulary(output, config, resume) if start is None else start.vocabulary
        text, old = _read_texts(data, config, vocabulary, group, on_error)
        torch.manual_seed(config.seed)
        if start is not None:
            model = open_network(start.about, start.vocabulary, build, config.dropout)
        else:
            model = build.of(config.arch, len(text.vocabulary), pre_norm=config.pre_norm, dropout=config.dropout)
            if config.inherit:
                inherit(model, config)
        teacher = load_teacher(config, model, text.vocabulary) if config.soft else None
        if config.adapters:
            adapters.add(model, config.adapters, FROZEN if config.frozen else ())
        if config.qat:
            config = qat.settled(config, start, group.count)
            qat.prepare(model, zoo.load(str(start_from)))
        run = {"config": asdict(config), "data": text.digest, "start": start and start.digest}
        state = load_checkpoint(output / STATE, run, config.ADDED) if resume else None
        if config.teacher:
            text.train = distill_corpus(text, config, group, output, resumed=state is not None)
        trainer = Trainer(model, config, group, teacher, start.rules if start else DEFAULT_SEARCH)
        before = trainer.quality(text, old, "_before") if start and not state else {}
        if state:
            trainer.restore(state)
            before = state.get("before", {})
        history: list[dict[str, Any]] = state["history"] if state else []
        order = batches(text.train, config.batch_size)
        used = state["used"] if state else trainer.choose(text.train, order[len(order) // 2])
        trainer.use(used)
        while not _stopped(history, config):
            history.append(trainer.epoch(text.train, len(history)) | trainer.validate(text))
            if group.rank == 0:
                _keep(output, trainer, text, history, {"run": run, "used": used, "before": before})
            group.checkpointed(output)
        metrics, chosen = _choose(output, trainer, text, history)
        if before:
            metrics = {**metrics, **before, **(trainer.quality(None, old) if old else {})}
        if group.rank == 0:
            record = {**chosen, **used, "processes": group.count}
            _write(output, trainer, text, history, metrics, record, data, start)
            if config.qat:
                qat.save_ranges(model, zoo.load(str(start_from)), output)
        group.same(None)  # the others wait for the files
    return metrics


def _own_vocabulary(output: Path, config: TrainingConfig, resume: bool) -> Vocabulary | None:
    """Returns the vocabulary of the checkpoint or of the teacher; None: it is to be learned."""
    if resume:
        return Vocabulary.read(output / "checkpoint" / VOCABULARY)
    if not config.inherit:
        return None
    if not config.teacher:
        raise RequestError("found inherit without a teacher to inherit from; name one with --set teacher=FOLDER")
    return Vocabulary.read(zoo.load(config.teacher).path / VOCABULARY)


def _read_texts(
    data: Any,
    config: TrainingConfig,
    inherited: Vocabulary | ImportedVocabulary | None,
    group: Processes,
    on_error: str,
) -> tuple[ParallelText, ParallelText | None]:
    """Reads the data, and those of `config.keep_data`, which are mixed into the training pairs."""

    def vocabulary(pairs: Sequence[Pair]) -> Vocabulary | ImportedVocabulary:
        return inherited or Vocabulary(
            group.same(learn_vocabulary(pairs, config.vocabulary, config.seed) if group.rank == 0 else b"")
        )

    options: dict[str, Any] = {name: getattr(config, name) for name in DATA_SETTINGS}
    options |= {"seed": config.seed, "on_error": on_error}
    text = load_parallel_text(data, vocabulary, **options)
    if not config.keep_data:
        return text, None
    old = load_parallel_text(config.keep_data, lambda _: text.vocabulary, **options | {"validation_data": ""})
    text.train = mixed(text.train, old.train, config.keep_share, config.seed)
    return text, old


def _keep(
    output: Path, trainer: Trainer, text: ParallelText, history: Sequence[dict[str, Any]], record: Mapping[str, Any]
) -> None:
    """Writes the checkpoint of an epoch and deletes weights that cannot become part of the model."""
    last, config = history[-1], trainer.config
    line = (
        f"epoch {last['epoch']}/{config.epochs}  train {last['train_loss']:.3f}  held out "
        f"{last['loss']:.3f}  BLEU {last['bleu']:.2f}"
    )
    print_line(f"{line}  {last['seconds']:.0f} s, {last['tokens'] / last['seconds']:,.0f} tokens/s")
    state = adapters.weights(trainer.model)
    save_checkpoint(weights_after(output, last["epoch"]), {name: tensor.cpu() for name, tensor in state.items()})
    if isinstance(text.vocabulary, Vocabulary):
        write_bytes(output / "checkpoint" / VOCABULARY, text.vocabulary.content)
    save_checkpoint(output / STATE, {**record, "history": list(history), **trainer.state()})
    kept = {weights_after(output, epoch) for epochs in groups(history, config.average).values() for epoch in epochs}
    for path in set((output / "checkpoint").glob("epoch-*.pt")) - kept:
        path.unlink()


def _choose(
    output: Path, trainer: Trainer, text: ParallelText, history: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Loads the candidate weights with the best BLEU; returns their metrics and how they were chosen."""
    group, candidates, seen = trainer.group, [], []
    adapters.merge(trainer.model)
    for name, epochs in groups(history, trainer.config.average).items():
        if epochs in seen:
            continue
        seen.append(epochs)
        state = average(output, epochs) if group.rank == 0 else {}
        if group.rank == 0:
            trainer.model.load_state_dict(state)
        if group.count > 1:
            for tensor in trainer.model.state_dict().values():
                distributed.broadcast(tensor, 0)
        candidates.append(
            (
                trainer.validate(text),
                name,
                epochs,
                {key: weight.cpu().clone() for key, weight in trainer.model.state_dict().items()},
            )
        )
    metrics, name, epochs, state = max(candidates, key=lambda candidate: candidate[0]["bleu"])
    trainer.model.load_state_dict(state)
    return metrics, {
        "weights": name,
        "averaged": epochs,
        "candidates": {name: scores["bleu"] for scores, name, *_ in candidates},
    }


def _write(
    output: Path,
    trainer: Trainer,
    text: ParallelText,
    history: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any],
    record: Mapping[str, Any],
    data: Any,
    start: StartModel | None,
) -> None:
    config = trainer.config
    save_weights(output / MODEL, qat.weights(trainer.model) if config.qat else trainer.model.state_dict())
    if start is None:
        write_bytes(output / VOCABULARY, text.vocabulary.content)
    else:
        start.copy_files(output)
    count = min(CALIBRATION_SENTENCES, len(text.train))
    chosen = np.sort(np.random.default_rng(config.seed).choice(len(text.train), count, replace=False))
    sentences = [text.train.pair(int(i))[0] for i in chosen]
    translated = translate(trainer.model, sentences, rules=trainer.rules, bf16=trainer.bf16)
    translations = [best[0].tokens for best in translated]
    samples: dict[str, Any] = decoder_samples(sentences, translations)
    write_npz(output / "calibration.npz", samples)
    write_json(output / "history.json", list(history))
    left = {"train_loss": ("loss, training", "C0--"), "loss": ("loss, held out", "C0-")}
    best = groups(history, 1)["best"][0]
    axes = ("cross entropy, nats a token", "BLEU (greedy)")
    plot_curves(output / "curves.png", history, left, {"bleu": ("BLEU, held out", "C1-")}, axes, best)
    files = [Path(part) for path in sources(data) for part in ([path] if Path(path).is_file() else path.split(","))]
    arch = "" if start and start.imported else config.arch
    features = {
        **({"arch": arch} if arch else {}),
        "pre_norm": trainer.model.pre_norm,
        "languages": config.languages,
        "max_length": config.max_length,
        **(start.features if start else {}),
    }
    if (model_config := trainer.model.config) != trainer.model.architectures.get(arch):
        features["form"] = model_config.to_json()
    about = {
        "features": features,
        "form": asdict(model_config),
        "vocabulary": len(text.vocabulary),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "config": asdict(config),
        "metrics": dict(metrics),
        "signatures": signatures(),
        "rows": {"train": len(text.train), "held_out": len(text.held_out), "left_out": dict(text.faults)},
        **record,
        **({"imported": start.origin} if start and start.imported else {}),
        "epochs": len(history),
        "seconds": round(sum(entry["seconds"] for entry in history)),
        **provenance(config.seed, files, sentencepiece=sentencepiece.__version__),
    }
    write_json(output / "train.json", about)

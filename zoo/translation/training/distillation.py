"""Sequence-level knowledge distillation: translations of a teacher as targets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import machine
from pipelines.core.files import sha256, write_text
from pipelines.core.progress import progress
from pipelines.models.npz import write_npz
from zoo.training.runs import Processes
from zoo.translation.data.parallel_text import Corpus, ParallelText, from_tokens
from zoo.translation.data.synthesis import sample_sentences
from zoo.translation.inference import TranslationPipeline
from zoo.translation.train_config import TrainingConfig

PAIRS, DIGEST = "distilled.npz", "distilled.sha256"  # in a checkpoint: the pairs, and the digest of their recipe
TEACHER_WINDOW = 4096  # sentences between two updates of the progress bar


def distill_corpus(
    text: ParallelText, config: TrainingConfig, group: Processes, output: Path, resumed: bool = False
) -> Corpus:
    """Translates the training pairs by the teacher, or reads the translations of an earlier run of the recipe.

    Translations are stored with the checkpoint. Those of a run in a sibling folder, such as another step of a strategy,
    are reused.

    Args:
        text: The parallel text.
        config: The training recipe.
        group: The processes of the training.
        output: The model folder.
        resumed: Whether the training resumes from a checkpoint.

    Returns:
        The pairs to train on.
    """
    path = output / "checkpoint" / PAIRS
    if resumed and path.is_file():
        return _read(path)
    pairs = [text.train.pair(i) for i in range(len(text.train))]
    own = [source for source, _ in pairs]
    if config.synthetic:
        own += sample_sentences(own, config.synthetic, seed=config.seed, longest=config.max_length)
    teacher = zoo.pipeline(config.teacher, threads=machine.cores())
    assert isinstance(teacher, TranslationPipeline)
    teacher.beam, vocabulary, translations = config.teacher_beam, teacher.vocabulary, []
    digest = _digest(teacher, own, text, config)
    if group.same(existing := _find(output, digest) if group.rank == 0 else None) is not None:
        reused: Corpus = group.same(_read(existing) if existing is not None else None)
        if group.rank == 0 and existing != path.absolute():
            _save(reused, path, digest)
        return reused
    sentences = vocabulary.encode(text.vocabulary.decode([source[:-1].tolist() for source in own]))
    if group.rank == 0:
        with progress("the teacher translates", len(sentences)) as advance:
            for begin in range(0, len(sentences), TEACHER_WINDOW):
                translations += [
                    hypotheses[0].tokens for hypotheses in teacher.translate(sentences[begin : begin + TEACHER_WINDOW])
                ]
                advance(min(TEACHER_WINDOW, len(sentences) - begin))
    translations = group.same(translations)
    distilled = [
        pair
        for pair in zip(own, text.vocabulary.encode(vocabulary.decode(translations)), strict=True)
        if 1 < len(pair[1]) <= config.max_length
    ]
    corpus = from_tokens(*map(list, zip(*distilled, *(pairs if config.references else ()), strict=True)))
    if group.rank == 0:
        _save(corpus, path, digest)
    return corpus


def _digest(teacher: TranslationPipeline, sources: Sequence[Any], text: ParallelText, config: TrainingConfig) -> str:
    """Returns the digest of everything that determines the pairs."""
    folder = teacher.folder
    sha = hashlib.sha256(f"{sha256(folder.ensure('int8.onnx'))} {folder.preprocessing} {text.train.digest}".encode())
    sha.update(f"{config.teacher_beam} {config.references} {config.max_length}".encode())
    sha.update(text.vocabulary.content)
    for source in sources:
        sha.update(np.asarray(source, np.int64).tobytes())
    return sha.hexdigest()


def _find(output: Path, digest: str) -> Path | None:
    """Returns the file of equal pairs of a run in `output` or a sibling folder; None without one."""
    for file in sorted(output.absolute().parent.glob(f"*/checkpoint/{DIGEST}")):
        if file.with_name(PAIRS).is_file() and file.read_text() == digest:
            return file.with_name(PAIRS)
    return None


def _read(path: Path) -> Corpus:
    with np.load(path) as arrays:
        return Corpus(**arrays)


def _save(corpus: Corpus, path: Path, digest: str) -> None:
    path.with_name(DIGEST).unlink(missing_ok=True)  # it may belong to pairs of an earlier run
    write_npz(path, vars(corpus))
    write_text(path.with_name(DIGEST), digest)

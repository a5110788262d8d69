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
from zoo.translation.data.synthesis import imitations
from zoo.translation.inference import TranslationPipeline
from zoo.translation.training.config import TrainingConfig

KEPT, OF = "distilled.npz", "distilled.sha256"  # in a checkpoint: the pairs, and a digest of what they were made of
DISTILLATION_TARGETS = 4096  # sentences between two steps of the teacher's progress


def distilled(
    text: ParallelText, config: TrainingConfig, group: Processes, output: Path, resumed: bool = False
) -> Corpus:
    """Translates the training pairs by the teacher, or reads the translations that an earlier run of the same recipe
    wrote.

    Translations are stored with the checkpoint. Those of a run in a sibling folder are used as well, such as another
    step of a strategy.

    Args:
        text: The parallel text.
        config: The training recipe.
        group: The processes of the training.
        output: The model folder.
        resumed: Whether the training resumes from a checkpoint.

    Returns:
        The pairs to train on.
    """
    kept = output / "checkpoint" / KEPT
    if resumed and kept.is_file():
        return _read(kept)
    pairs = [text.train.pair(i) for i in range(len(text.train))]
    own = [source for source, _ in pairs]
    if config.synthetic:
        own += imitations(own, config.synthetic, seed=config.seed, longest=config.max_length)
    teacher = zoo.pipeline(config.teacher, threads=machine.cores())
    assert isinstance(teacher, TranslationPipeline)
    teacher.beam, vocabulary, said = config.teacher_beam, teacher.vocabulary, []
    made_of = _digest(teacher, own, text, config)
    if group.same(beside := _beside(output, made_of) if group.rank == 0 else None) is not None:
        taken: Corpus = group.same(_read(beside) if beside is not None else None)
        if group.rank == 0 and beside != kept.absolute():
            _keep(taken, kept, made_of)
        return taken
    asked = vocabulary.encode(text.vocabulary.decode([each[:-1].tolist() for each in own]))
    if group.rank == 0:
        with progress("the teacher translates", len(asked)) as advance:
            for begin in range(0, len(asked), DISTILLATION_TARGETS):
                said += [each[0].tokens for each in teacher.translate(asked[begin : begin + DISTILLATION_TARGETS])]
                advance(min(DISTILLATION_TARGETS, len(asked) - begin))
    said = group.same(said)
    spoken = [
        pair
        for pair in zip(own, text.vocabulary.encode(vocabulary.decode(said)), strict=True)
        if 1 < len(pair[1]) <= config.max_length
    ]
    found = from_tokens(*map(list, zip(*spoken, *(pairs if config.references else ()), strict=True)))
    if group.rank == 0:
        _keep(found, kept, made_of)
    return found


def _digest(teacher: TranslationPipeline, sources: Sequence[Any], text: ParallelText, config: TrainingConfig) -> str:
    """Of all that the pairs depend on."""
    folder = teacher.folder
    found = hashlib.sha256(f"{sha256(folder.ensure('int8.onnx'))} {folder.preprocessing} {text.train.digest}".encode())
    found.update(f"{config.teacher_beam} {config.references} {config.max_length}".encode())
    found.update(text.vocabulary.content)
    for each in sources:
        found.update(np.asarray(each, np.int64).tobytes())
    return found.hexdigest()


def _beside(output: Path, made_of: str) -> Path | None:
    """The pairs that a training in `output`, or in a folder beside it, made of the same, if any."""
    for each in sorted(output.absolute().parent.glob(f"*/checkpoint/{OF}")):
        if each.with_name(KEPT).is_file() and each.read_text() == made_of:
            return each.with_name(KEPT)
    return None


def _read(path: Path) -> Corpus:
    with np.load(path) as arrays:
        return Corpus(**arrays)


def _keep(found: Corpus, path: Path, made_of: str) -> None:
    path.with_name(OF).unlink(missing_ok=True)  # which is of other pairs, where a training began anew
    write_npz(path, vars(found))
    write_text(path.with_name(OF), made_of)

"""What a teacher says, for a student to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import zoo
from pipelines.core import machine
from pipelines.core.files import replacing
from pipelines.core.progress import progress
from zoo.training import Processes
from zoo.transformer_mt.data import Corpus, ParallelText, from_tokens
from zoo.transformer_mt.predict import TranslationPipeline
from zoo.transformer_mt.settings import Settings
from zoo.transformer_mt.synthesis import imitations

TAUGHT = 4096  # sentences between two steps of the teacher's progress


def distilled(text: ParallelText, config: Settings, group: Processes, output: Path) -> Corpus:
    """The pairs to train on with the teacher's translations; made once, and kept with the checkpoint."""
    kept = output / "checkpoint" / "distilled.npz"
    if kept.is_file():
        with np.load(kept) as arrays:
            return Corpus(**arrays)
    pairs = [text.train.pair(i) for i in range(len(text.train))]
    own = [source for source, _ in pairs]
    if config.synthetic:
        own += imitations(own, config.synthetic, seed=config.seed, longest=config.max_length)
    teacher = zoo.pipeline(config.teacher, threads=machine.cores())
    assert isinstance(teacher, TranslationPipeline)
    teacher.beam, vocabulary, said = config.teacher_beam, teacher.vocabulary, []
    asked = vocabulary.encode(text.vocabulary.decode([each[:-1].tolist() for each in own]))
    if group.rank == 0:
        with progress("the teacher translates", len(asked)) as advance:
            for begin in range(0, len(asked), TAUGHT):
                said += [each[0].tokens for each in teacher.translate(asked[begin : begin + TAUGHT])]
                advance(min(TAUGHT, len(asked) - begin))
    said = group.same(said)
    spoken = [
        pair
        for pair in zip(own, text.vocabulary.encode(vocabulary.decode(said)), strict=True)
        if 1 < len(pair[1]) <= config.max_length
    ]
    found = from_tokens(*map(list, zip(*spoken, *(pairs if config.references else ()), strict=True)))
    if group.rank == 0:
        with replacing(kept) as temporary:
            np.savez(temporary, **vars(found))
    return found

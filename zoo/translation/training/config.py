"""What a training may be told."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from pipelines.core.errors import RequestError
from zoo.training.runs import BELOW_1, FROM_0, PRECISION, SEED, Range, require_settings
from zoo.translation.data.parallel_text import POSITIONS

FROZEN = ("encoder.", "encoder_norm.", "embedding.")  # begin the names of what `Settings.frozen` leaves as it is
RANGES = {
    "languages": Range("source-target, as en-de", lambda languages: languages.count("-") == 1),
    "max_length": Range(f"2 to {POSITIONS}", lambda tokens: 2 <= tokens <= POSITIONS),
    "precision": PRECISION,
    "seed": SEED,
    "soft": Range("0 to 1", lambda share: 0 <= share <= 1),
    **dict.fromkeys(("dropout", "label_smoothing"), BELOW_1),
    "schedule": Range("inverse-sqrt or cosine", lambda name: name in ("inverse-sqrt", "cosine")),
    **dict.fromkeys(("warmup", "weight_decay", "max_ratio", "hints", "attention", "synthetic"), FROM_0),
}


@dataclass(frozen=True)
class Settings:
    """The training recipe.

    arch: a key of `zoo.translation.models.config.FORMS`. pre_norm: normalize before a layer, not after the sum.
    dropout: of embeddings and of what a layer adds.
    vocabulary: pieces, at most. languages: source-target, e.g. "en-de"; names the columns of data sets. swap: files
    hold target, source.
    max_length, max_ratio: tokens of a sentence to train on, and how much longer one side may be, see
    `zoo.translation.data.parallel_text.corpus`.
    validation_data, validation: what is held out, see `zoo.translation.data.parallel_text.open_text`.
    epochs: at most; training ends `patience` epochs after the best BLEU of the held-out sentences (greedy).
    batch_size: tokens, longer side, with padding, of all processes together.
    learning_rate: the greatest; it rises over `warmup` steps (a third of all, at most), then falls by the `schedule`:
    with the square root of the steps, or as a cosine does, to 0 after the last.
    clip: greatest norm of the gradient.
    average: epochs whose weights are averaged: the last and the best so many are tried, and the best epoch alone.
    precision: auto, fp32 or bf16; auto takes bf16 on a GPU that has it, and times a step of each on a CPU that has it.
    tune_communication: time at the start how processes send gradients fastest (`zoo.training.communication`).
    accumulate: parts
    of a batch that are computed one after another, in that much less memory; gradients are exchanged after the last.
    teacher: a model folder whose translations (beam `teacher_beam`) are trained on in place of the data's (Kim and Rush
    2016). inherit: its vocabulary is the student's, and its weights are where those of the student begin that bear the
    same name and have the same shape. frozen: of these the encoder's and the embeddings stay as they are: the decoder
    alone is trained, in half of the time. soft: how much of the loss is the cross entropy to the teacher's own
    distribution of each token (Hinton et al. 2015), whose vocabulary must be the student's. hints: with soft, as many
    times is added how far each layer of the decoder is from the teacher's, its squared difference over the teacher's
    square (Romero et al. 2015). attention: the same of where each target token looks in the source, the mean over the
    heads of a layer's cross-attention (Jiao et al. 2020, "TinyBERT"), by layers from the last. synthetic: so many
    sentences like those of the source are added, see `zoo.translation.data.synthesis`, for the teacher to translate.
    references: the data's own translations are trained on beside the teacher's. qat: fine-tune with the rounding of
    int8 (`zoo.translation.training.qat`), whose ranges the model then keeps; in fp32, in one process, at a tenth of the
    learning rate. Raises RequestError for values out of range.
    """

    SOFT: ClassVar[str] = "soft"  # what a strategy calls "weight"
    HINTS: ClassVar[str] = "hints"  # and "features"
    KEPT: ClassVar[tuple[str, ...]] = ("arch", "pre_norm", "languages", "max_length")  # of a model that is gone on from
    arch: str = "tiny"
    pre_norm: bool = True
    dropout: float = 0.2
    vocabulary: int = 8000
    languages: str = "en-de"
    swap: bool = False
    max_length: int = 128
    max_ratio: float = 3.0
    validation_data: str = ""
    validation: int = 1000
    epochs: int = 40
    patience: int = 6
    batch_size: int = 4096
    learning_rate: float = 1e-3
    warmup: int = 4000
    schedule: str = "inverse-sqrt"
    clip: float = 1.0
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    average: int = 5
    precision: str = "auto"
    tune_communication: bool = False
    accumulate: int = 1
    teacher: str = ""
    teacher_beam: int = 4
    inherit: bool = False
    frozen: bool = False
    soft: float = 0.0
    hints: float = 0.0
    attention: float = 0.0
    synthetic: int = 0
    references: bool = False
    qat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES)
        if self.frozen and not self.inherit:
            raise RequestError("found frozen without inherit: an encoder that nobody trained would stay so")
        for name in ("soft", "synthetic", "references"):
            if getattr(self, name) and not self.teacher:
                raise RequestError(f"found {name} without a teacher; name one with --set teacher=FOLDER")
        for name in ("hints", "attention"):
            if getattr(self, name) and not self.soft:
                raise RequestError(
                    f"found {name} without soft; train on the teacher's distributions too: --set soft=0.5"
                )

    def rate(self, step: int, epoch_steps: int) -> float:
        """The learning rate at `step`, counted from 0."""
        warm = max(1, min(self.warmup, self.epochs * epoch_steps // 3))
        if self.schedule == "cosine" and step >= warm:
            share = (step - warm) / max(1, self.epochs * epoch_steps - warm)
            return self.learning_rate * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        return self.learning_rate * min((step + 1) / warm, math.sqrt(warm / (step + 1)))

"""Training recipe of translation models."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from pipelines.core.errors import RequestError
from zoo.training.settings import BELOW_1, FROM_0, PRECISION, SEED, SHARE, Range, require_settings
from zoo.translation.data.tokens import POSITIONS

# Prefixes of the weights that `TrainingConfig.frozen` does not train
FROZEN = ("encoder.", "encoder_norm.", "embedding.", "source_embedding.", "source_norm.")
RANGES = {
    "languages": Range("source-target, as en-de", lambda languages: languages.count("-") == 1),
    "max_length": Range(f"2 to {POSITIONS}", lambda tokens: 2 <= tokens <= POSITIONS),
    "precision": PRECISION,
    "seed": SEED,
    "soft": SHARE,
    **dict.fromkeys(("dropout", "label_smoothing", "keep_share"), BELOW_1),
    "schedule": Range("inverse-sqrt or cosine", lambda name: name in ("inverse-sqrt", "cosine")),
    **dict.fromkeys(("warmup", "weight_decay", "max_ratio", "hints", "attention", "synthetic", "adapters"), FROM_0),
}


@dataclass(frozen=True)
class TrainingConfig:
    """Training recipe.

    Attributes:
        arch: A key of `zoo.translation.models.transformer.ARCHITECTURES`.
        pre_norm: Whether layers normalize their input (pre-LN) instead of their sum (post-LN).
        dropout: Dropout probability of embeddings and sublayers.
        vocabulary: Maximum number of pieces.
        languages: "source-target", such as "en-de"; names the columns of data sets.
        swap: Whether files hold target and source.
        max_length: Maximum number of tokens of a sentence to train on.
        max_ratio: Maximum ratio of the tokens of both sides, see `zoo.translation.data.parallel_text.corpus`.
        validation_data: Pairs to hold out, see `zoo.translation.data.parallel_text.load_parallel_text`.
        validation: Number of pairs to hold out.
        epochs: Maximum number of epochs.
        patience: Training ends so many epochs after the best BLEU of the held-out sentences (greedy search).
        batch_size: Target or source tokens of a batch, with padding, of all processes together.
        learning_rate: Peak learning rate, after `warmup` steps (a third of all at most).
        warmup: Steps of linear warm-up.
        schedule: "inverse-sqrt", or "cosine" to 0 after the last step.
        clip: Maximum norm of the gradient.
        weight_decay: Weight decay.
        label_smoothing: Label smoothing.
        average: The weights of the last and of the best so many epochs are averaged, and compared with the best epoch.
        precision: "auto", "fp32" or "bf16"; auto takes bf16 on a GPU that has it, and times both on a CPU that has it.
        tune_communication: Whether to time ways of sending gradients (`zoo.training.communication`).
        accumulate: Number of parts of a batch that are computed one after another to save memory.
        teacher: Model folder whose translations are trained on (sequence-level distillation, Kim and Rush 2016).
        teacher_beam: Beam size of the teacher.
        inherit: Whether the student takes the teacher's vocabulary, and its weights of the same names and shapes.
        frozen: Whether the encoder and the embeddings of the start model, or the inherited ones, are not trained; an
            epoch takes half of the time.
        soft: Share of the loss that is the cross entropy to the teacher's distribution (Hinton et al. 2015); needs the
            teacher's vocabulary.
        hints: Weight of the squared difference of decoder layers from the teacher's, relative to the teacher's square
            (Romero et al. 2015); needs `soft`.
        attention: Weight of the same of the mean cross-attention of each layer, counted from the last (Jiao et al.
            2020, "TinyBERT").
        synthetic: Number of synthetic source sentences for the teacher, see `zoo.translation.data.synthesis`.
        references: Whether to train on the data's own translations as well.
        qat: Whether to fine-tune with the rounding of int8 (`zoo.translation.training.qat`): in fp32, in one process,
            at a tenth of the learning rate.
        adapters: Fine-tuning: rank of adapters of all linear layers, which alone are trained and then merged into the
            weights (Hu et al. 2022, "LoRA"); 0: all weights are trained.
        keep_data: Fine-tuning: parallel text of the kind that the start model was trained on, see
            `zoo.translation.data.text_files.read_pairs`. Its BLEU is measured before and after.
        keep_share: Share of `keep_data` in the pairs to train on; 0: it is only measured.
        source_language: Fine-tuning: source language of an imported multilingual model; "": the model's.
        target_language: Fine-tuning: target language of an imported multilingual model; "": the model's.
        prompt: Fine-tuning: text before every source of an imported model, such as a task of T5; "": the model's.
        seed: Seed of all random numbers.

    Raises:
        RequestError: A value is out of range.
    """

    SOFT: ClassVar[str] = "soft"  # option of the loss weight in strategies
    HINTS: ClassVar[str] = "hints"  # option of the feature loss in strategies
    # added after version 1: their values in checkpoints of earlier versions
    ADDED: ClassVar[dict[str, object]] = {
        **dict.fromkeys(("keep_data", "source_language", "target_language", "prompt"), ""),
        "adapters": 0,
        "keep_share": 0.2,
    }
    # taken from the start model
    KEPT: ClassVar[tuple[str, ...]] = ("arch", "pre_norm", "languages", "max_length", "vocabulary")
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
    adapters: int = 0
    keep_data: str = ""
    keep_share: float = 0.2
    source_language: str = ""
    target_language: str = ""
    prompt: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES)
        if self.adapters and self.qat:
            raise RequestError("found adapters and qat; fine-tune with adapters first, then with qat")
        for name in ("soft", "synthetic", "references"):
            if getattr(self, name) and not self.teacher:
                raise RequestError(f"found {name} without a teacher; name one with --set teacher=FOLDER")
        for name in ("hints", "attention"):
            if getattr(self, name) and not self.soft:
                raise RequestError(
                    f"found {name} without soft; train on the teacher's distributions too: --set soft=0.5"
                )

    def rate(self, step: int, epoch_steps: int) -> float:
        """Returns the learning rate of a step.

        Args:
            step: Number of the step, from 0.
            epoch_steps: Steps of an epoch.
        """
        warm = max(1, min(self.warmup, self.epochs * epoch_steps // 3))
        if self.schedule == "cosine" and step >= warm:
            share = (step - warm) / max(1, self.epochs * epoch_steps - warm)
            return self.learning_rate * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        return self.learning_rate * min((step + 1) / warm, math.sqrt(warm / (step + 1)))

    def require_start(self, start: bool) -> None:
        """Checks settings that need a trained model to start from.

        Args:
            start: Whether there is one.

        Raises:
            RequestError: A setting needs a start model.
        """
        if self.frozen and not start and not self.inherit:
            raise RequestError(
                "found frozen without inherit, which would freeze an untrained encoder; add --set inherit=true"
            )
        for name in ("adapters", "keep_data", "source_language", "target_language", "prompt"):
            if getattr(self, name) and not start:
                raise RequestError(f"found {name} without a model to start from; run: zoo finetune MODEL")


@dataclass(frozen=True)
class ImportedConfig(TrainingConfig):
    """Recipe of fine-tuning of a model of another toolkit.

    Raises:
        RequestError: A value is out of range, or is not supported for these models.
    """

    KEPT: ClassVar[tuple[str, ...]] = ()
    UNSUPPORTED: ClassVar[tuple[str, ...]] = ("arch", "pre_norm", "vocabulary", "teacher", "inherit", "qat")
    dropout: float = 0.1
    epochs: int = 3
    patience: int = 2
    batch_size: int = 2048
    learning_rate: float = 5e-5
    warmup: int = 200
    average: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.UNSUPPORTED:
            if getattr(self, name) != getattr(TrainingConfig, name):
                raise RequestError(f"found {name}, which imported models do not support; leave it out")


@dataclass(frozen=True)
class DraftConfig:
    """Recipe of a draft for speculative decoding, `zoo train transformer-mt --preset draft`.

    Attributes:
        teacher: Model folder whose draft is trained.
        languages: See `TrainingConfig`.
        width: Width, a multiple of 32.
        hidden: Units of a feed-forward layer.
        layers: Number of layers.
        ahead: Maximum number of tokens that it proposes at once.
        synthetic: Number of synthetic source sentences, see `zoo.translation.data.synthesis`.
        epochs: Number of epochs.
        batch_size: Target tokens of a batch, with padding.
        learning_rate: Peak learning rate, after `warmup` steps (a third of all at most); it falls to 0 by a cosine.
        warmup: Steps of linear warm-up.
        seed: Seed of all random numbers.

    Raises:
        RequestError: A value is out of range.
    """

    RANGES: ClassVar[dict[str, Range]] = {
        "languages": RANGES["languages"],
        "width": Range("a multiple of 32", lambda width: width > 0 and width % 32 == 0),
        "ahead": Range("1 to 8", lambda tokens: 1 <= tokens <= 8),
        **dict.fromkeys(("warmup", "synthetic"), FROM_0),
        "seed": SEED,
    }
    teacher: str = ""
    languages: str = "en-de"
    width: int = 128
    hidden: int = 512
    layers: int = 1
    ahead: int = 4
    synthetic: int = 0
    epochs: int = 4
    batch_size: int = 8192
    learning_rate: float = 2e-3
    warmup: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        require_settings(asdict(self), self.RANGES)


# Fine-tuning: few steps, a low learning rate, a short warm-up.
FINETUNE = TrainingConfig(epochs=10, patience=3, learning_rate=2e-4, warmup=200, average=3)

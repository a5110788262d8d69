"""Training configuration of image classifiers (`zoo.vision.training.train`), and defaults of fine-tuning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from pipelines.core.errors import RequestError
from zoo.training.settings import BELOW_1, FROM_0, PRECISION, SEED, SHARE, Range, require_settings

WARMUP_STEPS = 200  # with fewer, a fresh deep network can be thrown so far off that it does not recover
RANGES = {
    "progressive": Range("shares above 0, up to 1", lambda share: 0 < share <= 1),
    "randaugment_m": Range("0 to 10", lambda strength: 0 <= strength <= 10),
    "precision": PRECISION,
    "seed": SEED,
    **dict.fromkeys(("ema", "momentum", "label_smoothing", "validation"), BELOW_1),
    **dict.fromkeys(("progressive_epochs", "augmix", "distillation"), SHARE),
    **dict.fromkeys(("image_size", "weight_decay", "randaugment_n", "jsd", "warmup_epochs", "workers"), FROM_0),
    **dict.fromkeys(("features", "fsp"), FROM_0),
}


@dataclass(frozen=True)
class Settings:
    """The training recipe.

    arch, width: of the network, which the family builds.
    image_size: pixels a side of its final input; 0 takes that of the model that is fine-tuned, else `SMALL` for images
    up to that size and `LARGE` for others.
    progressive: smaller sizes that are trained first, as shares of image_size (rounded to multiples of 8). They take
    the share `progressive_epochs` of all epochs, in equal parts.
    learning_rate: for 256 images a batch, of all processes together; for others in proportion (Goyal et al. 2017). It
    rises from zero over `warmup_epochs`, of small data sets over `WARMUP_STEPS`, but over no more than a third of all
    steps, and falls linearly to zero.
    clip: greatest norm of the gradient. Without a limit a wide head over few classes throws the first steps far off.
    weight_decay: not of norms and biases.
    randaugment_n, randaugment_m: operations an image, and their strength in 0..10.
    augmix: share of the batches that are trained on three views with the Jensen-Shannon loss, weighed by `jsd`; each
    costs three.
    ema: momentum of the average of the weights over steps; the average is evaluated and kept.
    precision: auto, fp32 or bf16; auto takes bf16 on a GPU that has it, and times a step of each on a CPU that has it.
    compress: send gradients in bf16 between processes. tune_communication: time at the start how they are sent fastest
    (`zoo.training.communication`).
    accumulate: parts of a batch that are computed one after another, in that much less memory; processes exchange
    gradients after the last. BatchNorm sees a part at a time.
    validation: share held out where the data has no test split.
    workers: processes that decode large images.
    qat: fine-tune with the rounding of int8 (`zoo.vision.training.qat`), whose ranges the model then keeps; in fp32, in
    one
    process, and where the classes stay the same at a tenth of the learning rate.
    teacher: a model of the same classes to learn from; "" with distillation: the float model that it starts from.
    distillation: share of the loss that is the difference from the teacher's soft labels (Hinton et al. 2015), at
    `temperature`. features, fsp: as many times is added how far the student's feature maps are from the teacher's, and
    the flow between them (`zoo.vision.training.distillation`). Raises RequestError for values out of range.
    """

    KEPT: ClassVar[tuple[str, ...]] = ("arch", "width")  # of a model that is gone on from
    arch: str = ""
    width: float = 1.0
    image_size: int = 0
    progressive: tuple[float, ...] = (0.5, 0.75)
    progressive_epochs: float = 0.5
    epochs: int = 20
    batch_size: int = 256
    learning_rate: float = 0.2
    momentum: float = 0.9
    clip: float = 1.0
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    randaugment_n: int = 1
    randaugment_m: float = 4.0
    augmix: float = 0.0
    jsd: float = 12.0
    warmup_epochs: float = 2.0
    ema: float = 0.998
    precision: str = "auto"
    compress: bool = True
    tune_communication: bool = False
    accumulate: int = 1
    validation: float = 0.1
    workers: int = 2
    qat: bool = False
    teacher: str = ""
    distillation: float = 0.0
    temperature: float = 1.0
    features: float = 0.0
    fsp: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES)
        if self.distilled and not (self.qat or self.teacher):
            raise RequestError(
                "found distillation without a teacher or qat, to which it belongs; name a model with --teacher"
            )

    @property
    def distilled(self) -> bool:
        """Whether a teacher is listened to."""
        return bool(self.distillation or self.features or self.fsp)

    def size(self, epoch: int) -> int:
        """Pixels a side in `epoch`, counted from 0."""
        first = min(round(self.progressive_epochs * self.epochs), self.epochs - 1)  # the last epoch has the final size
        if epoch >= first:
            return self.image_size
        return max(8, round(self.image_size * self.progressive[epoch * len(self.progressive) // first] / 8) * 8)

    def rate(self, step: float, epoch_steps: int) -> float:
        """Returns the learning rate of a step: linear warmup, then linear decay to 0, scaled by batch_size / 256.

        Args:
            step: Step from the beginning of the training.
            epoch_steps: Steps per epoch.
        """
        total = self.epochs * epoch_steps
        warm = min(max(self.warmup_epochs * epoch_steps, WARMUP_STEPS), total / 3)
        share = min((step + 1) / warm, (total - step) / (total - warm + 1))  # both are 1 in step `warm` - 1
        return self.learning_rate * self.batch_size / 256 * share


# Fine-tuning starts near a good minimum: few epochs, all at the model's own size, at a tenth of the rate.
FINETUNE = Settings(
    progressive=(1.0,), epochs=10, batch_size=64, learning_rate=0.04, weight_decay=1e-4, warmup_epochs=1.0, ema=0.99
)

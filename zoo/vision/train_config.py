"""Training configuration of image classifiers (`zoo.vision.training.train`), and defaults of fine-tuning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from pipelines.core.errors import RequestError
from zoo.training.settings import BELOW_1, FROM_0, PRECISION, SEED, SHARE, Range, require_settings

WARMUP_STEPS = 200  # with fewer, the training of a deep network from scratch can diverge
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
class TrainConfig:
    """Training configuration.

    Attributes:
        arch: Architecture of the network.
        width: Width multiplier of the network.
        image_size: Final height and width of the input, in pixels; 0: that of the fine-tuned model, else `SMALL` for
            images up to that size and `LARGE` for larger images.
        progressive: Smaller sizes to train first, as shares of `image_size` (rounded to multiples of 8).
        progressive_epochs: Share of the epochs at these smaller sizes, in equal parts.
        epochs: Number of epochs.
        batch_size: Images per step, of all processes together.
        learning_rate: Peak learning rate for 256 images per step; scaled linearly to `batch_size` (Goyal et al. 2017).
            It decays linearly to zero.
        momentum: Nesterov momentum of SGD.
        clip: Maximum norm of the gradient. Without a limit, the first steps of a wide head can diverge.
        weight_decay: Weight decay, not applied to norms and biases.
        label_smoothing: Label smoothing of the cross entropy.
        randaugment_n: RandAugment: operations per image.
        randaugment_m: RandAugment: magnitude, 0 to 10.
        augmix: Share of the batches that are trained on three AugMix views, at three times the cost.
        jsd: Weight of the Jensen-Shannon loss of AugMix.
        warmup_epochs: Epochs of linear warmup; at least `WARMUP_STEPS` steps, at most a third of all steps.
        ema: Momentum of the exponential moving average of the weights, which is evaluated and saved.
        precision: "fp32", "bf16", or "auto": bf16 on a GPU that supports it; on a CPU that supports it, the faster one.
        compress: Whether processes exchange gradients in bf16.
        tune_communication: Whether to time options of the gradient exchange first (`zoo.training.communication`).
        accumulate: Gradient accumulation: parts of a batch that are computed one after another. BatchNorm sees one part
            at a time.
        validation: Share of held-out images if the data have no test split.
        workers: Processes that decode large images.
        qat: Quantization-aware fine-tuning (`zoo.vision.training.qat`), in fp32 and in one process; at a tenth of the
            learning rate if the classes are the same.
        teacher: Teacher model with the same classes; "" with distillation: the float model that fine-tuning starts
            from.
        distillation: Weight of the soft-label loss, 0 to 1 (Hinton et al. 2015).
        temperature: Temperature of the soft labels.
        features: Weight of the distance between feature maps of student and teacher.
        fsp: Weight of the distance between the flows of feature maps (`zoo.vision.training.distillation`).
        seed: Random seed.

    Raises:
        RequestError: A value is out of range, or there is distillation without a teacher.
    """

    KEPT: ClassVar[tuple[str, ...]] = ("arch", "width")  # of the model that fine-tuning starts from
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
            raise RequestError("found distillation without a teacher or qat; name a model with --teacher")

    @property
    def distilled(self) -> bool:
        """Whether a distillation loss has a weight above 0."""
        return bool(self.distillation or self.features or self.fsp)

    def size(self, epoch: int) -> int:
        """Returns the height and width of images in an epoch, in pixels.

        Args:
            epoch: Epoch, from 0.
        """
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


# Fine-tuning starts near a minimum: few epochs, all at the model's input size, at a low learning rate.
FINETUNE = TrainConfig(
    progressive=(1.0,), epochs=10, batch_size=64, learning_rate=0.04, weight_decay=1e-4, warmup_epochs=1.0, ema=0.99
)

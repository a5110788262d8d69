"""Go on training an encoder of texts on own pairs.

Two texts that belong together: each is told from the second texts of all other pairs of its batch by cosine over a
temperature (Henderson et al. 2017; Gao et al. 2021, "SimCSE"). Two texts and a number: the cosine, or a cross-encoder's
score, comes near it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pipelines.core.errors import RequestError, requires
from pipelines.core.files import copy_file, read_json, replacing, sha256, write_json
from pipelines.core.progress import progress
from pipelines.models.hub import CARD
from pipelines.models.npz import write_npz
from pipelines.models.record import SAMPLES
from zoo.texts.data import text_files
from zoo.texts.data import tokenizer as tokens
from zoo.texts.data.tokenizer import Tokenizer
from zoo.texts.importers.huggingface import CONFIG, write_modules
from zoo.texts.inference import CALIBRATION_LENGTH, default_prompt, packed
from zoo.texts.models.config import IDS, MASK, TYPES, Form
from zoo.texts.models.weights import FILE
from zoo.texts.training.config import RANGES, TrainConfig
from zoo.training.runs import load_checkpoint, require_output, require_settings, save_checkpoint

STATE = "checkpoint/state.pt"
KEPT = ("tokenizer.json", CONFIG)  # of the model that it starts from
CALIBRATION_ROWS = 512
CLIP = 1.0  # norm of a step's gradient, at most
Pairs = list[tuple[str, str]]


def train(
    data: Any,
    output: Path,
    *,
    config: TrainConfig,
    resume: bool = False,
    start_from: Path | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Fine-tunes a text encoder on pairs of texts.

    Writes model.safetensors with the parameter names of transformers, tokenizer.json, config.json, train.json and
    calibration.npz. A resumed run gives the same weights.

    Args:
        data: Files of two texts, or two texts and a number (required by cross-encoders; see
            `zoo.texts.data.text_files.items`). Numbers are divided by their maximum if it is above 1.
        output: Folder of the new model.
        config: Training configuration.
        resume: Continue from the last checkpoint in `output`.
        start_from: Model folder to start from; required.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        {"loss": mean of the last epoch}.

    Raises:
        RequestError: Data or settings are invalid, or `start_from` is missing.
    """
    if start_from is None:
        raise RequestError(
            "encoders of texts start from a trained one; run: zoo finetune minilm-l6 --data pairs.tsv -o DIR"
        )
    require_settings(dataclasses.asdict(config), RANGES)
    output, start_from = Path(output), Path(start_from)
    require_output(output, STATE, resume)
    features = read_json(start_from / CARD)["preprocessing"]
    form = Form.from_json(features["form"])
    columns = [each for each in config.columns.split(",") if each]
    pairs, labels = read_pairs(data, form.labels, on_error, columns)
    if len(pairs) < config.batch_size:
        raise RequestError(f"found {len(pairs)} pairs, expected at least the {config.batch_size} of a batch")
    longest = min(config.max_length or features["max_length"], features["max_length"])
    tokenizer = Tokenizer(start_from / tokens.FILE, form.vocabulary, longest, bool(features.get("lower")))
    run = {
        "config": dataclasses.asdict(config),
        "data": _digest(pairs, labels),
        "start": sha256(start_from / FILE),
    }
    torch.manual_seed(config.seed)
    model = _opened(start_from, bool(form.labels))
    trainer = _Trainer(model, form, config, tokenizer, len(pairs) // config.batch_size * config.epochs)
    if resume:
        trainer.restore(load_checkpoint(output / STATE, run))
    loss = trainer.fit(pairs, labels, output / STATE, run)
    _write(output, start_from, trainer, features, pairs, {"loss": loss}, config)
    return {"loss": loss}


def read_pairs(
    data: Any, classes: int, on_error: str, columns: Sequence[str] = ()
) -> tuple[Pairs, np.ndarray[Any, np.dtype[np.float32]] | None]:
    """Reads training pairs.

    Args:
        data: Files of pairs.
        classes: Number of outputs of a cross-encoder, which needs labels; 0 for sentence encoders.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.
        columns: Columns of tables (see `zoo.texts.data.text_files.items`).

    Returns:
        The pairs, and their labels from 0, float32 [n]; None if the first pair has no label.

    Raises:
        RequestError: A row is invalid, or there are no valid rows.
    """
    for extra in (len(columns) - 2,) if len(columns) in (2, 3) else (1, 0):
        pairs: Pairs = []
        labels: list[float] = []
        first = ""
        try:
            for each in text_files.items(data, 2, columns, extra):
                fault = each.fault
                if not fault and extra:
                    try:
                        labels.append(float(each.texts[2]))
                    except ValueError:
                        fault = f"has the label {each.texts[2]!r:.40}, expected a number"
                    else:
                        fault = _label_fault(labels[-1], classes)
                    if fault:
                        labels = labels[: len(pairs)]
                if not fault:
                    pairs.append((each.texts[0], each.texts[1]))
                    continue
                first = first or f"{each.where} {fault}"
                if extra and not (pairs or classes or columns) and fault.startswith(text_files.narrow(2, 3)):
                    raise text_files.NoColumnsError(first)  # pairs without labels
                if on_error == "raise":
                    raise RequestError(first)
            break
        except text_files.NoColumnsError:
            if not extra or classes or columns:
                raise
    if not pairs:
        expected = "two texts and a number" if classes else "two texts, or two and a number"
        raise RequestError(
            f"found no pairs in {text_files.named(data)}{f' ({first})' if first else ''}; expected {expected} a row"
        )
    return pairs, np.array(labels, np.float32) if labels else None


def _label_fault(label: float, classes: int) -> str:
    if classes > 1:
        whole = label.is_integer() and 0 <= label < classes
        return "" if whole else f"has the label {label:g}, expected a whole number from 0 to {classes - 1}"
    if classes and label < 0:
        return f"has the label {label:g}, expected a number of 0 or more"
    return "" if math.isfinite(label) else f"has the label {label:g}, expected a finite number"


def _digest(pairs: Pairs, labels: Any) -> str:
    import hashlib

    said = json.dumps([pairs, None if labels is None else labels.tolist()])
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


def _opened(folder: Path, scored: bool) -> torch.nn.Module:
    """The network in a folder of transformers, with its dropout. Raises RequestError without that library."""
    with requires("training encoders of texts", "int8-zoo[train]"):
        import transformers
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = transformers.AutoModelForSequenceClassification if scored else transformers.AutoModel
    model: torch.nn.Module = kind.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    return model


class _Trainer:
    """A network in training, and its optimizer: all that a checkpoint holds."""

    def __init__(
        self, model: torch.nn.Module, form: Form, config: TrainConfig, tokenizer: Tokenizer, steps: int
    ) -> None:
        self.model, self.form, self.config, self.tokenizer, self.steps = model, form, config, tokenizer, steps
        decayed = [each for each in model.parameters() if each.ndim > 1]
        plain = [each for each in model.parameters() if each.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, config.learning_rate)
        self.done, self.losses = 0, [0.0, 0.0]  # steps; sum and number of this epoch's losses

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.losses = state["done"], state["losses"]

    def _save(self, path: Path, run: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "run": run,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "losses": self.losses,
        }
        save_checkpoint(path, state)

    def fit(self, pairs: Pairs, labels: Any, state: Path, run: dict[str, Any]) -> float:
        """All steps that are left; the mean loss of the last epoch."""
        config = self.config
        count = len(pairs) // config.batch_size  # of an epoch; a batch that is not whole is left out
        self.model.train()
        scale = 1.0 if labels is None else max(float(labels.max()), 1.0)
        with progress("training batches", self.steps) as advance:
            advance(self.done)
            while self.done < self.steps:
                epoch, at = divmod(self.done, count)
                if at == 0:
                    self.losses = [0.0, 0.0]
                order = np.random.default_rng([config.seed, epoch]).permutation(len(pairs))
                rows = order[at * config.batch_size : (at + 1) * config.batch_size]
                torch.manual_seed(config.seed * 1_000_003 + self.done)  # of dropout: the same after a resumption
                loss = self._loss([pairs[i] for i in rows], None if labels is None else labels[rows], scale)
                for group in self.optimizer.param_groups:
                    group["lr"] = config.learning_rate * self._rate()
                self.optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.losses = [self.losses[0] + loss.item(), self.losses[1] + 1]
                self.done += 1
                advance(1)
                if self.done % config.checkpoint_steps == 0 or self.done == self.steps:
                    self._save(state, run)
        if not math.isfinite(self.losses[0]):
            raise RequestError("the loss is no number any more; train with a lower learning rate")
        return self.losses[0] / max(self.losses[1], 1)

    def _rate(self) -> float:
        warm = max(self.config.warm_up * self.steps, 1e-9)
        return min((self.done + 1) / warm, (self.steps - self.done) / max(self.steps - warm, 1e-9), 1.0)

    def _loss(self, pairs: Pairs, labels: Any, scale: float) -> torch.Tensor:
        if self.form.labels:
            logits = self.model(**self._inputs(pairs)).logits
            if self.form.labels == 1:
                return F.binary_cross_entropy_with_logits(logits[:, 0], torch.from_numpy(labels / np.float32(scale)))
            return F.cross_entropy(logits, torch.from_numpy(labels.astype(np.int64)))
        one, other = (self._vectors([pair[side] for pair in pairs]) for side in (0, 1))
        if labels is not None:
            return F.mse_loss((one * other).sum(1), torch.from_numpy(labels / np.float32(scale)))
        return F.cross_entropy(one @ other.T / self.config.temperature, torch.arange(len(pairs)))

    def _vectors(self, texts: Sequence[str]) -> torch.Tensor:
        """Vectors of length 1, [n, width]."""
        inputs = self._inputs(texts)
        hidden, given = self.model(**inputs).last_hidden_state, inputs[MASK][:, :, None].float()
        match self.form.pooling:
            case "cls":
                pooled = hidden[:, 0]
            case "max":
                pooled = (hidden - 1e9 * (1 - given)).max(1).values
            case _:
                pooled = (hidden * given).sum(1) / given.sum(1)
        return F.normalize(pooled, dim=1)

    def _inputs(self, texts: Sequence[Any]) -> dict[str, torch.Tensor]:
        """What the network is fed, padded."""
        found = self.tokenizer(texts)
        given = np.arange(int(found.lengths.max())) < found.lengths[:, None]
        arrays = {name: np.zeros(given.shape, np.int64) for name in (IDS, MASK, TYPES)}
        arrays[IDS][given], arrays[MASK][given], arrays[TYPES][given] = found.ids, 1, found.types
        if self.form.types < 2:
            del arrays[TYPES]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _write(
    output: Path,
    start_from: Path,
    trainer: _Trainer,
    features: dict[str, Any],
    pairs: Pairs,
    metrics: dict[str, float],
    config: TrainConfig,
) -> None:
    """The files of the trained model."""
    from safetensors.torch import save_file

    state = {name: each.detach().clone().contiguous() for name, each in trainer.model.state_dict().items()}
    with replacing(output / FILE) as temporary:
        save_file(state, temporary, {"format": "pt"})
    for name in KEPT:
        copy_file(start_from / name, output / name)
    if not trainer.form.labels:
        write_modules(output, trainer.form, features)
    count, before = 8 * CALIBRATION_ROWS, default_prompt(features)
    some: Any = [(before + one, other) for one, other in pairs[:count]]
    if not trainer.form.labels:
        some = list(dict.fromkeys(before + text for pair in pairs for text in pair))
    inputs = (IDS, MASK, *([TYPES] if trainer.form.labels and trainer.form.types > 1 else []))
    rows = packed(trainer.tokenizer(some[:count]), inputs, CALIBRATION_LENGTH, CALIBRATION_ROWS)
    write_npz(output / SAMPLES, rows, compressed=True)
    about = {"features": features, "rows": len(pairs), "metrics": metrics, "config": dataclasses.asdict(config)}
    write_json(output / "train.json", about)

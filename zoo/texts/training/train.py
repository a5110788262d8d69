"""Fine-tuning of text networks: of encoders on pairs of texts, of others by their `Task`.

Pairs without labels are trained with in-batch negatives: cross entropy over the cosines of a first text with all second
texts of its batch, divided by a temperature (Henderson et al. 2017; Gao et al. 2021, "SimCSE"). Labels are targets of
the cosine, or of a cross-encoder's score.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import copy_file, read_json, sha256, write_json
from pipelines.core.progress import progress
from pipelines.models.hub import CARD
from pipelines.models.npz import write_npz
from pipelines.models.record import SAMPLES
from zoo.texts.data import text_files, tokenizer
from zoo.texts.data.prompts import ROLES, Prompts
from zoo.texts.data.tokenizer import Tokenizer, Tokens
from zoo.texts.importers.huggingface import read_features
from zoo.texts.importers.sentence_modules import CONFIG, write_modules
from zoo.texts.models.config import IDS, MASK, TYPES, ModelConfig
from zoo.texts.models.head import Head
from zoo.texts.models.weights import FILE
from zoo.texts.text_inputs import CALIBRATION_LENGTH
from zoo.texts.train_config import TrainConfig
from zoo.texts.training.networks import DenseLayers, load_network, pool, require_trainable, save_network
from zoo.texts.training.span_tasks import task_of
from zoo.texts.training.tasks import Task
from zoo.training.runs import limit_threads, load_checkpoint, require_output, save_checkpoint

STATE = "checkpoint/state.pt"
COPIED_FILES = (tokenizer.FILE, CONFIG)  # from the start model
CALIBRATION_ROWS = 256
MAX_GRADIENT_NORM = 1.0
NEW_SETTINGS = ("prompts", "new_labels", "label_all_tokens", "encoder")  # that checkpoints of earlier versions lack
Pairs = list[tuple[str, str]]


def train(
    data: Any,
    output: Path,
    *,
    config: TrainConfig,
    resume: bool = False,
    start_from: Path | None = None,
    on_error: str = "raise",
    head: Head | None = None,
) -> dict[str, Any]:
    """Fine-tunes a text encoder on pairs of texts, or the network of another task on its data.

    Writes model.safetensors with the parameter names of transformers, tokenizer.json, config.json, train.json and
    calibration.npz. A resumed run gives the same weights.

    Args:
        data: Files of two texts, or two texts and a number (required by cross-encoders; see
            `zoo.texts.data.text_files.read_rows`). Numbers are divided by their maximum if it is above 1. Of other
            tasks what `zoo evaluate` takes; of masked language models texts, of zero-shot classifiers two texts and the
            label of the pair, such as entailment.
        output: Folder of the new model.
        config: Training configuration.
        resume: Continue from the last checkpoint in `output`.
        start_from: Model folder to start from; None for a new model that starts from `config.encoder`.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.
        head: Head of the family; None: sentence encoders.

    Returns:
        {"loss": mean of the last epoch}.

    Raises:
        RequestError: Data or settings are invalid, or `start_from` is missing.
    """
    is_new = start_from is None
    if is_new and not config.encoder:
        raise RequestError(
            "text networks start from a trained one; run: zoo finetune MODEL --data FILE -o DIR, or for a new task: "
            "zoo train FAMILY --set encoder=MODEL --data FILE -o DIR"
        )
    if not is_new and config.encoder:
        raise RequestError("found the setting encoder of a model that is fine-tuned; run: zoo train FAMILY")
    output = Path(output)
    start_from = _encoder(config.encoder) if start_from is None else Path(start_from)
    require_output(output, STATE, resume)
    content = read_json(start_from / CONFIG)
    features = read_json(start_from / CARD)["preprocessing"]
    require_trainable(ModelConfig.from_json(features["form"]), content)
    if features.get("template"):
        raise RequestError("a reranker with a template cannot be fine-tuned; expected one of plain pairs")
    if is_new:
        features = _new_features(start_from, content, features, head)
    task = task_of(head, features, config)
    names: list[str] = []
    if task and (config.new_labels or (is_new and task.HAS_NAMES)):
        names = task.labels_of(data)
        features = _new_features(start_from, {**content, **_label_keys(names)}, features, head)
        task = task_of(head, features, config)
    model_config = ModelConfig.from_json(features["form"])
    pairs, labels = _read_samples(data, config, features, model_config.labels, task, on_error)
    max_length = min(config.max_length or features["max_length"], features["max_length"])
    path = start_from / tokenizer.FILE
    tokenize = Tokenizer(path, model_config.vocabulary, max_length, bool(features.get("lower")))
    run = {
        "config": {
            name: value
            for name, value in dataclasses.asdict(config).items()
            if name != "device" and (name not in NEW_SETTINGS or value)
        },
        "data": _digest(pairs, labels),
        "start": sha256(start_from / FILE),
    }
    limit_threads()
    torch.manual_seed(config.seed)
    changes = _label_keys(names) if names else {}
    device = _device(config.device)
    model = load_network(start_from, model_config, content, head, changes).to(device)
    layers = DenseLayers(model_config, start_from / FILE)
    steps = len(pairs) // config.batch_size * config.epochs
    trainer = _Trainer(model, model_config, config, tokenize, steps, task, layers.to(device))
    if resume:
        trainer.restore(load_checkpoint(output / STATE, run))
    loss = trainer.fit(pairs, labels, output / STATE, run)
    if is_new:
        changes |= {"architectures": [type(model).__name__]}
    _write(output, start_from, trainer, features, pairs, {"loss": loss}, changes)
    return {"loss": loss}


def _read_samples(
    data: Any,
    config: TrainConfig,
    features: Mapping[str, Any],
    outputs: int,
    task: Task | None,
    on_error: str,
) -> tuple[list[Any], Any]:
    """Returns the samples of a task, or pairs of texts with their labels; at least a batch of them."""
    pairs: list[Any]
    labels: Any = None
    if task:
        pairs = task.read(data, on_error)
    else:
        columns = [name for name in config.columns.split(",") if name]
        prompts = training_prompts(config.prompts, Prompts(features), bool(outputs))
        pairs, labels = read_pairs(data, outputs, on_error, columns)
        pairs = [(prompts[0] + first, prompts[1] + second) for first, second in pairs]
    if len(pairs) < config.batch_size:
        raise RequestError(
            f"found {len(pairs)} {'texts' if task else 'pairs'}, expected at least the {config.batch_size} of a batch; "
            "name a smaller one with --batch-size"
        )
    return pairs, labels


def _encoder(name: str) -> Path:
    """Returns the folder of the model that a new one starts from, with its weights."""
    import zoo

    folder = zoo.load(name)
    folder.ensure("fp32.onnx")
    if not all((folder.path / file).is_file() for file in (FILE, CONFIG, tokenizer.FILE)):
        raise RequestError(f"found encoder={name}, which has no {FILE}; expected a text network such as minilm-l6")
    return folder.path


def _new_features(
    folder: Path, content: Mapping[str, Any], features: Mapping[str, Any], head: Head | None
) -> dict[str, Any]:
    """Returns the preprocessing of a network with another head or other labels.

    Raises RequestError if the network cannot have such a head.
    """
    if head is None:
        raise RequestError("found the setting encoder for a sentence encoder; run: zoo finetune MODEL")
    made = read_features(folder, {**content, "template": "", "architectures": [head.ENDS[0]]}, head)
    return {**made, **{name: features[name] for name in ("max_length", "lower")}}


def _device(name: str) -> torch.device:
    """Returns a device. Raises RequestError if torch does not have it."""
    try:
        return torch.zeros((), device=name or "cpu").device
    except (AssertionError, RuntimeError) as error:
        raise RequestError(
            f"found device={name}, which torch cannot use ({one_line(error)}); expected cpu, cuda"
        ) from error


def training_prompts(names: str, prompts: Prompts, cross_encoder: bool) -> tuple[str, str]:
    """Returns the prefixes of the first and of the second texts of training pairs.

    Args:
        names: See `TrainConfig.prompts`.
        prompts: Prompts of the model.
        cross_encoder: Whether the model scores pairs, whose second texts have no prompt.

    Returns:
        The prefixes.

    Raises:
        RequestError: The model has no such prompt.
    """
    if not names:
        return prompts.default, "" if cross_encoder else prompts.default
    first, comma, second = (part.strip() for part in names.partition(","))
    if cross_encoder and second:
        raise RequestError(f"found the prompts {names}; expected one: second texts of a cross-encoder have none")

    def prefix(name: str) -> str:
        return prompts.role(name) if name in ROLES and prompts.texts else prompts.resolve(name)

    return prefix(first), "" if cross_encoder else prefix(second if comma else first)


def read_pairs(
    data: Any, classes: int, on_error: str, columns: Sequence[str] = ()
) -> tuple[Pairs, np.ndarray[Any, np.dtype[np.float32]] | None]:
    """Reads training pairs.

    Args:
        data: Files of pairs.
        classes: Number of outputs of a cross-encoder, which needs labels; 0 for sentence encoders.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.
        columns: Columns of tables (see `zoo.texts.data.text_files.read_rows`).

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
            for row in text_files.read_rows(data, 2, columns, extra):
                label, error = text_files.parse_label(row) if extra else (math.nan, row.error)
                error = error or (_check_label(label, classes) if extra else "")
                if not error:
                    pairs.append((row.texts[0], row.texts[1]))
                    labels.extend([label] * extra)
                    continue
                first = first or f"{row.location} {error}"
                is_narrow = error.startswith(text_files.too_few_columns(2, 3))
                if extra and not (pairs or classes or columns) and is_narrow:
                    raise text_files.MissingColumnsError(first)  # pairs without labels
                if on_error == "raise":
                    raise RequestError(first)
            break
        except text_files.MissingColumnsError:
            if not extra or classes or columns:
                raise
    if not pairs:
        expected = "two texts and a number" if classes else "two texts, or two and a number"
        raise RequestError(
            f"found no pairs in {text_files.describe(data)}{f' ({first})' if first else ''}; expected {expected} a row"
        )
    return pairs, np.array(labels, np.float32) if labels else None


def _check_label(label: float, classes: int) -> str:
    """Returns the reason why a finite label is invalid; "" if it is valid."""
    if classes > 1:
        is_class = label.is_integer() and 0 <= label < classes
        return "" if is_class else f"has the label {label:g}, expected a whole number from 0 to {classes - 1}"
    return f"has the label {label:g}, expected a number of 0 or more" if classes and label < 0 else ""


def _digest(pairs: list[Any], labels: Any) -> str:
    content = json.dumps([pairs, None if labels is None else labels.tolist()])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _label_keys(names: Sequence[str]) -> dict[str, Any]:
    """Returns the labels as keys of a config.json."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


class _Trainer:
    """Network, optimizer and progress of a training."""

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: ModelConfig,
        config: TrainConfig,
        tokenizer: Tokenizer,
        steps: int,
        task: Task | None,
        layers: DenseLayers,
    ) -> None:
        self.task, self.layers = task, layers
        self.model, self.model_config, self.config = model, model_config, config
        self.tokenizer, self.steps = tokenizer, steps
        self.parameters = [*model.parameters(), *self.layers.parameters()]
        matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, config.learning_rate)
        self.step, self.losses = 0, [0.0, 0.0]  # sum and number of the losses of this epoch
        self.device = next(model.parameters()).device

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.layers.load_state_dict(state.get("layers", {}))
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["done"], state["losses"]

    def _save(self, path: Path, run: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "run": run,
            "model": self.model.state_dict(),
            "layers": self.layers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.step,
            "losses": self.losses,
        }
        save_checkpoint(path, state)

    def fit(self, pairs: list[Any], labels: Any, state: Path, run: dict[str, Any]) -> float:
        """Trains the remaining steps and returns the mean loss of the last epoch."""
        config = self.config
        batches = len(pairs) // config.batch_size  # of an epoch; an incomplete batch is dropped
        self.model.train()
        scale = 1.0 if labels is None else max(float(labels.max()), 1.0)
        with progress("training batches", self.steps) as advance:
            advance(self.step)
            while self.step < self.steps:
                epoch, batch = divmod(self.step, batches)
                if batch == 0:
                    self.losses = [0.0, 0.0]
                order = np.random.default_rng([config.seed, epoch]).permutation(len(pairs))
                rows = order[batch * config.batch_size : (batch + 1) * config.batch_size]
                torch.manual_seed(config.seed * 1_000_003 + self.step)  # dropout is the same in a resumed run
                loss = self._loss([pairs[i] for i in rows], None if labels is None else labels[rows], scale)
                for group in self.optimizer.param_groups:
                    group["lr"] = config.learning_rate * self._rate()
                self.optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
                self.optimizer.step()
                self.losses = [self.losses[0] + loss.item(), self.losses[1] + 1]
                self.step += 1
                advance(1)
                if self.step % config.checkpoint_steps == 0 or self.step == self.steps:
                    self._save(state, run)
        if not math.isfinite(self.losses[0]):
            raise RequestError("training diverged (the loss is not finite); train again with a lower learning_rate")
        return self.losses[0] / max(self.losses[1], 1)

    def _rate(self) -> float:
        warm = max(self.config.warm_up * self.steps, 1e-9)
        return min((self.step + 1) / warm, (self.steps - self.step) / max(self.steps - warm, 1e-9), 1.0)

    def _loss(self, pairs: list[Any], labels: Any, scale: float) -> torch.Tensor:
        if self.task:
            rng = np.random.default_rng([self.config.seed, self.step, 1])
            tokens, targets = self.task.examples(pairs, self.tokenizer, rng)
            inputs = self._padded(tokens)
            return self.task.loss(self.model(**inputs), torch.from_numpy(targets).to(self.device), inputs[MASK])
        target = None if labels is None else torch.from_numpy(labels).to(self.device)
        if self.model_config.labels and target is not None:
            logits = self.model(**self._inputs(pairs)).logits
            if self.model_config.labels == 1:
                return F.binary_cross_entropy_with_logits(logits[:, 0], target / scale)
            return F.cross_entropy(logits, target.long())
        first, second = (self._embeddings([pair[side] for pair in pairs]) for side in (0, 1))
        if target is not None:
            return F.mse_loss((first * second).sum(1), target / scale)
        return F.cross_entropy(first @ second.T / self.config.temperature, torch.arange(len(pairs), device=self.device))

    def _embeddings(self, texts: Sequence[str]) -> torch.Tensor:
        """Computes L2-normalized embeddings, float32 [n, width]."""
        inputs = self._inputs(texts)
        hidden, mask = self.model(**inputs).last_hidden_state, inputs[MASK]
        pooled = torch.cat([pool(hidden, mask, mode) for mode in self.model_config.poolings], dim=1)
        return F.normalize(self.layers(pooled), dim=1)

    def _inputs(self, texts: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Tokenizes and pads texts or pairs for the network."""
        return self._padded(self.tokenizer(texts))

    def _padded(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        """Pads tokens for the network."""
        names = (IDS, MASK, TYPES) if self.model_config.types > 1 else (IDS, MASK)
        return {name: torch.from_numpy(array).to(self.device) for name, array in tokens.padded(names).items()}


def _write(
    output: Path,
    start_from: Path,
    trainer: _Trainer,
    features: dict[str, Any],
    pairs: list[Any],
    metrics: dict[str, float],
    changes: Mapping[str, Any],
) -> None:
    """Writes the files of the trained model."""
    made = save_network(trainer.model, trainer.layers, output)
    for name in COPIED_FILES:
        copy_file(start_from / name, output / name)
    content = read_json(output / CONFIG)
    if content.get("auto_map") or content["model_type"] != made["model_type"]:  # instead of custom code
        write_json(output / CONFIG, {**made, **changes})
    elif changes:
        write_json(output / CONFIG, {**content, **changes})
    count, model_config = 16 * CALIBRATION_ROWS, trainer.model_config
    samples: Any = trainer.task.texts(pairs[:count]) if trainer.task else pairs[:count]
    if not trainer.task and not model_config.labels:
        write_modules(output, model_config, features, trainer.layers.arrays())
        samples = list(dict.fromkeys(text for pair in pairs for text in pair))
    tokens = trainer.tokenizer(samples[:count])
    length = min(CALIBRATION_LENGTH, model_config.max_tokens)
    rows = tokens.packed(model_config.inputs, length, CALIBRATION_ROWS)
    write_npz(output / SAMPLES, rows, compressed=True)
    record = {
        "features": features,
        "rows": len(pairs),
        "metrics": metrics,
        "config": dataclasses.asdict(trainer.config),
    }
    write_json(output / "train.json", record)

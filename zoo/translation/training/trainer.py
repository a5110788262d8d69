"""Training loop of translation models: loss, steps, validation, checkpoint state."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import distributed, nn

from pipelines.compression.losses import l2
from pipelines.core.errors import ZooError
from pipelines.core.progress import progress
from pipelines.quantization.training.qat import freeze_ranges
from zoo.training import tuning
from zoo.training.communication import Communication, exchanging
from zoo.training.runs import QAT_FROZEN, Processes
from zoo.translation.data.parallel_text import Corpus, ParallelText, batches
from zoo.translation.data.tokens import PAD, START, Tokens, batch_by_tokens, pad
from zoo.translation.metrics import translation_metrics
from zoo.translation.models.config import EXCLUDED_LOGIT
from zoo.translation.models.decoding import capture_attention, translate
from zoo.translation.search.config import DEFAULT_SEARCH, SearchConfig
from zoo.translation.train_config import FROZEN, TrainingConfig
from zoo.translation.training.adapters import FACTORS

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer

OUTPUT_BIAS = "output_bias"  # is not trained: it excludes tokens, and transformers does not train it
DECODED = 8192  # tokens, padded sources of a batch that is translated
PLAIN = Communication(gradient_as_bucket_view=True)


class CrossEntropy(torch.autograd.Function):
    """Cross entropy with label smoothing, summed over the labels that are not `PAD`.

    The gradient is computed in the forward pass, in the table of the logits: a step of deep-shallow takes a tenth less
    time on a CPU than with log_softmax, whose backward pass computes the table again.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float, shares: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes loss and gradient.

        Args:
            ctx: The context of autograd.
            logits: float [n, vocabulary].
            labels: int64 [n].
            smoothing: Label smoothing.
            shares: Share of each token in the smoothing, float [vocabulary]; None: all the same.

        Returns:
            Cross entropy with smoothing, and without (which has no gradient), in nats.
        """
        table, kept, label = logits.to(torch.float32, copy=True), labels != PAD, labels[:, None]
        total = table.logsumexp(1, keepdim=True)
        plain = (total - table.gather(1, label))[kept].sum()
        mean = table.mean(1) if shares is None else table @ shares
        loss = (1 - smoothing) * plain + smoothing * (total[:, 0] - mean)[kept].sum()
        if ctx.needs_input_grad[0]:
            smooth = smoothing / table.shape[1] if shares is None else smoothing * shares
            table.sub_(total).exp_().sub_(smooth)  # softmax - smoothed labels
            ctx.table = table.scatter_add_(1, label, table.new_full(label.shape, smoothing - 1)).mul_(kept[:, None])
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Computes the gradient with respect to the logits.

        Args:
            ctx: Context of `forward`.
            *gradients: Gradients of the outputs.

        Returns:
            Gradient of the logits, and None for the other inputs.
        """
        return ctx.table.mul_(gradients[0]), None, None, None


class Trainer:
    """A network in training with its optimizer: everything that a checkpoint holds."""

    def __init__(
        self,
        model: Transformer,
        config: TrainingConfig,
        group: Processes,
        teacher: Transformer | None = None,
        rules: SearchConfig = DEFAULT_SEARCH,
    ) -> None:
        """Creates optimizer and schedule.

        Args:
            model: The network.
            config: The training recipe.
            group: The processes of the training.
            teacher: The teacher of soft targets, see `TrainingConfig.soft`.
            rules: Search options of validation.
        """
        self.config, self.group, self.rules = config, group, rules
        self.model = model.to(group.device)
        self.teacher = teacher.to(group.device).eval() if teacher is not None else None
        frozen = FROZEN if config.frozen else ()
        self.trained = []
        for name, parameter in model.named_parameters():
            if name.startswith(frozen) or name == OUTPUT_BIAS or (config.adapters and not name.endswith(FACTORS)):
                parameter.requires_grad_(False)
            else:
                self.trained.append(parameter)
        self.start_rows, self.shares = _start_rows(self.model), _smoothing_shares(self.model)
        self.optimizer = torch.optim.AdamW(
            self.trained, config.learning_rate, (0.9, 0.98), 1e-9, weight_decay=config.weight_decay, foreach=True
        )
        self.steps, self.bf16 = 0, config.precision == "bf16"
        self.parallel: nn.Module = self.model

    def choose(self, data: Corpus, batch: NDArray[np.int64]) -> dict[str, Any]:
        """Times steps on a batch to find the fastest way to train; all processes agree.

        Args:
            data: The corpus.
            batch: Indices of its pairs, int64.

        Returns:
            {"precision"}, with tune_communication also the result of `communication.tuned`.
        """
        part = np.array_split(batch, self.config.accumulate)[0]

        def loss_of(pairs: NDArray[np.int64]) -> tuning.Loss:
            return lambda model, bf16: self.loss(model, data, pairs, bf16, self.config.label_smoothing)[0]

        losses = loss_of(batch), loss_of(part)
        return tuning.choose(self.model, self.group, self.config, *losses, PLAIN, about=str(len(part)))

    def use(self, chosen: Mapping[str, Any]) -> None:
        """Applies the settings that `choose` returned, together with the other processes.

        Args:
            chosen: Result of `choose`.
        """
        self.bf16 = chosen["precision"] == "bf16"
        self.parallel = tuning.distribute(self.model, self.group, chosen, PLAIN)

    def loss(
        self, model: nn.Module, data: Corpus, batch: NDArray[np.int64], bf16: bool, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Computes the loss of this process' part of a batch.

        Args:
            model: The network, or its distributed form.
            data: The corpus.
            batch: Indices of its pairs, int64.
            bf16: Whether to compute in bfloat16.
            smoothing: Label smoothing.

        Returns:
            Cross entropy with and without smoothing, in nats, summed over this part; target tokens of all parts.
        """
        pairs = [data.pair(int(i)) for i in batch]
        mine = pairs[self.group.rank :: self.group.count] or pairs[:1]
        source, labels = (torch.from_numpy(pad([pair[side] for pair in mine])).to(self.group.device) for side in (0, 1))
        if self.group.rank >= len(pairs):  # this process has no pair, but takes part in the exchange
            labels.fill_(PAD)
        target = F.pad(labels[:, :-1], (1, 0), value=START)
        encoded, teacher_logits = None, None
        use_hints = bool(self.config.hints) and model.training
        own_layers: list[torch.Tensor] | None = [] if use_hints else None
        layers: list[torch.Tensor] | None = [] if use_hints else None
        use_attention = bool(self.config.attention) and model.training
        with (
            torch.autocast(source.device.type, torch.bfloat16, enabled=bf16),
            capture_attention(self.teacher if use_attention else None) as maps,
            capture_attention(self.model if use_attention else None) as own_maps,
        ):
            if self.teacher is not None and self.model.training:
                with torch.no_grad():
                    encoded = self.teacher.encode(source)
                    teacher_logits = self.teacher(source, target, encoded, layers).flatten(0, 1)
            logits = model(source, target, encoded if self.config.frozen else None, own_layers).flatten(0, 1)
        # without gradient where the hard loss has no weight
        hard = logits.detach() if teacher_logits is not None and self.config.soft == 1 else logits
        loss, plain = CrossEntropy.apply(hard, labels.flatten(), smoothing, self.shares)  # type: ignore[no-untyped-call]
        if teacher_logits is not None:
            kept = (labels.flatten() != PAD).nonzero()[:, 0]
            soft = F.cross_entropy(logits[kept].float(), teacher_logits[kept].float().softmax(1), reduction="sum")
            loss = (1 - self.config.soft) * loss + self.config.soft * soft
            for own, expected in zip(own_layers or (), layers or (), strict=True):
                own, expected = (states.flatten(0, 1)[kept].float() for states in (own, expected))
                loss = loss + self.config.hints * len(kept) * l2(own, expected)
            for own, expected in zip(own_maps[::-1], maps[::-1], strict=False):
                own, expected = (attention.float().mean(1).flatten(0, 1)[kept] for attention in (own, expected))
                loss = loss + self.config.attention * len(kept) * l2(own, expected)
        return loss, plain, sum(len(pair[1]) for pair in pairs)

    def step(self, data: Corpus, batch: NDArray[np.int64], epoch_steps: int) -> tuple[float, int]:
        """Trains on a batch.

        Args:
            data: The corpus.
            batch: Indices of its pairs, int64.
            epoch_steps: Steps of an epoch.

        Returns:
            Cross entropy of this process' part, without smoothing, in nats, and target tokens of all parts.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(self.steps, epoch_steps)
        if self.config.qat and self.steps >= (1 - QAT_FROZEN) * self.config.epochs * epoch_steps:
            freeze_ranges(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        tokens, total = sum(len(data.pair(int(i))[1]) for i in batch), 0.0
        parts = np.array_split(batch, min(self.config.accumulate, len(batch)))
        for part in parts:
            with exchanging(self.parallel, part is parts[-1]):
                loss, plain, _ = self.loss(self.parallel, data, part, self.bf16, self.config.label_smoothing)
                torch.autograd.backward(loss * (self.group.count / tokens))  # they are averaged over the processes
            total += float(plain)
        if self.start_rows is not None and (gradient := self.model.embedding.weight.grad) is not None:
            gradient[self.start_rows] = gradient[self.start_rows].sum(0)
        nn.utils.clip_grad_norm_(self.trained, self.config.clip, foreach=True)
        self.optimizer.step()
        self.steps += 1
        return total, tokens

    def epoch(self, data: Corpus, epoch: int) -> dict[str, Any]:
        """Trains one epoch.

        Args:
            data: The corpus.
            epoch: Number of the epoch, from 0.

        Returns:
            Its entry in the history.

        Raises:
            ZooError: The loss is not finite.
        """
        start, order = time.monotonic(), batches(data, self.config.batch_size, [self.config.seed, epoch])
        # the seed of dropout
        torch.manual_seed(int(np.random.default_rng([self.config.seed, epoch, 1]).integers(2**32)) + self.group.rank)
        self.model.train()
        if self.config.frozen:
            self.model.encoder.eval()  # without dropout, as at inference
        total, count = 0.0, 0
        title = f"epoch {epoch + 1} of {self.config.epochs}"
        with (
            progress(title, len(order))
            if self.group.rank == 0
            else contextlib.nullcontext(lambda amount: None) as advance
        ):
            for batch in order:
                loss, tokens = self.step(data, batch, len(order))
                if not math.isfinite(loss):
                    raise ZooError(
                        f"training diverged in epoch {epoch + 1} (loss {loss}); train again with a lower learning_rate"
                    )
                total, count = total + loss, count + tokens
                advance(1)
        seconds = round(time.monotonic() - start, 3)
        return {"epoch": epoch + 1, "train_loss": self._sum(total) / count, "seconds": seconds, "tokens": count}

    def _sum(self, value: float) -> float:
        """Returns the sum over all processes."""
        if self.group.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.group.device)
        distributed.all_reduce(total)
        return float(total)

    def translate(self, data: Sequence[Tokens], beam: int = 1) -> list[list[int]]:
        """Translates tokenized sentences; each process computes a part.

        Args:
            data: Tokens of each sentence.
            beam: Beam size.

        Returns:
            Target tokens of each sentence, in order, in every process.
        """
        order = np.argsort([len(sentence) for sentence in data], kind="stable")
        parts = batch_by_tokens([len(data[i]) for i in order], DECODED // beam)
        translations: dict[int, list[int]] = {}
        for a, b in parts[self.group.rank :: self.group.count]:
            translated = translate(
                self.model, [data[i] for i in order[a:b]], beam=beam, rules=self.rules, bf16=self.bf16
            )
            translations |= {int(i): hypotheses[0].tokens for i, hypotheses in zip(order[a:b], translated, strict=True)}
        if self.group.count > 1:
            gathered: list[dict[int, list[int]]] = [{}] * self.group.count
            distributed.all_gather_object(gathered, translations)
            translations = {i: tokens for one in gathered for i, tokens in one.items()}
        return [translations[i] for i in range(len(data))]

    @torch.inference_mode()
    def validate(self, text: ParallelText) -> dict[str, float]:
        """Evaluates the network on the held-out pairs.

        Args:
            text: The parallel text.

        Returns:
            {"loss": nats per token, "bleu", "chrf" of greedy translations}.
        """
        self.model.eval()
        total, count = 0.0, 0
        for batch in batches(text.held_out, self.config.batch_size):
            _, plain, tokens = self.loss(self.model, text.held_out, batch, self.bf16, 0.0)
            total, count = total + float(plain), count + tokens
        translated = self.translate([text.held_out.pair(i)[0] for i in range(len(text.held_out))])
        metrics = translation_metrics(text.vocabulary.decode(translated), [target for _, target in text.references])
        return {"loss": self._sum(total) / count, **metrics}

    def quality(self, text: ParallelText | None, kept: ParallelText | None, suffix: str = "") -> dict[str, float]:
        """Returns the BLEU of held-out pairs.

        Args:
            text: The parallel text; None: not measured.
            kept: Parallel text of the start model; None: not measured.
            suffix: Suffix of the keys.

        Returns:
            {"bleu", "kept_bleu"} with the suffix.
        """
        texts = {"bleu": text, "kept_bleu": kept}
        return {f"{name}{suffix}": self.validate(pairs)["bleu"] for name, pairs in texts.items() if pairs is not None}

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a checkpoint.

        Args:
            state: Result of `state`.
        """
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def _start_rows(model: Transformer) -> torch.Tensor | None:
    """Returns the tokens whose embedding is that of `START`, int64; None if it has its own.

    In imported models the start token is a copy of another token, such as padding, and has to stay one.
    """
    table = model.embedding.weight.detach()
    same = (table == table[START]).all(1)
    same[PAD] = False
    rows = same.nonzero()[:, 0]
    return rows if len(rows) > 1 else None


def _smoothing_shares(model: Transformer) -> torch.Tensor | None:
    """Returns the share of each token in label smoothing, which excluded tokens do not take part in; None: equal."""
    if not model.config.output_bias:
        return None
    allowed = (model.output_bias.detach() > EXCLUDED_LOGIT / 2).float()
    return None if allowed.all() else allowed / allowed.sum()

"""Train a Transformer on parallel text, in one process or, under torchrun, in several."""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import distributed, nn

import zoo
from pipelines.compression.losses import l2
from pipelines.core.console import console
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import replacing, sha256, write_json
from pipelines.core.progress import progress
from zoo.communication import Communication, exchanging, tuned
from zoo.training import (
    Processes,
    choose_precision,
    fill,
    load_checkpoint,
    plot_curves,
    processes,
    require_output,
    save_weights,
)
from zoo.transformer_mt.averages import average, groups, weights_after
from zoo.transformer_mt.data import (
    PAD,
    START,
    VOCABULARY,
    Corpus,
    ParallelText,
    Tokens,
    Vocabulary,
    batches,
    by_tokens,
    decoder_samples,
    learn_vocabulary,
    open_text,
    padded,
)
from zoo.transformer_mt.distillation import distilled
from zoo.transformer_mt.metrics import signatures, translation_metrics
from zoo.transformer_mt.model import FORMS, Transformer, build, translate
from zoo.transformer_mt.networks import MODEL, described, inherit, network, state_of, teacher_of
from zoo.transformer_mt.reading import Pair, sources
from zoo.transformer_mt.settings import Settings

STATE = "checkpoint/state.pt"
CALIBRATION_SENTENCES = 256
DECODED = 8192  # tokens, padded sources of a batch that is translated

State = dict[str, torch.Tensor]


PLAIN = Communication(gradient_as_bucket_view=True)
TRAIN = Settings()
# From a trained model: little data, few steps, a low rate that rises quickly.
FINETUNE = Settings(epochs=10, patience=3, learning_rate=2e-4, warmup=200, average=3)


class CrossEntropy(torch.autograd.Function):
    """Cross entropy with label smoothing, summed over the labels that are no `PAD`; the gradient is made with it, in
    one table.

    logits float [n, vocabulary], labels int64 [n] -> (nats with smoothing, to be trained on; nats without, which take
    no gradient). A step of the preset deep-shallow takes a tenth less time on a CPU than with log_softmax, whose
    backward pass makes the table again.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(smoothed cross-entropy, cross-entropy), sums over the tokens that are not `PAD`."""
        table, kept, label = logits.to(torch.float32, copy=True), labels != PAD, labels[:, None]
        total = table.logsumexp(1, keepdim=True)
        plain = (total - table.gather(1, label))[kept].sum()
        loss = (1 - smoothing) * plain + smoothing * (total[:, 0] - table.mean(1))[kept].sum()
        if ctx.needs_input_grad[0]:
            table.sub_(total).exp_().sub_(smoothing / table.shape[1])  # softmax - smoothed labels
            ctx.table = table.scatter_add_(1, label, table.new_full(label.shape, smoothing - 1)).mul_(kept[:, None])
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of the smoothed cross-entropy with respect to the logits."""
        return ctx.table.mul_(gradients[0]), None, None


class Trainer:
    """A network in training and its optimizer: all that a checkpoint holds."""

    def __init__(
        self, model: Transformer, config: Settings, group: Processes, teacher: Transformer | None = None
    ) -> None:
        """teacher: whose distributions are learned, see `Settings.soft`."""
        self.config, self.group = config, group
        self.model = model.to(group.device)
        self.teacher = teacher.to(group.device).eval() if teacher is not None else None
        frozen = ("encoder.", "encoder_norm.", "embedding.") if config.frozen else ()
        self.trained = []
        for name, each in model.named_parameters():
            if name.startswith(frozen):
                each.requires_grad_(False)
            else:
                self.trained.append(each)
        self.optimizer = torch.optim.AdamW(
            self.trained, config.learning_rate, (0.9, 0.98), 1e-9, weight_decay=config.weight_decay, foreach=True
        )
        self.steps, self.bf16 = 0, config.precision == "bf16"
        self.parallel: nn.Module = self.model

    def choose(self, data: Corpus, batch: NDArray[np.int64]) -> dict[str, Any]:
        """How this machine trains fastest, by timing steps on `batch`: {"precision"}, with tune_communication also what
        `communication.tuned` gives. All processes agree.
        """
        config, group = self.config, self.group
        precision = config.precision
        if precision == "auto":
            precision = choose_precision(group, lambda bf16: self._time(data, batch, bf16))
        found: dict[str, Any] = {}
        if config.tune_communication and group.count > 1:
            part = np.array_split(batch, config.accumulate)[0]

            def step(model: nn.Module) -> None:
                loss, *_ = self.loss(model, data, part, precision == "bf16", config.label_smoothing)
                torch.autograd.backward(loss)
                model.zero_grad(set_to_none=True)

            about = f"{len(part)} {precision} {config.accumulate}"
            found = tuned(self.model, group, step, PLAIN, about=about, whole=config.accumulate == 1)
        return {"precision": precision, **found}

    def use(self, chosen: Mapping[str, Any]) -> None:
        """Train as `choose` found, together with the other processes."""
        self.bf16 = chosen["precision"] == "bf16"
        if self.group.count > 1:
            found = chosen.get("communication")
            self.parallel = (Communication(**found) if found else PLAIN).wrap(self.model, self.group)

    def _time(self, data: Corpus, batch: NDArray[np.int64], bf16: bool) -> float:
        """Seconds of a forward and a backward pass, the better of two."""
        times = []
        for _ in range(3):
            start = time.perf_counter()
            torch.autograd.backward(self.loss(self.model, data, batch, bf16, self.config.label_smoothing)[0])
            times.append(time.perf_counter() - start)
        self.model.zero_grad(set_to_none=True)
        return min(times[1:])

    def loss(
        self, model: nn.Module, data: Corpus, batch: NDArray[np.int64], bf16: bool, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Cross entropy (nats, with label smoothing, and without), summed over this process' part of a batch; the
        tokens of all parts.
        """
        pairs = [data.pair(int(i)) for i in batch]
        mine = pairs[self.group.rank :: self.group.count] or pairs[:1]
        source, labels = (
            torch.from_numpy(padded([pair[side] for pair in mine])).to(self.group.device) for side in (0, 1)
        )
        if self.group.rank >= len(pairs):  # no pair is left for this process, which must take part all the same
            labels.fill_(PAD)
        target = F.pad(labels[:, :-1], (1, 0), value=START)
        encoded, taught = None, None
        hinted = bool(self.config.hints) and model.training
        own_layers: list[torch.Tensor] | None = [] if hinted else None
        layers: list[torch.Tensor] | None = [] if hinted else None
        with torch.autocast(source.device.type, torch.bfloat16, enabled=bf16):
            if self.teacher is not None and self.model.training:
                with torch.no_grad():
                    encoded = self.teacher.encode(source)
                    taught = self.teacher(source, target, encoded, layers).flatten(0, 1)
            logits = model(source, target, encoded if self.config.frozen else None, own_layers).flatten(0, 1)
        hard = logits.detach() if taught is not None and self.config.soft == 1 else logits  # no gradient of nothing
        loss, plain = CrossEntropy.apply(hard, labels.flatten(), smoothing)  # type: ignore[no-untyped-call]
        if taught is not None:
            kept = (labels.flatten() != PAD).nonzero()[:, 0]
            soft = F.cross_entropy(logits[kept].float(), taught[kept].float().softmax(1), reduction="sum")
            loss = (1 - self.config.soft) * loss + self.config.soft * soft
            for own, wanted in zip(own_layers or (), layers or (), strict=True):
                own, wanted = (each.flatten(0, 1)[kept].float() for each in (own, wanted))
                loss = loss + self.config.hints * len(kept) * l2(own, wanted)
        return loss, plain, sum(len(pair[1]) for pair in pairs)

    def step(self, data: Corpus, batch: NDArray[np.int64], epoch_steps: int) -> tuple[float, int]:
        """Train on a batch; returns this process' part of its cross entropy, without smoothing, and its target tokens
        in all.
        """
        for each in self.optimizer.param_groups:
            each["lr"] = self.config.rate(self.steps, epoch_steps)
        self.optimizer.zero_grad(set_to_none=True)
        tokens, found = sum(len(data.pair(int(i))[1]) for i in batch), 0.0
        parts = np.array_split(batch, min(self.config.accumulate, len(batch)))
        for part in parts:
            with exchanging(self.parallel, part is parts[-1]):
                loss, plain, _ = self.loss(self.parallel, data, part, self.bf16, self.config.label_smoothing)
                torch.autograd.backward(loss * (self.group.count / tokens))  # they are averaged over the processes
            found += float(plain)
        nn.utils.clip_grad_norm_(self.trained, self.config.clip, foreach=True)
        self.optimizer.step()
        self.steps += 1
        return found, tokens

    def epoch(self, data: Corpus, epoch: int) -> dict[str, Any]:
        """Train on all pairs once; returns the epoch's line of the history so far."""
        start, order = time.monotonic(), batches(data, self.config.batch_size, [self.config.seed, epoch])
        torch.manual_seed(
            int(np.random.default_rng([self.config.seed, epoch, 1]).integers(2**32)) + self.group.rank
        )  # for dropout
        self.model.train()
        if self.config.frozen:
            self.model.encoder.eval()  # without dropout: what the decoder learns to read is what it will read
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
        """The sum over all processes."""
        if self.group.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.group.device)
        distributed.all_reduce(total)
        return float(total)

    def translate(self, data: Sequence[Tokens], beam: int = 1) -> list[list[int]]:
        """Translations of tokenized sentences, in order; every process makes a part, all get the whole."""
        order = np.argsort([len(each) for each in data], kind="stable")
        parts = by_tokens([len(data[i]) for i in order], DECODED // beam)
        found: dict[int, list[int]] = {}
        for a, b in parts[self.group.rank :: self.group.count]:
            translated = translate(self.model, [data[i] for i in order[a:b]], beam=beam, bf16=self.bf16)
            found |= {int(i): hypotheses[0].tokens for i, hypotheses in zip(order[a:b], translated, strict=True)}
        if self.group.count > 1:
            gathered: list[dict[int, list[int]]] = [{}] * self.group.count
            distributed.all_gather_object(gathered, found)
            found = {i: each for one in gathered for i, each in one.items()}
        return [found[i] for i in range(len(data))]

    @torch.inference_mode()
    def validate(self, text: ParallelText) -> dict[str, float]:
        """{"loss": nats a token, "bleu", "chrf": of greedy translations} on the held-out pairs."""
        self.model.eval()
        total, count = 0.0, 0
        for batch in batches(text.held_out, self.config.batch_size):
            _, plain, tokens = self.loss(self.model, text.held_out, batch, self.bf16, 0.0)
            total, count = total + float(plain), count + tokens
        translated = self.translate([text.held_out.pair(i)[0] for i in range(len(text.held_out))])
        found = translation_metrics(text.vocabulary.decode(translated), [target for _, target in text.references])
        return {"loss": self._sum(total) / count, **found}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def _stopped(history: Sequence[Mapping[str, Any]], config: Settings) -> bool:
    """Whether training is over."""
    best = groups(history, 1)["best"]
    return len(history) >= config.epochs or (bool(best) and len(history) - best[0] >= config.patience)


# ----------------------------------------------------------------------------------------------------------- the whole


def train(
    data: Any,
    output: str | Path,
    *,
    config: Settings = TRAIN,
    resume: bool = False,
    start_from: str | Path | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Train on parallel text (whatever `zoo.transformer_mt.reading.read_pairs` takes); returns {"bleu", "chrf", "loss"}
    on what is held out.

    `output` gets model.pt (the weights, averaged), vocabulary.model, train.json (features: what a user of the model
    must know, config, metrics with sacreBLEU's signatures, ...), calibration.npz (sentences and their greedy
    translations, see `decoder_samples`), history.json, curves.png and, after every epoch, checkpoint/: from it `resume`
    goes on to the same result. One seed gives the same weights on one machine with one number of processes and threads.
    `start_from` is a model folder whose network, weights and vocabulary are taken over. Under torchrun every process
    calls this alike; process 0 alone writes. Raises RequestError for unusable data, an output folder in use, or a
    checkpoint of another run.
    """
    output = Path(output)
    with processes() as group:
        require_output(output, STATE, resume)
        known: Vocabulary | None = Vocabulary.read(output / "checkpoint" / VOCABULARY) if resume else None
        start = None
        if start_from is not None:
            about = described(Path(start_from))
            if "arch" not in about:
                raise RequestError(
                    f"{start_from} was imported from another toolkit, whose models cannot be trained on; teach one of "
                    f"the zoo's own by it: zoo train transformer-mt --teacher {start_from}"
                )
            config = replace(config, **{name: about[name] for name in ("arch", "pre_norm", "languages", "max_length")})
            known, start = Vocabulary.read(Path(start_from) / VOCABULARY), sha256(about["source"])
        elif config.inherit and not known:
            if not config.teacher:
                raise RequestError(
                    "found inherit without a teacher to inherit from; name one with --set teacher=FOLDER"
                )
            known = Vocabulary.read(zoo.load(config.teacher).path / VOCABULARY)

        def vocabulary(pairs: Sequence[Pair]) -> Vocabulary:
            return known or Vocabulary(
                group.same(learn_vocabulary(pairs, config.vocabulary, config.seed) if group.rank == 0 else b"")
            )

        text = open_text(
            data,
            vocabulary,
            **{
                name: getattr(config, name)
                for name in ("languages", "swap", "validation_data", "validation", "max_length", "max_ratio")
            },
            seed=config.seed,
            on_error=on_error,
        )
        torch.manual_seed(config.seed)
        model = build(config.arch, len(text.vocabulary), pre_norm=config.pre_norm, dropout=config.dropout)
        if start_from is not None:
            fill(model, state_of(about["source"], model), about["source"])
        elif config.inherit:
            inherit(model, network(config.teacher))
        run = {"config": asdict(config), "data": text.digest, "start": start}
        state = load_checkpoint(output / STATE, run) if resume else None
        if config.teacher:
            text.train = distilled(text, config, group, output)
        trainer = Trainer(model, config, group, teacher_of(config, model) if config.soft else None)
        if state:
            trainer.restore(state)
        history: list[dict[str, Any]] = state["history"] if state else []
        order = batches(text.train, config.batch_size)
        used = state["used"] if state else trainer.choose(text.train, order[len(order) // 2])
        trainer.use(used)
        while not _stopped(history, config):
            history.append(trainer.epoch(text.train, len(history)) | trainer.validate(text))
            if group.rank == 0:
                _keep(output, trainer, text, history, {"run": run, "used": used})
            group.checkpointed(output)
        metrics, chosen = _choose(output, trainer, text, history)
        if group.rank == 0:
            record = {**chosen, **used, "processes": group.count}
            _write(output, trainer, text, history, metrics, record, data)
        group.same(None)  # the others wait for the files
    return metrics


def _keep(
    output: Path, trainer: Trainer, text: ParallelText, history: Sequence[dict[str, Any]], record: Mapping[str, Any]
) -> None:
    """Write the checkpoint of an epoch; weights that can make no part of the model any more go."""
    last, config = history[-1], trainer.config
    line = (
        f"epoch {last['epoch']}/{config.epochs}  train {last['train_loss']:.3f}  held out "
        f"{last['loss']:.3f}  BLEU {last['bleu']:.2f}"
    )
    console.print(
        f"{line}  {last['seconds']:.0f} s, {last['tokens'] / last['seconds']:,.0f} tokens/s",
        highlight=False,
        soft_wrap=True,
    )
    with replacing(weights_after(output, last["epoch"])) as temporary:
        torch.save({name: each.cpu() for name, each in trainer.model.state_dict().items()}, temporary)
    with replacing(output / "checkpoint" / VOCABULARY) as temporary:
        temporary.write_bytes(text.vocabulary.content)
    with replacing(output / STATE) as temporary:
        torch.save({**record, "history": list(history), **trainer.state()}, temporary)
    wanted = {weights_after(output, epoch) for epochs in groups(history, config.average).values() for epoch in epochs}
    for path in set((output / "checkpoint").glob("epoch-*.pt")) - wanted:
        path.unlink()


def _choose(
    output: Path, trainer: Trainer, text: ParallelText, history: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Leave the weights with the best BLEU of `_groups` in the model; returns their metrics, and how they were
    chosen.
    """
    group, found, seen = trainer.group, [], []
    for name, epochs in groups(history, trainer.config.average).items():
        if epochs in seen:
            continue
        seen.append(epochs)
        state = average(output, epochs) if group.rank == 0 else {}
        if group.rank == 0:
            trainer.model.load_state_dict(state)
        if group.count > 1:
            for each in trainer.model.state_dict().values():
                distributed.broadcast(each, 0)
        found.append(
            (
                trainer.validate(text),
                name,
                epochs,
                {key: each.cpu().clone() for key, each in trainer.model.state_dict().items()},
            )
        )
    metrics, name, epochs, state = max(found, key=lambda each: each[0]["bleu"])
    trainer.model.load_state_dict(state)
    return metrics, {
        "weights": name,
        "averaged": epochs,
        "candidates": {name: each["bleu"] for each, name, *_ in found},
    }


def _write(
    output: Path,
    trainer: Trainer,
    text: ParallelText,
    history: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any],
    record: Mapping[str, Any],
    data: Any,
) -> None:
    config = trainer.config
    save_weights(output / MODEL, trainer.model.state_dict())
    with replacing(output / VOCABULARY) as temporary:
        temporary.write_bytes(text.vocabulary.content)
    count = min(CALIBRATION_SENTENCES, len(text.train))
    chosen = np.sort(np.random.default_rng(config.seed).choice(len(text.train), count, replace=False))
    asked = [text.train.pair(int(i))[0] for i in chosen]
    said = [each[0].tokens for each in translate(trainer.model, asked, bf16=trainer.bf16)]
    samples: dict[str, Any] = decoder_samples(asked, said)
    with replacing(output / "calibration.npz") as temporary:
        np.savez(temporary, **samples)
    write_json(output / "history.json", list(history))
    left = {"train_loss": ("loss, training", "C0--"), "loss": ("loss, held out", "C0-")}
    best = groups(history, 1)["best"][0]
    axes = ("cross entropy, nats a token", "BLEU (greedy)")
    plot_curves(output / "curves.png", history, left, {"bleu": ("BLEU, held out", "C1-")}, axes, best)
    files = [
        Path(part)
        for each in sources(data)
        for part in ([each] if Path(each).is_file() else each.split(","))
        if Path(part).is_file()
    ]
    features = {
        "arch": config.arch,
        "pre_norm": config.pre_norm,
        "languages": config.languages,
        "max_length": config.max_length,
    }
    about = {
        "features": features,
        "form": asdict(FORMS[config.arch]),
        "vocabulary": len(text.vocabulary),
        "parameters": sum(each.numel() for each in trainer.model.parameters()),
        "config": asdict(config),
        "metrics": dict(metrics),
        "signatures": signatures(),
        "rows": {"train": len(text.train), "held_out": len(text.held_out), "left_out": dict(text.faults)},
        **record,
        "epochs": len(history),
        "seconds": round(sum(each["seconds"] for each in history)),
        "seed": config.seed,
        "data": [{"file": each.name, "sha256": sha256(each)} for each in files],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "sentencepiece": sentencepiece.__version__,
        },
    }
    write_json(output / "train.json", about)

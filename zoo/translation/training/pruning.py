"""Structured pruning of translation models: attention heads and feed-forward units.

All layers of one side have the same number of heads and of units, as `ModelConfig` and the native kernels need; each
layer chooses its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from pipelines.compression.search import TILE, Widths
from pipelines.core.files import write_bytes, write_json
from pipelines.models.family import network_of
from pipelines.models.npz import write_npz
from pipelines.models.record import SAMPLES
from zoo.training.pruning import PrunableModel
from zoo.training.runs import fill, record_of, save_weights
from zoo.translation.data.parallel_text import (
    VOCABULARY,
    Corpus,
    ParallelText,
    Vocabulary,
    batches,
    decoder_samples,
    load_parallel_text,
)
from zoo.translation.data.tokens import PAD, START, pad
from zoo.translation.metrics import translation_metrics
from zoo.translation.models.checkpoints import (
    MODEL,
    copy_shortlist,
    inherited_features,
    read_features,
    require_own,
)
from zoo.translation.models.decoding import translate
from zoo.translation.models.layers import Attention, FeedForward

if TYPE_CHECKING:
    from zoo.translation.inference import TranslationPipeline
    from zoo.translation.models.transformer import Transformer

IMPORTANCE_PAIRS, CALIBRATION_SENTENCES = 1024, 64
TOKENS = 2048  # of a batch
TIMED = 12  # tokens of a translation in timings: untrained pruned models translate up to the limit
LAST = {"feed": "outer", "attention": "output", "cross": "output"}  # layer of a sublayer that reads the pruned columns


class PrunableTranslator(PrunableModel):
    """A translation model with its parallel text, see `pipelines.compression.search.Prunable`.

    Its groups are `encoder.feed`, `decoder.feed`, `encoder.attention` and `decoder.attention`, cross-attention
    included; columns of attention are pruned head by head.
    """

    metric = "bleu"
    drop = 0.3
    batch_size = 32

    def open(self, data: Any, config: Any, on_error: str, like: PrunableTranslator | None) -> None:
        """See `PrunableModel`."""
        self.folder.ensure("fp32.onnx")
        self.about = read_features(self.folder.path)
        require_own(self.folder.path, self.about)
        self.network: Transformer = network_of(self.folder)[1]
        vocabulary = Vocabulary.read(self.folder.path / VOCABULARY)
        names = ("languages", "swap", "validation_data", "validation", "max_length", "max_ratio")
        options = {name: self.about.get(name, getattr(config, name)) for name in names}
        self.text: ParallelText = (
            load_parallel_text(data, lambda _: vocabulary, **options, seed=config.seed, on_error=on_error)
            if like is None
            else like.text
        )
        self.digest = self.text.digest
        self.parts: dict[str, list[str]] = {}
        self.groups: Widths = {}
        self.tiles: Widths = {}
        for path, module in self.network.named_modules():
            if not isinstance(module, Attention | FeedForward):
                continue
            last = module.outer if isinstance(module, FeedForward) else module.output
            group = f"{path.partition('.')[0]}.{'feed' if isinstance(module, FeedForward) else 'attention'}"
            self.parts.setdefault(group, []).append(path)
            self.groups = {**self.groups, group: last.in_features}
            self.tiles = {**self.tiles, group: TILE if isinstance(module, FeedForward) else module.size}
        self._order: dict[str, NDArray[np.int64]] = {}

    def _kept(self, group: str, path: str, width: int) -> torch.Tensor:
        """Returns the input columns of a sublayer's last layer that remain, in order."""
        if not self._order:
            importances = _importances(self.network, self._last(), self._importance_pairs(), self.importance)
            for name, paths in self.parts.items():
                size = self.tiles[name] if name.endswith("attention") else 1
                for sublayer in paths:
                    heads = importances[sublayer].reshape(-1, size).sum(1)
                    self._order[sublayer] = np.argsort(-heads, kind="stable")
        size = self.tiles[group] if group.endswith("attention") else 1
        heads = np.sort(self._order[path][: width // size])
        return torch.from_numpy((heads[:, None] * size + np.arange(size)).ravel())

    def _last(self) -> dict[str, nn.Linear]:
        paths = [path for several in self.parts.values() for path in several]
        layers = {path: self.network.get_submodule(f"{path}.{LAST[path.rpartition('.')[2]]}") for path in paths}
        return {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}

    def _importance_pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        count = min(IMPORTANCE_PAIRS, len(self.text.train))
        chosen = np.sort(np.random.default_rng(0).choice(len(self.text.train), count, replace=False))
        for begin in range(0, count, 32):
            yield _tokens(self.text.train, chosen[begin : begin + 32])

    def _cut(self, widths: Widths) -> Transformer:
        """Returns the network without its least important heads and units."""
        now = {**self.groups, **widths}
        if now == self.groups:
            return self.network
        sizes: dict[str, Any] = {
            "hidden": now["encoder.feed"],
            "decoder_hidden": now["decoder.feed"],
            "heads": now["encoder.attention"] // self.tiles["encoder.attention"],
            "decoder_heads": now["decoder.attention"] // self.tiles["decoder.attention"],
            "head_size": self.tiles["encoder.attention"],
        }
        model_config, state = replace(self.network.config, **sizes), dict(self.network.state_dict())
        for group, paths in self.parts.items():
            for path in paths:
                kept = self._kept(group, path, now[group])
                last = LAST[path.rpartition(".")[2]]
                for name in ("inner",) if last == "outer" else ("query", "key", "value"):
                    for kind in ("weight", "bias"):
                        state[f"{path}.{name}.{kind}"] = state[f"{path}.{name}.{kind}"][kept]
                state[f"{path}.{last}.weight"] = state[f"{path}.{last}.weight"][:, kept]
        made = type(self.network)(model_config, len(self.text.vocabulary), pre_norm=self.network.pre_norm, dropout=0.0)
        fill(made, state, "the pruned network")
        return made.eval()

    @torch.no_grad()
    def loss(self, widths: Widths) -> float:
        """Computes the cross entropy of the held-out pairs.

        Args:
            widths: Width by pruning group.

        Returns:
            Nats per token.
        """
        network, total, count = self._cut(widths), 0.0, 0
        for batch in batches(self.text.held_out, TOKENS):
            source, labels = _tokens(self.text.held_out, batch)
            total += float(_losses(network, source, labels).sum())
            count += int((labels != PAD).sum())
        return round(total / count, 6)

    def save(self, widths: Widths, folder: Path) -> None:
        """Writes the pruned network: model.pt, vocabulary.model, the shortlist, train.json and calibration.npz.

        Args:
            widths: Width by pruning group.
            folder: The new model folder.
        """
        network = self._cut(widths)
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(folder / MODEL, network.state_dict())
        write_bytes(folder / VOCABULARY, self.text.vocabulary.content)
        sources = [self.text.train.pair(i)[0] for i in range(min(CALIBRATION_SENTENCES, len(self.text.train)))]
        translations = [hypotheses[0].tokens for hypotheses in translate(network, sources)]
        samples: dict[str, Any] = decoder_samples(sources, translations)
        write_npz(folder / SAMPLES, samples)
        features = {name: self.about[name] for name in ("arch", "pre_norm", "languages", "max_length")}
        if network.config != network.architectures[features["arch"]]:
            features["form"] = network.config.to_json()
        features |= (kept := inherited_features(self.folder.path))
        copy_shortlist(kept, self.folder.path, folder)
        before = record_of(self.folder.path)
        inherited = {key: before[key] for key in ("rows", "metrics", "config") if key in before}
        write_json(folder / "train.json", {**inherited, "features": features})

    def quality(self, pipeline: TranslationPipeline) -> dict[str, float]:
        """Evaluates a pipeline on the held-out pairs.

        Args:
            pipeline: Pipeline of a pruned model.

        Returns:
            {"bleu", "chrf"}, 0 to 100.
        """
        sources = [self.text.held_out.pair(i)[0] for i in range(len(self.text.held_out))]
        translations = pipeline.vocabulary.decode([best[0].tokens for best in pipeline.translate(sources)])
        return translation_metrics(translations, [target for _, target in self.text.references])

    @staticmethod
    def timed(pipeline: TranslationPipeline) -> TranslationPipeline:
        """Limits translations to the same length for all models, for timing.

        Args:
            pipeline: Pipeline of a pruned model.

        Returns:
            The pipeline, changed in place.
        """
        pipeline.rules = replace(pipeline.rules, most=TIMED)
        return pipeline


def _tokens(data: Corpus, batch: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns padded source and target tokens of pairs, int64 [n, tokens]."""
    pairs = [data.pair(int(i)) for i in batch]
    source, labels = (torch.from_numpy(pad([pair[side] for pair in pairs])) for side in (0, 1))
    return source, labels


def _losses(network: Transformer, source: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of each target token, [n, tokens]; 0 at padding."""
    logits = network(source, F.pad(labels[:, :-1], (1, 0), value=START))
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=PAD, reduction="none")


@torch.enable_grad()
def _importances(
    network: Transformer,
    layers: dict[str, nn.Linear],
    seen: Iterator[tuple[torch.Tensor, torch.Tensor]],
    kind: str,
) -> dict[str, NDArray[np.float64]]:
    """Returns the importance of each input column of the layers, by path.

    taylor: Sum over pairs of |sum over tokens of x dL/dx|, the first-order change of the loss without the column
    (Molchanov et al. 2019; for heads Michel et al. 2019, "Are Sixteen Heads Really Better than One?").
    activation: Sum of |x|.
    """
    read: dict[str, torch.Tensor] = {}
    importances = {path: torch.zeros(layer.in_features, dtype=torch.float64) for path, layer in layers.items()}

    def watch(path: str, layer: nn.Module) -> Any:
        return layer.register_forward_pre_hook(lambda _, inputs: read.__setitem__(path, inputs[0]))

    hooks = [watch(path, layer) for path, layer in layers.items()]
    network.requires_grad_(True)
    for source, labels in seen:
        loss = _losses(network, source, labels).sum()
        gradients = torch.autograd.grad(loss, list(read.values()))
        for (path, x), gradient in zip(read.items(), gradients, strict=True):
            importance = x.detach().abs() if kind == "activation" else (x.detach() * gradient).sum(1).abs()
            importances[path] += importance.flatten(0, -2).sum(0).double()
    for hook in hooks:
        hook.remove()
    return {path: total.numpy() for path, total in importances.items()}

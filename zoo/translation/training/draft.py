"""Training of a draft for speculative decoding, by the greedy translations of the model that verifies."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

import zoo
from pipelines.core import machine
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.graph import io as graph_io
from pipelines.kernels.transformer.draft import quantize_arrays
from pipelines.kernels.transformer.mapping.from_graph import programs
from pipelines.kernels.transformer.operations import CrossAttention
from pipelines.models.family import network_of
from zoo.translation.data.parallel_text import normalize_whitespace
from zoo.translation.data.synthesis import sample_sentences
from zoo.translation.data.text_files import read_pairs
from zoo.translation.data.tokens import END, PAD, START, Tokens, batch_by_tokens, pad
from zoo.translation.inference import TranslationPipeline
from zoo.translation.models.draft import DraftNetwork
from zoo.translation.search.shortlist import learn_shortlist
from zoo.translation.train_config import DraftConfig

if TYPE_CHECKING:
    from pipelines.models.folder import ModelFolder
    from zoo.translation.models.transformer import Transformer

DRAFT = "draft.npz"
HELD_OUT = 20  # interval of the held-out sentences, of which there are at most MAX_HELD_OUT
MAX_HELD_OUT = 1000
COMMON, PER_TOKEN = 300, 24  # words that a draft may propose for every sentence, and besides for each source token
DISCOUNT = 0.8  # of the loss of a token, by its distance from the newest
MISSED = 0.1  # weight of a token behind one that the draft does not propose
WINDOW = 4096  # sentences that are translated between two updates of the progress bar

Pairs = list[tuple[Tokens, Tokens]]


def train_draft(folder: ModelFolder, data: Any, config: DraftConfig) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Trains the draft of a model.

    Args:
        folder: The model folder.
        data: Parallel text, see `zoo.translation.data.text_files.read_pairs`; only its sources are used.
        config: The recipe.

    Returns:
        Preprocessing for the card, and {file name: content}.

    Raises:
        RequestError: There are too few sentences, or the model has no native int8 form.
    """
    torch.manual_seed(config.seed)
    pairs = _translated(folder, data, config)
    count = min(len(pairs) // HELD_OUT, MAX_HELD_OUT)
    if not count:
        raise RequestError(f"found {len(pairs)} sentences, expected at least {HELD_OUT} to train a draft")
    order = np.random.default_rng(config.seed).permutation(len(pairs))
    held_out, training = [pairs[i] for i in order[:count]], [pairs[i] for i in order[count:]]
    teacher: Transformer = network_of(folder)[1].requires_grad_(False)
    network = DraftNetwork(teacher, config.width, config.hidden, config.layers, config.ahead)
    _fit(network, teacher, training, held_out, config)
    arrays = quantize_arrays(_arrays(network, teacher, folder)) | _words(training, teacher)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    return {"draft": DRAFT}, {DRAFT: content.getvalue()}


def _translated(folder: ModelFolder, data: Any, config: DraftConfig) -> Pairs:
    """Returns the tokens of the sentences and of their greedy translations."""
    pipeline = zoo.pipeline(folder.path, threads=machine.cores())
    assert isinstance(pipeline, TranslationPipeline)
    pipeline.beam, vocabulary = 1, pipeline.vocabulary
    texts = dict.fromkeys(normalize_whitespace(source) for source, _ in read_pairs(data, config.languages))
    sentences = [sentence for sentence in vocabulary.encode(list(texts)) if 1 < len(sentence) <= pipeline.max_length]
    if config.synthetic and sentences:
        sentences += sample_sentences(sentences, config.synthetic, seed=config.seed, longest=pipeline.max_length)
    pairs: Pairs = []
    with progress("the model translates", len(sentences)) as advance:
        for begin in range(0, len(sentences), WINDOW):
            window = sentences[begin : begin + WINDOW]
            for source, [best, *_] in zip(window, pipeline.translate(window), strict=True):
                pairs.append((source, np.array([*best.tokens, END], np.int32)))
            advance(len(window))
    return [pair for pair in pairs if len(pair[1]) > 2]


def _fit(network: DraftNetwork, teacher: Transformer, training: Pairs, held_out: Pairs, config: DraftConfig) -> None:
    """Trains a draft, in place."""
    random = np.random.default_rng(config.seed)
    order = sorted(range(len(training)), key=lambda i: len(training[i][1]))
    parts = batch_by_tokens([len(training[i][1]) for i in order], config.batch_size)
    steps, step = config.epochs * len(parts), 0
    optimizer = torch.optim.AdamW(network.parameters(), config.learning_rate, (0.9, 0.98), 1e-9, weight_decay=0.01)
    warm = max(1, min(config.warmup, steps // 3))
    for epoch in range(config.epochs):
        total = 0.0
        for a, b in (parts[i] for i in random.permutation(len(parts))):
            for group in optimizer.param_groups:
                rate = (1 + math.cos(math.pi * step / steps)) / 2
                group["lr"] = config.learning_rate * min((step + 1) / warm, 1.0) * rate
            logits, labels = _proposals(network, teacher, [training[i] for i in order[a:b]])
            loss, right = torch.zeros(()), torch.ones_like(labels, dtype=torch.bool)
            for j, scores in enumerate(logits):
                expected = labels[:, j + 1 :]
                weight = (expected != PAD) * torch.where(right[:, : expected.shape[1]], 1.0, MISSED) * DISCOUNT**j
                errors = F.cross_entropy(scores.flatten(0, 1), expected.flatten(), reduction="none")
                loss = loss + (errors * weight.flatten()).sum() / (expected != PAD).sum().clamp(min=1)
                right = right[:, : expected.shape[1]] & (scores.argmax(2) == expected)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            step, total = step + 1, total + float(loss.detach())
        rates = ", ".join(f"{rate:.3f}" for rate in acceptance(network, teacher, held_out, config.batch_size))
        print_line(f"epoch {epoch + 1}/{config.epochs}  loss {total / len(parts):.3f}  held-out acceptance {rates}")


def _proposals(network: DraftNetwork, teacher: Transformer, pairs: Pairs) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the draft's logits, see `DraftNetwork.forward`, and the labels."""
    source, labels = (torch.from_numpy(pad([pair[side] for pair in pairs])) for side in (0, 1))
    with torch.no_grad():
        memory, mask = teacher.encode(source)
        results = teacher.results(F.pad(labels[:, :-1], (1, 0), value=START), memory, mask)
    return network(results, labels, memory, mask), labels


@torch.no_grad()
def acceptance(network: DraftNetwork, teacher: Transformer, pairs: Pairs, tokens: int = 4096) -> list[float]:
    """Returns the acceptance rate of proposed tokens by position, given that all earlier proposals were accepted.

    Args:
        network: The draft.
        teacher: The network that verifies.
        pairs: Tokens of sentences and of their greedy translations.
        tokens: Maximum number of tokens of a batch.
    """
    held, count = np.zeros(network.ahead), np.zeros(network.ahead)
    ordered = sorted(pairs, key=lambda pair: len(pair[1]))
    for a, b in batch_by_tokens([len(target) for _, target in ordered], tokens):
        logits, labels = _proposals(network, teacher, ordered[a:b])
        right = torch.ones_like(labels, dtype=torch.bool)
        for j, scores in enumerate(logits):
            expected = labels[:, j + 1 :]
            before = right[:, : expected.shape[1]] & (expected != PAD)
            right = before & (scores.argmax(2) == expected)
            held[j], count[j] = held[j] + int(right.sum()), count[j] + int(before.sum())
    return (held / np.maximum(count, 1)).tolist()  # type: ignore[no-any-return]


def _arrays(network: DraftNetwork, teacher: Transformer, folder: ModelFolder) -> dict[str, NDArray[np.float32]]:
    """Returns the weights of a draft for the int8 model, whose rewrites may have scaled columns."""
    arrays = {name: tensor.detach().numpy() for name, tensor in network.state_dict().items()}
    _, decoder = programs(graph_io.load(folder.ensure("int8.onnx")))
    projection = decoder.vocabulary.layer
    results = _column_ratios(network.words.numpy(), projection.weight.T * projection.scale[:, None])  # type: ignore[operator]
    cross = next(operation.layer for operation in decoder.operations if isinstance(operation, CrossAttention))
    layer: Any = teacher.decoder[0]
    own = np.concatenate([layer.cross.key.weight.detach().numpy(), layer.cross.value.weight.detach().numpy()])
    padded = (cross.weight.T * cross.scale[:, None]).reshape(2 * layer.cross.heads, -1, own.shape[1])
    memory = _column_ratios(own, padded[:, : layer.cross.size].reshape(own.shape))
    arrays["cell.weight"] = arrays["cell.weight"] * results
    for name in arrays:
        if name.endswith(("keys.weight", "values.weight")):
            arrays[name] = arrays[name] * memory
    arrays["project.weight"] = arrays["project.weight"] / results[:, None]
    return arrays


def _column_ratios(weight: NDArray[np.float32], quantized: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the factor of each column of weights; the column's input was divided by it."""
    ratios: NDArray[np.float32] = (weight * quantized).sum(0) / np.maximum((weight * weight).sum(0), 1e-12)
    return ratios.astype(np.float32)


def _words(pairs: Pairs, teacher: Transformer) -> dict[str, NDArray[Any]]:
    """Returns the words that the draft may propose, by the source tokens."""
    target = len(teacher.embedding.weight)
    source = target if teacher.config.shared_source else len(teacher.source_embedding.weight)
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    shortlist = learn_shortlist(sources, targets, (source, target), best=PER_TOKEN, shared=teacher.config.shared_source)
    common = np.unique(np.append(shortlist.order[:COMMON], END))
    small = np.uint16 if target <= 1 << 16 else np.int32
    offsets = shortlist.offsets.astype(np.int32)
    return {
        "words.common": common.astype(small),
        "words.offsets": offsets,
        "words.targets": shortlist.targets.astype(small),
    }

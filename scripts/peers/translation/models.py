"""The models that translation is timed with: those of the zoo, and random weights in their shapes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.models.hub import CARD, Card
from scripts.peers.translation import marian_export
from zoo.translation.data.parallel_text import VOCABULARY, Vocabulary
from zoo.translation.data.tokens import END, PAD, START, Tokens, pad
from zoo.translation.data.vocabularies import ImportedVocabulary, open_vocabulary
from zoo.translation.search.shortlist import Shortlist

RANDOM = {"base": ("base", 32000), "opus": ("base", 58_101), "small": ("tiny", 8000)}  # preset, pieces
FIREFOX, FIREFOX_PIECES, FIREFOX_LENGTH = "firefox", 32000, 20  # random weights in Marian's format; tokens of a source
LENGTHS = (8, 32)  # tokens of a sentence of task steps; a batch of the longest is one batch for all engines
CALIBRATION = 16  # sentences that calibrate random weights
LISTED = (3000, 50)  # words of a drawn shortlist that are in every list, and more for each token of a source


@dataclass(frozen=True)
class Work:
    """Input of every process: a copy of the model's folder, with the peers' models beside it."""

    folder: Path

    def made(self, name: str) -> Path:
        """Returns the path of a peer's model."""
        return self.folder.parent / name

    @property
    def vocabulary(self) -> Vocabulary | ImportedVocabulary:
        """The pieces."""
        return open_vocabulary(self.folder, files.read_json(self.folder / CARD)["preprocessing"])


def made_up(size: int, marian: bool = False) -> bytes:
    """Returns a sentencepiece model of `size` pieces that no text has.

    Args:
        size: Number of pieces.
        marian: Without padding and start, the end first.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    kinds = proto.ModelProto.SentencePiece
    names = ["</s>", "<unk>"] if marian else ["<pad>", "<unk>", "<s>", "</s>"]
    for name in names:
        model.pieces.add(piece=name, score=0, type=kinds.UNKNOWN if name == "<unk>" else kinds.CONTROL)
    for index in range(len(model.pieces), size):
        model.pieces.add(piece=f"▁w{index}", score=-float(index), type=kinds.NORMAL)
    spec = model.trainer_spec
    spec.model_type, spec.vocab_size = spec.UNIGRAM, size
    spec.unk_id, spec.eos_id = 1, names.index("</s>")
    spec.pad_id, spec.bos_id = (-1, -1) if marian else (PAD, START)
    return bytes(model.SerializeToString())


def untrained(arch: str, pieces: int, folder: Path) -> None:
    """Writes a model folder of random weights and biases, as a training leaves it.

    No sentence ends with padding: its logit is 0.
    """
    import torch

    from zoo.translation.models.transformer import Transformer

    torch.manual_seed(0)
    model = Transformer.of(arch, pieces)
    with torch.no_grad():
        model.embedding.weight[PAD] = 0
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.bias.normal_(std=0.02)  # a layer without bias would be quicker than any that was trained
    folder.mkdir(parents=True)
    torch.save({"state_dict": model.state_dict()}, folder / "model.pt")
    (folder / VOCABULARY).write_bytes(made_up(pieces))
    features = {"arch": arch, "pre_norm": True, "languages": "en-de", "max_length": 128}
    files.write_json(folder / "train.json", {"features": features})
    card = Card(f"random-{arch}", "transformer-mt", "random weights", (), {"preprocessing": features})
    files.write_json(folder / CARD, card.to_json())
    sources = drawn(pieces, CALIBRATION)
    np.savez(folder / "calibration.npz", source=pad(sources), target=pad([[START, *tokens[:-1]] for tokens in sources]))


def imported(steps: int, folder: Path) -> None:
    """Writes random weights in Marian's format, and the model folder that is imported from them.

    Args:
        steps: Tokens of every translation of a source of `FIREFOX_LENGTH` tokens.
        folder: Model folder.
    """
    original = folder.parent / FIREFOX
    content = made_up(FIREFOX_PIECES, marian=True)
    marian_export.random_model(original, content, FIREFOX_PIECES, steps / FIREFOX_LENGTH)
    zoo.import_model(original, folder)
    vocabulary = Work(folder).vocabulary
    text = folder.parent / "calibration.txt"
    sources = drawn(len(vocabulary), CALIBRATION, (FIREFOX_LENGTH, FIREFOX_LENGTH))
    text.write_text("".join(f"{line}\n" for line in vocabulary.decode([tokens[:-1].tolist() for tokens in sources])))
    zoo.calibrate(folder, data=text)


def drawn(pieces: int, count: int, lengths: tuple[int, int] = LENGTHS) -> list[Tokens]:
    """Returns sentences of random tokens, `END` last.

    Args:
        pieces: Size of the vocabulary.
        count: Number of sentences.
        lengths: Least and greatest number of tokens.
    """
    random = np.random.default_rng(0)
    sizes = random.integers(lengths[0], lengths[1] + 1, count)
    return [np.array([*random.integers(END + 1, pieces, size - 1), END], np.int32) for size in sizes.tolist()]


def copied(model: str, folder: Path, steps: int) -> None:
    """Writes a folder of random weights, or copies a model's folder, and builds it.

    Files that a benchmark derives then do not stay in the model's folder, and no engine has the memory of the building.

    Args:
        model: Name, folder, or a name of random weights.
        folder: Model folder to write.
        steps: Tokens of every translation of a model in Marian's format.

    Raises:
        RequestError: The model is of another family.
    """
    if model in RANDOM:
        untrained(*RANDOM[model], folder)
    elif model == FIREFOX:
        imported(steps, folder)
    else:
        source = zoo.load(model)
        if source.card.entry != "transformer-mt":
            raise RequestError(
                f"{model} is a {source.card.entry} model, expected transformer-mt, {', '.join(RANDOM)} or {FIREFOX}"
            )
        shutil.copytree(source.path, folder, ignore=shutil.ignore_patterns("checkpoint", "reports", ".build.lock"))
    zoo.build(folder)


def listed(pieces: int) -> Shortlist:
    """Returns a shortlist for random weights, see `LISTED`; words are drawn by Zipf's law."""
    first, count = LISTED
    random = np.random.default_rng(1)
    order = np.concatenate([[END], random.permutation(np.delete(np.arange(pieces), END))])
    words = order[(pieces ** random.random((pieces, count))).astype(np.int64) - 1]
    return Shortlist(first, order, np.arange(pieces + 1) * count, words.ravel(), shared=True)

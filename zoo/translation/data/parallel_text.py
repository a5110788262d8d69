"""Parallel text: cleaned, tokenized, and grouped into batches of similar length."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, ZooError
from zoo.translation.data.characters import invalid_characters
from zoo.translation.data.known_text import KnownText
from zoo.translation.data.text_files import Faults, Pair, read_pairs, sources
from zoo.translation.data.tokenizers import Pieces, open_sentencepiece
from zoo.translation.data.tokens import END, PAD, START, UNKNOWN, Tokens, batch_by_tokens, pad

if TYPE_CHECKING:
    from zoo.translation.data.vocabularies import ImportedVocabulary

VOCABULARY = "vocabulary.model"
MAX_VOCABULARY_SENTENCES = 1_000_000  # of the sample that a vocabulary is learned from
MANY_TEXTS = 64  # texts that are encoded in one call
MIN_BYTE_VOCABULARY = 1024  # pieces of the smallest vocabulary with byte fallback, which takes 256 of them

# ------------------------------------------------------------------------------------------------------------ cleaning


def normalize_whitespace(text: str) -> str:
    """Replaces whitespace by single spaces and strips the ends.

    Args:
        text: Any text.

    Returns:
        The normalized text.
    """
    return " ".join(text.split())


def clean(pairs: Iterable[Pair], faults: Faults) -> Iterator[Pair]:
    """Drops empty pairs, pairs with invalid characters, and repetitions.

    Args:
        pairs: Source and target of each pair.
        faults: Counts dropped pairs.

    Yields:
        The pairs, tidied.
    """
    seen: set[bytes] = set()
    for source, target in ((normalize_whitespace(a), normalize_whitespace(b)) for a, b in pairs):
        key = hashlib.blake2b(f"{source}\t{target}".encode(errors="surrogatepass"), digest_size=8).digest()
        if not source or not target:
            faults.add("empty")
        elif invalid_characters(source) or invalid_characters(target):
            faults.add("strange characters")
        elif key in seen:
            faults.add("repeated")
        else:
            seen.add(key)
            yield source, target


# ---------------------------------------------------------------------------------------------------------- vocabulary


def learn_vocabulary(pairs: Sequence[Pair], size: int, seed: int) -> bytes:
    """Learns a sentencepiece model (unigram, Kudo 2018) of both languages; the same sentences give the same bytes.

    From `MIN_BYTE_VOCABULARY` pieces on, characters without a piece are written as the bytes of their UTF-8.

    Args:
        pairs: Source and target of each pair.
        size: Maximum number of pieces.
        seed: Seed of the sample of sentences.

    Returns:
        The model file.

    Raises:
        RequestError: sentencepiece refuses.
    """
    import sentencepiece

    chosen: Iterable[int] = range(len(pairs))
    if 2 * len(pairs) > MAX_VOCABULARY_SENTENCES:
        chosen = np.random.default_rng(seed).choice(len(pairs), MAX_VOCABULARY_SENTENCES // 2, replace=False).tolist()
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(text for i in chosen for text in pairs[i]),
            model_writer=written,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=0.9999,
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=START,
            eos_id=END,
            byte_fallback=size >= MIN_BYTE_VOCABULARY,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise RequestError(
            f"no vocabulary of {size} pieces can be made of these sentences ({' '.join(str(error).split())})"
        ) from error
    return written.getvalue()


class Vocabulary(Pieces):
    """A sentencepiece vocabulary shared by source and target.

    Attributes:
        content: The model file.
        known_text: Characters and words that it can write.
    """

    def __init__(self, content: bytes, name: str | Path = VOCABULARY) -> None:
        """Opens a model file.

        Args:
            content: The file, see `learn_vocabulary`.
            name: Its name, for messages.

        Raises:
            RequestError: The content is no sentencepiece model of this form.
        """
        self._pieces = open_sentencepiece(content, name)
        ids = [getattr(self._pieces, f"{name}_id")() for name in ("pad", "unk", "bos", "eos")]
        if ids != [PAD, UNKNOWN, START, END]:
            raise RequestError(
                f"{name} has the ids {ids} for padding, unknown, start and end; expected {[PAD, UNKNOWN, START, END]}"
            )
        self.content = content
        self.known_text = KnownText(self._can_write)

    def _can_write(self, texts: list[str]) -> list[bool]:
        """See `KnownText`."""
        return [UNKNOWN not in tokens for tokens in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts; a list at once takes a quarter of the time, but starts a thread."""
        if len(texts) < MANY_TEXTS:
            return [self._pieces.encode(text) for text in texts]
        return list(self._pieces.encode(list(texts), num_threads=1))

    @classmethod
    def read(cls, path: Path) -> Vocabulary:
        """Opens a model file.

        Args:
            path: The file.

        Returns:
            The vocabulary.

        Raises:
            RequestError: The file is missing or no vocabulary.
        """
        try:
            return cls(path.read_bytes(), path)
        except OSError as error:
            raise RequestError(
                f"cannot read {path}: {error.strerror or error}; train or download the model again"
            ) from error

    copies_words = True  # words that it cannot write are copied to translations
    source_language = ""  # there are no languages to choose from
    frame, prefix = 1, ()  # number of special tokens around a source; tokens that translations begin with

    def __len__(self) -> int:
        return int(self._pieces.get_piece_size())

    @property
    def sources(self) -> int:
        """Number of source tokens."""
        return len(self)

    def choose(self, source_language: str = "", target_language: str = "", prompt: str | None = None) -> Vocabulary:
        """Chooses languages and a prompt, which this vocabulary does not have.

        Args:
            source_language: Must be empty.
            target_language: Must be empty.
            prompt: Must be None.

        Returns:
            The vocabulary itself.

        Raises:
            RequestError: A language or a prompt is given.
        """
        if prompt is not None:
            raise RequestError(f"found the prompt {prompt!r}; sources of models of this project begin with none")
        if source_language or target_language:
            raise RequestError(
                f"found the language {source_language or target_language}; this model has none to choose from"
            )
        return self

    def addressed(self, text: str) -> tuple[Vocabulary, str]:
        """Returns the vocabulary itself and the text, which cannot choose a language.

        Args:
            text: Source text.
        """
        return self, text

    @property
    def pieces(self) -> list[str]:
        """The piece of every token."""
        return [str(self._pieces.id_to_piece(token)) for token in range(len(self))]

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenizes texts.

        Args:
            texts: Texts of either language.

        Returns:
            Tokens of each text, int32, `END` last.
        """
        return [np.array([*tokens, END], np.int32) for tokens in self._encode(texts)]

    source_pieces, encode_target = pieces, encode  # one vocabulary for both languages

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Detokenizes texts.

        Args:
            tokens: Tokens of each text, without start and end.

        Returns:
            The texts.
        """
        return [str(self._pieces.decode(list(sentence))) for sentence in tokens]


# ------------------------------------------------------------------------------------------------------------- batches


@dataclass
class Corpus:
    """Pairs as tokens.

    Attributes:
        source: All source tokens, int32.
        target: All target tokens, int32.
        source_starts: Sentence i has source[starts[i]:starts[i + 1]], int64 [pairs + 1].
        target_starts: The same of the target.
    """

    source: Tokens
    target: Tokens
    source_starts: NDArray[np.int64]
    target_starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source_starts) - 1

    def pair(self, index: int) -> tuple[Tokens, Tokens]:
        """Returns the tokens of a pair.

        Args:
            index: Index of the pair.

        Returns:
            Source and target tokens, int32, `END` last in each.
        """
        (a, b), (c, d) = self.source_starts[index : index + 2], self.target_starts[index : index + 2]
        return self.source[a:b], self.target[c:d]

    @property
    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of tokens of every source and every target, int64 [pairs] each."""
        return np.diff(self.source_starts), np.diff(self.target_starts)

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens, in hex."""
        return hashlib.sha256(b"".join(array.tobytes() for array in vars(self).values())).hexdigest()


def corpus(
    pairs: Sequence[Pair],
    vocabulary: Vocabulary | ImportedVocabulary,
    faults: Faults | None = None,
    *,
    max_length: int = 0,
    max_ratio: float = 0.0,
) -> tuple[Corpus, list[int]]:
    """Tokenizes pairs.

    Args:
        pairs: Source and target of each pair.
        vocabulary: The vocabulary.
        faults: Counts dropped pairs.
        max_length: Maximum number of tokens of a side; 0: any.
        max_ratio: Maximum ratio of the tokens of both sides, after five tokens more; 0: any.

    Returns:
        The corpus, and the indices of the pairs in it.
    """
    source, target = vocabulary.encode([a for a, _ in pairs]), vocabulary.encode_target([b for _, b in pairs])
    kept = []
    for i, (a, b) in enumerate(zip(source, target, strict=True)):
        if max_length and max(len(a), len(b)) > max_length:
            reason = "too long"
        elif max_ratio and max(len(a), len(b)) > max_ratio * min(len(a), len(b)) + 5:
            reason = "lengths differ too much"
        else:
            kept.append(i)
            continue
        if faults is not None:
            faults.add(reason)
    return from_tokens([source[i] for i in kept], [target[i] for i in kept]), kept


def from_tokens(source: Sequence[Tokens], target: Sequence[Tokens]) -> Corpus:
    """Builds a corpus of tokenized sentences.

    Args:
        source: Source tokens of each pair, int32.
        target: Target tokens of each pair, int32.

    Returns:
        The corpus.
    """
    joined = (np.concatenate([np.zeros(0, np.int32), *sentences]) for sentences in (source, target))
    starts = (np.cumsum([0, *map(len, sentences)], dtype=np.int64) for sentences in (source, target))
    return Corpus(*joined, *starts)


def batches(data: Corpus, tokens: int, seed: Sequence[int] | None = None) -> list[NDArray[np.int64]]:
    """Groups pairs of similar length into batches.

    Args:
        data: The corpus.
        tokens: Maximum of pairs times longest sentence of a batch; a batch has at least one pair.
        seed: Shuffles pairs of equal length, and the batches; None: always the same order.

    Returns:
        Indices of the pairs of each batch, int64.
    """
    random = np.random.default_rng(seed)
    sources, targets = data.lengths
    shuffled = np.arange(len(data)) if seed is None else random.permutation(len(data))
    order = shuffled[np.lexsort((targets[shuffled], sources[shuffled]))]
    bounds = batch_by_tokens(np.maximum(sources, targets)[order].tolist(), tokens)
    parts = [order[a:b] for a, b in bounds]
    return parts if seed is None else [parts[i] for i in random.permutation(len(parts))]


def decoder_samples(
    sentences: Sequence[Sequence[int] | Tokens], translations: Sequence[Sequence[int]]
) -> dict[str, NDArray[np.int64]]:
    """Builds calibration samples of a decoder.

    A graph computes the logits of the last target token only, which for complete translations always predict the end.
    Therefore every other target is truncated at random.

    Args:
        sentences: Source tokens of each sentence.
        translations: Target tokens of each sentence.

    Returns:
        {"source", "target"}: int64 [n, tokens].
    """
    random = np.random.default_rng(0)
    parts = [
        target[: int(random.integers(len(target) + 1))] if i % 2 else target for i, target in enumerate(translations)
    ]
    return {"source": pad(sentences), "target": pad([[START, *part] for part in parts])}


# ------------------------------------------------------------------------------------------------------- parallel text


@dataclass
class ParallelText:
    """Parallel text for training.

    Attributes:
        train: Pairs to train on.
        held_out: Held-out pairs.
        references: Held-out pairs as text.
        vocabulary: The vocabulary.
        faults: Counts of dropped pairs.
    """

    train: Corpus
    held_out: Corpus
    references: list[Pair]
    vocabulary: Vocabulary | ImportedVocabulary
    faults: Faults = field(default_factory=Faults)

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens, in hex."""
        return hashlib.sha256(f"{self.train.digest}{self.held_out.digest}".encode()).hexdigest()


def load_parallel_text(
    data: Any,
    vocabulary: Callable[[Sequence[Pair]], Vocabulary | ImportedVocabulary],
    *,
    languages: str,
    swap: bool = False,
    validation_data: str = "",
    validation: int = 1000,
    max_length: int = 128,
    max_ratio: float = 3.0,
    seed: int = 0,
    on_error: str = "raise",
) -> ParallelText:
    """Reads, cleans and tokenizes parallel text.

    Args:
        data: See `zoo.translation.data.text_files.read_pairs`.
        vocabulary: Makes or opens the vocabulary for the pairs to train on.
        languages: "source-target", such as "en-de".
        swap: Whether to translate from the second column into the first.
        validation_data: Pairs to hold out; "": the data sets' own splits, else `validation` pairs.
        validation: Number of held-out pairs, at most a tenth of all.
        max_length: See `corpus`.
        max_ratio: See `corpus`.
        seed: Draws the held-out pairs.
        on_error: "raise" or "skip" for lines that are no pairs.

    Returns:
        The text.

    Raises:
        RequestError: No pairs are left to train or to validate on.
    """
    if on_error not in ("raise", "skip"):
        raise RequestError(f"on_error is {on_error!r}; expected raise or skip")
    faults = Faults()

    def read(source: Any, held_out: bool) -> list[Pair]:
        cleaned = clean(read_pairs(source, languages, held_out=held_out, on_error=on_error, faults=faults), faults)
        return [(b, a) for a, b in cleaned] if swap else list(cleaned)

    pairs = read(data, False)
    if validation_data:
        references = read(validation_data, False)
    else:
        own = [source for source in sources(data) if not Path(source).is_file() and "," not in source]
        references = read(own, True) if own else []
        if not references:
            drawn = np.random.default_rng(seed).choice(len(pairs), min(validation, len(pairs) // 10), replace=False)
            references = [pairs[i] for i in sorted(drawn.tolist())]
    held_out = set(references)
    pairs = [pair for pair in pairs if pair not in held_out]
    if not pairs or not references:
        raise RequestError(
            f"found {len(pairs)} pairs to train on and {len(references)} to validate on; expected some of each"
        )
    learned = vocabulary(pairs)
    train, _ = corpus(pairs, learned, faults, max_length=max_length, max_ratio=max_ratio)
    tested, kept = corpus(references, learned, max_length=max_length)
    if not len(train) or not kept:
        raise ZooError(f"no pair is as short as {max_length} tokens; train with a greater max_length")
    return ParallelText(train, tested, [references[i] for i in kept], learned, faults)

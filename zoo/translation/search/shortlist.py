"""Lexical shortlists: the target tokens that a translation may have, by its source tokens (Marian's --shortlist)."""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.data.text_files import read_lines
from zoo.translation.data.parallel_text import normalize_whitespace
from zoo.translation.data.text_files import read_pairs
from zoo.translation.data.tokens import UNKNOWN
from zoo.translation.data.vocabularies import open_vocabulary

if TYPE_CHECKING:
    from pipelines.models.folder import ModelFolder

SHORTLIST = "shortlist.npz"
MAGIC = 0xF11A48D5013417F5  # first bytes of a binary shortlist
HEADER = struct.Struct("<6Q")  # magic, checksum, first, best, offsets, targets
MULTIPLE = 8  # the size of a list is a multiple, for Marian's kernels
MAX_PAIRS = 50_000  # maximum number of pairs that a shortlist is learned from
MISS_RATE = 500  # one token in `MISS_RATE` at most is missing in its list
GOLDEN, WHOLE = 0x9E3779B9, (1 << 64) - 1

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Shortlist:
    """Target tokens of each source token.

    Attributes:
        first: So many tokens of `order` are in every list.
        order: All target tokens, the most frequent first, int64 [target tokens].
        offsets: int64 [source tokens + 1].
        targets: int64; source token s has targets[offsets[s]:offsets[s + 1]].
        shared: Whether source and target share a vocabulary; a source token is then in its own list.
    """

    first: int
    order: Integers
    offsets: Integers
    targets: Integers
    shared: bool = False

    @property
    def common_tokens(self) -> Integers:
        """Tokens in every list, sorted int64."""
        return np.sort(self.order[: self.first])

    def allowed(self, source: Iterable[int]) -> Integers:
        """Returns the tokens that a translation may have.

        Args:
            source: Source tokens.

        Returns:
            Sorted int64: the head of `order`, the tokens of each source token, and the next of `order` up to a multiple
            of eight, as in Marian.
        """
        chosen = np.zeros(len(self.order), bool)
        chosen[self.order[: self.first]] = True
        for token in {*source}:
            chosen[self.targets[self.offsets[token] : self.offsets[token + 1]]] = True
            if self.shared:
                chosen[token] = True
        more = self.order[self.first :]
        chosen[more[~chosen[more]][: -int(chosen.sum()) % MULTIPLE]] = True
        return np.flatnonzero(chosen)

    def renumbered(self, source: Integers, target: Integers) -> Shortlist:
        """Returns the shortlist for other token numbers.

        Args:
            source: New number of each source token, int64.
            target: New number of each target token, int64.
        """
        size, rows = int(target.max()) + 1, int(source.max()) + 1
        lists: list[Integers] = [np.zeros(0, np.int64)] * rows
        for old, new in enumerate(source.tolist()):
            lists[new] = np.sort(target[self.targets[self.offsets[old] : self.offsets[old + 1]]])
        order = target[self.order]
        others = np.setdiff1d(np.arange(size), order)
        return Shortlist(self.first, np.concatenate([order, others]), *_joined(lists), self.shared)

    def to_bytes(self) -> bytes:
        """Returns the content of the file `SHORTLIST`."""
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **{name: np.asarray(array) for name, array in vars(self).items()})
        return file.getvalue()

    @staticmethod
    def from_bytes(content: bytes) -> Shortlist:
        """Reads the result of `to_bytes`.

        Args:
            content: Content of the file `SHORTLIST`.

        Returns:
            The shortlist.

        Raises:
            RequestError: The content is damaged or of another format.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                parts = {name: arrays[name].astype(np.int64) for name in Shortlist.__dataclass_fields__}
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise RequestError(f"{SHORTLIST} is not what zoo import writes; import the model again") from error
        first, shared = int(parts.pop("first")), bool(parts.pop("shared"))
        return Shortlist(first, **parts, shared=shared)


def build_shortlist(folder: ModelFolder, data: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Makes the shortlist of a model.

    Args:
        folder: The model folder.
        data: See `load_shortlist`.

    Returns:
        Preprocessing for the card, and {file name: content}.

    Raises:
        RequestError: No shortlist can be made of `data`.
    """
    shortlist = load_shortlist(data, open_vocabulary(folder.path, folder.preprocessing, folder.verify))
    return {"shortlist": SHORTLIST}, {SHORTLIST: shortlist.to_bytes()}


def load_shortlist(data: str, vocabulary: Any) -> Shortlist:
    """Reads or learns a shortlist.

    Args:
        data: A text shortlist, with .s2t in its name, plain or .gz (`read_text`), or parallel text (`learn_shortlist`).
        vocabulary: See `zoo.translation.data.vocabularies.open_vocabulary`.

    Returns:
        The shortlist.

    Raises:
        RequestError: `data` is neither, or too little.
    """
    pieces = vocabulary.source_pieces, vocabulary.pieces
    shared = pieces[0] == pieces[1]
    try:
        if ".s2t" in Path(data).name and Path(data).is_file():
            source, target = ({piece: token for token, piece in enumerate(words) if piece} for words in pieces)
            with closing(read_lines(data)) as lines:
                text = (line or "" for line in lines)
                return read_text(text, source, target, (UNKNOWN, UNKNOWN), shared=shared)
        pairs = [(normalize_whitespace(source), normalize_whitespace(target)) for source, target in read_pairs(data)]
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        tokens = vocabulary.encode(sources), vocabulary.encode_target(targets)
        return learn_shortlist(*tokens, (vocabulary.sources, len(vocabulary)), shared=shared)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"{data}: {error}; expected some thousand sentences and their translations") from error


def read_binary(content: bytes, sources: int, words: int, shared: bool) -> Shortlist:
    """Reads a binary shortlist, lex.bin: `HEADER`; uint64 offsets; uint32 targets.

    Source: marian-dev, src/data/shortlist.cpp, `BinaryShortlistGenerator`.

    Args:
        content: The file.
        sources: Number of source tokens.
        words: Number of target tokens.
        shared: Whether source and target share a vocabulary.

    Returns:
        The shortlist.

    Raises:
        ValueError: The file is damaged, or of another vocabulary.
    """
    if len(content) < HEADER.size:
        raise ValueError(f"it has {len(content)} bytes, which is less than a header")
    magic, checksum, first, _, rows, count = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise ValueError("it is no binary shortlist of Marian")
    if len(content) != HEADER.size + 8 * rows + 4 * count:
        raise ValueError(f"it has {len(content):,} bytes, expected {HEADER.size + 8 * rows + 4 * count:,}")
    if compute_checksum(content) != checksum:
        raise ValueError("its checksum is another")
    offsets = np.frombuffer(content, "<u8", rows, HEADER.size).astype(np.int64)
    targets = np.frombuffer(content, "<u4", count, HEADER.size + 8 * rows).astype(np.int64)
    if rows != sources + 1 or (targets >= words).any():
        raise ValueError(f"it is of {rows - 1:,} source tokens, the model has {sources:,}, and {words:,} of the target")
    if offsets[0] != 0 or offsets[-1] != count or (np.diff(offsets) < 0).any():
        raise ValueError("its offsets are out of order")
    return Shortlist(min(first, words), np.arange(words), offsets, targets, shared)


def read_text(
    lines: Iterable[str],
    source: Mapping[str, int],
    target: Mapping[str, int],
    unknown: tuple[int, int],
    *,
    first: int = 100,
    best: int = 100,
    threshold: float = 0.0,
    shared: bool = False,
) -> Shortlist:
    """Reads a text shortlist, lex.s2t: lines of target piece, source piece and probability.

    Source: marian-dev, src/data/shortlist.h, `LexicalShortlistGenerator`.

    Args:
        lines: The lines.
        source: {piece: token} of the source.
        target: {piece: token} of the target.
        unknown: Tokens of other pieces, of source and target.
        first: Number of most frequent target tokens in every list.
        best: Maximum number of target tokens of a source token.
        threshold: Minimum probability.
        shared: Whether source and target share a vocabulary.

    Returns:
        The shortlist.

    Raises:
        ValueError: A line has another form; the message has its number.
    """
    probabilities: list[dict[int, float]] = [{} for _ in range(max(source.values()) + 1)]
    for number, line in enumerate(lines, 1):
        if not (parts := line.split()):
            continue
        try:
            to, of, probability = parts[0], parts[1], float(parts[2])
        except (ValueError, IndexError) as error:
            raise ValueError(f"line {number} is no target, source and probability") from error
        if "NULL" not in (to, of):
            probabilities[source.get(of, unknown[0])][target.get(to, unknown[1])] = probability
    lists = []
    for targets in probabilities:
        ranked = sorted(((probability, token) for token, probability in targets.items()), reverse=True)[:best]
        lists.append(np.array(sorted(token for probability, token in ranked if probability > threshold), np.int64))
    words = max(target.values()) + 1
    return Shortlist(min(first, words), np.arange(words), *_joined(lists), shared)


def learn_shortlist(
    sources: Sequence[NDArray[np.int32]],
    targets: Sequence[NDArray[np.int32]],
    sizes: tuple[int, int],
    *,
    best: int = 50,
    rounds: int = 5,
    shared: bool = True,
) -> Shortlist:
    """Learns a shortlist from parallel text by IBM model 1 (Brown et al. 1993, section 4.1).

    The number of most frequent tokens in every list is chosen on the last tenth of the text, which is not learned from:
    all but one in `MISS_RATE` of its target tokens are in the lists of their sentences.

    Args:
        sources: Tokens of each sentence, int32; of many sentences an even sample of `MAX_PAIRS` is taken.
        targets: Tokens of each translation, int32.
        sizes: Number of source and of target tokens.
        best: Number of target tokens of each source token.
        rounds: Rounds of expectation maximization.
        shared: Whether source and target share a vocabulary.

    Returns:
        The shortlist.

    Raises:
        ValueError: There are less than ten pairs.
    """
    if len(sources) < 10:
        raise ValueError(f"{len(sources)} pairs are too few to learn a shortlist of")
    chosen = np.linspace(0, len(sources) - 1, min(len(sources), MAX_PAIRS)).astype(np.int64).tolist()
    seen = [(np.unique(sources[i]).astype(np.int64), np.asarray(targets[i], np.int64)) for i in chosen]
    held_out = seen[-len(seen) // 10 :]
    offsets, kept = _by_alignment(seen[: -len(held_out)], sizes, best, rounds)
    frequency = np.bincount(np.concatenate([target for _, target in seen]), minlength=sizes[1])
    order = np.argsort(-frequency, kind="stable")
    lists, rank = Shortlist(0, order, offsets, kept, shared), np.argsort(order)
    needed = []  # how many frequent words each word of the held-out text asks for
    for source, target in held_out:
        needed.append(np.where(np.isin(target, lists.allowed(source.tolist())), 0, 1 + rank[target]))
    ranked = np.sort(np.concatenate(needed))
    return dataclasses.replace(lists, first=max(int(ranked[-1 - len(ranked) // MISS_RATE]), MULTIPLE))


def _by_alignment(
    pairs: Sequence[tuple[Integers, Integers]], sizes: tuple[int, int], best: int, rounds: int
) -> tuple[Integers, Integers]:
    """Returns offsets and targets of the `best` target tokens of every source token by IBM model 1.

    pairs: Distinct source tokens, and all target tokens, of each pair.
    """
    rows, words = sizes
    keys = np.concatenate([(source * words + target[:, None]).ravel() for source, target in pairs])
    counts = np.concatenate([np.full(len(target), len(source)) for source, target in pairs])
    place = np.repeat(np.arange(len(counts)), counts)  # of the word of a translation
    unique_keys, pair = np.unique(keys, return_inverse=True)
    of, probability = unique_keys // words, np.ones(len(unique_keys))
    for _ in range(rounds):
        weight = probability[pair]
        expected = np.bincount(pair, weight / np.bincount(place, weight)[place])
        probability = expected / np.bincount(of, expected)[of]
    rank = np.arange(len(unique_keys)) - np.searchsorted(of, of)  # `unique_keys` are in the order of their sources
    kept = np.sort(np.lexsort((-probability, of))[rank < best])
    return np.searchsorted(of[kept], np.arange(rows + 1)).astype(np.int64), unique_keys[kept] % words


def _joined(lists: Sequence[Integers]) -> tuple[Integers, Integers]:
    """Returns offsets and concatenated targets."""
    offsets = np.concatenate([[0], np.cumsum([len(targets) for targets in lists])]).astype(np.int64)
    return offsets, np.concatenate([*lists, np.zeros(0, np.int64)])


def compute_checksum(content: bytes) -> int:
    """Computes the checksum of a binary shortlist.

    boost's hash_combine over all complete uint64 after the checksum in the header.

    Args:
        content: The file.

    Returns:
        The checksum.
    """
    seed = 0
    for word in np.frombuffer(content, "<u8", len(content) // 8)[2:].tolist():
        seed ^= (word + GOLDEN + (seed << 6) + (seed >> 2)) & WHOLE
    return seed

"""Vocabularies of other toolkits, with the methods of `zoo.translation.data.parallel_text.Vocabulary`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.core.plain import from_plain, to_plain
from zoo.translation.data.known_text import KnownText
from zoo.translation.data.parallel_text import VOCABULARY, Vocabulary
from zoo.translation.data.sentence_splitting import COMMON, language_code
from zoo.translation.data.tokenizers import TOKENIZERS
from zoo.translation.data.tokens import END, UNKNOWN, Tokens

PIECES = "pieces.json"  # {"source": [text of every token], "target": the same, where it is another vocabulary}
SOURCE, TARGET = "source", "target"  # placeholders for the token of a language in `Framing`
_ADDRESS = re.compile(r"\s*>>(\S+?)<<\s*")


@dataclass(frozen=True)
class Framing:
    """Tokenizer of a model and the special tokens around a sentence.

    Attributes:
        kind: Tokenizer, a key of `TOKENIZERS`.
        files: Its files, of the source and of the target where that differs.
        before: Source tokens before the pieces; `SOURCE` and `TARGET` stand for the tokens of the languages.
        after: Source tokens after the pieces.
        languages: {name: token} of the languages to choose from.
        source_language: The chosen source language.
        target_language: The chosen target language.
        prefixed: Whether translations begin with the token of the target language.
        hidden: Tokens that are no text.
        prompts: Text that a source begins with, by target language, which need not be chosen.
        prompt: Text that a source begins with where `prompts` has none.
    """

    kind: str
    files: tuple[str, ...] = ()
    before: tuple[int | str, ...] = ()
    after: tuple[int | str, ...] = (END,)
    languages: Mapping[str, int] | None = None
    source_language: str = ""
    target_language: str = ""
    prefixed: bool = False
    hidden: tuple[int, ...] = ()
    prompts: Mapping[str, str] | None = None
    prompt: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the values that differ from the defaults, as plain values."""
        return to_plain(self, changed=True)

    @staticmethod
    def from_json(values: Any) -> Framing:
        """Reads the result of `to_json`.

        Args:
            values: Plain values.

        Returns:
            The framing.

        Raises:
            RequestError: A key is unknown.
        """
        try:
            framing = Framing(**from_plain(values))
        except (AttributeError, TypeError):
            framing = Framing("", ())
        if framing.kind not in TOKENIZERS:
            raise RequestError(
                f"found the vocabulary {values}, expected what zoo import writes; import the model again"
            )
        return framing

    @property
    def choices(self) -> tuple[str, ...]:
        """The languages that must be chosen: `SOURCE`, `TARGET` or both."""
        around = (*self.before, *self.after)
        return tuple(side for side in (SOURCE, TARGET) if side in around or (side == TARGET and self.prefixed))


class ImportedVocabulary:
    """Tokenizer of another toolkit."""

    copies_words = False  # sentences are translated as the toolkit does, unknown words included
    label_prefix: tuple[int, ...] = ()  # tokens that the targets of a training begin with

    def __init__(self, framing: Framing, contents: Mapping[str, bytes]) -> None:
        """Opens the tokenizer.

        Args:
            framing: Its configuration.
            contents: {name: bytes} of its files and of `PIECES`.

        Raises:
            RequestError: A file is missing or has another form.
        """
        self.framing = framing
        try:
            pieces = json.loads(contents[PIECES])
            self._source, self._target = pieces[SOURCE], pieces.get(TARGET) or pieces[SOURCE]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(f"{PIECES} is not what zoo import writes; import the model again") from error
        self._tokens = _token_table(self._source)
        self._target_tokens = self._tokens if self._target is self._source else _token_table(self._target)
        make = TOKENIZERS[framing.kind]
        tokenizers = [make(contents[name], name) for name in framing.files] or [make(b"", "")]
        self._source_tokenizer, self._target_tokenizer = tokenizers[0], tokenizers[-1]
        self._hidden = frozenset(framing.hidden)
        self.content = contents[PIECES]
        self.known_text = KnownText(self._can_write)

    def __len__(self) -> int:
        return len(self._target)

    def _can_write(self, texts: list[str]) -> list[bool]:
        """See `KnownText`."""
        tokens = ([self._tokens.get(piece, UNKNOWN) for piece in self._source_tokenizer.tokenize(x)] for x in texts)
        return [UNKNOWN not in sentence for sentence in tokens]

    @property
    def sources(self) -> int:
        """Number of source tokens."""
        return len(self._source)

    @property
    def frame(self) -> int:
        """Number of tokens around every sentence."""
        prompt = len(self._source_tokenizer.tokenize(self.prompt)) if self.prompt else 0
        return len(self.framing.before) + prompt + len(self.framing.after)

    @property
    def prompt(self) -> str:
        """Text that every source begins with, such as a task of T5 or a language of MADLAD-400."""
        return (self.framing.prompts or {}).get(self.framing.target_language, self.framing.prompt)

    @property
    def source_pieces(self) -> list[str]:
        """The piece of every source token; "" for none."""
        return [piece or "" for piece in self._source]

    @property
    def pieces(self) -> list[str]:
        """The piece of every target token; "" for none."""
        return [piece or "" for piece in self._target]

    @property
    def source_language(self) -> str:
        """The chosen source language; "" for none."""
        return self.framing.source_language

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that a translation begins with."""
        return (self._language(TARGET),) if self.framing.prefixed else ()

    def choose(
        self, source_language: str = "", target_language: str = "", prompt: str | None = None
    ) -> ImportedVocabulary:
        """Returns the vocabulary for other languages.

        Args:
            source_language: Source language; "": unchanged.
            target_language: Target language; "": unchanged.
            prompt: Text that every source begins with, in place of that of a target language; None: unchanged.

        Raises:
            RequestError: A language is unknown, or the model has none to choose.
        """
        languages = {SOURCE: source_language, TARGET: target_language}
        chosen = {side: name for side, name in languages.items() if name}
        prompts = self.framing.prompts or {}
        for side, name in chosen.items():
            if side == TARGET and prompts:
                if name not in prompts:
                    raise RequestError(f"found --target-language {name}; expected one of: {', '.join(sorted(prompts))}")
            elif side not in self.framing.choices:
                raise RequestError(f"found --{side}-language {name}; this model has no {side} languages to choose from")
        other = object.__new__(ImportedVocabulary)
        vars(other).update(vars(self))
        named: dict[str, Any] = {f"{side}_language": name for side, name in chosen.items()}
        if prompt is not None:
            named |= {"prompts": None, "prompt": prompt}
        other.framing = replace(self.framing, **named)
        for side in other.framing.choices:
            other._language(side)
        return other

    def _language(self, side: str) -> int:
        name, languages = getattr(self.framing, f"{side}_language"), self.framing.languages or {}
        if name not in languages:
            fault = f"found the {side} language {name}" if name else f"found no {side} language"
            near = [language for language in languages if name and language_code(language) == language_code(name)]
            guess = f"did you mean {' or '.join(near)}? " if near else ""
            raise RequestError(
                f"{fault}; {guess}choose it with --{side}-language of zoo run, {side}_language in Python and requests, "
                f"or --{side}-language of zoo import for all; one of: "
                f"{', '.join(sorted(languages)) or 'none'}"
            )
        return languages[name]

    def _around(self, tokens: Sequence[int | str]) -> list[int]:
        return [self._language(token) if isinstance(token, str) else token for token in tokens]

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenizes source texts.

        Args:
            texts: Source texts.

        Returns:
            Tokens of each text, int32, special tokens included.
        """
        before, after, tokens = self._around(self.framing.before), self._around(self.framing.after), self._tokens
        encoded = []
        for text in texts:
            addressed, text = self.addressed(text)
            begin = before if addressed is self else addressed._around(self.framing.before)
            pieces = self._source_tokenizer.tokenize(self.prompt + text)
            encoded.append(np.array([*begin, *(tokens.get(piece, UNKNOWN) for piece in pieces), *after], np.int32))
        return encoded

    def addressed(self, text: str) -> tuple[ImportedVocabulary, str]:
        """Reads the target language that a text of OPUS-MT may begin with, such as >>fr<<.

        Args:
            text: Source text.

        Returns:
            The vocabulary for this language, and the text behind it; without a known language, this vocabulary and the
            text.
        """
        match = _ADDRESS.match(text) if TARGET in self.framing.before and not self.framing.prefixed else None
        if match is None or match[1] not in (self.framing.languages or {}):
            return self, text
        return self.choose(target_language=match[1]), text[match.end() :]

    def split_source(self, text: str) -> tuple[str, int, list[str], int]:
        """Splits a text into pieces.

        Args:
            text: The text.

        Returns:
            The prompt before it, the number of tokens before, the pieces of both, and the number of tokens behind them.
        """
        pieces = self._source_tokenizer.tokenize(self.prompt + text)
        return self.prompt, len(self.framing.before), pieces, len(self.framing.after)

    def join_source(self, pieces: Sequence[str]) -> str:
        """Joins pieces of a source.

        Args:
            pieces: The pieces.

        Returns:
            The text.
        """
        return str(self._source_tokenizer.detokenize(list(pieces)))

    def target_piece(self, token: int) -> str:
        """Returns the piece of a target token; "" for a special one.

        Args:
            token: The token.
        """
        return "" if token in self._hidden else self._target[token] or ""

    def encode_target(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenizes translations.

        Args:
            texts: Target texts.

        Returns:
            Tokens of each text, int32, `label_prefix` first and `END` last.
        """
        before, tokens = self.label_prefix, self._target_tokens
        return [
            np.array(
                [*before, *(tokens.get(piece, UNKNOWN) for piece in self._target_tokenizer.tokenize(text)), END],
                np.int32,
            )
            for text in texts
        ]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Detokenizes translations.

        Args:
            tokens: Target tokens of each text.

        Returns:
            The texts.
        """
        pieces = [[self._target[token] for token in sentence if token not in self._hidden] for sentence in tokens]
        return [
            self._target_tokenizer.detokenize([piece for piece in sentence if piece is not None]) for sentence in pieces
        ]


def open_vocabulary(folder: Path, features: Mapping[str, Any], verify: Callable[[str], Path] | None = None) -> Any:
    """Opens the vocabulary of a model folder.

    Args:
        folder: The folder.
        features: Features of its card.
        verify: Returns the path of a checked file by its name.

    Returns:
        A `Vocabulary` or an `ImportedVocabulary`.

    Raises:
        RequestError: A file is missing or has another form.
    """
    verify = verify or folder.joinpath
    if "vocabulary" not in features:
        return Vocabulary.read(verify(VOCABULARY))
    framing = Framing.from_json(features["vocabulary"])
    contents = {}
    for name in (*framing.files, PIECES):
        try:
            contents[name] = verify(name).read_bytes()
        except OSError as error:
            raise RequestError(
                f"cannot read {folder / name}: {error.strerror or error}; import the model again"
            ) from error
    return ImportedVocabulary(framing, contents)


def _token_table(pieces: Sequence[str | None]) -> dict[str, int]:
    """Returns tokens by their pieces; None is no piece."""
    return {piece: token for token, piece in enumerate(pieces) if piece is not None}


def in_languages(vocabulary: Any, count: int) -> list[Any]:
    """Returns vocabularies that can translate where the user has not chosen a language yet.

    Args:
        vocabulary: Vocabulary of a pipeline.
        count: Maximum number of target languages.

    Returns:
        The vocabulary itself, if it has its languages; else one with each of `count` target languages, common ones
        evenly drawn, and English as the source language.
    """
    framing: Any = getattr(vocabulary, "framing", None)
    missing = [side for side in framing.choices if not getattr(framing, f"{side}_language")] if framing else []
    if not missing or not framing.languages:
        return [vocabulary]
    names = sorted(framing.languages)
    common = [name for name in names if language_code(name) in COMMON] or names
    source = next((name for name in common if language_code(name) == "en"), common[0]) if SOURCE in missing else ""
    if TARGET not in missing:
        return [vocabulary.choose(source)]
    count = min(count, len(common))
    return [vocabulary.choose(source, common[i * len(common) // count]) for i in range(count)]

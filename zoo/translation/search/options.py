"""Options of translation in Python, of `zoo run` and in requests, and their checks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.core.settings import BOOLEANS
from pipelines.data.text_files import read_lines
from pipelines.models.family import RunOption
from zoo.translation.data.tokens import POSITIONS
from zoo.translation.search.config import MAX_BEAM

MAX_TOKENS = 1 << 20
MAX_PENALTY = 100.0  # of a length, in native code, too
MAX_TEXTS = 10_000  # texts of one option
NUMBERS = {int: numbers.Integral, float: numbers.Real}
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}  # in JSON schema


@dataclass(frozen=True)
class SearchOption:
    """An option of translation.

    Attributes:
        name: Its name in Python and requests; the flag has hyphens.
        kind: int, float, str or bool.
        help: Help text.
        least: Smallest number.
        most: Largest number.
        above: Whether the number is greater than `least`.
        many: "" for one value; "list" for a list of texts, in Python or of a file's lines; "map" for a mapping of texts
            to texts, in Python or of a file's lines with a TAB; "each" for one text, or a list with one for each
            sentence.
        choices: Texts that it takes; (): any.
    """

    name: str
    kind: type[int] | type[float] | type[str] | type[bool]
    help: str
    least: float = 0
    most: float = math.inf
    above: bool = False
    many: str = ""
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The name with hyphens."""
        return self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """Values that the option takes."""
        if self.kind is bool:
            return "true or false"
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        if self.kind is str:
            return {
                "": "a text",
                "list": "a list of texts",
                "map": "a mapping of texts to texts",
                "each": "a text, or one for each sentence",
            }[self.many]
        what = "a whole number" if self.kind is int else "a number"
        low = f"above {self.least:g}" if self.above else f"from {self.least:g}"
        return f"{what} {low}" + ("" if self.most == math.inf else f" to {self.most:,.15g}")

    def checked(self, value: Any) -> Any:
        """Returns a value that was checked.

        Args:
            value: The value; a `Path` names the file of a list.

        Raises:
            RequestError: The value is of another kind, or out of range.
        """
        if self.kind is bool:
            if isinstance(value, bool):
                return value
        elif self.choices:
            if value in self.choices:
                return value
        elif self.kind is str:
            value = self._read(value) if isinstance(value, Path) and self.is_file else value
            if (texts := self._texts(value)) is not None:
                return texts
        elif isinstance(value, NUMBERS[self.kind]) and not isinstance(value, bool):
            number: Any = self.kind(value)  # type: ignore[call-overload]
            if (
                (self.least < number if self.above else self.least <= number)
                and number <= self.most
                and number < math.inf
            ):
                return number
        raise RequestError(f"found {self.flag} {value!r:.60}; expected {self.expected}")

    def _texts(self, value: Any) -> Any:
        """Returns a text, a tuple of texts or a dict of texts that was checked; None for values of other kinds."""
        if isinstance(value, str) and not self.is_file:
            return value
        if self.many == "map" and isinstance(value, Mapping):
            texts = [text for pair in value.items() for text in pair]
            if all(isinstance(text, str) for text in texts):
                self._require_texts(texts)
                return dict(value)
        if self.many in ("list", "each") and isinstance(value, list | tuple):
            if not all(isinstance(text, str) for text in value):
                return None
            if self.many == "list":
                self._require_texts(value)
            return tuple(value)
        return None

    def parsed(self, text: str) -> Any:
        """Parses the text of a value, such as one of a query; a text that is no number is returned, and refused later.

        Args:
            text: The text.
        """
        if self.kind is bool:
            return BOOLEANS.get(text.lower() or "true", text[:40])
        if self.kind is str:
            return [text] if self.many == "list" else text
        try:
            return self.kind(text) if text.isascii() and len(text) < 20 and "_" not in text else text[:40]
        except ValueError:
            return text[:40]

    @property
    def is_file(self) -> bool:
        """Whether a path names a file with the texts."""
        return self.many in ("list", "map")

    def _require_texts(self, texts: Sequence[str]) -> None:
        if len(texts) > MAX_TEXTS or not all(text.strip() for text in texts):
            raise RequestError(f"{self.flag} has an empty text, or more than {MAX_TEXTS:,}")

    def _read(self, path: Path) -> list[str] | dict[str, str]:
        if not path.is_file():
            raise RequestError(f"found no file {path} for --{self.flag}; expected text in UTF-8")
        lines = [*read_lines(path)]
        if None in lines:
            raise RequestError(f"{path} of --{self.flag} is not UTF-8")
        if self.many == "list":
            return [line.strip() for line in lines if line and line.strip()]
        terms = {}
        for number, line in enumerate(lines, 1):
            term, *translation = (line or "").strip().split("\t")
            if term and len(translation) != 1:
                count = f"{len(translation)} TABs" if translation else "no TAB"
                raise RequestError(f"{path}, line {number} has {count}; expected a term, TAB, and its translation")
            if term:
                terms[term.strip()] = translation[0].strip()
        return terms

    @property
    def schema(self) -> dict[str, Any]:
        """Description and JSON schema."""
        kind = {"type": TYPES[self.kind], **({"enum": [*self.choices]} if self.choices else {})}
        kinds: dict[str, Any] = {
            "list": {"type": "array", "items": kind},
            "map": {"type": "object", "additionalProperties": kind},
        }
        return {"description": self.help, "schema": kinds.get(self.many, kind)}

    @property
    def run_option(self) -> RunOption:
        """The option of `zoo run`."""
        return RunOption(self.name, self.kind, False if self.kind is bool else None, self.help)


OPTIONS = {
    option.name: option
    for option in (
        SearchOption("beam", int, "Beam size; 1 is greedy search. [default: 4, or the model's own]", 1, MAX_BEAM),
        SearchOption("n_best", int, "Translations of each sentence, at most the beam size. [default: 1]", 1, MAX_BEAM),
        SearchOption("source_language", str, "Source language of a multilingual model."),
        SearchOption("target_language", str, "Target language of a multilingual model."),
        SearchOption("prompt", str, "Text before every source, such as a task of T5. [default: the model's]"),
        SearchOption("target_prefix", str, "Text that every translation begins with.", many="each"),
        SearchOption(
            "max_tokens",
            int,
            "Maximum tokens of a translation. [default: the model's, or 2 * source + 10]",
            1,
            MAX_TOKENS,
        ),
        SearchOption("min_tokens", int, "Minimum tokens of a translation. [default: the model's]", 0, MAX_TOKENS),
        SearchOption(
            "no_repeat_ngram",
            int,
            "No n-gram of this size occurs twice; 0 for no limit. [default: the model's]",
            0,
            POSITIONS,
        ),
        SearchOption(
            "encoder_no_repeat_ngram",
            int,
            "No n-gram of this size of the source occurs in the translation; 0 for no limit. [default: the model's]",
            0,
            POSITIONS,
        ),
        SearchOption(
            "repetition_penalty",
            float,
            "Scores of tokens that occurred are divided by it, negative ones multiplied; 1 for none. [default: the "
            "model's]",
            0,
            MAX_PENALTY,
            above=True,
        ),
        SearchOption(
            "length_penalty",
            float,
            "Scores are divided by length ** penalty; 0 favours short translations. [default: 1, or the model's own]",
            -MAX_PENALTY,
            MAX_PENALTY,
        ),
        SearchOption(
            "glossary",
            str,
            "File of terms: a term of the source, TAB, and the translation that a sentence with it contains.",
            many="map",
        ),
        SearchOption("forced_words", str, "File of phrases that every translation contains, one a line.", many="list"),
        SearchOption("temperature", float, "Sampling temperature, above 0. [default: beam search]", 0, 1e6, above=True),
        SearchOption(
            "top_k", int, "With --temperature: number of most probable tokens to draw from; 0 for all.", 0, MAX_TOKENS
        ),
        SearchOption(
            "top_p", float, "With --temperature: total probability of the tokens to draw from.", 0, 1, above=True
        ),
        SearchOption("seed", int, "With --temperature: seed of the draws. [default: 0]", 0, (1 << 63) - 1),
        SearchOption(
            "beam_groups", int, "Groups of diverse beams, a divisor of the beam size. [default: 1]", 1, MAX_BEAM
        ),
        SearchOption(
            "diversity_penalty", float, "With --beam-groups: cost of tokens of other groups. [default: 0.5]", 0, 1e6
        ),
        SearchOption("bad_words", str, "File of phrases that no translation contains, one a line.", many="list"),
        SearchOption(
            "tag_handling",
            str,
            "Markup of the texts, whose tags translations keep: html, xml or none. [default: none]",
            choices=("html", "xml", "none"),
        ),
        SearchOption(
            "placeholders",
            str,
            "What translations keep: auto ({0}, %s, URLs, e-mail addresses), all (numbers with units, too) or off. "
            "[default: auto]",
            choices=("auto", "all", "off"),
        ),
        SearchOption("alignments", bool, "Add the pairs of source and target words (0-0 1-2) to translations."),
        SearchOption("word_scores", bool, "Add the log probability of each word to translations."),
    )
}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks options.

    Args:
        options: Values by name; None: not set.

    Returns:
        The options that are set.

    Raises:
        RequestError: An option is unknown, or its value impossible.
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise RequestError(f"there is no option {unknown[0][:40]!r}; expected {', '.join(OPTIONS)}")
    return {name: OPTIONS[name].checked(value) for name, value in options.items() if value is not None}


def file_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Names of files, as on the command line, as paths.

    Args:
        options: Values by name.

    Returns:
        The options; a text for several texts names their file.
    """
    return {
        name: Path(value) if isinstance(value, str) and name in OPTIONS and OPTIONS[name].is_file else value
        for name, value in options.items()
    }


def run_options() -> tuple[RunOption, ...]:
    """Returns the options of `zoo run`."""
    return tuple(option.run_option for option in OPTIONS.values())

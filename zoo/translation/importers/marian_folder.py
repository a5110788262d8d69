"""Folders of Marian models: options and vocabularies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, not_installed
from zoo.translation.data.tokenizers import open_sentencepiece
from zoo.translation.importers.marian_file import CONFIG, Tensor, candidates, is_model, tensors
from zoo.translation.importers.model_reader import ModelReader

# characters that YAML refuses or takes for line ends, and private ones in their place; Marian's parser keeps them
_RAW = (*range(9), 11, 12, *range(14, 32), *range(127, 160), 0x2028, 0x2029, 0xFEFF, 0xFFFE, 0xFFFF)
_PRIVATE = {code: 0x100000 + code for code in _RAW}
_RESTORED = {private: code for code, private in _PRIVATE.items()}


class Folder(ModelReader):
    """Files of a Marian model, and their errors."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.decoding = self._decoding()
        self.file = path if path.is_file() else self._chosen()
        self.tensors: dict[str, Tensor] = {}
        self.options: Mapping[str, Any] = {}
        if self.file:
            try:
                self.tensors, text = tensors(self.file)
                options_file = Path(f"{self.file}.yml")
                self.options = self._yaml(
                    text or options_file.read_text("utf-8"), CONFIG if text else options_file.name
                )
            except (OSError, UnicodeDecodeError):
                self.faults.append(f"found neither {CONFIG} in {self.file.name} nor {self.file.name}.yml")
            except RequestError as error:
                self.faults.append(str(error))

    # ------------------------------------------------------------------------------------------------- configuration

    def _yaml(self, text: str, name: str) -> dict[str, Any]:
        """Parses a file of options, whose values are texts, lists and dicts."""
        try:
            import yaml  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            self.faults.append(str(not_installed(name, "PyYAML", "int8-zoo[import]")))
            return {}
        try:
            value = yaml.load(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))  # makes text, lists and dicts alone
        except (yaml.YAMLError, RecursionError):
            value = None
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return value
        self.faults.append(f"{name} is no YAML of options")
        return {}

    def _decoding(self) -> Mapping[str, Any]:
        """Returns the options of marian-decoder in the folder; empty without them."""
        for path in sorted(self.folder.glob("*.yml")):
            text = path.read_text("utf-8", "replace")
            if re.search(r"^models:", text, re.MULTILINE):
                return self._yaml(text, path.name)
        return {}

    def _listed(self, options: Mapping[str, Any], name: str) -> list[str]:
        values = options.get(name) or []
        return [str(value) for value in (values if isinstance(values, list) else [values])]

    def _chosen(self) -> Path | None:
        """Returns the file of the model."""
        names = [Path(name).name for name in self._listed(self.decoding, "models")]
        if len(names) > 1:
            self.faults.append(
                f"models: {', '.join(names)} are an ensemble, which is not supported; name one of the files"
            )
            return None
        paths = [path for path in candidates(self.folder) if path.name in names] or [
            path for path in candidates(self.folder) if is_model(path)
        ]
        if len(paths) == 1:
            return paths[0]
        self.faults.append(
            f"found the models {', '.join(path.name for path in paths)}; name one of them"
            if paths
            else f"found no model of Marian in {self.folder}, expected a .npz or .bin"
        )
        return None

    def _option(self, name: str, default: str = "") -> str:
        return str(self.options.get(name, default))

    def _whole(self, name: str, default: str = "", least: int = 1) -> int:
        value = self._option(name, default)
        if value.isdecimal() and least <= int(value) < 1 << 30:
            return int(value)
        self.faults.append(f"{name} is {value or 'missing'}, expected a whole number from {least} on")
        return least

    def flag(self, name: str) -> bool:
        """Returns whether an option is true.

        Args:
            name: Name of the option.
        """
        return self._option(name, "false") == "true"

    # ---------------------------------------------------------------------------------------------------- vocabulary

    def _vocabularies(self) -> list[Vocabulary]:
        """Returns the vocabulary of the source, and that of the target if it differs."""
        named: list[str] = []
        assert self.file is not None
        options_file = Path(f"{self.file}.yml")
        training = (
            self._yaml(options_file.read_text("utf-8", "replace"), options_file.name) if options_file.is_file() else {}
        )
        for options in (self.decoding, training):
            names = [Path(name).name for name in self._listed(options, "vocabs")]
            if not named and names and all((self.folder / name).is_file() for name in names):
                named = names
        if not named:
            each_side = [sorted(path.name for path in self.folder.glob(f"{side}vocab*.spm")) for side in ("src", "trg")]
            both = sorted(path.name for path in self.folder.glob("*vocab*") if path.suffix in (".spm", ".yml", ".json"))
            named = [names[0] for names in each_side] if all(len(names) == 1 for names in each_side) else both
            if len(named) != 1 and named is both:
                self.faults.append(
                    f"found the vocabularies {', '.join(both) or 'none'} in {self.folder}, "
                    "expected vocab.spm or vocab.yml, or the names under vocabs: in decoder.yml"
                )
                return []
        if len(named) > 2:  # one for each of several sources
            self.faults.append(f"vocabs: {', '.join(named)} are of several sources, which is not supported")
        sides: list[tuple[str, ...]] = [("source",), ("target",)] if len(set(named)) > 1 else [("source", "target")]
        return [self._vocabulary(name, side) for name, side in zip(dict.fromkeys(named), sides, strict=False)]

    def _vocabulary(self, name: str, sides: Sequence[str]) -> Vocabulary:
        """Reads a vocabulary. sides: sides whose .spm tokenizes text if the vocabulary is YAML."""
        if not (content := self.read_bytes(name)):
            return Vocabulary("", [], 0, 0, {})
        if name.endswith(".spm"):
            return self._of_sentencepiece(name, content)
        text = content.decode("utf-8", "replace").removeprefix("\ufeff")
        tokens = self._yaml(text.translate(_PRIVATE), name)
        if not all(isinstance(token, str) and token.isdecimal() and int(token) < 1 << 24 for token in tokens.values()):
            self.faults.append(f"{name} numbers no words")
            tokens = {}
        pieces: list[str | None] = [None] * (max(map(int, tokens.values()), default=-1) + 1)
        for piece, token in tokens.items():
            pieces[int(token)] = piece.translate(_RESTORED)

        def special(text: str, nematus: str, token: int) -> int:
            if token < len(pieces) and pieces[token] in (None, "", nematus):
                return token
            if text not in pieces:
                self.faults.append(f"{name} has no {text}")
                return 0
            return pieces.index(text)

        end, unknown = special("</s>", "eos", 0), special("<unk>", "UNK", 1)
        paths = [self.folder / f"{side}.spm" for side in sides]
        files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        if files and len(files) < len(paths):
            self.faults.append(f"found {', '.join(files)} alone, expected {' and '.join(path.name for path in paths)}")
        return Vocabulary("sentencepiece" if files else "words", pieces, unknown, end, files, spare=-1)

    def _of_sentencepiece(self, name: str, content: bytes) -> Vocabulary:
        try:
            model = open_sentencepiece(content, name)
        except RequestError as error:
            self.faults.append(str(error))
            return Vocabulary("", [], 0, 0, {})
        if model.eos_id() < 0:
            self.faults.append(f"{name} has no end of a sentence")
        pieces = [model.id_to_piece(i) for i in range(len(model))]
        return Vocabulary("sentencepiece", pieces, model.unk_id(), model.eos_id(), {name: content})


@dataclass
class Vocabulary:
    """A vocabulary with the original token numbers.

    Attributes:
        kind: Tokenizer, a key of `zoo.translation.data.vocabularies.TOKENIZERS`.
        pieces: Piece of each token.
        unknown: Unknown token.
        end: End token.
        files: Content by file name.
        spare: Maximum number of embedding rows without a piece; -1: pieces beyond the table are dropped, as Marian does
            with dim-vocabs.
    """

    kind: str
    pieces: Sequence[str | None]
    unknown: int
    end: int
    files: Mapping[str, bytes]
    spare: int = 64

    @property
    def tokens(self) -> dict[str, int]:
        """{piece: token}."""
        return {piece: token for token, piece in enumerate(self.pieces) if piece is not None}

    def fit(self, rows: int, faults: list[str]) -> None:
        """Checks that the vocabulary belongs to an embedding table.

        Args:
            rows: Rows of the table.
            faults: Gets an error if the vocabulary belongs to another table.
        """
        if self.spare < 0:
            self.pieces = self.pieces[:rows]
        spare = self.spare if self.spare >= 0 else rows
        if not 0 <= rows - len(self.pieces) <= spare or max(self.unknown, self.end) >= rows:
            faults.append(f"the vocabulary has {len(self.pieces)} pieces, the weights {rows}")

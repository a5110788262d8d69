"""Vocabularies of transformers folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.core.errors import RequestError, catch_panics, not_installed, one_line
from zoo.translation.data.tokenizers import WORD_END, open_sentencepiece
from zoo.translation.data.tokens import END
from zoo.translation.data.vocabularies import SOURCE, TARGET, Framing
from zoo.translation.importers.architectures import ARCHITECTURES
from zoo.translation.importers.architectures.base import Architecture
from zoo.translation.importers.huggingface_folder import TOKENIZER, Folder
from zoo.translation.importers.imported import Renumbering
from zoo.translation.importers.word_pairs import BLENDERBOT, word_pairs
from zoo.translation.search.config import SearchConfig

FAST, PIECES, SPIECE = "tokenizer.json", "sentencepiece.bpe.model", "spiece.model"
SENTINELS = 100  # of T5: tokens behind the pieces
BYTES = 256
MOSES = {"vocab-src.json", "vocab-tgt.json", "merges.txt"}  # of FSMT
WORD_TOKENS = {"unk": "__unk__", "eos": "__end__", "bos": "__start__", "pad": "__null__"}  # of Blenderbot-small
PEGASUS = 103  # tokens of Pegasus before the pieces of text, but for padding and end
TASK = re.compile(r"translation_([a-z]{2,3})_to_([a-z]{2,3})")  # keys of task_specific_params
SENTINEL = re.compile(r"<extra_id_\d+>")
TAG = re.compile(r"<2(.+)>")  # pieces of MADLAD-400 that name the target language
SPARE = 128  # rows of a table, at most, that no token has
# Languages of M2M-100 and of its WMT21 models, in the order of their tokens, which stand in no file of their folders
M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
# Languages of mBART and of mBART-50, in the order of their tokens
MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART50 = (
    f"{MBART} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE "
    "sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
PLBART = {"base": "java python en_XX", "multi": "java python en_XX javascript php ruby go"}
CODES = {"m2m100": M2M100, "wmt21": "en ha is ja cs ru zh de"}
SMALL100 = "SMALL100Tokenizer"  # custom code of SMaLL-100, an M2M-100 that reads the target language before a source
LANGUAGE = re.compile(r"__([a-z]{2,10}|[a-z]{2}_[A-Z]{2})__|>>(.+)<<|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")
FIRST_LANGUAGE = {
    "M2M100Tokenizer": "en",
    "NllbTokenizer": "eng_Latn",
    "MBartTokenizer": "en_XX",
    "MBart50Tokenizer": "en_XX",
    "PLBartTokenizer": "",
}
STARTS = ("MBartTokenizer", "PLBartTokenizer")  # the target language takes the place of the start token

UNSUPPORTED_ARCHITECTURES = {
    **dict.fromkeys(
        ("BartModel", "MBartModel", "M2M100Model", "MarianModel"),
        "it has no output layer, which a model gets when it is fine-tuned to translate",
    ),
    "NllbMoeForConditionalGeneration": "it mixes experts",
}
UNSUPPORTED_KINDS = (  # parts of names of architectures
    (
        ("Whisper", "Speech", "Seamless", "Moonshine", "Wav2Vec2", "Hubert", "CTC"),
        "its inputs are speech; text translation is supported",
    ),
    (
        ("Vision", "Image", "Blip", "Donut", "Pix2Struct", "TrOCR", "Florence", "Kosmos"),
        "its inputs are images; text translation is supported",
    ),
    (("CausalLM", "LMHeadModel"), "it is a decoder-only model"),
    (("EncoderDecoderModel",), "it joins two models; encoder and decoder of one architecture are supported"),
)


class VocabularyFolder(Folder):
    """Reads the architecture and the vocabulary of a transformers folder.

    Attributes:
        architecture: The architecture of its model.
    """

    architecture: Architecture

    def numbers(self) -> tuple[Architecture, int, int]:
        """Returns the architecture, the unknown token (-1 for none) and the end token of a folder without weights.

        Raises:
            RequestError: The folder is not supported.
        """
        architecture = self._find_architecture()
        if architecture is None:
            raise self.refusal()
        self.architecture = architecture
        vocabulary = self._vocabulary()
        if self.faults:
            raise self.refusal()
        return architecture, vocabulary.unknown, self._token("eos_token_id")

    def _find_architecture(self) -> Architecture | None:
        """Returns the architecture; None, with an error, for an unsupported one."""
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        if name.startswith("Blenderbot") and self.config.get("model_type") == "blenderbot-small":
            name = "BlenderbotSmallForConditionalGeneration"  # older folders name the other class
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
        if self.faults:
            return None
        if not self.config.get("model_type"):
            self.faults.append("config.json has no model_type, which names the architecture")
            return None
        kind = name or f"the model type {self.config.get('model_type')}"
        why = UNSUPPORTED_ARCHITECTURES.get(name) or next(
            (text for words, text in UNSUPPORTED_KINDS if any(word in name for word in words)),
            "",
        )
        pages = "docs/search-your-own-texts.md (texts) and docs/translate-with-a-model-you-have.md"
        expected = f"{', '.join(ARCHITECTURES)}: {why}" if why else f"an architecture of {pages}"
        self.faults.append(f"found {kind}, expected {expected}")
        return None

    def _vocabulary(self) -> Vocabulary:
        """Returns the vocabulary; an empty one, with an error, if there is none."""
        there = {path.name for path in self.path.iterdir() if path.is_file()}
        if there & {"source.spm", "target.spm"}:
            return self._of_marian()
        if there >= {"vocab.json", PIECES} and FAST not in there:
            return self._of_m2m()
        if there >= MOSES:
            return self._of_moses()
        if self.architecture.words and there >= {"vocab.json", "merges.txt"}:
            return self._of_words()
        if FAST in there:
            return self._of_tokenizers()
        if there >= {"vocab.json", "merges.txt"}:
            return self._of_byte_pairs()
        if PIECES in there:
            return self._of_fairseq()
        if SPIECE in there:
            return self._of_spiece()
        if self.tokenizer.get("tokenizer_class") == "ByT5Tokenizer":
            return self._of_bytes()
        self.faults.append(
            f"found no vocabulary, expected source.spm, target.spm and vocab.json, or {FAST}, {PIECES} or {SPIECE}"
        )
        return self._made("sentencepiece", [], {})

    def _special(self, name: str, default: str) -> str:
        token = self.tokenizer.get(name, default)
        return str(token.get("content", default)) if isinstance(token, dict) else str(token or default)

    def _numbered(self, name: str) -> list[str | None]:
        """Reads a {piece: token} file as a list of pieces."""
        return self._in_order(self.read_json(name, dict), name)

    def _in_order(self, tokens: Mapping[str, Any], name: str) -> list[str | None]:
        if not tokens or not all(isinstance(token, int) and 0 <= token < 1 << 24 for token in tokens.values()):
            self.faults.append(f"{name} numbers no pieces")
            return []
        pieces: list[str | None] = [None] * (max(tokens.values()) + 1)
        for piece, token in tokens.items():
            pieces[token] = piece
        return pieces

    def _made(self, kind: str, source: list[str | None], files: Mapping[str, bytes], **more: Any) -> Vocabulary:
        special = {
            name: self._special(f"{name}_token", default)
            for name, default in {"unk": "<unk>", "eos": "</s>", "bos": "<s>", "pad": "<pad>", "mask": "<mask>"}.items()
        }
        added = self.tokenizer.get("added_tokens_decoder")
        hidden = {*special.values()}
        if isinstance(added, dict):
            hidden |= {entry["content"] for entry in added.values() if isinstance(entry, dict) and entry.get("special")}
        languages = {
            next(filter(None, match.groups())): token
            for token, piece in enumerate(source)
            if piece and (match := LANGUAGE.fullmatch(piece))
        }
        unknown = source.index(special["unk"]) if special["unk"] in source else -1
        return Vocabulary(kind, source, files, unknown, special["eos"], hidden, languages, **more)

    def _of_marian(self) -> Vocabulary:
        files = {name: self.read_bytes(name) for name in ("source.spm", "target.spm")}
        source = self._numbered("vocab.json")
        target = self._numbered("target_vocab.json") if self.tokenizer.get("separate_vocabs") else source
        vocabulary = self._made("sentencepiece", source, files, target=target, spare=0)
        # a model for several languages reads its own in the text
        vocabulary.before = (TARGET,) if vocabulary.languages else ()
        return vocabulary

    def _of_m2m(self) -> Vocabulary:
        pieces = self._numbered("vocab.json")
        codes = CODES.get(self.tokenizer.get("language_codes", "m2m100"), M2M100).split()
        pieces += [f"__{code}__" for code in codes]
        vocabulary = self._made("sentencepiece", pieces, {PIECES: self.read_bytes(PIECES)})
        if self.tokenizer.get("tokenizer_class") == SMALL100 or (self.path / "tokenization_small100.py").is_file():
            vocabulary.before = (TARGET,)
            return vocabulary
        return self._of_languages(vocabulary, "M2M100Tokenizer")

    def _of_fairseq(self) -> Vocabulary:
        """Reads sentencepiece pieces in fairseq's order: four special tokens, pieces, languages, and the mask."""
        content = self.read_bytes(PIECES)
        try:
            model = open_sentencepiece(content, PIECES)
        except RequestError as error:
            self.faults.append(str(error))
            return self._made("sentencepiece", [], {})
        pieces: list[str | None] = ["<s>", "<pad>", "</s>", "<unk>"]
        pieces += [model.id_to_piece(i) for i in range(3, len(model))]
        extra = (
            self.read_json("special_tokens_map.json", dict) if (self.path / "special_tokens_map.json").is_file() else {}
        )
        codes = extra.get("additional_special_tokens") or self.tokenizer.get("additional_special_tokens") or []
        codes = [code.get("content") if isinstance(code, dict) else code for code in codes]
        kind = str(self.config["architectures"][0])
        if kind.startswith("PLBart"):
            languages = str(self.tokenizer.get("language_codes") or "base")
            codes = [f"__{code}__" for code in PLBART.get(languages, "").split()]
            pieces += [None] if languages == "multi" else []  # the multilingual model has no mask token
        if not codes and kind.startswith("MBart"):
            codes = (MBART50 if self.tokenizer.get("tokenizer_class") == "MBart50Tokenizer" else MBART).split()
        if not codes:
            self.faults.append(f"found no languages in special_tokens_map.json or {TOKENIZER}, and no {FAST}")
        vocabulary = self._made("sentencepiece", [*pieces, *map(str, codes), "<mask>"], {PIECES: content})
        return self._of_languages(vocabulary, self._tokenizer_class(vocabulary, {}))

    def _of_tokenizers(self) -> Vocabulary:
        fast = self.read_json(FAST, dict)
        model = fast.get("model", {})
        numbered = model.get("vocab", {}) if isinstance(model, dict) else {}
        if isinstance(numbered, list):  # of a unigram model: (piece, score)
            numbered = {pair[0]: token for token, pair in enumerate(numbered)}
        added = [entry for entry in fast.get("added_tokens", []) if isinstance(entry, dict)]
        pieces = self._in_order({**numbered, **{entry["content"]: entry["id"] for entry in added}}, FAST)
        kind, files = "tokenizers", {FAST: self.read_bytes(FAST)}
        if (self.path / PIECES).is_file():  # the same pieces, by the lighter library
            kind, files = "sentencepiece", {PIECES: self.read_bytes(PIECES)}
        vocabulary = self._made(kind, pieces, files)
        vocabulary.hidden |= {entry["content"] for entry in added if entry.get("special")}
        return self._of_languages(vocabulary, self._tokenizer_class(vocabulary, fast))

    def _of_spiece(self) -> Vocabulary:
        """Reads sentencepiece pieces in their own order, with the sentinels of T5 behind them."""
        content = self.read_bytes(SPIECE)
        try:
            model = open_sentencepiece(content, SPIECE)
        except RequestError as error:
            self.faults.append(str(error))
            return self._made("sentencepiece", [], {})
        pieces: list[str | None] = [model.id_to_piece(i) for i in range(len(model))]
        if str(self.config["architectures"][0]).startswith("Pegasus"):
            special = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, PEGASUS))]
            vocabulary = self._made("sentencepiece", [*special, *pieces[2:]], {SPIECE: content})
            vocabulary.hidden |= {*special}
            return self._of_languages(vocabulary, "PegasusTokenizer")
        vocabulary = self._made("sentencepiece", self._sentinels(pieces), {SPIECE: content})
        return self._of_languages(vocabulary, "T5Tokenizer")

    def _of_bytes(self) -> Vocabulary:
        """Makes the vocabulary of ByT5: three special tokens, the bytes, and sentinels."""
        pieces = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(BYTES))]
        return self._of_languages(self._made("bytes", self._sentinels(pieces), {}), "ByT5Tokenizer")

    def _sentinels(self, pieces: Sequence[str | None]) -> list[str | None]:
        """Returns the pieces with the tokens behind them, by default the sentinels of T5, which are no text."""
        added = self.tokenizer.get("added_tokens_decoder")
        if isinstance(added, dict):
            behind = {int(token): str(entry["content"]) for token, entry in added.items() if int(token) >= len(pieces)}
            return [*pieces, *(behind.get(token) for token in range(len(pieces), max(behind, default=-1) + 1))]
        count = self.tokenizer.get("extra_ids", SENTINELS)
        return [*pieces, *(f"<extra_id_{i}>" for i in range(count - 1, -1, -1))]

    def _of_byte_pairs(self) -> Vocabulary:
        """Converts vocab.json and merges.txt to one tokenizer.json."""
        try:
            import tokenizers
        except ModuleNotFoundError:
            self.faults.append(str(not_installed("merges.txt", "tokenizers", "int8-zoo[import]")))
            return self._made("tokenizers", [], {})
        try:
            with catch_panics(quiet=True):
                merged = tokenizers.ByteLevelBPETokenizer.from_file(
                    str(self.path / "vocab.json"),
                    str(self.path / "merges.txt"),
                    add_prefix_space=bool(self.tokenizer.get("add_prefix_space", not self.architecture.begins)),
                    trim_offsets=True,
                )
        except Exception as error:  # errors of the library have no class of their own
            self.faults.append(f"merges.txt is damaged ({one_line(error)})")
            return self._made("tokenizers", [], {})
        files = {FAST: merged.to_str().encode()}
        return self._of_languages(self._made("tokenizers", self._numbered("vocab.json"), files), "BartTokenizer")

    def _of_words(self) -> Vocabulary:
        """Converts vocab.json and merges.txt of Blenderbot-small, where `@@` ends a piece within a word."""
        special = {name: self._special(f"{name}_token", default) for name, default in WORD_TOKENS.items()}
        kept = {*special.values()}
        pieces = self._numbered("vocab.json")
        for index, piece in enumerate(pieces):
            if piece is not None and piece not in kept:
                pieces[index] = piece[:-2] if piece.endswith("@@") else f"{piece}{WORD_END}"
        vocabulary = self._made("tokenizers", pieces, self._word_pairs(pieces, special["unk"], BLENDERBOT))
        vocabulary.end, vocabulary.hidden = special["eos"], vocabulary.hidden | kept
        vocabulary.unknown = pieces.index(special["unk"]) if special["unk"] in pieces else -1
        vocabulary.after, vocabulary.languages = (), {}
        return vocabulary

    def _of_moses(self) -> Vocabulary:
        """Converts the vocabularies of FSMT: words of Moses in byte pairs, with pieces of their own a language."""
        languages = self.tokenizer.get("langs") or self.config.get("langs")
        if not isinstance(languages, list | tuple) or len(languages) != 2:
            self.faults.append(f"{TOKENIZER} has langs {languages!r}, expected a source and a target language")
            return self._made("moses", [], {})
        pieces = {SOURCE: self._numbered("vocab-src.json"), TARGET: self._numbered("vocab-tgt.json")}
        files = {}
        for side, language in zip(pieces, languages, strict=True):
            for made in self._word_pairs(pieces[side], self._special("unk_token", "<unk>"), {}).values():
                lower = side == SOURCE and bool(self.tokenizer.get("do_lower_case"))
                options = {"language": str(language), "lower": lower, "pieces": json.loads(made)}
                files[f"{side}-{FAST}"] = json.dumps(options, ensure_ascii=False).encode()
        vocabulary = self._made(
            "moses", pieces[SOURCE], files, target=pieces[TARGET], pair="-".join(map(str, languages))
        )
        vocabulary.languages = {}
        return vocabulary

    def _word_pairs(self, pieces: Sequence[str | None], unknown: str, form: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns tokenizer.json of the byte pairs in merges.txt; no file, with an error, if it is damaged."""
        try:
            return {FAST: word_pairs(pieces, self.read_bytes("merges.txt"), unknown, form)}
        except RequestError as error:
            self.faults.append(str(error))
            return {}

    def _tokenizer_class(self, vocabulary: Vocabulary, fast: Mapping[str, Any]) -> str:
        """Returns the class of the tokenizer: the folder's, or by the architecture. fast: content of tokenizer.json."""
        name = str(self.tokenizer.get("tokenizer_class") or "").removesuffix("Fast")
        if name in FIRST_LANGUAGE or name in ("BartTokenizer", "RobertaTokenizer"):
            return name
        architecture = str(self.config["architectures"][0])
        if architecture.startswith("MBart"):
            form = fast.get("post_processor")
            parts = form.get("single") if isinstance(form, dict) else None
            return "MBart50Tokenizer" if parts and "SpecialToken" in parts[0] else "MBartTokenizer"
        if architecture.startswith("PLBart"):
            return "PLBartTokenizer"
        if architecture.startswith("M2M100"):
            return "M2M100Tokenizer" if "__en__" in vocabulary.source else "NllbTokenizer"
        return "BartTokenizer"

    def _of_languages(self, vocabulary: Vocabulary, kind: str) -> Vocabulary:
        """Sets the special tokens around a source for a tokenizer class."""
        if kind not in FIRST_LANGUAGE:
            vocabulary.before = ("bos",) if self.architecture.begins else ()
            vocabulary.bos = self._special("bos_token", "<s>")
            vocabulary.languages = {}
            vocabulary.hidden |= {piece for piece in vocabulary.source if piece and SENTINEL.fullmatch(piece)}
            vocabulary.prompts = self._prompts(vocabulary.source)
            return vocabulary
        own = {side: str(self.tokenizer.get(key) or "") for side, key in ((SOURCE, "src_lang"), (TARGET, "tgt_lang"))}
        vocabulary.first = {side: name.removeprefix("__").removesuffix("__") for side, name in own.items()}
        vocabulary.first[SOURCE] = vocabulary.first[SOURCE] or FIRST_LANGUAGE[kind]
        vocabulary.starts = kind in STARTS
        vocabulary.prefixed = not vocabulary.starts
        if not (vocabulary.first[SOURCE] or self.languages[SOURCE]):
            vocabulary.after = ("eos",)
        elif vocabulary.starts or self.tokenizer.get("legacy_behaviour"):
            vocabulary.after = ("eos", SOURCE)
        else:
            vocabulary.before = (SOURCE,)
        return vocabulary

    def _prompts(self, pieces: Sequence[str | None]) -> dict[str, str]:
        """Returns the text that a source begins with by target language, of tags or of task_specific_params."""
        prompts = {tag[1]: f"{tag[0]} " for tag in (TAG.fullmatch(piece or "") for piece in pieces) if tag}
        tasks = self.config.get("task_specific_params")
        for key, options in (tasks if isinstance(tasks, dict) else {}).items():
            task = TASK.fullmatch(key)
            if task and isinstance(options, dict) and isinstance(options.get("prefix"), str):
                prompts[task[2]] = options["prefix"]
        return prompts


@dataclass
class Vocabulary:
    """A vocabulary with the original token numbers.

    Attributes:
        kind: Tokenizer, a key of `zoo.translation.data.vocabularies.TOKENIZERS`.
        source: Source piece of each token.
        files: Content by file name.
        unknown: Unknown token; -1: none.
        end: Piece of the end token.
        hidden: Pieces that are not part of the text.
        languages: Token by language.
        target: Target piece of each token.
        spare: Maximum number of embedding rows without a token.
        before: Special tokens before a source.
        after: Special tokens after a source.
        bos: Piece of the start token.
        first: Default languages of the folder, by side.
        starts: Whether the token of the target language takes the place of the start token.
        prefixed: Whether translations begin with the token of the target language.
        prompts: Text that a source begins with, by target language.
        pair: Languages of a model that has none to choose, such as "en-de"; "" if unknown.
    """

    kind: str
    source: list[str | None]
    files: Mapping[str, bytes]
    unknown: int
    end: str
    hidden: set[str]
    languages: dict[str, int]
    target: list[str | None] = field(default_factory=list)
    spare: int = SPARE
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ("eos",)
    bos: str = ""
    first: dict[str, str] = field(default_factory=dict)
    starts: bool = False
    prefixed: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    pair: str = ""

    def __post_init__(self) -> None:
        self.target = self.target or self.source

    def framed(
        self, source: Renumbering, target: Renumbering, rules: SearchConfig, languages: Mapping[str, str]
    ) -> tuple[Framing, tuple[list[str | None], ...]]:
        """Converts framing and pieces to the zoo's token numbers.

        Args:
            source: Renumbering of source tokens.
            target: Renumbering of target tokens.
            rules: Search options.
            languages: Chosen language by side; "" for the default.

        Returns:
            The framing, and the pieces of the source, and of the target if it has others.

        Raises:
            RequestError: The model does not have a language.
        """
        ours = source.ours
        places: dict[str, int | str] = {"eos": END, SOURCE: SOURCE, TARGET: TARGET}
        if self.bos in self.source:
            places["bos"] = int(ours[self.source.index(self.bos)])
        language_tokens = {name: int(ours[token]) for name, token in self.languages.items()}
        chosen = {side: languages[side] or self.first.get(side, "") for side in (SOURCE, TARGET)}
        for side, name in chosen.items():
            names = self.prompts if self.prompts and side == TARGET else language_tokens
            if languages[side] and name not in names:
                expected = (
                    f"expected one of: {', '.join(sorted(names))}" if names else "this model has none to choose from"
                )
                raise RequestError(f"found --{side}-language {name}; {expected}")
        prefixed = self.prefixed
        if prefixed and not chosen[TARGET] and rules.prefix:  # a language, or tokens that all translations begin with
            chosen[TARGET] = next((name for name, token in language_tokens.items() if (token,) == rules.prefix), "")
            prefixed = bool(chosen[TARGET])
        pieces = source.pieces(self.source)
        other = target.pieces(self.target)
        hidden = [token for token, piece in enumerate(other) if piece is None or piece in self.hidden]
        hidden += [language_tokens[name] for name in language_tokens if self.target is self.source]
        framing = Framing(
            self.kind,
            tuple(self.files),
            tuple(places[name] for name in self.before if name in places),
            tuple(places[name] for name in self.after),
            language_tokens or None,
            chosen[SOURCE] if chosen[SOURCE] in language_tokens else "",
            chosen[TARGET] if chosen[TARGET] in {**language_tokens, **self.prompts} else "",
            prefixed,
            tuple(sorted(set(hidden))),
            self.prompts or None,
        )
        return framing, (pieces,) if self.target is self.source else (pieces, other)

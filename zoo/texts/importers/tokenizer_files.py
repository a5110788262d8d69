"""tokenizer.json: its conversion from older vocabularies, and what tokenizer_config.json overrides in it."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, one_line, requires
from pipelines.core.files import read_json, write_json
from zoo.texts.data.tokenizer import FILE
from zoo.texts.importers.sentence_modules import CONFIG, read_object
from zoo.texts.models.config import ModelConfig

SETTINGS = "tokenizer_config.json"
OLDER = ("vocab.txt", "vocab.json", "merges.txt", "*.model")  # vocabularies of tokenizers without tokenizer.json
LETTERS = "EsmTokenizer"  # of proteins, whose words are its tokens
BERT_TOKENIZERS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
PYTHON_TOKENIZERS = (  # of transformers, which have no tokenizer.json
    "BertJapaneseTokenizer",
    "BertweetTokenizer",
    "ByT5Tokenizer",
    "CanineTokenizer",
    "FlaubertTokenizer",
    "PhobertTokenizer",
    "RoCBertTokenizer",
    "XLMTokenizer",
)
NORMALIZER = {  # keys of tokenizer_config.json, by those of a BertNormalizer
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}


@contextlib.contextmanager
def completed(path: Path, network: Path) -> Iterator[Path]:
    """Yields a model's folder with a tokenizer.json: the folder, or a temporary one of links to its files.

    Older vocabularies are converted as transformers does. RequestErrors name the folder of the model.

    Args:
        path: Folder of the model.
        network: Folder of its network and tokenizer, the same or within it.

    Raises:
        RequestError: A library is missing, or the vocabulary is damaged.
    """
    if (network / FILE).is_file() or not any(any(network.glob(name)) for name in OLDER) or _is_python(network):
        yield path
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, path.resolve().name)
        _link(path.resolve(), folder)
        try:
            _convert(network, folder / network.relative_to(path))
            yield folder
        except RequestError as error:
            raise RequestError(str(error).replace(str(folder), str(path))) from error


def _link(source: Path, folder: Path) -> None:
    """Makes a folder of links to the files of another one."""
    folder.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            _link(entry, folder / entry.name)
        else:
            (folder / entry.name).symlink_to(entry)


def _kind(network: Path) -> str:
    """Returns the class of a tokenizer; "" if its files name none."""
    classes = (read_object(network / name).get("tokenizer_class") for name in (SETTINGS, CONFIG))
    named = str(next(filter(None, classes), ""))
    return named or (LETTERS if read_object(network / CONFIG).get("model_type") == "esm" else "")


def _is_python(network: Path) -> bool:
    return _kind(network) in PYTHON_TOKENIZERS


def missing(network: Path) -> str:
    """Returns the error of a model without tokenizer.json.

    Args:
        network: Folder of the network.
    """
    if _is_python(network):
        return (
            f"its {_kind(network)} is written in Python, and has no {FILE}; expected a model whose tokenizer has one, "
            "that is, a PreTrainedTokenizerFast"
        )
    return f"there is no {FILE}, nor an older vocabulary ({', '.join(OLDER)}); copy it from the model"


def _convert(network: Path, folder: Path) -> None:
    """Writes the tokenizer.json of an older vocabulary, and the tokenizer_config.json with all special tokens."""
    if _kind(network) == LETTERS:
        write_json(folder / FILE, _letters(network))
        return
    with requires(f"a tokenizer without {FILE}", "int8-zoo[import]"):
        import transformers
    try:
        made = transformers.AutoTokenizer.from_pretrained(network, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a custom class, or a damaged file
        raise RequestError(f"cannot convert the tokenizer of {folder} to {FILE} ({one_line(error)})") from error
    with tempfile.TemporaryDirectory() as temporary:
        made.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            file.replace(folder / file.name)


def _letters(network: Path) -> dict[str, Any]:
    """Returns the tokenizer.json of a protein's letters: the tokens of vocab.txt, also within words."""
    names = [line.strip() for line in (network / "vocab.txt").read_text("utf-8").splitlines()]
    numbers = {name: number for number, name in enumerate(names)}
    first, last = "<cls>", "<eos>"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    single = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"SpecialToken": {"id": last, "type_id": 0}}]
    second = [{"Sequence": {"id": "B", "type_id": 0}}, {"SpecialToken": {"id": last, "type_id": 0}}]
    special = {name: {"id": name, "ids": [numbers[name]], "tokens": [name]} for name in (first, last)}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": name, "special": name.startswith("<"), **flags}
            for name, number in numbers.items()
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single + second,
            "special_tokens": special,
        },
        "model": {"type": "WordLevel", "vocab": numbers, "unk_token": "<unk>"},
    }


def padding_end(network: Path, config: Mapping[str, Any], model_config: ModelConfig) -> str:
    """Returns the padding token if texts end with it and have a class by their last token; "" otherwise.

    Classifiers of transformers take the last token that is no padding. Those before it do not attend to the end.

    Args:
        network: Folder of the network.
        config: Content of its config.json.
        model_config: Its description.
    """
    if not (model_config.labels and model_config.pooling == "last" and model_config.attention.causal):
        return ""
    content = read_object(network / FILE)
    added = {token.get("id"): str(token.get("content")) for token in content.get("added_tokens") or []}
    token = added.get(config.get("pad_token_id"), "")
    return token if any(_ends_with(template, token) for template in _templates(content)) else ""


def _templates(content: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Returns what a tokenizer makes of a text, and of a pair of texts, as lists that can be changed."""
    processor = content.get("post_processor") or {}
    parts = [part for part in processor.get("processors", [processor]) if part.get("type") == "TemplateProcessing"]
    return [part[key] for part in parts for key in ("single", "pair")]


def _ends_with(template: Sequence[Mapping[str, Any]], token: str) -> bool:
    """Returns whether the last part of a template is a special token."""
    return bool(template) and (template[-1].get("SpecialToken") or {}).get("id") == token


def content(network: Path, end: str = "") -> dict[str, Any] | None:
    """Returns the content of tokenizer.json with what tokenizer_config.json overrides in it; None for no difference.

    As transformers does: the side that texts are truncated at, and of BERT's tokenizers the normalization. Texts do not
    get the special token `end`.

    Args:
        network: Folder of the network.
        end: The token; "" for none.
    """
    content, settings = read_json(network / FILE), read_object(network / SETTINGS)
    if not isinstance(content, dict):
        return None
    changed = dict(content)
    if end:
        changed["post_processor"] = copy.deepcopy(content["post_processor"])
        for template in _templates(changed):
            while _ends_with(template, end):
                template.pop()
    truncation, side = content.get("truncation") or {}, str(settings.get("truncation_side") or "").capitalize()
    if side in ("Left", "Right") and side != truncation.get("direction", "Right"):
        default = {"max_length": 512, "strategy": "LongestFirst", "stride": 0}
        changed["truncation"] = {**default, **truncation, "direction": side}
    normalizer = content.get("normalizer")
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer" and kind in BERT_TOKENIZERS:
        options = {name: settings[key] for name, key in NORMALIZER.items() if key in settings}
        changed["normalizer"] = {**normalizer, **options}
    return None if changed == content else changed

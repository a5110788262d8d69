"""Chat templates with places for a query and a document, as `TemplateTokenizer` takes them.

A template of a folder is rendered once, with marks in place of the texts; it can reach nothing outside of it (Jinja's
sandbox).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, one_line, requires
from zoo.texts.data.templates import DOCUMENT, INSTRUCTED, INSTRUCTION, PLAIN, QUERY
from zoo.texts.importers import sentence_modules
from zoo.texts.importers.sentence_modules import LOGIT_SCORE, read_object
from zoo.texts.models.head import special_token

FILE = "chat_template.jinja"
LANGUAGE_MODEL = "ForCausalLM"  # end of the architecture
YES_NO = ("yes", "no")  # tokens of sentence-transformers
ROLES = (QUERY, DOCUMENT)
MARKS = {QUERY: "\t\ue000q\t", DOCUMENT: "\t\ue000d\t", INSTRUCTION: "\t\ue000i\t"}  # tabs show what is stripped
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")  # of templates that take lists of parts
_QWEN3_REQUEST = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{instruction}query: {query}\ndocument: {document}\nYou are a search relevance expert who "
    "evaluates how well documents match search queries. For each query-document pair, carefully analyze the semantic "
    "relationship between them, then provide your binary relevance judgment (0 for not relevant, 1 for relevant).\n"
    "Relevance:<|im_end|>\n<|im_start|>assistant\n"
)
NAMED = {  # of model cards: the text without and with an instruction, and the tokens of the two answers
    "qwen3-reranker": (_QWEN3.replace("{instruction}", _QWEN3_REQUEST), _QWEN3, YES_NO),
    "mxbai-rerank-v2": (
        _MXBAI.replace("{instruction}", ""),
        _MXBAI.replace("{instruction}", "instruction: {instruction}\n"),
        ("1", "0"),
    ),
}


def named(name: str) -> tuple[dict[str, list[str]], tuple[str, str]]:
    """Returns a template of a model card.

    Args:
        name: A key of `NAMED`.

    Returns:
        The template, and the tokens of the answers yes and no.

    Raises:
        RequestError: There is no such template.
    """
    if name not in NAMED:
        raise RequestError(f"found the template {name!r:.40}; expected {', '.join(NAMED)}, or a file NAME.jinja")
    plain, instructed, answers = NAMED[name]
    parts = {key: re.split(r"\{(\w+)\}", text) for key, text in ((PLAIN, plain), (INSTRUCTED, instructed))}
    return parts, answers


def source(network: Path, file: str = "") -> str:
    """Returns the chat template of a folder; "" if it has none.

    Args:
        network: Folder of the network and tokenizer.
        file: A file with another template; "": that of the folder.

    Raises:
        RequestError: There is no such file.
    """
    if file:
        if not Path(file).is_file():
            raise RequestError(f"found no file {file:.200}; expected a chat template, or {', '.join(NAMED)}")
        return Path(file).read_text("utf-8")
    if (network / FILE).is_file():
        return (network / FILE).read_text("utf-8")
    template = read_object(network / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else ""


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Returns whether a network computes the logits of tokens.

    Args:
        config: Content of its config.json.
    """
    return any(str(name).endswith(LANGUAGE_MODEL) for name in config.get("architectures") or [])


def is_reranker(path: Path, config: Mapping[str, Any]) -> bool:
    """Returns whether a language model scores pairs: by its modules, or a chat template that names their roles.

    Args:
        path: Folder of the model.
        config: Content of its config.json.
    """
    if not is_language_model(config):
        return False
    if modules := sentence_modules.read_modules(path):
        return LOGIT_SCORE in [kind for kind, _ in modules]
    text = source(path)
    return all(re.search(rf"[\"']{role}[\"']", text) for role in ROLES)


def rendered(text: str, network: Path) -> dict[str, list[str]] | None:
    """Renders a chat template.

    Args:
        text: The template.
        network: Folder of the tokenizer, for its special tokens.

    Returns:
        The template as `TemplateTokenizer` takes it; None if it leaves a query or a document out.

    Raises:
        RequestError: It fails, or changes the texts.
    """
    with requires("a chat template", "int8-zoo[import]"):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = fail
    structured = any(pattern in text for pattern in STRUCTURED)
    tokens = {name: special_token(network, name) for name in SPECIAL}

    def render(*roles: str) -> str:
        messages = []
        for role in roles:
            content: Any = [{"type": "text", "text": MARKS[role]}] if structured else MARKS[role]
            messages.append({"role": "system" if role == INSTRUCTION else role, "content": content})
        return str(environment.from_string(text).render(messages=messages, add_generation_prompt=False, **tokens))

    try:
        plain = render(*ROLES)
    except Exception as error:  # of the library, or of an operation in the template
        raise RequestError(f"its chat template fails for a query and a document ({one_line(error)})") from error
    try:
        instructed = render(INSTRUCTION, *ROLES)
    except Exception:  # it has no place for an instruction
        instructed = ""
    if not all(MARKS[role].strip() in plain for role in ROLES):
        return None
    templates = {PLAIN: _parts(plain)}
    if MARKS[INSTRUCTION].strip() in instructed:
        templates[INSTRUCTED] = _parts(instructed)
    return templates


def _parts(text: str) -> list[str]:
    """Returns the texts of a rendered template, and between them the names of the marks."""
    names = {mark: name for name, mark in MARKS.items()}
    parts = [names.get(part, part) for part in re.split(f"({'|'.join(map(re.escape, names))})", text)]
    if any("\ue000" in part for part in parts):
        raise RequestError("its chat template changes the texts, such as by trim; expected one that inserts them")
    return parts


def read(path: Path, network: Path, config: Mapping[str, Any]) -> tuple[dict[str, list[str]] | None, tuple[str, str]]:
    """Reads the template of a reranker.

    Args:
        path: Folder of the model.
        network: Folder of its network and tokenizer, the same or within it.
        config: Content of its config.json; "template" names another template, or a file with one.

    Returns:
        The template, None for plain pairs, and the tokens of the answers yes and no.

    Raises:
        RequestError: It fails, or changes the texts; or a language model without modules has no place for pairs.
    """
    option = str(config.get("template") or "")
    if option and not option.endswith(".jinja"):
        return named(option)
    modules = sentence_modules.read_modules(path)
    transformer = path / sentence_modules.folder_of(modules, "Transformer") / "sentence_bert_config.json"
    if modules and not option and "message" not in (read_object(transformer).get("modality_config") or {}):
        return None, YES_NO
    text = source(network, option)
    template = rendered(text, network) if text else None
    if template is None and is_language_model(config):
        raise RequestError(
            "its chat template has no place for a query and a document; name one with --template, "
            f"{', '.join(NAMED)} or a file NAME.jinja"
        )
    return template, YES_NO

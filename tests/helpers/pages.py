"""The pages of the documentation, and the commands on them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("zoo", "make", "pip", "curl", "python", "torchrun", "ray", "kubectl", "git", "grep", "docker")


class Command(NamedTuple):
    """A command on a page: its line there, its text without the prompt and comment, and what is printed below it."""

    page: str
    line: int
    text: str
    printed: tuple[str, ...]

    @property
    def words(self) -> list[list[str]]:
        """Of each command in a pipe or list of them."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        parts: list[list[str]] = [[]]
        for word in lexer:
            if re.fullmatch(r"[|&;]+", word):
                parts.append([])
            else:
                parts[-1].append(word)
        return [part[: next((i for i, word in enumerate(part) if word in (">", "<")), len(part))] for part in parts]


def commands(page: Path) -> list[Command]:
    """The commands of the page's ```bash and ```console blocks, in order.

    In a console block a command starts with "$ " and its output follows; in a bash block every line is a command. A
    line that ends with a backslash continues on the next one.
    """
    collected: list[Command] = []
    lines = [line.strip() for line in page.read_text().splitlines()]
    language = ""
    index = 0
    while index < len(lines):
        start, text = index, lines[index]
        index += 1
        if text.startswith("```"):
            language = "" if language else text.removeprefix("```") or "text"
            continue
        shown = language == "console" and text.startswith("$ ")
        if not shown and (language != "bash" or text.split(" ")[0] not in PROGRAMS):
            continue
        text = text.removeprefix("$ ")
        while text.endswith("\\"):
            text = text[:-1] + lines[index]
            index += 1
        end = index
        while end < len(lines) and not lines[end].startswith(("$ ", "```")):
            end += 1
        text = re.sub(r"\s+#.*", "", text)
        collected.append(Command(page.name, start + 1, text, tuple(lines[index:end]) if shown else ()))
    return collected

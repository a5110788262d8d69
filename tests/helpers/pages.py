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
        found: list[list[str]] = [[]]
        for word in lexer:
            if re.fullmatch(r"[|&;]+", word):
                found.append([])
            else:
                found[-1].append(word)
        return [each[: next((i for i, word in enumerate(each) if word in (">", "<")), len(each))] for each in found]


def commands(page: Path) -> list[Command]:
    """The commands of the page's ```bash and ```console blocks, in order.

    In a console block a command starts with "$ " and its output follows; in a bash block every line is a command. A
    line that ends with a backslash continues on the next one.
    """
    found: list[Command] = []
    lines = [line.strip() for line in page.read_text().splitlines()]
    language = ""
    at = 0
    while at < len(lines):
        start, text = at, lines[at]
        at += 1
        if text.startswith("```"):
            language = "" if language else text.removeprefix("```") or "text"
            continue
        shown = language == "console" and text.startswith("$ ")
        if not shown and (language != "bash" or text.split(" ")[0] not in PROGRAMS):
            continue
        text = text.removeprefix("$ ")
        while text.endswith("\\"):
            text = text[:-1] + lines[at]
            at += 1
        end = at
        while end < len(lines) and not lines[end].startswith(("$ ", "```")):
            end += 1
        text = re.sub(r"\s+#.*", "", text)
        found.append(Command(page.name, start + 1, text, tuple(lines[at:end]) if shown else ()))
    return found

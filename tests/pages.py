"""The pages of the documentation, and the commands on them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
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
    """The commands of the page's indented blocks, in order; a line that ends with a backslash goes on."""
    found: list[Command] = []
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        start, text = at, lines[at]
        at += 1
        if not text.startswith("    "):
            continue
        text = text.strip()
        shown = text.startswith("$ ")
        text = text.removeprefix("$ ")
        if not shown and text.split(" ")[0] not in PROGRAMS:
            continue
        while text.endswith("\\"):
            text = text[:-1] + lines[at].strip()
            at += 1
        end = at
        while end < len(lines) and lines[end].startswith("    ") and not lines[end].strip().startswith("$ "):
            end += 1
        text = re.sub(r"\s+#.*", "", text)
        found.append(
            Command(page.name, start + 1, text, tuple(each.strip() for each in lines[at:end]) if shown else ())
        )
    return found

"""Texts about software with their topics, from the descriptions and sections of Debian's package index.

    apt-get update -o Acquire::Languages=en,de,fr,es
    python scripts/examples/software_topics.py OUTPUT [LISTS]

LISTS is apt's folder of package indices, /var/lib/apt/lists unless named. Writes train.tsv and test.tsv (text TAB
topic); of the packages that are not in test.tsv also sections.tsv (text TAB section) and descriptions-LANGUAGE.txt, one
a line. Binary packages of one source package are on one side. Descriptions are free under the licences of their
packages.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LISTS = Path("/var/lib/apt/lists")
TOPICS = {  # by section; sections of kinds of packages (libraries, documentation, tools) have no topic
    "games": "games",
    "graphics": "graphics",
    "sound": "sound",
    "video": "video",
    "science": "science",
    "math": "mathematics",
    "net": "networking",
    "web": "web",
    "httpd": "web",
    "mail": "mail",
    "news": "mail",
    "database": "databases",
    "text": "documents",
    "editors": "documents",
    "tex": "documents",
    "fonts": "fonts",
    "admin": "system administration",
    "kernel": "system administration",
    "devel": "software development",
    "vcs": "software development",
    "electronics": "electronics",
    "hamradio": "electronics",
    "embedded": "electronics",
}
MAX_CHARACTERS = 600  # characters of a text
HELD_OUT = 10  # every tenth source package
LANGUAGES = ("en", "de", "fr", "es")


def paragraphs(lists: Path, end: str) -> Iterator[dict[str, str]]:
    """Yields the entries of Debian's main index.

    Args:
        lists: Folder of apt's lists.
        end: What the name of the file ends with, without its compression.
    """
    for path in sorted(lists.glob(f"*debian_dists_*_main_{end}*")):
        if "-updates" in path.name or "security" in path.name:
            continue
        text = subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", path], capture_output=True, check=True).stdout
        for entry in text.decode().split("\n\n"):
            yield dict(re.findall(r"^(\S+?): ?(.*(?:\n .*)*)", entry, re.M))


def plain(description: str) -> str:
    """Returns a description as one line: its synopsis, then its paragraphs without lists and addresses.

    Args:
        description: As the index has it.
    """
    synopsis, *lines = description.split("\n")
    prose = [line.strip() for line in lines if not re.match(r"  |\s*[-*+.o] ?|.*(https?://|@|This package )", line)]
    text = " ".join([f"{synopsis.strip().rstrip('.')}.", *filter(None, prose)])
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS].rsplit(" ", 1)[0]


def main(output: Path, lists: Path = LISTS) -> None:
    """Writes the files.

    Args:
        output: Folder.
        lists: Folder of apt's lists.
    """
    about = {
        entry["Package"]: (entry.get("Section", ""), entry.get("Source", entry["Package"]).split()[0])
        for entry in paragraphs(lists, "binary-*_Packages")
        if "Package" in entry
    }
    lines: dict[str, list[str]] = {name: [] for name in ("train.tsv", "test.tsv", "sections.tsv")}
    for language in LANGUAGES:
        texts = lines[f"descriptions-{language}.txt"] = []
        seen: set[str] = set()
        for entry in paragraphs(lists, f"i18n_Translation-{language}"):
            section, source = about.get(entry.get("Package", ""), ("", ""))
            text = plain(entry.get(f"Description-{language}", "")).replace("\t", " ")
            held_out = int(hashlib.sha256(source.encode()).hexdigest(), 16) % HELD_OUT == 0
            if not source or text in seen:
                continue
            seen.add(text)
            topic = TOPICS.get(section) if language == "en" else None
            if held_out:
                lines["test.tsv"] += [f"{text}\t{topic}\n"] * bool(topic)
                continue
            texts.append(f"{text}\n")
            if topic:  # short texts, too
                lines["train.tsv"] += [f"{text}\t{topic}\n", f"{text.partition('. ')[0].rstrip('.')}\t{topic}\n"]
            if language == "en":
                lines["sections.tsv"].append(f"{text}\t{section}\n")
    output.mkdir(parents=True, exist_ok=True)
    for name, examples in lines.items():
        (output / name).write_text("".join(examples))
        print(f"{name}: {len(examples):,} lines")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

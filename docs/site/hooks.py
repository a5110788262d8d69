"""MkDocs hooks: top pages of the repository, notebooks, the generated reference, and the files that pages link to."""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
HOME, CATALOGUE = "index.md", "models.md"
TOP = {
    "docs/site/home.md": HOME,
    "README.md": "overview.md",
    "MODELS.md": "model-sections.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
FUNCTIONS, COMMANDS = "reference/zoo.md", "reference/command-line.md"
# A CPU as pipelines.analysis.markdown.source writes it
CPU = re.compile(r"((?:AMD|Intel)[^(),;|]* \d+/\d+), \d+ threads?, \[")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")  # the path of a Markdown link

sys.path.insert(0, str(ROOT))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the reference to the navigation: a section per package, a page per module."""
    pages: list[Any] = [{"Command line": COMMANDS}, {"zoo": FUNCTIONS}]
    pages += [{name: _section(ROOT / name.replace(".", "/"))} for name in config.extra["reference"]]
    config.nav = [{"Reference": pages} if "Reference" in entry else entry for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the top pages, the reference, and every file of the repository that a page links to."""
    from scripts.rendering import catalogue

    for name, uri in TOP.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, CATALOGUE, content=catalogue.page()))
    files.append(File.generated(config, FUNCTIONS, content=_package_zoo()))
    files.append(File.generated(config, COMMANDS, content=_command_line()))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_notebook(path)))
    for package in config.extra["reference"]:
        for path in _modules(ROOT / package.replace(".", "/")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            files.append(File.generated(config, _uri(path), content=f"::: {name}\n"))
    written = [(_source(file), file.content_string) for file in files.documentation_pages()]
    links = {(source, link) for source, text in written if source for link in LINK.findall(text)}
    for target in sorted({target for source, link in links if (target := _target(source, link))}):
        if not files.get_file_from_path(_place(target)):
            files.append(File.generated(config, _place(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between files of the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        markdown = cpu_parts(markdown)
    source = _source(page.file)
    if source is None:
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        return posixpath.relpath(_place(target), posixpath.dirname(page.file.src_uri)) if target else link[1]

    return LINK.sub(moved, markdown)


def cpu_parts(markdown: str) -> str:
    """Encloses the parts of a page that were measured on one CPU, for the choice of a CPU (filters.js).

    A part begins with a paragraph that names the CPU and links a report, and ends before a heading or another part.
    """
    blocks, parts, cpu = markdown.split("\n\n"), [], ""
    for block in blocks:
        named = CPU.findall(block)
        begins = "" if block.startswith(("#", "|")) or not named else named[0]
        if cpu and (begins or block.startswith("#")):
            parts.append("</div>")
        if begins:
            parts.append(f'<div data-cpu="{begins}" markdown>')
        cpu = begins or ("" if block.startswith("#") else cpu)
        parts.append(block)
    return "\n\n".join([*parts, *(["</div>"] if cpu else [])])


def _source(file: File) -> Path | None:
    """The file of the repository that a page is read from; None for a generated page."""
    return Path(file.abs_src_path) if file.abs_src_path else None


def _target(source: Path, link: str) -> Path | None:
    """The file of the repository that a link of the page `source` leads to, if there is one."""
    target = (source.parent / link).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _place(target: Path) -> str:
    """The site's path of a file of the repository."""
    path = target.relative_to(ROOT).as_posix()
    own = path.removeprefix("docs/")
    return TOP.get(path, own if own != path else f"files/{path}")


def _modules(package: Path) -> Iterator[Path]:
    """The folders of packages and the files of modules at `package` and below, without private ones."""
    yield package
    for path in sorted(package.iterdir()):
        if path.name.startswith("_"):
            continue
        if (path / "__init__.py").is_file():
            yield from _modules(path)
        elif path.suffix == ".py":
            yield path


def _section(package: Path) -> list[Any]:
    """The navigation of a package: its page, then its modules and packages."""
    members = [path for path in _modules(package) if path.parent == package]
    return [_uri(package), *({path.stem: _section(path) if path.is_dir() else _uri(path)} for path in members)]


def _uri(path: Path) -> str:
    """The site's path of the reference page of a module's file or a package's folder."""
    module = path.relative_to(ROOT).with_suffix("").as_posix()
    return f"reference/{module}/index.md" if path.is_dir() else f"reference/{module}.md"


def _package_zoo() -> str:
    """The page of the package `zoo`: its docstring, then every public function under its public name."""
    import zoo

    parts = ["::: zoo\n    options: {members: false}\n"]
    for name in sorted(zoo.__all__):
        member = getattr(zoo, name)
        if callable(member):
            options = f"{{heading: zoo.{name}, toc_label: {name}, heading_level: 2, show_root_full_path: false}}"
            parts.append(f"::: {member.__module__}.{member.__qualname__}\n    options: {options}\n")
    parts.append("::: zoo.sklearn.ZooClassifier\n    options: {heading_level: 2, show_root_full_path: false}\n")
    return "\n".join(parts)


def _notebook(path: Path) -> str:
    """The page of a notebook: its texts and its code, and the file to download."""
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(path.read_text())["cells"]]
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in cells]
    return "\n\n".join([parts[0], f"[Download the notebook]({path.name}){{ .md-button }}", *parts[1:]]) + "\n"


def _command_line() -> str:
    """The page of the command `zoo`: usage, help and options of every command."""
    from zoo.cli import app

    parts = [
        "# Command line\n\nExit codes: 0 success, 1 failure, 2 invalid request. Messages and progress go to stderr.\n"
    ]
    for topic, commands in app.TOPICS.items():
        parts.append(f"## {topic}\n")
        parts += [_command(command, f"zoo {command.name}") for command in commands]
    return "\n".join(parts)


def _command(command: click.Command, name: str) -> str:
    """The part of a command and of its commands: usage, help, options."""
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"### {name}\n", f"```text\n{usage}\n```\n", f"{command.help or ''}\n"]
    options = [option for option in command.params if isinstance(option, click.Option)]
    if records := [record for option in options if (record := option.get_help_record(context))]:
        cells = [(option, meaning.replace("|", "\\|")) for option, meaning in records]
        rows = "".join(f"| `{option}` | {meaning} |\n" for option, meaning in cells)
        parts.append(f"| option | meaning |\n| --- | --- |\n{rows}")
    if isinstance(command, click.Group):
        parts += [_command(member, f"{name} {key}") for key, member in command.commands.items()]
    return "\n".join(parts)

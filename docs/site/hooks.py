"""MkDocs hooks: pages from the top of the repository, the API reference, and the files that pages link to."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = {
    "README.md": "index.md",
    "MODELS.md": "models.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")  # the path of a Markdown link


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the API reference to the navigation: a section per package, a page per module."""
    sections: list[Any] = [{"zoo": _uri("zoo", "zoo")}]
    for package in config.extra["reference"]:
        _, *modules = _modules(package)
        pages = [{name.removeprefix(f"{package}."): _uri(name, package)} for name in modules]
        sections.append({package: [_uri(package, package), *pages]})
    config.nav = [{**entry} if "Reference" not in entry else {"Reference": sections} for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the top pages, the reference pages, and every file of the repository that a page links to."""
    for name, uri in TOP.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, _uri("zoo", "zoo"), content=_face()))
    for package in config.extra["reference"]:
        for name in _modules(package):
            files.append(File.generated(config, _uri(name, package), content=f"::: {name}\n"))
    written = [(_source(file), file.content_string) for file in files.documentation_pages() if _source(file)]
    targets = {target for source, text in written for link in LINK.findall(text) if (target := _target(source, link))}
    for target in sorted(targets):
        if not files.get_file_from_path(_place(target)):
            files.append(File.generated(config, _place(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between files of the site."""
    source = _source(page.file)
    if source is None:
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        return posixpath.relpath(_place(target), posixpath.dirname(page.file.src_uri)) if target else link[1]

    return LINK.sub(moved, markdown)


def _source(file: File) -> Path | None:
    """The file of the repository that a page is read from; None for a generated page."""
    return Path(file.abs_src_path) if file.abs_src_path else None


def _target(source: Path | None, link: str) -> Path | None:
    """The file of the repository that a link of the page `source` leads to, if there is one."""
    assert source is not None
    target = (source.parent / link).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _place(target: Path) -> str:
    """The site's path of a file of the repository."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    return TOP.get(path, f"files/{path}")


def _modules(package: str) -> list[str]:
    """The dotted names of a package and of its public modules, at any depth."""
    names = []
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            names.append(".".join(parts))
    return sorted(names)


def _uri(module: str, package: str) -> str:
    """The site's path of the reference page of a module below `package`."""
    return f"reference/{package}/{'index' if module == package else module.removeprefix(f'{package}.')}.md"


def _face() -> str:
    """The page of the package `zoo`: its docstring, then every public function under its public name."""
    sys.path.insert(0, str(ROOT))
    import zoo

    parts = ["::: zoo\n    options: {members: false}\n"]
    for name in sorted(zoo.__all__):
        member = getattr(zoo, name)
        if callable(member):
            options = f"{{heading: zoo.{name}, toc_label: {name}, heading_level: 2, show_root_full_path: false}}"
            parts.append(f"::: {member.__module__}.{member.__qualname__}\n    options: {options}\n")
    return "\n".join(parts)

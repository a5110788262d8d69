"""Every `zoo` command on a page is one that the command line has, with options that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from helpers import page_folders
from helpers.pages import PAGES, Command, commands

from pipelines.compression import strategy
from zoo.cli import app as cli


def parsed(words: Sequence[str]) -> None:
    """Read the arguments of a command as the command line would, but for their values."""
    group, remaining = cli.cli, list(words)
    context = click.Context(group, info_name="zoo")
    while isinstance(group, click.Group):
        context = click.Context(group, parent=context, info_name=group.name)
        command = group.get_command(context, remaining[0])
        assert command is not None, f"zoo has no command {remaining[0]}"
        group, remaining = command, remaining[1:]  # type: ignore[assignment]
    options, left, _ = group.make_parser(click.Context(group, parent=context)).parse_args(remaining)
    assert not left, f"the command takes no {left}"
    wanted = [str(param.name) for param in group.params if isinstance(param, click.Argument) and param.required]
    missing = [name for name in wanted if not isinstance(options.get(name), str | tuple | list) or not options[name]]
    assert not missing, f"the command lacks {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page: Path) -> None:
    for command in commands(page):
        for words in command.words:
            if words[:1] == ["zoo"] and len(words) > 1:
                try:
                    parsed(words[1:])
                except (AssertionError, click.UsageError) as error:
                    pytest.fail(f"{command.page}:{command.line}: {command.text}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_that_begin_with_zoo_are_read_as_commands(page: Path) -> None:
    """In a block of another language they would not be parsed above."""
    lines = enumerate(page.read_text().splitlines(), 1)
    numbers = {number for number, line in lines if re.match(r"\s*(\$ )?zoo [a-z]", line)}
    assert numbers <= {command.line for command in commands(page)}


def test_a_command_is_read_with_its_pipes_comments_and_continuation(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```console\n$ zoo run a 's3://b/*.x' -o - \\\n    --top 2 | head -2   # why\none\ntwo\n```\n\n"
        "```python\nzoo\n```\n\n```bash\nmake test  # all\nA_VARIABLE=1\n```\n\n    zoo run in text\n"
    )
    first, other = commands(page)
    assert other == Command("page.md", 15, "make test", ())
    assert first == Command("page.md", 4, "zoo run a 's3://b/*.x' -o - --top 2 | head -2", ("one", "two"))
    assert first.words == [["zoo", "run", "a", "s3://b/*.x", "-o", "-", "--top", "2"], ["head", "-2"]]
    for wrong in (["run"], ["run", "a", "--tops", "2"], ["nothing"], ["cluster", "xml"]):
        with pytest.raises((AssertionError, click.UsageError)):
            parsed(wrong)


def test_the_strategy_on_the_page_is_one(tmp_path: Path) -> None:
    (tmp_path / "compress.json").write_text(json.dumps(page_folders.strategy()))
    assert [step.name for step in strategy.read(tmp_path / "compress.json").steps()] == [
        "1-distil",
        "2-prune-distil",
        "3-prune-distil",
        "4-prune-distil",
        "5-distil",
        "6-distil-qat",
    ]

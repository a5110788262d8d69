"""The `zoo` command group. A failing command prints one line on stderr and sets the exit code."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from pipelines.core import settings
from pipelines.core.errors import ZooError, plain
from zoo.cli import clusters, evaluation, inference, models, quantization, training
from zoo.cli.output import INTERRUPTED, fail

TOPICS: dict[str, tuple[click.Command, ...]] = {
    "Use models": (
        models.list_models,
        models.info,
        models.download,
        inference.run,
        inference.rank,
        inference.serve,
        inference.export,
        inference.delta,
        models.push,
        models.verify,
    ),
    "Create models": (training.schema, training.train, training.finetune, training.freeze, training.import_model),
    "Quantize models": (
        quantization.quantize,
        quantization.tune,
        quantization.calibrate,
        quantization.rewrite,
        models.build,
    ),
    "Measure models": (evaluation.evaluate, evaluation.benchmark, evaluation.plan, models.doctor),
    "Clusters": (clusters.cluster,),
}


class CommandGroup(click.Group):
    """Command group whose help lists the commands by topic, with untruncated descriptions."""

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Group.invoke`; click ends an interrupted line also where stderr is no terminal."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                click.echo(err=True)
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Group.format_commands`."""
        for topic, commands in TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(str(entry.name), entry.get_short_help_str(limit=1000)) for entry in commands])


class UniqueMessages(logging.Filter):
    """Filter that passes each message once; those of the server are events, which may happen again."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the message is new.

        Args:
            record: Record of the message.
        """
        text = record.getMessage()
        new = text not in self._seen or record.name.startswith("zoo.serving.")
        self._seen.add(text)
        return new


class _Plain(logging.Formatter):
    """Formatter that removes terminal control characters of model and file names."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the formatted record without control characters."""
        return plain(super().format(record))


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="int8-zoo", prog_name="zoo")
def cli() -> None:
    """Optimized INT8 models for CPUs. MODEL is a name from `zoo list`, a model folder, or hf://ORG/NAME."""
    settings.table_memory()  # refuses a wrong value before the work begins


for _commands in TOPICS.values():
    for _each in _commands:
        cli.add_command(_each)


def main() -> None:
    """Entry point of the `zoo` command."""
    handler = logging.StreamHandler()
    handler.addFilter(UniqueMessages())
    handler.setFormatter(_Plain("zoo: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # faults of images are reported by the reader
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    warnings.filterwarnings("ignore", module="PIL")
    call(sys.argv[1:])


def call(arguments: Sequence[str]) -> None:
    """Runs the command with arguments.

    Args:
        arguments: Arguments of the command line.

    Raises:
        SystemExit: The command failed; its message is on stderr.
    """
    try:
        cli(list(arguments), prog_name="zoo", standalone_mode=False)
    except getattr(click.exceptions, "NoArgsIsHelpError", ()) as error:  # click 8.2 and later
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "zoo"
        fail(f"{error.format_message().rstrip('.')}; see: {where} --help", 2)
    except click.ClickException as error:
        fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", INTERRUPTED)
    except ZooError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        wrong = isinstance(error, NotADirectoryError | IsADirectoryError | FileExistsError)  # a path that was given
        if isinstance(error, FileNotFoundError) and error.filename is None:
            fail("the working directory was deleted; change to another one", 2)
        fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 2 if wrong else 1)


if __name__ == "__main__":
    main()

"""Scores the sample that ships with Wide & Deep in fp32 and int8, and prints results and speed: `make run`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import zoo
from pipelines.core import machine

MODEL = "wide-deep-criteo"
SCORES = Path("scores.csv")


def main() -> None:
    """Scores the sample and prints the table."""
    sample = zoo.load(MODEL).path / "sample.tsv.gz"
    table = Table(
        "precision", "engine", "rows", "clicks predicted", "rows/s, file to file", "samples/s, model alone", box=None
    )
    speeds = []
    with tempfile.TemporaryDirectory() as folder:
        for precision, output in (("fp32", Path(folder) / "fp32.csv"), ("int8", SCORES)):
            summary = zoo.run(MODEL, str(sample), output, precision=precision)  # type: ignore[attr-defined]
            speeds.append(summary["model_samples_per_second"])
            whole, model = (f"{summary[key]:,.0f}" for key in ("rows_per_second", "model_samples_per_second"))
            table.add_row(precision, summary["engine"], f"{summary['rows']:,}", f"{summary['clicks']:,}", whole, model)
    console = Console(highlight=False, width=120)
    console.print(f"{MODEL} on {sample.name} (synthetic rows), {machine.cpu()['name']}, one thread")
    console.print(table)
    console.print(f"int8 runs the model {speeds[1] / speeds[0]:.1f}x as fast as fp32; the int8 scores are in {SCORES}")


if __name__ == "__main__":
    main()

"""Logs of clicks as CSV."""

import csv
import random
from pathlib import Path


def written(path, **columns):
    """Writes columns of values as CSV with a header; returns the path as text."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return str(path)


def log_of_ages(path: Path, users: range, items: range = range(12), *, seed: int) -> str:
    """Write 240 drawn clicks of users of an age on items."""
    draw = random.Random(seed)
    columns = (range(2), [f"u{user}" for user in users], [f"i{item}" for item in items], range(70))
    names = ("click", "user_id", "item_id", "age")
    rows = [[draw.choice(values) for values in columns] for _ in range(240)]
    return written(path, **dict(zip(names, zip(*rows, strict=True), strict=True)))

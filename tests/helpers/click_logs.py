"""Logs of clicks as CSV."""

import csv


def written(path, **columns):
    """Writes columns of values as CSV with a header; returns the path as text."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return str(path)

"""Make a click log with columns of its own, to try `zoo schema` and `zoo train` on: synthetic, free of any licence.

    python scripts/synthesize_log.py log.csv [-n 20000] [--seed 0] [--users 500] [--items 200] [--bought] [--times]
        [--history 10] [--user-columns 0]

A shop's log in time order: clicked, timestamp, user_id, item_id, "price, EUR" (skewed, some missing), age, country
(unicode, quotes), device, categories (a list, may be empty) and history (the user's last ten clicks, a list). A click
depends on hidden vectors of user and item, on the price, and on the user's taste for the item's categories. The shop is
the same for every seed: a model trained on the rows of one is tested on those of another. --bought adds a second label:
whether a click led to a purchase, which is more likely for cheap items. --times adds the column history_times with the
times of the history's clicks. --history is the number of clicks of the history, --user-columns a number of further
columns of the user, without effect on clicks.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from pipelines.core.files import replacing

COUNTRIES = ["Deutschland", "España", "Österreich", "日本", 'the "Old" World', "Côte d'Ivoire", "Česko, Brno"]
DEVICES = ["phone", "tablet", "desktop"]
CATEGORIES = ["books", "games", "garden & patio", "music", "sports", "toys", "tools", "déco"]
SEGMENTS = 12  # values of a further column
CHUNK = 100_000


def chunks(
    count: int,
    seed: int = 0,
    users: int = 500,
    items: int = 200,
    bought: bool = False,
    timed: bool = False,
    history_size: int = 10,
    user_columns: int = 0,
) -> Any:
    """Yields Arrow tables of up to `CHUNK` rows, in order; with `bought`, with that label; `timed`: history_times."""
    buyers = np.random.default_rng([seed, 2])  # whose draws leave the other columns as they are
    random = np.random.default_rng(0)  # the shop, its users and items: the same for every seed
    size = 6
    user_vectors, item_vectors = random.normal(0, 0.8, (users, size)), random.normal(0, 0.8, (items, size))
    user_bias, item_bias = random.normal(0, 0.5, users), random.normal(0, 0.8, items)
    price = np.round(np.exp(random.normal(2.5, 1.0, items)), 2)
    age, country = random.integers(16, 80, users), random.integers(0, len(COUNTRIES), users)
    of_items = random.random((items, len(CATEGORIES))) < 0.25
    texts = ["|".join(np.array(CATEGORIES)[chosen].tolist()) for chosen in of_items]
    taste = random.normal(0, 0.6, (users, len(CATEGORIES)))
    popular = 1 / np.arange(1, items + 1) ** 0.8
    popular /= popular.sum()
    segments = np.random.default_rng(1).integers(0, SEGMENTS, (user_columns, users))
    random = np.random.default_rng([seed, 1])
    history: defaultdict[int, deque[tuple[str, int]]] = defaultdict(lambda: deque(maxlen=history_size))
    for start in range(0, count, CHUNK):
        n = min(CHUNK, count - start)
        u, i = random.integers(0, users, n), random.choice(items, n, p=popular)
        suits = (taste[u] * of_items[i]).sum(1)
        logit = (user_vectors[u] * item_vectors[i]).sum(1) + user_bias[u] + item_bias[i] + suits
        logit += 0.02 * (age[u] - 45) * (i % 3 == 0) - 0.4 * (np.log(price[i]) - 2.5) - 0.6
        clicked = (random.random(n) < 1 / (1 + np.exp(-logit))).astype(np.int64)
        times = 1_700_000_000 + np.arange(start, start + n) * 7
        before, before_at = [], []
        for user, item, click, time in zip(u.tolist(), i.tolist(), clicked.tolist(), times.tolist(), strict=True):
            before.append("|".join(item for item, _ in history[user]))
            before_at.append("|".join(str(time) for _, time in history[user]))
            if click:
                history[user].append((f"i{item}", time))
        priced = random.random(n) > 0.03
        likely = 1 / (1 + np.exp(2 * (np.log(price[i]) - 2.5)))
        more = {"bought": (clicked == 1) & (buyers.random(n) < likely)} if bought else {}
        yield pa.table(
            {
                "clicked": clicked,
                **{name: column.astype(np.int64) for name, column in more.items()},
                "timestamp": times,
                "user_id": pa.array([f"u{user}" for user in u.tolist()]),
                "item_id": pa.array([f"i{item}" for item in i.tolist()]),
                "price, EUR": pa.array(price[i], mask=~priced),
                "age": age[u],
                "country": pa.array(np.array(COUNTRIES)[country[u]]),
                "device": pa.array(np.array(DEVICES)[random.integers(0, 3, n)]),
                "categories": pa.array([texts[item] for item in i.tolist()]),
                "history": pa.array(before),
                **({"history_times": pa.array(before_at)} if timed else {}),
                **{
                    f"user_segment_{index}": pa.array([f"s{segment}" for segment in values[u].tolist()])
                    for index, values in enumerate(segments)
                },
            }
        )


def write(path: Path, count: int, *shop: Any, **options: Any) -> None:
    """Writes `count` rows of `chunks` as CSV, packed where the name ends in .gz."""
    with replacing(path) as temporary:
        sink = (
            pa.CompressedOutputStream(str(temporary), "gzip")
            if path.suffix == ".gz"
            else pa.OSFile(str(temporary), "wb")
        )
        with sink:
            writer = None
            for table in chunks(count, *shop, **options):
                writer = writer or pa.csv.CSVWriter(sink, table.schema)
                writer.write(table)
            if writer is not None:
                writer.close()


def main() -> None:
    """Parses the command line and writes the log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("output", type=Path)
    parser.add_argument("-n", "--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, default=500)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--bought", action="store_true", help="a second label: whether the click led to a purchase")
    parser.add_argument("--times", action="store_true", help="a column with the times of the history's clicks")
    parser.add_argument("--history", type=int, default=10, help="clicks of a history (default 10)")
    parser.add_argument("--user-columns", type=int, default=0, help="further columns of the user (default 0)")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.users, arguments.items, arguments.history) < 1:
        sys.exit("expected at least one row, one user, one item and one click of a history")
    options = {"bought": arguments.bought, "timed": arguments.times}
    options |= {"history_size": arguments.history, "user_columns": arguments.user_columns}
    write(arguments.output, arguments.rows, arguments.seed, arguments.users, arguments.items, **options)


if __name__ == "__main__":
    main()

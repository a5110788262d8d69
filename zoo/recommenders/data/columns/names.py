"""Inference of the kind of a column from its name."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
_IDS = {
    *("id", "ids", "uid", "iid", "pid", "gid", "uuid", "guid", "key", "hash", "code", "zip", "zipcode", "postcode"),
    *("type", "category", "cat", "cate", "class", "brand", "sku", "asin", "isbn", "ean", "upc"),
}
_ITEMS = {  # things that are recommended, and who offers them
    *("item", "product", "goods", "listing", "movie", "film", "video", "episode", "song", "track", "album", "podcast"),
    *("book", "article", "news", "course", "recipe", "game", "hotel", "restaurant", "business", "poi"),
    *("ad", "adgroup", "campaign", "creative", "advertiser", "publisher", "author", "artist", "genre", "brand"),
    *("merchant", "seller", "vendor", "shop"),
}
_ENTITIES = _ITEMS | {  # things that whole numbers stand for
    *("user", "customer", "member", "visitor", "viewer", "client", "account", "site", "app", "device", "session"),
    *("query", "store", "playlist", "page", "url", "domain", "city", "region", "country", "state"),
    *("province", "district", "location", "gender", "occupation", "channel", "os", "browser", "carrier"),
}
_QUANTITIES = {
    *("age", "price", "cost", "count", "counts", "num", "number", "amount", "rate", "ratio", "score", "total", "sum"),
    *("avg", "average", "mean", "min", "max", "len", "length", "size", "duration", "time", "rating", "rank"),
    *("year", "years", "month", "months", "week", "weeks", "day", "days", "hour", "hours", "minute", "minutes"),
    *("second", "seconds", "position", "quantity", "qty", "percent", "pct", "share", "views", "clicks", "visits"),
}
_JOINED_ID = re.compile(f"({'|'.join(sorted(_ENTITIES))})ids?")  # userid, movieid
_TIME = {
    *("timestamp", "datetime", "date", "ts", "at", "when", "dt", "ds", "epoch", "unix", "unixtime", "created"),
    *("hour", "day"),
}
_NOT_OF_ROW = {
    *("birth", "birthday", "birthdate", "born", "dob", "signup", "joined", "registered", "registration", "member"),
    *("release", "released", "expiry", "expires", "expiration", "published", "opened"),
}
_INDEX = re.compile(r"Unnamed: \d+(\.\d+)*|__index_level_\d+__")  # as pandas names what has no name
_WEIGHT = re.compile(r"(sample_?)?weights?", re.IGNORECASE)
_OUTCOMES = re.compile(
    r"(^|_)(label|target|y|click\w*|conver\w*|cvr|purchase\w*|bought|buy|ordered|installed|install|like|liked)($|_)"
)
_OF_ITEM = _ITEMS | {
    *("items", "ads", "sku", "asin", "isbn", "category", "categories", "cate", "tag", "tags", "genres"),
    *("price", "stock", "title", "release"),
}
_OF_USER = {  # also of histories, as hist_item_id of DeepCTR
    *("user", "history", "hist", "sequence", "seq", "recent", "past", "previous", "prev", "last"),
    *("clicked", "viewed", "watched", "played", "listened", "visited", "purchased", "bought", "seen", "liked"),
}


def listed(columns: Iterable[str]) -> str:
    """Returns names for a message, in quotes where they hold a comma, as a header of CSV has them, or outer blanks.

    Args:
        columns: Names of columns.
    """
    return ", ".join(f'"{name}"' if "," in name or name != name.strip() else name for name in columns)


def words(name: str) -> list[str]:
    """Splits a name into lower-case words.

    Args:
        name: Name of a column, such as user_id, userId or USER_ID.

    Returns:
        Words and numbers, such as ["user", "id"].
    """
    return [word.lower() for word in _WORDS.findall(name)]


def is_identity(name: str) -> bool:
    """Whether integers of this name are ids or codes, rather than quantities.

    Args:
        name: Name of a column.
    """
    parts = words(name)
    if any(part in _IDS or _JOINED_ID.fullmatch(part) for part in parts):
        return True
    plain = [part for part in parts if not part.isdecimal()]
    return bool(plain) and plain[-1] in _ENTITIES and not any(word in _QUANTITIES for word in plain)


def is_time(name: str) -> bool:
    """Whether the name is that of a time.

    Args:
        name: Name of a column.
    """
    return any(word in _TIME or word.endswith(("time", "timestamp")) for word in words(name))


def is_time_of_row(name: str) -> bool:
    """Whether a time of this name may be that of the row, rather than of its user or item.

    Args:
        name: Name of a column.
    """
    return not any(word in _NOT_OF_ROW for word in words(name))


def is_hour(name: str) -> bool:
    """Whether the name has the word hour.

    Args:
        name: Name of a column.
    """
    return "hour" in words(name)


def is_index(name: str) -> bool:
    """Whether pandas gave the name to an index without one.

    Args:
        name: Name of a column.
    """
    return bool(_INDEX.fullmatch(name))


def is_weight(name: str) -> bool:
    """Whether the name is that of sample weights.

    Args:
        name: Name of a column.
    """
    return bool(_WEIGHT.fullmatch(name))


def is_outcome(name: str) -> bool:
    """Whether the name is that of an outcome of an impression, such as a click or a conversion.

    Args:
        name: Name of a column.
    """
    return bool(_OUTCOMES.search("_".join(words(name))))


def tower(name: str) -> str:
    """Returns the tower that a column belongs to, by its name: "item", else "user".

    Args:
        name: Name of a column.
    """
    parts = {joined[1] if (joined := _JOINED_ID.fullmatch(word)) else word for word in words(name)}
    return "item" if parts & _OF_ITEM and not parts & _OF_USER else "user"

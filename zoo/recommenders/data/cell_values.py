"""Values of the cells of a log: one canonical text for every value, and numbers in text, for all fields at once."""

from __future__ import annotations

import ast
import datetime
import decimal
import enum
import functools
import itertools
import logging
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.errors import RequestError, one_line
from zoo.recommenders.data.hashing import overlapping

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)
LIST = "|"  # joins the items of a list in the file
HUGE = 2.0**63  # from here on whole numbers are not written out
ROUNDED = 2**53  # from here on float64 lacks whole numbers
RAW_MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")  # in texts that are read as they stand
MISSING = (*RAW_MISSING, "<NA>", "NaT")
_NO_VALUES = frozenset(MISSING)
_FIRST = "-0123456789tTfF[("  # first characters of the texts that may have another canonical form
_LIKELY = r"^(-?[0-9]+[.eE]|[tTfF\[(])"  # whole numbers alone do not change
_ODD = r"(?s)^(-?[1-9](\.[0-9]+)?[eE][+-]?[0-9]{1,3}|-?[0-9]{19,}\.0*|-?0\.0000[0-9]+|\[.*\]|\(.*\))$"
_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_WORD = r"(?:[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?|None|null|NULL|nan|NaN|<NA>|NaT|True|False|true|false)"
_ITEM = re.compile(f"{_QUOTED}|{_WORD}", re.DOTALL)
_LIST = re.compile(
    rf"\[\s*(?:(?:{_QUOTED}|{_WORD})(?:\s*,\s*|\s+|(?=\])))*\]|\(\s*(?:(?:{_QUOTED}|{_WORD})\s*,\s*)+(?:{_QUOTED}|{_WORD})?\s*\)",
    re.DOTALL,
)
PAD = b"\xff" * 8  # in front of every buffer, so that the 8 bytes before any field's end can be read
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_LARGEST = float(np.finfo(np.float32).max)
_u64 = np.uint64


def parse_floats(texts: pa.Array) -> npt.NDArray[np.float64]:
    """Parses texts as numbers.

    Args:
        texts: Text array [n], null where missing.

    Returns:
        float64 [n]; NaN for null, for text that is not a number, and for infinity.
    """
    try:
        numbers = texts.cast(pa.float64())
    except pa.ArrowInvalid:
        trimmed = pc.utf8_trim_whitespace(texts)
        is_number = pc.match_substring_regex(trimmed, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
        numbers = pc.if_else(is_number, trimmed, pa.scalar(None, pa.string())).cast(pa.float64())
    values = numbers.to_numpy(zero_copy_only=False).astype(np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def parse_numbers(data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Parses the fields `data[starts:ends]`.

    Integers of up to eight digits are parsed all at once; longer numbers and decimal fractions one by one.

    Args:
        data: Text, uint8 [bytes], beginning with `PAD`.
        starts: First byte of every field, int64 of any shape.
        ends: One past the last byte of every field, int64 in the same shape.

    Returns:
        Values, float32 in the shape of `starts`, NaN for empty fields; and bool in the same shape, true where the text
        is not a number in the range of float32.
    """
    values, bad = _digits(data, starts, ends)
    others = np.nonzero(bad)
    if others[0].size:
        start, end = starts[others], ends[others]
        minus = data[start] == ord("-")
        signed, wrong = _digits(data, start + minus, end)
        signed[minus] *= -1
        wrong |= np.isnan(signed)  # nothing but a minus sign
        odd = np.flatnonzero(wrong)
        text = data.tobytes() if odd.size else b""
        signed[odd] = [_number(text[i:j]) for i, j in zip(start[odd].tolist(), end[odd].tolist(), strict=True)]
        values[others], bad[others] = signed, np.isnan(signed)
    return values, bad


def _digits(data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Fields of up to eight digits as float32, NaN where empty, and bool, where a field holds anything else.

    A field is read as one 64-bit word and its digits added up in three multiplications (the well-known SWAR method: D.
    Lemire, "Quickly parsing eight digits", 2018).
    """
    bits = (ends - starts).astype(np.uint64) * _u64(8)
    zeros = _u64(0x3030303030303030)
    empty = _u64(64) - bits  # wraps around for longer fields, and numpy shifts everything out then
    words = (overlapping(data, 8)[ends - 8] >> empty << empty) | (zeros >> bits)  # '0' in front of the field
    words ^= zeros
    other = ((words + _u64(0x7676767676767676)) | words) & _u64(0x8080808080808080) != 0  # a byte over 9
    words = words * _u64(10) + (words >> _u64(8))
    mask = _u64(0x000000FF000000FF)
    words = (
        (words & mask) * _u64(0x000F424000000064) + ((words >> _u64(16)) & mask) * _u64(0x0000271000000001)
    ) >> _u64(32)
    values = words.astype(np.float32)
    values[bits == 0] = np.nan
    return values, other


def _number(text: bytes) -> float:
    """A number of any notation; NaN for anything else, and beyond float32."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if abs(value) <= _LARGEST else math.nan


# --- canonical texts


@dataclass(frozen=True)
class CellForm:
    """Form of the texts of a column.

    Attributes:
        separator: Joins the items of lists.
        canonical: Whether texts are made canonical, see `canonical`; models of version 0.2.0 read them as they stand.
    """

    separator: str = LIST
    canonical: bool = True

    def apply(self, texts: pa.Array) -> pa.Array:
        """Returns texts in this form, null where missing.

        Args:
            texts: Text array [n].
        """
        return canonical(texts, self.separator) if self.canonical else texts

    def text(self, value: Any) -> str | None:
        """Returns one value of Python as text in this form, None where missing; see `as_text`.

        Args:
            value: The value.
        """
        text = as_text(value, self.separator)
        if text is None or text[0] not in _FIRST or (text.isascii() and text.isdigit()):
            return text
        return self.apply(pa.array([text], pa.string()))[0].as_py()  # type: ignore[no-any-return]


def formed(batch: pa.RecordBatch, forms: Mapping[str, CellForm]) -> pa.RecordBatch:
    """Writes text columns in their forms.

    Args:
        batch: Text columns.
        forms: Form by name of a column; None: canonical.

    Returns:
        Text columns.
    """
    columns = zip(batch.schema.names, batch.columns, strict=True)
    texts = [forms.get(name, CellForm()).apply(column) for name, column in columns]
    return pa.record_batch(texts, names=batch.schema.names)


def canonical(texts: pa.Array, separator: str = LIST) -> pa.Array:
    """Writes texts in canonical form, so that one value is one text whatever it was read from.

    Whole numbers lose a fraction of zeros (51.0 becomes 51), numbers with an exponent are written as Python writes
    them, booleans become 1 and 0, lists in the notation of Python, JSON or numpy (`['a', 'b']`) become their items
    joined by the separator, and the words of `MISSING` become null. Other texts do not change.

    Args:
        texts: Text array [n], null where missing.
        separator: Separator of the items of lists.

    Returns:
        Text array [n].
    """
    likely = pc.match_substring_regex(texts, _LIKELY)
    if pc.any(likely).as_py():
        texts = pc.replace_substring_regex(texts, r"^-?0+\.0*$", "0")
        texts = pc.replace_substring_regex(texts, r"^(-?[0-9]{1,18})\.0*$", r"\1")
        texts = pc.replace_substring_regex(texts, r"^(True|true|TRUE)$", "1")
        texts = pc.replace_substring_regex(texts, r"^(False|false|FALSE)$", "0")
        odd = pc.match_substring_regex(texts, _ODD).fill_null(False)
        if pc.any(odd).as_py():
            made = pa.array(_canonical(texts.filter(odd).to_pylist(), separator), pa.string())
            texts = pc.replace_with_mask(texts, odd, made)
    return pc.if_else(pc.is_in(texts, pa.array(MISSING)), pa.scalar(None, pa.string()), texts)


def _canonical(texts: Sequence[str], separator: str) -> list[str | None]:
    """Returns the canonical forms of lists, and of numbers that are long or have an exponent."""
    lists = [_items(text) if text[0] in "[(" else None for text in texts]
    flat = pa.array(itertools.chain.from_iterable(items for items in lists if items), pa.string())
    made = iter(canonical(flat).to_pylist() if len(flat) else ())  # of all lists in one call
    forms: list[str | None] = []
    for text, items in zip(texts, lists, strict=True):
        if items is None:
            forms.append(_canonical_number(text))
        else:
            kept = [item for item in itertools.islice(made, len(items)) if item is not None]
            forms.append(separator.join(kept) or None)
    return forms


def _canonical_number(text: str) -> str | None:
    """Returns the canonical form of a long number, or of one with an exponent; other texts as they are."""
    number = 0.0 if text[0] in "[(" else float(text)
    return as_text(number) if number and math.isfinite(number) else text  # beyond float64 they are no numbers


def _items(text: str) -> list[str] | None:
    """Returns the items of a list in the notation of Python, JSON or numpy; None for other texts."""
    if not _LIST.fullmatch(text):
        return None
    words = [match[0] for match in _ITEM.finditer(text[1:-1])]
    try:
        return [str(ast.literal_eval(word)) if word[0] in "'\"" else word for word in words]
    except (ValueError, SyntaxError):
        return None


def as_text(value: Any, separator: str = LIST) -> str | None:
    """Writes a value of Python as text.

    Args:
        value: Text, UTF-8 bytes, boolean, number, date, time (in UTC if it has a zone), duration (in seconds), UUID or
            member of an enumeration, also those of numpy and pandas; or a list, tuple or array of them.
        separator: Separator of the items of lists.

    Returns:
        Text; None for None, NaN, NA, NaT, the words of `MISSING`, and lists without another item.

    Raises:
        TypeError: The value has another type.
        UnicodeDecodeError: Bytes are not UTF-8.
    """
    if type(value) is str:  # the most frequent kind
        return None if value in _NO_VALUES else value
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, str):
        text = str(value)
    elif isinstance(value, bool | np.bool_ | int | np.integer):
        text = str(int(value))
    elif isinstance(value, float | np.floating):
        whole = float(value).is_integer() and abs(float(value)) < HUGE
        text = str(int(value)) if whole else str(value)
    elif isinstance(value, bytes | bytearray | memoryview):
        text = bytes(value).decode()
    elif isinstance(value, decimal.Decimal):
        text = format(value, "f")
    elif isinstance(value, np.datetime64 | np.timedelta64):
        return None if np.isnat(value) else as_text(value.astype(f"{type(value).__name__}[us]").item())
    elif isinstance(value, datetime.timedelta):
        return as_text(value / datetime.timedelta(seconds=1))
    elif isinstance(value, datetime.datetime):
        utc = value.astimezone(datetime.UTC).replace(tzinfo=None) if value.tzinfo else value
        text = str(utc) + "Z" * bool(value.tzinfo)
    elif isinstance(value, datetime.date | datetime.time | uuid.UUID):
        text = str(value)
    elif isinstance(value, list | tuple | np.ndarray | pa.Array | pa.ChunkedArray):
        items = np.atleast_1d(value) if isinstance(value, np.ndarray) else value
        text = separator.join(part for item in items if (part := as_text(item, separator)) is not None)
    else:
        raise TypeError(f"found a value of type {type(value).__name__}")
    return None if text in _NO_VALUES else text


def as_texts(values: Iterable[Any], name: str, separator: str) -> pa.Array:
    """Writes values of Python as texts, see `as_text`.

    Args:
        values: The values of a column.
        name: Name of the column in messages.
        separator: Separator of the items of lists.

    Returns:
        Text array [n], null where missing.

    Raises:
        RequestError: A value has a type that has no text.
    """
    values = list(values)
    if {str, type(None)}.issuperset(map(type, values)):
        plain = pa.array(values, pa.string())
        return pc.if_else(pc.is_in(plain, pa.array(MISSING)), pa.scalar(None, pa.string()), plain)
    texts = []
    for value in values:
        try:
            texts.append(as_text(value, separator))
        except (TypeError, UnicodeDecodeError) as error:
            raise RequestError(
                f"column {name}: {one_line(error)}; expected text, a number, a boolean, a date, a list of them or a "
                "missing value"
            ) from error
    return pa.array(texts, pa.string())


def decoded(column: Any) -> Any:
    """Decodes a dictionary; Arrow cannot decode those of views (categoricals of polars).

    Args:
        column: Arrow array of a dictionary type.

    Returns:
        Arrow array of the values.
    """
    values = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(column.type.value_type)
    if values is None:
        return column.dictionary_decode()
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(values)).dictionary_decode()


def column_as_text(column: Any, separator: str = LIST, name: str = "") -> pa.Array:
    """Writes a column as texts, as `as_text` writes the values; integers that floats have rounded give a warning.

    Args:
        column: Arrow array [n].
        separator: Separator of the items of lists.
        name: Name of the column in the warning; "": no warning.

    Returns:
        Text array [n], null where missing.

    Raises:
        pyarrow.ArrowException: The column has a type that has no text.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return column_as_text(decoded(column), separator)
    if pa.types.is_float16(kind):  # which Arrow cannot round
        return column_as_text(column.cast(pa.float32()), separator)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.array([as_text(value, separator) for value in column.to_pylist()], pa.string())
    if pa.types.is_duration(kind):
        seconds = column.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.float64())
        return column_as_text(pc.divide(seconds, 1e6), separator)
    if pa.types.is_timestamp(kind):
        unit = "ns" if kind.unit == "ns" else "us"
        column = column.cast(pa.timestamp(unit, "UTC" if kind.tz else None))
    if pa.types.is_time(kind):
        column = column.cast(pa.time64("ns"))
    if pa.types.is_fixed_size_list(kind) or str(kind).startswith(("list_view", "large_list_view")):
        column = column.cast(pa.large_list(kind.value_type))
        kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        column = _lists_as_text(column, separator)
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    text = column.cast(pa.string())
    if pa.types.is_floating(kind):  # 3.0 is the id 3: a column of whole numbers with gaps may be of either type
        whole = pc.and_(pc.equal(column, pc.floor(column)), pc.less(pc.abs(column), HUGE))
        numbers = pc.if_else(whole, column, pa.scalar(None, kind)).cast(pa.int64())
        if name and max(map(abs, filter(None, pc.min_max(numbers).as_py().values())), default=0) >= ROUNDED:
            _warn_of_rounding(name)
        text = pc.coalesce(numbers.cast(pa.string()), text)
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):  # as Python writes them
        text = pc.replace_substring_regex(text, r"(\.[0-9]{6})000(Z?)$", r"\1\2")
        text = pc.replace_substring_regex(text, r"\.0+(Z?)$", r"\1")
    return pc.if_else(pc.is_in(text, pa.array(MISSING)), pa.scalar(None, pa.string()), text)


@functools.cache
def _warn_of_rounding(name: str) -> None:
    logger.warning(
        "column %s: whole numbers from 2**53 on are rounded as floats, and ids among them are not found; expected "
        "integers (Int64 in pandas, also with missing values) or texts",
        name,
    )


def _lists_as_text(column: Any, separator: str) -> pa.Array:
    """Lists joined by the separator, without the items that are missing."""
    items = column_as_text(column.flatten(), separator)
    valid = items.is_valid()
    counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)  # a missing list may have items
    lengths = np.bincount(
        np.repeat(np.arange(len(column)), counts)[valid.to_numpy(zero_copy_only=False)], minlength=len(column)
    )
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pc.binary_join(pa.ListArray.from_arrays(offsets, items.filter(valid)), separator)

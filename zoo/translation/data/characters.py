"""Invalid characters in texts: controls, surrogates, private use, noncharacters."""

from __future__ import annotations

import re

# Characters of scripts without blanks: Thai, Lao, Burmese, Khmer, Chinese, Japanese
CONTINUOUS = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff60]"
)
# Code points that are no text in every version of Unicode: controls, surrogates, private use, noncharacters. The
# table of Python is not asked: it differs by version.
_INVALID = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\ufdd0-\ufdef\ufffe\uffff\U000f0000-\U0010ffff"
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(1, 15))
    + "]"
)
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours of a terminal (ECMA-48, 5.4)


def invalid_characters(text: str) -> list[str]:
    """Returns the characters that are no text: controls, surrogates, private use, noncharacters.

    Args:
        text: Any text.
    """
    return _INVALID.findall(text)


def clean_characters(text: str) -> tuple[str, list[str]]:
    """Removes characters that are no text.

    Controls of Windows-1252 become its characters, as HTML reads them; private use becomes a blank; surrogate pairs
    become one character; terminal escapes, other controls, surrogates and noncharacters are removed.

    Args:
        text: Any text.

    Returns:
        The text with single spaces, and a message for each kind of character.
    """
    text = " ".join(text.split())
    if not _INVALID.search(text):
        return text, []
    text = _PAIR.sub(lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text)
    notes: dict[str, None] = {}

    def replacement(match: re.Match[str]) -> str:
        code = ord(match[0][0])
        if 0x80 <= code < 0xA0 and (char := bytes([code]).decode("cp1252", "ignore")):
            notes[f"U+{code:04X} read as {char}"] = None
            return char
        notes[f"U+{code:04X} left out"] = None
        return " " if 0xE000 <= code < 0xF900 or code >= 0xF0000 else ""

    text = _INVALID.sub(replacement, _ESCAPE.sub(replacement, text))
    return " ".join(text.split()), list(notes)

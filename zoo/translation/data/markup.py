"""Tags and placeholders of a text: taken out, and written into its translation."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.parsers import expat

from pipelines.core.errors import RequestError
from zoo.translation.data.characters import invalid_characters

VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"})
BREAKS = frozenset(  # elements that separate words
    {"address", "article", "aside", "blockquote", "body", "br", "caption", "center", "dd", "details", "dialog", "div"}
    | {"dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "head"}
    | {"header", "hr", "html", "legend", "li", "main", "nav", "ol", "option", "p", "pre", "section", "select"}
    | {"summary", "table", "tbody", "td", "tfoot", "th", "thead", "title", "tr", "ul"}
)
# elements whose content is not translated
OPAQUE = frozenset({"code", "kbd", "samp", "var", "pre", "script", "style", "svg", "math"})

_URL = r"(?:(?:https?|ftp)://|www\.)[^\s<>\"'\u3000-\uffff]*[^\s<>\"'.,;:!?()\[\]{}\u3000-\uffff]"
_MAIL = r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
_BRACES = r"\{\{[^{}]*\}\}|\$?\{[^\s{}]*\}"
_PRINTF = r"(?<![\w%])%(?:\(\w+\))?(?:\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[zjtL])?[sdiuxXfFeEgGcp@](?!\w)"
_UNIT = (
    r"(?<![\w.,])[-+\u2212]?\d+(?:[.,]\d+)*\s?(?:[kcmµn]?m[²³]?|[kmµ]?g|[mc]?l|[kKMGT]i?B|[kMGT]?Hz|[kM]?W|kWh|[mk]?V|m?A|"
    r"km/h|m/s|mph|°[CF]?|%|€|\$|£|dpi|px|pt|ms|µs|ns|s|min|h)(?!\w)"
)
PLACEHOLDERS = {
    "off": None,
    "auto": re.compile("|".join((_URL, _MAIL, _BRACES, _PRINTF))),
    "all": re.compile("|".join((_URL, _MAIL, _BRACES, _PRINTF, _UNIT))),
}
_TOUCHING = re.compile(r"[!-~\u00ab\u00bb\u2013-\u201f\u00d7](?<![.,;:!?])")  # characters that move with a placeholder
_NAME = re.compile(r"</?\s*([^\s/>]+)")
_STOPS = frozenset(".,;:!?\u2026")


@dataclass
class Node:
    """An element with text, or a part that is copied unchanged: a tag without text, a comment, a placeholder.

    Attributes:
        opening: The start tag; or all that is written.
        closing: The end tag; "" for a part that is copied unchanged.
        first: Place of its first character in the text without tags.
        last: Place behind its last character.
        children: Nodes within.
        before: Whether a blank, or the end of the text, is before it.
        after: Whether one is behind it.
        breaks: Whether it separates words without a blank.
    """

    opening: str
    closing: str = ""
    first: int = 0
    last: int = 0
    children: list[Node] = field(default_factory=list)
    before: bool = True
    after: bool = True
    breaks: bool = False


@dataclass
class Markup:
    """A text, and the tags and placeholders that were taken out of it.

    Attributes:
        raw: The text with them.
        handling: "html" or "xml"; "" for plain text.
        text: The text without them.
        nodes: What was taken out, outermost and in order.
    """

    raw: str
    handling: str
    text: str
    nodes: list[Node]

    def escape(self, text: str) -> str:
        """Writes text as the markup has it.

        Args:
            text: Plain text.
        """
        return html.escape(text, quote=False) if self.handling else text


def read_markup(raw: str, handling: str, placeholders: re.Pattern[str] | None = None) -> Markup:
    """Takes tags, and placeholders if asked for, out of a text.

    HTML is read as browsers do: tags without a partner are kept where they are. Elements that are not translated
    (`OPAQUE`, translate="no", class="notranslate") are kept with their content.

    Args:
        raw: The text, with single blanks.
        handling: "html" or "xml"; "" for plain text.
        placeholders: What else is taken out, with what touches it but punctuation; None: nothing.

    Returns:
        The text and the markup removed from it.

    Raises:
        RequestError: `handling` is "xml", and the text is not well-formed.
    """
    if handling == "xml":
        _require_well_formed(raw)
    reader = _Reader(raw, handling, placeholders)
    if handling:
        reader.feed(raw)
        reader.close()
    else:
        reader.add_text(raw, 0, len(raw))
    return reader.finish()


def _require_well_formed(raw: str) -> None:
    parser = expat.ParserCreate("utf-8")
    begin = b"<text>"
    try:
        parser.Parse(begin + raw.encode(errors="replace") + b"</text>", True)
    except expat.ExpatError as error:
        column = len((begin + raw.encode(errors="replace"))[: error.offset].decode(errors="ignore")) - len(begin) + 1
        reason = expat.ErrorString(error.code)
        raise RequestError(f"is not well-formed XML: {reason} at column {max(column, 1)}") from error


class _Reader(HTMLParser):
    """Reads markup. The raw text of an event ends where the next event begins."""

    def __init__(self, raw: str, handling: str, placeholders: re.Pattern[str] | None) -> None:
        super().__init__(convert_charrefs=True)
        self.raw, self.handling, self.placeholders = raw, handling, placeholders
        if handling == "xml":
            self.set_cdata_mode = lambda *_, **__: None  # type: ignore[method-assign]
        self.events: list[tuple[str, int, str, bool]] = []  # kind, place, name or text, whether it is not translated
        self.characters: list[str] = []
        self.pending = False  # whether a blank comes before the next character
        self.root = Node("")
        self.open: list[tuple[str, int, Node]] = []  # name, place and node

    # ---------------------------------------------------------------------------------------------------------- events

    def _event(self, kind: str, name: str, opaque: bool = False) -> None:
        self.events.append((kind, self.getpos()[1], name, opaque))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        values = dict(attrs)
        opaque = values.get("translate") == "no" or "notranslate" in (values.get("class") or "").split()
        self._event("start", self._name(tag), opaque or (self.handling == "html" and tag in OPAQUE))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        self._event("void", tag)

    def handle_endtag(self, tag: str) -> None:
        """See `HTMLParser`."""
        self._event("end", self._name(tag))

    def handle_data(self, data: str) -> None:
        """See `HTMLParser`."""
        self._event("text", data)

    def handle_comment(self, data: str) -> None:
        """See `HTMLParser`."""
        self._event("void", "")

    def handle_decl(self, decl: str) -> None:
        """See `HTMLParser`."""
        self._event("void", "")

    def handle_pi(self, data: str) -> None:
        """See `HTMLParser`."""
        self._event("void", "")

    def unknown_decl(self, data: str) -> None:
        """See `HTMLParser`."""
        self._event("void", "")

    def _name(self, tag: str) -> str:
        """The name of a tag as it is written in XML."""
        return _NAME.match(self.raw, self.getpos()[1])[1] if self.handling == "xml" else tag  # type: ignore[index]

    # ------------------------------------------------------------------------------------------------------------ tree

    def finish(self) -> Markup:
        """Returns the parts read so far."""
        ends = [*(place for _, place, _, _ in self.events), len(self.raw)][1:]
        opaque, depth, begin = "", 0, 0  # of the element whose content is not translated
        for (kind, place, name, skipped), end in zip(self.events, ends, strict=True):
            if depth:
                depth += (name == opaque) * ((kind == "start") - (kind == "end"))
                if not depth:
                    self._add(begin, end, name)
            elif kind == "text":
                self.add_text(name, place, end)
            elif kind == "start" and not (self.handling == "html" and name in VOID):
                if skipped:
                    opaque, depth, begin = name, 1, place
                    continue
                self._break(name)
                node = Node(self.raw[place:end], first=len(self.characters), breaks=name in BREAKS)
                self.open.append((name, place, node))
            elif kind == "end" and any(name == tag for tag, _, _ in self.open):
                while self.open[-1][0] != name:
                    self._keep()
                self._close(place, end)
            else:
                self._add(place, end, name)
        if depth:
            self._add(begin, len(self.raw), opaque)
        while self.open:
            self._keep()
        return Markup(self.raw, self.handling, "".join(self.characters), self.root.children)

    def _siblings(self) -> list[Node]:
        return (self.open[-1][2] if self.open else self.root).children

    def _break(self, name: str) -> None:
        """Separates the words around a tag."""
        self.pending |= self.handling == "html" and name in BREAKS and bool(self.characters)

    def _add(self, begin: int, end: int, name: str = "") -> None:
        """Adds a part that is copied unchanged."""
        node = Node(self.raw[begin:end], first=len(self.characters), last=len(self.characters))
        self._break(name)
        self._append(node, begin, end, name)

    def _append(self, node: Node, begin: int, end: int, name: str) -> None:
        node.before = not begin or self.raw[begin - 1].isspace()
        node.after = end == len(self.raw) or self.raw[end].isspace()
        node.breaks = self.handling == "html" and name in BREAKS
        self._siblings().append(node)

    def _close(self, place: int, end: int) -> None:
        """Closes the innermost element; without text it is written as it is."""
        name, begin, node = self.open.pop()
        node.last = len(self.characters)
        if node.last == node.first:
            self._add(begin, end, name)
            return
        self._break(name)
        node.closing = self.raw[place:end]
        self._append(node, begin, end, name)

    def _keep(self) -> None:
        """Keeps the start tag of the innermost element, which has no end tag."""
        name, begin, node = self.open.pop()
        node.last = node.first
        children, node.children = node.children, []
        self._append(node, begin, begin + len(node.opening), name)
        self._siblings().extend(children)

    # ------------------------------------------------------------------------------------------------------------ text

    def add_text(self, text: str, place: int, end: int) -> None:
        """Adds text without its placeholders.

        Args:
            text: The text.
            place: Where it begins.
            end: Where it ends.
        """
        for char in set(invalid_characters(text)):
            text = text.replace(char, "")
        begin = 0
        for match in self.placeholders.finditer(text) if self.placeholders is not None else ():
            first, last = match.span()
            if first < begin:  # it touches the one before
                continue
            while first > begin and _TOUCHING.match(text, first - 1):
                first -= 1
            while last < len(text) and _TOUCHING.match(text, last):
                last += 1
            self._write(text[begin:first])
            self._placeholder(text, first, last, place, end)
            begin = last
        self._write(text[begin:])

    def _placeholder(self, text: str, first: int, last: int, place: int, end: int) -> None:
        raw = html.escape(text[first:last], quote=False) if self.handling else text[first:last]
        node = Node(raw, first=len(self.characters), last=len(self.characters))
        node.before = text[first - 1].isspace() if first else not place
        node.after = text[last].isspace() if last < len(text) else end == len(self.raw)
        self._siblings().append(node)
        if text[last : last + 1] in _STOPS:
            self.pending = False

    def _write(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self.pending = bool(self.characters)
            else:
                self.characters += [" "] * self.pending + [char]
                self.pending = False

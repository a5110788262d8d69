"""Markup and placeholders survive a translation: tags equal those of the source and nest in the same way."""

import random
import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.translation.alignment.placement import write_markup
from zoo.translation.alignment.words import Alignment, Sentence
from zoo.translation.data.lines import Line
from zoo.translation.data.markup import PLACEHOLDERS, read_markup

MODEL = "multi30k-en-de-student"
WORDS = [
    "a",
    "man",
    "woman",
    "two",
    "dogs",
    "red",
    "jacket",
    "is",
    "are",
    "riding",
    "sitting",
    "bicycle",
    "street",
    "on",
    "the",
    "in",
    "and",
    ",",
    ".",
    "child",
    "plays",
    "guitar",
]
KEPT = ("{0}", "{name}", "%s", "%1$d", "${x}", "{{x}}", "https://example.com/a?b=1", "me@example.com")


@pytest.fixture(scope="module")
def opened():
    return zoo.pipeline(MODEL)


def marked(rng, placeholders):
    """A sentence of random words in random nested elements, with tags without text and placeholders."""
    numbers, has_placeholders = iter(range(100)), bool(placeholders)

    def part(depth):
        pieces = []
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.3 and depth < 3:
                name = rng.choice(["b", "i", "a", "x:g"])
                pieces.append(f'<{name} id="{next(numbers)}">{part(depth + 1)}</{name}>')
            elif kind < 0.4:
                pieces.append(f'<{rng.choice(["br", "img", "ph"])} id="{next(numbers)}"/>')
            elif kind < 0.5 and placeholders:
                pieces.append(placeholders.pop())
            else:
                pieces.append(" ".join(rng.choices(WORDS, k=rng.randint(0, 4))))
        return (" " if has_placeholders else rng.choice([" ", "", " "])).join(pieces)

    return part(0)


def tree(text):
    """{id: (name, ids of the elements around it)} of well-formed markup."""
    elements = {}

    def visit(element, around):
        for child in element:
            elements[child.get("id")] = child.tag, around
            visit(child, (*around, child.get("id")))

    visit(ElementTree.fromstring(f'<text xmlns:x="x">{text}</text>'), ())
    return elements


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_tags_of_random_sentences_equal_those_of_the_source(opened, count):
    rng = random.Random(count)
    texts = [marked(rng, []) for _ in range(count * 3 // 4)]
    chosen = [rng.sample(KEPT, rng.randint(1, 4)) for _ in range(count - len(texts))]
    with_placeholders = []
    for placeholders in chosen:
        left = list(placeholders)
        text = marked(rng, left)
        with_placeholders.append(" ".join([text, *left]))
    texts += with_placeholders
    translations = [result["translation"] for result in opened(texts, tag_handling="xml")]
    for text, translation in zip(texts, translations, strict=True):
        assert tree(translation) == tree(text), text
    for placeholders, translation in zip(chosen, translations[-len(chosen) :], strict=True):
        for placeholder in placeholders:
            assert translation.count(placeholder) == 1, (placeholder, translation)
    assert np.mean([bool(re.sub("<[^>]*>", "", translation).strip()) for translation in translations]) > 0.9


def test_plain_text_is_translated_as_without_the_option(opened):
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(100)]
    plain = opened(texts)
    assert opened(texts, tag_handling="html") == opened(texts, placeholders="off") == plain
    bold = opened([f"<b>{text}</b>" for text in texts], tag_handling="html")
    assert [result["translation"] for result in bold] == [f"<b>{result['translation']}</b>" for result in plain]
    assert [result["score"] for result in bold] == [result["score"] for result in plain]


def test_text_without_tags_is_escaped_and_not_aligned(opened, monkeypatch):
    monkeypatch.setattr(opened.forced, "attention", None)  # which raises where it is called
    plain = opened(["A man & a dog run."])[0]["translation"]
    marked = opened(["A man &amp; a dog run.", "A man runs."], tag_handling="html")
    assert marked[0]["translation"] == plain.replace("&", "&amp;")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A man in a <b>red jacket</b> rides a bicycle.", "roten Jacke"),
        ("<i>A man</i> in a red jacket.", "Ein Mann"),
        ("A <a href='x?a=1&amp;b'>dog</a> runs.", "Hund"),
    ],
)
def test_tags_are_around_the_translated_words(opened, text, expected):
    (result,) = opened(text, tag_handling="html")
    assert re.search(r"<(\w+)[^>]*>(.*)</\1>", result["translation"])[2] == expected
    assert re.findall("<[^>]*>", result["translation"]) == re.findall("<[^>]*>", text)


def aligned(text, target, pairs, handling="html", placeholders=None):
    """Writes the markup of a text into a translation whose word j is the source's word pairs[j]."""
    markup = read_markup(text, handling, placeholders)
    spans = [[match.span() for match in re.finditer(r"\w+|[^\w\s]", side)] for side in (markup.text, target)]
    weights = np.zeros((len(spans[1]), len(spans[0])), np.float32)
    weights[np.arange(len(pairs)), pairs] = 1
    line = Line("", markup.text, "", (None,), ((),))
    return write_markup(markup, Alignment(line, [Sentence(markup.text, spans[0], target, spans[1], weights)]))


@pytest.mark.parametrize(
    ("text", "target", "pairs", "expected"),
    [
        ("a <b>b c</b> d", "A B C D", [0, 1, 2, 3], "A <b>B C</b> D"),
        ("a <b>b <i>c</i></b> d", "C B A D", [2, 1, 0, 3], "<b><i>C</i> B</b> A D"),
        ("<p>a</p><p>b</p>", "B A", [1, 0], "<p>B</p> <p>A</p>"),
        ("a <br> b", "A B", [0, 1], "A <br> B"),
        ("a<br/>b", "A B", [0, 1], "A<br/>B"),
        ("a <img src='x'>b.", "B A.", [1, 0, 2], "<img src='x'>B A."),
        ("a <b>b</b> <i>c</i>", "X", [1], "<b>X</b><i></i>"),
        ("a <b></b>b", "A B", [0, 1], "A <b></b>B"),
        ("a &lt;b&gt; &amp; c", "A < B > & C", [0, 1, 2, 3, 4, 5], "A &lt; B &gt; &amp; C"),
        ("a <b>b <i>c</b> d</i>", "A B C D", [0, 1, 2, 3], "A <b>B <i>C</b> D</i>"),
        ("<ul><li>a", "A", [0], "<ul><li>A"),
        ("a <code>x = 1</code>, b", "A, B", [0, 1, 2], "A <code>x = 1</code>, B"),
        ('a <span translate="no">New <b>York</b></span> b', "B A", [1, 0], '<span translate="no">New <b>York</b></span> B A'),
        ("a <!-- b --> c", "A C", [0, 1], "A <!-- b --> C"),
        ("<b>a</b> b <b>c</b>", "B A C", [1, 0, 2], "B <b>A</b> <b>C</b>"),
    ],
)  # fmt: skip
def test_tags_by_alignment(text, target, pairs, expected):
    written = aligned(text, target, pairs)
    assert written == expected
    assert Counter(re.findall("<[^>]*>", written)) == Counter(re.findall("<[^>]*>", text))


@pytest.mark.parametrize(
    ("text", "target", "pairs", "expected"),
    [
        ("a {0} b", "B A", [1, 0], "{0} B A"),
        ("a ({0}), b.", "A, B.", [0, 1, 2, 3], "A ({0}), B."),
        ("a %s.", "A.", [0, 1], "A %s."),
        ("see https://x.org/a_b. a b", "See. A B", [0, 1, 2, 3], "See https://x.org/a_b. A B"),
        ("{name}: a", ": A", [0, 1], "{name}: A"),
        ("a {0}", "\u4e00\u4e8c", [0], "\u4e00\u4e8c{0}"),
    ],
)
def test_placeholders_by_alignment(text, target, pairs, expected):
    assert aligned(text, target, pairs, "", PLACEHOLDERS["auto"]) == expected


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (
            "auto",
            "{0} {name} ${x} {{ x }} %s %1$d %(n)s %5.2f",
            ["{0}", "{name}", "${x}", "{{", "x", "}}", "%s", "%1$d", "%(n)s", "%5.2f"],
        ),
        ("auto", "100% sure, 50 %, 5 km, a@b, {a b}, C++", []),
        ("auto", "http://a.b/c. www.x.org, me@x.org", ["http://a.b/c", "www.x.org", "me@x.org"]),
        ("all", "5 km, 3.5 GHz, 10% of 1,000 and 7 dogs", ["5 km", "3.5 GHz", "10%"]),
    ],
)
def test_what_is_a_placeholder(kind, text, expected):
    expected = ["{{ x }}" if part == "{{" else part for part in expected if part not in ("x", "}}")]
    assert [match[0] for match in PLACEHOLDERS[kind].finditer(text)] == expected


def test_placeholders_that_a_translation_loses_are_put_back(opened):
    texts = ["A man sits at www.example.com and reads.", "%(name)s runs.", "See me@example.com now.", "{0}"]
    lost = opened(texts, placeholders="off")
    assert "www.example.com" not in lost[0]["translation"] and "%(name)s" not in lost[1]["translation"]
    for text, result in zip(texts, opened(texts), strict=True):
        (kept,) = (match[0] for match in PLACEHOLDERS["auto"].finditer(text))
        assert result["translation"].count(kept) == 1
    assert opened("A dog runs 5 km.", placeholders="all")[0]["translation"].count("5 km") == 1


@pytest.mark.parametrize("text", ["a <b>b", "a </b>", "<b><i>a</b></i>", "a & b", "a < b"])
def test_xml_that_is_not_well_formed_is_refused(opened, text):
    with pytest.raises(RequestError, match=r"^sentence 1 is not well-formed XML: .* at column \d+$"):
        opened(text, tag_handling="xml")
    assert "error" in opened([text, "A dog."], tag_handling="xml")[0]


def test_options_that_do_not_exist_are_refused(opened):
    with pytest.raises(RequestError, match="tag-handling 'json'; expected html, xml or none"):
        opened("a", tag_handling="json")
    with pytest.raises(RequestError, match="placeholders 'some'; expected auto, all or off"):
        opened("a", placeholders="some")


def test_addresses_are_searched_once_in_a_text_without_blanks():
    """From every character on, a text of 100,000 letters took minutes."""
    for pattern in (PLACEHOLDERS["auto"], PLACEHOLDERS["all"]):
        assert pattern is not None and pattern.search("a" * 300_000) is None
        assert pattern.findall("See a.b+c@example.com (me@x.de), no@, @x.de.") == ["a.b+c@example.com", "me@x.de"]

"""Sentences with personal data and their places, composed from templates and the values of Faker (MIT).

    pip install faker
    python scripts/examples/personal_data.py OUTPUT DESCRIPTIONS [COUNT]

DESCRIPTIONS are plain sentences without personal data, one a line (descriptions.txt of software_topics.py). Writes
train.jsonl with COUNT texts, test.jsonl and test-locales.jsonl: {"text", "spans": [{"start", "end", "label"}]} a line.
Templates of the tests do not occur in train.jsonl; the countries of test-locales.jsonl do not either.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faker

TEMPLATES = Path(__file__).with_name("templates.txt")
HELD_OUT = 5  # every fifth template
LOCALES = {  # of the sentences of a language
    "en": [
        *("en_US", "en_GB", "en_CA", "en_IN", "de_DE", "fr_FR", "es_ES"),
        *("it_IT", "nl_NL", "pt_BR", "pl_PL", "sv_SE", "cs_CZ"),
    ],
    "de": ["de_DE", "de_AT"],
    "fr": ["fr_FR", "fr_CA"],
    "es": ["es_ES", "es_MX"],
}
NEW_LOCALES = {
    "en": ["en_AU", "en_NZ", "en_IE", "da_DK", "fi_FI", "pt_PT", "hu_HU"],
    "de": ["de_CH"],
    "fr": ["fr_CH"],
    "es": ["es_AR"],
}
MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
}
DATES = {  # day, month, year, name of the month
    "en": ["{1:02}/{0:02}/{2}", "{0}/{1}/{2}", "{2}-{1:02}-{0:02}", "{3} {0}, {2}", "{0} {3} {2}", "{0}th of {3} {2}"],
    "de": ["{0}.{1}.{2}", "{0:02}.{1:02}.{2}", "{0}. {3} {2}", "{2}-{1:02}-{0:02}"],
    "fr": ["{0:02}/{1:02}/{2}", "{0} {3} {2}", "{2}-{1:02}-{0:02}"],
    "es": ["{0:02}/{1:02}/{2}", "{0} de {3} de {2}", "{0}-{1}-{2}"],
}
LABELS = {
    "person": "PERSON",
    "first": "PERSON",
    "last": "PERSON",
    "email": "EMAIL",
    "phone": "PHONE",
    "street": "STREET",
    "postcode": "POSTCODE",
    "city": "CITY",
    "date": "DATE",
    "company": "COMPANY",
    "iban": "IBAN",
    "card": "CARD",
    "ip": "IP",
    "id": "ID",
}
DOMAINS = ("gmail.com", "yahoo.com", "outlook.com", "web.de", "orange.fr", "mail.com", "proton.me")
TITLES = ("Mr", "Mrs", "Ms", "Dr.", "Prof.", "Mr.", "Ms.")


def grouped(text: str, size: int = 4, separator: str = " ") -> str:
    """Returns a number in groups.

    Args:
        text: The number.
        size: Characters of a group.
        separator: What stands between groups.
    """
    return separator.join(text[i : i + size] for i in range(0, len(text), size))


class Values:
    """Values of the slots of templates, of one locale.

    Args:
        fake: Faker of the locale.
        language: Language of the sentence.
        rng: Random numbers.
    """

    def __init__(self, fake: Any, language: str, rng: random.Random) -> None:
        self.fake, self.language, self.rng = fake, language, rng

    def of(self, slot: str) -> str:
        """Returns a value.

        Args:
            slot: Name of the slot.
        """
        made: Callable[[], Any] = getattr(self, slot, None) or getattr(self.fake, slot)
        return str(made()).replace("\n", ", ")

    def first(self) -> str:
        """First name."""
        return str(self.fake.first_name())

    def last(self) -> str:
        """Last name."""
        return str(self.fake.last_name())

    def person(self) -> str:
        """Name of a person."""
        first, last, middle = self.first(), self.last(), self.first()
        forms = [f"{first} {last}"] * 8 + [
            f"{first[0]}. {last}",
            f"{first} {middle[0]}. {last}",
            f"{first} {middle} {last}",
        ]
        return self.rng.choice([*forms, f"{last}, {first}"])  # fmt: skip

    def email(self) -> str:
        """E-mail address."""
        if self.rng.random() < 0.4:
            return str(self.fake.ascii_email())
        first, last = (re.sub(r"[^a-z]", "", name.lower()) or "x" for name in (self.first(), self.last()))
        name = self.rng.choice(
            [f"{first}.{last}", f"{first[0]}{last}", f"{first}_{last}", f"{last}{self.rng.randint(1, 99)}", first]
        )
        return f"{name}@{self.rng.choice([*DOMAINS, self.fake.domain_name()])}"  # fmt: skip

    def phone(self) -> str:
        """Phone number."""
        return str(self.fake.phone_number())

    def street(self) -> str:
        """Street with number."""
        return str(self.fake.street_address())

    def date(self) -> str:
        """Date."""
        day, month, year = self.rng.randint(1, 28), self.rng.randint(1, 12), self.rng.randint(1935, 2029)
        name = MONTHS[self.language].split()[month - 1]
        return self.rng.choice(DATES[self.language]).format(day, month, year, name)

    def iban(self) -> str:
        """Account number."""
        number = str(self.fake.iban())
        return grouped(number) if self.rng.random() < 0.5 else number

    def card(self) -> str:
        """Number of a payment card."""
        number = str(self.fake.credit_card_number())
        return self.rng.choice([number, grouped(number), grouped(number, 4, "-")])

    def ip(self) -> str:
        """Address of a computer."""
        return str(self.fake.ipv4() if self.rng.random() < 0.8 else self.fake.ipv6())

    def id(self) -> str:
        """Number of a person, such as of social security."""
        return str(self.fake.ssn())

    def title(self) -> str:
        """Title before a last name."""
        return self.rng.choice(TITLES)

    def user(self) -> str:
        """User of a computer, no personal data."""
        return self.rng.choice(["root", "admin", "backup", "nobody", "guest", "deploy"])

    def time(self) -> str:
        """Time of day."""
        hour, minute = self.rng.randint(0, 23), self.rng.randint(0, 59)
        short, second = f"{hour:02}:{minute:02}", self.rng.randint(0, 59)
        return self.rng.choice([short, f"{short}:{second:02}", f"{hour % 12 + 1} {'ap'[hour // 12]}m"])

    def number(self) -> str:
        """Number of things."""
        return str(self.rng.randint(2, 10 ** self.rng.randint(1, 5)))

    def order(self) -> str:
        """Number of an order."""
        number = self.rng.randint(10**4, 10 ** self.rng.randint(5, 12))
        return self.rng.choice(["", "#", "No. ", "A-", "ORD-", "2024/"]) + str(number)

    def amount(self) -> str:
        """Amount of money."""
        value = f"{self.rng.uniform(1, 10 ** self.rng.randint(1, 5)):,.2f}"
        return self.rng.choice(["${}", "{} EUR", "€{}", "{} €", "{} USD", "£{}"]).format(value)

    def version(self) -> str:
        """Version of software."""
        return ".".join(str(self.rng.randint(0, 30)) for _ in range(self.rng.randint(2, 4)))

    def hash(self) -> str:
        """Digest."""
        return f"{self.rng.getrandbits(160):040x}"[: self.rng.choice([7, 12, 40])]

    def url(self) -> str:
        """Address of a page."""
        return self.rng.choice(["https://", "http://", "www."]) + f"{self.fake.domain_name()}/{self.fake.uri_path()}"


def filled(template: str, values: Values) -> tuple[str, list[dict[str, Any]]]:
    """Returns a text, and where it has personal data.

    Args:
        template: Text with slots.
        values: Their values.
    """
    text, spans = "", []
    for part in re.split(r"(\{[a-z]+\})", template):
        if re.fullmatch(r"\{[a-z]+\}", part):
            value = values.of(part[1:-1])
            if label := LABELS.get(part[1:-1]):
                spans.append({"start": len(text), "end": len(text) + len(value), "label": label})
            text += value
        else:
            text += part
    return text, spans


def joined(
    parts: list[tuple[str, list[dict[str, Any]]]], separator: str, rng: random.Random
) -> tuple[str, list[dict[str, Any]]]:
    """Returns several texts as one, some of them in upper or lower case.

    Args:
        parts: Texts with their spans.
        separator: What stands between them.
        rng: Random numbers.
    """
    text, spans = "", []
    for part, own in parts:
        text += separator * bool(text)
        spans += [{**span, "start": span["start"] + len(text), "end": span["end"] + len(text)} for span in own]
        text += part
    chance = rng.random()
    changed = text.lower() if chance < 0.08 else text.upper() if chance < 0.11 else text
    return (changed if len(changed) == len(text) else text), spans


def read_templates() -> dict[str, list[str]]:
    """Returns the templates by language, those without personal data as "LANGUAGE negative"."""
    found: dict[str, list[str]] = {}
    for line in TEMPLATES.read_text().splitlines():
        if re.fullmatch(r"\[.*\]", line):
            found[name := line[1:-1]] = []
        elif line and not line.startswith("#"):
            found[name].append(line.replace("\\n", "\n"))
    return found


def compose(
    count: int, locales: dict[str, list[str]], held_out: bool, plain: list[str], seed: int
) -> list[dict[str, Any]]:
    """Composes texts.

    Args:
        count: Number of texts.
        locales: Locales by language.
        held_out: Whether to use the templates that are held out, or the others.
        plain: Sentences without personal data.
        seed: Seed of all random numbers.
    """
    rng = random.Random(seed)
    faker.Faker.seed(seed)
    fakes = {name: faker.Faker(name) for names in locales.values() for name in names}
    templates = {
        name: [each for i, each in enumerate(lines) if (i % HELD_OUT == HELD_OUT - 1) == held_out]
        for name, lines in read_templates().items()
    }
    rows = []
    for _ in range(count):
        language = rng.choices(list(locales), [6, 2, 2, 2])[0]
        values = Values(fakes[rng.choice(locales[language])], language, rng)
        if rng.random() < 0.12:
            rows.append({"text": rng.choice(plain), "spans": []})
            continue
        chosen = []
        for _ in range(rng.choices([1, 2, 3, 4], [4, 3, 2, 1])[0]):
            chance = rng.random()
            if chance < 0.12 and language == "en":
                chosen.append((rng.choice(plain), []))
            else:
                name = f"{language} negative" if chance < 0.25 else language
                chosen.append(filled(rng.choice(templates[name]), values))
        text, spans = joined(chosen, rng.choice([" ", " ", "\n"]), rng)
        rows.append({"text": text, "spans": spans})
    return rows


def is_plain(sentence: str) -> bool:
    """Returns whether a sentence of a description names no person and no address.

    Args:
        sentence: The sentence.
    """
    named = re.search(r"@|\b(by|from|of|and) [A-Z][a-z]+ [A-Z]|\d{4}|Inc\.|Ltd|GmbH|[A-Z]\. [A-Z]", sentence)
    return 30 < len(sentence) < 200 and not named


def main(output: Path, descriptions: Path, count: int = 60_000) -> None:
    """Writes the files.

    Args:
        output: Folder.
        descriptions: Plain sentences, one a line.
        count: Number of texts of train.jsonl.
    """
    sentences = [s for line in descriptions.read_text().splitlines() for s in line.split(". ")[1:]]
    plain = sorted(set(filter(is_plain, sentences)))
    random.Random(0).shuffle(plain)
    held = plain[:2000]
    parts = {
        "train": (count, LOCALES, False, plain[2000:], 1),
        "test": (1500, LOCALES, True, held, 2),
        "test-locales": (1500, NEW_LOCALES, True, held, 3),
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, arguments in parts.items():
        rows = compose(*arguments)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (output / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}: {len(rows):,} texts, {sum(len(row['spans']) for row in rows):,} entities")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:4]))

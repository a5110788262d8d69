"""Sentences with personal data and their places, composed from templates and the values of Faker (MIT).

    pip install faker
    python scripts/examples/personal_data.py OUTPUT COUNT LANGUAGE=FILE...

FILE has plain texts of a language (en, de, fr, es), one a line, such as descriptions-en.txt of software_topics.py; of
them sentences without names and numbers are used. They stand between composed ones, and values stand in them. Writes
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
CUES = {  # words before a value within a plain sentence
    "en": {
        "person": "by|with|from|and|to|for|Mr|Mrs|Dr.|told|asked|user|author|said|thanks to|",
        "email": "mail|e-mail|at|to|contact|write to|from|",
        "phone": "call|phone|tel.|at|on|mobile|fax|number|dial|",
        "street": "at|address|to|on|lives at|office|",
        "city": "in|from|to|near|of|at|",
        "date": "on|since|until|from|dated|before|after|by|",
        "company": "at|by|from|of|for|with|company|works for|",
        "iban": "account|IBAN|to|from|",
        "card": "card|number|with|credit card|",
        "ip": "from|host|address|server|IP|to|",
        "id": "social security number|ID|number|insurance|",
    },
    "de": {
        "person": "von|mit|und|an|für|Herr|Frau|Dr.|sagte|Autor|",
        "email": "Mail|E-Mail|an|unter|von|",
        "phone": "Telefon|Tel.|unter|Handy|Fax|Nummer|",
        "street": "in der|Adresse|nach|wohnt|Büro|",
        "city": "in|aus|nach|bei|von|",
        "date": "am|seit|bis|vom|vor|nach|",
        "company": "bei|von|der|für|Firma|",
        "iban": "Konto|IBAN|auf|von|",
        "card": "Karte|Nummer|mit|",
        "ip": "von|Server|Adresse|IP|",
        "id": "Nummer|Versicherung|",
    },
    "fr": {
        "person": "de|avec|et|à|pour|M.|Mme|dit|auteur|par|",
        "email": "courriel|à|de|adresse|",
        "phone": "téléphone|tél.|au|appelez le|fax|",
        "street": "au|adresse|à|habite|",
        "city": "à|de|près de|vers|",
        "date": "le|depuis le|avant le|du|après le|",
        "company": "chez|de|par|pour|société|",
        "iban": "compte|IBAN|sur|de|",
        "card": "carte|numéro|avec|",
        "ip": "depuis|serveur|adresse|IP|",
        "id": "numéro|sécurité sociale|",
    },
    "es": {
        "person": "de|con|y|a|para|Sr.|Sra.|dice|autor|por|",
        "email": "correo|a|de|en|",
        "phone": "teléfono|tel.|al|llame al|fax|",
        "street": "en|dirección|a|vive en|",
        "city": "en|de|cerca de|a|",
        "date": "el|desde el|antes del|del|hasta el|",
        "company": "en|de|por|para|empresa|",
        "iban": "cuenta|IBAN|a|de|",
        "card": "tarjeta|número|con|",
        "ip": "desde|servidor|dirección|IP|",
        "id": "número|seguro|",
    },
}
FIELDS = (*CUES["en"], "postcode")
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
    templates: dict[str, list[str]] = {}
    for line in TEMPLATES.read_text().splitlines():
        if re.fullmatch(r"\[.*\]", line):
            templates[name := line[1:-1]] = []
        elif line and not line.startswith("#"):
            templates[name].append(line.replace("\\n", "\n"))
    return templates


class Writer:
    """Texts of one part of the data.

    Args:
        locales: Locales by language.
        held_out: Whether to use the templates that are held out, alone, or the others, with changed words.
        plain: Sentences without personal data, by language.
        seed: Seed of all random numbers.
    """

    def __init__(self, locales: dict[str, list[str]], held_out: bool, plain: dict[str, list[str]], seed: int) -> None:
        self.locales, self.held_out, self.plain, self.rng = locales, held_out, plain, random.Random(seed)
        faker.Faker.seed(seed)
        self.fakes = {name: faker.Faker(name) for names in locales.values() for name in names}
        self.templates = {
            name: [line for i, line in enumerate(lines) if (i % HELD_OUT == HELD_OUT - 1) == held_out]
            for name, lines in read_templates().items()
        }
        self.words = {name: [word for line in lines[:5000] for word in line.split()] for name, lines in plain.items()}

    def text(self) -> dict[str, Any]:
        """Composes a text."""
        language = self.rng.choices(list(self.locales), [6, 2, 2, 2])[0]
        values = Values(self.fakes[self.rng.choice(self.locales[language])], language, self.rng)
        parts = [self.part(language, values) for _ in range(self.rng.choices([1, 2, 3, 4], [4, 3, 2, 1])[0])]
        text, spans = joined(parts, self.rng.choice([" ", " ", "\n"]), self.rng)
        return {"text": text, "spans": spans}

    def part(self, language: str, values: Values) -> tuple[str, list[dict[str, Any]]]:
        """Composes a sentence.

        Args:
            language: Its language.
            values: Values of its slots.
        """
        rng, chance = self.rng, self.rng.random()
        if chance < 0.25:
            return rng.choice(self.plain[language]), []
        if chance < 0.35:
            return filled(self.changed(rng.choice(self.templates[f"{language} negative"]), language), values)
        if self.held_out or chance < 0.65:
            return filled(self.changed(rng.choice(self.templates[language]), language), values)
        if chance < 0.9:
            return filled(self.inserted(language), values)
        names = rng.sample(FIELDS, rng.randint(2, 5))
        if rng.random() < 0.4:
            return filled(rng.choice([",", ";", "\t", " | ", ", "]).join(f"{{{name}}}" for name in names), values)
        labels = [rng.choice([name.title(), rng.choice(self.words[language])]).strip(".,:") for name in names]
        pairs = zip(labels, names, strict=True)
        return filled(rng.choice(["\n", "; ", ", "]).join(f"{label}: {{{name}}}" for label, name in pairs), values)

    def changed(self, template: str, language: str) -> str:
        """Returns a template with some words replaced or left out; one that is held out stays.

        Args:
            template: Template.
            language: Its language.
        """
        rate = 0 if self.held_out else self.rng.choice([0, 0.15, 0.4])
        words = []
        for word in re.split(r"( |\n)", template):
            if "{" not in word and word.strip() and self.rng.random() < rate:
                word = self.rng.choice([self.rng.choice(self.words[language]), ""])
            words.append(word)
        return re.sub(r"  +", " ", "".join(words)).strip()

    def inserted(self, language: str) -> str:
        """Returns a plain sentence with slots between its words.

        Args:
            language: Its language.
        """
        words = self.rng.choice(self.plain[language]).replace("{", "(").replace("}", ")").split(" ")
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            name = self.rng.choice(list(CUES[language]))
            cue = self.rng.choice(CUES[language][name].split("|"))
            slot = self.rng.choice(["{%s}"] * 6 + ["({%s})", "{%s},", '"{%s}"', "<{%s}>", "{%s}."]) % name
            words.insert(self.rng.randint(0, len(words)), f"{cue} {slot}".strip())
        return " ".join(words)


def plain_sentences(path: Path, names: set[str]) -> list[str]:
    """Returns the sentences of a file that have no name and no number, in random order.

    Args:
        path: Texts, one a line.
        names: Names of people and places.
    """
    sentences = set()
    for line in path.read_text().splitlines():
        for sentence in re.split(r"(?<=[.!?]) ", line):
            odd = re.search(r"@|\d|Inc\.|Ltd|GmbH|[A-Z]\. [A-Z]|://|www\.", sentence)
            if 20 < len(sentence) < 200 and not odd and names.isdisjoint(re.findall(r"\w+", sentence)):
                sentences.add(sentence)
    shuffled = sorted(sentences)
    random.Random(0).shuffle(shuffled)
    return shuffled


def known_names() -> set[str]:
    """Returns names of people and places of Faker."""
    faker.Faker.seed(0)
    fakes = [faker.Faker(name) for names in LOCALES.values() for name in names]
    made = {made() for fake in fakes for make in (fake.first_name, fake.last_name, fake.city) for made in [make] * 1500}
    return {word for name in made for word in name.split() if len(word) > 2 and word[0].isupper()}


def main(output: Path, count: int, texts: list[tuple[str, Path]]) -> None:
    """Writes the files.

    Args:
        output: Folder.
        count: Number of texts of train.jsonl.
        texts: Languages and files of plain texts.
    """
    names = known_names()
    plain: dict[str, list[str]] = {}
    for language, path in texts:
        plain.setdefault(language, []).extend(plain_sentences(path, names))
    held = {language: sentences[::20] for language, sentences in plain.items()}
    kept = {language: [line for i, line in enumerate(lines) if i % 20] for language, lines in plain.items()}
    writers = {
        "train": (count, Writer(LOCALES, False, kept, 1)),
        "test": (1500, Writer(LOCALES, True, held, 2)),
        "test-locales": (1500, Writer(NEW_LOCALES, True, held, 3)),
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, (number, writer) in writers.items():
        rows = [writer.text() for _ in range(number)]
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"{name}: {len(rows):,} texts, {sum(len(row['spans']) for row in rows):,} entities")


if __name__ == "__main__":
    files = [argument.split("=", 1) for argument in sys.argv[3:]]
    main(Path(sys.argv[1]), int(sys.argv[2]), [(language, Path(name)) for language, name in files])

"""Sentence splitting by sentencex, with the abbreviations and quotes of some 300 languages."""

from __future__ import annotations

# ISO 639-3 to 639-1, as sentencex names languages, of those that models name by three letters; others go by English
LETTERS = (
    "ara-ar ben-bn bul-bg cat-ca ces-cs dan-da deu-de ell-el est-et fin-fi fra-fr guj-gu heb-he hin-hi hrv-hr hun-hu",
    "hye-hy ind-id isl-is ita-it jpn-ja kan-kn kat-ka kaz-kk kor-ko lit-lt lvs-lv mal-ml mar-mr mya-my nld-nl nob-nb",
    "pan-pa pes-fa pol-pl por-pt ron-ro rus-ru slk-sk slv-sl spa-es srp-sr swe-sv tam-ta tel-te tha-th tur-tr ukr-uk",
    "urd-ur vie-vi zho-zh",
)
SHORT = {"eng": "en", **dict(pair.split("-") for line in LETTERS for pair in line.split())}
COMMON = frozenset(SHORT.values())
# Codes of languages with less text, of the standard forms of macrolanguages, and former codes. Without them, Albanian
# (als_Latn of NLLB) would be Alemannic, whose code in sentencex is als.
OTHERS = (
    "afr-af als-sq amh-am arb-ar asm-as azj-az bel-be bos-bs cmn-zh cym-cy ekk-et epo-eo eus-eu gle-ga glg-gl iw-he",
    "jav-jv khk-mn khm-km kir-ky lao-lo mkd-mk mlt-mt nno-nn no-nb npi-ne ory-or sin-si som-so swa-sw swh-sw tgk-tg",
    "tgl-tl tuk-tk uzn-uz xho-xh yor-yo zsm-ms zul-zu",
)
ALIASES = SHORT | dict(pair.split("-") for line in OTHERS for pair in line.split())


def split_sentences(text: str, language: str = "") -> list[str]:
    """Splits a text into sentences.

    Args:
        text: The text.
        language: Language code such as de, de_DE or deu_Latn; "" or an unknown one: English.

    Returns:
        The sentences, without surrounding whitespace.
    """
    import sentencex  # type: ignore[import-untyped]

    return [sentence for part in sentencex.segment(language_code(language) or "en", text) if (sentence := part.strip())]


def language_code(name: str) -> str:
    """Returns the ISO 639-1 code of a language where it is known, else the beginning of its name.

    Args:
        name: Name of a language in a model, such as de, de_DE or deu_Latn.
    """
    code = name.replace("-", "_").partition("_")[0].lower()
    return ALIASES.get(code, code)

"""Numbers in a text, whatever separators it uses.

Notable here:
- what separates decimals is decided by the text itself where one of its numbers shows it (1.234,50), else by region and
  language
- a number may stand within an identifier or a date; such are candidates too, since only the reader knows what is meant

Source: separators of regions from Unicode CLDR, by `babel`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from babel import Locale, UnknownLocaleError
from babel.numbers import get_decimal_symbol

from pippin.session.extraction.candidates import Candidate

_BLANKS: Final = "\u00a0\u202f\u2009"
_CHAIN: Final = re.compile(rf"\d+(?:[.,'’{_BLANKS} ]\d+)*")
_SIGN: Final = re.compile(r"(?<![\w.,)\]-])[-\u2212+]$")  # with a blank behind it, it is a dash
_TRAILING_MINUS: Final = re.compile(r"[-\u2212](?![\w-])")
_EXPONENT: Final = re.compile(r"[eE][+-]?\d{1,3}(?![\w.])")
_WORD: Final = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)?")
_BLANK_GROUPS: Final = frozenset((
    "fr", "pl", "cs", "sk", "ru", "uk", "bg", "sv", "nb", "nn", "no", "fi", "hu", "pt", "lv", "lt", "et",
))  # fmt: skip
_SMALL: Final = {
    "en": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn zwanzig",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept "
    "dix-huit dix-neuf vingt",
    "es": "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis "
    "diecisiete dieciocho diecinueve veinte",
    "it": "zero uno due tre quattro cinque sei sette otto nove dieci undici dodici tredici quattordici quindici sedici "
    "diciassette diciotto diciannove venti",
}
_TENS: Final = {
    "en": "thirty forty fifty sixty seventy eighty ninety hundred",
    "de": "dreißig vierzig fünfzig sechzig siebzig achtzig neunzig hundert",
    "fr": "trente quarante cinquante soixante soixante-dix quatre-vingts quatre-vingt-dix cent",
    "es": "treinta cuarenta cincuenta sesenta setenta ochenta noventa cien",
    "it": "trenta quaranta cinquanta sessanta settanta ottanta novanta cento",
}
_ARTICLES: Final = frozenset(("un", "uno"))  # which are rarely meant as numbers


def _words(language: str) -> dict[str, int]:
    small, tens = _SMALL[language].split(), _TENS[language].split()
    found = {word: value for value, word in enumerate(small) if word not in _ARTICLES}
    found |= {word: 10 * value for value, word in enumerate(tens, 3)}
    joined = {
        "en": ("twenty", 7, "{ten}-{unit}"),
        "de": ("zwanzig", 7, "{unit}und{ten}"),
        "fr": ("vingt", 4, "{ten}-{unit}"),
    }
    if language in joined:
        first, count, form = joined[language]
        units = ["ein", *small[2:10]] if language == "de" else small[1:10]
        for tens_value, ten in enumerate([first, *tens[:count]], 2):
            found |= {form.format(ten=ten, unit=unit): 10 * tens_value + n for n, unit in enumerate(units, 1)}
    return found


_BY_LANGUAGE: Final = {language: _words(language) for language in _SMALL}


def find_numbers(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """The numbers in a text, in its order; those of currencies and units without them.

    Args:
        text: the text.
        language: its language, for number words and where the text does not show its decimal separator.
        region: a country such as "CH", for the same.

    >>> [found.value for found in find_numbers("Total: 1.234,50 EUR for three, i. e. 411.50 each", language="en")]
    ['1234.50', '3', '411.50']
    """
    chains = [(found.start(), found[0]) for found in _CHAIN.finditer(text)]
    decimal, is_shown = _decimal_separator([chain for _, chain in chains], language, region)
    found = [each for at, chain in chains for each in _read_chain(text, at, chain, decimal, is_shown, language)]
    names = _BY_LANGUAGE.get((language or "").partition("-")[0], {})
    if names:
        words = ((word.start(), word.end(), names.get(word[0].lower())) for word in _WORD.finditer(text))
        found += [Candidate(start, end, str(value)) for start, end, value in words if value is not None]
    exponents = {each.end for each in found if "e" in text[each.start : each.end].lower()}
    found = [each for each in found if each.end not in exponents or not text[each.start : each.end].isdigit()]
    return sorted(found, key=lambda each: (each.start, -each.end))


def decimal_separator(language: str | None, region: str | None) -> str:
    """The decimal separator of a language or region."""
    both = f"{language}_{region}" if language and region else None
    for name in filter(None, (both, f"und_{region}" if region else None, language)):
        try:
            return get_decimal_symbol(Locale.parse(name))
        except (UnknownLocaleError, ValueError):
            continue
    return "."


def _decimal_separator(chains: list[str], language: str | None, region: str | None) -> tuple[str, bool]:
    """The decimal separator, and whether numbers of the text show it."""
    votes: Counter[str] = Counter()
    for chain in chains:
        marks = re.findall(r"[.,]", chain)
        if len(set(marks)) == 2 and marks[-1] != marks[0] and marks.count(marks[-1]) == 1:
            votes[marks[-1]] += 2
        elif len(marks) == 1 and not re.search(r"[.,]\d{3}$", chain):
            votes[marks[0]] += 1
        elif len(marks) > 1 and len(set(marks)) == 1 and _is_grouped(chain, marks[0]):
            votes[",."[marks[0] == ","]] += 2
    if votes and votes["."] != votes[","]:
        return votes.most_common(1)[0][0], True
    found = decimal_separator(language, region)
    return found if found in ".," else ".", False


def _is_grouped(chain: str, mark: str) -> bool:
    """Whether a mark separates groups of three digits, or two as in India."""
    first, *groups = chain.split(mark)
    return 0 < len(first) <= 3 and len(groups[-1]) == 3 and all(len(group) in (2, 3) for group in groups)


def _read_chain(text: str, at: int, chain: str, decimal: str, is_shown: bool, language: str | None) -> list[Candidate]:
    """The readings of digits with separators between them."""
    blank = re.search(rf"[ {_BLANKS}]", chain)
    if blank:
        grouped = re.fullmatch(rf"\d{{1,3}}(?:[ {_BLANKS}]\d{{3}})+(?:[.,]\d+)?", chain)
        if grouped and (" " not in chain or (language or "")[:2] in _BLANK_GROUPS or re.search(r"[.,]\d\d$", chain)):
            whole = _candidate(text, at, re.sub(rf"[ {_BLANKS}]", "", chain).replace(",", "."), len(chain))
            if " " not in chain:
                return [whole]
            return [whole, *_parts(text, at, chain, decimal, is_shown, language)]
        return _parts(text, at, chain, decimal, is_shown, language)
    marks = re.findall(r"[.,'’]", chain)
    if not marks:
        return [_candidate(text, at, chain, len(chain))]
    plain = re.sub(r"['’]", "", chain)
    if "'" in chain or "’" in chain:
        if re.fullmatch(r"\d{1,3}(?:['’]\d{3})+(?:[.,]\d+)?", chain):
            return [_candidate(text, at, plain.replace(",", "."), len(chain))]
        return _parts(text, at, chain, decimal, is_shown, language)
    last = marks[-1]
    if len(set(marks)) == 2 and marks.count(last) == 1 and _is_grouped(chain[: chain.rindex(last)], marks[0]):
        return [_candidate(text, at, chain.replace(marks[0], "").replace(last, "."), len(chain))]
    if len(marks) == 1:
        could_group = bool(re.fullmatch(r"[1-9]\d{0,2}[.,]\d{3}", chain))
        if could_group and last != decimal:
            return [_candidate(text, at, chain.replace(last, ""), len(chain), ambiguous=not is_shown)]
        value = chain.replace(last, ".")
        return [_candidate(text, at, value, len(chain), ambiguous=could_group and not is_shown)]
    if len(set(marks)) == 1 and _is_grouped(chain, last):
        return [_candidate(text, at, chain.replace(last, ""), len(chain))]
    return [_candidate(text, at + found.start(), found[0], len(found[0])) for found in re.finditer(r"\d+", chain)]


def _parts(text: str, at: int, chain: str, decimal: str, is_shown: bool, language: str | None) -> list[Candidate]:
    """The readings of what blanks or apostrophes separate."""
    return [
        each
        for part in re.finditer(rf"[^'’ {_BLANKS}]+", chain)
        for each in _read_chain(text, at + part.start(), part[0], decimal, is_shown, language)
    ]


def _candidate(text: str, at: int, value: str, length: int, *, ambiguous: bool = False) -> Candidate:
    """A candidate, with its sign and exponent."""
    start, end, sign = at, at + length, ""
    if found := _SIGN.search(text[max(0, at - 2) : at]):
        if found[0] in "-\u2212":
            sign = "-"
        start -= len(found[0])
    elif _TRAILING_MINUS.match(text, end) and "." in value:
        sign, end = "-", end + 1
    if (found := _EXPONENT.match(text, end)) and (start == 0 or not text[start - 1].isalnum()):
        end, value = found.end(), f"{float(value + found[0]):.15g}" if abs(int(found[0][1:])) < 15 else value
    return Candidate(start, end, sign + value, ambiguous)

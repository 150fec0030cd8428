"""Outputs of tools with other values each time, and answers that say the same values.

Notable here:
- an answer to learn from must say what only the output says, so dates, times and numbers of both are drawn anew
- an answer writes them as its language does: 2410.3 is 2,410.30 or 2.410,30
- `{=cloudy|sunny}` is one of several texts, the same one in an output and in the answers of its tool
- tools answer in JSON, in a sentence, in lines, or with a value alone
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

from pippin.data.synthetic.documents.formats import date_text, grouped

ALTERNATIVES: Final = re.compile(r"\{=((?:[^{}]|\{\w+\})*)\}")
_LITERAL: Final = re.compile(
    r"\{\w+\}|(?P<date>\d{4}-\d\d-\d\d)|(?P<time>\b\d\d:\d\d\b)|(?P<number>(?:(?<![\w.-])-)?\d+(?:\.\d+)?)"
)
_DATES: Final = {
    "en": ("{month} {d}, {y}", "{d} {month} {y}", "{month} {d}", "{d} {month}"),
    "de": ("{d}. {month} {y}", "{d}. {month}"),
    "fr": ("{first} {month} {y}", "{first} {month}"),
    "es": ("{d} de {month} de {y}", "{d} de {month}"),
    "it": ("{d} {month} {y}", "{d} {month}"),
}
_DAYS: Final = tuple(day for day in range(2, 29) if day not in (8, 11))  # before these, Italian articles lose a vowel
_YEARS: Final = (1800, 2100)  # a number between them may be one, and stays one


@dataclass(frozen=True)
class ToolReport:
    """What a tool returns, and what the user is told.

    Attributes:
        output: of the tool.
        answer: in the language of the user.
        findings: what the answer has from the output, each in the ways in which it may be written.
    """

    output: str
    answer: str
    findings: tuple[tuple[str, ...], ...]


def choose(text: str, rng: random.Random) -> str:
    """A text with one of each of its alternatives; texts with generators of the same state take the same ones.

    >>> choose("It is {=red|blue}.", random.Random(1))
    'It is red.'
    """
    place = rng.random()

    def chosen(found: re.Match[str]) -> str:
        options = found[1].split("|")
        return options[int(place * len(options))]

    return ALTERNATIVES.sub(chosen, text)


def texts(template: str, text: str) -> list[str]:
    """What was chosen in a text for the alternatives of its template.

    >>> texts("It is {=red|blue}, {=now|then}.", "It is red, then.")
    ['red', 'then']
    """
    parts = ALTERNATIVES.split(template)
    pattern = "".join("(.*)" if index % 2 else re.escape(part) for index, part in enumerate(parts))
    found = re.fullmatch(pattern, text, re.DOTALL)
    return [each for each in found.groups() if each] if found else []


def redraw(output: str, answer: str, language: str, rng: random.Random) -> ToolReport:
    """An output and its answer with other dates, times and numbers, as far as the answer has them in figures.

    Args:
        output: JSON with parameters in braces.
        answer: what the user is told, with parameters in braces.
        language: of the answer.
        rng: draws them.

    >>> redraw('{"net": 2410.3}', "The net pay is 2,410.30 euros.", "en", random.Random(2))
    ToolReport(output='{"net": 1926.2}', answer='The net pay is 1,926.20 euros.', findings=(('1,926.20', '1926.2'),))
    """
    marks: dict[str, str] = {}  # what is written at each mark that stands in the answer for now
    changed: dict[str, str] = {}
    findings = list[tuple[str, ...]]()
    for found in _LITERAL.finditer(output):
        old = found[0]
        if old.startswith("{") or old in changed:
            continue
        new = changed[old] = _another(found, rng)
        for before, after in _spellings(found, old, new, language):
            pattern = rf"(?<![\d.,:\x01]){re.escape(before)}(?![\d\x01]|[.,:]\d)"
            if re.search(pattern, answer):
                mark = f"\x01{chr(0xE000 + len(marks))}\x01"
                marks[mark] = after
                answer = re.sub(pattern, mark, answer)
                findings.append(tuple(dict.fromkeys((after, new))))
                break
        else:  # it may be told in words: "one message"
            changed[old] = old
    output = _LITERAL.sub(lambda found: changed.get(found[0], found[0]), output)
    for mark, after in marks.items():
        answer = answer.replace(mark, after)
    return ToolReport(output, answer, tuple(findings))


def written(output: str, sentence: str, rng: random.Random) -> str:
    """The output of a tool in one of the forms that tools have.

    Args:
        output: JSON.
        sentence: what it says.
        rng: draws the form.
    """
    form, values = rng.random(), json.loads(output)
    if form < 0.55:
        return output if rng.random() < 0.7 else json.dumps(values, ensure_ascii=False, indent=rng.choice((None, 1, 2)))
    if form < 0.8:
        return sentence
    lines = list(_lines(values))
    if len(lines) == 1 and form < 0.9:
        return lines[0][1]
    return "\n".join(f"{name}: {value}" for name, value in lines) or output


def _lines(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values of an output with their names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(inner, name)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _another(found: re.Match[str], rng: random.Random) -> str:
    """Another date, time or number like this one."""
    text = found[0]
    if found["date"]:
        return f"{int(text[:4]) + rng.randint(-1, 1)}-{rng.randint(1, 12):02}-{rng.choice(_DAYS):02}"
    if found["time"]:
        return f"{rng.randint(2, 23):02}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}"
    whole, point, fraction = text.lstrip("-").partition(".")
    if not point and _YEARS[0] <= int(whole) < _YEARS[1]:
        return str(rng.randrange(*_YEARS))
    if whole == "1" and not point:  # what is counted is in the singular
        return text
    if whole != "0":
        whole = str(rng.randint(2 if len(whole) == 1 else 10 ** (len(whole) - 1), 10 ** len(whole) - 1))
    if point:
        digits = [rng.choice("0123456789") for _ in fraction[1:]]
        fraction = "".join((*digits, rng.choice("123456789")))  # a number in JSON has no zeros at its end
    return f"{'-' if text.startswith('-') else ''}{whole}{point}{fraction}"


def _spellings(found: re.Match[str], old: str, new: str, language: str) -> Iterator[tuple[str, str]]:
    """How an answer may write the old value, and the new one in the same way."""
    yield old, new
    if found["date"]:
        for pattern in _DATES[language]:
            yield tuple(date_text(date.fromisoformat(each), pattern, language) for each in (old, new))  # type: ignore[misc]
    elif found["number"]:
        point = "." if language == "en" else ","
        for separator in ("", "," if language == "en" else ".", " ", "\xa0", "\u202f"):
            for places in (None, 2):
                yield tuple(_number(each.lstrip("-"), point, separator, places, language) for each in (old, new))  # type: ignore[misc]


def _number(text: str, point: str, separator: str, places: int | None, language: str) -> str:
    """A number without a sign as a language writes it."""
    whole, _, fraction = text.partition(".")
    if places is not None:
        fraction = fraction.ljust(places, "0")
    return grouped(whole, separator, language) + (point + fraction if fraction else "")

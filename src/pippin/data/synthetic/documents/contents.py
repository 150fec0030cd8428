"""What one document says: a value for every field of its kind, or none, and how each value is written.

Notable here:
- values are sampled before any text: a due date follows its invoice's date, a total is the sum of its lines
- a field without a value is in no layout; a list may be present and empty
- how a value is written depends on where it stands: in a sentence, beside a label, in a table, or as a setting
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from random import Random
from typing import Any, Literal, NamedTuple

from pippin.core.errors import InvalidInput
from pippin.data.synthetic.documents import formats, names
from pippin.data.synthetic.documents.grammar import Draw, Phrase, expand
from pippin.data.synthetic.documents.kind_files import FieldForm, KindForm
from pippin.data.synthetic.documents.schema import Fact

Where = Literal["sentence", "label", "cell", "setting"]
Role = Literal["text", "label", "fixed"]
ABSENT = 0.25
NUMBERS = re.compile(r"(-?[\d.]+?)\.\.(-?[\d.]+?)(?::(\d+))?")


@dataclass(eq=False)
class Leaf:
    """A value that the document states, and its fact once the text is written."""

    form: FieldForm
    raw: Any
    fact: Fact | None = None


def _case(generator: str, scope: dict[str, Any]) -> str:
    """The range of "unit?gram=20..600,cup=2..4", which depends on another value; else the generator as it is."""
    other, of, cases = generator.partition("?")
    return dict(each.split("=") for each in cases.split(","))[scope[other]] if of else generator


class Piece(NamedTuple):
    """A piece of text: that of a leaf, a label, or text that stays as it is ("fixed") even in a noisy document."""

    text: str
    leaf: Leaf | None = None
    role: Role = "text"


class Contents:
    """The values of one document and its style.

    Attributes:
        one_line: whether values that often take several lines keep to one.
        said: phrases without facts that have been used.
        theme: which of the lists `words NAME/THEME` of the kind the document draws from.
        leaves: present values by path, "total" or "vendor.name".
        lists: present lists by name, each of dicts by the names of the present columns.
    """

    def __init__(self, kind: KindForm, language: str, rng: Random) -> None:
        self.kind, self.language, self.rng = kind, language, rng
        self.style = formats.sample_style(language, rng)
        self.raws: dict[str, Any] = {}
        self.one_line = False
        self.said: set[Phrase] = set()
        themes = sorted({each.partition("/")[2] for each in kind.words} - {""})
        self.theme = rng.choice(themes) if themes else ""
        self.leaves: dict[str, Leaf] = {}
        self.lists: dict[str, list[dict[str, Leaf]]] = {}
        for form in kind.fields:
            self._sample(form)
        if not self.leaves and not self.lists:
            self.leaves = {form.name: Leaf(form, self.raws[form.name]) for form in kind.fields[:1]}

    def _sample(self, form: FieldForm) -> None:
        present = form.required or self.rng.random() >= ABSENT
        if form.kind == "list":
            self._sample_list(form, present)
        elif form.kind == "record":
            for each in form.fields:
                raw = self._raw(each, self.raws, form.name + ".")
                if present and (each.required or self.rng.random() >= ABSENT):
                    self.leaves[f"{form.name}.{each.name}"] = Leaf(each, raw)
        else:
            raw = self._raw(form, self.raws)
            if present:
                self.leaves[form.name] = Leaf(form, raw)

    def _sample_list(self, form: FieldForm, present: bool) -> None:
        low, high = (int(each) for each in form.generator.split(".."))
        columns = [each for each in form.fields if each.required or self.rng.random() >= ABSENT] or form.fields[:1]
        rows: list[dict[str, Any]] = []
        for _ in range(self.rng.randint(low, high)):
            row = dict(self.raws)  # an item may depend on what was sampled before: `text part_{device}`
            for each in form.fields:
                self._raw(each, row)
            rows.append(row)
        first = next((each for each in form.fields if each.kind == "text"), form.fields[0]).name
        kept = {str(row[first]): row for row in rows}.values()  # no item twice
        self.raws[form.name] = list(kept)
        if present:
            self.lists[form.name] = [{each.name: Leaf(each, row[each.name]) for each in columns} for row in kept]

    def _raw(self, form: FieldForm, scope: dict[str, Any], prefix: str = "") -> Any:
        name, _, argument = form.generator.partition(":")
        raw = getattr(self, f"_{form.kind}")(form, name, argument, scope)
        scope[prefix + form.name] = raw
        return raw

    def _text(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> str:
        if name == "id":
            return names.identifier(argument, self.rng, self.style.today.year)
        if name == "email":
            name = str(scope.get(argument, "")).partition(",")[0]  # without "PhD" after a comma
            return names.email(self.style, self.rng, name)
        if name == "pattern":
            return names.pattern(self.rng.choice(argument.split(",")), self.rng, self.style.today.year)
        return " ".join(self.draw(name.format_map(scope)).split())  # "fruit_{color}": a list for each color

    def _date(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> date:
        if name == "birth":  # "birth:1960..1999": born in one of these years
            low, high = (int(each) for each in (argument or "1940..2007").split(".."))
            return date(low, 1, 1) + timedelta(days=self.rng.randrange(365 * (high + 1 - low)))
        origin, _, span = form.generator.partition("+")
        low, high = (int(each) for each in (span or "0..10").split(".."))
        start: date = scope.get(origin, self.style.today)
        return start + timedelta(days=self.rng.randint(low, high))

    def _time(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> time:
        origin, plus, span = form.generator.partition("+")
        low, high = (int(each) for each in (span if plus else origin).split(".."))
        if plus:  # minutes after another time
            start = datetime.combine(self.style.today, scope[origin])
            return (start + timedelta(minutes=5 * self.rng.randint(low // 5, high // 5))).time()
        minute = self.rng.choice((0, 0, 15, 30, 30, 45, self.rng.randrange(0, 60, 5)))
        return time(self.rng.randint(low, high), minute)

    def _amount(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> Decimal:
        text = _case(form.generator, scope)
        if found := re.fullmatch(r"sum\((\w+)\.(\w+)\)", text):
            total = sum((row[found[2]] for row in scope[found[1]]), Decimal(0))
            return total or Decimal(self.rng.randint(1000, 90000)) / 100
        if found := re.fullmatch(r"(\w+)([+-])(\w+)", text):
            return Decimal(scope[found[1]] + (1 if found[2] == "+" else -1) * scope[found[3]])
        if found := re.fullmatch(r"(\w+)\*([a-z]\w*)", text):
            return Decimal(scope[found[1]] * scope[found[2]]).quantize(Decimal("0.01"))
        if found := re.fullmatch(r"(\w+)\*([\d.]+)\.\.([\d.]+)", text):
            share = self.rng.uniform(float(found[2]), float(found[3]))
            return (Decimal(scope[found[1]]) * Decimal(share)).quantize(Decimal("0.01"))
        low, high = (float(each) for each in text.split(".."))
        amount = low * (high / low) ** self.rng.random()
        coarse = "1" if amount < 50 else "5" if amount < 300 else "50" if amount < 5000 else "500"
        fine = ("0.01", "0.01", "0.1", "1") if amount < 3000 else ("0.01", "1", "10", "100")
        places = self.rng.choice((*fine, coarse))
        return (Decimal(max(1, round(amount / float(places)))) * Decimal(places)).quantize(Decimal("0.01"))

    def _number(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> float:
        low, high, places = self._bounds(form)
        return round(self.rng.uniform(float(low), float(high)), places)

    def _integer(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> int:
        if found := re.fullmatch(r"days\((\w+),(\w+)\)", form.generator):
            return int((scope[found[2]] - scope[found[1]]).days)
        if found := re.fullmatch(r"count\((\w+)\)", form.generator):
            return len(scope[found[1]])
        if found := re.fullmatch(r"([a-z]\w*)\+([a-z]\w*)", form.generator):
            return int(scope[found[1]] + scope[found[2]])
        if found := re.fullmatch(r"(\w+)\+(\d+)\.\.(\d+)(:0)?", form.generator):
            return int(scope[found[1]]) + self.rng.randint(int(found[2]), int(found[3]))
        if "?" in form.generator:
            low, high = _case(form.generator, scope).split("..")
            step = 10 if int(high) > 100 else 1
            return self.rng.randint(int(low) // step, int(high) // step) * step
        low, high, _ = self._bounds(form)
        return self.rng.randint(int(low), int(high))

    def _flag(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> bool:
        return self.rng.random() < float(form.generator or 0.5)

    def _choice(self, form: FieldForm, name: str, argument: str, scope: dict[str, Any]) -> str:
        return self.rng.choice(list(form.values))

    def _bounds(self, form: FieldForm) -> tuple[str, str, int]:
        found = NUMBERS.fullmatch(form.generator)
        if found is None:
            raise InvalidInput(f"{self.kind.name}: {form.name} is a number without LOW..HIGH[:PLACES]")
        return found[1], found[2], int(found[3] or 1)

    def draw(self, name: str) -> str:
        """A random value for `@name`: from the words of the kind, else of the language, or a generator."""
        if listed := self.kind.words.get(f"{name}/{self.theme}") or self.kind.words.get(name):
            return self.written(self.rng.choice(listed[self.language]))
        return names.draw(name, self.style, self.rng)

    def written(self, phrase: Phrase) -> str:
        """One text of a phrase without facts."""
        parts = expand(phrase, self.rng)
        return "".join(self.draw(part.name) if isinstance(part, Draw) else str(part) for part in parts)

    def unsaid(self, listed: Sequence[Phrase]) -> str:
        """One text of a phrase that has not been used yet, if there is one."""
        phrase = self.rng.choice([each for each in listed if each not in self.said] or listed)
        self.said.add(phrase)
        return self.written(phrase)

    def word(self, name: str) -> str:
        """An entry of a list of the kind or the language."""
        return self.draw(name)

    def label(self, form: FieldForm) -> str:
        """One of the labels of a field."""
        labels = form.labels.get(self.language)
        return self.written(self.rng.choice(labels)) if labels else form.name.replace("_", " ")

    def pieces(self, leaf: Leaf, where: Where) -> list[Piece]:
        """A value as it is written at a place: its own text, and perhaps words around it."""
        return getattr(self, f"_write_{leaf.form.kind}")(leaf, where)  # type: ignore[no-any-return]

    def _write_text(self, leaf: Leaf, where: Where) -> list[Piece]:
        if leaf.form.generator == "address" and where == "label" and not self.one_line and self.rng.random() < 0.4:
            return [Piece("\n"), Piece(leaf.raw.replace(", ", "\n"), leaf)]
        return [Piece(leaf.raw, leaf)]

    def _write_date(self, leaf: Leaf, where: Where) -> list[Piece]:
        style, rng = self.style, self.rng
        pattern = style.date
        if where == "setting" and rng.random() < 0.6:
            pattern = formats.ISO
        elif rng.random() < 0.15:
            pattern = rng.choice(formats.DATE_STYLES["us" if style.region == "us" else style.language])
        if leaf.form.generator.startswith("birth"):
            pattern = pattern.replace("{yy}", "{y}").replace("'", "")
        piece = Piece(formats.date_text(leaf.raw, pattern, style.language), leaf)
        if where == "label" and rng.random() < 0.1:
            day = formats.WEEKDAYS[style.language][leaf.raw.weekday()]
            day = rng.choice((day, day.capitalize(), day[:2] if style.language == "de" else day[:3]))
            return [Piece(day + rng.choice((", ", " ")), None, "fixed"), piece]
        return [piece]

    def _write_time(self, leaf: Leaf, where: Where) -> list[Piece]:
        words = where == "sentence" and self.rng.random() < 0.5
        piece = Piece(formats.time_text(leaf.raw, self.style.time, words=words), leaf)
        endings = {"de": " Uhr", "es": " h", "it": ""}
        if where == "label" and self.rng.random() < 0.4 and endings.get(self.language):
            return [piece, Piece(endings[self.language], None, "fixed")]
        return [piece]

    def _write_amount(self, leaf: Leaf, where: Where) -> list[Piece]:
        whole = leaf.raw == leaf.raw.to_integral_value() and leaf.raw >= 100 and self.rng.random() < 0.35
        return [Piece(formats.amount_text(leaf.raw, self.style, whole=whole)[0], leaf)]

    def _write_number(self, leaf: Leaf, where: Where) -> list[Piece]:
        return [Piece(formats.number_text(leaf.raw, self._bounds(leaf.form)[2], self.style), leaf)]

    def _write_integer(self, leaf: Leaf, where: Where) -> list[Piece]:
        if where == "sentence" and 2 <= leaf.raw <= 12 and self.rng.random() < 0.3:
            return [Piece(formats.COUNT_WORDS[self.language][leaf.raw - 2], leaf)]
        plain = leaf.form.generator.endswith(":0") or (leaf.raw < 10000 and self.rng.random() < 0.5)
        return [Piece(str(leaf.raw) if plain else formats.number_text(leaf.raw, 0, self.style), leaf)]

    def _write_flag(self, leaf: Leaf, where: Where) -> list[Piece]:
        if where != "sentence":
            return [Piece(self.word("yes" if leaf.raw else "no"), leaf)]
        return self._bracketed(leaf, "yes" if leaf.raw else "no")

    def _write_choice(self, leaf: Leaf, where: Where) -> list[Piece]:
        return self._bracketed(leaf, leaf.raw)

    def _bracketed(self, leaf: Leaf, name: str) -> list[Piece]:
        """A phrase of a choice or a flag, of which the words in [brackets] are the fact, or all of it."""
        text = self.written(self.rng.choice(leaf.form.values[name][self.language])).strip()
        before, bracket, rest = text.partition("[")
        if not bracket:
            return [Piece(text, leaf)]
        inside, _, after = rest.partition("]")
        return [each for each in (Piece(before), Piece(inside, leaf), Piece(after)) if each.text]


def normalized(leaf: Leaf, text: str) -> str | int | float | bool:
    """The value of a fact that stands in the document as `text`."""
    match leaf.form.kind:
        case "text":
            return text
        case "date":
            return str(leaf.raw.isoformat())
        case "time":
            return f"{leaf.raw:%H:%M}"
        case "amount":
            return f"{leaf.raw:.2f}"
        case _:
            return leaf.raw  # type: ignore[no-any-return]

"""Sentences that state facts of a generated document, in its language or in another one.

Notable here:
- a sentence of the document's kind is taken only where the document has it, since it may say more than its facts do;
  what is written anew is a fact behind its label, or a phrase that says nothing else
- values are spelled as in the text; in another language only those are written that need no translation, and choices,
  where the language has one phrase for all that the choice stands for
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any, Final

from pippin.data.synthetic.documents import Document, Fact, formats, kind_files
from pippin.data.synthetic.documents.contents import Leaf, Piece
from pippin.data.synthetic.documents.grammar import Alternatives, Phrase, Placeholder, draws, expand, slots, variants
from pippin.data.synthetic.documents.kind_files import FieldForm, Phrases
from pippin.data.synthetic.documents.sentences import meet

# texts of these generators are names, addresses and numbers, which stay what they are in another language
_SAME_EVERYWHERE: Final = (
    "person",
    "first_name",
    "company",
    "id",
    "pattern",
    "email",
    "phone",
    "address",
    "iban",
    "town",
    "insurer",
    "maker",
    "device_{category}",
)
_DATES: Final = {"en": "{d} {month} {y}", "de": "{d}. {month} {y}", "fr": "{first} {month} {y}",
                 "es": "{d} de {month} de {y}", "it": "{d} {month} {y}"}  # fmt: skip


@dataclass(frozen=True)
class StatedFacts:
    """A sentence and the paths of the facts that it states."""

    text: str
    paths: frozenset[str]


@cache
def phrase_file(name: str) -> dict[str, Phrases]:
    """The phrases of a file of `NAME = ...` lines for all languages, by name and language."""
    path = kind_files.FILES / "words" / f"{name}.txt"
    rows = (line.partition(" = ") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {key.strip(): kind_files.phrases(listed, f"{name}: {key}") for key, equals, listed in rows if equals}


def plain_text(phrase: Phrase, rng: random.Random, **values: str) -> str:
    """One text of a phrase, with these values in its slots."""
    return "".join(values[part.name] if isinstance(part, Placeholder) else str(part) for part in expand(phrase, rng))


class FactWriter:
    """Writes the facts of a document in one language.

    Args:
        document: the document.
        language: to write in.
        rng: source of randomness.

    Attributes:
        forms: the field of each fact that the document states, by path: "total", "vendor.name".
        facts: those facts; a list of them for a list of several items.
        order: the paths, the most important first.
        further: phrases for sentences about the facts, where those of the kind speak as a person or to one.
    """

    def __init__(self, document: Document, language: str, rng: random.Random) -> None:
        self.document, self.language, self.rng = document, language, rng
        self.kind = kind_files.load(document.kind)
        self.text = re.sub(r"[ \n]+", " ", document.text)
        self.further = phrase_file("summaries").get(f"{document.kind} more", {}).get(language, ())
        self.forms: dict[str, FieldForm] = {}
        self.facts: dict[str, Any] = {}
        for form in self.kind.fields:
            value = document.values.get(form.name)
            if isinstance(value, dict):
                for each in form.fields:
                    self._add(f"{form.name}.{each.name}", each, value.get(each.name))
            else:
                self._add(form.name, form, value)
        told = [path for phrase in self.further for path in self.forms if path in slots(phrase)]
        self.order = sorted(
            self.forms,
            key=lambda path: (not self.forms[path].required, told.index(path) if path in told else len(told)),
        )

    def _add(self, path: str, form: FieldForm, fact: Any) -> None:
        if fact is not None and fact != []:
            self.forms[path], self.facts[path] = form, fact

    def value(self, path: str) -> str | None:
        """A fact as it stands in a sentence; None for a flag, and where it cannot be written in this language."""
        form, fact = self.forms[path], self.facts[path]
        if form.kind == "list":
            return ", ".join(self.items(path)) if self.language == self.document.language else None
        if form.kind == "flag":
            return None
        if self.language != self.document.language:
            return self._translated(form, fact)
        if form.kind == "choice":
            return _choice_words(form, fact, self.language)
        return fact.text.lower() if form.kind == "integer" else on_one_line(fact.text)

    def items(self, path: str) -> list[str]:
        """The items of a list: of each, what tells it from the others."""
        fields = self.forms[path].fields
        name = min(fields, key=lambda each: (not each.required, each.kind != "text")).name
        items = (fact if isinstance(fact, Fact) else fact[name] for fact in self.facts[path])
        return [on_one_line(fact.text) for fact in items if fact is not None]

    def _translated(self, form: FieldForm, fact: Fact) -> str | None:
        lettered = any(char.isalpha() for char in fact.text)
        match form.kind:
            case "choice":
                # alternatives are more special than the choice: a swab of the throat or of the nose
                phrase = form.values[str(fact.value)][self.language][0]
                texts = list(variants(phrase)) if not draws(phrase) else []
                return re.sub(r"[\[\]]", "", texts[0]) if len(texts) == 1 else None
            case "date" if lettered:
                return formats.date_text(date.fromisoformat(str(fact.value)), _DATES[self.language], self.language)
            case "time" | "integer" if lettered:
                return str(fact.value)
            case "text":
                return on_one_line(fact.text) if form.generator.partition(":")[0] in _SAME_EVERYWHERE else None
        return fact.text

    def filled(self, phrase: Phrase) -> StatedFacts | None:
        """One text of a phrase with facts of the document; None where it needs what the document does not have."""
        if draws(phrase) or not slots(phrase):
            return None
        pieces, used = list[Piece](), set[str]()
        for part in expand(phrase, self.rng):
            if not isinstance(part, Placeholder):
                last = pieces.pop().text if pieces and pieces[-1].leaf is None else ""
                pieces.append(Piece(last + str(part)))
                continue
            value = self.value(part.name) if part.name in self.facts else None
            if value is None:
                return None
            leaf = Leaf(self.forms[part.name], None)
            if pieces and pieces[-1].leaf is None:
                pieces[-1] = Piece(meet(pieces[-1].text, leaf, value, self.language))
            pieces.append(Piece(value, leaf))
            used.add(part.name)
        text = "".join(piece.text for piece in pieces)
        return StatedFacts(re.sub(r"\.\.$", ".", text[:1].upper() + text[1:]), frozenset(used)) if used else None

    def copied(self, phrase: Phrase) -> StatedFacts | None:
        """The sentence of the document that is one of the texts of a phrase; None where there is none."""
        paths: list[str] = []
        found = re.search(rf"(?<!\w){self._pattern(phrase, paths)}", self.text, re.IGNORECASE)
        used = {path for index, path in enumerate(paths) if found and found[f"fact{index}"] is not None}
        whole = found and re.search(r"[.!?…]$", found[0])  # not the head of a list
        return StatedFacts(found[0], frozenset(used)) if found and whole and used else None

    def _pattern(self, phrase: Phrase, paths: list[str]) -> str:
        """A regular expression for a phrase with the facts in it, whose paths are added to a list."""
        out = ""
        for part in phrase:
            if isinstance(part, Alternatives):
                out += f"(?:{'|'.join(self._pattern(option, paths) for option in part.options)})"
            elif isinstance(part, Placeholder):
                plain = part.name in self.facts and self.forms[part.name].kind not in ("list", "flag")
                value = self.value(part.name) if plain else None
                out += "(?!)" if value is None else f"(?P<fact{len(paths)}>{re.escape(value)})"
                paths += [] if value is None else [part.name]
            else:
                out += re.escape(part) if isinstance(part, str) else "(?!)"
        return out

    def statements(self) -> list[StatedFacts]:
        """Sentences about facts in random order: those of the document, or others where it speaks as a person."""
        if self.further:
            return self.shuffled(map(self.filled, self.further))
        return self.shuffled(self.copied(each.phrase) for each in self.kind.sentences[self.language])

    def label(self, form: FieldForm) -> str | None:
        """A label of a field that no other field of the kind has, in this language."""
        return field_label(self.kind.name, form, self.language, self.rng)

    def labeled(self, path: str) -> StatedFacts | None:
        """A fact behind its label: "Total: 12 EUR."; a flag as a clause of its own where the document has it so."""
        form, fact = self.forms[path], self.facts[path]
        label, value = self.label(form), self.value(path)
        if form.kind == "flag":
            clause = self._clause(form, fact)
            if clause:
                return StatedFacts(f"{clause[:1].upper()}{clause[1:].rstrip('.')}.", frozenset((path,)))
            said = phrase_file("questions")["yes" if fact.value else "no"][self.language]
            value = plain_text(said[0], self.rng).lower()
        if value is None or label is None:
            return None
        text = f"{label[:1].upper()}{label[1:]}{' :' if self.language == 'fr' else ':'} {value}"
        return StatedFacts(text.rstrip(".") + ".", frozenset((path,)))

    def _clause(self, form: FieldForm, fact: Fact) -> str | None:
        """The clause of a flag that stands in the document, where the sentences of the kind may be taken."""
        if self.further or self.language != self.document.language:
            return None
        for phrase in form.values["yes" if fact.value else "no"][self.language]:
            for text in variants(phrase) if not draws(phrase) else ():
                clause = re.sub(r"[\[\]]", "", text).strip()
                if clause.casefold() in self.text.casefold():
                    return clause
        return None

    def shuffled(self, sentences: Iterable[StatedFacts | None]) -> list[StatedFacts]:
        """Those sentences that there are, in random order."""
        found = [sentence for sentence in sentences if sentence is not None]
        self.rng.shuffle(found)
        return found


def on_one_line(text: str) -> str:
    """A value that may have been broken into lines.

    >>> on_one_line("1 Mill Road\\nYork")
    '1 Mill Road, York'
    """
    return re.sub(r",?\s*\n\s*", ", ", text)


def _choice_words(form: FieldForm, fact: Fact, language: str) -> str:
    """The words around a choice in the list of its phrases, so that they make sense in a sentence."""
    for phrase in form.values[str(fact.value)][language] if isinstance(fact.value, str) else ():
        for text in variants(phrase) if not draws(phrase) else ():
            inside = re.search(r"\[(.*)\]", text)
            if (inside[1] if inside else text).casefold() == fact.text.casefold():
                return re.sub(r"[\[\]]", "", text)
    return fact.text


@cache
def _taken(kind: str) -> dict[str, int]:
    """How many fields of a kind have a label, by the label as a name."""
    counts: dict[str, int] = {}
    every = [each for top in kind_files.load(kind).fields for each in (top, *top.fields)]
    for form in every:
        texts = {kind_files.slug(text) for listed in form.labels.values() for phrase in listed
                 if not draws(phrase) for text in variants(phrase)}  # fmt: skip
        for text in texts | {form.name}:
            counts[text] = counts.get(text, 0) + 1
    return counts


def has_label(kind: str, label: str) -> bool:
    """Whether a field of a kind may have this label."""
    return kind_files.slug(label) in _taken(kind)


def field_label(kind: str, form: FieldForm, language: str, rng: random.Random) -> str | None:
    """A label of a field that no other field of its kind has; None where there is none."""
    found = [text for phrase in form.labels.get(language, ()) if not draws(phrase) for text in variants(phrase)]
    own = [text for text in found if _taken(kind).get(kind_files.slug(text), 0) == 1]
    return rng.choice(own) if own else None


def kind_title(kind: str, language: str, rng: random.Random) -> str:
    """A title of documents of a kind; its name where it has none in this language."""
    titles = [phrase for phrase in kind_files.load(kind).titles[language] if not draws(phrase)]
    return plain_text(rng.choice(titles), rng) if titles else kind.replace("_", " ")

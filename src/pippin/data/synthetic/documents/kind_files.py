"""Kinds of documents, each described by a text file: `kinds/NAME.txt`.

Notable here:
- `field NAME KIND GENERATOR = description + alias, alias` opens a field; a `!` after the name: never absent
- the next line has its labels: those of one language parted by `;`, languages by `||` in the order of LANGUAGES
- without that line, or with `*NAME` in its place, the labels are those of `words/labels.txt`
- `value NAME = ...` lines give the phrases of a choice or a flag (yes, no), [brackets] around the words that count
- `  sub` opens a field of the items of a list or of a record; `item` is how an item can be written in a line
- `words NAME = ...` is a list of phrases for `GENERATOR` or `@NAME`, beside those of `words/LANGUAGE.txt`
- `words NAME/THEME = ...` is such a list for the documents of one theme: a document draws from one theme only
- a value may depend on one before it: `text fruit_{color}` draws from another list for each color, and
  `integer unit?gram=20..600,cup=2..4` has a range for each unit (amounts as well); `integer a+b` is a sum
- `integer 1950..2024:0` is a year: its digits are never written in groups; `START+1..6:0` is one after another
- after `[LANGUAGE]`, a line is a sentence: one with `^` may open a text, one with `~` states nothing that is asked
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, cast

from pippin.core.errors import InvalidInput
from pippin.data.synthetic.documents.grammar import Phrase, draws, parse, slots, variants
from pippin.data.synthetic.documents.schema import FieldKind, FieldSpec

LANGUAGES: Final = ("en", "de", "fr", "es", "it")
FILES: Final = Path(__file__).parent
HEAD = re.compile(r"(?P<name>\w+|-)(?P<required>!?) (?P<kind>[a-z]+) ?(?P<generator>[^ ]*) = (?P<rest>.+)")
Phrases = dict[str, tuple[Phrase, ...]]


@dataclass
class FieldForm:
    """How a field is asked for, generated and written."""

    name: str
    kind: FieldKind
    generator: str
    required: bool
    description: str
    extra_aliases: tuple[str, ...]
    labels: Phrases = field(default_factory=dict)
    values: dict[str, Phrases] = field(default_factory=dict)
    fields: list[FieldForm] = field(default_factory=list)
    items: list[Phrase] = field(default_factory=list)


@dataclass
class FactSentence:
    """A sentence and the facts that it states."""

    phrase: Phrase
    slots: frozenset[str]


@dataclass
class KindForm:
    """A kind of document: what its file says."""

    name: str
    settings: dict[str, str]
    titles: Phrases
    fields: list[FieldForm]
    words: dict[str, Phrases]
    openings: dict[str, list[FactSentence]]
    sentences: dict[str, list[FactSentence]]
    fillers: dict[str, list[Phrase]]
    specs: tuple[FieldSpec, ...] = ()

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of the layouts of this kind."""
        return tuple(self.settings["layouts"].split())


def phrases(text: str, place: str) -> Phrases:
    """The phrases of each language in a line of a file."""
    parts = re.split(r"\s*\|\|\s*", text.strip())
    if len(parts) == 1:
        parts *= len(LANGUAGES)
    if len(parts) != len(LANGUAGES):
        raise InvalidInput(f"{place}: {len(parts)} languages instead of {len(LANGUAGES)} in {text!r}")
    return {
        language: tuple(parse(each) for each in re.split(r"\s*;\s+|\s*;$", part) if each)
        for language, part in zip(LANGUAGES, parts, strict=True)
    }


@cache
def shared_labels() -> dict[str, Phrases]:
    """Labels that fields of many kinds have, by the name of the field."""
    rows = (line.partition(" = ") for line in (FILES / "words" / "labels.txt").read_text(encoding="utf-8").splitlines())
    return {name: phrases(listed, f"label {name}") for name, equals, listed in rows if equals}


def kinds() -> tuple[str, ...]:
    """Names of all kinds."""
    return tuple(sorted(path.stem for path in (FILES / "kinds").glob("*.txt")))


@cache
def load(name: str) -> KindForm:
    """The kind of a name.

    Raises:
        InvalidInput: its file is not as described above.
    """
    return read(name, (FILES / "kinds" / f"{name}.txt").read_text(encoding="utf-8"))


def read(name: str, text: str) -> KindForm:
    """A kind from the text of its file, which `name` names in errors.

    Raises:
        InvalidInput: the text is not as described above.
    """
    empty: dict[str, list[FactSentence]] = {language: [] for language in LANGUAGES}
    kind = KindForm(name, {}, {}, [], {}, empty, {k: [] for k in LANGUAGES}, {k: [] for k in LANGUAGES})
    top = form = None
    language = ""
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{name}, line {number}"
        word, _, rest = line.strip().partition(" ")
        if not word or word == "#":
            continue
        if found := re.fullmatch(r"\[(\w\w)\]", line):
            language = found[1]
        elif language:
            _read_sentence(kind, language, line)
        elif word in ("field", "sub"):
            form = _read_head(rest, place)
            if word == "field":
                kind.fields.append(form)
                top = form
            elif top is not None:
                top.fields.append(form)
        elif word == "value" and form is not None:
            key, _, listed = rest.partition(" = ")
            form.values[key] = phrases(listed, place)
        elif word == "item" and top is not None:
            top.items.append(parse(rest))
        elif word in ("words", "title"):
            key, _, listed = rest.partition("= ")
            kind.words[key.strip() or word] = phrases(listed, place)
        elif word.endswith(":") and not kind.fields:
            kind.settings[word[:-1]] = rest
        elif form is not None and not form.labels:
            form.labels = shared_labels()[word[1:]] if word.startswith("*") else phrases(line, place)
        else:
            raise InvalidInput(f"{place} is of no form that is known here: {line!r}")
    return _finished(kind)


def _read_head(text: str, place: str) -> FieldForm:
    found = HEAD.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{place}: a field is `NAME KIND GENERATOR = description + aliases`, not {text!r}")
    description, _, aliases = found["rest"].partition(" + ")
    names = tuple(each.strip() for each in aliases.split(",") if each.strip())
    name = "" if found["name"] == "-" else found["name"]
    kind = cast(FieldKind, found["kind"])
    return FieldForm(name, kind, found["generator"], bool(found["required"]), description.strip(), names)


def _read_sentence(kind: KindForm, language: str, line: str) -> None:
    text = line.lstrip("^~ ")
    phrase = parse(text)
    if line.startswith("~"):
        kind.fillers[language].append(phrase)
    else:
        group = kind.openings if line.startswith("^") else kind.sentences
        group[language].append(FactSentence(phrase, frozenset(slots(phrase))))


def _finished(kind: KindForm) -> KindForm:
    """The kind with what follows from its fields, checked."""
    for form in [each for top in kind.fields for each in (top, *top.fields)]:
        form.labels = form.labels or shared_labels().get(form.name, {})
        if form.name and not form.labels and form.kind != "record":
            raise InvalidInput(f"{kind.name}: {form.name} has no labels")
    known = {path for form in kind.fields for path in _paths(form)}
    for language in LANGUAGES:
        for sentence in kind.openings[language] + kind.sentences[language]:
            if unknown := sentence.slots - known:
                raise InvalidInput(f"{kind.name}: {language} sentences name {sorted(unknown)}, which is no field")
    if "title" not in kind.words or "layouts" not in kind.settings:
        raise InvalidInput(f"{kind.name} has no title or no layouts")
    kind.titles = kind.words["title"]
    kind.specs = _specs(kind.fields)
    return kind


def _paths(form: FieldForm) -> list[str]:
    if form.kind == "record":
        return [f"{form.name}.{each.name}" for each in form.fields]
    return [form.name]


def _specs(forms: list[FieldForm]) -> tuple[FieldSpec, ...]:
    listed = {form.name: _aliases(form) for form in forms}
    # a name that two fields could have says nothing
    taken = Counter(each for found in listed.values() for each in {name for names in found.values() for name in names})
    taken.update(listed.keys())
    return tuple(
        FieldSpec(
            form.name,
            form.kind,
            form.description,
            {language: kept for language, names in listed[form.name].items()
             if (kept := tuple(each for each in names if taken[each] == 1))},
            tuple(form.values) if form.kind == "choice" else (),
            _specs(form.fields),
        )
        for form in forms
    )  # fmt: skip


def slug(text: str) -> str:
    """A label as a name in a program: lower case, with underscores."""
    return re.sub(r"\W+", "_", text.replace("'", " ").replace("’", " ").lower()).strip("_")


def camel(name: str) -> str:
    """A name with underscores in camel case."""
    first, *others = name.split("_")
    return first + "".join(each.capitalize() for each in others)


def _aliases(form: FieldForm) -> dict[str, list[str]]:
    """Other names of a field, by language."""
    if not form.name:
        return {}
    found: dict[str, list[str]] = {}
    for language in LANGUAGES:
        names = [camel(form.name), *form.extra_aliases] if language == "en" else []
        for phrase in form.labels.get(language, ()):
            names += [slug(each) for each in variants(phrase, 6)] if not draws(phrase) else []
        found[language] = list(dict.fromkeys(each for each in names if len(each) > 1 and each != form.name))
    return found

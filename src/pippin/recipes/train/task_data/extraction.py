"""Training data of the adapter for extraction: generated documents, and forms that ask for some of their facts.

Notable here:
- forms vary as users' types do: names in several styles and languages, with and without descriptions, nested or flat,
  strict or optional; some ask for what the document does not say
- the answer is written by the form itself (`pippin.session.extraction.answers`), and the tokens that its grammar leaves
  open are those that count
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Bool, Float, UInt8

from pippin.core.errors import EmptySchema, InvalidArgument
from pippin.data.synthetic import documents
from pippin.data.synthetic.documents import Document, Fact, FieldSpec
from pippin.recipes.train.task_data.examples import ExampleSampler, ExampleSplit, constrained_example
from pippin.session.extraction.answers import KnownValue, write
from pippin.session.extraction.form import Form
from pippin.session.extraction.source import SourceText

if TYPE_CHECKING:
    from pippin.language.constrained_objective import ConstrainedExample
    from pippin.language.language_model import LanguageModel

_FORMATS: Final = {"date": "date", "time": "time"}
_TYPES: Final = {"amount": ("number",) * 4 + ("string",), "number": ("number",) * 5 + ("string",),
                 "integer": ("integer",) * 4 + ("number", "string")}  # fmt: skip


@dataclass(frozen=True)
class FormTask:
    """A document, a schema, and what is true of it.

    Attributes:
        document: the document.
        schema: the JSON Schema of the form.
        answers: as `pippin.session.extraction.answers.write` takes them.
    """

    document: Document
    schema: dict[str, Any]
    answers: Any


def sample_task(rng: random.Random, kinds: Sequence[str] = (), languages: Sequence[str] = (),
                layouts: Callable[[str], Sequence[str]] | None = None) -> FormTask:  # fmt: skip
    """A random document of some kinds, languages and layouts, and a random form for it.

    Args:
        rng: source of randomness.
        kinds: kinds of documents; all without any.
        languages: their languages; all without any.
        layouts: the layouts of a kind to choose from; None for all.
    """
    kind = rng.choice(list(kinds) or list(documents.KINDS))
    language = rng.choice(list(languages) or list(documents.LANGUAGES))
    layout = rng.choice(list((layouts or documents.layouts)(kind)))
    noise = rng.choice((0.0, 0.0, 0.1, 0.3, 0.6))
    document = documents.sample(kind, language=language, layout=layout, seed=rng, noise=noise)
    schema, answers = _Sampler(document, rng).form()
    return FormTask(document, schema, answers)


class _Sampler:
    """Chooses how one form asks."""

    def __init__(self, document: Document, rng: random.Random) -> None:
        self.document, self.rng = document, rng
        self.style = rng.choice(_STYLES)
        self.described = rng.choice((0.0, 0.0, 0.4, 1.0))
        # programs name things in English or in the language of their users
        other = document.language if rng.random() < 0.7 else rng.choice(documents.LANGUAGES)
        self.language = "en" if rng.random() < 0.55 else other
        self.aliased = rng.choice((0.0, 0.3, 0.8))  # in English, where every field has a name
        self.optional = rng.choice((0.0, 0.5, 1.0, 1.0))  # of the fields that have a value
        self.cryptic = rng.random() < 0.04

    def form(self) -> tuple[dict[str, Any], Any]:
        """The schema and its answers."""
        rng, fields = self.rng, list(self.document.fields)
        if rng.random() < 0.5:
            rng.shuffle(fields)
        said = self.document.values
        unsaid = rng.choice((0.0, 0.3, 0.6, 0.9))  # people mostly ask for what their documents say, but not always
        chosen = [
            field
            for field in fields
            if rng.random() < (rng.choice((0.3, 0.7, 0.95)) if said.get(field.name) else unsaid)
        ] or fields[:1]
        entries = [entry for field in chosen[:14] if (entry := self.entry(field, self.document.values.get(field.name)))]
        entries += self.currency()
        entries += [self.absent() for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
        if rng.random() < 0.3:
            rng.shuffle(entries)
        if len(entries) > 4 and rng.random() < 0.25:
            entries = self.grouped(entries)
        return self.object(entries)

    def object(self, entries: Sequence[tuple[str, dict[str, Any], Any, bool]]) -> tuple[dict[str, Any], Any]:
        """An object of (name, schema, answer, whether it is required)."""
        named = {name: (schema, answer, required) for name, schema, answer, required in entries}
        return (
            {
                "type": "object",
                "properties": {name: schema for name, (schema, _, _) in named.items()},
                "required": [name for name, (_, _, required) in named.items() if required],
            },
            {name: answer for name, (_, answer, _) in named.items()},
        )

    def grouped(self, entries: list[Any]) -> list[Any]:
        """Some of the fields in an object of their own."""
        first = self.rng.randrange(len(entries) - 2)
        count = self.rng.randrange(2, 4)
        inner = self.object(entries[first : first + count])
        name = _styled(self.rng.choice(_GROUPS), self.style)
        return [*entries[:first], (name, *inner, True), *entries[first + count :]]

    def entry(self, field: FieldSpec, fact: Any) -> tuple[str, dict[str, Any], Any, bool] | None:
        """A field of the form."""
        name, schema = self.name(field), self.described_schema(field)
        if field.kind == "record":
            facts = fact or {}
            inner = [e for each in field.fields if (e := self.entry(each, facts.get(each.name)))]
            return (name, *self.object(inner), True) if inner else None
        if field.kind == "list":
            return self.list(name, field, fact or [])
        if field.kind == "flag" and self.rng.random() < 0.35:
            return name, {"type": "boolean", **schema}, _answer(fact, keep=True), True
        typed = self.typed(field)
        answer = _answer(fact, keep="enum" in typed or typed.get("type") == "boolean")
        if answer is not None and self.rng.random() > self.optional:
            return name, {**typed, **schema}, answer, True
        if self.rng.random() < 0.5:
            return name, {"anyOf": [typed, {"type": "null"}], **schema}, answer, self.rng.random() < 0.5
        return name, {**typed, **schema}, answer, False

    def list(self, name: str, field: FieldSpec, found: Sequence[Any]) -> tuple[str, dict[str, Any], Any, bool]:
        """A list of values or of objects with some of their fields."""
        fields = field.fields
        if len(fields) == 1 and not fields[0].name:
            items: list[Any] = [_answer(fact, keep=False) for fact in found]
            schema = {"type": "string"} if fields[0].kind in ("text", "flag", "choice") else self.typed(fields[0])
            return name, {"type": "array", "items": schema, **self.described_schema(field)}, items, True
        kept = [each for each in fields if self.rng.random() < 0.75] or [fields[0]]
        if len(kept) == 1 and self.rng.random() < 0.5:  # a list of what is one field of each
            items = [_answer(fact.get(kept[0].name), keep=False) for fact in found]
            if all(item is not None for item in items) and kept[0].kind == "text":
                schema = {"type": "array", "items": {"type": "string"}, "description": kept[0].description}
                return _styled(f"{kept[0].name} list", self.style), schema, items, True
        columns = [(each, self.name(each), self.typed(each)) for each in kept]
        properties = {
            label: {"anyOf": [typed, {"type": "null"}]} if any(f.get(each.name) is None for f in found) else typed
            for each, label, typed in columns
        }
        record = {"type": "object", "properties": properties, "required": list(properties)}
        items = [
            {label: _answer(fact.get(each.name), keep="enum" in typed or typed.get("type") == "boolean")
             for each, label, typed in columns}
            for fact in found
        ]  # fmt: skip
        return name, {"type": "array", "items": record, **self.described_schema(field)}, items, True

    def currency(self) -> Sequence[tuple[str, dict[str, Any], Any, bool]]:
        """Sometimes a field for the currency of an amount: a choice that the text spells in its own way."""
        facts = [self.document.values.get(field.name) for field in self.document.fields if field.kind == "amount"]
        places = [(fact, found) for fact in facts if isinstance(fact, Fact) and (found := _CURRENCY.search(fact.text))]
        if not places or self.rng.random() > 0.25:
            return []
        fact, found = self.rng.choice(places)
        code = _SIGNS.get(found[0], found[0])
        others = [each for each in ("EUR", "USD", "GBP", "CHF", "JPY", "SEK", "PLN", "CAD") if each != code]
        codes = [code, *self.rng.sample(others, self.rng.randrange(1, 5))]
        self.rng.shuffle(codes)
        answer = KnownValue(fact.start + found.start(), fact.start + found.end(), code)
        return [(_styled(self.rng.choice(_CURRENCY_NAMES), self.style), {"enum": codes}, answer, True)]

    def absent(self) -> tuple[str, dict[str, Any], Any, bool]:
        """A field of another kind of document, which this one does not say."""
        own = {each.name for field in self.document.fields for each in (field, *field.fields)}
        while True:
            kind = self.rng.choice(documents.KINDS)
            lists = [
                f for f in _fields(kind) if f.kind == "list" and not own & {f.name, *(each.name for each in f.fields)}
            ]
            if lists and self.rng.random() < 0.25:
                field = self.rng.choice(lists)
                return self.list(self.name(field), field, [])
            fields = [f for f in _fields(kind) if f.kind == "text" and f.name not in own]
            rare = [f for f in fields if not _COMMON.search(f.name)]
            if rare and kind != self.document.kind:
                field = self.rng.choice(rare)
                return self.name(field), {"type": "string", **self.described_schema(field)}, None, False

    def typed(self, field: FieldSpec) -> dict[str, Any]:
        """The type of a value."""
        if field.kind in _FORMATS and self.rng.random() < 0.75:
            return {"type": "string", "format": _FORMATS[field.kind]}
        if field.kind in _TYPES:
            return {"type": self.rng.choice(_TYPES[field.kind])}
        if field.kind == "choice" and self.rng.random() < 0.8:
            return {"enum": self.rng.sample(field.choices, len(field.choices))}
        if field.kind == "flag":
            return {"type": "boolean"}
        return {"type": "string"}

    def described_schema(self, field: FieldSpec) -> dict[str, Any]:
        said = self.cryptic or self.rng.random() < self.described
        return {"description": field.description} if said and field.description else {}

    def name(self, field: FieldSpec) -> str:
        """A name for a field in the style of this form."""
        if self.cryptic:
            return self.rng.choice(("f", "field_", "col", "x")) + str(self.rng.randrange(100))
        aliases = field.aliases.get(self.language)
        if aliases and (self.language != "en" or self.rng.random() < self.aliased):
            alias = self.rng.choice(aliases)
            return alias if self.rng.random() < 0.5 else _styled(_words(alias), self.style)
        return _styled(_words(field.name), self.style)


@functools.cache
def _fields(kind: str) -> tuple[FieldSpec, ...]:
    return documents.sample(kind, language="en", seed=0).fields


def _answer(fact: Fact | None, *, keep: bool) -> KnownValue | None:
    if fact is None:
        return None
    return KnownValue(fact.start, fact.end, fact.value if keep else None)


_NULL_WEIGHT: Final = 2.0
_END_WEIGHT: Final = 3.0  # an item too many is several wrong values
_SIGNS: Final = {"€": "EUR", "$": "USD", "£": "GBP"}
_CURRENCY: Final = re.compile(r"[€$£]|\b(?:EUR|USD|GBP|CHF)\b")
_CURRENCY_NAMES: Final = ("currency", "currency", "currency code", "währung", "devise", "moneda", "valuta", "ccy")
_STYLES: Final = ("snake", "snake", "snake", "camel", "pascal", "kebab", "words", "title", "upper")
_GROUPS: Final = ("details", "info", "data", "meta", "header", "main", "general", "document", "record", "content")
_COMMON: Final = re.compile(r"name|date|time|phone|mail|address|city|id|number|note|subject|sender|contact|comment")


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[_\-.]+", " ", name).lower().strip()


def _styled(words: str, style: str) -> str:
    """A name of several words as programs spell it.

    >>> _styled("invoice number", "camel"), _styled("invoice number", "upper")
    ('invoiceNumber', 'INVOICE_NUMBER')
    """
    parts = words.split()
    match style:
        case "camel":
            return parts[0] + "".join(part.capitalize() for part in parts[1:])
        case "pascal":
            return "".join(part.capitalize() for part in parts)
        case "kebab":
            return "-".join(parts)
        case "words":
            return " ".join(parts)
        case "title":
            return " ".join(part.capitalize() for part in parts)
        case "upper":
            return "_".join(parts).upper()
    return "_".join(parts)


def examples(model: LanguageModel, split: ExampleSplit, max_length: int) -> ExampleSampler:
    """A sampler of documents with forms.

    Args:
        model: provides tokenizer and chat template.
        split: the documents that may occur.
        max_length: most tokens of an example.
    """
    from pippin.session.extraction.prompt import encode_prompt

    def sample(rng: random.Random) -> ConstrainedExample | None:
        task = sample_task(rng, split.kinds, split.languages, split.layouts_of)
        return tokenize_task(task, lambda text: encode_prompt(model, text), model.tokenizer, max_length=max_length)

    return sample


@dataclass(frozen=True)
class FormItem:
    """A document, a schema, and the value that is right.

    Attributes:
        text: the document.
        language: its language.
        schema: the JSON Schema of the form.
        expected: the value, as the schema has it.
        kind: kind of the document.
        layout: its layout.
    """

    text: str
    language: str
    schema: dict[str, Any]
    expected: Any
    kind: str
    layout: str


def items(count: int, *, seed: int, split: ExampleSplit) -> list[FormItem]:
    """Documents with forms and the values that are right, to evaluate on.

    Args:
        count: how many.
        seed: of the documents and forms.
        split: the documents that may occur.
    """
    rng, found = random.Random(f"items/{seed}"), list[FormItem]()
    while len(found) < count:
        task = sample_task(rng, split.kinds, split.languages, split.layouts_of)
        document = task.document
        try:
            form = Form(task.schema, SourceText(document.text, language=document.language))
            expected = form.read(write(form, task.answers)).value
        except (InvalidArgument, EmptySchema):
            continue
        found.append(FormItem(document.text, document.language, task.schema, expected, document.kind, document.layout))
    return found


# --- tokens -----------------------------------------------------------------------------------------------------------


def tokenize_task(
    task: FormTask, encode_prompt: Callable[[str], Sequence[int]], tokenizer: Any, *, max_length: int
) -> ConstrainedExample | None:
    """The tokens of a task and the choices among them; None where it is too long or its form cannot be filled in.

    Args:
        task: the task.
        encode_prompt: the tokens before the answer, for a text.
        tokenizer: of the model.
        max_length: most tokens of an example.
    """
    try:
        form = Form(task.schema, SourceText(task.document.text, language=task.document.language))
        answer = write(form, task.answers)
    except (InvalidArgument, EmptySchema):
        return None
    prompt, ids = list(encode_prompt(task.document.text)), tokenizer.encode(answer)
    if len(prompt) + len(ids) > max_length:
        return None
    example = constrained_example(prompt, ids, form.grammar, tokenizer)
    return None if example is None else replace(example, weights=_weights(example, tokenizer))


def _weights(example: ConstrainedExample, tokenizer: Any) -> Float[np.ndarray, " choices"]:
    """More for the choices that decide about whole values: whether there is one, and whether a list goes on."""
    texts, ends, nothing = _deciding_tokens(tokenizer)
    weights = np.ones(len(example.targets))
    weights[_any(example.allowed, nothing)] = _NULL_WEIGHT
    # in the middle of a text, its end may end the list too
    decides = np.array([not set("[],").isdisjoint(texts[target]) for target in example.targets])
    weights[_any(example.allowed, ends) & decides] = _END_WEIGHT
    return weights


def _any(
    allowed: UInt8[np.ndarray, "choices bytes"], bits: UInt8[np.ndarray, " bytes"]
) -> Bool[np.ndarray, " choices"]:
    size = min(allowed.shape[1], len(bits))
    found: Bool[np.ndarray, " n"] = (allowed[:, :size] & bits[:size]).any(1)
    return found


@functools.cache
def _deciding_tokens(tokenizer: Any) -> tuple[list[str], UInt8[np.ndarray, " bytes"], UInt8[np.ndarray, " bytes"]]:
    """The texts of all tokens, the bits of those that end a list, and of those that are null."""
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    ends, nothing = ([rule(text) for text in texts] for rule in (lambda t: "]" in t, lambda t: t.strip() == "null"))
    return texts, np.packbits(ends, bitorder="little"), np.packbits(nothing, bitorder="little")

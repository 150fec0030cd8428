"""Whether the grammar of a schema can generate a JSON value, whatever the order of properties and spelling of numbers.

Notable here:
- the grammar writes properties in the order of their declaration, then others in any order; so the orders to try are
  those of the shapes that the schema has at each place, not all permutations
- what follows a text depends on the text alone, so each text of a part is tried once
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, Final

from pippin.core.errors import InvalidInput
from pippin.engine.grammar.constraint import Constraint, Grammar
from pippin.engine.grammar.json_schema import SchemaReader
from pippin.engine.grammar.json_values import Array, Key, Object
from pippin.engine.grammar.regex import byte_tokenizer

MAX_STEPS: Final = 20_000
"""Parts of texts that are tried for one value."""


class _ByteTokenizer:
    grammar_tokenizer = byte_tokenizer()


def can_generate(
    schema: dict[str, Any] | bool,
    value: Any,
    *,
    grammar: Grammar | None = None,
    separators: tuple[str, str] = (", ", ": "),
) -> bool:
    """Whether some JSON text of a value is generated under a schema; arguments and errors as `generated_text`.

    >>> schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    >>> Grammar.json_schema(schema).allows('{"b": 1.0, "a": 2}'), can_generate(schema, {"b": 1.0, "a": 2})
    (False, True)
    """
    return generated_text(schema, value, grammar=grammar, separators=separators) is not None


def generated_text(
    schema: dict[str, Any] | bool,
    value: Any,
    *,
    grammar: Grammar | None = None,
    separators: tuple[str, str] = (", ", ": "),
) -> str | None:
    """A JSON text of a value that is generated under a schema; None if there is none.

    Args:
        schema: JSON Schema.
        value: what `json.loads` returns.
        grammar: that of the schema, where it is at hand.
        separators: those that the grammar was made with.

    Raises:
        InvalidInput: so many orders that the answer would take too long.

    >>> generated_text({"type": "object", "properties": {"a": {}, "b": {}}}, {"b": 1.0, "a": 2})
    '{"a": 2, "b": 1.0}'
    """
    grammar = grammar or Grammar.json_schema(schema, separators=separators)
    search = _Search(SchemaReader(schema), separators)
    found = search.after(grammar.start(_ByteTokenizer()), value, (("schema", "#"),))
    return next((text for text, state in found if state.may_end), None)


class _Search:
    """Depth first through the texts, as far as the grammar goes along; each is yielded with the state after it."""

    def __init__(self, reader: SchemaReader, separators: tuple[str, str]) -> None:
        self.reader = reader
        self.comma, self.colon = separators
        self.steps = 0

    def read(self, state: Constraint, text: str) -> Constraint | None:
        """The state after a text; None where the grammar does not allow it."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise InvalidInput(f"more than {MAX_STEPS:,} parts of texts of the value were tried")
        try:
            data = list(text.encode())
        except UnicodeEncodeError:  # half of a surrogate pair, which no UTF-8 text can spell
            return None
        found = state.fork()
        return found if found.follow(data) else None

    def after(self, state: Constraint, value: Any, key: Key) -> Iterator[tuple[str, Constraint]]:
        tried: set[str] = set()
        for parts, closing in self.parts(value, key):
            for text, found in self.after_parts(state, parts, closing):
                if text not in tried:
                    tried.add(text)
                    yield text, found

    def parts(self, value: Any, key: Key) -> Iterator[tuple[list[tuple[str, Any, Key]], str]]:
        """Ways to write a value: fixed texts, each with the value after it and its key, and the text at the end."""
        if isinstance(value, dict):
            for shape in self.reader.shapes(key):
                if isinstance(shape, Object):
                    shape = shape.with_names(shape.required)
                    names = [name for name, _ in shape.properties if name in value]
                    names += [name for name in value if name not in names]
                    marks = ["{", *[self.comma] * len(names)]
                    quoted = [json.dumps(name, ensure_ascii=False) + self.colon for name in names]
                    yield (
                        [(f"{m}{q}", value[n], shape.key(n)) for m, q, n in zip(marks, quoted, names, strict=False)],
                        "}" if names else "{}",
                    )
        elif isinstance(value, list):
            for shape in self.reader.shapes(key):
                if isinstance(shape, Array):
                    marks = ["[", *[self.comma] * len(value)]
                    items = [(m, item, shape.at(i)) for i, (m, item) in enumerate(zip(marks, value, strict=False))]
                    yield items, "]" if value else "[]"
        else:
            texts = spellings(value)
            if self.reader.references.resource("#").draft <= 4:  # where 1.0 is no integer
                texts = texts[:1]
            yield from (([], text) for text in texts)

    def after_parts(
        self, state: Constraint, parts: Sequence[tuple[str, Any, Key]], closing: str
    ) -> Iterator[tuple[str, Constraint]]:
        if not parts:
            if (ended := self.read(state, closing)) is not None:
                yield closing, ended
            return
        mark, value, key = parts[0]
        begun = self.read(state, mark)
        if begun is not None:
            for text, found in self.after(begun, value, key):
                yield from ((mark + text + rest, end) for rest, end in self.after_parts(found, parts[1:], closing))


def spellings(value: Any) -> list[str]:
    """The JSON texts of a scalar.

    >>> spellings(2.0), spellings(1e22)
    (['2.0', '2'], ['1e+22', '10000000000000000000000', '1e22'])
    """
    texts = [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        plain = format(Decimal(repr(value)), "f")
        texts += [plain.removesuffix(".0"), texts[0].replace("e+", "e")]
    return list(dict.fromkeys(texts))

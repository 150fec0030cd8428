"""What an answer may be: a Python type, a JSON Schema, a regular expression, a list of choices or a grammar.

Notable here:
- every constraint is enforced while the answer is written, whatever the model would like to say; one that cannot be is
  refused when the schema is made, with the names of field and guide
- `snapshot` reads an unfinished answer: what has not begun is None, what is growing holds its beginning
- a schema can be put together at run time (`Schema.object` …): it is checked as soon as its references are all known
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import ValidationError
from pydantic_core import CoreSchema, core_schema

from pippin.core.errors import (
    EmptySchema,
    InvalidArgument,
    InvalidInput,
    SchemaError,
    UnsupportedGuide,
)
from pippin.engine import json_grammar
from pippin.engine.constraint import Grammar
from pippin.session import dialect, dynamic, partial

T = TypeVar("T")


@dataclass(frozen=True)
class Regex:
    """Texts that a regular expression matches from end to end; also a guide: ``Annotated[str, Regex("[A-Z]{3}")]``."""

    pattern: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.str_schema(pattern=f"^(?:{self.pattern})$")


@dataclass(frozen=True, init=False)
class Choice:
    """One of some texts; also a guide: ``Annotated[str, Choice(["Rome", "Oslo"])]``.

    Raises:
        EmptySchema: no texts. InvalidArgument: one text instead of a list.
    """

    texts: tuple[str, ...]

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise InvalidArgument(f"a choice is a list of texts, got the text {texts!r}")
        if not texts:
            raise EmptySchema("a choice needs at least one text to choose")
        object.__setattr__(self, "texts", tuple(dict.fromkeys(texts)))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self.texts))


AnyOf = Choice


@dataclass(frozen=True)
class Lark:
    """Texts of a Lark grammar in llguidance's dialect; its first rule is ``start``."""

    source: str


class Schema(Generic[T]):
    """A kind of answer.

    Args:
        target: a Pydantic model, dataclass, TypedDict, Enum, Literal, ``list[T]``, ``dict[str, T]``, tuple, set, union
            or anything else that Pydantic validates; a JSON Schema as a dict; `Regex`, `Choice` or `Lark`.

    At run time a schema is put together with `object`, `array`, `any_of`, `ref` and the primitives. Wherever they take
    a schema, they take a Python type or a JSON Schema too. Answers are plain dicts (in the order of the properties) and
    lists. A schema is **complete** when each `ref` in it names a type in it; an `object` or a named `any_of` is such a
    type, also for what stands inside it. A complete schema has been checked; another one is only good for building on,
    or to be completed with `resolve`: to use it before raises UndefinedReference.

    Raises:
        UnsupportedGuide: a constraint that cannot be enforced; it names field and guide. Validators written in Python
            are such: a grammar cannot follow them.
        EmptySchema: nothing satisfies it. UndefinedReference: a ``$ref`` points at nothing.
        DuplicateProperty, DuplicateType: an object names a property twice, or two different types have one name.
        SchemaError: it cannot describe an answer for another reason.

    >>> from typing import Literal
    >>> Schema(Literal["red", "green"]).parse('"red"')
    'red'
    >>> Schema(list[int]).snapshot("[1, 2, 3")
    [1, 2]
    >>> city = Schema.object("City", {"name": Schema.string(), "near": Schema.array(Schema.ref("City"), max_items=3)})
    >>> city.parse('{"name": "Oslo", "near": []}')
    {'name': 'Oslo', 'near': []}
    """

    json_schema: dict[str, Any] | None
    grammar: Grammar

    def __init__(self, target: type[T] | dict[str, Any] | Regex | Choice | Lark | Any) -> None:
        self.target: Any = target
        self._adapter = None
        self._has_ids = False
        if isinstance(target, dynamic.Part):
            if target.missing:
                return  # not complete: `__getattr__` tells whoever wants to use it
            self.json_schema = target.document()
            self.grammar = Grammar(json_grammar.write(self.json_schema, strict=True))
            return
        self.json_schema = None
        if isinstance(target, Regex):
            self.grammar = Grammar.regex(target.pattern)
        elif isinstance(target, Choice):
            self.grammar = Grammar.choice(target.texts)
        elif isinstance(target, Lark):
            self.grammar = Grammar.lark(target.source)
        elif isinstance(target, dict):
            self.json_schema = target
            self.grammar = Grammar.json_schema(target)
        else:
            self._adapter, self.json_schema = dialect.describe(target)
            self.grammar = Grammar(json_grammar.write(self.json_schema, strict=True))
            self._has_ids = partial.has_ids(target)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("json_schema", "grammar") and isinstance(self.__dict__.get("target"), dynamic.Part):
                self.target.document()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def of(cls, target: Any) -> Schema[Any]:
        """``target`` itself if it is a schema, else a schema of it."""
        return target if isinstance(target, Schema) else cls(target)

    def __repr__(self) -> str:
        return f"Schema({self.target!r})"

    @cached_property
    def partial_type(self) -> Any:
        """The type of unfinished answers: every field optional."""
        return str if self.json_schema is None else Any if self._adapter is None else partial.partial_type(self.target)

    def parse(self, text: str, *, identity: str = "") -> T:
        """The answer as a value.

        Args:
            text: the whole answer.
            identity: tells this answer from others; fields of type `GenerationID` are made from it.

        Raises:
            InvalidInput: the text is not an answer of this kind; what was written under `grammar` always is.
        """
        result: Any = text
        if self._adapter is not None:
            try:
                result = self._adapter.validate_json(text)
            except ValidationError as error:
                raise InvalidInput(f"{text[:200]!r} does not fit {self!r}: {error}") from error
            if self._has_ids:
                partial.set_ids(self.target, result, identity)
        elif self.json_schema is not None:
            try:
                result = json.loads(text)
            except ValueError as error:
                raise InvalidInput(f"{text[:200]!r} is not JSON: {error}") from error
            if not any(map(self.fits, (text, json.dumps(result, ensure_ascii=False)))):
                raise InvalidInput(f"{text[:200]!r} does not fit the JSON Schema")
        elif not self.fits(text):
            raise InvalidInput(f"{text[:200]!r} does not fit {self!r}")
        return result  # type: ignore[no-any-return]

    def fits(self, text: str) -> bool:
        """Whether the grammar allows exactly this text."""
        return self.grammar.allows(text)

    def snapshot(self, text: str, *, complete: bool = False, identity: str = "") -> Any:
        """The value of an answer that is still being written.

        Args:
            text: what has been written so far.
            complete: it is the whole answer (the last snapshot); only a number by itself does not show that.
            identity: tells this answer from others; fields of type `GenerationID` are made from it.

        Returns:
            The parsed answer once it is whole; before, a value of `partial_type`: fields that have not begun are None,
            growing strings and lists hold their beginning, and numbers, dates and other values that cannot be used
            in part appear when they are complete.
        """
        if self.json_schema is None:
            return self.parse(text) if complete else text
        value, whole = partial.parse_partial(text)
        if complete or whole:
            return self.parse(text, identity=identity)
        if self._adapter is None:
            return value
        found = partial.fill(self.target, value)
        if self._has_ids:
            partial.set_ids(self.target, found, identity)
        return found

    def prompt_text(self) -> str:
        """What to tell the model about the answer; advice only, the grammar holds without it."""
        if isinstance(self.target, Regex):
            return f"Answer with a text that matches the regular expression {self.target.pattern}"
        if isinstance(self.target, Choice):
            return "Answer with one of: " + ", ".join(self.target.texts)
        if isinstance(self.target, Lark):
            return "Answer with a text of this grammar:\n" + self.target.source
        return "Answer with JSON that fits this JSON Schema:\n" + json.dumps(
            _advice(self.json_schema), ensure_ascii=False
        )

    # --- put together at run time -------------------------------------------------------------------------------------

    @classmethod
    def object(
        cls,
        name: str,
        properties: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        optional: Iterable[str] = (),
        description: str = "",
    ) -> Schema[dict[str, Any]]:
        """An object; it is written in the order of its properties, and has no others.

        Args:
            name: of the type, for `ref`, for the model and for messages.
            properties: schemas, Python types or JSON Schemas by name.
            optional: names of those that the model may leave out.
            description: what the model should know about it.

        Raises:
            DuplicateProperty: a name comes twice. DuplicateType: two different types have one name.
            UnsupportedGuide: a guide cannot be enforced; it names property and guide. UndefinedReference,
            EmptySchema, SchemaError: see `Schema`.
        """
        pairs = properties.items() if isinstance(properties, Mapping) else properties
        parts = []
        for each, target in pairs:
            try:
                parts.append((each, _part(target)))
            except UnsupportedGuide as error:
                field = error.field if error.field not in ("", "#") else str(each)
                raise UnsupportedGuide(f"{name}.{each}: {error}", field=field, guide=error.guide) from error
            except SchemaError as error:
                raise type(error)(f"{name}.{each}: {error}") from error
        made: Schema[Any] = cls(dynamic.object_of(name, parts, optional, description))
        return made

    @classmethod
    def array(
        cls, items: Any, *, min_items: int | None = None, max_items: int | None = None, description: str = ""
    ) -> Schema[list[Any]]:
        """A list of items of one schema.

        >>> Schema.array(Schema.boolean(), max_items=2).fits("[true, true, true]")
        False
        """
        made: Schema[Any] = cls(dynamic.array_of(_part(items), min_items, max_items, description))
        return made

    @classmethod
    def any_of(cls, choices: Iterable[Any], *, name: str = "", description: str = "") -> Schema[Any]:
        """One of several schemas, Python types and constants (texts, numbers, True, False, None).

        Args:
            choices: at least one.
            name: makes it a type of that name, for `ref`.
            description: what the model should know about it.

        Raises:
            EmptySchema: there are no choices. SchemaError: one text instead of a list; else as `object`.

        >>> Schema.any_of(["Rome", "Oslo", Schema.null()]).parse('"Oslo"')
        'Oslo'
        """
        if isinstance(choices, str):
            raise SchemaError(f"choices are a list, got the text {choices!r}")
        listed = list(choices)
        constants = [each for each in listed if each is None or isinstance(each, str | int | float)]
        parts = [_part(each) for each in listed if not (each is None or isinstance(each, str | int | float))]
        return cls(dynamic.any_of(parts, constants, name, description))

    @classmethod
    def ref(cls, name: str) -> Schema[Any]:
        """The type of that name, which may be defined later and may contain this very reference."""
        return cls(dynamic.reference(name))

    @classmethod
    def primitive(
        cls, kind: Literal["string", "integer", "number", "boolean", "null"], *, description: str = "", **guides: Any
    ) -> Schema[Any]:
        """A primitive whose kind and guides are known at run time only; the guides are those of `string` and its like.

        Raises:
            UnsupportedGuide: a guide that does not apply to the kind, or cannot be enforced.
        """
        return cls(dynamic.primitive(kind, description, **guides))

    @classmethod
    def string(
        cls,
        *,
        choices: Iterable[str] | None = None,
        const: str | None = None,
        pattern: str | None = None,
        min_length: int | None = None,
        max_length: int | None = None,
        format: str | None = None,
        description: str = "",
    ) -> Schema[str]:
        """A text.

        Args:
            choices, const: all that it may be.
            pattern: a regular expression that matches it from end to end.
            min_length, max_length: in characters.
            format: of JSON Schema: "date", "email", "uuid" …
            description: what the model should know about it.
        """
        guides = {"choices": choices, "const": const, "pattern": pattern, "min_length": min_length}
        return cls.primitive("string", description=description, **guides, max_length=max_length, format=format)

    @classmethod
    def integer(
        cls,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
        multiple_of: int | None = None,
        choices: Iterable[int] | None = None,
        const: int | None = None,
        description: str = "",
    ) -> Schema[int]:
        """A whole number between two bounds, which it may be; or one of some choices."""
        guides = {"minimum": minimum, "maximum": maximum, "multiple_of": multiple_of, "choices": choices}
        return cls.primitive("integer", description=description, **guides, const=const)

    @classmethod
    def number(
        cls,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        exclusive_minimum: float | None = None,
        exclusive_maximum: float | None = None,
        multiple_of: float | None = None,
        choices: Iterable[float] | None = None,
        const: float | None = None,
        description: str = "",
    ) -> Schema[float]:
        """A number between two bounds, which it may be unless they are exclusive; or one of some choices."""
        bounds = {"exclusive_minimum": exclusive_minimum, "exclusive_maximum": exclusive_maximum}
        guides = {"minimum": minimum, "maximum": maximum, "multiple_of": multiple_of, "choices": choices}
        return cls.primitive("number", description=description, **bounds, **guides, const=const)

    @classmethod
    def boolean(cls, *, const: bool | None = None, description: str = "") -> Schema[bool]:
        """True or false."""
        return cls.primitive("boolean", description=description, const=const)

    @classmethod
    def null(cls) -> Schema[None]:
        """Nothing: null, which is None."""
        return cls.primitive("null")

    def resolve(self, *types: Any) -> Schema[T]:
        """The same schema, its references resolved by the types that these schemas define.

        It is complete: for types that refer to each other, each is made on its own, then the root is resolved.

        Raises:
            UndefinedReference: a reference that is still not defined. DuplicateType: two different types of one name.

        >>> firm = Schema.object("Firm", {"name": str, "staff": Schema.array(Schema.ref("Person"))})
        >>> person = Schema.object("Person", {"name": str, "founded": Schema.array(Schema.ref("Firm"))})
        >>> firm.resolve(person).fits('{"name": "A", "staff": []}')
        True
        """
        part = _part(self).with_types(map(_part, types))
        part.document()
        return type(self)(part)


def _part(target: Any) -> dynamic.Part:
    """A schema, a Python type or a JSON Schema as a part of another schema."""
    if isinstance(target, str):
        raise SchemaError(f"a schema is wanted, got the text {target!r}; a constant is Schema.any_of([{target!r}])")
    inner = target.target if isinstance(target, Schema) else target
    if isinstance(inner, dynamic.Part):
        return inner
    if isinstance(inner, Choice):
        return dynamic.any_of([], inner.texts, "", "")
    if isinstance(inner, Regex):
        return dynamic.primitive("string", pattern=inner.pattern)
    if isinstance(inner, Lark):
        raise UnsupportedGuide("a Lark grammar cannot be a part of JSON", guide="Lark")
    return dynamic.of_json_schema(inner) if isinstance(inner, dict) else dynamic.of_type(dialect.describe(inner)[1])


def _advice(schema: Any) -> Any:
    """The schema without what only the grammar needs: a prompt costs tokens."""
    if isinstance(schema, list):
        return [_advice(item) for item in schema]
    if isinstance(schema, dict):
        hidden = [
            key
            for key, value in schema.items()
            if key == "x-order" or (key == "additionalProperties" and value is False)
        ]
        return {key: _advice(value) for key, value in schema.items() if key not in hidden}
    return schema

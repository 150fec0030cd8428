"""Schemas of answers: a Python type, a JSON Schema, a regular expression, a list of choices or a grammar.

Notable here:
- every constraint is enforced during decoding; one that cannot be is refused when the schema is created, with the names
  of field and constraint
- a verbatim string is a part of the conversation; until that is known (`over`), it is any string
- validators written in Python (`field_validator`, `AfterValidator` …) run on the finished answer: `parse` raises
  `InvalidAnswer` where one does not accept it, and a session asks again
- `snapshot` parses an unfinished answer: what has not started is None, what is growing holds its beginning
- a schema can be built at run time (`Schema.object` …): it is checked as soon as its references are all defined
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import ValidationError
from pydantic_core import CoreSchema, core_schema

from pippin.core.errors import (
    EmptySchema,
    InvalidAnswer,
    InvalidArgument,
    InvalidInput,
    SchemaError,
    UnsupportedGuide,
)
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.string_formats import VERBATIM
from pippin.session.types import dynamic_schema, json_schema as python_types, partial_json

T = TypeVar("T")


@dataclass(frozen=True)
class Regex:
    """Texts that a regular expression matches from end to end; also a constraint:
    ``Annotated[str, Regex("[A-Z]{3}")]``."""

    pattern: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.str_schema(pattern=f"^(?:{self.pattern})$")


@dataclass(frozen=True, init=False)
class Choice:
    """One of several texts; also a constraint: ``Annotated[str, Choice(["Rome", "Oslo"])]``.

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
class Verbatim:
    """A string that is a part of the conversation, in whole words: ``Annotated[str, Verbatim()]``.

    The grammar admits parts of the prompts and of the outputs of tools, and nothing else. In a JSON Schema it is
    ``{"type": "string", "format": "verbatim"}``; bounds of the length and a pattern may be added.
    """

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "format": VERBATIM}


@dataclass(frozen=True)
class Lark:
    """Texts of a Lark grammar in llguidance's dialect; its first rule is ``start``."""

    source: str


class Schema(Generic[T]):
    """The schema of an answer.

    Args:
        target: a Pydantic model, dataclass, TypedDict, Enum, Literal, ``list[T]``, ``dict[str, T]``, tuple, set, union
            or anything else that Pydantic validates; a JSON Schema as a dict; `Regex`, `Choice`, `Lark`
            or a `Grammar`.
        strict: whether a JSON Schema given as a dict is refused where something in it would be ignored with a note:
            what is no keyword, formats without a definition, properties without any possible value. Types always are.

    Build a schema at run time with `object`, `array`, `any_of`, `ref` and the primitives. Wherever they take a schema,
    they also take a Python type or a JSON Schema. Answers are plain dicts (in the order of the properties) and lists. A
    schema is **complete** when each `ref` in it names a type in it; an `object` or a named `any_of` is such a type,
    also inside itself. A complete schema has been checked. An incomplete one can only be used in other schemas or
    completed with `resolve`; any other use raises UndefinedReference.

    Raises:
        UnsupportedGuide: a constraint that cannot be enforced, such as a lower bound of a date; the error names field
            and constraint.
        EmptySchema: nothing satisfies it. UndefinedReference: a ``$ref`` to an undefined type.
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
    validators: tuple[str, ...]

    def __init__(self, target: type[T] | dict[str, Any] | Regex | Choice | Lark | Any, *, strict: bool = False) -> None:
        self.target: Any = target
        self._adapter = None
        self._has_ids = False
        self.validators: tuple[str, ...] = ()
        if isinstance(target, dynamic_schema.SchemaPart):
            if target.missing:
                return  # not complete: `__getattr__` raises on use
            self.json_schema = target.document()
            self.grammar = Grammar.json_schema(self.json_schema, strict=True)
            return
        self.json_schema = None
        if isinstance(target, Regex):
            self.grammar = Grammar.regex(target.pattern)
        elif isinstance(target, Choice):
            self.grammar = Grammar.choice(target.texts)
        elif isinstance(target, Lark):
            self.grammar = Grammar.lark(target.source)
        elif isinstance(target, Grammar):
            self.grammar = target
        elif isinstance(target, dict):
            self.json_schema = target
            self.grammar = Grammar.json_schema(target, strict=strict)
        else:
            self._adapter, self.json_schema, self.validators = python_types.describe(target)
            self.grammar = Grammar.json_schema(self.json_schema, strict=True)
            self._has_ids = partial_json.has_ids(target)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("json_schema", "grammar") and isinstance(
                self.__dict__.get("target"), dynamic_schema.SchemaPart
            ):
                self.target.document()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def of(cls, target: Any) -> Schema[Any]:
        """``target`` itself if it is a schema, else a schema of it."""
        return target if isinstance(target, Schema) else cls(target)

    def __repr__(self) -> str:
        target = "Grammar(…)" if isinstance(self.target, Grammar) else repr(self.target)  # which may hold a whole text
        return f"Schema({target})"

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the schema is not enforced, and which lists end by default; a sentence each."""
        return self.grammar.notes

    @cached_property
    def partial_type(self) -> Any:
        """The type of unfinished answers: every field optional."""
        return (
            str
            if self.json_schema is None
            else Any
            if self._adapter is None
            else partial_json.partial_type(self.target)
        )

    def parse(self, text: str, *, identity: str = "") -> T:
        """The answer as a value.

        Args:
            text: the whole answer.
            identity: identifies this answer; fields of type `GenerationID` are derived from it.

        Raises:
            InvalidInput: the text does not match; text generated under `grammar` always does.
            InvalidAnswer: one of `validators` did not accept it.
        """
        result: Any = text
        if self._adapter is not None:
            try:
                result = self._adapter.validate_json(text)
            except ValidationError as error:
                if self.validators and error.errors(include_url=False)[0]["type"] != "json_invalid":
                    raise self._not_accepted(text, error) from error
                raise InvalidInput(f"{text[:200]!r} does not fit {self!r}: {error}") from error
            if self._has_ids:
                partial_json.set_ids(self.target, result, identity)
        elif self.json_schema is not None:
            try:
                result = json.loads(text)
            except ValueError as error:
                raise InvalidInput(f"{text[:200]!r} is not JSON: {error}") from error
            spellings = (text, json.dumps(result, ensure_ascii=False))
            if not any(map(self.is_valid, spellings)) and not any(map(self._longer.allows, spellings)):
                raise InvalidInput(f"{text[:200]!r} does not fit the JSON Schema")
        elif not self.is_valid(text):
            raise InvalidInput(f"{text[:200]!r} does not fit {self!r}")
        return result  # type: ignore[no-any-return]

    def _not_accepted(self, text: str, error: ValidationError) -> InvalidAnswer:
        reasons = []
        for each in error.errors(include_url=False, include_input=False):
            said = each["ctx"]["error"] if each["type"] in ("value_error", "assertion_error") else each["msg"]
            where = ".".join(map(str, each["loc"]))
            reasons.append(f"{where}: {said}" if where else str(said))
        reason = "; ".join(reasons)
        names = ", ".join(self.validators)
        return InvalidAnswer(
            f"{text[:200]!r} was not accepted by the validators of the type ({names}): {reason}",
            value=json.loads(text),
            text=text,
            reason=reason,
        )

    def is_valid(self, text: str) -> bool:
        """Whether the grammar allows exactly this text."""
        return self.grammar.allows(text)

    def over(self, parts: str) -> Schema[T]:
        """The schema in which verbatim strings (see `Verbatim`) are parts of a text; before, they are any strings.

        Args:
            parts: the parts of the text, as `Grammar.over` takes them: `pippin.session.extraction.SourceText.grammar`.
        """
        if not self.grammar.is_verbatim:
            return self
        made = copy.copy(self)
        made.grammar = self.grammar.over(parts)
        return made

    @cached_property
    def _longer(self) -> Grammar:
        """The grammar with lists of any length: another model's answer may be longer than what ours would write."""
        assert self.json_schema is not None
        return Grammar.json_schema(self.json_schema, max_items=None)

    def snapshot(self, text: str, *, complete: bool = False, identity: str = "") -> Any:
        """The value of an answer that is still being written.

        Args:
            text: the text so far.
            complete: whether it is the whole answer (the last snapshot); a number by itself does not show that.
            identity: identifies this answer; fields of type `GenerationID` are derived from it.

        Returns:
            The parsed answer once it is complete; before, a value of `partial_type`: fields that have not started are
            None, growing strings and lists hold their beginning, and numbers, dates and other values that cannot be
            used in part appear when they are complete.
        """
        if self.json_schema is None:
            return self.parse(text) if complete else text
        value, whole = partial_json.parse_partial(text)
        if complete or (whole and not self.validators):  # which see the final value alone
            return self.parse(text, identity=identity)
        if self._adapter is None:
            return value
        found = partial_json.fill(self.target, value)
        if self._has_ids:
            partial_json.set_ids(self.target, found, identity)
        return found

    def prompt_text(self) -> str:
        """The description of the answer for the prompt; optional, since the grammar enforces the schema."""
        if isinstance(self.target, Regex):
            return f"Answer with a text that matches the regular expression {self.target.pattern}"
        if isinstance(self.target, Choice):
            return "Answer with one of: " + ", ".join(self.target.texts)
        if isinstance(self.target, Lark | Grammar):
            return "Answer with a text of this grammar:\n" + self.target.source
        return "Answer with JSON that fits this JSON Schema:\n" + json.dumps(
            _advice(self.json_schema), ensure_ascii=False
        )

    # --- run-time schemas
    # -------------------------------------------------------------------------------------------------

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
            name: name of the type, for `ref`, for the model and for messages.
            properties: schemas, Python types or JSON Schemas by name.
            optional: names of properties that the model may leave out.
            description: description for the model.

        Raises:
            DuplicateProperty: a name comes twice. DuplicateType: two different types have one name.
            UnsupportedGuide: a constraint cannot be enforced; the error names property and constraint.
                UndefinedReference, EmptySchema, SchemaError: see `Schema`.
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
        made: Schema[Any] = cls(dynamic_schema.object_of(name, parts, optional, description))
        return made

    @classmethod
    def array(
        cls, items: Any, *, min_items: int | None = None, max_items: int | None = None, description: str = ""
    ) -> Schema[list[Any]]:
        """A list of items of one schema.

        >>> Schema.array(Schema.boolean(), max_items=2).is_valid("[true, true, true]")
        False
        """
        made: Schema[Any] = cls(dynamic_schema.array_of(_part(items), min_items, max_items, description))
        return made

    @classmethod
    def any_of(cls, choices: Iterable[Any], *, name: str = "", description: str = "") -> Schema[Any]:
        """One of several schemas, Python types and constants (texts, numbers, True, False, None).

        Args:
            choices: at least one.
            name: makes it a named type, for `ref`.
            description: description for the model.

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
        return cls(dynamic_schema.any_of(parts, constants, name, description))

    @classmethod
    def ref(cls, name: str) -> Schema[Any]:
        """The named type, which may be defined later and may contain this reference."""
        return cls(dynamic_schema.reference(name))

    @classmethod
    def primitive(
        cls, kind: Literal["string", "integer", "number", "boolean", "null"], *, description: str = "", **guides: Any
    ) -> Schema[Any]:
        """A primitive whose kind and constraints are known only at run time; they are those of `string` and similar
        methods.

        Raises:
            UnsupportedGuide: a constraint that does not apply to the kind, or cannot be enforced.
        """
        return cls(dynamic_schema.primitive(kind, description, **guides))

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
        """A string.

        Args:
            choices, const: the allowed values.
            pattern: a regular expression that matches it from end to end.
            min_length, max_length: in characters.
            format: of JSON Schema: "date", "email", "uuid" …
            description: description for the model.
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
        """An integer between two inclusive bounds; or one of several choices."""
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
        """A number between two bounds, which are inclusive unless exclusive ones are given; or one of several
        choices."""
        bounds = {"exclusive_minimum": exclusive_minimum, "exclusive_maximum": exclusive_maximum}
        guides = {"minimum": minimum, "maximum": maximum, "multiple_of": multiple_of, "choices": choices}
        return cls.primitive("number", description=description, **bounds, **guides, const=const)

    @classmethod
    def boolean(cls, *, const: bool | None = None, description: str = "") -> Schema[bool]:
        """True or false."""
        return cls.primitive("boolean", description=description, const=const)

    @classmethod
    def null(cls) -> Schema[None]:
        """Null, which is None in Python."""
        return cls.primitive("null")

    def resolve(self, *types: Any) -> Schema[T]:
        """The schema with its references resolved by the types that the given schemas define.

        The result is complete: create each of several mutually recursive types, then resolve the root.

        Raises:
            UndefinedReference: a reference that is still not defined. DuplicateType: two different types with one name.

        >>> firm = Schema.object("Firm", {"name": str, "staff": Schema.array(Schema.ref("Person"))})
        >>> person = Schema.object("Person", {"name": str, "founded": Schema.array(Schema.ref("Firm"))})
        >>> firm.resolve(person).is_valid('{"name": "A", "staff": []}')
        True
        """
        part = _part(self).with_types(map(_part, types))
        part.document()
        return type(self)(part)


def _part(target: Any) -> dynamic_schema.SchemaPart:
    """A schema, a Python type or a JSON Schema as a part of another schema."""
    if isinstance(target, str):
        raise SchemaError(f"a schema is wanted, got the text {target!r}; a constant is Schema.any_of([{target!r}])")
    inner = target.target if isinstance(target, Schema) else target
    if isinstance(inner, dynamic_schema.SchemaPart):
        return inner
    if isinstance(inner, Choice):
        return dynamic_schema.any_of([], inner.texts, "", "")
    if isinstance(inner, Regex):
        return dynamic_schema.primitive("string", pattern=inner.pattern)
    if isinstance(inner, Lark):
        raise UnsupportedGuide("a Lark grammar cannot be a part of JSON", guide="Lark")
    return (
        dynamic_schema.of_json_schema(inner)
        if isinstance(inner, dict)
        else dynamic_schema.of_type(_without_validators(inner))
    )


def _without_validators(target: Any) -> dict[str, Any]:
    """The JSON Schema of a type as part of a schema built at run time, whose answers are no values of the type."""
    _, found, validators = python_types.describe(target)
    if validators:
        raise UnsupportedGuide(
            f"{validators[0]} is a validator, which does not run in a schema that is built at run time; put the type "
            "into a model, or state what it checks with Field(…)",
            guide=validators[0],
        )
    return found


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

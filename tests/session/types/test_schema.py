"""What each type becomes, what is refused and why, what is empty; and that what is parsed is what was declared."""

import dataclasses
import datetime
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, Optional

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import TypedDict

from pippin.core.errors import (
    EmptySchema,
    InvalidArgument,
    InvalidInput,
    SchemaError,
    UndefinedReference,
    UnsupportedGuide,
)
from pippin.engine.grammar.json_grammar import MAX_ITEMS
from pippin.session.types.schema import AnyOf, Choice, Lark, Regex, Schema


class Color(enum.Enum):
    RED = "red"
    TEAL = "teal"


class Address(BaseModel):
    street: str
    number: int = Field(ge=1, description="house number")


class Person(BaseModel):
    """Somebody."""

    name: Annotated[str, Field(min_length=1)] = Field(alias="Name")
    color: Color
    home: Address | None
    friends: list["Person"] = []
    nick: Optional[str] = None  # noqa: UP045 - the old spelling must work too


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


class Movie(TypedDict, total=False):
    title: str
    year: Annotated[int, Field(ge=1900)]


class Pair(NamedTuple):
    left: int
    right: str


def test_the_dialect_of_the_house():
    schema = Schema(Person).json_schema
    person, address = schema["$defs"]["Person"], schema["$defs"]["Address"]
    assert schema["$ref"] == "#/$defs/Person"
    assert person["title"] == "Person"
    assert person["description"] == "Somebody."
    assert person["x-order"] == ["Name", "color", "home", "friends", "nick"]
    assert person["required"] == ["Name", "color", "home"]
    assert person["additionalProperties"] is False
    assert address["properties"]["number"] == {"type": "integer", "minimum": 1, "description": "house number"}
    assert person["properties"]["friends"]["items"] == {"$ref": "#/$defs/Person"}
    assert Schema(Literal["a"]).json_schema == {"type": "string", "enum": ["a"]}


def test_a_description_may_be_called_properties():
    class Odd(BaseModel):
        properties: int
        type: str

    assert list(Schema(Odd).json_schema["properties"]) == ["properties", "type"]
    assert Schema(Odd).parse('{"properties": 1, "type": "t"}').properties == 1


@pytest.mark.parametrize(
    ("target", "value", "expected"),
    [
        (Person, {"Name": "A", "color": "red", "home": None}, None),
        (Point, {"x": 1.5}, Point(1.5)),
        (Movie, {"title": "M", "year": 1999}, {"title": "M", "year": 1999}),
        (Movie, {}, {}),
        (Pair, [1, "r"], Pair(1, "r")),
        (Color, "teal", Color.TEAL),
        (Literal["a", 3, None, True], 3, 3),
        (list[int], [1, 2], [1, 2]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (set[str], ["a", "b"], {"a", "b"}),
        (frozenset[Color], ["red"], frozenset({Color.RED})),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (dict[int, str], {"-3": "a"}, {-3: "a"}),
        (dict[Literal["k"], int], {"k": 1}, {"k": 1}),
        (dict[uuid.UUID, int], {"12345678-1234-1234-1234-123456789abc": 1}, None),
        (int | str, "a", "a"),
        (int | None, None, None),
        (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
        (datetime.datetime, "2024-02-29T12:00:00Z", None),
        (datetime.timedelta, "P1DT2H", datetime.timedelta(days=1, hours=2)),
        (uuid.UUID, "12345678-1234-1234-1234-123456789abc", None),
        (Decimal, 1.25, Decimal("1.25")),
        (bytes, "é", "é".encode()),
        (pathlib.Path, "a/b", pathlib.Path("a/b")),
        (ipaddress.IPv4Address, "1.2.3.4", ipaddress.IPv4Address("1.2.3.4")),
        (pydantic.HttpUrl, "https://example.com/a", None),
        (pydantic.SecretStr, "s", pydantic.SecretStr("s")),
        (bool, True, True),
        (Any, {"a": [1, None]}, {"a": [1, None]}),
        (Annotated[str, AnyOf(["Rome", "Oslo"])], "Oslo", "Oslo"),
        (Annotated[str, Regex("[A-Z]{3}")], "OSL", "OSL"),
    ],
)
def test_types_are_written_and_read(target, value, expected):
    schema = Schema(target)
    text = json.dumps(value, ensure_ascii=False)
    assert schema.is_valid(text)
    result = schema.parse(text)
    assert result == pydantic.TypeAdapter(target).validate_json(text)
    if expected is not None:
        assert result == expected


def test_a_schema_built_at_run_time_takes_no_type_whose_validators_it_could_not_run():
    even = Annotated[int, pydantic.AfterValidator(abs)]
    assert Schema(even).validators == ("abs",)
    with pytest.raises(UnsupportedGuide, match="abs is a validator, which does not run in a schema that is built"):
        Schema.object("Numbers", {"n": even})


def test_fields_come_in_their_order_and_once():
    schema = Schema(Address)
    assert schema.is_valid('{"street": "a", "number": 1}')
    assert not schema.is_valid('{"number": 1, "street": "a"}')
    assert not schema.is_valid('{"street": "a", "street": "b", "number": 1}')
    assert not schema.is_valid('{"street": "a"}')
    assert not schema.is_valid('{"street": "a", "number": 1, "more": 1}')


class Strict(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)
    name: str = Field(min_length=1)


@pytest.mark.parametrize(
    ("target", "guide", "field"),
    [
        (Strict, "strip_whitespace", "name"),
        (Annotated[str, pydantic.PlainValidator(str)], "str", ""),
        (Annotated[int, Field(pattern="a")], "pattern", ""),
        (Annotated[int, Field(min_length=1)], "min_length", ""),
        (Annotated[str, Field(ge=1)], "ge", ""),
        (Annotated[bool, Field(multiple_of=2)], "multiple_of", ""),
        (Annotated[list[int], Field(lt=3)], "lt", ""),
        (Annotated[Literal["a"], Field(min_length=1)], "min_length", ""),
        (Annotated[int | str, Field(gt=1)], "gt", ""),
        (Annotated[datetime.date, Field(ge=datetime.date(2020, 1, 1))], "ge", ""),
        (pydantic.PastDate, "now_op", ""),
        (pydantic.NaiveDatetime, "tz_constraint", ""),
        (Annotated[bytes, Field(max_length=3)], "max_length", ""),
        (Annotated[str, Field(pattern=re.compile("a", re.IGNORECASE))], "pattern", ""),
        (Annotated[str, Field(pattern=r"^\p{L}$")], "pattern", "#"),
        (Annotated[str, StringConstraints(to_lower=True, pattern="A")], "pattern", ""),
        (Annotated[set[float], Field(min_length=2)], "min_length", ""),
        (Annotated[int, Field(multiple_of=1009, ge=0)], "multipleOf", "#"),
        (Annotated[Decimal, Field(max_digits=5)], "max_digits", ""),
        (dict[float, int], "keys", ""),
        (complex, "complex", ""),
        (pydantic.Json[int], "json", ""),
        (re.Pattern, "pattern_either_validator", ""),
        ({"uniqueItems": True, "minItems": 2, "items": {"type": "object", "maxProperties": 0}}, "uniqueItems", "#"),
        ({"oneOf": [{"type": "integer", "multipleOf": 3}, {"minimum": 2}]}, "oneOf", "#"),
        ({"not": {"type": "integer", "multipleOf": 3}}, "not", "#/not"),
        ({"type": "array", "contains": {"type": "null"}, "maxContains": 2}, "maxContains", "#"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties", "#"),
        ({"enum": ["\ud83d"]}, "", "#"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_name(target, guide, field):
    with pytest.raises(UnsupportedGuide) as caught:
        Schema(target)
    assert (caught.value.guide, caught.value.field) == (guide, field)
    assert guide in str(caught.value)


class Endless(BaseModel):
    next: "Endless"


class Impossible(BaseModel):
    age: int = Field(default=7, ge=9, le=5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Endless, "the required property 'next' can have no value"),
        (Impossible, "no value is possible for 'age': .* no integer >= 9 and <= 5"),
        (Annotated[str, Field(min_length=3, max_length=2)], "no string of 3 to 2 characters"),
        (Annotated[str, Field(pattern="^a{3}$", max_length=2)], "no string of 0 to 2"),
        (Annotated[int, Field(gt=7, lt=14, multiple_of=7)], "multiple of 7"),
        (Annotated[float, Field(gt=1, lt=1)], "no number > 1 and < 1"),
        (Annotated[list[int], Field(min_length=3, max_length=2)], "at least 3 items, but can have at most 2"),
        (Annotated[set[bool], Field(min_length=3)], "at least 3 items, but can have at most 2"),
        (Annotated[dict[str, int], Field(min_length=1, max_length=0)], "needs at least 1 properties"),
        (enum.Enum("Nothing", {}), "no members"),
        (Literal[()], "no values"),
        ({"enum": []}, "contradict"),
        ({"enum": ["a", "b"], "pattern": "c"}, "contradict"),
        ({"type": "integer", "enum": [1.5]}, "contradict"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' can have no value"),
        ({"not": {}}, "contradict"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "contradict"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "at least 1 items"),
        ({"type": "array", "contains": False}, "at least 0|contains|array"),
    ],
)
def test_what_has_no_values_is_refused(target, message):
    with pytest.raises(EmptySchema, match=message):
        Schema(target)


def test_an_optional_property_without_values_is_left_out_of_a_raw_schema():
    schema = Schema({"type": "object", "properties": {"a": {"minimum": 3, "maximum": 2, "type": "integer"}, "b": {}}})
    assert schema.is_valid('{"b": 1}')
    assert not schema.is_valid('{"a": 3}')


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ({"$ref": "#/$defs/nothing"}, UndefinedReference, "points at nothing"),
        ({"$ref": "https://example.com/x"}, UndefinedReference, "outside this schema"),
        ({"$ref": "#anchor"}, UndefinedReference, "no anchor"),
        ({"$ref": "#"}, SchemaError, "refers to itself"),
        ({"type": "strin"}, SchemaError, "type must be one or several"),
        ({"minimum": "3"}, SchemaError, "minimum must be a number"),
        ({"multipleOf": 0}, SchemaError, "greater than 0"),
        ({"minLength": -1}, SchemaError, "at least 0"),
        ({"pattern": 3}, SchemaError, "must be a text"),
        ({"pattern": "("}, SchemaError, "not a regular expression"),
        ({"enum": 3}, SchemaError, "enum must be a list"),
        ({"required": "a"}, SchemaError, "list of names"),
        ({"anyOf": []}, SchemaError, "at least one schema"),
        ({"properties": []}, SchemaError, "must be an object"),
        ({"properties": {"a": 3}}, SchemaError, "an object or a boolean"),
        ({"items": 3}, SchemaError, "an object or a boolean"),
        ({"uniqueItems": 1}, SchemaError, "true or false"),
        ({"maximum": float("nan")}, SchemaError, "not a JSON number"),
        (lambda: 3, SchemaError, "."),
        (Lark("start: nothing"), SchemaError, "malformed"),
        (Regex("("), SchemaError, "not a regular expression"),
    ],
)  # fmt: skip
def test_malformed_schemas(target, error, message):
    with pytest.raises(error, match=message):
        Schema(target)


def test_choices():
    with pytest.raises(EmptySchema, match="at least one"):
        Choice([])
    with pytest.raises(InvalidArgument, match="list of texts"):
        Choice("abc")
    assert Choice(["a", "a", "b"]) == AnyOf(["a", "b"])


@pytest.mark.parametrize(
    ("target", "good", "bad"),
    [
        (Regex("[a-c]+x?"), "abcx", "abcxx"),
        (Choice(["yes", "yes sir", 'q"']), "yes sir", "yes si"),
        (Lark('start: "(" start ")" | "x"'), "((x))", "((x)"),
        ({"type": "object", "properties": {"a": {"type": "number", "maximum": 3}}}, '{"a": 2.5}', '{"a": 3.5}'),
        (Address, '{"street": "s", "number": 1}', '{"street": "s", "number": 0}'),
    ],
)
def test_parse_accepts_answers_and_nothing_else(target, good, bad):
    schema = Schema(target)
    assert schema.is_valid(good)
    schema.parse(good)
    with pytest.raises(InvalidInput):
        schema.parse(bad)
    assert not schema.is_valid(bad)


def test_texts_are_their_own_values():
    assert Schema(Regex("a+")).parse("aa") == "aa"
    assert Schema(Regex("a+b")).snapshot("aa") == "aa"
    assert Schema(Choice(["ab"])).snapshot("ab", complete=True) == "ab"
    with pytest.raises(InvalidInput, match="not JSON"):
        Schema({"type": "string"}).parse("nonsense")


def test_what_the_model_is_told_names_the_fields_but_not_what_only_the_grammar_needs():
    told = Schema(Person).prompt_text()
    assert '"house number"' in told
    assert "x-order" not in told
    assert "additionalProperties" not in told
    assert "yes, no" in Schema(Choice(["yes", "no"])).prompt_text()
    assert "[a-z]+" in Schema(Regex("[a-z]+")).prompt_text()
    assert "start" in Schema(Lark('start: "a"')).prompt_text()


def test_a_schema_of_a_schema_is_itself():
    schema = Schema(int)
    assert Schema.of(schema) is schema
    assert Schema.of(int).json_schema == {"type": "integer"}
    assert repr(schema) == "Schema(<class 'int'>)"


def test_the_partial_type_of_each_kind():
    assert Schema(Person).partial_type().name is None
    assert Schema(Choice(["a"])).partial_type is str
    assert Schema({"type": "string"}).partial_type is Any


def test_what_is_ignored_is_noted_and_a_strict_schema_refuses_it():
    noted = {"type": "array", "items": {"type": "boolean"}, "color": "red", "format": "nothing"}
    ignored, *others = Schema(noted).notes
    assert ignored == "#: 'color' is not a keyword of JSON Schema and is ignored"
    assert others == [f"a list without maxItems has at most {MAX_ITEMS} items"]
    with pytest.raises(UnsupportedGuide, match="color"):
        Schema(noted, strict=True)
    assert Schema(bool).notes == Schema(Regex("a+")).notes == ()


def test_a_list_that_another_model_wrote_may_be_longer_than_ours():
    schema = Schema({"type": "array", "items": {"type": "boolean"}})
    text = json.dumps([True] * (MAX_ITEMS + 1))
    assert not schema.is_valid(text)
    assert schema.parse(text) == [True] * (MAX_ITEMS + 1)
    with pytest.raises(InvalidInput):
        schema.parse("[1]")

"""Schemas put together at run time: their errors at definition, their JSON Schema, and their hold on random logits."""

import enum
import json
from typing import Annotated, Literal

import jsonschema
import pytest
import torch
from pydantic import BaseModel, Field
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

from pippin.claims.worlds.sequences.random_schemas import draw_answer
from pippin.core.errors import (
    DuplicateProperty,
    DuplicateType,
    EmptySchema,
    InvalidInput,
    SchemaError,
    UndefinedReference,
    UnsupportedGuide,
)
from pippin.data.text.tokenizer import Tokenizer
from pippin.session.types.schema import Choice, Lark, Regex, Schema


class Address(BaseModel):
    street: str
    number: int = Field(ge=1)


class Color(enum.Enum):
    RED = "red"


# --- errors where the schema is made ----------------------------------------------------------------------------------


def test_a_property_named_twice():
    with pytest.raises(DuplicateProperty, match="'Person' has two properties 'name'"):
        Schema.object("Person", [("name", str), ("age", int), ("name", int)])


def test_two_types_of_one_name():
    home = Schema.object("Place", {"street": str})
    with pytest.raises(DuplicateType, match="'Place'"):
        Schema.object("Trip", {"home": home, "goal": Schema.object("Place", {"street": int})})
    with pytest.raises(DuplicateType, match="'Place'"):  # the order of properties is part of a type
        Schema.any_of([Schema.object("Place", {"a": int, "b": int}), Schema.object("Place", {"b": int, "a": int})])
    with pytest.raises(DuplicateType, match="'Address'"):  # Python's types have names too
        Schema.object("Trip", {"home": Address, "goal": Schema.object("Address", {"street": str})})
    with pytest.raises(DuplicateType, match="'Place'"):
        Schema.object("Trip", {"home": Schema.ref("Place")}).resolve(home, Schema.object("Place", {"x": int}))
    with pytest.raises(DuplicateType, match="'Trip'"):
        Schema.object("Trip", {"home": Schema.object("Trip", {"a": int})})


def test_the_same_type_twice_is_shared():
    place = {"street": Schema.string(max_length=9)}
    trip = Schema.object("Trip", {"a": Schema.object("Place", place), "b": Schema.object("Place", place), "c": Address})
    assert set(trip.json_schema["$defs"]) == {"Place", "Address"}
    assert trip.json_schema["properties"]["a"] == trip.json_schema["properties"]["b"] == {"$ref": "#/$defs/Place"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schema.any_of([]),
        lambda: Schema.any_of([], name="City"),
        lambda: Schema.string(choices=[]),
        lambda: Schema.string(choices=["a"], const="b"),
        lambda: Schema.integer(minimum=3, maximum=2),
        lambda: Schema.object("A", {"x": Schema.array(int, min_items=2, max_items=1)}),
        lambda: Schema.object("Endless", {"next": Schema.ref("Endless")}),
    ],
)
def test_what_nothing_satisfies(make):
    with pytest.raises(EmptySchema):
        make()


def test_references_that_nothing_resolves():
    person = Schema.object("Person", {"name": str, "firm": Schema.ref("Firm"), "boss": Schema.ref("Boss")})
    for use in (
        lambda: person.grammar,
        lambda: person.json_schema,
        lambda: person.parse("{}"),
        lambda: person.snapshot("{"),
        lambda: person.is_valid("{}"),
        lambda: person.prompt_text(),
        lambda: person.resolve(Schema.object("Boss", {"name": str})),
    ):
        with pytest.raises(UndefinedReference, match="'Firm'"):
            use()
    with pytest.raises(AttributeError, match="nothing"):
        _ = person.nothing
    firm = Schema.object("Firm", {"staff": Schema.array(Schema.ref("Person"), max_items=2)})
    whole = person.resolve(firm, Schema.object("Boss", {"name": str}))
    assert whole.is_valid('{"name": "A", "firm": {"staff": []}, "boss": {"name": "B"}}')


@pytest.mark.parametrize(
    ("target", "guide"),
    [
        (Annotated[int, Field(pattern="a")], "pattern"),
        (Annotated[str, Field(ge=1)], "ge"),
        (Annotated[bool, Field(multiple_of=2)], "multiple_of"),
        ({"type": "string", "format": "color"}, "format"),
        (Lark('start: "a"'), "Lark"),
        ({"$id": "https://example.com/a"}, "$id"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "$schema"),
    ],
)
def test_a_guide_that_cannot_be_enforced_is_named_with_its_field(target, guide):
    with pytest.raises(UnsupportedGuide) as caught:
        Schema.object("Person", {"name": str, "age": target})
    assert (caught.value.field, caught.value.guide) == ("age", guide)
    assert "age" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "guides"),
    [
        ("integer", {"pattern": "a"}),
        ("string", {"minimum": 1}),
        ("boolean", {"choices": [True]}),
        ("null", {"const": None}),
        ("number", {"min_length": 1}),
    ],
)
def test_a_guide_of_another_kind(kind, guides):
    with pytest.raises(UnsupportedGuide, match=f"does not apply to {kind}") as caught:
        Schema.primitive(kind, **guides)
    assert caught.value.guide == next(iter(guides))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schema.primitive("date"),
        lambda: Schema.object("", {"a": int}),
        lambda: Schema.object("A", {"a": "text"}),
        lambda: Schema.object("A", {1: int}),
        lambda: Schema.object("A", {"a": complex}),
        lambda: Schema.object("A", {"a": int}, optional=["b"]),
        lambda: Schema.any_of("text"),
        lambda: Schema.any_of([float("nan")]),
        lambda: Schema.string(choices="text"),
        lambda: Schema.integer(choices=[1, True]),
        lambda: Schema.integer(const="1"),
        lambda: Schema.string(pattern="("),
        lambda: Schema.array(int, min_items=-1),
        lambda: Schema.string(max_length="3"),
    ],
)
def test_other_mistakes(make):
    with pytest.raises(SchemaError):
        make()


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_the_json_schema_is_the_dialect_of_the_house():
    schema = Schema.object(
        "Person",
        {
            "name": Schema.string(min_length=1, max_length=20, description="full name"),
            "age": Schema.integer(minimum=0, maximum=130),
            "home": Address,
            "friends": Schema.array(Schema.ref("Person"), max_items=3),
            "city": Schema.any_of(["Rome", "Oslo"], name="City"),
        },
        optional=["age"],
        description="Somebody.",
    )
    assert schema.json_schema["$ref"] == "#/$defs/Person"
    person = schema.json_schema["$defs"]["Person"]
    assert person == {
        "title": "Person",
        "description": "Somebody.",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 20, "description": "full name"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "home": {"$ref": "#/$defs/Address"},
            "friends": {"type": "array", "items": {"$ref": "#/$defs/Person"}, "maxItems": 3},
            "city": {"$ref": "#/$defs/City"},
        },
        "required": ["name", "home", "friends", "city"],
        "x-order": ["name", "age", "home", "friends", "city"],
        "additionalProperties": False,
    }
    assert schema.json_schema["$defs"]["City"] == {"title": "City", "type": "string", "enum": ["Rome", "Oslo"]}
    jsonschema.Draft202012Validator.check_schema(schema.json_schema)


def test_a_type_that_nothing_else_refers_to_stands_at_the_root():
    schema = Schema.object("Point", {"x": float}).json_schema
    assert "$defs" not in schema
    assert schema["title"] == "Point"


def test_values_are_plain_dicts_in_the_order_of_the_properties():
    schema = Schema.object("P", [("z", int), ("a", Schema.string()), ("m", bool)], optional=("a",))
    value = schema.parse('{"z": 1, "a": "x", "m": true}')
    assert (type(value), list(value)) == (dict, ["z", "a", "m"])
    with pytest.raises(KeyError, match="a"):
        schema.parse('{"z": 1, "m": true}')["a"]
    with pytest.raises(InvalidInput):
        schema.parse('{"a": "x", "z": 1, "m": true}')
    assert schema.snapshot('{"z": 1, "a": "gro') == {"z": 1, "a": "gro"}


def test_json_schemas_keep_their_pointers():
    tree = {
        "title": "tree/~1 %",
        "type": "object",
        "properties": {
            "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
            "leaf": {"$ref": "#/$defs/a b"},
        },
        "required": ["kids"],
        "additionalProperties": False,
        "$defs": {"a b": {"enum": [{"$ref": "#/nowhere"}, 1]}},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }
    schema = Schema.object("Two", {"left": tree, "right": Schema(tree), "n": {"type": "integer"}}, optional=["n"])
    text = '{"left": {"kids": [{"kids": [], "leaf": 1}]}, "right": {"kids": [], "leaf": {"$ref": "#/nowhere"}}}'
    assert schema.is_valid(text)
    jsonschema.Draft202012Validator(schema.json_schema).validate(json.loads(text))
    assert not schema.is_valid('{"left": {"kids": [{"leaf": 1}]}, "right": {"kids": []}}')


def test_every_kind_of_schema_can_be_a_part():
    schema = Schema.object(
        "All",
        {
            "regex": Regex("[a-c]{2}"),
            "choice": Choice(["x", "y"]),
            "literal": Literal[1, "two"],
            "color": Color,
            "maybe": int | None,
            "tuple": tuple[int, str],
            "whole": Schema.string(pattern="^ab?$|c"),
            "none": Schema.null(),
            "yes": Schema.boolean(const=True),
            "half": Schema.number(multiple_of=0.5, exclusive_minimum=0, exclusive_maximum=2),
            "day": Schema.string(format="date"),
        },
    )
    values = ["ab", "y", "two", "red", None, [1, "a"], "ab", None, True, 1.5, "2024-02-29"]
    good = dict(zip(schema.json_schema["x-order"], values, strict=True))
    assert schema.parse(json.dumps(good)) == good
    jsonschema.Draft202012Validator(schema.json_schema).validate(good)
    wrong = {"regex": "abc", "choice": "z", "literal": 2, "maybe": "1", "whole": "xc", "yes": False, "half": 2.0}
    for name, value in wrong.items():
        assert not schema.is_valid(json.dumps({**good, name: value})), name


# --- against a model that wants something else ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes and the words that the model below would rather write."""
    words = ["Beijing", "Paris", "null", "-1", "999", '"', "{}"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([word for word in words if len(word) > 1])
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_ids=[backend.token_to_id("<end>")])


TRIP = Schema.object(
    "Trip",
    {
        "city": Schema.any_of(["Rome", "Oslo", "Größe"], name="City"),
        "days": Schema.integer(minimum=3, maximum=5),
        "price": Schema.number(minimum=-1.5, maximum=-1.25),
        "kind": Schema.any_of([Schema.string(const="boat"), Schema.integer(choices=[7, 9]), None, True]),
        "code": Schema.string(pattern=r"[A-Z]{2}\d"),
        "stops": Schema.array(Schema.ref("City"), min_items=1, max_items=2),
        "next": Schema.any_of([Schema.ref("Trip"), Schema.null()]),
    },
    optional=["price", "next"],
)


@pytest.mark.parametrize("greedy", [True, False])
def test_guides_hold_against_random_logits(tokenizer, greedy):
    spelled = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    wishes = [b"Beijing", b"Paris", b"999", b"-1", b"null"]
    bias = torch.tensor([60.0 if text and any(text in wish for wish in wishes) else 0.0 for text in spelled])
    oracle = jsonschema.Draft202012Validator(TRIP.json_schema)
    ended = 0
    for seed in range(30):
        text = draw_answer(TRIP.grammar.start(tokenizer), spelled, seed=seed, greedy=greedy, bias=bias)[0]
        if text is not None:
            ended += 1
            value = TRIP.parse(text)
            oracle.validate(value)
            assert value["city"] in ("Rome", "Oslo", "Größe")
            assert 3 <= value["days"] <= 5
            assert value["kind"] in ("boat", 7, 9, None) or value["kind"] is True
            assert list(value) == [name for name in TRIP.json_schema["$defs"]["Trip"]["x-order"] if name in value]
    assert ended >= 20

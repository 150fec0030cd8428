"""Forms: only parts of the source can be written, and what was written is read back into a value of the schema."""

import datetime
import json
import random
import re
from decimal import Decimal
from typing import Literal

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, Field

from pippin.core.errors import EmptySchema, InvalidArgument, InvalidInput, UndefinedReference, UnsupportedGuide
from pippin.session.extraction import Form, SourceText
from pippin.session.extraction.answers import KnownValue, write
from pippin.session.types.schema import Schema

LETTER = """Bäckerei Müller & Söhne GmbH
Hauptstraße 5
10115 Berlin

Rechnung Nr. 2024-0117          Datum: 12.03.2024

2 x "Roggenbrot"   3,50
10 x Brötchen  0,45

Summe: 11,50 EUR, bereits bezahlt
Fragen an info@mueller.example"""


class Line(BaseModel):
    description: str
    quantity: int
    price: Decimal


class Invoice(BaseModel):
    number: str = Field(description="number of the invoice")
    date: datetime.date
    address: str | None
    total: Decimal
    paid: bool
    status: Literal["open", "closed"] | None
    email: str | None = Field(default=None, pattern=r"^[^@ ]+@[^@ ]+$")
    lines: list[Line]


FILLED = (
    '{"number (number of the invoice)": "2024-0117", "date": "12.03.2024", "address": "Hauptstraße 5 10115 Berlin", '
    '"total": "11,50", "paid": ["bereits bezahlt", true], "status [open | closed]": null, '
    '"email": "info@mueller.example", "lines": [{"description": "\\"Roggenbrot\\"", "quantity": "2", '
    '"price": "3,50"}, {"description": "Brötchen", "quantity": "10", "price": "0,45"}]}'
)


def form(schema, text=LETTER, **more):
    return Form(schema if isinstance(schema, dict) else Schema(schema).json_schema, SourceText(text), **more)


def at(part, value=None):
    start = LETTER.index(part)
    return KnownValue(start, start + len(part), value)


def test_a_form_is_read_into_the_value_and_where_it_came_from():
    made = form(Invoice)
    assert made.grammar.allows(FILLED)
    filled = made.read(FILLED)
    value = Schema(Invoice).parse(json.dumps(filled.value))
    assert value == Invoice(
        number="2024-0117",
        date=datetime.date(2024, 3, 12),
        address="Hauptstraße 5 10115 Berlin",
        total=Decimal("11.5"),
        paid=True,
        status=None,
        email="info@mueller.example",
        lines=[
            Line(description='"Roggenbrot"', quantity=2, price=Decimal("3.5")),
            Line(description="Brötchen", quantity=10, price=Decimal("0.45")),
        ],
    )
    by_path = {mark.path: mark for mark in filled.marks}
    assert by_path["lines", 1, "price"].value == 0.45
    assert all(FILLED[mark.start : mark.end] == json.dumps(mark.text, ensure_ascii=False) for mark in filled.marks)
    assert ("status",) not in by_path


def test_known_facts_are_written_as_the_form_has_them():
    made = form(Invoice)
    answers = {
        "number": at("2024-0117"),
        "date": at("12.03.2024"),
        "address": at("Hauptstraße 5\n10115 Berlin"),
        "total": at("11,50 EUR"),
        "paid": at("bereits bezahlt", True),
        "email": at("info@mueller.example"),
        "lines": [
            {"description": at('"Roggenbrot"'), "quantity": at("2 x"), "price": at("3,50")},
            {"description": at("Brötchen"), "quantity": at("10 x"), "price": at("0,45")},
        ],
    }
    assert write(made, answers) == FILLED
    with pytest.raises(InvalidArgument, match="number"):
        write(made, answers | {"number": KnownValue(LETTER.index("024-0117"), LETTER.index("024-0117") + 8)})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ('"2024-0117"', '"2024-0118"'),  # not in the text
        ('"2024-0117"', '"024-0117"'),  # a number that is cut
        ('"2024-0117"', '"Nr."'),
        ('"2024-0117"', '" 2024-0117"'),
        ('"2024-0117"', '""'),
        ('"12.03.2024"', '"11,50"'),  # not a date
        ('"11,50"', '"EUR"'),
        ('"total": "11,50"', '"total": "11.50"'),
        ('"2", ', '"3,50", '),  # not an integer
        ('"Hauptstraße 5 10115 Berlin"', '"Berlin Rechnung"'),  # over a blank line
        ('["bereits bezahlt", true]', "true"),
        ('["bereits bezahlt", true]', "[null, true]"),
        ('["bereits bezahlt", true]', "null"),
        ('"info@mueller.example"', '"info"'),  # not of the pattern
        ('"date": "12.03.2024"', '"date": null'),  # must be there
    ],
)
def test_what_the_source_does_not_say_cannot_be_written(field, wrong):
    assert FILLED.count(field)
    allowed = form(Invoice).grammar.allows(FILLED.replace(field, wrong, 1))
    assert allowed == (wrong == '"Nr."')


@given(st.text(min_size=1, max_size=120).filter(lambda text: text.strip()), st.integers(0, 10_000))
def test_every_run_of_whole_words_can_be_written_and_is_found(text, seed):
    source = SourceText(text)
    rng = random.Random(seed)
    first = rng.randrange(len(source.pieces))
    last = rng.randrange(first, len(source.pieces))
    written = "".join(source.pieces[first : last + 1]).strip(" ")
    made = Form({"type": "string"}, source)
    says_something = bool(re.search(r"[^\W_]", written)) and "\n\n" not in written
    if not says_something:
        return
    allowed = made.grammar.allows(json.dumps(written, ensure_ascii=False))
    cut = re.match(r"[ ,.;:!?)\]}|=>*_~%/—–…]", written) or re.search(r"[ ,;:(\[{|=<*_~#—–]$", written)
    odd = re.search(r'[\x00-\x1f"\\]', written)
    if not cut and not odd:
        assert allowed
    if allowed:
        places = source.find(written)
        assert places
        assert all(source.written(*place) == written for place in places)


@given(st.text(min_size=1, max_size=60).filter(lambda text: text.strip()), st.text(min_size=1, max_size=12))
def test_what_is_not_in_the_text_is_not_allowed(text, other):
    source = SourceText(text)
    made = Form({"type": "string"}, source)
    if other not in "".join(source.pieces):
        assert not made.grammar.allows(json.dumps(other, ensure_ascii=False))


def test_values_that_must_be_there_and_cannot_are_an_error_before_anything_is_computed():
    with pytest.raises(EmptySchema, match="no date"):
        form({"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}, "Hi")
    with pytest.raises(EmptySchema, match="number"):
        form({"type": "integer", "minimum": 100_000})
    optional = form({"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}, "Hi")
    assert optional.grammar.allows('{"day": null}')
    assert optional.read('{"day": null}').value == {}


def test_lists_of_values_that_the_text_does_not_have_are_empty():
    made = form({"type": "array", "items": {"type": "string", "format": "date"}}, "No day is named here.")
    assert made.grammar.allows("[]")
    assert made.read("[]").value == []


@pytest.mark.parametrize("keyword", ["not", "if", "patternProperties", "contains"])
def test_what_a_form_cannot_hold_is_refused_by_name(keyword):
    with pytest.raises(UnsupportedGuide, match=keyword):
        form({"type": "object", "properties": {"a": {"type": "string", keyword: {}}}})


def test_references_that_point_at_nothing():
    with pytest.raises(UndefinedReference, match="Nowhere"):
        form({"$ref": "#/$defs/Nowhere"})


class Section(BaseModel):
    title: str
    parts: list["Section"] = []


def test_a_type_inside_itself():
    made = form(Section, "Fruit: apples (red apples), pears")
    text = '{"title": "Fruit", "parts": [{"title": "apples", "parts": [{"title": "red apples", "parts": []}]}]}'
    assert made.grammar.allows(text)
    assert made.read(text).value["parts"][0]["parts"][0]["title"] == "red apples"


def test_names_of_an_object_come_from_the_text_too():
    made = form(dict[str, str], "Color: red\nSize: XL")
    assert made.grammar.allows('{"Color": "red", "Size": "XL"}')
    assert not made.grammar.allows('{"Farbe": "red"}')
    assert made.read('{"Color": "red", "Size": "XL"}').value == {"Color": "red", "Size": "XL"}


def test_alternatives_prefer_what_can_be_read():
    made = form({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}, "Room 12")
    assert [made.read(text).value for text in ('"12"', '"Room"', "null")] == [12, "Room", None]


def test_constants_are_written_in_their_order_and_tell_alternatives_apart():
    def kind(name):
        return {"type": "object", "properties": {"kind": {"const": name}, "to": {"type": "string"}}, "required": ["to"]}

    made = form({"anyOf": [kind("letter"), kind("card")]}, "Dear Ann")
    assert made.grammar.allows('{"kind": "card", "to": "Ann"}')
    assert not made.grammar.allows('{"kind": "bill", "to": "Ann"}')
    found = made.read('{"kind": "card", "to": "Ann"}').value
    assert list(found.items()) == [("kind", "card"), ("to", "Ann")]


def test_an_object_that_may_have_no_names_is_empty():
    made = form({"type": "object", "maxProperties": 0, "additionalProperties": {"type": "string"}})
    assert made.read("{}").value == {}
    assert not made.grammar.allows('{"Summe": "EUR"}')


@pytest.mark.parametrize(
    ("schema", "required"), [({"type": ["boolean", "null"]}, True), ({"type": "boolean"}, False),
                             ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, False)],
)  # fmt: skip
def test_a_flag_that_may_be_null_is_false_only_where_the_text_shows_it(schema, required):
    made = form({"type": "object", "properties": {"paid": schema}, "required": ["paid"] if required else []})
    assert made.grammar.allows('{"paid": null}')
    assert made.grammar.allows('{"paid": ["Fragen", false]}')
    assert not made.grammar.allows('{"paid": [null, false]}')
    assert write(made, {"paid": None}) == '{"paid": null}'


def test_a_flag_that_must_be_there_is_false_where_the_text_says_nothing():
    made = form({"type": "object", "properties": {"paid": {"type": "boolean"}}, "required": ["paid"]})
    assert write(made, {"paid": None}) == '{"paid": [null, false]}'
    assert not made.grammar.allows('{"paid": null}')


def test_a_part_of_a_longer_text_may_lack_everything():
    assert form(Invoice, "Hello", partial=True).read(
        '{"number (number of the invoice)": null, "date": null, "address": null, "total": null, '
        '"paid": [null, false], "status [open | closed]": null, "email": null, "lines": []}'
    ).value == {"address": None, "paid": False, "status": None, "email": None, "lines": []}


def test_an_item_in_a_part_of_a_longer_text_is_whole():
    schema = {
        "$defs": {"line": {"type": "object", "properties": {"item": {"type": "string"}, "price": {"type": "number"}},
                           "required": ["item", "price"]}},
        "type": "object",
        "properties": {"best": {"$ref": "#/$defs/line"}, "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}}},
        "required": ["best", "lines"],
    }  # fmt: skip
    made = Form(schema, SourceText("Pens 3.20"), partial=True)
    whole, torn = '{"item": "Pens", "price": "3.20"}', '{"item": "Pens", "price": null}'
    assert made.read(f'{{"best": {torn}, "lines": [{whole}]}}').value["best"] == {"item": "Pens"}
    assert made.grammar.allows(f'{{"best": {torn}, "lines": [{whole}]}}')
    assert not made.grammar.allows(f'{{"best": {torn}, "lines": [{torn}]}}')
    assert made.grammar.allows('{"best": null, "lines": []}')


def test_a_list_ends_after_an_item_that_came_too_often():
    made = form({"type": "array", "items": {"type": "string"}}, "one, two, one")
    assert made.read('["one", "two", "one"]').value == ["one", "two", "one"]
    assert made.read('["one", "two", "two"]').value == ["one", "two"]
    assert not made.grammar.allows('["two", "two", "one"]')
    assert made.grammar.allows('["one", "one", "two"]')


def test_what_is_no_form_is_refused():
    made = form(Invoice)
    for text in ("", "{", FILLED[:-1], FILLED.replace("12.03", "13.03"), FILLED + "x"):
        with pytest.raises(InvalidInput):
            made.read(text)


@pytest.mark.parametrize(("text", "value", "allowed"), [
    ("Iron 100.7 %", "%", True), ("5 € each", "€", True), ("21 ° today", "°", True), ("a - b", "-", False),
    ("100.7 %", "% ", False), ("5 € each", "€ each", True), ("Iron %, copper", "%,", False),
    ("ref. > 48", "> 48", True), ("> see above", "> see", False),
])  # fmt: skip
def test_a_unit_may_be_a_mark_alone(text, value, allowed):
    form = Form({"type": "string"}, SourceText(text))
    assert form.grammar.allows(json.dumps(value, ensure_ascii=False)) is allowed

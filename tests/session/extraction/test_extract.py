"""`Session.extract`: on the default model, on a model that writes anything, and on providers without grammars."""

import datetime
import json
import re
import time
from decimal import Decimal
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field

import pippin
from pippin.core.errors import (
    AnswerTruncated,
    EmptySchema,
    GuardrailViolation,
    InvalidAnswer,
    InvalidArgument,
    InvalidInput,
    TimedOut,
    UnsupportedCapability,
)
from pippin.session.extraction import SourceText
from pippin.session.extraction.locate import locate
from pippin.session.extraction.slots import Mark
from pippin.session.guardrails import Guardrails
from pippin.session.guardrails.rules import TermRule
from pippin.session.providers.provider import Capabilities, Done, Provider, TextDelta
from pippin.session.types.schema import Regex

LETTER = """Marrow & Finch Bookbinders
14 Tanner's Row, Haverleigh

12 March 2026

Dear Mrs Okafor,

Rebinding of four volumes in calf: 780 EUR
Cleaning and repair: 220 EUR
Total: 1,000 EUR
Payment is due on 2026-04-11.

Edith Marrow"""


class Account(BaseModel):
    sender: str
    date: datetime.date
    total: Decimal
    paid: bool
    iban: str | None = None


class Writer(Provider):
    """Writes given answers, one after the other; no grammar holds it."""

    name, context_size = "writer", 8192

    def __init__(self, *answers, grammars=False, answer=None):
        self.answer = answer
        self.answers, self.prompts = list(answers), []
        self.capabilities = Capabilities(guided_generation=True, grammars=grammars)

    def stream(self, request):
        self.prompts.append(request.transcript.entries[-1].text)
        yield TextDelta(self.answer(self.prompts[-1]) if self.answer else self.answers.pop(0))
        yield Done("stop")

    def token_count(self, item):
        return len(str(item)) // 4


def account(**changes):
    right = {"sender": "Edith Marrow", "date": "2026-03-12", "total": 1000, "paid": False, "iban": None}
    return json.dumps(right | changes)


def test_the_default_model_fills_in_what_the_text_says(model):
    found = pippin.Session(model).extract(LETTER, Account)
    content = found.content
    assert isinstance(content, Account)
    assert content.sender in LETTER
    assert content.date in (datetime.date(2026, 3, 12), datetime.date(2026, 4, 11))
    assert {span.name for span in found.spans} >= {"sender", "date", "total"}
    for span in found.spans:
        assert LETTER[span.start : span.end] == span.text
        assert 0 < span.confidence <= 1
    assert found.span("total").value == float(content.total)
    assert found.span("nothing") is None
    assert found.usage.output_tokens > 20


def test_whatever_a_model_would_say_is_a_part_of_the_text(tiny):
    found = pippin.Session(tiny).extract(LETTER, dict[str, Account | None])
    assert all(LETTER[span.start : span.end] == span.text for span in found.spans)
    kind = pippin.Session(tiny).extract("It is red.", Literal["red", "green"])
    assert kind.content in ("red", "green")
    assert kind.spans[0].text in "It is red."


@pytest.mark.parametrize(
    ("format", "value"),
    [("date", "2024-05-03"), ("time", "14:30:00"), ("date-time", "2024-05-03T14:30:00"), ("duration", "P2W")],
)
def test_readings_need_no_offset_in_a_json_schema(format, value):
    text = "On 3 May 2024 at 14:30, for 2 weeks"
    said = {"date": "3 May 2024", "time": "14:30", "date-time": "3 May 2024 at 14:30", "duration": "2 weeks"}[format]
    schema = {"properties": {"kind": {"const": "visit"}, "it": {"type": "string", "format": format}}}
    writer = Writer(json.dumps({"kind": "visit", "it": said}), grammars=True)
    assert pippin.Session(writer).extract(text, schema).content == {"kind": "visit", "it": value}


class Letter(BaseModel):
    kind: Literal["letter"]
    to: str


class Card(BaseModel):
    kind: Literal["card"]
    to: str


def test_the_kind_of_a_tagged_union_is_chosen():
    writer = Writer('{"kind": "card", "to": "Ann"}', grammars=True)
    assert pippin.Session(writer).extract("Dear Ann", Letter | Card).content == Card(kind="card", to="Ann")


def test_guardrails_check_the_text_and_the_values(tiny):
    mask = TermRule(id="mask", category="privacy", terms=("Edith Marrow",), replacement="[…]")
    written = '{"sender": "Edith Marrow", "date": "12 March 2026", "total": "780", "paid": [null, false], "iban": null}'
    session = pippin.Session(Writer(written, grammars=True), guardrails=Guardrails([mask], profile="strict"))
    found = session.extract(LETTER, Account)
    assert found.content.sender == "[…]"
    assert [span.name for span in found.spans] == ["date", "total"]
    never = TermRule(id="never", category="own", terms=("Okafor",), score=1.0)
    with pytest.raises(GuardrailViolation):
        pippin.Session(Writer(), guardrails=Guardrails([never], profile="strict")).extract(LETTER, Account)


def test_a_timeout_is_that_of_all_parts():
    slow = Writer(answer=lambda part: time.sleep(0.4) or "[]", grammars=True)
    text = "\n\n".join(f"Guest {number} sleeps in room {number + 100}." for number in range(40))
    with pytest.raises(TimedOut):
        pippin.Session(slow).extract(text, list[int], part_tokens=80, options=pippin.GenerationOptions(timeout=0.9))
    assert 2 <= len(slow.prompts) <= 4


def test_the_conversation_does_not_change(tiny):
    session = pippin.Session(tiny)
    session.extract("Room 12", int)
    assert len(session.transcript) == 0


def test_a_long_text_is_read_in_parts_and_put_together():
    text = "\n\n".join(f"Guest {number} sleeps in room {number + 100}." for number in range(40))
    rooms = Writer(answer=lambda part: json.dumps(re.findall(r"room (\d+)", part)), grammars=True)
    seen = []
    found = pippin.Session(rooms).extract(
        text, Annotated[list[int], Field(min_length=30)], part_tokens=80,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert len(rooms.prompts) == len(seen) > 2
    assert seen[-1] == (len(text), len(text))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert found.content == list(range(100, 140))
    assert [span.path for span in found.spans] == [(index,) for index in range(40)]
    assert all(text[span.start - 5 : span.end] == f"room {span.value}" for span in found.spans)


def said_in(part):
    """What a part of the letter says."""
    total = re.search(r"Total: ([\d,]+)", part)
    dates = re.findall(r"\d{4}-\d\d-\d\d", part)
    sender = "Edith Marrow" if "Edith Marrow" in part else None
    values = {"sender": sender, "date": dates[0] if dates else None, "total": total and total[1]}
    return json.dumps({**values, "paid": [None, False], "iban": None})


def test_of_several_parts_the_value_that_is_there_counts():
    first, second = LETTER.split("Dear Mrs Okafor,")
    text = first + "x " * 500 + second
    found = pippin.Session(Writer(answer=said_in, grammars=True)).extract(text, Account, part_tokens=220)
    assert found.content.total == 1000
    assert found.span("date").start == text.index("2026-04-11")


def test_a_value_that_must_be_there_is_asked_for_once_more():
    text = "Nothing is said here. " * 30 + "\n\n" + LETTER
    writer = Writer(answer=lambda part: said_in(part.replace("Total", "Sum") if len(asked(part)) < 2 else part),
                    grammars=True)  # fmt: skip
    calls = {}

    def asked(part):
        return calls.setdefault(part, []).append(part) or calls[part]

    found = pippin.Session(writer).extract(text, Account, part_tokens=190)
    assert found.content.total == 1000
    assert sorted(map(len, calls.values()))[-2:] == [1, 2]
    assert text[found.span("total").start :].startswith("1,000")


def test_values_of_several_parts_are_in_the_order_of_the_schema():
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in ("sender", "greeting", "total")}}

    def answer(part):
        names = {"sender": "Edith Marrow", "greeting": "Dear Mrs Okafor", "total": "1,000"}
        return json.dumps({name: text if text in part else None for name, text in names.items()})

    greeting, rest = "Dear Mrs Okafor. " + "Nothing. " * 60, "Edith Marrow paid 1,000 EUR."
    for text in (f"{greeting}\n\n{rest}", f"{rest}\n\n{greeting}"):
        found = pippin.Session(Writer(answer=answer, grammars=True)).extract(text, schema, part_tokens=60)
        assert list(found.content.items()) == [
            ("sender", "Edith Marrow"), ("greeting", "Dear Mrs Okafor"), ("total", "1,000"),
        ]  # fmt: skip


@pytest.mark.parametrize("optional", [False, True])
def test_a_nested_value_that_must_be_there_is_asked_for_once_more(optional):
    class Sum(BaseModel):
        total: Decimal
        note: str | None = None

    class Letter(BaseModel):
        sender: str
        inner: (Sum | None) if optional else Sum

    asked = []

    def answer(part):
        asked.append(part)
        said = "Total" in part and asked.count(part) == 2
        sender = "Edith Marrow" if "Edith Marrow" in part else None
        return json.dumps({"sender": sender, "inner": {"total": "1,000" if said else None, "note": None}})

    text = "Nothing is said here. " * 30 + "\n\n" + LETTER
    once = pippin.GenerationOptions(retries=0)
    found = pippin.Session(Writer(answer=answer, grammars=True)).extract(text, Letter, part_tokens=190, options=once)
    assert found.content == Letter(sender="Edith Marrow", inner=Sum(total=Decimal(1000)))
    assert text[found.span("inner.total").start :].startswith("1,000")


# --- providers without grammars ---------------------------------------------------------------------------------------


def test_a_value_that_is_not_in_the_text_is_asked_for_again():
    writer = Writer(account(sender="Edith Marlowe"), account())
    found = pippin.Session(writer).extract(LETTER, Account)
    assert found.content.sender == "Edith Marrow"
    assert "sender" in writer.prompts[1]
    assert "not accepted" in writer.prompts[1]
    assert found.span("total").text == "1,000"
    assert found.span("total").confidence is None


def test_an_invented_value_that_need_not_be_there_is_left_out():
    found = pippin.Session(Writer(account(iban="DE12 3456"))).extract(LETTER, Account)
    assert found.content.iban is None


def test_a_model_that_goes_on_inventing_is_an_error():
    writer = Writer(*[account(date="1999-01-01")] * 3)
    with pytest.raises(InvalidAnswer, match="not in the text: date"):
        pippin.Session(writer).extract(LETTER, Account)
    assert not writer.answers


def test_a_provider_that_cannot_hold_a_type_is_refused():
    writer = Writer()
    writer.capabilities = Capabilities()
    with pytest.raises(UnsupportedCapability):
        pippin.Session(writer).extract(LETTER, Account)


# --- what is checked --------------------------------------------------------------------------------------------------


def odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError(f"{value} is even")
    return value


def test_a_validator_that_does_not_accept_the_value_is_told():
    writer = Writer('"780"', '"2026"', '"14"', grammars=True)
    with pytest.raises(InvalidAnswer, match="14 is even"):
        pippin.Session(writer).extract(LETTER, Annotated[int, AfterValidator(odd)])
    assert "780 is even" in writer.prompts[1]
    writer = Writer('"780"', '"11"', grammars=True)
    found = pippin.Session(writer).extract(LETTER, Annotated[int, AfterValidator(odd)])
    assert found.content == 11


@pytest.mark.parametrize(
    ("text", "into", "error"),
    [
        ("", str, InvalidInput),
        (" \n", str, InvalidInput),
        ("half \ud800", str, InvalidInput),
        ("Hello", Regex("a+"), InvalidArgument),
        ("Hello", int, EmptySchema),
        ("Hello", datetime.date, EmptySchema),
        ("Hello", Annotated[list[int], Field(min_length=1)], EmptySchema),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_computed(text, into, error):
    with pytest.raises(error):
        pippin.Session(Writer()).extract(text, into)


def test_a_form_that_is_cut(tiny):
    with pytest.raises(AnswerTruncated):
        pippin.Session(tiny).extract(LETTER, Account, options=pippin.GenerationOptions(max_tokens=5))


def test_places_of_a_text_that_comes_several_times():
    text = "Anna 5 apples, Ben 5 pears, Cleo 7 plums"
    source = SourceText(text)
    paths = [(index, name) for index in range(3) for name in ("who", "count")]
    marks = [
        Mark(path, said, 0, 0, said) for path, said in zip(paths, ["Anna", "5", "Ben", "5", "Cleo", "7"], strict=True)
    ]
    assert [start for start, _ in locate(marks, source)] == [0, 5, 15, 19, 28, 33]

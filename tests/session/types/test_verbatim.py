"""Verbatim strings: parts of what was said, and nothing else."""

import json
from typing import Annotated

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, Field

import pippin
from pippin import Schema, Verbatim
from pippin.core.errors import UnsupportedCapability
from pippin.session.extraction import SourceText

TEXT = 'Dear "Ann" Roe,\nyour order DE-4711 of 3 May\n\nwas sent.'


class Order(BaseModel):
    """A type with a verbatim field and others."""

    number: Annotated[str, Verbatim()]
    sender: Annotated[str, Verbatim()] | None
    mood: str


def test_a_type_and_a_json_schema_say_the_same():
    expected = {"type": "string", "format": "verbatim"}
    assert Schema(Order).json_schema["properties"]["number"] == expected
    assert Schema(Order).notes == ()
    assert Schema(expected).over(SourceText("a b").grammar).is_valid('"a b"')
    assert Schema.string(format="verbatim").grammar.is_verbatim
    assert not Schema(str).grammar.is_verbatim


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        ("order DE-4711", True),
        ("Ann", True),
        ('"Ann" Roe', True),
        ("Roe, your", True),  # a line break is a blank
        ("May was", False),  # a blank line is not crossed
        ("order DE-4712", False),
        ("rder", False),
        ("", False),
    ],
)
def test_parts_of_a_text_are_whole_words(written, allowed):
    assert Schema.string(format="verbatim").over(SourceText(TEXT).grammar).is_valid(json.dumps(written)) is allowed
    assert Schema.string(format="verbatim").is_valid(json.dumps(written)) is (written != "")


@given(st.text(min_size=1, max_size=40).filter(str.strip), st.integers(0, 39), st.integers(1, 39))
def test_every_word_of_any_text_is_a_part_of_it(text, first, count):
    words = text.split()
    word = words[first % len(words)]
    schema = Schema.string(format="verbatim").over(SourceText(text).grammar)
    if word.isprintable():
        assert schema.is_valid(json.dumps(word, ensure_ascii=False))
    assert not schema.is_valid(json.dumps(f"{word}\u2603\u2603{count}", ensure_ascii=False))


def test_lengths_and_patterns_may_be_added():
    schema = Schema(Annotated[str, Verbatim(), Field(max_length=7, pattern="^[A-Z]+-[0-9]+$")]).over(
        SourceText(TEXT).grammar
    )
    assert schema.is_valid('"DE-4711"')
    assert not schema.is_valid('"Ann"')
    assert (
        not Schema(Annotated[str, Verbatim(), Field(max_length=6)]).over(SourceText(TEXT).grammar).is_valid('"DE-4711"')
    )


def test_only_verbatim_strings_depend_on_the_text():
    schema = Schema(Order).over(SourceText(TEXT).grammar)
    assert schema.is_valid('{"number": "DE-4711", "sender": null, "mood": "glad"}')
    assert not schema.is_valid('{"number": "glad", "sender": null, "mood": "glad"}')
    assert schema.parse('{"number": "DE-4711", "sender": null, "mood": "x"}') == Order(
        number="DE-4711", sender=None, mood="x"
    )


def test_a_model_writes_what_was_said(model):
    session = pippin.Session(model)
    prompt = f"{TEXT}\n\nWhich number has the order, and who wrote?"
    options = pippin.GenerationOptions(max_tokens=60, temperature=1.5, seed=0)
    for seed in range(4):
        session.reset()
        found = session.respond(prompt, generating=Order.__annotations__["number"], options=options).content
        assert " ".join(found.split()) in " ".join(prompt.split())
        options = pippin.GenerationOptions(max_tokens=60, temperature=1.5, seed=seed + 1)


def test_outputs_of_tools_and_earlier_prompts_were_said_too(model):
    session = pippin.Session(model, transcript=pippin.Transcript())
    session.respond("The word is zebra.", options=pippin.GenerationOptions(max_tokens=3))
    word = Annotated[str, Verbatim(), Field(pattern="^zeb")]
    assert session.respond("Which word?", generating=word).content.startswith("zebra")


def test_a_provider_without_grammars_is_refused():
    provider = pippin.OpenAIProvider("http://127.0.0.1:9/v1", "some-model", api_key="none")
    with pytest.raises(UnsupportedCapability, match="grammars"):
        pippin.Session(provider).respond("Who?", generating=Order)

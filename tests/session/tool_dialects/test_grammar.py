"""An answer with tools is text or a call of a declared tool; random answers under each grammar are the proof.

Oracles: jsonschema for the arguments, json for the extent of a call, and texts from the documentation of each family.
"""

import codecs
import json
import random
from typing import Annotated, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field

from pippin.session import Regex, Tool
from pippin.session.tool_dialects.dialect import DIALECTS
from pippin.session.tool_dialects.grammar import tool_grammar
from pippin.session.tool_dialects.reader import call_reader
from pippin.session.types.schema import Schema

from .speakers import speaker

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]
    label: Annotated[str, Field(max_length=6)]


def weather(place: Place, days: Annotated[int, Field(ge=1, le=7)] = 1) -> str:
    """Weather."""
    return ""


def clock() -> str:
    """Time."""
    return ""


def look_up(words: Annotated[list[Literal["a", "b"]], Field(max_length=3)]) -> str:
    """Look up."""
    return ""


TOOLS = [Tool(weather), Tool(clock), Tool(look_up)]
SCHEMAS = {tool.name: tool.schema.json_schema for tool in TOOLS}
GOOD = [("weather", {"place": {"city": "Rome", "label": "x"}, "days": 3}), ("look_up", {"words": ["a", "b"]})]


def constraint(name, schema=None, tools=TOOLS, **options):
    tokenizer = speaker(name).tokenizer
    return tool_grammar(BY_NAME[name], tokenizer, schema, tools, **options).start(tokenizer)


def tokens(name, text):
    return speaker(name).tokenizer.encode(text, control=True)


def allows(name, text, schema=None, **options):
    state = constraint(name, schema, **options)
    return state.follow(tokens(name, text)) and state.may_end


def walk(name, state, rng, most=400):
    """A random answer: the tokens of the shortest way out are taken more often, so that strings end."""
    tokenizer, ids = speaker(name).tokenizer, []
    ends = set(tokenizer.eos_ids)
    while not state.finished and len(ids) < most:
        mask = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(mask) if int(token) not in ends]
        if not allowed or (state.may_end and rng.random() < 0.2):
            break
        closing = [token for token in allowed if tokenizer.spelled_bytes(token) in b'"}]\n`' or token > 255]
        token = rng.choice(closing) if closing and rng.random() < 0.5 else rng.choice(allowed)
        state.accept(token)
        ids.append(token)
    return ids, state.may_end


def read(name, ids, *, cut, typed=False):
    found = call_reader(BY_NAME[name], SCHEMAS, typed=typed)
    text, decoder = "", codecs.getincrementaldecoder("utf-8")()
    for token in ids:
        text += found.push(decoder.decode(speaker(name).tokenizer.spelled_bytes(token)))
    return found, text + found.finish(cut=cut)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_answer_is_text_or_calls_of_declared_tools(name):
    rng, seen, whole = random.Random(name), set(), 0
    for number in range(40):
        state = constraint(name, required=number % 2 == 1, max_calls=3)
        ids, complete = walk(name, state, rng)
        found, text = read(name, ids, cut=not complete)
        for tool, arguments in found.calls:
            jsonschema.validate(arguments, SCHEMAS[tool])
            seen.add(tool)
        if complete:
            whole += 1
            assert not found.partial
            assert bool(found.calls) or number % 2 == 0, "a required call is made"
            assert len(found.calls) <= 3
        marker = BY_NAME[name].marker
        assert not marker or marker not in text, "no part of a call is text"
    assert seen == set(SCHEMAS)
    assert whole > 10


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_allowed_and_what_is_not(name):
    dialect = BY_NAME[name]
    one, final = dialect.write(GOOD[:1]), "<|channel|>final<|message|>" if dialect.channels else ""
    options = {"max_calls": 2}
    assert allows(name, one, **options)
    assert allows(name, f"{final}It is {{warm}}, and 1 < 2.", **options)
    assert allows(name, one, required=True, **options)
    assert not allows(name, f"{final}It is warm.", required=True, **options)
    for wrong in (
        one.replace("weather", "whether"),
        one.replace("Rome", "Bonn"),
        dialect.write([("weather", GOOD[0][1] | {"days": 8})]),
    ):
        assert not allows(name, wrong, required=True, **options)
        assert not dialect.marker or not allows(name, wrong, **options), "a marker begins a call of a declared tool"
    if not dialect.bare and not dialect.channels:
        assert allows(name, f"Let me see.\n{one}", **options)
        assert allows(name, dialect.write(GOOD), **options)
        assert not allows(name, dialect.write([*GOOD, ("clock", {})]), **options), "one call too many"
        assert not allows(name, dialect.write(GOOD), max_calls=1)


FENCED = (
    'Sure:\n```json\n{\n  "name": "weather",\n'
    '  "arguments": {"place": {"city": "Rome", "label": "x"}, "days": 3}\n}\n```'
)


@pytest.mark.parametrize("name", ["hermes", "llama", "gemma"])
def test_fenced_json_is_a_call_if_it_names_a_tool(name):
    assert allows(name, FENCED, max_calls=1)
    assert not allows(name, FENCED.replace("Rome", "Bonn"), max_calls=1)
    more = f'\n```json\n{{"name": "clock", "{BY_NAME[name].key}": {{}}}}\n```'
    assert allows(name, FENCED + more, max_calls=2)
    found, text = read(name, tokens(name, FENCED + more), cut=False)
    assert (text, found.calls) == ("Sure:\n", [GOOD[0], ("clock", {})])
    for other in (
        '```json\n{"name": "Ada", "age": 3}\n```',
        '```json\n{"name": "weather"}\n```',
        "```\nx = {}\n```",
        "`a`",
    ):
        assert allows(name, f"See {other} there", max_calls=1), "other JSON, and other code, is text"
        found, text = read(name, tokens(name, f"See {other} there"), cut=False)
        assert (text, found.calls) == (f"See {other} there", [])


def test_llama_calls_with_and_without_its_tag():
    call = BY_NAME["llama"].write(GOOD[:1])
    for text in (call, f"<|python_tag|>{call}", f"\n{call}", call.replace("parameters", "arguments")):
        assert allows("llama", text)
        assert read("llama", tokens("llama", text), cut=False)[0].calls == GOOD[:1]
    assert not allows("llama", "<|python_tag|>weather.call()"), "code is no call of a declared tool"
    later = f"It would be {call}"
    assert allows("llama", later)
    assert read("llama", tokens("llama", later), cut=False)[1] == later


def test_harmony_reasons_comments_and_answers_or_calls():
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    comment = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = ' to=functions.look_up<|channel|>commentary json<|message|>{"words": ["a", "b"]}'
    assert allows("harmony", thought + comment + call)
    found, text = read("harmony", tokens("harmony", thought + comment + call), cut=False)
    assert (found.calls, found.take_reasoning(), text) == (GOOD[1:], "Hm.", "I look.")
    answer = f"{thought}<|channel|>final<|message|>Warm."
    assert allows("harmony", answer)
    assert allows("harmony", answer, tools=[])
    found, text = read("harmony", tokens("harmony", answer), cut=False)
    assert (found.calls, found.take_reasoning(), text) == ([], "Hm.", "Warm.")
    for wrong in (f"{thought}Warm.", "<|channel|>other<|message|>Warm.", call.replace("look_up", "find")):
        assert not allows("harmony", wrong)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    ("target", "valid"),
    [(Place, '{"city": "Oslo", "label": "x"}'), (Regex("yes|no"), "yes"), (list[int], "[1, 2]")],
    ids=["object", "regex", "array"],
)
def test_a_typed_answer_is_of_its_type_or_a_call(name, target, valid):
    rng, schema, final = random.Random(name), Schema(target), "<|channel|>final<|message|>"
    for _ in range(10):
        ids, complete = walk(name, constraint(name, schema, max_calls=2), rng)
        found, text = read(name, ids, cut=not complete, typed=True)
        assert not complete or found.calls or schema.is_valid(text)
        for tool, arguments in found.calls:
            jsonschema.validate(arguments, SCHEMAS[tool])
    answer = final + valid if BY_NAME[name].channels else valid
    assert allows(name, answer, schema)
    found, text = read(name, tokens(name, answer), cut=False, typed=True)
    assert (found.calls, text) == ([], valid)
    call = BY_NAME[name].write(GOOD[:1])
    assert allows(name, call, schema)
    found, text = read(name, tokens(name, call), cut=False, typed=True)
    assert (found.calls, text) == (GOOD[:1], "")


def test_many_tools_stay_fast_enough_for_the_engine():
    tools = [
        Tool.from_schema(f"tool_{at}", "", {"type": "object", "properties": {"x": {"const": at}}}, dict)
        for at in range(128)
    ]
    text = FENCED.replace('"weather"', '"tool_127"').partition('"arguments"')[0] + '"arguments": {"x": 127}}\n```'
    state = constraint("hermes", tools=tools, max_calls=8)
    for token in tokens("hermes", text):
        assert state.allows(token)
        state.accept(token)
    assert state.may_end
    assert json.loads(text.partition("```json")[2].removesuffix("```"))["arguments"] == {"x": 127}

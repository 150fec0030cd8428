"""Arguments written one by one: each text of the grammar is read as a valid object, and each valid object is in it.

Oracle: jsonschema for validity; the texts of each notation are those that its family documents.
"""

import json
import random

import jsonschema
import numpy as np
import pytest

from pippin.core.errors import EmptySchema
from pippin.engine.grammar.arguments import ArgumentReader, Notation, argument_grammar
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.regex import byte_tokenizer

TAGGED = Notation("<parameter={key}>\n", "\n</parameter>\n", strings="text")
KEYED = Notation("<arg_key>{key}</arg_key><arg_value>", "</arg_value>", strings="text")
PYTHON = Notation("{key}=", between=", ", python=True)
JAVASCRIPT = Notation("{key}=", between=", ")
QUOTED = Notation("{key}:", between=",", strings="quoted", quote='<|"|>')
NOTATIONS = {"tagged": (TAGGED, "</f>"), "keyed": (KEYED, "</f>"), "python": (PYTHON, ")")}
NOTATIONS |= {"javascript": (JAVASCRIPT, ")"), "quoted": (QUOTED, "}")}


class _Bytes:
    grammar_tokenizer = byte_tokenizer()


def fixed(text):
    """A fixed text in Lark."""
    return json.dumps(text) if text else ""


def compiled(name, schema):
    notation, close = NOTATIONS[name]
    return Grammar(
        argument_grammar(schema, notation, fixed).source.replace("start:", f'start: args "{close}"\nargs:', 1)
    )


def allows(name, schema, values):
    notation, close = NOTATIONS[name]
    return compiled(name, schema).allows(notation.write(values) + close)


def read(name, schema, text):
    """What is read, whole and character by character; the two must agree."""
    notation, close = NOTATIONS[name]
    whole, stepped = (ArgumentReader(schema, notation, close) for _ in range(2))
    end = whole.read(text, 0)
    for stop in range(1, len(text) + 1):
        if stepped.read(text[:stop], stepped.at) is not None:
            break
    assert stepped.values == whole.values
    assert end is not None
    return whole.values


def walk(name, schema, rng, most=300):
    state, text = compiled(name, schema).start(_Bytes()), bytearray()
    while not state.finished and len(text) < most:
        mask = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(mask) if token < 256]
        ending = list((NOTATIONS[name][0].after or NOTATIONS[name][0].quote).encode())
        if rng.random() < 0.2 and ending and state.reach(ending) == len(ending):  # no random text ends by itself
            state.follow(ending)
            text += bytes(ending)
            continue
        closing = [token for token in allowed if token in b'"}])>|,/\n<']
        token = rng.choice(closing) if closing and rng.random() < 0.4 else rng.choice(allowed)
        state.accept(token)
        text.append(token)
    return bytes(text).decode(errors="replace") if state.may_end else None


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TREE = {
    "$defs": {"node": {**closed(label={"type": "string", "maxLength": 3}), "required": ["label"]}},
    **closed(root={"$ref": "#/$defs/node"}),
}
TREE["$defs"]["node"]["properties"]["next"] = {"$ref": "#/$defs/node"}
CASES = {
    "scalars": (
        closed(s={"type": "string"}, i={"type": "integer"}, b={"type": "boolean"}, n={"type": "null"}),
        [{"s": 'a "b"\n{c}', "i": -3, "b": True, "n": None}, {"s": "12", "i": 0, "b": False, "n": None}],
    ),
    "choices": (
        closed(e={"enum": ["x", "y z", 1, None, True]}, c={"const": "on"}),
        [{"e": v, "c": "on"} for v in ("x", "y z", 1, None, True)],
    ),
    "nullable": (
        closed(s={"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}),
        [{"s": "a"}, {"s": None}],
    ),
    "mixed": (
        closed(v={"type": ["string", "integer", "array"], "items": {"type": "integer"}, "maxItems": 3}),
        [{"v": "a b"}, {"v": 5}, {"v": [1, 2]}, {"v": []}],
    ),
    "limited": (
        closed(
            p={"type": "string", "pattern": "^[a-c]{2,4}$"},
            d={"type": "string", "format": "date"},
            m={"type": "string", "maxLength": 4},
        ),
        [{"p": "abc", "d": "2024-02-29", "m": "äöü"}],
    ),
    "nested": (
        closed(
            o=closed(
                a={"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3}, b={"type": "boolean"}
            )
        ),
        [{"o": {"a": ["x", "y,}"], "b": False}}, {"o": {"a": [], "b": True}}],
    ),
    "optional": (
        {**closed(a={"type": "integer"}, b={"type": "string"}, c={"type": "integer"}), "required": ["b"]},
        [{"b": "x"}, {"a": 1, "b": "x"}, {"b": "x", "c": 2}, {"a": 1, "b": "x", "c": 2}],
    ),
    "nothing": (closed(), [{}]),
    "recursive": (TREE, [{"root": {"label": "a", "next": {"label": "b"}}}]),
    "free": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
        [{"a": 1, "flag": True}, {"x_1": False}, {}],
    ),
}


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_valid_arguments_are_in_the_grammar_and_read_as_they_are(name, case):
    schema, examples = CASES[case]
    for values in examples:
        jsonschema.validate(values, schema)
        assert allows(name, schema, values)
        text = NOTATIONS[name][0].write(values) + NOTATIONS[name][1]
        assert read(name, schema, text) == values


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_text_of_the_grammar_is_read_as_valid_arguments(name, case):
    schema, _ = CASES[case]
    rng, whole = random.Random(f"{name} {case}"), 0
    for _ in range(6):
        text = walk(name, schema, rng)
        if text is not None:
            whole += 1
            jsonschema.validate(read(name, schema, text), schema)
    assert whole >= 1


@pytest.mark.parametrize("name", NOTATIONS)
def test_invalid_arguments_are_not_in_the_grammar(name):
    for case, values in {
        "scalars": {"s": "a", "i": 1.5, "b": True, "n": None},
        "choices": {"e": "z", "c": "on"},
        "limited": {"p": "abd", "d": "2023-02-29", "m": "x"},
        "optional": {"a": 1},
        "nothing": {"a": 1},
        "free": {"a": 1, "flag": 3},
        "nested": {"o": {"a": ["long text"], "b": True}},
    }.items():
        assert not allows(name, CASES[case][0], values)


def test_bare_text_cannot_hold_its_closing_tag():
    schema = closed(s={"type": "string"})
    assert allows("tagged", schema, {"s": "a </f> b"})
    assert not allows("tagged", schema, {"s": "a </parameter> b"})
    assert not allows("quoted", schema, {"s": 'a <|"|> b'})


def test_text_that_looks_like_another_type_is_typed_by_the_schema():
    text = "<parameter=v>\n5\n</parameter>\n</f>"
    for kind, value in {"string": "5", "integer": 5}.items():
        assert read("tagged", closed(v={"type": kind}), text) == {"v": value}
    assert read("tagged", closed(v={"type": ["string", "boolean"]}), text) == {"v": "5"}


def test_no_arguments_are_valid():
    with pytest.raises(EmptySchema, match="no arguments are valid"):
        argument_grammar({"type": "string"}, PYTHON, fixed)

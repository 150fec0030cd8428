"""Lists of distinct items and names of objects: nothing is written twice, and writing never comes to a dead end."""

import ast
import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

from pippin.core.errors import EmptySchema, UnsupportedGuide
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine.grammar import Grammar, repeats
from pippin.engine.grammar.arguments import Notation, argument_grammar
from pippin.engine.grammar.distinct import SET, State, node
from pippin.engine.grammar.lark import compose
from pippin.engine.grammar.regex import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE whose tokens go from one item into the next, or hold several."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ['["a", "a", "b", "b", "ab"]', "[1, 1, 2, 10, 12]", '{"a": 1, "a": 1}', '[{"a": "x"}, {"a": "x"}]'] * 30
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_ids=[backend.token_to_id("<end>")])


class Bytes:
    """The smallest tokenizer."""

    grammar_tokenizer = byte_tokenizer()


def unique(items, **more):
    return {"type": "array", "uniqueItems": True, "items": items, **more}


FLAGS = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "additionalProperties": False,
}
TAGGED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["set", "list"]},
        "of": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["kind", "of"],
    "additionalProperties": False,
    "if": {"properties": {"kind": {"const": "set"}}},
    "then": {"properties": {"of": {"uniqueItems": True}}},
}
SCHEMAS = {
    "all of a list": unique({"enum": ["a", "ab", "b"]}, minItems=3),
    "integers": unique({"type": "integer", "minimum": 0, "maximum": 12}),
    "a pattern with few strings": unique({"type": "string", "pattern": "^[ab]{1,2}$"}, minItems=2),
    "lengths": unique({"type": "string", "maxLength": 1, "pattern": "^[a-c\\\\\"]*$"}, minItems=4),
    "objects": unique(FLAGS, minItems=5),
    "names in any order": unique({"additionalProperties": {"enum": [1]}, "propertyNames": {"pattern": "^[ab]$"}}),
    "numbers": unique({"type": "number", "multipleOf": 0.5, "minimum": -1, "maximum": 1}),
    "values of all kinds": unique({"enum": [1, 1.0, 2.5, "1", None, True, [1], [1.0], {"a": 1}, {"a": 1.0}]}),
    "lists in lists": unique(unique({"enum": ["a", "b"]}), minItems=3),
    "items by position": unique({"enum": [1, 2, 3]}, prefixItems=[{"enum": [1, 2]}, {"enum": [1, 2, 3]}], minItems=2),
    "contains": unique({"enum": [1, 2, 3, 4]}, contains={"enum": [3, 4]}, minItems=2),
    "either": {"anyOf": [unique({"enum": [1, 2]}), {"items": {"enum": [2, 3]}, "minItems": 3, "maxItems": 4}]},
    "as tagged": TAGGED,
    "few names": {"patternProperties": {"^[ab]$": {"enum": [1, 2]}}, "additionalProperties": False, "minProperties": 2},
    "counted names": {
        "properties": {"a": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
        "propertyNames": {"maxLength": 1, "pattern": "^[a-d]$"},
        "minProperties": 3,
    },
}  # fmt: skip


def write(grammar, tokenizer, seed, limit=300):
    """A text sampled from the masks; None if it does not end within a limit."""
    chance, constraint = random.Random(seed), grammar.start(tokenizer)
    ends, tokens = set(tokenizer.grammar_tokenizer.eos_tokens), []
    for _ in range(limit):
        allowed = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
        choices = [token for token in allowed.tolist() if token not in ends]
        if not choices or (constraint.may_end and chance.random() < 0.3):
            return tokenizer.grammar_tokenizer.decode_bytes(tokens).decode()
        tokens.append(chance.choice(choices))
        constraint.accept(tokens[-1])
        for token in constraint.forced():
            constraint.accept(token)
            tokens.append(token)
    return None


def value_of(text):
    """The value of a text whose objects have each name once."""

    def once(pairs):
        assert len({name for name, _ in pairs}) == len(pairs), text
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("vocabulary", ["bytes", "words"])
def test_what_is_written_is_valid_and_comes_to_an_end(name, vocabulary, tokenizer):
    schema = {"type": "object", **SCHEMAS[name]} if "names" in name else SCHEMAS[name]
    grammar, oracle = Grammar.json_schema(schema), jsonschema.Draft202012Validator(schema)
    found = set()
    for seed in range(12):
        text = write(grammar, Bytes() if vocabulary == "bytes" else tokenizer, seed)
        assert text is not None
        oracle.validate(value_of(text))
        assert grammar.allows(text)
        found.add(text)
    assert len(found) > 2


@pytest.mark.parametrize("name", ["all of a list", "integers", "objects", "few names", "numbers"])
def test_without_the_watch_something_repeats(name, monkeypatch):
    schema = {"type": "object", **SCHEMAS[name]} if "names" in name else SCHEMAS[name]
    monkeypatch.setattr(repeats.Repeats, "restrict", lambda *_: None)
    monkeypatch.setattr(repeats.Repeats, "accept", lambda *_: True)
    grammar, oracle = Grammar.json_schema(schema), jsonschema.Draft202012Validator(schema)
    texts = [text for seed in range(30) if (text := write(grammar, Bytes(), seed)) is not None]
    pairs = [json.loads(text, object_pairs_hook=list) for text in texts]
    twice = name == "few names" and any(len({name for name, _ in each}) < len(each) for each in pairs)
    assert twice or any(not oracle.is_valid(json.loads(text)) for text in texts)


VALUES = [
    None,
    True,
    0,
    1,
    1.5,
    "",
    "1",
    "a\n",
    [],
    [1],
    [1.0, "1"],
    {},
    {"a": 1},
    {"a": 1.0, "b": [2]},
    {"b": [2], "a": 1},
]


def test_values_are_compared_as_the_oracle_compares_them():
    oracle = jsonschema.Draft202012Validator({"uniqueItems": True})
    for items in itertools.combinations_with_replacement(VALUES, 2):
        valid = oracle.is_valid(list(items))
        text = json.dumps(items, ensure_ascii=False).encode()
        assert (State().after(text, lists=SET) is not None) == valid
        same = node(json.dumps(items[0]).encode()) == node(json.dumps(items[1]).encode())
        assert same != valid


def test_one_escape_and_another_order_are_the_same_value():
    grammar = Grammar.json_schema(unique({"type": "object", "additionalProperties": {"type": "string"}}))
    assert grammar.allows('[{"a": "1", "b": "2"}, {"a": "2", "b": "1"}]')
    assert not grammar.allows('[{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]')
    assert not grammar.allows('[{"a": "\\"", "a": "2"}]')
    numbers = Grammar.json_schema(unique({"type": "number"}))
    assert numbers.allows("[1, 1.5, -1]")
    assert not any(map(numbers.allows, ("[1.5, 1.50]", "[0, -0]", "[1, 1]", "[1, 1.0]", "[1, 1e0]")))


def test_drafts_are_cut_where_they_repeat_and_a_step_back_forgets():
    constraint = Grammar.json_schema(unique({"type": "string"})).start(Bytes())
    first, more = list(b'["a", "b"'), list(b', "a"]')
    assert constraint.follow(first)
    fork = constraint.fork()
    assert constraint.reach(more) == len(b', "a')
    assert not constraint.follow(more)
    assert constraint.follow(list(b'b"]'))
    fork.rollback(len(b'"b"'))
    assert not fork.fork().follow(list(b'"a"'))
    assert fork.follow(list(b'"b", "c"'))
    fork.rollback(len(fork._accepted))
    assert fork.follow(list(b'["b", "a"]'))
    assert fork.finished


def test_a_long_list_can_be_taken_back_to_its_beginning():
    constraint = Grammar.json_schema(unique({"type": "integer"}, maxItems=100)).start(Bytes())
    text = json.dumps(list(range(60))).encode()
    assert constraint.follow(list(text[:-1]))
    assert not constraint.allows(ord("]")) or not constraint.fork().follow(list(b", 7]"))
    constraint.rollback(len(text) - 1 - len(b"[0, 1"))
    assert constraint.follow(list(b", 7]"))


def test_constants_in_the_spelling_of_python_are_compared():
    values = {"x": unique({"enum": [True, None, 1, [True], {"a": None, "b": 1}]})}
    schema = {"type": "object", "properties": values, "required": ["x"], "additionalProperties": False}
    grammar = argument_grammar(schema, Notation("{key}=", python=True), json.dumps)
    assert grammar.allows('x=[True, 1, [True], None, {"a": None, "b": 1}]')
    assert not any(map(grammar.allows, ("x=[True, True]", "x=[[True], [True]]", "x=[None, 1, None]")))
    for seed in range(8):
        text = write(grammar, Bytes(), seed)
        assert len(set(map(repr, items := ast.literal_eval(text.removeprefix("x="))))) == len(items)


def test_a_list_inside_a_composed_grammar_is_watched(tokenizer):
    inner = Grammar.json_schema({"type": "object", "properties": {"x": SCHEMAS["integers"]}, "required": ["x"]})
    grammar = compose('start: FREE "<call>" args "</call>"\nFREE: /[a-z\\[{ ,]*/', {"args": inner})
    text = 'say [a, [a, {{ <call>{"x": [1, 2], "y": 3}</call>'
    assert grammar.allows(text)
    assert not grammar.allows(text.replace("[1, 2]", "[1, 2, 1]"))
    assert not grammar.allows(text.replace('"y"', '"x"'))
    constraint = grammar.start(tokenizer)
    assert constraint.follow(tokenizer.encode(text.partition(", 2]")[0] + ", "))
    assert not constraint.allows(tokenizer.encode("1]")[0]) or not constraint.fork().follow(tokenizer.encode("1]"))


@pytest.mark.parametrize(
    ("schema", "error", "message"),
    [
        (unique({"enum": [1, 2]}, minItems=3), EmptySchema, "at most 2"),
        (unique({"type": "boolean"}, prefixItems=[{"const": 1}, {"const": 1}], minItems=2), UnsupportedGuide, "item 1"),
        (unique({"type": "integer", "minimum": 1, "maximum": 3}, minItems=4), UnsupportedGuide, "4 different items"),
        (unique({"type": "string", "pattern": "^[ab]?$"}, minItems=4), UnsupportedGuide, "4 different items"),
        (unique({"type": "string", "pattern": "^a{2000}$"}, minItems=2), UnsupportedGuide, "no telling"),
        (
            {"type": "object", "patternProperties": {"^[ab]$": {}}, "additionalProperties": False, "minProperties": 3},
            EmptySchema,
            "at least 3 properties",
        ),
    ],
)
def test_too_few_different_items_are_refused_by_name(schema, error, message):
    with pytest.raises(error, match=message):
        Grammar.json_schema(schema)

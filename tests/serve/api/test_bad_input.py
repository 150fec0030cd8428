"""What a client sends by mistake or on purpose: a typed error, soon, and the server goes on."""

import json
import time

import pytest
from tests.machine import slowness

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ROUTES = ["chat/completions", "completions", "responses", "embeddings"]


def refused(answer, status=400):
    """The error of a refused request, whose body is checked for its shape."""
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def with_schema(schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return HI | {"response_format": wanted, "include_schema_in_prompt": False}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "tiny",}',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"seed": ' + b"9" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
        b"{} {}",
    ],
    ids=lambda body: str(body[:24]),
)
def test_what_is_not_json(post, route, body):
    assert refused(post(route, body))["code"] == "invalid_json"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"text"', b"{}", b""])
def test_what_is_json_but_no_request(post, route, body):
    answer = post(route, body)
    if (route, body) == ("completions", b"{}"):
        assert answer.status_code == 200  # a completion of nothing is one
    else:
        assert refused(answer)["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", ""]
)
def test_a_body_of_another_kind(post, kind):
    error = refused(post("chat/completions", json.dumps(HI).encode(), **{"content-type": kind}), 415)
    assert error["code"] == "unsupported_media_type"


def test_a_number_beyond_all_numbers_is_no_temperature(post):
    assert (
        refused(post("chat/completions", json.dumps(HI)[:-1].encode() + b', "temperature": 1e999}'))["param"]
        == "temperature"
    )


def test_addresses_and_methods_that_are_not_there(server):
    with server.client() as http:
        assert refused(http.get("/v1/nothing"), 404)["code"] == "unknown_url"
        answer = http.get("/v1/chat/completions")
        assert refused(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"] == "POST"
        answer = http.patch("/v1/responses/x")
        assert refused(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"] == "DELETE, GET"


def test_a_missing_and_a_wrong_key(server):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic test"}):
        with server.client(headers=headers) as http:
            assert refused(http.post("/v1/chat/completions", json=HI), 401)["code"] == "invalid_api_key"


def test_a_body_that_is_too_large(server, post):
    limit = server.service.settings.max_body_bytes
    assert refused(post("chat/completions", b" " * (limit + 1)), 413)["code"] == "request_too_large"


def chain(length):
    """Definitions that refer to each other in a row."""
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": names | {f"d{length}": {"type": "boolean"}}}


def doubling(depth):
    """An object whose written-out form has 2 ** depth leaves."""
    names = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": names | {f"d{depth}": {"type": "boolean"}}}


def nested(depth, key="items"):
    schema = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "array", key: schema} if key == "items" else {key: [schema]}
    return schema


BOMBS = {
    "a chain of references": chain(20_000),
    "a circle of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "references that double": doubling(60),
    "a recursion without an end": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "an enum of megabytes": {"enum": ["x" * 50 + str(i) for i in range(130_000)]},
    "one text of megabytes": {"const": "x" * 7_000_000},
    "a pattern of megabytes": {"type": "string", "pattern": "(a|b)" * 1_000_000},
    "a pattern that explodes": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "a pattern of lookaheads": {"type": "string", "pattern": "(?=a)" * 1000},
    "a length without measure": {"type": "string", "minLength": 10**9},
    "a list without measure": {"type": "array", "minItems": 10**9, "items": {"type": "boolean"}},
    "fifty thousand properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "null"} for i in range(50_000)},
    },
    "a hundred levels": nested(190),
    "choices in choices": nested(60, "anyOf"),
    "bounds that are not finite": {"type": "number", "minimum": 1e308, "maximum": 1e308, "multipleOf": 1e-300},
    "a number of digits": {"type": "integer", "minimum": 10**4000, "maximum": 10**4000 + 1},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_bomb_is_defused(post, name):
    began = time.monotonic()
    answer = post("chat/completions", with_schema(BOMBS[name]))
    assert time.monotonic() - began < 20 * slowness()
    if answer.status_code != 200:
        error = refused(answer)
        assert str(error["param"]).startswith("response_format"), error
        assert len(error["message"]) < 2000
    assert post("chat/completions", HI).status_code == 200


def test_a_pattern_or_grammar_bomb_is_defused(post):
    for wanted in (
        {"type": "regex", "pattern": "(((a{1,500}){1,500}){1,500})"},
        {"type": "lark", "grammar": "start: " + "(" * 50_000},
        {"type": "choice", "choices": ["x" * 100] * 60_000},
    ):
        answer = post("chat/completions", HI | {"response_format": wanted})
        assert answer.status_code in (200, 400), answer.text[:300]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * 1_000_000}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 3_000}),
        ("completions", {"prompt": "word " * 1_000_000}),
        ("completions", {"prompt": [65] * 200_000}),
        ("responses", {"input": "word " * 1_000_000}),
        ("responses", {"input": "hi", "instructions": "word " * 1_000_000}),
    ],
)
def test_a_prompt_of_far_too_many_tokens(post, route, body):
    began = time.monotonic()
    error = refused(post(route, body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    assert time.monotonic() - began < 10 * slowness()


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 10_001}, "messages"),
        ("chat/completions", HI | {"logit_bias": {f"{i}x": "y" for i in range(100_000)}}, "logit_bias"),
        ("completions", {"prompt": [["a"] * 200_000]}, "prompt[0][0]"),
        ("completions", {"prompt": ["a"] * 257}, "prompt"),
        ("completions", {"prompt": ["a"] * 200, "n": 2}, "n"),
        ("responses", {"input": "hi", "metadata": {str(i): i for i in range(100_000)}}, "metadata"),
        ("embeddings", {"model": "tiny-encoder", "input": ["a"] * 2049}, "input"),
    ],
)
def test_lists_without_measure(post, route, body, param):
    began = time.monotonic()
    assert refused(post(route, body))["param"] == param
    assert time.monotonic() - began < 5 * slowness()

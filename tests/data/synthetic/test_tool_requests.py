"""The synthetic requests for tools: calls that fit their schemas, values that the user says, and a split by name."""

import json
import random
import re

import jsonschema
import pytest

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.synthetic import tool_requests
from pippin.data.synthetic.tool_requests.tool_files import unrelated


def _requests(count, seed=0, **options):
    rng = random.Random(seed)
    return [tool_requests.sample(rng, **options) for _ in range(count)]


def test_the_arguments_of_a_call_fit_the_schema_of_its_tool():
    called = [request for request in _requests(600) if request.call]
    assert len(called) > 350
    for request in called:
        name, arguments = request.call
        (function,) = (tool["function"] for tool in request.tools if tool["function"]["name"] == name)
        jsonschema.Draft202012Validator.check_schema(function["parameters"])
        jsonschema.validate(arguments, function["parameters"])
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
        json.loads(request.output)


def test_the_user_says_the_values_of_a_call():
    for request in _requests(600, 1):
        for value in (request.call or ("", {}))[1].values():
            for item in value if isinstance(value, list) else [value]:
                assert isinstance(item, bool) or str(item) in request.prompt
        for text in (request.prompt, request.reply, request.output, request.answer):
            assert not re.search(r"\{\w+\}", text or "")


@pytest.mark.parametrize("held_out", [True, False])
def test_the_tools_are_split_by_their_names(held_out):
    offered = {tool["function"]["name"] for request in _requests(600, 2, held_out=held_out) for tool in request.tools}
    every = {name for name in tool_requests.library() if tool_requests.is_held_out(name) == held_out}
    assert offered == every
    assert len(every) >= 5


def test_some_requests_have_no_tool_that_fits():
    requests = _requests(600, 3)
    without = [request for request in requests if request.call is None]
    assert 0.15 < len(without) / len(requests) < 0.4
    assert all(request.reply and request.tools for request in without)
    assert {request.prompt for request in without} & {request for request, _ in unrelated()}


def test_a_sample_is_a_function_of_its_seed():
    assert _requests(20, 4) == _requests(20, 4) != _requests(20, 5)


def test_a_language_is_that_of_the_requests_of_the_library():
    phrases = [phrase for tool in tool_requests.library().values() for phrase in tool.phrases.get("de", [])]
    patterns = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(phrase)) for phrase in phrases]
    for request in _requests(100, 6, language="de"):
        assert request.call is None or any(re.fullmatch(pattern, request.prompt) for pattern in patterns)
    with pytest.raises(InvalidArgument, match="klingon"):
        tool_requests.sample(random.Random(0), language="klingon")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("+ a request before any tool", "line 1"),
        ("[a] b\nx integer! many : not a range\n", "line 2"),
        ("[a] b\nx integer! 1..2 : Number\n+ no value\n> {}\n< done", "lacks a required"),
        ("[a] b\nx integer! 1..2 : Number\n+ take {x} and {y}\n> {}\n< done", "unknown"),
        ("[a] b\nx integer 1..2 : Number\n+ take {x}\n> {}\n< {x} done", "not every call"),
        ("[a] b\n+ do it\n> {}", "no answer"),
    ],
)
def test_a_faulty_file_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        tool_requests.read(text)

"""Parts of requests become parts of turns, and what cannot is refused by name."""

import base64
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter

from pippin.core.errors import (
    EmptySchema,
    InvalidRequest,
    InvalidTool,
    SchemaError,
    UndefinedReference,
    UnsupportedGuide,
)
from pippin.engine.recommended_sampling import resolved
from pippin.serve.api.common import fields, provider_requests
from pippin.session.options import GenerationOptions
from pippin.session.types.schema import Schema

PIXEL = "iVBORw0KGgo="


def tool(name):
    return provider_requests.definition(
        name, None, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, "tools[0]", strict=False
    )


def test_a_data_url_becomes_its_bytes():
    made = provider_requests.attachment(f"data:image/png;base64,{PIXEL}", "url", label="dot")
    assert (made.media_type, made.data, made.label) == ("image/png", base64.b64decode(PIXEL), "dot")
    text = provider_requests.attachment("data:text/plain;charset=utf-8;base64,SGk=", "url")
    assert (text.media_type, text.text) == ("text/plain", "Hi")


@given(st.binary(max_size=50))
def test_bytes_survive_a_data_url(data):
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    assert provider_requests.attachment(url, "url").data == data


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://example.org/cat.png", "invalid_url"),
        ("file:///etc/passwd", "invalid_url"),
        ("data:image/png,abc", "invalid_url"),
        ("data:image/png;base64,%%%", "invalid_base64"),
        ("data:image/png;base64,abc", "invalid_base64"),
        ("data:image/png;base64,é", "invalid_base64"),
    ],
)
def test_what_is_no_data_url_is_refused_and_never_fetched(url, code):
    with pytest.raises(InvalidRequest) as caught:
        provider_requests.attachment(url, "messages[0].content[1].image_url.url")
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1].image_url.url", code)


def test_a_function_without_parameters_takes_none():
    made = provider_requests.definition("now", None, None, "tools[0]", strict=False)
    assert made.schema.is_valid("{}")
    assert not made.schema.is_valid('{"a": 1}')


def test_parameters_without_a_type_are_an_object():
    assert tool("f").schema.is_valid('{"a": 1}')
    assert not tool("f").schema.is_valid("1")


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"type": "string"}, SchemaError),
        ({"properties": {"a": {"type": "number", "multipleOf": 0.000001234}}}, UnsupportedGuide),
        ({"properties": {"a": {"$ref": "#/$defs/nowhere"}}, "required": ["a"]}, UndefinedReference),
    ],
)
def test_parameters_that_cannot_be_enforced_name_the_field(parameters, error):
    with pytest.raises(error, match=r"tools\[2\]\.function\.parameters") as caught:
        provider_requests.definition("f", None, parameters, "tools[2].function.parameters", strict=False)
    assert caught.value.param == "tools[2].function.parameters"


def test_arguments_that_no_function_takes_are_not_invented():
    point = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    nested = {"properties": {"at": {"$ref": "#/$defs/p"}, "all": {"items": {"anyOf": [point]}}}, "$defs": {"p": point}}
    made = provider_requests.definition("f", None, nested, "tools[0]", strict=False).schema
    assert made.is_valid('{"at": {"x": 1}, "all": [{"x": 2}]}')
    for text in ('{"b": 1}', '{"at": {"x": 1, "y": 2}}', '{"all": [{"x": 2, "y": 1}]}'):
        assert not made.is_valid(text)
    assert "additionalProperties" not in point  # what was given is not changed


@pytest.mark.parametrize(
    "open_one",
    [
        {"type": "object"},
        {"properties": {}},
        {"properties": {"a": True}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": True}, "additionalProperties": True},
        {"allOf": [{"properties": {"a": True}}, {"properties": {"b": True}}]},
        {"properties": {"properties": {"type": "string"}}, "patternProperties": {"^x": True}},
        {"properties": {"a": True}, "minProperties": 3},
        True,
    ],
)
def test_a_schema_that_says_that_more_may_come_stays_open(open_one):
    assert provider_requests.closed(open_one) == open_one


def test_a_choice_of_tools():
    one, two = tool("one"), tool("two")
    assert provider_requests.chosen([one, two], None) == ((one, two), False)
    assert provider_requests.chosen([one, two], "auto") == ((one, two), False)
    assert provider_requests.chosen([one, two], "none") == ((), False)
    assert provider_requests.chosen([one, two], "required") == ((one, two), True)
    named = fields.NamedTool(type="function", function=fields.NamedFunction(name="two"))
    assert provider_requests.chosen([one, two], named) == ((two,), True)
    some = fields.AllowedTools(mode="auto", tools=[named])
    assert provider_requests.chosen([one, two], fields.AllowedChoice(type="allowed_tools", allowed_tools=some)) == (
        (two,),
        False,
    )


def test_a_choice_that_cannot_be_made_is_refused():
    absent = fields.NamedTool(type="function", function=fields.NamedFunction(name="absent"))
    with pytest.raises(InvalidRequest, match="'absent'"):
        provider_requests.chosen([tool("one")], absent)
    with pytest.raises(InvalidRequest, match="needs tools"):
        provider_requests.chosen([], "required")
    with pytest.raises(InvalidTool, match="two tools are named 'one'"):
        provider_requests.chosen([tool("one"), tool("one")], "auto")


def test_formats_become_schemas():
    assert provider_requests.schema(None, "f") is None
    assert provider_requests.schema(fields.TextFormat(type="text"), "f") is None
    anything = provider_requests.schema(fields.ObjectFormat(type="json_object"), "f")
    assert isinstance(anything, Schema)
    assert anything.is_valid('{"a": [1]}')
    assert not anything.is_valid("[1]")
    named = fields.NamedSchema.model_validate({"name": "n", "schema": {"type": "boolean"}})
    assert provider_requests.schema(fields.SchemaFormat(type="json_schema", json_schema=named), "f").is_valid("true")
    assert provider_requests.schema(fields.RegexFormat(type="regex", pattern="[ab]+"), "f").is_valid("abba")
    assert provider_requests.schema(fields.ChoiceFormat(type="choice", choices=["yes", "no"]), "f").is_valid("no")
    assert provider_requests.schema(fields.LarkFormat(type="lark", grammar='start: "x" "y"'), "f").is_valid("xy")


@pytest.mark.parametrize(
    ("wanted", "error", "param"),
    [
        ({"type": "regex", "pattern": "("}, SchemaError, "response_format.pattern"),
        ({"type": "regex", "pattern": r"(a)\1"}, UnsupportedGuide, "response_format.pattern"),
        ({"type": "lark", "grammar": "start: nothing"}, SchemaError, "response_format.grammar"),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": []}}},
            EmptySchema,
            "response_format.json_schema.schema",
        ),
    ],
)
def test_formats_that_cannot_be_enforced_name_the_field(wanted, error, param):
    parsed = TypeAdapter(fields.Format).validate_python(wanted)
    with pytest.raises(error) as caught:
        provider_requests.schema(parsed, "response_format")
    assert caught.value.param == param


def plain(**recommended):
    """A model with 100 tokens that recommends this."""
    return SimpleNamespace(
        engine=SimpleNamespace(recommended_sampling=recommended), model=SimpleNamespace(vocab_size=100)
    )


def test_what_is_not_named_is_left_to_the_model():
    options = GenerationOptions(**provider_requests.sampling(fields.Penalties(), plain()))
    assert options == GenerationOptions()
    assert options.temperature is None


def test_several_answers_are_sampled():
    def temperature(local, **asked):
        return provider_requests.sampling(fields.SamplingFields(**asked), local, answers=2)["temperature"]

    assert temperature(plain()) == 1.0
    assert temperature(plain(), temperature=0.0) == 0.0
    assert temperature(plain(temperature=0.6)) is None


def test_sampling_is_passed_on():
    asked = fields.Penalties(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, frequency_penalty=1.0, presence_penalty=-1.0,
        repetition_penalty=1.1, logit_bias={"7": -100.0}, stop="end",
    )  # fmt: skip
    options = GenerationOptions(**provider_requests.sampling(asked, plain(), seed=4))
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 3, 0.1)
    assert (options.frequency_penalty, options.presence_penalty, options.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (options.logit_bias, options.stop, options.seed) == ({7: -100.0}, ["end"], 4)


def test_a_nucleus_of_nothing_leaves_the_likeliest_token():
    options = GenerationOptions(**provider_requests.sampling(fields.SamplingFields(top_p=0.0), plain()))
    assert (options.top_k, options.top_p) == (1, None)


def test_a_filter_can_be_switched_off_that_the_model_recommends():
    asked = fields.SamplingFields(top_k=-1, top_p=1.0, min_p=0.0)
    options = GenerationOptions(**provider_requests.sampling(asked, plain()))
    found = resolved(options, {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}, 100)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.6, None, None, None)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_every_seed_of_the_interface_is_one_of_the_engine(asked, choice):
    GenerationOptions(seed=provider_requests.seed(asked, choice))
    assert provider_requests.seed(asked, choice) != provider_requests.seed(asked, choice + 1)
    assert provider_requests.seed(None, choice) is None


def test_reasoning_is_refused_where_the_model_cannot():
    assert provider_requests.reasoning(None, False, "reasoning_effort", None) == "off"
    assert provider_requests.reasoning("none", False, "reasoning_effort", None) == "off"
    assert provider_requests.reasoning("high", True, "reasoning_effort", 7) == 7
    efforts = ("minimal", "low", "medium", "high")
    assert [provider_requests.reasoning(effort, True, "p", None) for effort in efforts] == [
        "light", "light", "moderate", "deep",
    ]  # fmt: skip
    with pytest.raises(InvalidRequest) as caught:
        provider_requests.reasoning("low", False, "reasoning_effort", None)
    assert caught.value.param == "reasoning_effort"
    for effort, able in ((None, False), ("none", True)):
        with pytest.raises(InvalidRequest) as caught:
            provider_requests.reasoning(effort, able, "reasoning_effort", 7)
        assert caught.value.param == "max_thinking_tokens"


def test_a_bias_for_a_token_that_is_not_there_is_refused():
    provider_requests.check_vocabulary({0: 1.0, 9: 1.0}, 10)
    provider_requests.check_vocabulary(None, 10)
    with pytest.raises(InvalidRequest, match="token 10 is outside the vocabulary of 10"):
        provider_requests.check_vocabulary({10: 1.0}, 10)


def test_options_name_the_field_that_they_refuse():
    with pytest.raises(InvalidRequest) as caught:
        provider_requests.options({"logprobs": 101})
    assert caught.value.param == "logprobs"

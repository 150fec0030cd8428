"""Tools: signatures become schemas, and every way a call can go wrong is a typed error with its cause."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field

import pippin
from pippin.core.errors import InvalidArgument, InvalidTool, SchemaError, ToolCallError, UnsupportedGuide
from pippin.session.hooks import Hooks
from pippin.session.tools import Tool, as_tools
from pippin.session.transcript import ToolCall

CALL = ToolCall(id="1", name="f", arguments={})


class Place(BaseModel):
    city: str
    country: Literal["IT", "NO"] = "IT"


@pippin.tool
def weather(place: Place, days: Annotated[int, Field(ge=1, le=7)] = 1, *, metric: bool = True) -> dict:
    """Forecast the weather.

    More words that the model is not told.
    """
    return {"city": place.city, "days": days, "metric": metric}


def test_a_tool_is_described_by_its_signature_and_docstring():
    definition = weather.definition()["function"]
    assert (definition["name"], definition["description"]) == ("weather", "Forecast the weather.")
    assert definition["parameters"]["required"] == ["place"]
    assert list(definition["parameters"]["properties"]) == ["place", "days", "metric"]
    days = definition["parameters"]["properties"]["days"]
    assert (days["minimum"], days["maximum"]) == (1, 7)


def test_a_tool_is_still_the_function():
    assert weather(Place(city="Oslo"), metric=False)["metric"] is False


def test_arguments_arrive_as_the_types_of_the_signature():
    text = weather.call({"place": {"city": "Rome"}, "days": 3})
    assert text == '{"city":"Rome","days":3,"metric":true}'


def test_async_functions_are_awaited():
    @pippin.tool
    async def later(x: int) -> int:
        await asyncio.sleep(0.01)
        return x + 1

    assert later.call({"x": 1}) == "2"


def test_results_of_all_kinds_become_text():
    @dataclass
    class Point:
        x: int

    def back(kind: str):
        return {"text": "as it is", "none": None, "data": Point(1), "model": Place(city="a"), "set": {1}}[kind]

    tool = pippin.Tool(back)
    kinds = ("text", "none", "data", "model", "set")
    assert [tool.call({"kind": kind}) for kind in kinds] == [
        "as it is",
        "null",
        '{"x":1}',
        '{"city":"a","country":"IT"}',
        "[1]",
    ]


def test_a_tool_that_raises_gives_its_error_as_the_cause():
    @pippin.tool
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ToolCallError, match="tool 'divide' raised ZeroDivisionError") as caught:
        divide.call({"a": 1, "b": 0})
    assert isinstance(caught.value.cause, ZeroDivisionError)
    assert caught.value.tool == "divide"
    assert caught.value.arguments == {"a": 1, "b": 0}


def test_a_tool_that_never_returns_is_given_up():
    end, returned = threading.Event(), []

    @pippin.tool
    def forever() -> None:
        end.wait(60)
        returned.append(True)

    with pytest.raises(ToolCallError, match=r"no result within 0\.05 seconds") as caught:
        forever.call({}, timeout=0.05)
    assert not returned
    end.set()
    assert isinstance(caught.value.cause, TimeoutError)


def test_a_result_without_json_form_is_an_error():
    @pippin.tool
    def odd() -> object:
        return object()

    with pytest.raises(ToolCallError, match="returned a object, which has no JSON form"):
        odd.call({})


@pytest.mark.parametrize("arguments", [{"place": {}}, {"days": 3}, {"place": {"city": "a"}, "days": 8}, {"what": 1}])
def test_arguments_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ToolCallError, match="arguments that do not fit"):
        weather.call(arguments)


def test_functions_that_cannot_be_tools_are_refused_when_declared():
    with pytest.raises(InvalidTool, match="'<lambda>' is not a name"):
        pippin.tool(lambda: 1)
    with pytest.raises(InvalidTool, match="cannot be given by name"):
        exec_tool("def f(*xs: int): ...")
    with pytest.raises(InvalidTool, match="argument 'x' has no type"):
        exec_tool("def f(x): ...")
    with pytest.raises(InvalidTool, match="cannot be read"):
        exec_tool("def f(x: 'Missing'): ...")
    with pytest.raises(InvalidTool, match="into Annotated"):
        exec_tool("from pydantic import Field\ndef f(x: int = Field(ge=1)): ...")
    with pytest.raises(InvalidTool, match="not a name"):
        pippin.Tool(weather.function, name="get weather")
    with pytest.raises(InvalidTool, match="two tools are named 'weather'"):
        as_tools([weather, weather.function])


def exec_tool(source: str) -> pippin.Tool:
    space: dict = {}
    exec(source, space)
    return pippin.tool(space["f"])


def test_a_constraint_that_cannot_be_enforced_is_refused_with_the_tool_and_the_argument():
    with pytest.raises(UnsupportedGuide, match=r"tool 'f'.*\bx\b"):

        @pippin.tool
        def f(x: Annotated[bool, Field(multiple_of=2)]) -> int:
            return x

    with pytest.raises(SchemaError, match="tool 'g'"):

        @pippin.tool
        def g(x: Annotated[int, Field(ge=3, le=2)]) -> int:
            return x


def test_validators_of_arguments_run_before_the_function():
    def even(value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value // 2

    @pippin.tool
    def half(x: Annotated[int, AfterValidator(even)]) -> int:
        return x

    assert half.call({"x": 6}) == "3"
    with pytest.raises(ToolCallError, match="3 is odd"):
        half.call({"x": 3})


def test_decisions():
    assert Hooks().decide("on_tool_call", CALL) == pippin.Allow()
    assert Hooks(on_tool_call=lambda call: pippin.Deny("no")).decide("on_tool_call", CALL).reason == "no"
    with pytest.raises(InvalidArgument, match="must return Allow, Deny or Replace, got True"):
        Hooks(on_tool_call=lambda call: True).decide("on_tool_call", CALL)


def test_a_strict_tool_of_a_schema_has_nothing_that_is_ignored():
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimun": 3}}, "required": ["n"]}
    assert Tool.from_schema("count", "Counts.", schema, lambda n: n).call({"n": 2}) == "2"
    with pytest.raises(UnsupportedGuide, match="did you mean 'minimum'"):
        Tool.from_schema("count", "Counts.", schema, lambda n: n, strict=True)
